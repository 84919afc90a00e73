"""Products on ranks, and scales that CPUs do not support.

Covers: rules/math/{scaled,grouped}_matmul.py.

Values are small multiples of a power of two, so float32 sums are exact in any order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.testing import validate
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import observed, on_ranks

aten = torch.ops.aten
# torch's stubs count their arguments wrongly
scaled_mm: Any = torch._scaled_mm
grouped_mm: Any = torch._grouped_mm
FLOAT8 = torch.float8_e4m3fn
R, S0, S1, S2, P = Replicate(), Shard(0), Shard(1), Shard(2), Partial()


def sixteenths(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator) / 16


def powers(*shape: int) -> Tensor:
    """Scales with which products stay exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return 2.0 ** torch.randint(-1, 3, shape, generator=generator)


def columns_first(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous().t()


# --- scales ---------------------------------------------------------------------------------------

MATRIX = sixteenths(6, 64).to(FLOAT8)
OTHER = columns_first(sixteenths(64, 128).to(FLOAT8))
OF_ALL = (torch.tensor(2.0), torch.tensor(0.5))
OF_ROWS = (powers(6, 1), powers(1, 128))
UNEVEN = Shard(1, sizes=(32, 0, 48, 48))
# scales, placements of both operands and both scales, and of the result
PRODUCTS = {
    "one scale, rows": (OF_ALL, (S0, R, R, R), S0),
    "one scale, columns": (OF_ALL, (R, S1, R, R), S1),
    "one scale, contracted": (OF_ALL, (S1, S0, R, R), P),
    "scales of rows, rows": (OF_ROWS, (S0, R, S0, R), S0),
    "scales of rows, columns": (OF_ROWS, (R, S1, R, S1), S1),
    "scales of rows, columns in uneven shards": (OF_ROWS, (R, UNEVEN, R, UNEVEN), UNEVEN),
    "scales of rows, contracted": (OF_ROWS, (S1, S0, R, R), P),
}


def spread(tensors: Any, mesh: Any, placements: Any) -> list[Any]:
    return [
        distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
        for tensor, placement in zip(tensors, placements, strict=True)
    ]


@pytest.mark.parametrize("name", PRODUCTS)
@on_ranks(4)
def test_scaled_products_of_shards_start_no_collective(name: str) -> None:
    scales, placements, expected = PRODUCTS[name]
    operands: tuple[Any, ...] = (MATRIX, OTHER, *scales)
    mesh = init_device_mesh("cpu", (4,))
    shards = spread(operands, mesh, placements)
    with observed() as events:
        result: Any = scaled_mm(*shards, out_dtype=torch.float32)
    assert not events and result.placements == (expected,)
    whole = scaled_mm(*operands, out_dtype=torch.float32)
    assert torch.equal(result.full_tensor(), whole)


@on_ranks(4)
def test_small_results_are_not_left_partial() -> None:
    """A float8 result of summands would be rounded before the sum."""
    mesh = init_device_mesh("cpu", (4,))
    shards = spread((MATRIX, OTHER, *OF_ALL), mesh, (S1, S0, R, R))
    result: Any = torch._scaled_mm(*shards)
    whole = torch._scaled_mm(MATRIX, OTHER, *OF_ALL)
    assert result.dtype == FLOAT8 and not result.placements[0].is_partial()
    assert torch.equal(result.full_tensor().float(), whole.float())


def dequantized(scale: Tensor, shape: torch.Size, outer: int) -> Tensor:
    """A scale of any layout as one number for each element of a matrix of this shape."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(shape)
    if scale.ndim == 1:
        rows = max(shape[outer], 1)
        by_row = scale.reshape(rows, -1).repeat_interleave(shape[1 - outer] * rows // len(scale), 1)
        return by_row if outer == 0 else by_row.t()
    wide = scale.repeat_interleave(max(shape[0] // max(scale.shape[0], 1), 1), 0)
    return wide.repeat_interleave(max(shape[1] // max(scale.shape[1], 1), 1), 1)


def scaled_by_blocks(a: Tensor, b: Tensor, scale_a: Any, scale_b: Any, **_: Any) -> Tensor:
    first = a.float() * dequantized(scale_a.float(), a.shape, 0)
    second = b.float() * dequantized(scale_b.float(), b.shape, 1)
    return first @ second


BLOCKS = {
    # DeepSeek's: 1 x 128 of one operand, 128 x 128 of the other
    "1 x 128 and 128 x 128": (powers(6, 4), powers(4, 3), 4),
    "whole blocks only": (powers(2, 4), powers(4, 3), 4),
    "lists of rows": (powers(512 * 384 // 32).to(torch.float8_e8m0fnu), powers(384 * 16), 3),
    "matrices in another order": (
        powers(384, 16).to(torch.float8_e8m0fnu),
        powers(16, 384).to(torch.float8_e8m0fnu),
        0,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_scales_of_blocks_are_sharded_with_their_blocks(name: str) -> None:
    scale_a, scale_b, _ = BLOCKS[name]
    rows = 6 if scale_a.ndim == 2 and scale_a.shape[0] != 384 else 384
    a = sixteenths(rows, 512).to(FLOAT8)
    b = columns_first(sixteenths(512, 384).to(FLOAT8))
    report = validate(
        aten._scaled_mm.default,
        *(a, b, scale_a, scale_b),
        out_dtype=torch.float32,
        kernel=scaled_by_blocks,
        ways=(2, 3),
        pairs=False,
    )
    assert not report.wrong
    has_rows = name != "matrices in another order"
    assert bool(report.checked) == has_rows


# --- groups ---------------------------------------------------------------------------------------

ENDS = torch.tensor([4, 4, 16], dtype=torch.int32)
TOKENS, EXPERTS = sixteenths(16, 12), sixteenths(3, 12, 8)
GROUPED = {
    "tokens": ((TOKENS, EXPERTS), (S0, R), S0),
    "tokens in uneven shards": (
        (TOKENS, EXPERTS),
        (Shard(0, sizes=(3, 0, 6, 7)), R),
        Shard(0, sizes=(3, 0, 6, 7)),
    ),
    "contracted": ((TOKENS, EXPERTS), (S1, S1), P),
    "features": ((TOKENS, EXPERTS), (R, S2), S1),
    "gradients of experts, tokens": ((sixteenths(12, 16), sixteenths(16, 8)), (S1, S0), P),
    "gradients of experts, rows": ((sixteenths(12, 16), sixteenths(16, 8)), (S0, R), S1),
    "groups of rows, contracted": ((sixteenths(3, 8, 12), sixteenths(12, 16)), (S2, S0), P),
    "groups of rows, columns": ((sixteenths(3, 8, 12), sixteenths(12, 16)), (R, S1), S1),
}


@pytest.mark.parametrize("name", GROUPED)
@on_ranks(4)
def test_grouped_products_of_shards_start_no_collective(name: str) -> None:
    operands, placements, expected = GROUPED[name]
    mesh = init_device_mesh("cpu", (4,))
    shards = spread(operands, mesh, placements)
    (ends,) = spread((ENDS,), mesh, (R,))
    with observed() as events:
        result: Any = grouped_mm(*shards, ends)
    assert not events and result.placements == (expected,)
    assert torch.equal(result.full_tensor(), grouped_mm(*operands, ENDS))


@pytest.mark.parametrize("placements", [(S0, R), (S1, S1), (R, S2)])
@on_ranks(4)
def test_gradients_of_grouped_products_are_those_of_one_process(placements: Any) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tokens, experts = TOKENS.clone().requires_grad_(), EXPERTS.clone().requires_grad_()
    gradient = sixteenths(16, 8)
    grouped_mm(tokens, experts, ENDS).backward(gradient)
    shards = [t.requires_grad_() for t in spread((TOKENS, EXPERTS), mesh, placements)]
    (ends,) = spread((ENDS,), mesh, (R,))
    result: Any = grouped_mm(*shards, ends)
    result = result.redistribute(placements=[R])
    result.backward(spread((gradient,), mesh, (R,))[0])
    for shard, whole in zip(shards, (tokens, experts), strict=True):
        assert whole.grad is not None
        assert torch.equal(shard.grad.full_tensor(), whole.grad)
