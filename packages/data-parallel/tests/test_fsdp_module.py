"""Methods of sharded modules: each test fails if the body of its method is `pass`.

The tests run on real gloo ranks.

Covers: {fsdp_module,communication,gathered,gradient_group,unit_settings}.py.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_collectives import Gather, Scatter
from data_parallel_model import (
    Fault,
    Model,
    backward_of_each,
    batch,
    full,
    loss_of,
    mesh_of,
    own,
    raising,
    same_gradients,
    same_weights,
    shard_blocks_and_root,
    two_equal_models,
)
from shoal_data_parallel import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    GradientReductionHandle,
    LayoutError,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ReplicateModule,
    StyleError,
    UnsupportedModuleError,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from shoal_data_parallel.gradients.reduction import GroupReduction
from shoal_data_parallel.units.unit import Unit, UnitState, unit_of, units_of
from shoal_dtensor import Placement, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.internal import observing
from shoal_mesh.testing import counts, fake_world, on_ranks


def sharded(mesh: DeviceMesh, **options: Any) -> tuple[Any, Any]:
    """A model on one device, and the same in units of its blocks and of the rest.

    Its dims leave uneven shards.
    """
    plain, model = two_equal_models(lambda: Model(6, 2))
    for block in model.blocks:
        fully_shard(block, mesh["data"], **options)
    return plain, fully_shard(model, mesh["data"], **options)


def replicated(mesh: DeviceMesh) -> tuple[Any, Any]:
    """The same over two data axes: replicas and shards."""
    plain, model = two_equal_models(lambda: Model(6, 2))
    for block in model.blocks:
        fully_shard(block, mesh)
    return plain, fully_shard(model, mesh)


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))


def rows(mesh: DeviceMesh, *tensors: Tensor) -> list[Tensor]:
    """This rank's rows of a global batch, over all ranks."""
    size = dist.get_world_size()
    return [tensor.chunk(size)[dist.get_rank()] for tensor in tensors]


def gathered_bytes(model: nn.Module) -> int:
    """Memory of gathered parameters."""
    return sum(
        tensor.untyped_storage().nbytes()
        for unit in units_of(model)
        for tensor in unit.current.tensors
    )


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    found: dict[str, int] = {}
    with CommDebugMode() as mode:
        yield found
    found.update(counts(mode))


# --- gathering ------------------------------------------------------------------------------------


@on_ranks(4)
def test_reshard_after_backward() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    gathers = []
    for step in range(4):
        if step == 3:
            model.set_reshard_after_backward(True)
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        with counting() as found:
            loss_of(model, *own(mesh, tokens, targets)).backward()
        gathers.append(found.get("all_gather", 0))
        assert (gathered_bytes(model) > 0) is (step < 3)
    assert gathers == [3, 0, 0, 0]
    same_gradients(plain, model)


@on_ranks(4)
def test_units_that_stay_gathered_follow_the_optimizer() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(3):
        backward_of_each(plain, model, mesh, step)
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(plain, model)


@on_ranks(4)
def test_unshard_in_backward() -> None:
    mesh = mesh_of(4, 1)
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
    found = []
    for gathers in (True, False):
        model: Any = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 3)).double()
        model.load_state_dict(plain.state_dict())
        for module in model:
            fully_shard(module, mesh["data"])
        fully_shard(model, mesh["data"])
        model[0].set_unshard_in_backward(gathers)
        tokens = batch(0)[0]
        plain.zero_grad()
        plain(tokens).square().mean().backward()
        loss = model(*own(mesh, tokens)).square().mean()
        with CommDebugMode() as counted:
            loss.backward()
        found.append(counts(counted).get("all_gather", 0))
        same_gradients(plain, model)
    assert found == [3, 2]


@on_ranks(4)
def test_a_unit_that_backward_needs_after_all_is_gathered() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh)
    model.blocks[0].set_unshard_in_backward(False)
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


