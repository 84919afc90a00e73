"""Plans to and from folded dims: under the shape that the dims had before they were folded, every rank holds a box.

So a folded tensor is unfolded (no communication), redistributed as any other, and folded again.  Where the other end
cannot be seen under that shape, the folded dims are gathered on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from operator import mul

from ..chunks import Cut
from ..folded import AnyCut, FoldedCut
from ..placements import Replicate
from ..spec import Spec, TensorMeta, spec_of_cuts
from .steps import Plan, Reshape, Step

__all__ = ["joined", "plain", "plan_folded", "unfolded"]

Planner = Callable[[Spec, Spec], Plan]
Frame = list[tuple[int, ...]]  # for every dim the sizes of the dims that it is seen as


def plan_folded(src: Spec, dst: Spec, within: Planner) -> Plan:
    """The plan between two specs of which one at least is folded.

    Args:
        src: where to start.
        dst: where to end: same mesh, shape and dtype.
        within: plans between specs, folded or not.
    """
    for spec in (src, dst):
        one, two = _seen(src, _frame(spec)), _seen(dst, _frame(spec))
        if spec.folded and one is not None and two is not None:
            return _framed(src, dst, one, two, within(one, two))
    between = plain(src, [d for d in range(src.ndim) if isinstance(src.cuts[d], FoldedCut) or _is_folded(dst, d)])
    return joined(within(src, between), within(between, dst))


def plain(spec: Spec, dims: Sequence[int] | None = None) -> Spec:
    """`spec` with some dims (the folded ones, when left out) held whole by every rank."""
    chosen = [d for d in range(spec.ndim) if _is_folded(spec, d)] if dims is None else dims
    axes = {axis for d in chosen for axis in spec.cuts[d].axes}
    return spec.with_(placements=[Replicate() if a in axes else p for a, p in enumerate(spec.placements)])


def unfolded(spec: Spec) -> Spec:
    """The spec of the same memory with the dims that were folded, of which every rank holds a box."""
    found = _seen(spec, _frame(spec))
    assert found is not None, "the cuts of a folded dim are those of the dims that it was folded of"
    return found


def joined(first: Plan, second: Plan) -> Plan:
    """One plan after another."""
    peak = max(first.peak_bytes, second.peak_bytes)
    seconds, sent = first.seconds + second.seconds, first.bytes_sent + second.bytes_sent
    floor = first.floor + second.floor
    return Plan(first.src, second.dst, (*first.steps, *second.steps), seconds, sent, peak, floor)


def _is_folded(spec: Spec, dim: int) -> bool:
    return isinstance(spec.cuts[dim], FoldedCut)


def _frame(spec: Spec) -> Frame:
    """What the dims of a spec were before they were folded."""
    return [cut.shape if isinstance(cut, FoldedCut) else (n,) for cut, n in zip(spec.cuts, spec.shape, strict=True)]


def _framed(src: Spec, dst: Spec, one: Spec, two: Spec, inner: Plan) -> Plan:
    """`inner` between two changes of shape."""
    before: tuple[Step, ...] = () if one is src else (Reshape(src=src, dst=one, peak_bytes=0),)
    after: tuple[Step, ...] = () if two is dst else (Reshape(src=two, dst=dst, peak_bytes=0),)
    steps = (*before, *inner.steps, *after)
    return Plan(src, dst, steps, inner.seconds, inner.bytes_sent, inner.peak_bytes, inner.floor)


def _seen(spec: Spec, frame: Frame) -> Spec | None:
    """The same placement of the same elements under the frame's shape; None if ranks would hold no boxes there."""
    cuts: list[Cut | None] = []
    stride: list[int] = []
    for cut, step, sizes in zip(spec.cuts, spec.stride, frame, strict=True):
        found = _unfolded(cut, sizes)
        if found is None:
            return None
        cuts += found
        stride += [step * prod(sizes[i + 1 :]) for i in range(len(sizes))]
    shape = tuple(n for sizes in frame for n in sizes)
    return spec_of_cuts(spec.mesh, cuts, spec.partials, TensorMeta(shape, tuple(stride), spec.dtype))


def _unfolded(cut: AnyCut, sizes: tuple[int, ...]) -> list[Cut | None] | None:
    """How the dims of `sizes`, which fold into one that is cut so, are cut themselves."""
    levels = dict(cut.levels) if isinstance(cut, FoldedCut) else ({1: cut} if cut.axes else {})
    found: list[Cut | None] = []
    before = [1, *accumulate(sizes, mul)][:-1]
    for i, runs in enumerate(before):
        level = levels.pop(runs, None)
        made = level.divided(prod(sizes[i + 1 :])) if level is not None else None
        if level is not None and made is None:
            return None
        found.append(made)
    return None if levels else found
