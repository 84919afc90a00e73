"""ShardedOptimizer: any torch optimizer over plain parameters and the shards of sharded ones.

Its state dict is keyed by parameter names and holds ShardedTensors for what has a parameter's shape, so that a
checkpoint of it can be read onto another number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from .errors import CheckpointError
from .handlers import laid_out_as
from .sharded_tensor import ShardedTensor

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, nn.Parameter | ShardedTensor]]:
    """Name and value of every parameter of the module, and of every ShardedTensor that is a plain attribute of it.

    Args:
        module: Where to look.
        prefix: Put before every name, with a dot.
        recurse: Whether to look in sub-modules too.
    """
    seen: set[int] = set()
    for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        attributes = [(name, value) for name, value in vars(owner).items() if isinstance(value, ShardedTensor)]
        for name, value in [*attributes, *owner._parameters.items()]:
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}{'.' if path else ''}{name}", value


class ShardedOptimizer(optim.Optimizer):
    """An optimizer that steps on what this rank holds.

    Args:
        named_params: Names and parameters, sharded or not.
        optimizer_class: The torch optimizer to use.
        optimizer_args: Passed on to it.
        optimizer_kwargs: Passed on to it.

    Example:
        >>> optimizer = ShardedOptimizer(
        ...     dict(named_params_with_sharded_tensor(module)), torch.optim.AdamW, lr=1e-3)  # doctest: +SKIP
    """

    def __init__(
        self, named_params: Named, optimizer_class: type[optim.Optimizer], *optimizer_args: Any, **optimizer_kwargs: Any
    ) -> None:
        self.named_params: dict[str, torch.Tensor] = {}
        tensors = self._taken(named_params)
        self._optim = optimizer_class(tensors, *optimizer_args, **optimizer_kwargs)
        self.param_groups = self._optim.param_groups
        self.state = self._optim.state
        self.defaults = self._optim.defaults

    def _taken(self, named_params: Named) -> list[torch.Tensor]:
        """Remember the names; the local tensors behind them."""
        named = dict(named_params)
        repeated = sorted(named.keys() & self.named_params.keys())
        if repeated:
            raise ValueError(f"parameters {repeated} are in the optimizer already")
        self.named_params |= named
        return [part for each in named.values() for part in _parts(each)]

    def __getattr__(self, name: str) -> Any:
        """What this class does not have (hooks, for the schedulers), the optimizer inside has."""
        if name == "_optim":
            raise AttributeError(name)
        return getattr(self._optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"ShardedOptimizer of {len(self.named_params)} parameters over {self._optim!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all local tensors."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the local tensors; no communication.

        A parameter of which this rank has no shard is stepped as an empty one, so that all ranks have the same state.
        """
        for each in self.named_params.values():
            for part in _parts(each):
                if part.numel() == 0 and part.grad is None:
                    part.grad = torch.zeros_like(part)
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: "params": names and parameters, as in the constructor; all other entries are options.
        """
        tensors = self._taken(param_group["params"])
        self._optim.add_param_group({**param_group, "params": tensors})

    def state_dict(self) -> dict[str, Any]:
        """State and options by parameter name; no communication.

        Returns:
            "state": name -> entries, a ShardedTensor each where it has the shape of a sharded parameter.
            "param_groups": the groups, with names for parameters.
        """
        state = {name: self._state_of(each) for name, each in self.named_params.items()}
        owner = {id(part): name for name, each in self.named_params.items() for part in _parts(each)}
        groups = [
            {**group, "params": list(dict.fromkeys(owner[id(part)] for part in group["params"]))}
            for group in self.param_groups
        ]
        return {"state": {name: entries for name, entries in state.items() if entries}, "param_groups": groups}

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        parts = _parts(parameter)
        per_part = [self.state.get(part, {}) for part in parts]
        entries = {}
        for key, first in per_part[0].items():
            values = [each[key] for each in per_part]
            shaped = all(
                isinstance(value, torch.Tensor) and value.shape == part.shape and part.dim() > 0
                for value, part in zip(values, parts, strict=True)
            )
            entries[key] = parameter._with(values) if shaped and isinstance(parameter, ShardedTensor) else first
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over state and options; all ranks call it, since state laid out otherwise is moved.

        Raises:
            CheckpointError: Unknown or missing names, another number of groups, or state of another size; nothing has
                changed then.
        """
        state, groups = state_dict["state"], state_dict["param_groups"]
        self._check(state, groups)
        loaded: dict[torch.Tensor, dict[str, Any]] = {}
        for name in sorted(state):
            parameter = self.named_params[name]
            for part in _parts(parameter):
                loaded[part] = {}
            for key in sorted(state[name]):
                for part, value in zip(_parts(parameter), _split(parameter, state[name][key]), strict=True):
                    loaded[part][key] = value
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})
        self.state.clear()
        self.state.update(loaded)

    def _check(self, state: Mapping[str, Any], groups: list[Any]) -> None:
        unknown = sorted(state.keys() - self.named_params.keys())
        if unknown:
            raise CheckpointError(f"optimizer state for unknown parameters {unknown}")
        have = [set(group["params"]) for group in self.state_dict()["param_groups"]]
        given = [set(group["params"]) for group in groups]
        if have != given:
            raise CheckpointError(f"the parameter groups differ: here {have}, in the state dict {given}")
        for name, entries in state.items():
            for key, value in entries.items():
                size = tuple(self.named_params[name].size())
                if isinstance(value, ShardedTensor) and tuple(value.size()) != size:
                    raise CheckpointError(f"{key} of {name} has size {tuple(value.size())}, the parameter has {size}")


def _parts(parameter: torch.Tensor) -> list[torch.Tensor]:
    """What this rank optimizes of a parameter: the shards, or the empty tensor that stands for them."""
    return parameter._parts if isinstance(parameter, ShardedTensor) else [parameter]


def _split(parameter: torch.Tensor, value: Any) -> list[Any]:
    """A state entry for every local part."""
    if isinstance(parameter, ShardedTensor) and isinstance(value, ShardedTensor):
        return [each.detach().clone() for each in laid_out_as(parameter, value)]
    return [value.clone() if isinstance(value, torch.Tensor) else value for _ in _parts(parameter)]
