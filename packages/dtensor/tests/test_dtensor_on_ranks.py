"""DTensors on ranks.

Covers: tensor/{dtensor,autograd,spec_arguments}.py, api/constructors.py, dispatch/dispatch.py.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    checked_replicas,
    communication,
    distribute_module,
    distribute_tensor,
    full,
    get_rng_state,
    implicit_replication,
    local_map,
    ones,
    safe_globals,
    set_rng_state,
    unknown_ops,
    zeros,
)
from shoal_dtensor.errors import (
    CommunicationForbiddenError,
    InPlaceError,
    MixedTensorError,
    NoRuleError,
    PlacementError,
)
from shoal_mesh import (
    CommDebugMode,
    DeviceMesh,
    LockstepError,
    differentiable,
    init_device_mesh,
    lockstep,
    restart_world,
)
from shoal_mesh.testing import on_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACEMENTS_1D: list[list[Placement]] = [[R], [S0], [S1], [Shard(0, multiple_of=3)]]
PLACEMENTS_2D: list[list[Placement]] = [list(pair) for pair in product([R, S0, S1], repeat=2)]


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def mesh_2d() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def spread(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Placement], **more: Any) -> Any:
    """`distribute_tensor`, of type Any: what operators return is typed as a plain tensor."""
    return distribute_tensor(tensor, mesh, placements, **more)


def sample(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 7), (0, 3), (1, 1)], ids=str)
@on_ranks(4)
def test_distribute_and_gather_is_the_identity(shape: tuple[int, int]) -> None:
    whole = sample(*shape)
    for mesh, choices in ((mesh_1d(), PLACEMENTS_1D), (mesh_2d(), PLACEMENTS_2D)):
        for placements in choices:
            for source in (0, 1, None):
                given = (
                    whole
                    if source is None or mesh.get_coordinate() == (source,) * mesh.ndim
                    else whole + 1
                )
                x = spread(given, mesh, placements, src_data_rank=source)
                assert x.to_local().shape == x._spec.local_shape
                assert torch.equal(x.full_tensor(), whole), (placements, source)


@on_ranks(4)
def test_every_redistribution_keeps_the_values_and_the_gradient() -> None:
    whole = sample(5, 3)
    mesh = mesh_2d()
    for source, target in product(PLACEMENTS_2D, PLACEMENTS_2D):
        x = spread(whole, mesh, source).requires_grad_()
        y = x.redistribute(placements=target)
        assert y.placements == tuple(target)
        weights = spread(sample(5, 3, seed=2), mesh, target)
        (y * weights).sum().backward()
        assert x.grad is not None and x.grad.placements == tuple(source)
        assert torch.equal(x.grad.full_tensor(), sample(5, 3, seed=2))
        assert torch.equal(y.full_tensor(), whole)


@on_ranks(4)
def test_shard_order_is_public() -> None:
    whole, mesh = sample(7, 2), mesh_2d()
    x = spread(whole, mesh, [S0, S0], shard_order=((0, (1, 0)),))
    assert x.shard_order == ((0, (1, 0)),)
    assert torch.equal(x.full_tensor(), whole)
    y = x.redistribute(placements=[S0, S0])
    assert y.shard_order == ((0, (0, 1)),) and torch.equal(y.full_tensor(), whole)
    assert (x + x).shard_order == ((0, (1, 0)),)


@on_ranks(4)
def test_partial_values_are_reduced_when_read() -> None:
    mesh = mesh_1d()
    rank = mesh.get_rank()
    for op, expected in (
        ("sum", 10.0),
        ("avg", 2.5),
        ("max", 4.0),
        ("min", 1.0),
        ("product", 24.0),
    ):
        x = DTensor.from_local(torch.full((), rank + 1.0), mesh, [Partial(op)])
        assert x.item() == expected
        assert float(x) == expected
        assert x.full_tensor().item() == expected
    assert ones(3, device_mesh=mesh, placements=[Partial()]).full_tensor().tolist() == [1.0] * 3
    assert (
        full((2,), 3.0, device_mesh=mesh, placements=[Partial("avg")]).full_tensor().tolist()
        == [3.0] * 2
    )


@on_ranks(4)
def test_gradients_of_partial_local_values() -> None:
    mesh = mesh_1d()
    for op, expected in (("sum", 1.0), ("avg", 0.25)):
        local = torch.ones(3, requires_grad=True)
        whole: Any = DTensor.from_local(local, mesh, [Partial(op)])
        whole.redistribute(placements=[R]).to_local().sum().backward()
        assert local.grad is not None and local.grad.tolist() == [expected] * 3
    with pytest.raises(PlacementError, match="gradients cannot flow"):
        DTensor.from_local(torch.ones(3, requires_grad=True), mesh, [Partial("max")])


@on_ranks(4)
def test_a_leafs_gradient_has_the_layout_of_the_leaf_before_hooks_see_it() -> None:
    mesh = mesh_1d()
    weight: Any = torch.nn.Parameter(spread(sample(3, 4), mesh, [R]))
    seen: list[tuple[Placement, ...]] = []
    weight.register_hook(lambda grad: seen.append(grad.placements))
    x = spread(sample(8, 3), mesh, [S0])
    (x @ weight).sum().backward()
    assert seen == [(R,)]
    assert weight.grad is not None and weight.grad.placements == (R,)
    assert torch.allclose(weight.grad.to_local(), sample(8, 3).sum(0)[:, None].expand(3, 4))


@on_ranks(4)
def test_a_leafs_gradient_is_a_dtensor_even_where_torch_makes_plain_zeros() -> None:
    for placement in (R, S0, S1):
        x = spread(sample(1, 6), mesh_1d(), [placement]).requires_grad_()
        empty = x.sum(0)[:0]
        made: Any = torch.cat([empty, empty]).square().sum()
        made.backward()
        assert x.grad.placements == (placement,) and x.grad.full_tensor().tolist() == [[0.0] * 6]


@on_ranks(4)
def test_writes_through_views_reach_the_base() -> None:
    mesh = mesh_1d()
    for shape in ((8, 4), (5, 4)):
        for placement in (R, S0, S1):
            whole = sample(*shape)
            w = spread(whole, mesh, [placement])
            w[:2].zero_()
            whole[:2].zero_()
            w[0].fill_(5)
            whole[0].fill_(5)
            w[1:3, ::2] = 7.0
            whole[1:3, ::2] = 7.0
            w.t()[0].mul_(2)
            whole.t()[0].mul_(2)
            assert torch.equal(w.full_tensor(), whole), (shape, placement)


@on_ranks(4)
def test_a_write_that_cannot_reach_the_base_raises() -> None:
    w = spread(sample(8, 3), mesh_1d(), [S0])
    # rows of 8 elements begin inside of rows of 3, on other ranks: the view is a copy
    view = w.view(3, 8)
    with pytest.raises(InPlaceError, match="redistributed to take it"):
        view.mul_(2)
    assert torch.equal(w.full_tensor(), sample(8, 3))


@on_ranks(4)
def test_a_write_to_a_flat_view_reaches_the_base() -> None:
    w = spread(sample(6, 4), mesh_1d(), [S1])
    w.view(24).mul_(2)
    assert torch.equal(w.full_tensor(), sample(6, 4) * 2)


@on_ranks(4)
def test_a_write_that_would_have_to_change_the_shape_raises() -> None:
    mesh = mesh_1d()
    partial = DTensor.from_local(torch.ones(1), mesh, [Partial()])
    with pytest.raises((InPlaceError, RuntimeError), match=r"can be written there|doesn't match"):
        partial.add_(spread(sample(3), mesh, [R]))


@on_ranks(4)
def test_uneven_local_parts_become_ragged_shards_or_raise() -> None:
    mesh = mesh_1d()
    rank = mesh.get_rank()
    local = torch.full((rank, 2), float(rank))
    x = DTensor.from_local(local, mesh, [S0], run_check=True)
    assert x.shape == (6, 2) and x.placements == (Shard(0, sizes=(0, 1, 2, 3)),)
    assert x.full_tensor()[:, 0].tolist() == [1.0, 2.0, 2.0, 3.0, 3.0, 3.0]
    with pytest.raises(PlacementError, match="the same size along mesh axes that do not shard it"):
        DTensor.from_local(local, mesh, [R], run_check=True)
    same = DTensor.from_local(torch.full((2,), float(rank)), mesh, [R], run_check=True)
    assert same.to_local().tolist() == [0.0, 0.0]


@on_ranks(4)
def test_copies_keep_the_layout() -> None:
    mesh = mesh_1d()
    p: Any = torch.nn.Parameter(spread(sample(5, 3), mesh, [S0]))
    p.grad = p.detach()
    copies: list[Any] = [copy.deepcopy(p), pickle.loads(pickle.dumps(p))]
    assert copies[0].grad is None  # as of a plain parameter
    for made in copies:
        assert getattr(made, "_is_param", False) and made.requires_grad
        assert made._spec is p._spec and torch.equal(made.to_local(), p.to_local())
    buffer = io.BytesIO()
    torch.save({"p": p}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)["p"]._spec is p._spec


@on_ranks(4)
def test_checkpoints_load_with_weights_only() -> None:
    mesh = mesh_2d()
    state: dict[str, Any] = {
        "parameter": torch.nn.Parameter(spread(sample(5, 3), mesh, [S0, S1])),
        "ragged": spread(sample(8, 3), mesh["tp"], [Shard(0, sizes=(1, 7))]),
        "blocks": spread(sample(8, 3), mesh, [R, Shard(0, multiple_of=4)]),
        "partial": DTensor.from_local(torch.ones(3), mesh, [Partial(), R]),
        "random": get_rng_state(),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    # the line to add, and not one internal name after another
    with pytest.raises(
        pickle.UnpicklingError,
        match=r"GLOBAL shoal_dtensor[\s\S]*add_safe_globals\(shoal_dtensor\.safe_globals\(\)\)",
    ):
        torch.load(buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals(safe_globals()):
        found = torch.load(buffer, weights_only=True)
    for name in ("parameter", "ragged", "blocks", "partial"):
        assert found[name]._spec is state[name]._spec and torch.equal(
            found[name].to_local(), state[name].to_local()
        )
    assert getattr(found["parameter"], "_is_param", False) and found["parameter"].requires_grad
    set_rng_state(found["random"])


@on_ranks(4)
def test_plain_tensors_do_not_mix_silently() -> None:
    mesh = mesh_1d()
    x = spread(sample(8), mesh, [S0])
    with pytest.raises(MixedTensorError, match=r"plain tensor of shape \(8,\)"):
        x + torch.ones(8, dtype=torch.float64)
    assert torch.equal((x + torch.tensor(1.0)).full_tensor(), sample(8) + 1)
    with implicit_replication():
        with implicit_replication():
            pass
        assert torch.equal((x * sample(8)).full_tensor(), sample(8) * sample(8))
    with pytest.raises(MixedTensorError, match="together with a plain tensor"):
        x + torch.ones(8, dtype=torch.float64)


def with_other_gradients_on_ranks(x: torch.Tensor, mesh: DeviceMesh) -> Any:
    return (
        spread(x, mesh["tp"], [R]).to_local(grad_placements=[Partial()]).view(2, 2).mul(2).flatten()
    )


def shard_of_the_other_axis(x: torch.Tensor, mesh: DeviceMesh) -> Any:
    return spread(x.detach().repeat(2).requires_grad_(), mesh["dp"], [S0]).to_local()


# What a plain tensor of 4 elements is made of, on a mesh (dp, tp) -> whether its whole gradient
# would be counted twice.
HISTORIES: dict[str, tuple[Callable[[torch.Tensor, DeviceMesh], torch.Tensor], bool]] = {
    "a leaf": (lambda x, mesh: x, False),
    "a replicated DTensor": (lambda x, mesh: spread(x, mesh["tp"], [R]).to_local(), False),
    "one whose ranks do different things": (
        with_other_gradients_on_ranks,
        True,
    ),
    "shards on the other axis": (
        shard_of_the_other_axis,
        False,
    ),
    "a copy that sums gradients": (
        lambda x, mesh: differentiable.sum_gradients(x * 2, (mesh, "tp")),
        True,
    ),
    "a sum": (lambda x, mesh: differentiable.all_reduce_replicated(x * 2, (mesh, "tp")), False),
}


@on_ranks(4)
@pytest.mark.parametrize("history", HISTORIES)
def test_a_local_tensor_does_not_get_the_gradient_of_a_replicated_one(history: str) -> None:
    make, twice = HISTORIES[history]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x, w = sample(4).requires_grad_(), spread(sample(4), mesh["tp"], [S0])
    y = make(x, mesh)
    with implicit_replication():
        loss: Any = (w * y.cos()).sum()
    y.retain_grad()
    if twice:
        with pytest.raises(
            MixedTensorError,
            match=r"adds a share of its gradient from each of the ranks \([0-3], ",
        ):
            loss.backward()
        return
    loss.backward()
    assert y.grad is not None
    torch.testing.assert_close(y.grad, -y.detach().sin() * sample(4))


@on_ranks(4)
def test_implicit_communication_can_be_forbidden() -> None:
    mesh = mesh_1d()
    x, y = spread(sample(8, 4), mesh, [S0]), spread(sample(8, 4), mesh, [S1])
    with communication("forbid"):
        assert (x + x).placements == (S0,)
        with pytest.raises(CommunicationForbiddenError, match="needs implicit communication"):
            x + y
        with communication("allow"):
            assert torch.equal((x + y).full_tensor(), sample(8, 4) * 2)
        x.redistribute(placements=[R])
    with communication("warn"), pytest.warns(UserWarning, match="needs implicit communication"):
        x + y


@on_ranks(4)
def test_unknown_operators_follow_the_policy() -> None:
    mesh = mesh_1d()
    x = spread(sample(6).abs() + 1, mesh, [S0])
    op = torch.ops.aten._test_functorch_fallback.default
    with unknown_ops("error"), pytest.raises(NoRuleError, match="does not have a sharding rule"):
        op(x, x)
    with unknown_ops("local"):
        assert op(x, x).placements == (S0,)
    with pytest.warns(UserWarning, match="replicated"):
        assert op(x, x).placements == (R,)


@on_ranks(4)
def test_async_waits_at_first_use() -> None:
    mesh = mesh_1d()
    x: Any = spread(sample(8, 4), mesh, [S0])
    y: Any = x.redistribute(placements=[R], async_op=True)
    assert type(y).__name__ == "DeferredDTensor"
    assert torch.equal((y + y).to_local(), sample(8, 4) * 2)
    assert type(y) is DTensor


@on_ranks(4)
def test_data_dependent_shapes() -> None:
    mesh = mesh_1d()
    x = spread(torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0]), mesh, [S0])
    assert x.nonzero().full_tensor().tolist() == [[1], [3], [4]]
    assert x[x > 0].full_tensor().tolist() == [1.0, 2.0, 3.0]


@on_ranks(4)
def test_auxiliary_outputs_have_the_shape_that_the_kernel_gives_them() -> None:
    mesh = mesh_1d()
    weight, indices, offsets = sample(6, 4), torch.tensor([0, 2, 1, 5]), torch.tensor([0, 3])
    operation = torch.ops.aten._embedding_bag_forward_only.default
    expected = operation(weight, indices, offsets)
    for _ in range(2):
        inputs = [
            spread(weight, mesh, [S1]),
            spread(indices, mesh, [R]),
            spread(offsets, mesh, [R]),
        ]
        got = operation(*inputs)
        assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in expected]
        assert torch.allclose(got[0].full_tensor(), expected[0])


@on_ranks(4)
def test_local_map_is_right_for_uneven_shards() -> None:
    mesh = mesh_1d()
    x = spread(sample(5, 2), mesh, [S0])
    doubled = local_map(lambda t: torch.cat([t, t], 1), out_placements=[S0], in_placements=([S0],))(
        x
    )
    assert doubled.shape == (5, 4)
    assert torch.equal(doubled.full_tensor(), torch.cat([sample(5, 2)] * 2, 1))
    with pytest.raises(PlacementError, match="in_placements expects"):
        local_map(lambda t: t, out_placements=[S1], in_placements=([S1],))(x)


@on_ranks(4)
def test_distribute_module_keeps_shared_parameters_shared() -> None:
    mesh = mesh_1d()
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[1].weight = module[0].weight
    distribute_module(module, mesh)
    assert module[0].weight is module[1].weight and isinstance(module[0].weight, DTensor)
    with pytest.raises(PlacementError, match="distributed before"):
        distribute_module(module, mesh)


@on_ranks(4)
def test_a_replicated_tensor_used_differently_per_rank_is_found_on_request() -> None:
    mesh = mesh_1d()
    for grad_placements, found in ((None, True), ([Partial()], False)):
        w = spread(sample(3), mesh, [R]).requires_grad_()
        with checked_replicas():
            local = w.to_local(grad_placements=grad_placements)
        loss = (local * (mesh.get_rank() + 1)).sum()
        if found:
            with pytest.raises(LockstepError, match="the gradient that to_local of"):
                loss.backward()
        else:
            loss.backward()
            assert w.grad.to_local().tolist() == [10.0] * 3


@on_ranks(4)
def test_lockstep_errors_name_the_operator_that_communicates() -> None:
    mesh = mesh_1d()
    x, y = spread(sample(8, 4), mesh, [S0]), spread(sample(8, 4), mesh, [S1])
    operation = torch.mul if mesh.get_rank() == 0 else torch.add
    with lockstep(timeout=5), pytest.raises(LockstepError, match=r"aten\.(add|mul)"):
        operation(x, y)
    restart_world()


@on_ranks(4)
def test_reading_values() -> None:
    mesh = mesh_1d()
    x = spread(torch.arange(6.0), mesh, [S0])
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [float(v) for v in x] == x.tolist()
    with pytest.raises(PlacementError, match="only replicated DTensors"):
        x.numpy()
    assert x.numpy(force=True).sum() == 15 and zeros(2, device_mesh=mesh).numpy().sum() == 0
    assert "placements=(Shard(dim=0),)" in repr(x)


@on_ranks(4)
def test_collectives_are_those_that_the_layout_needs() -> None:
    mesh = mesh_1d()
    x, w = spread(sample(8, 4), mesh, [S1]), spread(sample(4, 8), mesh, [S0])
    with CommDebugMode() as comm:
        y = x @ w
    assert comm.get_total_counts() == 0 and y.placements == (Partial(),)
    with CommDebugMode() as comm:
        y.redistribute(placements=[S0])
    assert comm.get_comm_counts()[torch.ops._c10d_functional.reduce_scatter_tensor] == 1
    assert comm.get_total_counts() == 1


@on_ranks(4)
def test_a_local_tensor_that_requires_grad_can_be_gathered_inside_an_op_when_uneven() -> None:
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(48.0).view(8, 6)
    local = full[:, 2 * mesh.get_rank() : 2 * mesh.get_rank() + 2].contiguous().requires_grad_()
    sharded = DTensor.from_local(
        local, mesh, [Shard(1)], run_check=False, shape=(8, 6), stride=(6, 1)
    )
    product: Any = sharded.t() @ sharded
    assert torch.equal(product.full_tensor(), full.t() @ full)


@on_ranks(4)
def test_an_operator_with_data_dependent_shape_sees_unsharded_batches() -> None:
    """`lstsq` has residuals or none, by the matrices' rank: batches are not computed in parts."""
    mesh = init_device_mesh("cpu", (4,))
    generator = torch.Generator().manual_seed(1)
    wholes = [
        torch.randn(3, 4, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(2)
    ]
    parts: list[Any] = [
        distribute_tensor(w.detach(), mesh, [Shard(0)]).requires_grad_() for w in wholes
    ]
    expected, found = torch.linalg.lstsq(*wholes), torch.linalg.lstsq(*parts)
    expected.solution.square().sum().backward()
    found.solution.square().sum().backward()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.full_tensor(), one)
    for whole, part in zip(wholes, parts, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad)


@on_ranks(4)
def test_ranks_outside_of_the_mesh_take_part_in_nothing() -> None:
    """A program that all ranks run goes on: they hold empty tensors, and wait for nobody."""
    mesh = DeviceMesh("cpu", [0, 2])
    inside = mesh.get_coordinate() is not None
    x: Any = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    w: Any = distribute_tensor(torch.eye(4), mesh, [Shard(1)]).requires_grad_()
    y = F.linear(x, w).softmax(0).t().sort(-1).values
    top = torch.cat([y, x])[:2].add_(1)
    (grad,) = torch.autograd.grad(y.sum() + top.mean(), w)
    torch._foreach_mul_([x], 2.0)
    assert (y.shape, top.shape, grad.shape) == ((4, 4), (2, 4), (4, 4))
    assert grad.placements == (Shard(1),)
    held: Any
    for held in (y, top, x, grad, DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])):
        assert inside or not held.to_local().numel()
    if not inside:
        with pytest.raises(PlacementError, match="outside of the mesh"):
            x.sum().item()
