"""Optimizers that step on local parts, on real ranks.

They give the numbers of one device, and DTensors for everybody else.

Covers: optim/local_step.py.
"""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    full_tensor,
    implicit_replication,
    local_step,
)
from shoal_dtensor.errors import ArgumentTypeError, MixedTensorError, PlacementError
from shoal_dtensor.optim.local_step import ELEMENTWISE
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import on_ranks

PLACEMENTS = (Shard(0), Shard(1), Replicate())
KINDS = {kind.__name__: kind for kind in ELEMENTWISE}


@functools.cache
def mesh() -> Any:
    """All ranks in a row."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters plain, and as DTensors with the last one plain.

    They are uneven, sharded by columns, and replicated.
    """
    torch.manual_seed(3)
    plain = [nn.Parameter(torch.randn(7, 3, dtype=torch.float64)) for _ in range(4)]
    spread = [
        nn.Parameter(distribute_tensor(p.detach(), mesh(), [at]))
        for p, at in zip(plain, PLACEMENTS)  # noqa: B905  # the last stays plain
    ]
    return plain, [*spread, nn.Parameter(plain[3].detach().clone())]


def give_gradients(plain: list[nn.Parameter], spread: list[nn.Parameter]) -> None:
    """The same gradients for both."""
    for one, other in zip(plain, spread, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
        if isinstance(other.data, DTensor):
            other.grad = distribute_tensor(one.grad, mesh(), other.data.placements)


def assert_same(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    """Parameters and states of two optimizers agree.

    States of DTensors are DTensors that lie as their parameters.
    """
    (group,), (spread_group,) = one.param_groups, other.param_groups
    for param, spread in zip(group["params"], spread_group["params"], strict=True):
        torch.testing.assert_close(full_tensor(spread.detach()), param.detach())
        assert one.state[param].keys() == other.state[spread].keys()
        for name, value in one.state[param].items():
            found = other.state[spread][name]
            torch.testing.assert_close(full_tensor(found), value)
            if isinstance(spread, DTensor) and isinstance(value, torch.Tensor) and value.ndim:
                assert isinstance(found, DTensor)
                assert found._spec.same_layout(spread._spec)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_numbers_are_those_of_one_device(kind: str, foreach: bool) -> None:
    plain, spread = parameters()
    more: dict[str, Any] = {"momentum": 0.9} if kind in ("SGD", "RMSprop") else {}
    one = KINDS[kind](plain, lr=0.1, foreach=foreach, **more)
    other = KINDS[kind](spread, lr=0.1, foreach=foreach, **more)
    for _ in range(3):
        give_gradients(plain, spread)
        with CommDebugMode() as comm:
            other.step()
        assert comm.get_total_counts() == 0
        one.step()
        assert_same(one, other)
    assert all(getattr(p, "_local_tensor", p).grad is None for p in spread[:3])


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
@on_ranks(4)
def test_fused_steps_follow_every_change_and_keep_no_gradients(kind: str) -> None:
    plain, spread = parameters()
    more: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    both = []
    for params in (plain, spread):
        # of DTensors; and mixed
        groups: list[dict[str, Any]] = [{"params": params[:2]}, {"params": params[2:]}]
        kind_of_optimizer: Any = KINDS[kind]
        both.append(kind_of_optimizer(groups, lr=0.1, fused=True, **more))
    one, other = both
    for turn in range(9):
        give_gradients(plain, spread)
        if turn == 3:
            plain[1].grad = spread[1].grad = None
        for optimizer, params in ((one, plain), (other, spread)):
            group = optimizer.param_groups[0]
            if turn == 5:
                group["lr"] = 0.3
            if turn == 6 and "betas" in group:
                group["betas"] = (0.5, 0.5)
            if turn == 7:
                for name, value in optimizer.state[params[0]].items():
                    optimizer.state[params[0]][name] = value * 2
            optimizer.step()
        for param, expected in zip(spread, plain, strict=True):
            torch.testing.assert_close(
                full_tensor(param.detach()), expected.detach(), msg=f"step {turn}"
            )
    held: Any = spread[0].grad
    local = held._local_tensor
    spread[0].grad = held = None
    assert local._use_count() == 1, "a step keeps gradients"
    assert all(getattr(param, "_local_tensor", param).grad is None for param in spread[:2])


@on_ranks(4)
def test_state_dicts_hold_dtensors_and_load_either_way() -> None:
    plain, spread = parameters()
    one = torch.optim.AdamW(plain, lr=0.1, foreach=True)
    other = torch.optim.AdamW(spread, lr=0.1, foreach=True)
    give_gradients(plain, spread)
    one.step(), other.step()
    saved = other.state_dict()
    moments = [saved["state"][i]["exp_avg"] for i in range(3)]
    assert [m.placements for m in moments] == [(at,) for at in PLACEMENTS]
    moved = [m.redistribute(placements=[Replicate()]) for m in moments]
    for i, moment in enumerate(moved):
        saved["state"][i]["exp_avg"] = moment
    fresh = torch.optim.AdamW(spread, lr=0.1, foreach=True)
    fresh.load_state_dict(saved)
    give_gradients(plain, spread)
    one.step(), fresh.step()
    assert_same(one, fresh)
    again = torch.optim.AdamW(spread, lr=0.1)
    again.load_state_dict(fresh.state_dict())
    # dispatch does not mix DTensors and plain tensors in a list
    again.param_groups[0]["foreach"] = False
    give_gradients(plain, spread)
    one.step(), again.step()
    assert_same(one, again)


@on_ranks(4)
def test_a_state_taken_away_starts_anew() -> None:
    plain, spread = parameters()
    one, other = torch.optim.Adam(plain, lr=0.1), torch.optim.Adam(spread, lr=0.1)
    give_gradients(plain, spread)
    one.step(), other.step()
    for optimizer, param in (
        (one, plain[0]),
        (other, spread[0]),
        (one, plain[3]),
        (other, spread[3]),
    ):
        del optimizer.state[param]
    give_gradients(plain, spread)
    one.step(), other.step()
    assert_same(one, other)


@on_ranks(4)
def test_parameters_that_moved_or_have_no_gradient() -> None:
    plain, spread = parameters()
    one, other = torch.optim.AdamW(plain, lr=0.1), torch.optim.AdamW(spread, lr=0.1)
    give_gradients(plain, spread)
    plain[1].grad = spread[1].grad = None
    one.step(), other.step()
    assert spread[1] not in other.state
    moved: Any = spread[0].data
    spread[0].data = moved.redistribute(placements=[Shard(1)])
    give_gradients(plain, spread)
    grad: Any = spread[2].grad
    spread[2].grad = grad.redistribute(placements=[Shard(0)])
    one.step(), other.step()
    assert_same(one, other)
    there: Any = spread[0].data
    assert there.placements == (Shard(1),)


@on_ranks(4)
def test_hooks_schedulers_and_closures_meet_dtensors() -> None:
    plain, spread = parameters()
    other = torch.optim.AdamW(spread, lr=0.1)
    seen: list[type] = []
    other.register_step_pre_hook(lambda o, *_: seen.append(type(o.param_groups[0]["params"][0])))
    other.register_step_post_hook(
        lambda o, *_: seen.append(type(o.state[o.param_groups[0]["params"][0]]["exp_avg"]))
    )
    schedule = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)

    def closure() -> float:
        assert torch.is_grad_enabled()
        give_gradients(plain, spread)
        seen.append(type(other.param_groups[0]["params"][0]))
        return 3.5

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert other.step(closure) == 3.5
        schedule.step()
    assert seen == [DTensor] * 3
    assert other.param_groups[0]["lr"] == 0.05


@on_ranks(4)
def test_a_step_that_fails_leaves_dtensors() -> None:
    plain, spread = parameters()
    other = torch.optim.AdamW(spread, lr=0.1)
    give_gradients(plain, spread)
    other.param_groups[0]["betas"] = None
    with pytest.raises(TypeError, match="cannot unpack"):
        other.step()
    assert all(a is b for a, b in zip(other.param_groups[0]["params"], spread, strict=True))
    other.param_groups[0]["betas"] = (0.9, 0.999)
    one = torch.optim.AdamW(plain, lr=0.1)
    other.step(), one.step()
    for param, expected in zip(spread, plain, strict=True):
        torch.testing.assert_close(full_tensor(param.detach()), expected.detach())


@on_ranks(4)
def test_what_dispatch_alone_can_do() -> None:
    _, spread = parameters()

    class Mine(torch.optim.AdamW):
        pass

    with pytest.raises(ArgumentTypeError, match="element by element"):
        local_step(Mine(spread))
    with pytest.raises(ArgumentTypeError, match="LBFGS"):
        local_step(torch.optim.LBFGS(spread[:1]))
    replicated: Any = nn.Parameter(DTensor.from_local(torch.ones(2), mesh(), [Replicate()]))
    replicated.grad = torch.ones(2)
    optimizer = local_step(torch.optim.SGD([replicated], lr=0.5))
    with pytest.raises(MixedTensorError, match="plain tensor"):
        optimizer.step()
    with implicit_replication():
        optimizer.step()
    assert torch.equal(full_tensor(replicated.detach()), torch.full((2,), 0.5))
    adam = torch.optim.Adam(spread[:1])
    adam.state[spread[0]] = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.ones(7, 3),
        "exp_avg_sq": torch.ones(7, 3),
    }
    spread[0].grad = torch.ones_like(spread[0])
    with pytest.raises(MixedTensorError, match="plain tensor"):
        adam.step()


