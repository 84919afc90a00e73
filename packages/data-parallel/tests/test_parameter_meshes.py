"""A mesh per parameter in one call of fully_shard.

Covers: {parameter_meshes,schedule}.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_collectives import Gather
from data_parallel_model import (
    Model,
    backward_of_each,
    batch,
    in_rows,
    loss_of,
    pickled,
    same_gradients,
    train_alike,
    two_equal_models,
)
from shoal_data_parallel import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    LayoutError,
    ShardPlacementResult,
    fully_shard,
    mesh_info,
)
from shoal_data_parallel.internal import units_of
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import DeviceMesh, LockstepError, init_device_mesh
from shoal_mesh.internal import observing
from shoal_mesh.testing import fake_world, on_ranks

Choose = Callable[[nn.Parameter], Any]


def pairs(ranks: int) -> DeviceMesh:
    """Replicas "copies" of shards "shards"; both axes together are "data"."""
    return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copies", "shards"))


def whole(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["copies", "shards"].flatten("data")


def wide_on_pairs(model: Any, mesh: DeviceMesh) -> Choose:
    """Matrices that have the tripled width go to the mesh of replicas and shards."""
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    wide = {block.up.weight for block in model.blocks} | {
        block.down.weight for block in model.blocks
    }
    return lambda param: ShardPlacementResult(Shard(1), info) if param in wide else None


def shard(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    choose = wide_on_pairs(model, mesh)
    for block in model.blocks:
        fully_shard(block, whole(mesh), shard_placement_fn=choose, **options)
    return fully_shard(model, whole(mesh), shard_placement_fn=choose, **options)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("recompute", [None, True, False])
def test_steps_are_those_of_one_device(ranks: int, recompute: bool | None) -> None:
    @on_ranks(ranks, timeout=120)
    def check() -> None:
        mesh = pairs(ranks)
        plain, model = two_equal_models(lambda: Model(recompute=recompute))
        shard(model, mesh)
        block = model.blocks[0]
        assert block.up.weight.device_mesh == mesh
        assert block.up.weight.placements == (Replicate(), Shard(1))
        assert block.up.bias.device_mesh == whole(mesh)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)]
        train_alike(plain, model, in_rows(mesh), optimizers)

    check()


@on_ranks(4, timeout=120)
def test_one_unit_of_all_blocks() -> None:
    """Parameters of two meshes in the outermost unit, which stays gathered after its forward."""
    mesh = pairs(4)
    plain, model = two_equal_models()
    fully_shard(model, whole(mesh), shard_placement_fn=wide_on_pairs(model, mesh))
    assert len(units_of(model)) == 2
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    train_alike(plain, model, in_rows(mesh), optimizers)
    # a module of it that is called after the forward
    hidden = torch.randn(3, 10, dtype=torch.float64)
    loss_of(model, *batch(3))
    torch.testing.assert_close(model.blocks[1](hidden), plain.blocks[1](hidden))
    model.zero_grad()
    model.set_is_last_backward(False)
    loss_of(model, *batch(3)).backward()
    assert all(param.grad is None for param in model.parameters())
    model.finalize_backward()
    assert all(param.grad is not None for param in model.parameters())


class DenseAndExpert(nn.Module):
    """A Linear that all ranks have, and an expert that only a pair of ranks has."""

    def __init__(self, expert: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(5, 7)
        torch.manual_seed(1 + expert)
        self.expert = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.expert(self.dense(x).tanh())
        return out


@on_ranks(4)
def test_experts_are_averaged_over_their_own_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "shards"))
    mine = mesh.get_local_rank("expert")
    plain = [DenseAndExpert(number).double() for number in range(2)]
    model = copy.deepcopy(plain[mine])
    experts = {*model.expert.parameters()}
    info = FSDPMeshInfo(mesh["shards"], shard_mesh_dim=0)
    fully_shard(
        model,
        mesh["expert", "shards"].flatten("data"),
        shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p in experts else Shard(0),
    )
    rows = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for rank in range(4):
        loss: Any = plain[rank // 2](rows[rank]).square().sum()
        loss.backward()
    output: Any = model(rows[dist.get_rank()])
    output.square().sum().backward()
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor)
        grads: list[Any] = [one.get_parameter(name).grad for one in plain]
        expected = grads[mine] / 2 if name.startswith("expert") else (grads[0] + grads[1]) / 4
        torch.testing.assert_close(param.grad.full_tensor(), expected, msg=f"of {name}")


def note_gather(order: list[object], event: Any) -> None:
    if event.op == "all_gather_into_tensor":
        order.append(tuple(event.comm.ranks))


def gathers(model: Any, rows: Any) -> list[tuple[int, ...]]:
    """The ranks of each all-gather of a step."""
    found: list[Any] = []
    with observing(partial(note_gather, found)):
        loss_of(model, *rows).backward()
    return found


@on_ranks(4, timeout=120)
def test_each_mesh_of_a_unit_gathers_once() -> None:
    mesh = pairs(4)
    (_, model) = two_equal_models()
    shard(model, mesh)
    rows = batch(0)
    rank = dist.get_rank()
    small = tuple(range(rank - rank % 2, rank - rank % 2 + 2))
    for _ in range(2):
        found = gathers(model, rows)
        # 3 blocks, in forward and backward; the outermost unit does not have a matrix on pairs
        assert found.count(small) == 6
        assert found.count((0, 1, 2, 3)) == 7
    # the following block's parameters of both meshes are sent before its forward
    order: list[object] = []
    model.blocks[1].register_forward_pre_hook(lambda *_: order.append("second block"))
    with observing(lambda event: order.append(tuple(event.comm.ranks))), torch.no_grad():
        loss_of(model, *rows)
    sent = order[: order.index("second block")]
    # of the root, and of three blocks: the third is sent when the second begins
    assert (sent.count((0, 1, 2, 3)), sent.count(small)) == (4, 3)
    # in a backward, those of the first block before the second one's is over

    def note_backward(module: Any, args: Any, output: Any) -> None:
        output.register_hook(lambda _: order.append("inside of the second block"))

    model.blocks[1].up.register_forward_hook(note_backward)
    loss = loss_of(model, *rows)
    order.clear()
    with observing(partial(note_gather, order)):
        loss.backward()
    sent = order[: order.index("inside of the second block")]
    assert (sent.count((0, 1, 2, 3)), sent.count(small)) == (3, 3)


def prefetch_nothing(model: Any) -> None:
    for block in model.blocks:
        block.set_modules_to_forward_prefetch([])


def prefetch_the_first(model: Any) -> None:
    for block in model.blocks:
        block.set_modules_to_backward_prefetch([model.blocks[0]])


def unshard_in_no_backward(model: Any) -> None:
    for block in model.blocks:
        block.set_unshard_in_backward(False)


def unshard(model: Any, *, async_op: bool) -> None:
    for block in model.blocks:
        block.unshard(async_op=async_op)


METHODS: dict[str, Callable[[Any], object]] = {
    "kept gathered": lambda model: model.set_reshard_after_forward(False),
    "no prefetch": prefetch_nothing,
    "prefetch": prefetch_the_first,
    "no unshard in backward": unshard_in_no_backward,
    "kept storage": lambda model: model.set_keep_unsharded_storage(True),
    "gathered before": partial(unshard, async_op=False),
    "gathering before": partial(unshard, async_op=True),
    "not last": lambda model: model.set_is_last_backward(False),
}


@pytest.mark.parametrize("name", METHODS)
@on_ranks(4, timeout=120)
def test_methods_concern_all_meshes(name: str) -> None:
    mesh = pairs(4)
    plain, model = two_equal_models()
    shard(model, mesh)
    METHODS[name](model)
    for step in range(2):
        backward_of_each(plain, model, in_rows(mesh), step)
    if name == "not last":
        assert all(param.grad is None for param in model.parameters())
        model.finalize_backward()
    same_gradients(plain, model)
    units = [unit for block in model.blocks for unit in units_of(block)]
    assert len(units) == 6
    asked = {
        "kept gathered": [not unit.frees_after_forward for unit in units],
        "no prefetch": [unit.settings.prefetch_in_forward == [] for unit in units],
        "no unshard in backward": [not unit.settings.unshard_in_backward for unit in units],
        "kept storage": [unit.settings.keep_unsharded_storage for unit in units],
    }
    assert all(asked.get(name, [True]))
    model.blocks[0].unshard()
    assert all(unit.current.has_values for unit in units[:2])
    model.blocks[0].reshard()
    assert not any(unit.current.has_values for unit in units[:2])


@on_ranks(4, timeout=120)
def test_collectives_of_the_user_concern_all_meshes() -> None:
    mesh = pairs(4)
    plain, model = two_equal_models()
    shard(model, mesh)
    gather = Gather()
    hooked: list[int] = []
    for block in model.blocks:
        block.set_custom_all_gather(gather)
        block.set_all_reduce_hook(lambda flat: hooked.append(flat.numel()))
    backward_of_each(plain, model, in_rows(mesh))
    same_gradients(plain, model)
    assert (gather.calls, len(hooked)) == (12, 6)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, pickled])
@on_ranks(4, timeout=120)
def test_copies_keep_the_meshes(copied_by: Callable[[Any], Any]) -> None:
    mesh = pairs(4)
    plain, model = two_equal_models()
    if copied_by is pickled:
        # a function of a test cannot be pickled
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        for block in model.blocks:
            fully_shard(block, whole(mesh), shard_placement_fn=OnPairs(info))
        fully_shard(model, whole(mesh))
    else:
        shard(model, mesh)
    copied = copied_by(model)
    assert copied.blocks[0].up.weight.device_mesh == mesh
    assert not {*units_of(copied)} & {*units_of(model)}
    backward_of_each(plain, copied, in_rows(mesh))
    same_gradients(plain, copied)
    assert all(param.grad is None for param in model.parameters())


class OnPairs:
    """A choice of a mesh for matrices, that a file can hold."""

    def __init__(self, info: FSDPMeshInfo) -> None:
        self.info = info

    def __call__(self, param: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, self.info) if param.ndim > 1 else None


@on_ranks(4, timeout=120)
def test_shards_inside_small_groups_on_each_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("copies", "shards"))
    plain, model = two_equal_models()
    shard(model, mesh, reshard_after_forward=2)
    backward_of_each(plain, model, in_rows(mesh))
    same_gradients(plain, model)


@on_ranks(4)
def test_axes_have_names_on_a_larger_mesh() -> None:
    """Parameters are DTensors on a mesh with the data axes, and modules see them there."""
    mesh = pairs(4)
    plain, model = two_equal_models(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    )
    dims = DataParallelMeshDims(shard="shards", replicate="copies")
    info = FSDPMeshInfo(mesh, dp_mesh_dims=dims, spmd_mesh=mesh)
    assert info.is_spmd_mesh
    assert not FSDPMeshInfo(mesh, shard_mesh_dim=0).is_spmd_mesh
    flat = DataParallelMeshDims(shard=("copies", "shards"))
    last = model[2].weight
    fully_shard(
        model,
        mesh,
        shard_placement_fn=lambda p: ShardPlacementResult(None, info) if p is last else None,
        dp_mesh_dims=flat,
    )
    assert model[2].weight.placements == (Replicate(), Shard(0))
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain(rows).square().mean().backward()
    model(rows.chunk(4)[dist.get_rank()]).square().mean().backward()
    same_gradients(plain, model)


def test_data_axes_of_a_mesh(world: DeviceMesh) -> None:
    """The function has the meaning of the arguments of `fully_shard`."""
    both = mesh_info(world)
    assert isinstance(both, HSDPMeshInfo)
    assert (both.shard_mesh_dim, both.replicate_mesh_dim) == (1, 0)
    one = mesh_info(world["shards"])
    assert type(one) is FSDPMeshInfo
    assert one.axes.num_shards == 2
    named = mesh_info(world, DataParallelMeshDims(shard=("copies", "shards")))
    assert named.is_spmd_mesh
    assert named.axes.num_shards == 4
    with pytest.raises(LayoutError, match="expected one or two data axes"):
        mesh_info(world.unflatten(0, (1, 2), ("more", "copies")))


@pytest.fixture
def world() -> Iterator[DeviceMesh]:
    with fake_world(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def test_axes_that_are_not_there_are_refused(world: DeviceMesh) -> None:
    with pytest.raises(LayoutError, match="pass shard_mesh_dim="):
        FSDPMeshInfo(world)
    with pytest.raises(LayoutError, match="has axes 0 to 1, got 2"):
        FSDPMeshInfo(world, shard_mesh_dim=2)
    with pytest.raises(LayoutError, match="cannot both shard and replicate"):
        HSDPMeshInfo(world, shard_mesh_dim=1, replicate_mesh_dim=1)
    with pytest.raises(LayoutError, match="pass replicate_mesh_dim="):
        HSDPMeshInfo(world, shard_mesh_dim=1)


@pytest.mark.parametrize(
    "answer",
    [3, ShardPlacementResult(None, "data")],  # type: ignore[arg-type]  # refused
)
def test_other_answers_are_refused(world: DeviceMesh, answer: Any) -> None:
    with pytest.raises(LayoutError, match="shard_placement_fn: expected"):
        fully_shard(nn.Linear(4, 4), world["shards"], shard_placement_fn=lambda _: answer)


@on_ranks(4)
def test_ranks_that_choose_other_meshes_are_named() -> None:
    mesh = pairs(4)
    info = FSDPMeshInfo(mesh["shards"], shard_mesh_dim=0)
    chosen = ShardPlacementResult(None, info) if dist.get_rank() == 3 else None
    with pytest.raises(LockstepError, match=r"weight.*ranks \[0, 1, 2\]"):
        fully_shard(nn.Linear(4, 4), whole(mesh), shard_placement_fn=lambda _: chosen)
