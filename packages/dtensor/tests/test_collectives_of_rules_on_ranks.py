"""Operators that run on shards, forward and backward, and the collectives that they run.

Covers: rules/nn/{attention,norms}.py, rules/math/{reduction,pointwise}.py,
rules/index/gather_scatter.py, others. Each case equals the single device in float64, and what runs
on the way is reductions, or exchanges of border rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import observed, on_ranks

R, S0, S1, S2, S3 = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)


def real(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


class Case(NamedTuple):
    """An operator, its global tensors, their layout along a mesh axis, and allowed collectives."""

    run: Callable[..., Any]
    tensors: Sequence[Tensor]
    ways: Sequence[tuple[Any, ...]]
    allowed: tuple[str, ...] = ("all_reduce", "reduce_scatter")


def attend(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **options)


def bags(mode: str) -> Callable[..., Any]:
    return lambda table, indices: F.embedding_bag(indices, table, mode=mode, padding_idx=2)


def weighted_bags(table: Any, indices: Any, weights: Any) -> Any:
    return F.embedding_bag(indices, table, per_sample_weights=weights, mode="sum", padding_idx=2)


def segments(data: Any, lengths: Any) -> Any:
    return torch.segment_reduce(data, "mean", lengths=lengths)


def group_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.group_norm(x, 2, weight, bias)


def instance_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.instance_norm(x, weight=weight, bias=bias)


def bilinear(x: Any) -> Any:
    return F.interpolate(x, scale_factor=3, mode="bilinear")


def turned(x: Any, weight: Any, bias: Any) -> Any:
    return F.conv_transpose2d(x, weight, bias, stride=2, padding=1, output_padding=1)


def blocks(x: Any, weight: Any) -> Any:
    return F.conv_transpose2d(x, weight, stride=2)


BORDERS = ("all_reduce", "reduce_scatter", "all_to_all")
BAGS = (real(9, 6), torch.tensor([[0, 2, 8], [7, 7, 1], [2, 5, 3], [6, 0, 4]]))
HEADS = (real(2, 8, 5, 4), real(2, 4, 6, 4), real(2, 4, 6, 4, seed=1))
UNEVEN_HEADS = (real(2, 6, 5, 4), real(2, 3, 6, 4), real(2, 3, 6, 4, seed=1))
QUERIES = (real(2, 3, 9, 4), real(2, 3, 9, 4, seed=1), real(2, 3, 9, 4, seed=2))
RAGGED = Shard(2, sizes=(4, 0, 3, 2))

CASES = {
    "grouped heads": Case(attend(enable_gqa=True), HEADS, [(S1, S1, S1), (S0, S0, S0)]),
    "grouped heads, causal": Case(attend(enable_gqa=True, is_causal=True), HEADS, [(S1, S1, S1)]),
    "grouped heads, uneven": Case(
        attend(enable_gqa=True), UNEVEN_HEADS, [(Shard(1, multiple_of=2), S1, S1)]
    ),
    "queries in shards": Case(attend(), QUERIES, [(S2, R, R), (RAGGED, R, R)]),
    "queries in shards, causal": Case(
        attend(is_causal=True), QUERIES, [(S2, R, R), (RAGGED, R, R)]
    ),
    "queries in shards, masked": Case(
        attend(), (*QUERIES, real(9, 9)), [(S2, R, R, R), (S2, R, R, S0)]
    ),
    "bags by embedding dim": Case(bags("sum"), BAGS, [(S1, R)]),
    "bags by embedding dim, mean": Case(bags("mean"), BAGS, [(S1, R)]),
    "bags by embedding dim, max": Case(bags("max"), BAGS, [(S1, R)]),
    "bags by vocabulary": Case(bags("sum"), BAGS, [(S0, R)]),
    "weighted bags": Case(weighted_bags, (*BAGS, real(4, 3)), [(S1, R, R), (S0, R, R)]),
    "segments": Case(segments, (real(6, 5), torch.tensor([2, 1, 3])), [(S1, R)]),
    "group norm of rows": Case(
        group_norm, (real(2, 4, 7, 3), real(4), real(4)), [(S2, R, R), (S3, R, R)]
    ),
    "group norm of ragged rows": Case(
        group_norm, (real(2, 4, 9, 3), real(4), real(4)), [(RAGGED, R, R)]
    ),
    "instance norm of channels": Case(
        instance_norm, (real(2, 8, 5), real(8), real(8)), [(S1, R, R)]
    ),
    "spectra of batches": Case(
        lambda x: torch.view_as_real(torch.fft.rfft(x)), (real(6, 8),), [(S0,)]
    ),
    "circular pads of batches": Case(
        lambda x: F.pad(x, (1, 2), mode="circular"), (real(6, 3, 8),), [(S0,), (S1,)]
    ),
    "equal adaptive windows": Case(
        lambda x: F.adaptive_avg_pool2d(x, (4, 2)), (real(1, 2, 8, 6),), [(S2,)]
    ),
    "equal adaptive windows, largest": Case(
        lambda x: F.adaptive_max_pool2d(x, (4, 2)), (real(1, 2, 8, 6),), [(S2,)]
    ),
    "nearest neighbours": Case(
        lambda x: F.interpolate(x, scale_factor=2), (real(1, 2, 7, 3),), [(S2,), (S3,)]
    ),
    "bilinear enlargement": Case(bilinear, (real(1, 8, 64, 33),), [(S2,), (S3,)], BORDERS),
    "transposed convolution": Case(
        turned, (real(1, 8, 66, 64), real(8, 4, 3, 3), real(4)), [(S2, R, R)], BORDERS
    ),
    "transposed convolution in blocks": Case(
        blocks, (real(1, 4, 8, 6), real(4, 3, 2, 2)), [(S2, R), (S3, R)]
    ),
}


def placed_like(value: Tensor, model: Any) -> Any:
    """A global tensor placed as `model`, replicated where that is partial."""
    kept = [R if p.is_partial() else p for p in model.placements]
    return distribute_tensor(
        value, model.device_mesh, kept, src_data_rank=None, shard_order=model._spec.shard_order
    )


def check(case: Case, shape: tuple[int, ...], way: tuple[Any, ...], axis: int) -> None:
    mesh = init_device_mesh("cpu", shape)
    differentiable = [t.is_floating_point() for t in case.tensors]
    plain = [
        t.clone().requires_grad_(wanted)
        for t, wanted in zip(case.tensors, differentiable, strict=True)
    ]
    expected = case.run(*plain)
    gradient = real(*expected.shape, seed=7)
    expected.backward(gradient)
    spread: list[Any] = []
    for t, placement, wanted in zip(case.tensors, way, differentiable, strict=True):
        placements = [placement if i == axis else R for i in range(len(shape))]
        spread.append(
            distribute_tensor(t, mesh, placements, src_data_rank=None).requires_grad_(wanted)
        )
    ready: list[Any] = [
        t * 1.0 if wanted else t for t, wanted in zip(spread, differentiable, strict=True)
    ]
    with observed() as events:
        made = case.run(*ready)
    forward, given = [*events], placed_like(gradient, made)
    with observed() as events:
        torch.autograd.grad(made, [t for t in ready if t.requires_grad], given, retain_graph=True)
    moved = [event.op for event in (*forward, *events) if not event.op.startswith(case.allowed)]
    assert not moved, moved
    torch.testing.assert_close(made.full_tensor(), expected.detach())
    made.backward(given)
    for one, other in zip(spread, plain, strict=True):
        if other.grad is not None:
            assert isinstance(one.grad, DTensor)
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_nothing_is_gathered(name: str) -> None:
    case = CASES[name]
    for way in case.ways:
        check(case, (4,), way, 0)
        if all(getattr(p, "sizes", None) is None for p in way):  # given sizes are for four ranks
            check(case, (2, 2), way, 1)
