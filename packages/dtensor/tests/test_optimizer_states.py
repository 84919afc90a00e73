"""State of optimizers that is read and loaded.

This happens before their first step, between steps, in part, and for frozen parameters.

Covers: api/optimizer_states.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

import shoal_dtensor
from shoal_dtensor import DTensor, Shard, distribute_tensor, full_tensor, get_optimizer_state_dict
from shoal_dtensor.checkpoint import Checkpointer
from shoal_dtensor.errors import StateDictError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Own(Optimizer):
    """Not torch's: the state is made in a step, and a step moves what has almost no gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.sub_(momentum, alpha=group["lr"]).add_(0.125)


class Tamed(torch.optim.AdamW):
    """A subclass that steps as torch's does."""


def inside(name: str) -> Any:
    """Return a property of the optimizer inside of a wrapper."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


class Wrapped(Optimizer):
    """A wrapper with the groups and the state of the optimizer inside of it, like accelerate's."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    state = inside("state")
    param_groups = inside("param_groups")
    defaults = inside("defaults")
    _optimizer_step_post_hooks = inside("_optimizer_step_post_hooks")

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "wrapped AdamW": lambda p: Wrapped(torch.optim.AdamW(p, lr=0.1)),
    "wrapped SGD": lambda p: Wrapped(torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)),
    "subclass": lambda p: Tamed(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "own": Own,
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True)