@on_ranks(4)
def test_keep_unsharded_storage() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh)
    model.set_keep_unsharded_storage(True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    seen = []
    for step in range(3):
        backward_of_each(plain, model, mesh, step)
        same_gradients(plain, model)
        unit = unit_of(model.blocks[0])
        seen.append([tensor.untyped_storage().data_ptr() for tensor in unit.current.tensors])
        assert gathered_bytes(model) > 0 and not unit.current.has_values
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert seen[0] == seen[1] == seen[2]
    model.set_keep_unsharded_storage(False)
    assert gathered_bytes(model) == 0


@on_ranks(2)
def test_the_next_forward_waits_for_the_optimizer_once() -> None:
    mesh = mesh_of(2, 1)
    _, model = sharded(mesh)
    seen: list[str] = []
    model.set_post_optim_event(SimpleNamespace(wait=lambda: seen.append("event")))
    for _ in range(2):
        with observing(lambda event: seen.append(event.op)):
            model(*own(mesh, batch(0)[0]))
    assert seen[0] == "event" and seen.count("event") == 1 and len(seen) > 3


@on_ranks(4)
def test_groups_of_ranks_keep_parameters_after_a_forward() -> None:
    mesh = mesh_of(4, 1)["data"]
    plain, model = two_equal_models(lambda: Model(6, 2))
    for block in model.blocks:
        fully_shard(block, mesh, reshard_after_forward=2)
    fully_shard(model, mesh, reshard_after_forward=2)
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        sizes: list[int] = []

        def note(event: Any, sizes: list[int] = sizes) -> None:
            if "gathers" in event.purpose:
                sizes.append(event.comm.size)

        with observing(note):
            loss = loss_of(model, *own(mesh, tokens, targets))
            unit = unit_of(model.blocks[0])
            after_forward = unit.state
            held = [tuple(shard.shape) for shard in unit.current.shards]
            loss.backward()
        # the forward before has left the same values to groups of 2
        assert sizes == [4 if step == 0 else 2] * 3 + [2] * 3
        # half of 6 and of 18 rows, in the order of the parameters
        assert sorted(held) == [(3,), (3,), (3,), (3, 18), (9,), (9, 6)]
        assert (after_forward, unit.state) == (UnitState.SHARDED_INSIDE, UnitState.SHARDED)
        same_gradients(plain, model)
        # what a step writes to is gathered again from all ranks
        model(own(mesh, tokens)[0])
        with torch.no_grad():
            for one in (plain, model):
                for param in one.parameters():
                    param.add_(0.1)
        torch.testing.assert_close(model(tokens), plain(tokens))


def test_layouts_of_groups_of_ranks() -> None:
    with fake_world(16):
        names = ("replica", "data", "tensor")
        mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=names)
        model: Any = nn.Linear(6, 16)
        split = distribute_tensor(model.weight.detach(), mesh["tensor"], [Shard(0)])
        model.weight = nn.Parameter(split)
        fully_shard(model, mesh["replica", "data"], reshard_after_forward=2)
        weight, bias = unit_of(model).parameters
        assert weight.move_after_forward().source.local_shape == (4, 6)
        assert (
            weight.move_after_forward().target.local_shape == weight.gathered.local_shape == (8, 6)
        )
        assert bias.move_after_forward().source.local_shape == (8,)
        model = nn.Linear(4, 4)
        wrongs: list[Any] = [0, 3, -2, 1.5, "2"]
        for wrong in wrongs:
            with pytest.raises(ValueError, match="reshard_after_forward must be"):
                fully_shard(model, mesh["data"], reshard_after_forward=wrong)
        fully_shard(model, mesh["data"], reshard_after_forward=1)
        assert unit_of(model).settings.reshard_after_forward is False


# --- collectives of the user ----------------------------------------------------------------------


def placements(param: nn.Parameter) -> Shard | None:
    """Matrices in their second dim, one in runs."""
    return Shard(1) if param.ndim > 1 else None


