"""State of optimizers in the form of state dicts: before the first step, flat or nested."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from .._torch.tensors import make_state, steps_as, wrapped_optimizer
from ..errors import StateDictError

State = dict[Any, dict[str, Any]]

# how to load state that several ranks saved as groups of different parameters
FOR_STAGES = (
    "If pipeline stages saved it: save and load optimizer state dicts with "
    "StateDictOptions(flatten_optimizer_state_dict=True), which stores the options per parameter"
)


def optimizers_of(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers as a list; raise if one steps a parameter of another model."""
    of_model = {id(parameter) for parameter in model.parameters()}
    checked = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in checked:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in of_model:
                    raise StateDictError(
                        f"{type(optimizer).__name__} holds a tensor of shape "
                        f"{tuple(parameter.shape)} that is not a parameter of the model: "
                        "construct the optimizer after the model is parallelized"
                    )
    return checked


class _Complete(State):
    """State of an optimizer with an entry for each parameter that a step would give one."""

    def __bool__(self) -> bool:
        """Return True, because torch takes a step to create state if the state is false."""
        return True


@contextmanager
def with_first_states(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside the block, give trainable parameters without state the state of their first step."""
    with ExitStack() as restored:
        for optimizer in optimizers:
            before = optimizer.state
            complete: Any = _Complete()
            complete.update({param: entry for param, entry in before.items() if entry != {}})
            complete.update(first_states(optimizer, lambda param: param.requires_grad))
            optimizer.state = complete
            restored.callback(setattr, optimizer, "state", before)
        yield


def first_states(optimizer: Optimizer, wanted: Callable[[Tensor], bool]) -> State:
    """Return the state at the start of the first step, for wanted parameters without state."""
    optimizer = wrapped_optimizer(optimizer)
    is_sgd = steps_as(optimizer, SGD.__module__)
    groups = []
    states: State = {}
    for group in optimizer.param_groups:
        without_state = [p for p in group["params"] if not optimizer.state.get(p)]
        params = [p for p in without_state if wanted(p)]
        groups.append({**group, "params": params})
        # SGD creates its state at the end of a step. With dampening, NaN marks a buffer that does
        # not exist yet (see `drop_unmade_buffers`).
        if is_sgd and group["momentum"]:
            first = float("nan") if group["dampening"] else 0.0
            for param in params:
                states[param] = {"momentum_buffer": torch.full_like(param.detach(), first)}
    return states if is_sgd else make_state(optimizer, groups)


def add_frozen_states(
    optimizers: Iterable[Optimizer], target: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    """Add the first states of frozen parameters to the state that optimizers can load."""
    named = names_of(optimizers, target["param_groups"])
    loaded = {param: name for name, param in named.items() if states.get(name)}
    frozen = {param: name for param, name in loaded.items() if not param.requires_grad}
    for optimizer in optimizers:
        first = first_states(optimizer, lambda param: param in frozen and param.is_floating_point())
        for param, entry in first.items():
            target["state"][frozen[param]] = entry


def names_of(
    optimizers: Iterable[Optimizer], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Tensor]:
    """Return the parameters of optimizers by the names of their groups in a state dict."""
    params: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            params += group["params"]
    names = chain.from_iterable([group["params"] for group in groups])
    return dict(zip(names, params, strict=True))


def nest_state(state: Any, groups: Iterable[Mapping[str, Any]]) -> Any:
    """Nest a flat state dict by the parameters of some groups, each with options of its own.

    A state dict that is not flat is returned as it is.
    """
    if not isinstance(state, Mapping) or not state or "state" in state:
        return dict(state) if isinstance(state, Mapping) else state
    by_name: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    names = {name for group in groups for name in group["params"]}
    for key, value in state.items():
        section, *parts = str(key).split(".")
        count = _length_of_name(parts, names)
        if not count or section not in by_name:
            continue
        name = ".".join(parts[:count])
        entry = by_name[section].setdefault(name, {})
        *inner, last = parts[count:]
        for part in inner:
            entry = entry.setdefault(part, {})
        entry[last] = value
    nested_groups = []
    for name, options in by_name["param_groups"].items():
        nested_groups.append({**options, "params": [name]})
    return {"state": by_name["state"], "param_groups": nested_groups}


def _length_of_name(parts: Sequence[str], names: Collection[str]) -> int:
    """Return how many leading parts of a key make up a name, fewer than all; 0 if none do."""
    for count in range(1, len(parts)):
        if ".".join(parts[:count]) in names:
            return count
    return 0


def check_complete(state: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise a StateDictError that names the entries of a target that the state lacks."""
    states = state.get("state", {})
    groups = state.get("param_groups", ())
    named = {name for group in groups for name in group["params"]}
    missing = []
    for name, entry in target["state"].items():
        present = states.get(name, {})
        missing += [f"{name}.{key}" for key in entry if key not in present]
    lacking = [group["params"] for group in target["param_groups"] if group["params"]]
    without_options = [names[0] for names in lacking if named.isdisjoint(names)]
    missing += [f"the options of {name}" for name in without_options]
    if missing and not _is_by_number(states):
        unlisted = len(missing) - 5
        more = f" and {unlisted} more" if unlisted > 0 else ""
        # All stages of a pipeline save their groups under the same names, so that only the groups
        # of one stage remain.
        stages = f". {FOR_STAGES}" if without_options else ""
        raise StateDictError(
            f"the optimizer's state dict lacks {', '.join(missing[:5])}{more}; strict=False "
            f"leaves these unchanged{stages}"
        )


def load_states(
    optimizers: Iterable[Optimizer], state: Mapping[str, Any], target: Mapping[str, Any]
) -> None:
    """Load state and options by names of parameters; missing entries keep the target's values."""
    states = state.get("state", {})
    groups = state.get("param_groups", ())
    own_groups = iter(target["param_groups"])
    for optimizer in optimizers:
        groups_of_optimizer = [next(own_groups) for _ in optimizer.param_groups]
        named = names_of([optimizer], groups_of_optimizer)
        entries = {}
        for name, param in named.items():
            loaded = states.get(name, {})
            if loaded or optimizer.state.get(param):
                entries[name] = {**target["state"].get(name, {}), **loaded}
        options = [_options_of(group, groups) for group in groups_of_optimizer]
        # Torch may have replaced the optimizer's own method by a call of this function.
        load = type(optimizer).load_state_dict
        if _is_by_number(states):
            load(optimizer, dict(state))
        else:
            load(optimizer, {"state": entries, "param_groups": options})
        drop_unmade_buffers(optimizer)


def _options_of(
    target_group: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the options of the last group that shares a parameter with a group, else its own."""
    names = target_group["params"]
    options = target_group
    for group in groups:
        if group["params"] == names or {*names} & {*group["params"]}:
            options = group
    return {**options, "params": names}


def drop_unmade_buffers(optimizer: Optimizer) -> None:
    """Drop loaded momentum of SGD that marks a buffer that does not exist yet.

    With dampening, a first step without a buffer differs from one with a buffer of zeros.
    """
    if not steps_as(wrapped_optimizer(optimizer), SGD.__module__):
        return
    for group in optimizer.param_groups:
        if not group["dampening"]:
            continue
        for param in group["params"]:
            buffer = optimizer.state.get(param, {}).get("momentum_buffer")
            if buffer is not None and buffer.isnan().all():
                del optimizer.state[param]


def _is_by_number(states: Mapping[Any, Any]) -> bool:
    """Tell whether a state is keyed by parameter numbers, as in an optimizer's state dict."""
    return bool(states) and all(isinstance(key, int) for key in states)
