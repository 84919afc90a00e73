"""Fewer rows or features than ranks, and uneven shards in plain tensors.

They are right, or refused on all ranks.

Covers: lowering/parameters.py, lowering/ports.py, modules/recurrent.py, modules/own_forward.py,
module_sharding.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from one_device import as_one_device
from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PackedColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from toy_modules import FeedForward, FusedGate


def single_and_parallel(make: Callable[[], nn.Module], plan: Any) -> tuple[Any, Any, DeviceMesh]:
    """A module on one device, the same in parallel on four ranks, and their mesh."""
    mesh = init_device_mesh("cpu", (4,))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make().double())
    return modules[0], parallelize_module(modules[1], mesh, plan), mesh


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shape", [(12,), (3, 12), (2, 4, 12)])
@on_ranks(4)
def test_fewer_output_features_than_ranks(shape: tuple[int, ...]) -> None:
    as_one_device(
        nn.Linear(12, 2).double(),
        ColwiseParallel(output_layouts=Replicate()),
        all_ranks(),
        [draw(*shape)],
    )


@pytest.mark.parametrize("length", [5, 6])
@on_ranks(4)
def test_uneven_shards_of_a_sequence_do_not_leave_as_plain_tensors(length: int) -> None:
    ports = PrepareModuleInputOutput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(1),),
        use_local_input=True,
        output_layouts=(Shard(1),),
        desired_output_layouts=(Replicate(),),
    )
    columns, rows = (
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
    )
    plan = {"": ports, "up": columns, "down": rows}
    plain, model, _ = single_and_parallel(lambda: FeedForward(8, 16), plan)
    torch.testing.assert_close(model(draw(2, 8, 8)), plain(draw(2, 8, 8)))
    with pytest.raises(LayoutError, match=f"dim 1 of the output has {length} elements"):
        model(draw(2, length, 8))


@on_ranks(4)
def test_blocks_of_features_are_sharded_as_the_rows_behind_them() -> None:
    halves = PackedColwiseParallel(blocks={"gate": 9, "value": 9})
    plan = {"fused": halves, "rows": RowwiseParallel()}
    as_one_device(FusedGate(6, 9).double(), plan, all_ranks(), [draw(2, 4, 6)])


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@on_ranks(4)
def test_recurrent_modules_with_fewer_rows_than_ranks(kind: Any) -> None:
    style = SequenceParallel(sequence_dim=0, use_local_output=False)
    plain, model, mesh = single_and_parallel(lambda: kind(4, 3, batch_first=True), style)
    x = draw(2, 5, 4)
    out, state = model(distribute_tensor(x, mesh, [Shard(0)]))
    expected, expected_state = plain(x)
    torch.testing.assert_close(out.full_tensor(), expected)
    pairs = (
        [(state, expected_state)]
        if kind is not nn.LSTM
        else list(zip(state, expected_state, strict=True))
    )
    for one, other in pairs:
        torch.testing.assert_close(one.full_tensor(), other)
    out.square().sum().backward()
    expected.square().sum().backward()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)


@pytest.mark.parametrize(("kind", "sizes"), [(nn.Linear, (8, 8)), (nn.LayerNorm, (8,))])
@fake_world(4)
def test_the_feature_dim_of_a_token_is_not_a_sequence(kind: Any, sizes: tuple[int, ...]) -> None:
    _, model, _ = single_and_parallel(lambda: kind(*sizes), SequenceParallel(sequence_dim=0))
    with pytest.raises(LayoutError, match="reads all features of a token"):
        model(draw(8))
