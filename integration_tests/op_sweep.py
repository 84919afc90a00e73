"""Every operator of torch's database, for every sharding of its inputs, on 4 ranks against the single device.

    python integration_tests/op_sweep.py                      # all operators; writes docs/op_coverage.md
    python integration_tests/op_sweep.py --only softmax -v    # those whose name contains it, with what went wrong
    python integration_tests/op_sweep.py --peer               # the same on torch's own DTensor, beside the last figures

A case is one sample of an operator with one placement per tensor: replicated, cut along any dim (the samples' sizes
make most cuts uneven, many with empty shards), cut raggedly, or partial.  It is right if the outputs and the gradients
of all inputs are those of the single device; it is local if neither forward nor backward ran a collective.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).resolve().parent.parent
RANKS = 4
PEER = ROOT / "out" / "op_sweep_peer.txt"  # the last figures of torch's own, for the page
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
# Results without meaning: only shapes are compared.
UNDEFINED = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_")


@dataclass
class Result:
    """What became of one operator's cases.

    Attributes:
        name: of the operator.
        right: cases with the single device's answer.
        local: those of them that ran no collective.
        wrong: cases with another answer.
        failed: cases that raised an error.
        refused: in-place writes that raised `InPlaceError`: the documented answer where a layout cannot stay.
        notes: the first findings.
    """

    name: str
    right: int = 0
    local: int = 0
    wrong: int = 0
    failed: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.right > 0 and not self.wrong and not self.failed


class Shoal:
    """shoal as the system under test."""

    def __init__(self) -> None:
        import shoal_dtensor
        from shoal_mesh import CommDebugMode, init_device_mesh

        self.mesh, self.counter = init_device_mesh("cpu", (RANKS,)), CommDebugMode
        self.kind: Any = shoal_dtensor.DTensor
        self.make = shoal_dtensor.distribute_tensor
        self.shard: Any = shoal_dtensor.Shard
        self.whole, self.partial = shoal_dtensor.Replicate(), shoal_dtensor.Partial()

    def options(self, tensor: Tensor) -> list[Any]:
        """The placements to try for a tensor."""
        found: list[Any] = [self.whole]
        for dim, n in enumerate(tensor.shape):
            found.append(self.shard(dim))
            if n > 2:
                found.append(self.shard(dim, sizes=(n - 2, 0, 2, 0)))
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            found.append(self.partial)
        return found

    def place(self, tensor: Tensor, placement: Any) -> Any:
        """A global tensor laid out; partial ones as equal exact parts."""
        if placement.is_partial():
            made = self.kind.from_local(tensor.detach() / RANKS, self.mesh, [placement], run_check=False)
        else:
            made = self.make(tensor.detach().clone(), self.mesh, [placement], src_data_rank=None)
        return made.requires_grad_(tensor.requires_grad)


class Torch(Shoal):
    """torch's own DTensor, the peer."""

    def __init__(self) -> None:
        from torch.distributed import tensor as peer
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.debug import CommDebugMode

        self.mesh, self.counter = init_device_mesh("cpu", (RANKS,)), CommDebugMode  # type: ignore[assignment]  # the peer
        self.kind, self.make = peer.DTensor, peer.distribute_tensor  # type: ignore[assignment]  # the peer's
        self.shard, self.whole, self.partial = peer.Shard, peer.Replicate(), peer.Partial()  # type: ignore[assignment]  # the peer's

    def options(self, tensor: Tensor) -> list[Any]:
        found = [self.whole, *(self.shard(dim) for dim in range(tensor.ndim))]
        return [*found, self.partial] if tensor.dtype.is_floating_point or tensor.dtype.is_complex else found