@on_ranks(2)
def test_state_that_is_replaced_or_written_counts() -> None:
    plain, spread = parameters()
    one, other = torch.optim.AdamW(plain, lr=0.1), torch.optim.AdamW(spread, lr=0.1)
    for turn in range(3):
        give_gradients(plain, spread)
        one.step(), other.step()
        for optimizer, params in ((one, plain), (other, spread)):
            for param in params:
                state = optimizer.state[param]
                state["exp_avg"] = state["exp_avg"] * 0.5
                state["exp_avg_sq"].mul_(2)
                state["step"].add_(turn)
    assert_same(one, other)


@on_ranks(2)
def test_groups_and_states_that_are_rearranged_count() -> None:
    plain, spread = parameters()
    both: list[torch.optim.Optimizer] = []
    for params in (plain, spread):
        groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]
        both.append(torch.optim.AdamW(groups, lr=0.1))
    for turn in range(4):
        give_gradients(plain, spread)
        for optimizer in both:
            optimizer.step()
            first, second = (group["params"] for group in optimizer.param_groups)
            if turn == 0:
                first.append(second.pop(0))  # the same parameters in the same order
            if turn == 2:
                optimizer.state = UserDict(optimizer.state)  # type: ignore[assignment]  # no dict
            if turn == 1:
                optimizer.state = defaultdict(
                    dict, {p: OrderedDict(s) for p, s in optimizer.state.items()}
                )
        for param, expected in zip(spread, plain, strict=True):
            torch.testing.assert_close(full_tensor(param.detach()), expected.detach())
    for optimizer in both:
        for state in optimizer.state.values():
            state["renamed"] = state.pop("exp_avg_sq")  # the same values in the same order
        with pytest.raises(KeyError, match="exp_avg_sq"):
            optimizer.step()


