"""What one rank does in the operator sweep: samples, their placements, the run on one device and on the mesh, verdicts.

A case is one sample of an operator with placements for each of its tensors, on a mesh of 4 or of 2 x 2 ranks.  Its
verdict is one letter: `l`, `r`, `g` right (without collectives, with reductions only, with values gathered or
exchanged), `w` wrong, `f` an error, `i` a write that was refused, because it would have had to change how the
written tensor lies.  All ranks walk the same cases in step.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from integration_tests.op_systems import MESHES, ON_HOST, Placements, Shoal, System, Torch, letter, spread
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
# Results without meaning: only shapes are compared.
UNDEFINED = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_")
# Sorts that need not be stable: which of equal elements comes first is open, and with it which of them gets a gradient.
TIES = ("sort", "msort")
TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
ENLARGED = 8  # instead of 5 elements in a dim, which four ranks cannot share evenly


@dataclass(frozen=True)
class Part:
    """Some cases of an entry.

    Attributes:
        name: `main`, `even`, `inplace` or a dtype.
        dtype: the samples' dtype; the first of `DTYPES` that the operator takes when left out.
        samples: at most so many samples, evenly spread.
        cases: at least so many cases in all, by as many placements per sample as that takes.
        meshes: shapes of the meshes, in turn.
        start, stop: of the samples chosen, only these.
    """

    name: str
    dtype: str = ""
    samples: int = sys.maxsize
    cases: int = 0
    each: int = 2
    start: int = 0
    stop: int = sys.maxsize


@dataclass
class Answer:
    """One rank's verdicts of a part: the number of samples that there were, a letter per case, the findings."""

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


def writes(name: str) -> bool:
    """Whether the operator of an entry writes to arguments by its schema (running statistics, for one)."""
    packet = getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet is not None else []
    arguments = [a for schema in schemas if not schema.name.endswith("_") for a in schema.arguments]
    return any(a.alias_info is not None and a.alias_info.is_write and not a.is_out for a in arguments)


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
        return [s for s in islice(info.sample_inputs("cpu", dtype, requires_grad=needs_grad), limit) if _dense(s)]


def _dense(sample: Any) -> bool:
    tensors = _tensors(_arguments(sample))
    return bool(tensors) and all(t.layout is torch.strided for t in tensors)