@pytest.mark.parametrize("axes", ["shards", "replicas and shards", "transposed"])
@on_ranks(4)
def test_custom_collectives(axes: str) -> None:
    meshes: dict[str, Callable[[], DeviceMesh]] = {
        "shards": lambda: init_device_mesh("cpu", (4,), mesh_dim_names=("data",)),
        "replicas and shards": two_axes,
        "transposed": lambda: DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("data",)),
    }
    mesh = meshes[axes]()
    plain, model = two_equal_models(lambda: Model(6, 2))
    fully_shard(model.blocks[0], mesh, shard_placement_fn=placements)
    fully_shard(model.blocks[1], mesh)
    fully_shard(model, mesh)
    gather = Gather()
    scatter = Scatter()
    model.blocks[0].set_custom_all_gather(gather)
    model.set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(scatter)
    model.set_custom_reduce_scatter(scatter)
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        loss_of(model, *rows(mesh, tokens, targets)).backward()
    same_gradients(plain, model)
    # of two units in forward, and of the one inside in backward
    assert gather.calls == gather.asynchronous_calls == 2 * 3
    assert scatter.ops == [dist.ReduceOp.SUM] * 2 * 2


@on_ranks(4)
def test_sums_where_a_custom_reduce_scatter_would_average() -> None:
    mesh = mesh_of(4, 1)
    found = []
    for sums_only in (False, True):
        plain, model = (one.float() for one in two_equal_models(lambda: Model(6, 2)))
        fully_shard(model, mesh["data"])
        scatter = Scatter()
        model.set_custom_reduce_scatter(scatter)
        model.set_force_sum_reduction_for_comms(sums_only)
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)
        found += scatter.ops
    assert found == [dist.ReduceOp.AVG, dist.ReduceOp.SUM]


@on_ranks(4)
def test_hooks_get_means_or_sums() -> None:
    mesh = mesh_of(4, 1)
    found = []
    for sums_only in (False, True):
        plain, model = two_equal_models(lambda: Model(6, 2))
        fully_shard(model, mesh["data"])
        flats: list[Tensor] = []
        model.set_all_reduce_hook(lambda flat, flats=flats: flats.append(flat.clone()))
        model.set_force_sum_reduction_for_comms(sums_only)
        backward_of_each(plain, model, mesh)
        same_gradients(plain, model)
        (flat,) = flats
        found.append(flat)
    torch.testing.assert_close(found[1], found[0] * 4)


@on_ranks(4)
def test_a_hook_reduces_over_replicas_of_its_own() -> None:
    mesh = two_axes()
    plain, model = sharded(mesh)
    replicas = mesh.get_group("replica")

    def average(flat: Tensor) -> None:
        dist.all_reduce(flat, group=replicas)
        flat /= 2

    for unit in (model, *model.blocks):
        unit.set_all_reduce_hook(average)
    tokens, targets = batch(0)
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *rows(mesh, tokens, targets)).backward()
    same_gradients(plain, model)
    with pytest.raises(LayoutError, match="CPUs do not have streams"):
        model.set_all_reduce_hook(average, stream=object())
    hybrid = fully_shard(nn.Linear(4, 4), mesh)
    with pytest.raises(ValueError, match="stream cannot be set"):
        hybrid.set_all_reduce_hook(average, stream=object())


# --- reductions -----------------------------------------------------------------------------------


@on_ranks(4)
def test_requires_all_reduce() -> None:
    mesh = two_axes()
    plain, model = replicated(mesh)
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        axes: list[str] = []

        def note(event: Any, axes: list[str] = axes) -> None:
            axes.append("+".join(event.comm.axes))

        with observing(note):
            loss_of(model, *rows(mesh, tokens, targets)).backward()
        assert any("replica" in names for names in axes) is (step == 2)
        assert all((param.grad is not None) is (step == 2) for param in model.parameters())
    same_gradients(plain, model)


