"""`fully_shard(shard_optimizer=True)`: replicas divide the optimizer's work and its state.

Covers: units/shared_shards.py, parameters/data_axes.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` no types.

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data_parallel_model import (
    Model,
    batch,
    in_rows,
    loss_of,
    same_gradients,
    same_weights,
    train_alike,
    two_equal_models,
)
from shoal_data_parallel import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    LayoutError,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
    owned_shards,
)
from shoal_dtensor import Shard
from shoal_dtensor.internal import local_shard
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import counts, on_ranks


def grid(replicas: int = 2, shards: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))


def shard_units(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh, shard_optimizer=True, **options)
    return fully_shard(model, mesh, shard_optimizer=True, **options)


def rows_of_rank(*tensors: Tensor) -> list[Tensor]:
    ranks = torch.distributed.get_world_size()
    return [tensor.chunk(ranks)[torch.distributed.get_rank()] for tensor in tensors]


def train_both(plain: Any, model: Any) -> None:
    """Compare gradients, norms and weights of one process and of all ranks."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    ranks = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    train_alike(plain, model, in_rows(ranks), optimizers)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("reshards", [None, False])
@on_ranks(4)
def test_training_is_that_of_one_process(shape: tuple[int, int], reshards: bool | None) -> None:
    plain, model = two_equal_models()
    shard_units(model, grid(*shape), reshard_after_forward=reshards)
    train_both(plain, model)


@on_ranks(3)
def test_uneven_replicas() -> None:
    """13 rows on 3 replicas: 5, 5 and 3; 2 rows: 1, 1 and 0."""
    plain, model = two_equal_models(lambda: Model(dim=2))
    shard_units(model, grid(3, 1))
    tokens, targets = batch(0, rows=6)
    loss_of(plain, tokens, targets).backward()
    loss_of(model, *rows_of_rank(tokens, targets)).backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_a_rank_holds_its_part_of_the_optimizer() -> None:
    _, model = two_equal_models(lambda: Model(dim=16))
    mesh = grid()
    shard_units(model, mesh)
    weight = model.blocks[0].up.weight
    assert weight.device_mesh == mesh
    assert weight.shape == (48, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, *rows_of_rank(*batch(0))).backward()
    optimizer.step()
    for held in (weight, weight.grad, optimizer.state[weight]["exp_avg"]):
        assert held.to_local().shape == (12, 16)
    # the leaf has rows of the shard that both replicas have
    replica, shard = mesh.get_coordinate() or ()
    first = 24 * shard + 12 * replica
    assert weight.spec.box((replica, shard))[0] == (first, first + 12)