def _arguments(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


def _tensors(arguments: Any) -> list[Tensor]:
    return [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]


@contextmanager
def _as_they_are() -> Iterator[None]:
    yield


@contextmanager
def _larger() -> Iterator[None]:
    """Inside the block, torch's constant for the size of a small dim is one that ranks can share evenly."""
    home = "torch.testing._internal."
    modules = [m for n, m in sys.modules.items() if n.startswith((f"{home}common_methods", f"{home}opinfo"))]
    having = [(m, m.S) for m in modules if isinstance(getattr(m, "S", None), int)]
    try:
        for module, _ in having:
            module.S = ENLARGED  # type: ignore[attr-defined]  # it has one
        yield
    finally:
        for module, size in having:
            module.S = size  # type: ignore[attr-defined]  # it has one


def sweep_parts(name: str, variant: str, parts: Sequence[Part], peer: bool = False, progress: str = "") -> list[Answer]:
    """On a rank: the cases of some parts of an entry.

    Args:
        name, variant: of the entry.
        parts: which cases.
        peer: test torch's own DTensor.
        progress: a file to which rank 0 writes its letters as it goes, so that they survive a crash.
    """
    warnings.simplefilter("ignore")
    return [_sweep_part(name, variant, part, peer, progress) for part in parts]


def _sweep_part(name: str, variant: str, part: Part, peer: bool, progress: str) -> Answer:
    info, system = entry(name, variant), _system(peer)
    dtype = dtype_of(info, part)
    function = info.get_inplace() if part.name == "inplace" else info.get_op()
    answer = Answer(0, "", [])
    if dtype is None or function is None:
        return answer
    try:
        limit = sys.maxsize if part.samples == sys.maxsize else 4 * part.samples
        every = _samples(name, variant, dtype, part.name == "even", limit)
    except Exception:  # torch's sample functions with other sizes than they were written for
        if part.name != "even":
            raise
        return answer
    chosen = [every[i] for i in spread(len(every), part.samples)]
    answer.samples = len(chosen)
    each = max(part.each, -(-part.cases // max(len(chosen), 1)))
    for number, sample in list(enumerate(chosen))[part.start : part.stop]:
        if part.name == "inplace" and sample.broadcasts_input:
            continue
        tried = _Sample(system, function, sample, inplace=part.name == "inplace", exact=name not in UNDEFINED)
        tried.writes = tried.inplace or writes(name)
        tried.ties = name in TIES and not tried.inplace
        tried.placed = ON_HOST.get(name, len(tried.tensors))
        for mesh, placements in tried.combinations(each, f"{name}.{variant}/{part.name}/{number}", number):
            verdict = tried.verdict(mesh, placements, answer.notes)
            answer.letters += verdict
            if progress and verdict and torch.distributed.get_rank() == 0:
                with Path(progress).open("a") as file:
                    file.write(verdict)
    return answer


class _Run(NamedTuple):
    """What a call gave: its outputs, what of them is well defined, the gradients of the inputs."""

    outputs: list[Any]
    defined: list[Any]
    gradients: list[Any]


class _Sample:
    """One sample, with the single device's answer computed once."""

    def __init__(
        self, system: System, function: Callable[..., Any], sample: Any, *, inplace: bool, exact: bool
    ) -> None:
        self.system, self.function, self.inplace, self.exact = system, function, inplace, exact
        self.arguments = _arguments(sample)
        self.tensors = _tensors(self.arguments)
        self.ties = False
        self.placed = len(self.tensors)  # how many of them are laid out
        self.defined = sample.output_process_fn_grad
        self.writes = inplace  # whether the call may be refused
        self.written: list[int] = []  # which tensors the call writes to: their values afterwards count as outputs
        fresh = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), self.arguments)
        versions = [t._version for t in _tensors(fresh)]
        try:
            self.expected: _Run | None = self._run(fresh, None)
            self.written = [i for i, t in enumerate(_tensors(fresh)) if t._version != versions[i]]
            self.expected.outputs.extend(_tensors(fresh)[i].detach() for i in self.written)
        except Exception:  # the sample is not for this call
            self.expected = None

    def combinations(self, each: int, seed: str, number: int) -> Iterator[tuple[tuple[int, ...], Sequence[Placements]]]:
        """Meshes and placements for all tensors: all alike, one alone, any; always the same ones for a sample."""
        draw = random.Random(seed)
        if self.expected is None:
            return
        flat = each - (each + number % 3) // 3  # two thirds on the one axis, the rest on two; single cases take turns
        for mesh, share in zip(MESHES, (flat, each - flat), strict=True):
            yield from ((mesh, drawn) for drawn in self._drawn(mesh, share, draw))

    def _drawn(self, mesh: tuple[int, ...], share: int, draw: random.Random) -> list[tuple[Placements, ...]]:
        options = [self.system.options(t, mesh) for t in self.tensors[: self.placed]]
        seen: dict[tuple[Placements, ...], None] = {}
        for attempt in range(4 * share):
            if attempt % 3 == 0:  # all alike: what programs do
                at = draw.randrange(max(map(len, options)))
                drawn = [o[at % len(o)] for o in options]
            elif attempt % 3 == 1:  # one alone
                at = draw.randrange(len(options))
                drawn = [draw.choice(o) if i == at else o[0] for i, o in enumerate(options)]
            else:
                drawn = [draw.choice(o) for o in options]
            seen.setdefault(tuple(drawn))
        return list(seen)[:share]

    def verdict(self, mesh: tuple[int, ...], placements: Sequence[Placements], notes: list[str]) -> str:
        numbered = iter(placements)
        told = f"{[tuple(t.shape) for t in self.tensors]} {['/'.join(map(str, p)) for p in placements]}"

        def place(tensor: Tensor) -> Any:
            layout = next(numbered, None)
            return tensor if layout is None else self.system.place(tensor, layout, mesh)

        try:
            placed = tree_map_only(Tensor, place, self.arguments)
            with self.system.counted() as counter:
                got = self._run(placed, mesh)
            got.outputs.extend(_tensors(placed)[i].detach() for i in self.written)
            settled = self.system.whole_of if self.ties else self.system.settled
            got = _Run(*([settled(o) for o in outputs] for outputs in got))
            problem = self._difference(got)
            problem = "" if self.ties and self._sorts_like(got) else problem
        except Exception as error:  # whatever it raises is the finding
            if self.writes and self.system.refuses(error):
                return "i"
            return _noted(notes, "f", f"{told} {type(error).__name__}: {str(error)[:300]}")
        return _noted(notes, "w", f"{told} {problem}") if problem else letter(counter)

    def _run(self, arguments: Any, mesh: tuple[int, ...] | None) -> _Run:
        """Outputs and gradients of the inputs; on the mesh, the outputs' gradients are laid out."""
        wanted = [t for t in _tensors(arguments) if t.requires_grad]
        first, args, kwargs = arguments
        torch.manual_seed(1)
        random.seed(1)
        made = self.function(first.clone() if self.inplace else first, *args, **kwargs)
        outputs, defined = tree_leaves(made), tree_leaves(self.defined(made))
        rooted = [o for o in defined if isinstance(o, Tensor) and o.requires_grad]
        if rooted and wanted:
            seeds: list[Any] = [_cotangent(o.shape, o.dtype) for o in rooted]
            if mesh is not None:
                seeds = [self.system.place_like(s, o) for s, o in zip(seeds, rooted, strict=True)]
            torch.autograd.backward(rooted, seeds, inputs=wanted)
        gradients = [t.grad for t in wanted] if rooted else []
        return _Run([_detached(o) for o in outputs], [_detached(o) for o in defined], gradients)

    def _difference(self, got: _Run) -> str:
        """The first thing in which two runs differ; empty if they agree.

        Outputs must be the same.  Where they are not, as eigenvectors of one matrix may differ in phase, what torch's
        database calls well defined of them must be, and the gradients that it has.
        """
        assert self.expected is not None, "a sample without an answer has no cases"
        return (
            self._first("output", self.expected.outputs, got.outputs)
            and self._first("output", self.expected.defined, got.defined)
        ) or self._first("gradient", self.expected.gradients, got.gradients)

    def _sorts_like(self, got: _Run) -> bool:
        """Whether a sort is right: the values, indices that give these values, gradients up to equal elements."""
        assert self.expected is not None, "a sample without an answer has no cases"
        x, args, kwargs = self.tensors[0].detach(), self.arguments[1], self.arguments[2]
        dim = kwargs.get("dim", next((a for a in args if type(a) is int), -1)) if self.expected.outputs[1:] else 0

        def by_value(gradient: Tensor) -> Tensor:
            ordered, places = gradient.sort(dim)
            return ordered.gather(dim, x.gather(dim, places).sort(stable=True, dim=dim)[1])

        right = torch.equal(got.outputs[0], self.expected.outputs[0])
        for indices in got.outputs[1:]:
            right &= torch.equal(x.gather(dim, indices), got.outputs[0])
            right &= torch.equal(indices.sort(dim)[0], torch.zeros_like(x).argsort(stable=True, dim=dim))
        for one, other in zip(self.expected.gradients, got.gradients, strict=True):
            right &= _alike(by_value(one), by_value(other))
        return right

    def _first(self, kind: str, ones: list[Any], others: list[Any]) -> str:
        if len(ones) != len(others):
            return f"{len(others)} {kind}s, should be {len(ones)}"
        told = ((i, self._unlike(one, other)) for i, (one, other) in enumerate(zip(ones, others, strict=True)))
        return next((f"{kind} {i}: {text}" for i, text in told if text), "")

    def _unlike(self, one: Any, other: Any) -> str:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if isinstance(one, float) and isinstance(other, float):
                one, other = torch.tensor(one), torch.tensor(other)
            elif one is None or isinstance(one, Tensor) or isinstance(other, Tensor):
                return "" if one is other else f"{other}, should be {one}"
            else:
                return "" if one == other else f"{other}, should be {one}"
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{tuple(other.shape)} {other.dtype}, should be {tuple(one.shape)} {one.dtype}"
        one, other = self.system.part_of(one, other)
        if one.shape != other.shape:
            return f"a part of shape {tuple(other.shape)}, should be {tuple(one.shape)}"
        if not self.exact or one.layout is not torch.strided or _alike(one, other):
            return ""
        return f"{other.flatten()[:6].tolist()}, should be {one.flatten()[:6].tolist()}"


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether values agree: closely, in small dtypes as far as the order of a sum of the largest values shows."""
    relative = TOLERANCE.get(one.dtype, 1e-6)
    absolute = relative / 10 if one.dtype in (torch.float32, torch.complex64) else 1e-8
    if one.dtype in (torch.float16, torch.bfloat16) and one.numel():
        largest = one.abs().nan_to_num(0, 0, 0).max().item()
        absolute = relative * max(largest, 1.0)
    return torch.allclose(one, other, rtol=relative, atol=absolute, equal_nan=True)


def _noted(notes: list[str], verdict: str, text: str) -> str:
    print(text, flush=True)  # what a rank printed is shown if it dies
    if len(notes) < 8:
        notes.append(text)
    return verdict


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cotangent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(2))