@on_ranks(4)
def test_what_is_kept_is_reduced_over_replicas_too() -> None:
    """It stayed a sum over the shards, and no parameter had a gradient."""
    mesh = two_axes()
    plain, model = replicated(mesh)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        loss_of(model, *rows(mesh, tokens, targets)).backward()
    model.reduce_gradients()
    same_gradients(plain, model)
    # while a sum over the shards stays one, if the user wants that
    model.zero_grad()
    model.set_requires_gradient_sync(True)
    with model.no_sync():
        loss_of(model, *rows(mesh, *batch(0))).backward()
    model.set_requires_all_reduce(False)
    model.reduce_gradients()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(4)
def test_sums_over_shards_that_a_fault_gives_back() -> None:
    mesh = two_axes()
    plain, model = replicated(mesh)
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        if step == 1:
            with raising(model.embedding, "backward"), pytest.raises(Fault):
                loss_of(model, *rows(mesh, tokens, targets)).backward()
        loss_of(model, *rows(mesh, tokens, targets)).backward()
    same_gradients(plain, model)
    # with gradients that each rank has kept
    model.set_requires_all_reduce(False)
    loss_of(model, *rows(mesh, *batch(2))).backward()
    with model.no_sync():
        loss_of(model, *rows(mesh, *batch(3))).backward()
    assert not unit_of(model).all_reduces
    model.set_requires_gradient_sync(True)
    model.reduce_gradients()
    for step in (2, 3):
        loss_of(plain, *batch(step)).backward()
    same_gradients(plain, model)
    model.set_requires_all_reduce(False)
    loss_of(model, *rows(mesh, *batch(2))).backward()
    model.zero_grad()
    model.reduce_gradients()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(4)
def test_reductions_that_are_not_the_last_are_delivered_with_it() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.set_is_last_backward(step == 2)
        backward_of_each(plain, model, mesh, step)
        assert all((param.grad is not None) is (step == 2) for param in model.parameters())
        if step < 2:
            with pytest.raises(StyleError, match="still in flight"):
                optimizer.step()
    same_gradients(plain, model)
    optimizer.step()
    model.zero_grad()
    model.set_is_last_backward(False)
    backward_of_each(plain, model, mesh)
    model.zero_grad()
    model.set_is_last_backward(True)
    plain.zero_grad()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    backward_of_each(plain, model, mesh, 1)
    same_gradients(plain, model)


@pytest.mark.parametrize("syncs", [True, False])
@on_ranks(4)
def test_finalize_backward(syncs: bool) -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        model.set_requires_gradient_sync(syncs)
        backward_of_each(plain, model, mesh, step)
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    assert all(param.grad is None for param in model.parameters())
    handle.wait()
    same_gradients(plain, model)
    backward_of_each(plain, model, mesh, 2)
    assert model.finalize_backward() is None
    same_gradients(plain, model)
    model.set_manual_backward_finalization(False)
    backward_of_each(plain, model, mesh, 3)
    same_gradients(plain, model)