@on_ranks(2)
def test_parameters_that_an_optimizer_has_no_more_are_let_go() -> None:
    optimizer = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
    shards: list[Any] = []
    for _ in range(3):
        weight: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh(), [Shard(0)]))
        weight.grad = torch.ones_like(weight)
        optimizer.param_groups[0]["params"] = [weight]
        optimizer.step()
        optimizer.state.clear()
        shards.append(weakref.ref(weight._local_tensor))
    assert [shard() is None for shard in shards] == [True, True, False]


@pytest.mark.parametrize("kernels", ["fused", "foreach"])
@on_ranks(2)
def test_a_step_counts_as_a_write(kernels: str) -> None:
    weight: Any = nn.Parameter(distribute_tensor(torch.ones(4), mesh(), [Shard(0)]))
    flags: Any = {kernels: True}
    optimizer = torch.optim.AdamW([weight], **flags)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    before = weight.to_local()._version
    optimizer.step()
    assert weight.to_local()._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def matrices(shape: tuple[int, ...], placements: Any) -> tuple[list[Any], list[Any]]:
    """The same matrices plain, and as DTensors with the last one plain."""
    torch.manual_seed(3)
    plain = [nn.Parameter(torch.randn(size)) for size in ((7, 10), (9, 4), (8, 8), (2, 5), (6, 6))]
    grid = init_device_mesh("cpu", shape)
    spread = [
        nn.Parameter(distribute_tensor(p.detach(), grid, at))
        for p, at in zip(plain, placements)  # noqa: B905  # the last stays plain
    ]
    return plain, [*spread, nn.Parameter(plain[-1].detach().clone())]


