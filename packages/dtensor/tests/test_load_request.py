"""Loads that resume a run.

Nothing that a checkpoint holds is dropped silently, and nothing is left as it was.

Covers: load_request.py, optimizer_load.py, components.py, saved_names.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, SequentialLR, StepLR

from shoal_dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from shoal_dtensor.checkpoint import Checkpointer, HeldState
from shoal_dtensor.errors import CheckpointError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

Trained = tuple[nn.Module, Optimizer, LRScheduler]


class Momentum(Optimizer):
    """An optimizer that is not torch's: it makes its state in a step, with a number in it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param))
                state["count"] = state.get("count", 0) + 1
                momentum.mul_(0.9).add_(param.grad)
                param.sub_(momentum, alpha=group["lr"] / state["count"])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.1, amsgrad=True),
    "SGD, dampening": lambda params: SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: Adafactor(params, lr=0.1),
    "own": Momentum,
}


def sharded(module: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            setattr(child, name, nn.Parameter(whole))
    return module


def made(kind: str, seed: int, *, is_sharded: bool = True) -> Trained:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = sharded(model) if is_sharded else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedules = [StepLR(optimizer, 1, 0.5), CosineAnnealingLR(optimizer, 20)]
    return model, optimizer, SequentialLR(optimizer, schedules, [2])


def train(trained: Trained, steps: int) -> None:
    model, optimizer, scheduler = trained
    batch: Any = torch.linspace(0, 1, 20, dtype=torch.float64).view(5, 4)
    first = next(model.parameters())
    if isinstance(first, DTensor):
        batch = distribute_tensor(batch, first.device_mesh, [Replicate()])
    for _ in range(steps):
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def state_to(trained: Trained, step: int = 0) -> dict[str, Any]:
    return {**dict(zip(("model", "optimizer", "scheduler"), trained, strict=True)), "step": step}


def require_like(trained: Trained, expected: Trained) -> None:
    for got, wanted in zip(trained[0].parameters(), expected[0].parameters(), strict=True):
        assert isinstance(got, DTensor)
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-12, atol=1e-12)


def state_dicts(trained: Trained, form: str) -> dict[str, Any]:
    """The state of a run as programs write it."""
    model, optimizer, scheduler = trained
    if form == "objects":
        return state_to(trained, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    of_optimizer = (
        optimizer.state_dict()
        if form == "numbers"
        else get_optimizer_state_dict(model, optimizer, options=options)
    )
    state = get_model_state_dict(model), of_optimizer, scheduler.state_dict()
    return state_to(state, 3)  # type: ignore[arg-type]  # their state, by the same names


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_as_one_that_never_stopped(kind: str, folder: str) -> None:
    # its empty dict was filled with nothing, and the moments were lost
    expected, run = made(kind, 0, is_sharded=False), made(kind, 0)
    train(expected, 5)
    train(run, 3)
    forms = ["objects", "numbers", *(["names", "flat"] if kind != "own" else [])]
    with Checkpointer(folder, keep=9) as checkpoints:
        for number, form in enumerate(forms):
            checkpoints.save(number, state_dicts(run, form), background=form == "objects")
            fresh = made(kind, 1)
            steps: list[Any] = []
            fresh[1].register_step_pre_hook(lambda *_, made_steps=steps: made_steps.append(1))
            state = state_to(fresh)
            assert checkpoints.load(state) == number
            assert state["step"] == 3 and not steps
            train(fresh, 2)
            require_like(fresh, expected)
    held = HeldState()
    held.keep(3, state_to(run, 3))
    fresh = made(kind, 1)
    state = state_to(fresh)
    assert held.recover(state) == 3 and state["step"] == 3
    train(fresh, 2)
    require_like(fresh, expected)


@on_ranks(2)
def test_an_empty_dict_where_there_is_state_is_an_error_on_all_ranks(folder: str) -> None:
    run, fresh = made("AdamW", 0), made("AdamW", 1)
    train(run, 2)
    parameters: list[Any] = [*fresh[0].parameters()]
    before = [parameter.full_tensor() for parameter in parameters]
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, {"model": run[0].state_dict(), "optimizer": run[1].state_dict()})
    empty = {"model": fresh[0].state_dict(), "optimizer": fresh[1].state_dict()}
    with pytest.raises(CheckpointError, match=r"optimizer\.state is an empty dict .* itself"):
        checkpoints.load(empty)
    on_one_rank = {"model": fresh[0].state_dict(), "optimizer": (fresh, run)[dist.get_rank()][1]}
    if dist.get_rank() == 0:
        on_one_rank["optimizer"] = fresh[1].state_dict()
    with pytest.raises(CheckpointError, match=r"rank 0: .*is an empty dict"):
        checkpoints.load(on_one_rank)
    for parameter, whole in zip(parameters, before, strict=True):
        assert parameter.full_tensor().equal(whole)
    assert checkpoints.load(empty, strict=False) == 1
    assert not fresh[1].state
    held = HeldState()
    held.keep(1, {"model": run[0].state_dict(), "optimizer": run[1].state_dict()})
    with pytest.raises(CheckpointError, match=r"hold optimizer\.state\.0\.step.*optimizer itself"):
        held.recover(empty)
    assert held.recover(empty, strict=False) == 1