class Fork(nn.Module):
    """Two branches, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 3)
        self.right = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


@on_ranks(4, timeout=60)
def test_units_that_some_ranks_do_not_reach() -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(Fork)
    for branch in (model.left, model.right):
        fully_shard(branch, mesh["data"], reshard_after_forward=False)
    fully_shard(model, mesh["data"])
    model.set_reduce_scatter_unused_params(True)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    left, right = plain(x)
    (left.square().sum() + right[:1].square().sum()).div(4).backward()
    left, right = model(*own(mesh, x))
    loss = left.square().sum()
    if dist.get_rank() == 0:
        loss = loss + right.square().sum()
    loss.backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_zeros_for_unused_parameters() -> None:
    mesh = mesh_of(4, 1)
    for asked in (False, True):
        torch.manual_seed(0)
        model: Any = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})
        model.forward = lambda x, model=model: model["used"](x)
        fully_shard(model, mesh["data"])
        model.set_reduce_scatter_unused_params(asked)
        model(torch.ones(2, 4)).sum().backward()
        grad = model["unused"].weight.grad
        assert (grad is not None) is asked
        assert grad is None or not grad.full_tensor().any()


@contextmanager
def counting_reductions() -> Iterator[list[int]]:
    """How many reductions are in flight when each of them has begun."""
    begun: list[GroupReduction] = []
    in_flight: list[int] = []
    start = GroupReduction.start

    def counted(*args: Any, **kwargs: Any) -> GroupReduction:
        reduction = start(*args, **kwargs)
        begun.append(reduction)
        in_flight.append(sum(one._in_flight is not None for one in begun))
        return reduction

    with patch.object(GroupReduction, "start", counted):
        yield in_flight


@on_ranks(4)
def test_more_reductions_in_flight() -> None:
    mesh = mesh_of(4, 1)
    for limit in (1, 2, 3, 4):
        plain, model = two_equal_models(lambda: Model(6, 4))
        shard_blocks_and_root(model, mesh["data"])
        model.set_reduce_scatter_max_input_buffers(limit)
        with counting_reductions() as in_flight:
            backward_of_each(plain, model, mesh)
        assert in_flight == [min(count, limit) for count in range(1, len(in_flight) + 1)]
        assert len(in_flight) > limit
        same_gradients(plain, model)
    for wrong, error in ((0, ValueError), (True, TypeError), (1.5, TypeError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(wrong)


@on_ranks(4)
def test_groups_of_their_own_for_reductions() -> None:
    mesh = mesh_of(2, 2)
    found = []
    for enabled in (False, True, False):
        plain, model = sharded(mesh)
        model.set_separate_reduce_scatter_group(enabled)
        groups: dict[str, set[str]] = {"gathers": set(), "reduces": set()}

        def note(event: Any, groups: dict[str, set[str]] = groups) -> None:
            for word, names in groups.items():
                if word in event.purpose:
                    names.add(event.comm.name)

        with observing(note):
            backward_of_each(plain, model, mesh)
        same_gradients(plain, model)
        found.append(groups["gathers"] & groups["reduces"])
        assert all(groups.values())
    assert found[0] and not found[1] and found[0] == found[2]


@on_ranks(2)
def test_an_older_name_of_the_divisor() -> None:
    mesh = mesh_of(2, 1)
    plain, model = sharded(mesh)
    for unit in (model, *model.blocks):
        with pytest.warns(FutureWarning, match="set_gradient_divide_factor"):
            unit.set_reduce_scatter_divide_factor(4.0)
    tokens, targets = batch(0)
    (loss_of(plain, tokens, targets) / 2).backward()
    loss_of(model, *own(mesh, tokens, targets)).backward()
    same_gradients(plain, model)


# --- several modules, faults, refusals ------------------------------------------------------------


@on_ranks(2)
def test_modules_share_what_is_in_flight() -> None:
    mesh = mesh_of(2, 1)
    for shared in (False, True):
        (plain, model), (other_plain, other) = sharded(mesh), sharded(mesh)
        if shared:
            share_comm_ctx([model, other])
        model.set_is_last_backward(False)
        backward_of_each(plain, model, mesh)
        backward_of_each(other_plain, other, mesh, 1)
        assert (model.head.weight.grad is not None) is shared
        model.finalize_backward()
        same_gradients(plain, model)
        same_gradients(other_plain, other)
    share_comm_ctx([])
    wrong: Any = [model, nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="got Linear"):
        share_comm_ctx(wrong)


@on_ranks(4)
def test_reset_iter_state() -> None:
    mesh = mesh_of(4, 1)
    plain, model = sharded(mesh)
    tokens, targets = batch(0)
    with model.no_sync():
        loss_of(model, *own(mesh, tokens, targets)).backward()
    with raising(model.embedding, "backward"), pytest.raises(Fault):
        loss_of(model, *own(mesh, tokens, targets)).backward()
    with pytest.raises(StyleError, match="zero_grad"):
        loss_of(model, *own(mesh, tokens, targets)).backward()
    model.blocks[0].unshard()
    model.blocks[1].unshard(async_op=True)
    model.set_is_last_backward(False)
    with pytest.raises(RuntimeError, match="outermost"):
        model.blocks[0].reset_iter_state()
    model.reset_iter_state()
    assert gathered_bytes(model) == 0
    model.set_is_last_backward(True)
    backward_of_each(plain, model, mesh)
    same_gradients(plain, model)


def refuse(call: Callable[[Any], object], error: type[Exception], match: str = "") -> None:
    model = fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    with pytest.raises(error, match=match):
        call(model)


@on_ranks(2)
def test_what_only_cuda_has_is_refused() -> None:
    refuse(lambda m: m.set_symm_mem_for_comm(), UnsupportedModuleError)
    refuse(lambda m: m.set_symm_mem_for_comm("NVSHMEM"), UnsupportedModuleError, "'NVSHMEM'")
    refuse(lambda m: m.set_allocate_memory_from_process_group_for_comm(True), NotImplementedError)
    model = fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    model.set_allocate_memory_from_process_group_for_comm(False)
    refuse(lambda m: m.set_custom_all_gather(3), TypeError)
    refuse(lambda m: m.set_custom_reduce_scatter(print), TypeError)
    refuse(lambda m: m.set_requires_all_reduce("no"), StyleError)


@on_ranks(2)
def test_gradients_are_kept_as_they_arrive_where_all_forwards_come_first() -> None:
    """Pipelines held all gradients of a unit until its backward ended, beside the kept ones."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).double()
    model: Any = copy.deepcopy(plain)
    fully_shard(model, mesh)
    (unit,) = units_of(model)
    kept_before_the_first_layer: list[int] = []

    def watch(module: nn.Module, args: Any, output: Any) -> None:
        output.register_hook(lambda grad: kept_before_the_first_layer.append(len(unit.kept)))

    model[0].register_forward_hook(watch)
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain(x.flatten(0, 1)).square().sum().backward()
    mine = x.tensor_split(2)[torch.distributed.get_rank()]
    model.set_requires_gradient_sync(False)
    losses = [model(rows).square().sum() for rows in mine]
    for loss in losses:
        loss.backward()
    model.set_gradient_divide_factor(1)
    model.reduce_gradients()
    same_gradients(plain, model)
    # the weight of the second layer, and then all four parameters
    assert kept_before_the_first_layer == [1, 4]


