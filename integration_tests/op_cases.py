"""One rank's part of the operator sweep: it runs a sample's cases in step with the other ranks.

A case is one sample of an operator with placements for each of its tensors, on a mesh of 4 or of 2
x 2 ranks. Its verdict is one letter: `l`, `r`, `g` right (without collectives, with reductions
only, with values gathered or exchanged), `w` wrong, `f` an error, `i` a write that was refused,
because it would have had to change how the written tensor is placed. All ranks walk the same cases
in step: after each case they meet, so that an error on some of them, while the others wait in a
collective, costs this case and no other.
"""

from __future__ import annotations

import faulthandler
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count, islice
from typing import Any, TextIO

import torch
from integration_tests.op_systems import Shoal, System, Torch, spread
from integration_tests.op_verdicts import Sample, arguments_of, combinations_of, tensors_of

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
_MEETINGS = count()  # of the ranks, after each case
# seconds: all ranks do the same work, so that who is later than this waits for ever
_LATE = 10.0
# instead of 5 elements in a dim, which four ranks cannot share evenly
ENLARGED = 8


@dataclass(frozen=True)
class Part:
    """Some cases of an entry.

    Attributes:
        name: `main`, `even`, `inplace` or a dtype.
        dtype: the samples' dtype; the first of `DTYPES` that the operator takes when left out.
        samples: at most so many samples, evenly spread.
        cases: at least so many cases in all, by as many placements per sample as that takes.
        each: placements per sample.
        every: not samples with some placements, but one sample with all combinations of its
            tensors' placements on the mesh of one axis, the one that has most of them, up to this
            many.
        start, stop: of the samples chosen, only these.
        skip: of their cases, not so many at the beginning.
    """

    name: str
    dtype: str = ""
    samples: int = sys.maxsize
    cases: int = 0
    each: int = 2
    every: int = 0
    start: int = 0
    stop: int = sys.maxsize
    skip: int = 0


@dataclass
class Answer:
    """One rank's verdicts of a part: the number of samples, a letter per case, the findings."""

    samples: int
    letters: str
    notes: list[str]


@lru_cache(maxsize=2)
def _system(peer: bool) -> System:
    return Torch() if peer else Shoal()


def entry(name: str, variant: str) -> Any:
    """Torch's description of an operator."""
    return _entries()[name, variant]


@lru_cache(maxsize=1)
def _entries() -> dict[tuple[str, str], Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {(op.name, op.variant_test_name): op for op in op_db}


def dtype_of(info: Any, part: Part) -> torch.dtype | None:
    """The dtype of a part's samples; None if the operator does not take it."""
    supported = info.supported_dtypes("cpu")
    if part.dtype:
        dtype: torch.dtype = getattr(torch, part.dtype)
        return dtype if dtype in supported else None
    return next((d for d in DTYPES if d in supported), None)


@lru_cache(maxsize=2)
def _samples(name: str, variant: str, dtype: torch.dtype, enlarged: bool, limit: int) -> list[Any]:
    """The samples of an entry that have dense tensors; the same on every rank."""
    info = entry(name, variant)
    torch.manual_seed(0)
    random.seed(0)
    needs_grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with _larger() if enlarged else _as_they_are():
        # Not `sample_inputs`: that walks the whole call stack for every sample, looking for a test
        # of torch's own.
        return [
            s
            for s in islice(info.sample_inputs_func(info, "cpu", dtype, needs_grad), limit)
            if _dense(s)
        ]


def _dense(sample: Any) -> bool:
    tensors = tensors_of(arguments_of(sample))
    return bool(tensors) and all(t.layout is torch.strided for t in tensors)


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield


@contextmanager
def _larger() -> Iterator[None]:
    """Inside the block, torch's size of a small dim is one that ranks can share evenly."""
    home = "torch.testing._internal."
    modules = [
        m
        for n, m in sys.modules.items()
        if n.startswith((f"{home}common_methods", f"{home}opinfo"))
    ]
    having = [(m, m.S) for m in modules if isinstance(getattr(m, "S", None), int)]
    try:
        for module, _ in having:
            module.S = ENLARGED  # type: ignore[attr-defined]  # it has one
        yield
    finally:
        for module, size in having:
            module.S = size  # type: ignore[attr-defined]  # it has one


def sweep_part(
    name: str,
    variant: str,
    part: Part,
    *,
    peer: bool = False,
    patience: float = 120.0,
    progress: str = "",
) -> Answer:
    """On a rank: the cases of a part of an entry.

    Args:
        name, variant: of the entry.
        part: which cases.
        peer: test torch's own DTensor.
        patience: seconds for a case, after which the rank ends itself.
        progress: a file in which rank 0 writes each case before it runs and its letter after it, a
            line a case, so that they survive its end.

    Raises:
        OutOfStep: this rank has finished a case and the others have not for long.
    """
    warnings.simplefilter("ignore")
    with open(
        progress if progress and torch.distributed.get_rank() == 0 else os.devnull, "w"
    ) as done:
        return _walk(entry(name, variant), _system(peer), part, patience, done)


def _walk(info: Any, system: System, part: Part, patience: float, done: TextIO) -> Answer:
    answer = Answer(0, "", [])
    chosen = _chosen(info, system, part)
    answer.samples = len(chosen)
    each = max(part.each, -(-part.cases // max(len(chosen), 1)))
    walked = 0
    for number, sample in list(enumerate(chosen))[part.start : part.stop]:
        tried = Sample(system, info, sample, inplace=part.name == "inplace")
        seed = f"{info.name}.{info.variant_test_name}/{part.name}/{number}"
        for mesh, placements in (
            tried.every(part.every, seed) if part.every else tried.some(each, seed, number)
        ):
            walked += 1
            if walked <= part.skip:
                continue
            done.write(tried.described(mesh, placements))
            done.flush()
            with in_step(patience):
                answer.letters += tried.verdict(mesh, placements, answer.notes)
            done.write(f"\t{answer.letters[-1]}\n")
    return answer


def _chosen(info: Any, system: System, part: Part) -> list[Any]:
    """The samples of a part."""
    dtype = dtype_of(info, part)
    if dtype is None or (part.name == "inplace" and info.get_inplace() is None):
        return []
    limit = sys.maxsize if part.every or part.samples == sys.maxsize else 4 * part.samples
    try:
        found = _samples(info.name, info.variant_test_name, dtype, part.name == "even", limit)
    except Exception:
        # torch's sample functions with other sizes than they were written for
        if part.name != "even":
            raise
        return []
    if part.every and found:
        counts = [combinations_of(system, info, sample) for sample in found]
        most = max((count for count in counts if count <= part.every), default=min(counts))
        return [found[counts.index(most)]]
    return [found[i] for i in spread(len(found), part.samples)]


class OutOfStep(Exception):
    """The other ranks have not finished a case."""


@contextmanager
def in_step(patience: float) -> Iterator[None]:
    """A case that all ranks finish before the next begins.

    This process ends if it takes longer than `patience`.
    """
    faulthandler.dump_traceback_later(patience, exit=True)
    yield
    store, meeting = torch.distributed.distributed_c10d._get_default_store(), next(_MEETINGS)
    if store.add(f"case{meeting}", 1) == torch.distributed.get_world_size():
        store.set(f"case{meeting}.done", "")
    try:
        store.wait([f"case{meeting}.done"], timedelta(seconds=_LATE))
    except torch.distributed.DistStoreError:
        raise OutOfStep(
            f"this rank had finished the case; others had not {_LATE:g} s later"
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