@on_ranks(2)
def test_what_one_side_lacks_is_named_or_left_with_strict_false(folder: str) -> None:
    run = made("AdamW", 0)
    train(run, 2)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, state_to(run, 1))
    model, optimizer, _ = fresh = made("AdamW", 1)
    whole = state_to(fresh)
    with pytest.raises(CheckpointError, match=r"has scheduler\..* does not contain"):
        checkpoints.load({"model": model, "optimizer": optimizer, "step": 0})
    with pytest.raises(CheckpointError, match="lacks average, which the state dict to fill has"):
        checkpoints.load({**whole, "average": 1})
    with pytest.raises(CheckpointError, match=r"has model\.0\.bias, which .* does not contain"):
        checkpoints.load({"model": {k: v for k, v in model.state_dict().items() if k != "0.bias"}})
    model.extra = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"lacks model\.extra\.weight, model\.extra\.bias"):
        checkpoints.load({"model": model})
    assert checkpoints.load({"model": model, "other": 1}, strict=False) == 1
    for other in (SGD(model.parameters(), lr=0.1), SGD(run[0].parameters(), momentum=0.9)):
        with pytest.raises(
            CheckpointError,
            match=r"not loaded: .*(which the optimizer does not have|groups of|lacks)",
        ):
            checkpoints.load({"optimizer": other})
    with pytest.raises(CheckpointError, match=r"step is a value .* a tensor in the state dict"):
        checkpoints.load({**whole, "step": torch.zeros(())}, strict=False)


@on_ranks(2)
def test_a_part_alone_is_loaded_with_one_warning_that_names_the_others(folder: str) -> None:
    run = made("AdamW", 0)
    train(run, 2)
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, state_to(run, 1))
    fresh = made("AdamW", 1)
    with pytest.warns(UserWarning, match="holds optimizer, scheduler, step, which this load"):
        checkpoints.load({"model": fresh[0].state_dict()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.load({"model": fresh[0]})
    with pytest.warns(UserWarning, match="holds model, scheduler, step, which"):
        checkpoints.load({"optimizer": fresh[1]})
    for got, wanted in zip(fresh[0].parameters(), run[0].parameters(), strict=True):
        torch.testing.assert_close(fresh[1].state[got]["exp_avg"], run[1].state[wanted]["exp_avg"])
    flat = {"weight": torch.ones(2), "bias": torch.ones(2)}
    checkpoints.save(2, flat)
    with pytest.raises(CheckpointError, match="has bias, which"):
        checkpoints.load({"weight": torch.ones(2)})


class Sampler:
    """An object whose fresh state is empty, and whose keys are numbers."""

    def __init__(self) -> None:
        self.state: dict[Any, Any] = {}

    def state_dict(self) -> dict[Any, Any]:
        return {"of_rank": dict(self.state)}

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state["of_rank"]


class WithExtra(nn.Linear):
    """A module with extra state that grows."""

    seen: list[Any] | dict[str, Any]

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@on_ranks(2)
def test_objects_take_all_that_was_saved_of_them(folder: str) -> None:
    sampler, module = Sampler(), WithExtra(2, 2)
    sampler.state = {"seed": torch.arange(3), "list": [{"a": 1}, {"b": torch.ones(2)}]}
    module.seen = {"steps": 3, "scale": torch.full((2,), 4.0)}
    checkpoints = Checkpointer(folder)
    counts = {7: {"count": 5}, "x": [1, 2]}
    saved = {"samplers": [sampler], "module": module, "counts": counts}
    checkpoints.save(1, saved)
    fresh, other = Sampler(), WithExtra(2, 2)
    other.seen = {}
    # keys that are not strings were filled under their texts, and the values stayed
    to_fill = {"samplers": [fresh], "module": other, "counts": {7: {"count": 0}, "x": []}}
    assert checkpoints.load(to_fill) == 1
    assert to_fill["counts"] == counts
    torch.testing.assert_close(fresh.state, sampler.state)
    torch.testing.assert_close(other.seen, module.seen)
    torch.testing.assert_close(other.state_dict(), module.state_dict())
    with torch.device("meta"):
        on_meta = WithExtra(2, 2)
    on_meta.seen = {}
    with pytest.raises(CheckpointError, match=r"module\.weight is on the meta device"):
        checkpoints.load({"module": on_meta})
