"""State of optimizers as state dicts have it: before the first step, flat or nested, complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .._torch.tensors import make_state, steps_as
from ..errors import StateDictError

State = dict[Any, dict[str, Any]]


def optimizers_of(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """The optimizers, of this model."""
    of_model = {id(parameter) for parameter in model.parameters()}
    checked = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    stepped = ((each, param) for each in checked for group in each.param_groups for param in group["params"])
    for optimizer, parameter in stepped:
        if id(parameter) not in of_model:
            raise StateDictError(
                f"{type(optimizer).__name__} steps a tensor of shape {tuple(parameter.shape)} that is not a parameter "
                "of the model: construct the optimizer after the model is parallelized"
            )
    return checked


class _Complete(State):
    """The state of an optimizer with an entry for each parameter that has one in a step."""

    def __bool__(self) -> bool:
        """True: where it is false, torch makes a step to read state."""
        return True


@contextmanager
def with_first_states(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """In the block, trainable parameters without state have that with which their first step begins.

    After it the state is what it was, or what the block has loaded.
    """
    with ExitStack() as ends:
        for optimizer in optimizers:
            before = optimizer.state
            complete: Any = _Complete({param: entry for param, entry in before.items() if entry != {}})
            complete.update(_first_states(optimizer))
            optimizer.state = complete
            ends.callback(_end_first_states, optimizer, before, complete)
        yield


def _first_states(optimizer: Optimizer) -> State:
    """By parameter, for those that have none and will have one."""
    groups = [
        {
            **group,
            "params": [each for each in group["params"] if each.requires_grad and optimizer.state.get(each, {}) == {}],
        }
        for group in optimizer.param_groups
    ]
    if steps_as(optimizer, SGD.__module__):  # makes its state at the end of a step
        return {
            param: {"momentum_buffer": torch.full_like(param.detach(), float("nan") if group["dampening"] else 0.0)}
            for group in groups
            if group["momentum"]
            for param in group["params"]
        }
    return make_state(optimizer, groups)


def _end_first_states(optimizer: Optimizer, before: Any, complete: Any) -> None:
    """Give the state back, or of loaded state take that away which says there is none.

    With dampening, a first step is none from a buffer of zeros.
    """
    if optimizer.state is complete:
        optimizer.state = before
    elif steps_as(optimizer, SGD.__module__):
        for group in optimizer.param_groups:
            for param in group["params"] if group["dampening"] else ():
                buffer = optimizer.state.get(param, {}).get("momentum_buffer")
                if buffer is not None and buffer.isnan().all():
                    del optimizer.state[param]


@contextmanager
def trained(parameters: Iterable[Tensor]) -> Iterator[None]:
    """In the block, some frozen parameters are not: torch loads no state of frozen ones."""
    frozen = [param for param in parameters if not param.requires_grad and param.is_floating_point()]
    try:
        for param in frozen:
            param.requires_grad_()
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def names_of(optimizers: Iterable[Optimizer], groups: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The parameters of optimizers by the names that their groups have in a state dict."""
    params = (group["params"] for optimizer in optimizers for group in optimizer.param_groups)
    names = (group["params"] for group in groups)
    return dict(zip(chain.from_iterable(names), chain.from_iterable(params), strict=True))


def nested(state: Any, groups: Iterable[Mapping[str, Any]]) -> Any:
    """A flat state dict by parameters, with groups like those given; what is not flat, as it is."""
    if not isinstance(state, Mapping) or not state or "state" in state:
        return state
    by_name: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    names = {name for group in groups for name in group["params"]}
    for key, value in state.items():
        kind, *parts = str(key).split(".")
        count = next((i for i in range(1, len(parts)) if ".".join(parts[:i]) in names), 0)
        if count and kind in by_name:
            entry = by_name[kind].setdefault(".".join(parts[:count]), {})
            for part in parts[count:-1]:
                entry = entry.setdefault(part, {})
            entry[parts[-1]] = value
    options = [
        next(({**by_name["param_groups"][name]} for name in group["params"] if name in by_name["param_groups"]), {})
        for group in groups
    ]
    filled = [{**each, "params": group["params"]} for each, group in zip(options, groups, strict=True) if each]
    return {"state": by_name["state"], "param_groups": filled}


def completed(
    state: Mapping[str, Any], target: Mapping[str, Any], stepped: Collection[str], *, strict: bool
) -> dict[str, Any]:
    """The state with what it lacks as the target has it; a StateDictError that names that, if strict.

    Parameters that are not `stepped`, of which the target has first states only, keep none.
    """
    given, groups = dict(state.get("state", {})), list(state.get("param_groups", ()))
    if given and all(isinstance(key, int) for key in given):
        return dict(state)  # the state dict of an optimizer, by numbers
    named = {name for group in groups for name in group["params"]}
    lacking = [group for group in target["param_groups"] if group["params"] and named.isdisjoint(group["params"])]
    missing = [f"{n}.{each}" for n, entry in target["state"].items() for each in entry if each not in given.get(n, {})]
    missing += [f"the options of {group['params'][0]}" for group in lacking]
    if strict and missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise StateDictError(
            f"the optimizer's state dict lacks {', '.join(missing[:5])}{more}; strict=False leaves these as they are"
        )
    for name, entry in target["state"].items():
        if name in stepped or name in given:
            given[name] = {**entry, **given.get(name, {})}
    return {**state, "state": given, "param_groups": lacking + groups}