def sweep_one(name: str, variant: str, peer: bool, samples: int, combinations: int, inplace: bool) -> dict[str, Any]:
    """On a rank: all cases of one operator; every rank comes to the same counts."""
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    (info,) = [op for op in op_db if op.name == name and op.variant_test_name == variant]
    system = Torch() if peer else Shoal()
    result = Result(f"{name}{'.' + variant if variant else ''}")
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)  # type: ignore[no-untyped-call]  # torch's operator database is untyped
    if dtype is None:
        return asdict(result)
    torch.manual_seed(0)
    needs_grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    found = list(info.sample_inputs("cpu", dtype, requires_grad=needs_grad))  # type: ignore[no-untyped-call]  # torch's operator database is untyped
    function = info.get_inplace() if inplace else info.get_op()  # type: ignore[no-untyped-call]  # torch's operator database is untyped
    for sample in found[:: max(1, len(found) // samples)][:samples] if function is not None else ():
        if inplace and sample.broadcasts_input:
            continue
        arguments = (sample.input, sample.args, sample.kwargs)
        for placements in _combinations(system, arguments, combinations):
            _try_case(system, function, arguments, placements, result, inplace=inplace, exact=name not in UNDEFINED)
    return asdict(result)


def _combinations(system: Shoal, arguments: Any, limit: int) -> Iterator[Sequence[Any]]:
    """Placements for all tensors: each alone, all alike, then a fair sample of the rest; always the same ones."""
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    options = [system.options(t) for t in tensors]
    if not tensors or any(t.layout is not torch.strided for t in tensors):
        return
    alike = [[o[min(k, len(o) - 1)] for o in options] for k in range(max(map(len, options)))]
    alone = [
        [o if i == j else options[j][0] for j in range(len(options))] for i in range(len(options)) for o in options[i]
    ]
    chosen = list(dict.fromkeys(tuple(c) for c in alike))
    rest = list(dict.fromkeys(tuple(c) for c in alone)) if len(options) < 6 else []
    if len(options) < 4:
        rest += list(product(*options))
    random.Random(0).shuffle(rest)
    yield from list(dict.fromkeys(chosen[:limit] + rest))[:limit]


def _try_case(
    system: Shoal,
    function: Callable[..., Any],
    arguments: Any,
    placements: Sequence[Any],
    result: Result,
    *,
    inplace: bool,
    exact: bool,
) -> None:
    numbered = iter(placements)
    expected = _run(function, arguments, inplace)
    if expected is None:
        return
    told = f"{[tuple(t.shape) for t in tree_leaves(arguments) if isinstance(t, Tensor)]} {list(map(str, placements))}"
    try:
        placed = tree_map_only(Tensor, lambda t: system.place(t, next(numbered)), arguments)
        with system.counter() as counter:
            got = _run(function, placed, inplace, system, strict=True)
        assert got is not None, "strict runs raise"
        problem = _difference(system, expected, got, exact)
    except Exception as error:  # whatever it raises is the finding
        if type(error).__name__ == "InPlaceError":
            result.refused += 1
            return
        result.failed += 1
        _note(result, f"{told} {type(error).__name__}: {str(error)[:300]}")
        return
    if problem:
        result.wrong += 1
        _note(result, f"{told} {problem}")
    else:
        result.right += 1
        result.local += not counter.get_total_counts()


def _note(result: Result, text: str) -> None:
    print(text, flush=True)  # what a rank printed is shown if it dies
    if len(result.notes) < 8:
        result.notes.append(text)


def _run(
    function: Callable[..., Any], arguments: Any, inplace: bool, system: Shoal | None = None, strict: bool = False
) -> tuple[list[Any], list[Any]] | None:
    """Outputs and gradients of the inputs; None if the sample is not for this call."""
    fresh = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), arguments)
    leaves = [t for t in tree_leaves(fresh) if isinstance(t, Tensor)]
    first, args, kwargs = fresh
    torch.manual_seed(1)
    try:
        if inplace:
            first = first.clone()
        made = function(first, *args, **kwargs)
    except Exception:
        if strict:
            raise
        return None
    outputs = tree_leaves(made)
    rooted = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not rooted or not wanted:
        return [_detached(o) for o in outputs], []
    seeds = [_cotangent(o.shape, o.dtype) for o in rooted]
    if system is not None:
        seeds = [
            system.place(s, system.whole) if isinstance(o, system.kind) else s
            for s, o in zip(seeds, rooted, strict=True)
        ]
    torch.autograd.backward(rooted, seeds, inputs=wanted)
    return [_detached(o) for o in outputs], [t.grad for t in wanted]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cotangent(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), dtype=dtype, generator=torch.Generator().manual_seed(2))


def _difference(system: Shoal, expected: Any, got: Any, exact: bool) -> str:
    """The first thing in which two runs differ; empty if they agree."""
    for kind, ones, others in (("output", expected[0], got[0]), ("gradient", expected[1], got[1])):
        if len(ones) != len(others):
            return f"{len(others)} {kind}s, should be {len(ones)}"
        for i, (one, other) in enumerate(zip(ones, others, strict=True)):
            other = other.full_tensor() if isinstance(other, system.kind) else other
            text = _unlike(one, other, exact)
            if text:
                return f"{kind} {i}: {text}"
    return ""


def _unlike(one: Any, other: Any, exact: bool) -> str:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        same = one is other if one is None or isinstance(one, Tensor) or isinstance(other, Tensor) else one == other
        return "" if same or one != one else f"{other}, should be {one}"
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{tuple(other.shape)} {other.dtype}, should be {tuple(one.shape)} {one.dtype}"
    if not exact or one.layout is not torch.strided:
        return ""
    loose = one.dtype in (torch.float32, torch.complex64)
    close = torch.allclose(one, other, rtol=1e-4 if loose else 1e-6, atol=1e-5 if loose else 1e-8, equal_nan=True)
    return "" if close else f"{other.flatten()[:6].tolist()}, should be {one.flatten()[:6].tolist()}"