@pytest.mark.parametrize("way", ["as torch makes it", "a scheduler's"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_muon_gathers_each_update_once(shape: tuple[int, ...], nesterov: bool, way: str) -> None:
    rows: list[Any] = [Shard(0), Shard(1), Replicate(), Shard(0)]
    placements = [[at] * len(shape) for at in rows]
    plain, spread = matrices(shape, placements)
    optimizers: list[Any] = [
        torch.optim.Muon(params, lr=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
        for params in (plain, spread)
    ]
    if way == "a scheduler's":
        torch.optim.lr_scheduler.ConstantLR(optimizers[1], 1.0)
    for _ in range(3):
        for one, other in zip(plain, spread, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
            if isinstance(other, DTensor):
                other.grad = distribute_tensor(one.grad, other.device_mesh, other.placements)
        optimizers[0].step()
        with CommDebugMode() as counted:
            optimizers[1].step()
        assert counted.get_total_counts() == 1  # for three sharded weights together
        for one, other in zip(plain, spread, strict=True):
            assert torch.equal(full_tensor(other.detach()), one.detach())  # bit for bit
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, state in states[0].items():
        torch.testing.assert_close(
            full_tensor(states[1][index]["momentum_buffer"]), state["momentum_buffer"]
        )


def owned_by(rank: int, ranks: int, rows: int) -> Any:
    sizes = [0] * ranks
    sizes[rank] = rows
    return Shard(0, sizes=tuple(sizes))


@pytest.mark.parametrize("nesterov", [False, True])
@on_ranks(4)
def test_muon_steps_on_whole_matrices_without_communication(nesterov: bool) -> None:
    torch.manual_seed(3)
    # two matrices that one rank has each, six experts on four ranks, and a replicated matrix
    shapes = [(7, 10), (9, 4), (6, 5, 3), (2, 5)]
    ways = [owned_by(2, 4, 7), owned_by(0, 4, 9), Shard(0), Replicate()]
    plain = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    grid = init_device_mesh("cpu", (4,))
    spread: list[Any] = [
        nn.Parameter(distribute_tensor(p.detach(), grid, [way]))
        for p, way in zip(plain, ways, strict=True)
    ]
    # one device takes each expert for a matrix of its own
    experts = [nn.Parameter(matrix.clone()) for matrix in plain[2].detach()]
    one: Any = torch.optim.Muon([*plain[:2], plain[3], *experts], lr=0.1, nesterov=nesterov)
    other: Any = torch.optim.Muon([*spread[:2], spread[3]], lr=0.1, nesterov=nesterov)
    # torch's constructor takes matrices only
    other.add_param_group({"params": [spread[2]]})
    for _ in range(3):
        for param, sharded in zip(plain, spread, strict=True):
            param.grad = torch.randn_like(param)
            sharded.grad = distribute_tensor(param.grad, grid, sharded.placements)
        assert plain[2].grad is not None
        for expert, grad in zip(experts, plain[2].grad, strict=True):
            expert.grad = grad.clone()
        one.step()
        with CommDebugMode() as counted:
            other.step()
        assert counted.get_total_counts() == 0
    expected = [*plain[:2], torch.stack([*experts]), plain[3]]
    for sharded, whole in zip(spread, expected, strict=True):
        assert torch.equal(full_tensor(sharded.detach()), whole.detach())  # bit for bit


@on_ranks(4)
def test_muon_gathers_experts_that_ranks_have_in_parts() -> None:
    torch.manual_seed(3)
    grid = init_device_mesh("cpu", (4,))
    experts = torch.randn(3, 5, 4)
    matrices_of = [nn.Parameter(matrix.clone()) for matrix in experts]
    weight: Any = nn.Parameter(distribute_tensor(experts, grid, [Shard(1)]))
    spare = nn.Parameter(torch.zeros(2, 2))
    one: Any = torch.optim.Muon(matrices_of, lr=0.1)
    other: Any = torch.optim.Muon([spare], lr=0.1)
    other.add_param_group({"params": [weight]})
    grad = torch.randn(3, 5, 4)
    weight.grad = distribute_tensor(grad, grid, [Shard(1)])
    for param, part in zip(matrices_of, grad, strict=True):
        param.grad = part.clone()
    one.step()
    with CommDebugMode() as counted:
        other.step()
    assert counted.get_total_counts() == 1
    whole = full_tensor(weight.detach())
    assert torch.equal(whole, torch.stack([*matrices_of]).detach())


@on_ranks(2)
def test_muon_keeps_the_momentum_that_it_loaded_in_another_layout() -> None:
    plain, spread = matrices((2,), [[Shard(0)]] * 4)
    one: Any = torch.optim.Muon(plain, lr=0.1)
    other: Any = torch.optim.Muon(spread, lr=0.1)
    for turn in range(3):
        for param, sharded in zip(plain, spread, strict=True):
            param.grad = torch.randn_like(param)
            is_sharded = isinstance(sharded, DTensor)
            sharded.grad = (
                distribute_tensor(param.grad, sharded.device_mesh, [Shard(0)])
                if is_sharded
                else param.grad
            )
        one.step(), other.step()
        if turn == 0:
            state = other.state[spread[0]]
            state["momentum_buffer"] = state["momentum_buffer"].redistribute(
                placements=[Replicate()]
            )
    momentum = other.state[spread[0]]["momentum_buffer"]
    assert momentum.placements == (Shard(0),)
    assert torch.equal(full_tensor(momentum), one.state[plain[0]]["momentum_buffer"])
    assert torch.equal(full_tensor(spread[0].detach()), plain[0].detach())


@on_ranks(2)
def test_a_step_of_muon_computes_its_closure_first_and_calls_hooks_once() -> None:
    weight: Any = nn.Parameter(distribute_tensor(torch.eye(4), mesh(), [Shard(0)]))
    optimizer: Any = copy.deepcopy(torch.optim.Muon([weight], lr=0.5, weight_decay=0.0))
    (weight,) = optimizer.param_groups[0]["params"]
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("after"))

    def closure() -> Any:
        called.append("closure")
        loss = (weight * weight).sum()
        loss.backward()
        return loss.detach()

    assert full_tensor(optimizer.step(closure)).item() == 4
    assert called == ["closure", "after"]
    assert not torch.equal(full_tensor(weight.detach()), torch.eye(4))
    spoilt = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh(), [Partial()]))
    spoilt.grad = torch.zeros_like(spoilt)
    optimizer = torch.optim.Muon([spoilt])
    with pytest.raises(PlacementError, match="Muon: a parameter has placements"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("plain_value", ["gradient", "momentum"])
def test_muon_steps_through_dispatch_if_a_gradient_or_its_momentum_is_plain(
    plain_value: str,
) -> None:
    plain, spread = (pair[:2] for pair in matrices((2,), [[Shard(0)]] * 4))
    optimizers: list[Any] = [torch.optim.Muon(params, lr=0.1) for params in (plain, spread)]
    for param, sharded in zip(plain, spread, strict=True):
        param.grad = torch.randn_like(param)
        sharded.grad = distribute_tensor(param.grad, sharded.device_mesh, [Shard(0)])
    if plain_value == "gradient":
        spread[0].grad = plain[0].grad.clone()
    else:
        momentum = {"momentum_buffer": torch.zeros_like(plain[0])}
        optimizers[1].state[spread[0]] = momentum
    optimizers[0].step()
    with implicit_replication():
        optimizers[1].step()
    for param, sharded in zip(plain, spread, strict=True):
        # The products of bfloat16 matrices are sums over shards, in another order than on one rank.
        assert torch.allclose(full_tensor(sharded.detach()), param.detach(), rtol=0, atol=0.01)
    with pytest.raises(MixedTensorError, match="plain tensor"):
        optimizers[1].step()


@on_ranks(2)
def test_schedulers_see_the_steps() -> None:
    plain, spread = parameters()
    optimizers = [torch.optim.AdamW(params, lr=0.1) for params in (plain, spread)]
    schedulers: list[Any] = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers
    ]
    schedulers += [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers
    ]
    for _ in range(3):
        give_gradients(plain, spread)
        with CommDebugMode() as counted, warnings.catch_warnings(action="error"):
            optimizers[1].step()
            optimizers[0].step()
            for scheduler in schedulers:
                scheduler.step()
        assert counted.get_total_counts() == 0
    assert_same(*optimizers)
