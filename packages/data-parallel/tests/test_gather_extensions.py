"""Parameters whose class chooses the gathered tensors.

Covers: parameters/{gather_extensions,layout_move,sharded_parameters}.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and the constructors of tensor subclasses no types.

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal_data_parallel import LayoutError, StyleError, fully_shard
from shoal_dtensor import Shard, distribute_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import observed, on_ranks
from small_weights import Float8Weight, Int8Weight, as_sent

# 7 rows on 4 ranks: 2, 2, 2 and 1; 3 rows: the last rank has none
SIZES = [(8, 16), (7, 16), (3, 16)]
Change = Any


class Layers(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first = nn.Linear(columns, rows, dtype=torch.float64)
        self.second = nn.Linear(rows, columns, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))  # type: ignore[no-any-return]  # untyped


def layers(size: tuple[int, int]) -> Layers:
    torch.manual_seed(sum(size))
    return Layers(*size)


def rows_of(rank: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, columns, dtype=torch.float64, generator=generator)


def with_class(model: Layers, make: Any, *, trained: bool) -> Layers:
    """The model with the weight of its first layer in a class."""
    weight = model.first.weight.detach()
    model.first.weight = nn.Parameter(make(weight), requires_grad=trained)
    return model


def units(model: Layers, shape: tuple[int, ...], **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape)
    fully_shard(model.first, mesh, **options)
    fully_shard(model.second, mesh, **options)
    return fully_shard(model, mesh, **options)


def straight_through(model: Layers, x: Tensor) -> Tensor:
    """The model in one process, computing with the rounded weight."""
    weight = model.first.weight
    rounded = weight + (as_sent(weight.detach()) - weight.detach())
    activations = F.relu(F.linear(x, rounded, model.first.bias))
    return model.second(activations)  # type: ignore[no-any-return]  # modules are untyped


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_a_weight_that_is_sent_as_float8_trains_as_in_one_process(
    size: tuple[int, int], shape: tuple[int, ...]
) -> None:
    plain = layers(size)
    model = units(with_class(layers(size), Float8Weight, trained=True), shape)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    rank = torch.distributed.get_rank()
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses = [straight_through(plain, rows_of(r, size[1])).square().mean() for r in range(4)]
        (sum(losses) / 4).backward()  # type: ignore[union-attr]  # a sum of tensors
        loss = model(rows_of(rank, size[1])).square().mean()
        torch.testing.assert_close(loss, losses[rank])
        loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("size", SIZES)
@on_ranks(4)
def test_a_weight_of_int8_is_gathered_bit_by_bit(size: tuple[int, int]) -> None:
    plain = with_class(layers(size), Int8Weight.of, trained=False)
    whole: Any = plain.first.weight
    model = units(copy.deepcopy(plain), (4,))
    with torch.no_grad():
        model.first.unshard()
        seen = model.first.weight
        assert torch.equal(seen.small, whole.small) and torch.equal(seen.scale, whole.scale)
        model.first.reshard()
    assert seen.small.untyped_storage().nbytes() == 0
    x = rows_of(torch.distributed.get_rank(), size[1])
    loss = model(x).square().mean()
    torch.testing.assert_close(loss, plain(x).square().mean())
    # the weight is gathered again, and has the values of the forward
    loss.backward()
    assert model.first.weight.grad is None
    losses = [plain(rows_of(r, size[1])).square().mean() for r in range(4)]
    (sum(losses) / 4).backward()
    torch.testing.assert_close(model.first.bias.grad.full_tensor(), plain.first.bias.grad)
    torch.testing.assert_close(model.second.weight.grad.full_tensor(), plain.second.weight.grad)


def gathered_bytes(model: Any, size: tuple[int, int]) -> int:
    """The bytes that this rank puts into the gathers of the first layer in a forward."""
    with observed() as events, torch.no_grad():
        model.first(rows_of(0, size[1]))
    return sum(event.nbytes for event in events if event.op.startswith("all_gather"))


@on_ranks(4)
def test_gathers_move_the_bytes_of_the_small_numbers() -> None:
    size = (64, 32)
    # of 64 rows each rank has 16
    bias = 16 * 8
    wide = gathered_bytes(units(layers(size), (4,)), size)
    float8 = gathered_bytes(units(with_class(layers(size), Float8Weight, trained=True), (4,)), size)
    int8 = gathered_bytes(units(with_class(layers(size), Int8Weight.of, trained=False), (4,)), size)
    assert (wide, float8, int8) == (16 * 32 * 8 + bias, 16 * 32 + bias, 16 * 32 + 16 * 8 + bias)


@on_ranks(4)
def test_memory_is_freed_after_a_forward() -> None:
    model = units(with_class(layers((8, 16)), Float8Weight, trained=True), (4,))
    seen: list[Any] = []
    model.first.register_forward_hook(lambda module, args, out: seen.append(module.weight))
    out = model(rows_of(0, 16))
    assert seen[0].small.untyped_storage().nbytes() == 0
    out.sum().backward()
    assert seen[0].small.untyped_storage().nbytes() == 0


@on_ranks(4)
def test_what_is_not_possible_is_an_error_on_all_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,))

    def fresh() -> Layers:
        return with_class(layers((8, 16)), Float8Weight, trained=True)

    with pytest.raises(LayoutError, match="larger shards"):
        fully_shard(fresh().first, mesh, reshard_after_forward=2)
    with pytest.raises(LayoutError, match="first dim over one axis"):
        fully_shard(fresh().first, mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = fresh()
    wide: Any = model.first.weight
    placed = distribute_tensor(wide.wide, grid["tensor"], [Shard(0)])
    placed._local_tensor = Float8Weight(placed.to_local())
    model.first.weight = nn.Parameter(placed)
    with pytest.raises(LayoutError, match="styles have placed"):
        fully_shard(model.first, grid["data"])


@on_ranks(1)
def test_a_class_with_one_of_both_methods_is_an_error() -> None:
    class OneMethod(Float8Weight):
        @property
        def fsdp_post_all_gather(self) -> Any:
            raise AttributeError

    model = with_class(layers((8, 16)), OneMethod, trained=True)
    with pytest.raises(StyleError, match="not both"):
        fully_shard(model.first, init_device_mesh("cpu", (1,)))