def sweep(only: str, *, peer: bool, samples: int, combinations: int, inplace: bool, verbose: bool) -> list[Result]:
    """All operators whose name contains `only`."""
    from torch.testing._internal.common_methods_invocations import op_db
    from tqdm import tqdm

    from shoal_mesh.testing import rank_pool

    pool = rank_pool(RANKS)
    results = []
    for info in tqdm([op for op in op_db if only in op.name], unit="op", disable=None):
        if inplace and info.get_inplace() is None:
            continue
        try:
            answers = pool.run(
                sweep_one, info.name, info.variant_test_name, peer, samples, combinations, inplace, timeout=180
            )
            merged = Result(**max(answers, key=lambda a: a["wrong"] + a["failed"]))
        except Exception as error:  # a hang or a crash is the finding
            merged = Result(info.name, failed=1, notes=[f"{type(error).__name__}: {str(error)[:6000]}"])
        results.append(merged)
        if verbose and not merged.good and (merged.wrong or merged.failed):
            print(f"{merged.name}: {merged.right} right, {merged.wrong} wrong, {merged.failed} failed")
            for note in merged.notes[:4]:
                print(f"    {note}")
    return results


def told(results: Sequence[Result]) -> str:
    """The figures in one paragraph."""
    tried = [r for r in results if r.right + r.wrong + r.failed]
    cases = Counter[str]()
    for r in tried:
        cases.update(right=r.right, wrong=r.wrong, failed=r.failed, local=r.local, refused=r.refused)
    total, good = cases["right"] + cases["wrong"] + cases["failed"], sum(r.good for r in tried)
    moved = 100 * (cases["right"] - cases["local"]) / max(cases["right"], 1)
    return (
        f"{good} of {len(tried)} entries ({100 * good / max(len(tried), 1):.1f} %) right in every case; "
        f"{cases['right']} of {total} cases right, {cases['wrong']} wrong, {cases['failed']} raised an error "
        f"({cases['refused']} in-place writes refused); {moved:.1f} % of the right cases ran a collective in forward "
        "or backward"
    )


def page(results: Sequence[Result], options: argparse.Namespace, peer: str) -> str:
    """docs/op_coverage.md."""
    lines = [
        "# Operator coverage",
        "",
        f"Written by `nox -s op_sweep` ({options.samples} samples per operator, {options.combinations} combinations of "
        f"placements per sample, {RANKS} gloo ranks, torch {torch.__version__}). A case is right if outputs and "
        "gradients of all inputs are those of a single device.",
        "",
        f"**shoal:** {told(results)}.",
        "",
        *([f"**torch's own DTensor, the same sweep:** {peer}.", ""] if peer else []),
        "## Entries with a case that is not right",
        "",
        "| entry | right | wrong | error | first finding |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        if r.wrong or r.failed:
            first = " ".join(r.notes[0].split())[:200].replace("|", "/") if r.notes else ""
            lines.append(f"| {r.name} | {r.right} | {r.wrong} | {r.failed} | `{first.replace('`', '')}` |")
    lines += ["", "## All entries", "", "| entry | right | of them local |", "|---|---|---|"]
    lines += [f"| {r.name} | {r.right} | {r.local} |" for r in results if r.good]
    skipped = [r.name for r in results if not r.right + r.wrong + r.failed]
    return "\n".join([*lines, "", f"Without a dense tensor input, so without cases: {', '.join(skipped)}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--peer", action="store_true", help="torch's own DTensor instead")
    parser.add_argument("--samples", type=int, default=4, help="samples per operator")
    parser.add_argument("--combinations", type=int, default=8, help="placements per sample")
    parser.add_argument("--inplace", action="store_true", help="the in-place forms")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", type=Path, help="write all results there")
    options = parser.parse_args()
    start = time.perf_counter()
    results = sweep(
        options.only,
        peer=options.peer,
        samples=options.samples,
        combinations=options.combinations,
        inplace=options.inplace,
        verbose=options.verbose,
    )
    print(f"{told(results)}; {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    target = ROOT / "docs" / "op_coverage.md"
    if options.peer and not options.only:
        PEER.parent.mkdir(parents=True, exist_ok=True)
        PEER.write_text(told(results))
    elif not options.only and not options.inplace:
        target.write_text(page(results, options, PEER.read_text() if PEER.exists() else ""))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