# Methods with `recurse`, and a value that is not the default one.
RECURSIVE: dict[str, object] = {
    "set_requires_gradient_sync": False,
    "set_requires_all_reduce": False,
    "set_reshard_after_forward": False,
    "set_reshard_after_backward": False,
    "set_keep_unsharded_storage": True,
    "set_reduce_scatter_unused_params": True,
    "set_reduce_scatter_max_input_buffers": 3,
    "set_separate_reduce_scatter_group": True,
}


def choices_of(unit: Unit) -> tuple[object, ...]:
    """What methods have set for a unit."""
    settings = dataclasses.replace(unit.settings)
    communication = dataclasses.replace(unit.communication)
    return settings, communication, unit.syncs, unit.all_reduces, unit.frees_after_forward


@pytest.mark.parametrize("method", RECURSIVE)
def test_methods_concern_inner_units_unless_told_otherwise(method: str) -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(model[0], mesh)
        fully_shard(model, mesh)
        outer, inner = units_of(model)
        outer_before = choices_of(outer)
        inner_before = choices_of(inner)
        getattr(model, method)(RECURSIVE[method], recurse=False)
        assert choices_of(outer) != outer_before
        assert choices_of(inner) == inner_before
        getattr(model, method)(RECURSIVE[method])
        assert choices_of(inner) != inner_before