def made(seed: int, *, sharded: bool) -> Any:
    """Rows that do not divide, and some ranks without any; the same values as on one device."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"up": nn.Linear(4, 5), "down": nn.Linear(5, 3)}).double()
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in model.values():
            for name, parameter in list(module.named_parameters()):
                setattr(
                    module,
                    name,
                    nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])),
                )
    return model


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    """A step with gradients that are the same for every layout.

    One parameter has none in the first step.
    """
    for name, parameter in model.named_parameters():
        drawn = torch.Generator().manual_seed(sum(map(ord, name)) + number)
        gradient: Any = torch.randn(parameter.shape, dtype=parameter.dtype, generator=drawn)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(
                gradient, parameter.spec.mesh, parameter.placements, src_data_rank=None
            )
        parameter.grad = (
            gradient if parameter.requires_grad and (number or name != "up.bias") else None
        )
    optimizer.step()
    optimizer.zero_grad()


def same(model: nn.Module, expected: nn.Module, after: str) -> None:
    for (name, got), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        whole = full_tensor(got)
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12, msg=f"{after}: {name}")


def assert_reading_changes_nothing(kind: str) -> None:
    """Before the first step, when some parameters had one, when all had.

    Read and resumed, the state equals one that was never read.
    """
    plain, model = made(1, sharded=False), made(1, sharded=True)
    alone, optimizer = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for number in range(3):
        for api, options in (
            (shoal_dtensor, FULL),
            (shoal_dtensor, FLAT),
            (torchs, StateDictOptions()),
        ):
            held = {param: dict(entry) for param, entry in optimizer.state.items()}
            state = api.get_optimizer_state_dict(model, optimizer, options=options)
            assert {param: dict(entry) for param, entry in optimizer.state.items()} == held
            if number or kind != "own":  # what it starts with nobody knows
                options = replace(options, strict=kind != "own")
                its = resumed(kind, plain, alone, made(1, sharded=False))
                fresh = made(2, sharded=True)
                fresh.load_state_dict(model.state_dict())
                other = OPTIMIZERS[kind](fresh.parameters())
                api.set_optimizer_state_dict(fresh, other, copy.deepcopy(state), options=options)
                for later in (number, number + 1):
                    step(fresh, other, later)
                    step(*its, later)
                same(fresh, its[0], f"{api.__name__} {options} after {number}")
        assert len(steps) == number
        step(model, optimizer, number)
        step(plain, alone, number)
        same(model, plain, f"step {number}")


def resumed(
    kind: str, model: nn.Module, optimizer: Optimizer, fresh: nn.Module
) -> tuple[nn.Module, Optimizer]:
    """A run on one device that goes on from another, without the functions that are tested."""
    fresh.load_state_dict(model.state_dict())
    other = OPTIMIZERS[kind](fresh.parameters())
    if optimizer.state:
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return fresh, other


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_reading_changes_nothing_on_four_ranks(kind: str) -> None:
    assert_reading_changes_nothing(kind)


def test_no_state_is_made_where_a_step_needs_a_closure() -> None:
    with fake_world(1):
        model = made(1, sharded=True)
        optimizer = torch.optim.LBFGS(model.parameters())
        assert get_optimizer_state_dict(model, optimizer)["state"] == {} and not optimizer.state


@pytest.mark.parametrize("options", [StateDictOptions(), FULL], ids=["shards", "full"])
def test_a_model_is_loaded_without_optimizers(options: StateDictOptions) -> None:
    with fake_world(1):
        model, other = made(1, sharded=True), made(2, sharded=True)
        of_model, of_optimizers = torchs.get_state_dict(model, [])
        torchs.set_state_dict(
            other, [], model_state_dict=of_model, optim_state_dict=of_optimizers, options=options
        )
        same(other, made(1, sharded=False), "loaded")


def test_an_optimizer_whose_methods_are_these_functions() -> None:
    with fake_world(1):
        model, fresh = made(1, sharded=True), made(1, sharded=True)
        optimizer, other = (
            OPTIMIZERS["AdamW"](model.parameters()),
            OPTIMIZERS["AdamW"](fresh.parameters()),
        )
        step(model, optimizer, 1)
        torchs._patch_optimizer_state_dict(fresh, optimizers=other)
        other.load_state_dict(get_optimizer_state_dict(model, optimizer))
        for mine, its in zip(model.parameters(), fresh.parameters(), strict=True):
            torch.testing.assert_close(
                other.state[its]["exp_avg"], optimizer.state[mine]["exp_avg"]
            )


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("kind", ["AdamW", "SGD, dampening"])
def test_reading_changes_nothing_on_two_ranks(kind: str) -> None:
    assert_reading_changes_nothing(kind)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("by", ["dcp", "checkpointer"])
@pytest.mark.parametrize("kind", ["AdamW, fused", "SGD, dampening", "Adagrad"])
def test_runs_resume_from_files_of_any_moment(kind: str, by: str, tmp_path: Path) -> None:
    plain, model = made(1, sharded=False), made(1, sharded=True)
    alone, optimizer = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    for number in range(3):
        state: Any = dict(
            zip(("model", "optimizer"), torchs.get_state_dict(model, optimizer), strict=True)
        )
        fresh = made(2, sharded=True)
        other = OPTIMIZERS[kind](fresh.parameters())
        target: Any = dict(
            zip(("model", "optimizer"), torchs.get_state_dict(fresh, other), strict=True)
        )
        if by == "dcp":
            dcp.save(state, checkpoint_id=tmp_path / str(number))
            dcp.load(target, checkpoint_id=tmp_path / str(number))
        else:
            with Checkpointer(tmp_path) as checkpoints:
                checkpoints.save(number, state)
                assert checkpoints.load(target) == number
        torchs.set_state_dict(
            fresh, other, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
        )
        its = resumed(kind, plain, alone, made(2, sharded=False))
        for later in (number, number + 1):
            step(fresh, other, later)
            step(*its, later)
        same(fresh, its[0], f"after {number}")
        step(model, optimizer, number)
        step(plain, alone, number)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize(
    "options", [StateDictOptions(), FLAT, FULL], ids=["shards", "flat", "full"]
)
def test_state_of_frozen_parameters_is_loaded(options: StateDictOptions) -> None:
    model = made(1, sharded=True)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer, 0)
    model["up"].requires_grad_(False)
    step(model, optimizer, 1)
    for api in (shoal_dtensor, torchs):
        state = api.get_optimizer_state_dict(model, optimizer, options=options)
        fresh = made(1, sharded=True)
        fresh["up"].requires_grad_(False)
        other = OPTIMIZERS["AdamW"](fresh.parameters())
        api.set_optimizer_state_dict(fresh, other, state, options=options)
        assert [each.requires_grad for each in fresh.parameters()] == [False, False, True, True]
        for parameter, mine in zip(model.parameters(), fresh.parameters(), strict=True):
            for name, value in optimizer.state[parameter].items():
                torch.testing.assert_close(other.state[mine][name], value)


@on_ranks(4, timeout=240)
def test_no_entries_without_state() -> None:
    model = made(1, sharded=True)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    for options in (StateDictOptions(), FLAT, FULL):
        for _ in range(2):
            state = shoal_dtensor.get_optimizer_state_dict(model, optimizer, options=options)
            assert not state.get("state"), options
            assert not [key for key in state if key.startswith("state.")]
            shoal_dtensor.set_optimizer_state_dict(model, optimizer, state, options=options)
            assert not optimizer.state
            assert optimizer.param_groups[0]["lr"] == 0.1
            step(model, optimizer, 0)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize(
    "options", [StateDictOptions(), FLAT, FULL], ids=["shards", "flat", "full"]
)
def test_a_state_that_lacks_something_is_named_or_left_as_it_is(options: StateDictOptions) -> None:
    model = made(1, sharded=True)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    step(model, optimizer, 1)
    state = shoal_dtensor.get_optimizer_state_dict(model, optimizer, options=options)
    if options.flatten_optimizer_state_dict:
        del state["state.up.bias.exp_avg"]
        without_options = {
            key: value for key, value in state.items() if not key.startswith("param_groups")
        }
    else:
        del state["state"]["up.bias"]["exp_avg"]
        without_options = {**state, "param_groups": []}
    for api in (shoal_dtensor, torchs):
        fresh = made(1, sharded=True)
        other = OPTIMIZERS["AdamW"](fresh.parameters())
        with pytest.raises(
            StateDictError, match=r"lacks up\.bias\.exp_avg; strict=False leaves these unchanged"
        ):
            api.set_optimizer_state_dict(fresh, other, state, options=options)
        # strict=False is not what stages of a pipeline need
        with pytest.raises(
            StateDictError, match=r"the options of up\.weight.*flatten_optimizer_state_dict=True"
        ):
            api.set_optimizer_state_dict(fresh, other, without_options, options=options)
        assert not other.state
        step(fresh, other, 1)
        mine = dict(other.state[fresh["up"].bias])
        api.set_optimizer_state_dict(
            fresh, other, without_options, options=replace(options, strict=False)
        )
        torch.testing.assert_close(other.state[fresh["up"].bias]["exp_avg"], mine["exp_avg"])
        assert other.param_groups[0]["lr"] == 0.1
