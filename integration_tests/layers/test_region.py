"""Random numbers over the shards of a batch are those of one device.

Covers: random_layouts/region.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Shard, full_tensor, random_mode
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)


class AttentionOfNamedBatch(nn.Module):
    """Attention with dropout of weights and outputs; its code names the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.2)
        return x + self.drop(self.o(y.transpose(1, 2).reshape(b, t, -1)))


class RecomputedBlockAndNoise(nn.Module):
    """Two blocks, the second recomputed in backward, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AttentionOfNamedBatch(), AttentionOfNamedBatch()])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        first, second = self.blocks
        x = checkpoint(second, first(x, mask), mask, use_reentrant=False)
        return x + 0.1 * torch.randn_like(x)


STYLES: Any = {f"blocks.*.{name}": ColwiseParallel() for name in "qkv"} | {
    "blocks.*.o": RowwiseParallel()
}


def over_data(model: Any, how: str, axes: DeviceMesh) -> Any:
    """The model, data-parallel."""
    if how in ("replicate", "optimizer"):
        return replicate(model, axes, shard_optimizer=how == "optimizer")
    for block in model.blocks:
        fully_shard(block, axes)
    return fully_shard(model, axes) if how == "fully_shard" else model


def same_gradients(model: Any, single: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), single.parameters(), strict=True):
        grad = full_tensor(param.grad)
        torch.testing.assert_close(grad, other.grad, msg=name)


@on_ranks(4)
@pytest.mark.parametrize("rows", [(2, 2, 2, 2), (3, 1, 2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("how", ["replicate", "optimizer", "fully_shard"])
def test_dropout_over_a_batch_is_that_of_one_device(how: str, rows: tuple[int, ...]) -> None:
    data = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    torch.manual_seed(0)
    single = RecomputedBlockAndNoise().double()
    model = over_data(copy.deepcopy(single), how, data)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    full = torch.randn(sum(rows), 5, 8, dtype=torch.double)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1)

    def shard(whole: Tensor) -> Tensor:
        own = data.get_local_rank()
        return whole.narrow(0, sum(rows[:own]), rows[own])

    for seed in (1, 2):
        a, b = full.clone().requires_grad_(), full.clone().requires_grad_()
        torch.manual_seed(seed)
        expected = single(a, mask)
        state = torch.get_rng_state()
        expected.square().sum().backward()
        torch.manual_seed(seed)
        own = shard(b)
        out = model(own, mask)
        assert torch.equal(torch.get_rng_state(), state)
        out.square().sum().backward()
        torch.testing.assert_close(out, shard(expected))
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(*map(shard, (b.grad, a.grad)))
    same_gradients(model, single)


@on_ranks(4)
@pytest.mark.parametrize("how", ["replicate", "fully_shard", "blocks"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_dropout_over_a_batch_and_over_heads(how: str, shape: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    single = RecomputedBlockAndNoise().double()
    model = parallelize_module(copy.deepcopy(single), mesh["tensor"], STYLES)
    over_data(model, how, mesh["data"])
    full = torch.randn(4, 5, 8, dtype=torch.double)
    own = mesh.get_local_rank("data")
    for each in (model, copy.deepcopy(model)) if how == "replicate" else (model,):
        torch.manual_seed(1)
        expected = single(full)
        torch.manual_seed(1)
        torch.testing.assert_close(each(full.chunk(shape[0])[own]), expected.chunk(shape[0])[own])


@on_ranks(4)
@pytest.mark.parametrize("how", ["replicate", "fully_shard"])
def test_two_data_axes_take_rows_in_the_order_of_ranks(how: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "data"))
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    single = RecomputedBlockAndNoise().double()
    model = over_data(copy.deepcopy(single), how, mesh)
    full = torch.randn(8, 5, 8, dtype=torch.double)
    torch.manual_seed(1)
    expected = single(full)
    torch.manual_seed(1)
    torch.testing.assert_close(model(full.chunk(4)[rank]), expected.chunk(4)[rank])
    with pytest.raises(LayoutError, match="two axes shard the batch"):
        model(full.narrow(0, 2 * rank, 1 + rank % 2))


@on_ranks(2)
def test_a_style_says_that_another_dim_is_the_batch() -> None:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
    model = copy.deepcopy(single)
    dim = Shard(1)
    style = PrepareModuleInput(input_layouts=dim, desired_input_layouts=dim, use_local_output=True)
    replicate(parallelize_module(model, data, style), data)
    full = torch.randn(3, 4, 6)
    torch.manual_seed(1)
    expected = single(full)
    torch.manual_seed(1)
    own = data.get_local_rank()
    torch.testing.assert_close(model(full.chunk(2, 1)[own]), expected.chunk(2, 1)[own])


@on_ranks(2)
def test_a_rank_without_rows_draws_along() -> None:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4))
    model = replicate(copy.deepcopy(single), data)
    full = torch.randn(3, 4, 6)
    torch.manual_seed(1)
    expected = single(full)
    torch.manual_seed(1)
    rank = data.get_local_rank()
    torch.testing.assert_close(model(full[3 * rank :]), expected[3 * rank :])


@on_ranks(2)
def test_nothing_is_asked_of_ranks_where_nothing_is_drawn_together() -> None:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = replicate(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), data)
    x = torch.randn(3, 6)
    with CommDebugMode() as mode:
        with random_mode("local"):
            model(x)
        model.eval()
        model(x)
    assert mode.get_total_counts() == 0
    model.train()
    # the random states are compared once per mesh
    model(x)
    with CommDebugMode() as mode:
        model(x)
    assert mode.get_total_counts() == 1


class Routed(nn.Module):
    """Asks, row by row, which rows of its input are positive, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.linear(F.dropout(x, 0.5))
        for row in (x[:, 0] > 0).nonzero().flatten():
            if row == 0:
                out = out + 1
        return out


@on_ranks(2)
def test_numbers_that_depend_on_a_shard_of_a_batch_are_read() -> None:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    model = replicate(Routed(), data)
    assert model(torch.tensor([[1.0, 2, 3], [-1, 2, 3]])).shape == (2, 3)