@on_ranks(2)
def test_an_inner_replica_reduces_unless_the_outer_one_speaks_for_it() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replicate(model[0])
    replicate(model)
    model.set_requires_all_reduce(False, recurse=False)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None and model[1].weight.grad is None
    model.zero_grad()
    model.set_requires_all_reduce(False)
    model(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is None


# --- calls ----------------------------------------------------------------------------------------


class UpThenDown(nn.Module):
    """Two layers; DTensors in, DTensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 3)

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize("dims", ["shard", "both", "replicate", "two"])
@pytest.mark.parametrize("loss", ["of all ranks", "of each rank"])
@on_ranks(4, timeout=120)
def test_data_axes_of_a_whole_mesh(loss: str, dims: str) -> None:
    """Parameters on the whole mesh: sharded over some axes, with a gradient of a batch's mean."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...], DataParallelMeshDims]] = {
        "shard": ((2, 2), ("data", "tensor"), DataParallelMeshDims(shard="data")),
        "both": ((2, 2), ("replica", "data"), DataParallelMeshDims("data", "replica")),
        "replicate": ((2, 2), ("data", "tensor"), DataParallelMeshDims(replicate="data")),
        "two": ((2, 2), ("outer", "inner"), DataParallelMeshDims(("outer", "inner"))),
    }
    shape, names, asked = shapes[dims]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plain, model = two_equal_models(UpThenDown)
    over_data: list[Placement] = [Shard(0) if name != "tensor" else Replicate() for name in names]
    for layer, dim in ((model.up, 0), (model.down, 1)):
        for name, param in [*layer.named_parameters()]:
            placed: list[Placement] = [Replicate()] * 2
            if "tensor" in names and (dim == 0 or param.ndim > 1):
                placed[1] = Shard(dim)
            moved = distribute_tensor(param.detach(), mesh, placed)
            setattr(layer, name, nn.Parameter(moved))
    fully_shard(model.up, mesh=mesh, dp_mesh_dims=asked)
    fully_shard(model, mesh=mesh, dp_mesh_dims=asked)
    if dims != "replicate":
        assert model.up.weight.to_local().numel() < 60
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(2):
        plain(x).square().mean().backward()
        out = model(distribute_tensor(x, mesh, over_data))
        if loss == "of all ranks":
            out.square().mean().backward()
        else:
            out.redistribute(placements=over_data).to_local().square().mean().backward()
        same_gradients(plain, model)


@pytest.mark.parametrize("offloads", [False, True])
@on_ranks(4, timeout=120)
def test_replicas_with_policies(offloads: bool) -> None:
    plain, model = (one.float() for one in two_equal_models(lambda: Model(6, 2)))
    if dist.get_rank() > 0:
        # all get the values of the first rank
        nn.init.zeros_(model.head.weight)
    inputs: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda _, args: inputs.append(args[0].dtype))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
    replicate(model, mp_policy=policy, offload_policy=offload)
    assert {FSDPModule, ReplicateModule} <= {*type(model).__mro__}
    mesh = mesh_of(4, 1)
    with observing(lambda event: pytest.fail(event.op) if "gather" in event.op else None):
        backward_of_each(plain, model, mesh)
        model.set_requires_all_reduce(False)
        backward_of_each(plain, model, mesh, 1)
        model.set_requires_all_reduce(True)
        backward_of_each(plain, model, mesh, 2)
    assert set(inputs) == {torch.bfloat16}
    for (name, expected), (_, got) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert got.grad is not None and got.grad.dtype == torch.float32
        torch.testing.assert_close(full(got.grad), expected.grad, rtol=0.05, atol=0.02, msg=name)
    with pytest.raises(ValueError, match="no shards to gather"):
        model.set_custom_all_gather(Gather())
    with pytest.raises(StyleError, match="cannot be combined"):
        replicate(nn.Linear(2, 2), mp_policy=policy, shard_optimizer=True)


