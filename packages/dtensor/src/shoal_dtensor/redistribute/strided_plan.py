"""Plans to and from strided dims: under the shape before the reshape that made them, every rank holds a box.

    (batch 4, sequence 6), the sequence over 2 ranks, as one dim of 24:
        rank 0 holds elements 0 1 2, 6 7 8, 12 13 14, 18 19 20; as (4, 6) one box: rows 0 to 3, columns 0 to 2

So such a tensor gets that shape (no communication), is redistributed as any other, and gets its own shape again.  Where
the other end has no boxes under that shape, the strided dims are gathered on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING

from ..layout.dim_sharding import DimSharding
from ..layout.placements import Replicate
from ..layout.strided_dim import AnyDimSharding, StridedDimSharding
from .steps import Plan, Reshape, Step

if TYPE_CHECKING:
    from ..layout.spec import Spec


UnfoldedShape = list[tuple[int, ...]]  # for every dim the sizes of the dims that it is viewed as


def plan_strided(src: Spec, dst: Spec, within: Callable[[Spec, Spec], Plan]) -> Plan:
    """The plan between two specs of which one at least is folded.

    Args:
        src: where to start.
        dst: where to end: same mesh, shape and dtype.
        within: plans between specs, folded or not.
    """
    for spec in (src, dst):
        one, two = _viewed(src, _unfolded_shape(spec)), _viewed(dst, _unfolded_shape(spec))
        if spec.is_strided and one is not None and two is not None:
            return _between_views(src, dst, one, two, within(one, two))
    between = gather_strided(src, [d for d in range(src.ndim) if _is_strided(src, d) or _is_strided(dst, d)])
    return concatenated(within(src, between), within(between, dst))


def gather_strided(spec: Spec, dims: Sequence[int] | None = None) -> Spec:
    """`spec` with some dims (the folded ones, when left out) held whole by every rank."""
    chosen = [d for d in range(spec.ndim) if _is_strided(spec, d)] if dims is None else dims
    axes = {axis for d in chosen for axis in spec.dim_shardings[d].axes}
    return spec.with_(placements=[Replicate() if a in axes else p for a, p in enumerate(spec.placements)])


def unfold_spec(spec: Spec) -> Spec:
    """The spec of the same memory with the dims that were folded, of which every rank holds a box."""
    unfolded = _viewed(spec, _unfolded_shape(spec))
    assert unfolded is not None, "a strided dim is sharded as the dims that it was folded of"
    return unfolded


def concatenated(first: Plan, second: Plan) -> Plan:
    """One plan after another."""
    peak = max(first.peak_bytes, second.peak_bytes)
    seconds, sent = first.seconds + second.seconds, first.bytes_sent + second.bytes_sent
    return Plan(first.src, second.dst, (*first.steps, *second.steps), seconds, sent, peak)


def _is_strided(spec: Spec, dim: int) -> bool:
    return isinstance(spec.dim_shardings[dim], StridedDimSharding)


def _unfolded_shape(spec: Spec) -> UnfoldedShape:
    """What the dims of a spec were before they were folded."""
    return [
        sharding.shape if isinstance(sharding, StridedDimSharding) else (n,)
        for sharding, n in zip(spec.dim_shardings, spec.shape, strict=True)
    ]


def _between_views(src: Spec, dst: Spec, one: Spec, two: Spec, inner: Plan) -> Plan:
    """`inner` between two changes of shape."""
    before: tuple[Step, ...] = () if one is src else (Reshape(src=src, dst=one, peak_bytes=0),)
    after: tuple[Step, ...] = () if two is dst else (Reshape(src=two, dst=dst, peak_bytes=0),)
    steps = (*before, *inner.steps, *after)
    return Plan(src, dst, steps, inner.seconds, inner.bytes_sent, inner.peak_bytes, inner.floor)


def _viewed(spec: Spec, view: UnfoldedShape) -> Spec | None:
    """The same placement of the same elements under the view's shape; None if ranks would hold no boxes there."""
    shardings: list[DimSharding | None] = []
    stride: list[int] = []
    for sharding, step, sizes in zip(spec.dim_shardings, spec.stride, view, strict=True):
        unfolded = _unfold_dim(sharding, sizes)
        if unfolded is None:
            return None
        shardings += unfolded
        stride += [step * prod(sizes[i + 1 :]) for i in range(len(sizes))]
    shape = tuple(n for sizes in view for n in sizes)
    return spec.with_dim_shardings(shardings, shape, tuple(stride))


def _unfold_dim(sharding: AnyDimSharding, sizes: tuple[int, ...]) -> list[DimSharding | None] | None:
    """How the dims of `sizes`, which fold into one of this sharding, are sharded themselves."""
    levels = (
        dict(sharding.levels) if isinstance(sharding, StridedDimSharding) else ({1: sharding} if sharding.axes else {})
    )
    unfolded: list[DimSharding | None] = []
    before = [1, *accumulate(sizes, mul)][:-1]
    for i, runs in enumerate(before):
        level = levels.pop(runs, None)
        sharding_of_dim = level.divided(prod(sizes[i + 1 :])) if level is not None else None
        if level is not None and sharding_of_dim is None:
            return None
        unfolded.append(sharding_of_dim)
    return None if levels else unfolded
