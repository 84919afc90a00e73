"""Full and sharded state dicts of models and optimizers with DTensors.

Covers: shoal_dtensor/api/state_dicts.py, shoal_dtensor/_torch/interception.py.
"""

from __future__ import annotations

import io
import os
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import shoal_dtensor
from forked_programs import Program, outputs_of
from shoal_dtensor import (
    DTensor,
    Shard,
    distribute_tensor,
    full_tensor,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from shoal_dtensor.errors import StateDictError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

FULL = StateDictOptions(full_state_dict=True)
OFFLOADED = StateDictOptions(full_state_dict=True, cpu_offload=True)
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
}


class TiedWithUnevenLayers(nn.Module):
    """A tied table, a pair of linear layers whose sizes do not divide by 4, a norm and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.full((3,), float(seed)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.down(torch.relu(self.up(x))))


def sharded(seed: int, layout: str) -> TiedWithUnevenLayers:
    model = TiedWithUnevenLayers(seed)
    if layout == "styles":
        mesh = init_device_mesh("cpu", (4,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        return model
    grid = init_device_mesh("cpu", (2, 2))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = parameter.dim() - 1
            placed = distribute_tensor(parameter.detach(), grid, [Shard(0), Shard(dim)])
            setattr(module, name, nn.Parameter(placed))
    model.head.weight = model.embed.weight
    return model


def trained(model: TiedWithUnevenLayers, kind: str, steps: int = 2) -> torch.optim.Optimizer:
    """An optimizer of the model after steps with gradients that are the same for every layout."""
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(steps):
        for name, parameter in model.named_parameters():
            drawn = torch.Generator().manual_seed(sum(map(ord, name)) + step)
            gradient = torch.randn(parameter.shape, generator=drawn)
            if isinstance(parameter, DTensor):
                spec = parameter.spec
                gradient = distribute_tensor(
                    gradient, spec.mesh, spec.placements, src_data_rank=None
                )
            parameter.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def same(state: Any, expected: Any, path: str = "") -> None:
    """Equal values under equal keys; DTensors by their full values."""
    if isinstance(expected, torch.Tensor):
        got, wanted = (full_tensor(each) for each in (state, expected))
        torch.testing.assert_close(got, wanted, msg=path)
    elif isinstance(expected, dict):
        assert state.keys() == expected.keys(), path
        for key, value in expected.items():
            same(state[key], value, f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(state) == len(expected), path
        for index, value in enumerate(expected):
            same(state[index], value, f"{path}[{index}]")
    else:
        assert state == expected, path


def tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors(value)]
    return [state] if isinstance(state, torch.Tensor) else []


LAYOUTS = ["styles", "grid"]


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_state_dicts_are_those_of_one_device(layout: str, kind: str) -> None:
    plain, model = TiedWithUnevenLayers(1), sharded(1, layout)
    plain_optimizer, optimizer = trained(plain, kind), trained(model, kind)
    expected = get_state_dict(plain, plain_optimizer)
    for options in (FULL, OFFLOADED):
        state = get_state_dict(model, optimizer, options=options)
        if options is OFFLOADED and dist.get_rank() != 0:
            assert state == ({}, {})
            continue
        same(state, expected)
        assert not [
            each for each in tensors(state[0]) + tensors(state[1]) if isinstance(each, DTensor)
        ]
    saved = io.BytesIO()
    torch.save(get_model_state_dict(model, options=OFFLOADED), saved)
    if dist.get_rank() == 0:
        saved.seek(0)
        same(torch.load(saved), expected[0])  # nothing but plain tensors


@on_ranks(4, timeout=240)
def test_sharded_state_dicts_are_each_ranks_shards() -> None:
    model = sharded(1, "grid")
    state, optimizer_state = get_state_dict(model, trained(model, "AdamW"))
    assert isinstance(state["up.weight"], DTensor)
    assert isinstance(optimizer_state["state"]["up.weight"]["exp_avg"], DTensor)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("options", ["full", "broadcast", "sharded", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_dicts_load(layout: str, options: str, kind: str) -> None:
    source, plain = sharded(1, layout), TiedWithUnevenLayers(1)
    source_optimizer, plain_optimizer = trained(source, kind), trained(plain, kind)
    chosen = {
        "full": FULL,
        "broadcast": BROADCAST,
        "sharded": StateDictOptions(),
        "flat": StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    }[options]
    saving = OFFLOADED if options == "broadcast" else chosen
    state, optimizer_state = get_state_dict(source, source_optimizer, options=saving)
    target = sharded(2, layout)
    specs = {name: getattr(each, "spec", None) for name, each in target.named_parameters()}
    optimizer = OPTIMIZERS[kind](target.parameters())
    keys = set_state_dict(
        target, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=chosen
    )
    assert list(keys.missing_keys) == list(keys.unexpected_keys) == []
    assert {name: getattr(each, "spec", None) for name, each in target.named_parameters()} == specs
    same(get_state_dict(target, optimizer, options=FULL), get_state_dict(plain, plain_optimizer))
    for name, parameter in target.named_parameters():  # state has the layout of its parameter
        momentum = next(each for each in optimizer.state[parameter].values() if each.dim())
        assert getattr(momentum, "spec", None) == getattr(parameter, "spec", None), name
    assert target.head.weight is target.embed.weight


@on_ranks(4, timeout=240)
def test_a_full_state_dict_loads_onto_another_layout() -> None:
    source, target = sharded(1, "grid"), sharded(2, "styles")
    state = get_model_state_dict(source, options=FULL)
    set_model_state_dict(target, state, options=FULL)
    same(get_model_state_dict(target, options=FULL), state)


@on_ranks(4, timeout=240)
def test_what_does_not_fit_is_refused_on_all_ranks_and_changes_nothing() -> None:
    model = sharded(1, "grid")
    optimizer = trained(model, "AdamW")
    before = get_state_dict(model, optimizer, options=FULL)
    full = get_model_state_dict(sharded(2, "grid"), options=FULL)
    missing = {name: value for name, value in full.items() if name != "up.bias"}
    for state, text in (
        (missing, r"missing \['up.bias'\], unexpected \[\]"),
        (full | {"other": torch.zeros(1)}, r"missing \[\], unexpected \['other'\]"),
        (
            full | {"up.weight": torch.zeros(6, 10)},
            r"up.weight has shape \(6, 10\) in the state dict, but \(10, 6\) in the model",
        ),
        (None, "must be a dict, got NoneType"),
        (full | {"up.weight": UserDict(one=torch.zeros(1))}, "must be a dict, got UserDict"),
    ):
        for options in (FULL, BROADCAST):
            given: Any = state if options is FULL or dist.get_rank() == 0 else {}
            with pytest.raises(StateDictError, match=text):
                set_model_state_dict(model, given, options=options)
    unsendable = full | {"steps": lambda: 0} if dist.get_rank() == 0 else {}
    with pytest.raises(StateDictError, match="the state dict of rank 0 cannot be sent"):
        set_model_state_dict(model, unsendable, options=BROADCAST)
    wrong = {"state": {"up.weight": {"exp_avg": torch.zeros(2)}}, "param_groups": []}
    for options in (FULL, BROADCAST):
        with pytest.raises(StateDictError, match=r"state.up.weight.exp_avg has shape \(2,\)"):
            set_optimizer_state_dict(model, optimizer, wrong, options=options)
    same(get_state_dict(model, optimizer, options=FULL), before)
    set_model_state_dict(
        model, missing, options=StateDictOptions(full_state_dict=True, strict=False)
    )
    after = get_model_state_dict(model, options=FULL)
    same(after["up.bias"], before[0]["up.bias"])
    same(after["up.weight"], full["up.weight"])


@on_ranks(4, timeout=240)
def test_wrong_options() -> None:
    model = sharded(1, "grid")
    with pytest.raises(StateDictError, match="StateDictOptions or None, got dict"):
        get_model_state_dict(model, options={"full_state_dict": True})
    with pytest.raises(StateDictError, match="needs full_state_dict=True"):
        set_model_state_dict(model, {}, options=StateDictOptions(broadcast_from_rank0=True))
    other = OPTIMIZERS["SGD"](sharded(1, "grid").parameters())
    for call in (
        get_optimizer_state_dict,
        lambda model, optimizer: set_optimizer_state_dict(model, optimizer, {}, options=FULL),
    ):
        with pytest.raises(StateDictError, match="not a parameter of the model"):
            call(model, other)


@on_ranks(4, timeout=240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torchs_own_functions_gather_and_shard(layout: str) -> None:
    import torch.distributed.checkpoint.state_dict as torchs

    plain, source, target = TiedWithUnevenLayers(1), sharded(1, layout), sharded(2, layout)
    expected = torchs.get_state_dict(plain, trained(plain, "AdamW"))
    source_optimizer, optimizer = trained(source, "AdamW"), OPTIMIZERS["AdamW"](target.parameters())
    same(torchs.get_state_dict(source, source_optimizer, options=FULL), expected)
    same(torchs.get_model_state_dict(source.requires_grad_(False), options=FULL), expected[0])
    model_state = torchs.get_model_state_dict(source.requires_grad_(), options=OFFLOADED)
    optimizer_state = torchs.get_optimizer_state_dict(source, source_optimizer, options=OFFLOADED)
    if dist.get_rank() == 0:
        same((model_state, optimizer_state), expected)
        assert not [
            each
            for each in tensors(model_state) + tensors(optimizer_state)
            if isinstance(each, DTensor)
        ]
    else:
        assert (model_state, optimizer_state) == ({}, {})
    torchs.set_model_state_dict(target, model_state, options=BROADCAST)
    torchs.set_optimizer_state_dict(target, optimizer, optimizer_state, options=BROADCAST)
    same(torchs.get_state_dict(target, optimizer, options=FULL), expected)
    again = sharded(3, layout)
    torchs.set_model_state_dict(again, expected[0], options=FULL)
    same(torchs.get_model_state_dict(again, options=FULL), expected[0])
    assert isinstance(torchs.get_model_state_dict(again)["up.weight"], DTensor)  # sharded, as ever
    with pytest.raises(StateDictError, match=r"missing \['up.bias'\]"):
        torchs.set_model_state_dict(
            again, {k: v for k, v in expected[0].items() if k != "up.bias"}, options=FULL
        )


MADE_AND_IMPORTED = {
    "torch": "import torch.distributed.checkpoint.state_dict as api; import shoal_dtensor; made()",
    "shoal": "import shoal_dtensor; made(); import torch.distributed.checkpoint.state_dict as api",
}
BEFORE_FIRST = """
import sys
def made():
    before = list(sys.meta_path)
    import torch
    from shoal_mesh.testing import fake_world
    from shoal_mesh import init_device_mesh
    assert not any('shoal' in type(each).__module__ for each in before), before
    with fake_world(2):
        mesh = init_device_mesh('cpu', (2,))
        shoal_dtensor.distribute_tensor(torch.ones(2), mesh, src_data_rank=None)
"""
AFTER_BOTH = """
for function in (api._get_model_state_dict, api._load_optim_state_dict):
    assert type(function).__name__ == 'partial'
waiting = [each.module for each in sys.meta_path if 'shoal' in type(each).__module__]
assert not [name for name in waiting if name in sys.modules], waiting
assert not [name for name in waiting if name.startswith('torch.distributed')], waiting
"""


def test_torchs_functions_are_wrapped_whenever_they_are_imported() -> None:
    """In own processes: before the first DTensor nothing is changed, then an import is enough."""
    programs = [Program(BEFORE_FIRST + order + AFTER_BOTH) for order in MADE_AND_IMPORTED.values()]
    assert outputs_of(programs, "-W", "ignore", environment=os.environ) == ["", ""]


def test_the_names_and_arguments_are_those_of_torch() -> None:
    import inspect

    import torch.distributed.checkpoint.state_dict as torchs

    for name in ("get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"):
        for each in (name, name.replace("get", "set")):
            ours, theirs = (
                inspect.signature(getattr(api, each)).parameters for api in (shoal_dtensor, torchs)
            )
            assert [(p.name, p.kind) for p in ours.values()] == [
                (p.name, p.kind) for p in theirs.values()
            ]