@on_ranks(2)
def test_replicas_called_as_in_torch() -> None:
    mesh = mesh_of(2, 1)
    plain, model = two_equal_models(lambda: Model(6, 2))
    replicate(model, mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(), ignored_params=None)
    model.set_requires_all_reduce(False)
    backward_of_each(plain, model, mesh)
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_all_reduce(True)
    backward_of_each(plain, model, mesh, 1)
    same_gradients(plain, model)
    layers: list[Any] = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert replicate(layers) is layers
    assert all(isinstance(layer, ReplicateModule) for layer in layers)
    whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    moved = distribute_tensor(layers[0].weight.detach(), whole, [Replicate(), Shard(0)])
    layer: Any = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(moved)
    replicate(layer, mesh=whole, dp_mesh_dims=DataParallelMeshDims(replicate="data"))
    x = torch.arange(8.0).reshape(4, 2)
    layer(distribute_tensor(x, whole, [Shard(0), Replicate()])).square().mean().backward()
    weight = layers[0].weight.detach().requires_grad_()
    (x @ weight.t()).square().mean().backward()
    torch.testing.assert_close(full(layer.weight.grad), weight.grad)
    with pytest.raises(ValueError, match="use fully_shard"):
        replicate(nn.Linear(2, 2), mesh=whole, dp_mesh_dims=DataParallelMeshDims(shard="data"))


def test_data_axes_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="pass at least one axis name"):
        DataParallelMeshDims()
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="has no axes"):
            fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        moved = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Replicate()])
        model.weight = nn.Parameter(moved)
        with pytest.raises(ValueError, match="must be replicated"):
            fully_shard(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="data"))


# --- dtypes, and names ----------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_dropped_or_become_zeros(set_to_none: bool) -> None:
    # False was passed by no test
    model = fully_shard(nn.Linear(4, 4), mesh_of(2, 1)["data"])
    model(torch.ones(3, 4)).sum().backward()
    assert model.bias.grad is not None
    model.zero_grad(set_to_none)
    assert (model.bias.grad is None) == set_to_none
    if not set_to_none:
        assert not full(model.bias.grad).any()


@on_ranks(2)
def test_dtypes_of_single_parameters() -> None:
    mesh = mesh_of(2, 1)
    plain, model = (one.float() for one in two_equal_models(lambda: Model(6, 1)))
    exact = {id(param) for name, param in model.named_parameters() if "norm" in name}
    policy = MixedPrecisionPolicy(
        torch.bfloat16,
        torch.float32,
        param_dtype_override_fn=lambda param: torch.float32 if id(param) in exact else None,
    )
    fully_shard(model, mesh["data"], mp_policy=policy)
    model.unshard()
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    model.reshard()
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
    }
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    assert plain.blocks[0].norm.weight.dtype == model.blocks[0].norm.weight.dtype


def parameters_of(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters of a function, self left out."""
    signature = inspect.signature(function)
    return [(p.name, p.kind, p.default) for p in signature.parameters.values() if p.name != "self"]


@pytest.mark.parity
def test_methods_and_signatures_are_those_of_torch() -> None:
    from torch.distributed import fsdp

    theirs = {
        name: value
        for name, value in vars(fsdp.FSDPModule).items()
        if callable(value) and not name.startswith("_")
    }
    missing = [name for name in theirs if not hasattr(FSDPModule, name)]
    assert missing == []
    for name, method in theirs.items():
        assert parameters_of(getattr(FSDPModule, name)) == parameters_of(method), name
    assert set(fsdp.__all__) & {"share_comm_ctx", "register_fsdp_forward_method"}
    for function in (share_comm_ctx, register_fsdp_forward_method):
        assert parameters_of(function) == parameters_of(getattr(fsdp, function.__name__))


@pytest.mark.parity
def test_calls_take_the_arguments_of_torch() -> None:
    from torch.distributed import fsdp
    from torch.distributed._composable.replicate_with_fsdp import replicate as their_replicate

    for ours, theirs in ((fully_shard, fsdp.fully_shard), (replicate, their_replicate)):
        wanted = {name for name, *_ in parameters_of(theirs)}
        assert wanted <= {name for name, *_ in parameters_of(ours)}
    for kind in (MixedPrecisionPolicy, DataParallelMeshDims, CPUOffloadPolicy):
        fields = [(f.name, f.default) for f in dataclasses.fields(getattr(fsdp, kind.__name__))]
        own = [(f.name, f.default) for f in dataclasses.fields(kind)]
        assert own[: len(fields)] == fields