@on_ranks(4)
def test_memory_and_bytes_of_a_step() -> None:
    """Memory between steps and bytes sent, for a block of 64 x 64 in float64 on 2 x 2 ranks."""
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False).double()
    fully_shard(model, grid(), reshard_after_forward=True, shard_optimizer=True)
    whole = 64 * 64 * 8
    x = torch.randn(4, 64, dtype=torch.float64)
    with CommDebugMode() as forward:
        loss = model(x).sum()
    with CommDebugMode() as backward:
        loss.backward()
    # a rank sends a quarter to its replica, and a half to the other shard in each pass
    assert forward.get_bytes() == {("replica",): whole // 4, ("shard",): whole // 2}
    (unit,) = model._reducers()
    assert unit.shared is not None
    assert [shard.nbytes for shard in unit.shared.current(unit.parameters)] == [whole // 2]
    assert local_shard(model.weight).nbytes == whole // 4
    assert sum(tensor.untyped_storage().nbytes() for tensor in unit.current.tensors) == 0
    assert counts(backward) == {"all_gather": 1, "reduce_scatter": 1}


@on_ranks(4)
def test_replicas_are_updated_once_per_step() -> None:
    """Four units: four gathers over replicas after a step, none in later microbatches."""
    _, model = two_equal_models()
    shard_units(model, grid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gathers = []
    for step in range(4):
        with CommDebugMode() as forward:
            loss = loss_of(model, *rows_of_rank(*batch(step)))
        with CommDebugMode() as backward:
            loss.backward()
        # the reduction is one collective over both axes; one parameter is a number
        assert counts(backward) == {"all_gather": 3, "reduce_scatter": 4, "all_reduce": 1}
        gathers.append(counts(forward)["all_gather"])
        if step == 1:
            optimizer.step()
    assert gathers == [8, 4, 8, 4]


@on_ranks(4)
def test_frozen_leaves_are_sent_once() -> None:
    plain, model = two_equal_models()
    for each in (plain, model):
        each.blocks.requires_grad_(False)
    shard_units(model, grid())
    train_both(plain, model)
    with CommDebugMode() as counted:
        model(rows_of_rank(batch(0)[0])[0])
    # of the four units only the outermost one has trained parameters
    assert counts(counted) == {"all_gather": 5}


@pytest.mark.parametrize("accumulate", ["no_sync", "shards", "in flight"])
@on_ranks(4)
def test_accumulated_gradients(accumulate: str) -> None:
    plain, model = two_equal_models()
    shard_units(model, grid())
    for step in range(2):
        if accumulate == "no_sync":
            model.set_requires_gradient_sync(step == 1)
        elif accumulate == "shards":
            model.set_requires_all_reduce(step == 1)
        else:
            model.set_is_last_backward(step == 1)
        tokens, targets = batch(step)
        loss_of(plain, tokens, targets).backward()
        loss = loss_of(model, *rows_of_rank(tokens, targets))
        with CommDebugMode() as counted:
            loss.backward()
        if accumulate == "shards" and step == 0:
            assert set(counted.get_bytes()) == {("shard",)}
            assert model.head.weight.grad is None
    same_gradients(plain, model)


@on_ranks(4)
def test_evaluation_writes_and_copies() -> None:
    plain, model = two_equal_models()
    shard_units(model, grid())
    tokens, targets = batch(0)
    with torch.inference_mode():
        torch.testing.assert_close(model(tokens), plain(tokens))
    with torch.no_grad():
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            param.mul_(1.5)
            other.mul_(1.5)
        torch.testing.assert_close(model(tokens), plain(tokens))
    copied = copy.deepcopy(model)
    loss_of(plain, tokens, targets).backward()
    for one in (model, copied):
        loss_of(one, *rows_of_rank(tokens, targets)).backward()
        same_gradients(plain, one)
    block = model.blocks[0]
    block.unshard()
    assert torch.equal(block.up.weight, plain.blocks[0].up.weight)
    block.reshard()


@on_ranks(4)
def test_low_precision_is_sent_and_masters_are_kept() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 64, bias=False).bfloat16()
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard(model, grid(), mp_policy=policy, shard_optimizer=True)
    x = torch.randn(2, 64)
    with CommDebugMode() as counted:
        out = model(x)
    assert torch.equal(out, plain(x.bfloat16()))
    assert counted.get_bytes() == {("replica",): 64 * 64 * 2 // 4, ("shard",): 64 * 64 * 2 // 2}
    out.float().sum().backward()
    assert model.weight.dtype == model.weight.grad.dtype == torch.float32


@on_ranks(4)
def test_leaves_in_host_memory_and_on_the_meta_device() -> None:
    plain, model = two_equal_models()
    shard_units(model, grid(), offload_policy=CPUOffloadPolicy())
    train_both(plain, model)
    with torch.device("meta"):
        late: Any = Model().double()
    shard_units(late, grid())
    late.to_empty(device="cpu")
    late.load_state_dict(model.state_dict())
    same_weights(plain, late)
    tokens, _ = batch(0)
    torch.testing.assert_close(late(tokens), plain(tokens))


@on_ranks(4)
def test_owned_matrices_over_replicas_and_shards() -> None:
    """Muon sends nothing, and each matrix has one owner among all four ranks."""
    torch.manual_seed(0)
    sizes = ((6, 8), (8, 10), (10, 4), (4, 6))
    plain: Any = nn.Sequential(*(nn.Linear(n, m, bias=False) for n, m in sizes)).double()
    model: Any = copy.deepcopy(plain)
    place = owned_shards(model.parameters(), ranks=4)
    fully_shard(model, grid(), shard_placement_fn=place, shard_optimizer=True)
    owned = [param for param in model.parameters() if local_shard(param).numel()]
    assert len(owned) == 1
    optimizers = [torch.optim.Muon(each.parameters(), lr=0.1) for each in (plain, model)]
    rank = torch.distributed.get_rank()
    for step in range(2):
        rows = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain.zero_grad()
        plain(rows).square().mean().backward()
        model.zero_grad()
        model(rows.chunk(4)[rank]).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            summed = one.grad.full_tensor()
            torch.testing.assert_close(summed, other.grad)
            # the update is computed in bfloat16, which enlarges differences in the last bits
            other.grad = summed
        optimizers[0].step()
        with CommDebugMode() as counted:
            optimizers[1].step()
        assert not counts(counted)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other)


@pytest.mark.parametrize(
    "placement",
    [
        Shard(1),
        Shard(-1),
        Shard(0, multiple_of=4),
        Shard(0, sizes=(3, 10)),
        Shard(0, sizes=(0, 5, 5, 3)),
    ],
)
@on_ranks(4)
def test_placements_of_users(placement: Shard) -> None:
    plain, model = (nn.Linear(8, 13, bias=False).double() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fully_shard(model, grid(), shard_placement_fn=lambda _: placement, shard_optimizer=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    rows = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        plain(rows).square().mean().backward()
        model(rows_of_rank(rows)[0]).square().mean().backward()
        same_gradients(plain, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_weights(plain, model)


@on_ranks(4)
def test_a_mesh_per_parameter_and_named_axes() -> None:
    mesh = grid()
    plain, model = two_equal_models()
    pairs = HSDPMeshInfo(mesh, shard_mesh_dim=0, replicate_mesh_dim=1)
    line = FSDPMeshInfo(init_device_mesh("cpu", (4,), mesh_dim_names=("line",)), shard_mesh_dim=0)

    def choose(param: nn.Parameter) -> Any:
        if param.shape == (30,):
            return ShardPlacementResult(None, line)
        return ShardPlacementResult(None, pairs) if param.ndim == 2 else None

    shard_units(model, mesh, shard_placement_fn=choose)
    up = model.blocks[0].up
    assert local_shard(up.bias).shape == (8,) if mesh.get_coordinate() != (1, 1) else (6,)
    # 30 rows: two shards of 15 over "replica", of which a rank of "shard" updates 8 or 7
    assert local_shard(up.weight).shape[0] in (7, 8)
    train_both(plain, model)
    plain, model = two_equal_models()
    dims = DataParallelMeshDims(shard="shard", replicate="replica")
    fully_shard(model, mesh, dp_mesh_dims=dims, shard_optimizer=True)
    assert local_shard(model.head.weight).shape[0] in (3, 4)


@on_ranks(4)
def test_what_has_no_replicas_or_cannot_be_kept() -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    alone = fully_shard(nn.Linear(8, 8), line, shard_optimizer=True)
    assert alone.weight.placements == (Shard(0),)
    with pytest.raises(LayoutError, match="with shard_optimizer, reshard_after_forward must be"):
        mesh = init_device_mesh("cpu", (1, 4))
        fully_shard(nn.Linear(8, 8), mesh, reshard_after_forward=2, shard_optimizer=True)
    with pytest.raises(LayoutError, match="for each of 4 ranks, got 3 sizes"):
        fully_shard(
            nn.Linear(8, 8, bias=False),
            grid(),
            shard_placement_fn=lambda _: Shard(0, sizes=(2, 2, 4)),
            shard_optimizer=True,
        )


@on_ranks(4)
def test_a_step_that_raises_and_a_reset() -> None:
    plain, model = two_equal_models()
    shard_units(model, grid())

    def stop(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.blocks[1].register_forward_hook(stop)
    with pytest.raises(RuntimeError, match="on purpose"):
        loss_of(model, *rows_of_rank(*batch(0)))
    handle.remove()
    model.reset_iter_state()
    train_both(plain, model)
