"""ShardedOptimizer: a torch optimizer of plain parameters and of local shards.

The torch optimizer sees the local tensors only, so a step needs no communication. State dicts have
the names of the parameters, and state that has the shape of a shard becomes a ShardedTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn, optim

from shoal_mesh.internal import require

from ..errors import ArgumentTypeError, CheckpointError, ParameterError, UnsupportedOpError
from ..ops.dispatch import local_tensors_in_layout_of
from ..tensor.sharded_tensor import ShardedTensor

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, nn.Parameter | ShardedTensor]]:
    """Yield name and value of every parameter, and of every ShardedTensor in a plain attribute.

    A tensor with several names comes once, under the first of them.

    Args:
        module: The module.
        prefix: Prefix of all names, joined by a dot.
        recurse: Include sub-modules.

    Raises:
        ArgumentTypeError: ``module`` is not a module, or ``prefix`` not a string.

    Example:
        >>> [name for name, _ in named_params_with_sharded_tensor(torch.nn.Linear(2, 2), "head")]
        ['head.weight', 'head.bias']
    """
    require(
        module,
        nn.Module,
        "named_params_with_sharded_tensor: module is an nn.Module",
        ArgumentTypeError,
    )
    require(prefix, str, "named_params_with_sharded_tensor: prefix is a str", ArgumentTypeError)
    seen: set[int] = set()
    owners = module.named_modules(prefix=prefix) if recurse else iter([(prefix, module)])
    for path, owner in owners:
        prefix_of_owner = f"{path}." if path else ""
        tensors: list[tuple[str, Any]] = []
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor):
                tensors.append((name, value))
        tensors += owner._parameters.items()
        for name, value in tensors:
            if value is not None and id(value) not in seen:
                seen.add(id(value))
                yield f"{prefix_of_owner}{name}", value


class ShardedOptimizer(optim.Optimizer):
    """A torch optimizer whose step updates plain parameters and the local shards of sharded ones.

    Other attributes are forwarded to the torch optimizer: ``param_groups``, ``state``,
    ``defaults``.

    Args:
        named_params: Names and parameters, plain or sharded, as a mapping or as pairs.
        optimizer_class: Class of the torch optimizer.
        optimizer_args: Further positional arguments of the class.
        optimizer_kwargs: Keyword arguments of the class.

    Raises:
        ArgumentTypeError: The parameters are not names and tensors, or the class is not an
            optimizer class.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> shard_parameter(linear, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
        >>> params = dict(named_params_with_sharded_tensor(linear))
        >>> optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=0.1)
        >>> linear(torch.ones(3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        named_params: Named,
        optimizer_class: type[optim.Optimizer],
        *optimizer_args: Any,
        **optimizer_kwargs: Any,
    ) -> None:
        cls: Any = optimizer_class
        if not (isinstance(cls, type) and issubclass(cls, optim.Optimizer)):
            raise ArgumentTypeError(
                f"ShardedOptimizer: optimizer_class must be a class of torch.optim, got {cls!r}"
            )
        self.named_params: dict[str, torch.Tensor] = {}
        local_tensors = self._add_parameters(named_params)
        self._optim = optimizer_class(local_tensors, *optimizer_args, **optimizer_kwargs)

    def _add_parameters(self, named_params: Named) -> list[torch.Tensor]:
        """Add parameters to ``named_params``; return their local tensors."""
        try:
            named = dict(named_params)
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError(
                "ShardedOptimizer: parameters must be a mapping or pairs of names and tensors: "
                f"{error}"
            ) from None
        for name, parameter in named.items():
            require(name, str, "ShardedOptimizer: a parameter name is a str", ArgumentTypeError)
            require(
                parameter,
                torch.Tensor,
                f"ShardedOptimizer: parameter {name!r} is a Tensor",
                ArgumentTypeError,
            )
        repeated = sorted(named.keys() & self.named_params.keys())
        if repeated:
            raise ParameterError(f"parameters {repeated} are in the optimizer already")
        self.named_params |= named
        return [local for param in named.values() for local in _local_tensors(param)]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the torch optimizer."""
        if name == "_optim":
            raise AttributeError(name)
        return getattr(self._optim, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"ShardedOptimizer of {len(self.named_params)} parameters over {self._optim!r}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all local tensors."""
        self._optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the local tensors; no communication.

        If this rank has no shard of a parameter, an empty tensor is stepped in its place, so that
        all ranks have the same state entries.

        Raises:
            UnsupportedOpError: A parameter was resharded since it was added: its old shards would
                be stepped.
        """
        self._check_owners()
        for param in self.named_params.values():
            for local in _local_tensors(param):
                if local.numel() == 0 and local.grad is None:
                    local.grad = torch.zeros_like(local)
        return self._optim.step(closure)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: "params" has names and parameters, as in the constructor; other entries are
                options.

        Raises:
            ArgumentTypeError: ``param_group`` is not a dict with "params", or "params" are not
                names and tensors.
            ParameterError: A name is in the optimizer already.
        """
        require(param_group, dict, "add_param_group: param_group is a dict", ArgumentTypeError)
        if "params" not in param_group:
            raise ArgumentTypeError(
                f"add_param_group: param_group must have 'params', got {sorted(param_group)}"
            )
        tensors = self._add_parameters(param_group["params"])
        self._optim.add_param_group({**param_group, "params": tensors})

    def state_dict(self) -> dict[str, Any]:
        """Return state and options by parameter name; no communication.

        Returns:
            "state": name -> entries; an entry of the shape of a sharded parameter is a
            ShardedTensor. "param_groups": the groups, with parameters by name.

        Raises:
            UnsupportedOpError: A parameter was resharded since it was added.
        """
        name_of_local = self._check_owners()
        states = {}
        for name, param in self.named_params.items():
            entries = self._state_of(param)
            if entries:
                states[name] = entries
        groups = []
        for group in self.param_groups:
            names = [name_of_local[id(local)] for local in group["params"]]
            groups.append({**group, "params": list(dict.fromkeys(names))})
        return {"state": states, "param_groups": groups}

    def _check_owners(self) -> dict[int, str]:
        """Return the parameter name by the id of each local tensor.

        Raises:
            UnsupportedOpError: A group has a local tensor that no parameter has any more.
        """
        name_of_local = {}
        for name, param in self.named_params.items():
            for local in _local_tensors(param):
                name_of_local[id(local)] = name
        stepped = [local for group in self.param_groups for local in group["params"]]
        if any(id(local) not in name_of_local for local in stepped):
            raise UnsupportedOpError(
                "a parameter was resharded in place: construct a new optimizer, and load a state "
                "dict taken before"
            )
        return name_of_local

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state entries of a parameter; entries of its shape become ShardedTensors."""
        local_tensors = _local_tensors(parameter)
        states = [self.state.get(local, {}) for local in local_tensors]
        entries = {}
        for key, first in states[0].items():
            values = [state[key] for state in states]
            pairs = zip(values, local_tensors, strict=True)
            has_shape = all(_has_shape_of(value, local) for value, local in pairs)
            if has_shape and isinstance(parameter, ShardedTensor):
                entries[key] = parameter._with_local_tensors(values)
            else:
                entries[key] = first
        return entries

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load state and options; all ranks call it, because state in another layout is moved.

        Args:
            state_dict: The result of ``state_dict`` of an optimizer with the same parameter names.

        Raises:
            ArgumentTypeError: ``state_dict`` is not a mapping.
            CheckpointError: ``state_dict`` lacks "state" or "param_groups", or has unknown names,
                other groups, or state of another size; the optimizer is unchanged then.
        """
        require(state_dict, Mapping, "load_state_dict: state_dict is a mapping", ArgumentTypeError)
        has_state = isinstance(state_dict.get("state"), Mapping)
        if not has_state or not isinstance(state_dict.get("param_groups"), list):
            raise CheckpointError(
                f"an optimizer state dict has 'state' and 'param_groups', got {sorted(state_dict)}"
            )
        state = state_dict["state"]
        groups = state_dict["param_groups"]
        self._check_state(state, groups)
        loaded: dict[torch.Tensor, dict[str, Any]] = {}
        for name in sorted(state):
            parameter = self.named_params[name]
            local_tensors = _local_tensors(parameter)
            loaded |= {local: {} for local in local_tensors}
            for key, value in sorted(state[name].items()):
                values: list[Any] = [value] * len(local_tensors)
                if isinstance(parameter, ShardedTensor) and isinstance(value, ShardedTensor):
                    values = [
                        moved.detach() for moved in local_tensors_in_layout_of(parameter, value)
                    ]
                for local, entry in zip(local_tensors, values, strict=True):
                    is_tensor = isinstance(entry, torch.Tensor)
                    loaded[local][key] = entry.clone() if is_tensor else entry
        for group, new in zip(self.param_groups, groups, strict=True):
            options = {key: value for key, value in new.items() if key != "params"}
            group.update(options)
        self.state.clear()
        self.state.update(loaded)

    def _check_state(self, state: Mapping[str, Any], groups: list[Any]) -> None:
        """Raise CheckpointError unless a state dict fits the parameters and groups."""
        wrong = [name for name, entries in state.items() if not isinstance(entries, Mapping)]
        are_mappings = all(isinstance(group, Mapping) for group in groups)
        if wrong or not are_mappings:
            raise CheckpointError(
                "the state of each parameter and each parameter group must be a mapping, got "
                f"{wrong or groups}"
            )
        unknown = sorted(map(str, state.keys() - self.named_params.keys()))
        if unknown:
            raise CheckpointError(f"optimizer state for unknown parameters {unknown}")
        own_groups = self.state_dict()["param_groups"]
        own_names = [set(group["params"]) for group in own_groups]
        loaded_names = [set(group.get("params", ())) for group in groups]
        if own_names != loaded_names:
            raise CheckpointError(
                f"the parameter groups differ: here {own_names}, in the state dict {loaded_names}"
            )
        for name, entries in state.items():
            size = tuple(self.named_params[name].size())
            for key, value in entries.items():
                if not isinstance(value, ShardedTensor):
                    continue
                loaded_size = tuple(value.size())
                if loaded_size != size:
                    raise CheckpointError(
                        f"{key} of {name} has size {loaded_size}, the parameter has {size}"
                    )


def _local_tensors(parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of a parameter's shards, one empty tensor, or the plain parameter."""
    return parameter._local_tensors if isinstance(parameter, ShardedTensor) else [parameter]


def _has_shape_of(value: Any, local: torch.Tensor) -> bool:
    """Tell whether a state entry is a tensor with dims and of the shape of a local tensor."""
    if not isinstance(value, torch.Tensor) or local.dim() == 0:
        return False
    return value.shape == local.shape
