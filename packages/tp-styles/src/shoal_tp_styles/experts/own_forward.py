"""The forward of a module of experts, run on the experts, or the features of experts, that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shoal_mesh import Comm

from ..lowering.parameters import local_parameters, while_replaced
from ..sharding.module_sharding import ModuleSharding


def local_shards(
    module: nn.Module, sharding: ModuleSharding, experts: Comm | None, hidden: Comm | None
) -> dict[str, Tensor | None]:
    """The local shards of all parameters, by path.

    A parameter that an axis replicates is used by every rank along it in a part of the computation, so its gradients
    are summed. A bias behind the sum over hidden features is added on the first rank of their axis alone.

    Args:
        module: the experts.
        sharding: what the style declared.
        experts: the axis that shards the experts; None without one.
        hidden: the axis that shards hidden features; None without one.
    """
    along = (sharding.parameters, sharding.second_axis or {}) if experts is not None else ({}, sharding.parameters)
    groups: dict[Comm | None, dict[str, Tensor | None]] = {}
    for name, param in module.named_parameters():
        parts = hidden if hidden is not None and name not in along[1] else None
        if experts is not None and name not in along[0]:
            assert parts is None, "every parameter of experts whose hidden features are sharded belongs to experts"
            parts = experts
        groups.setdefault(parts, {})[name] = param
    local: dict[str, Tensor | None] = {}
    for comm, params in groups.items():
        shards = local_parameters(params, comm)
        if comm is hidden and hidden is not None and hidden.rank > 0:
            shards = {name: None if shard is None else shard * 0 for name, shard in shards.items()}
        local.update(shards)
    return local


def own_forward(module: Any, local: Mapping[str, Any], count: int, own: range | None, *args: Any, **kwargs: Any) -> Any:
    """The module's forward, with local shards for its parameters, and this rank's experts for all of them.

    Args:
        module: the experts.
        local: path -> shard.
        count: number of experts of all ranks.
        own: of a list, the children that stay; None: the numbers in which the module counts its experts stay too.
        args: of the forward.
        kwargs: likewise.
    """
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, owner in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        changes.append((owner._parameters, {n: local[dot + n] for n in owner._parameters if dot + n in local}))
    if own is not None:
        numbers = [n for n, v in vars(module).items() if "experts" in n and type(v) is int and v == count]
        changes.append((vars(module), dict.fromkeys(numbers, len(own))))
        if isinstance(module, nn.ModuleList):
            children = {str(i): module._modules[str(index)] for i, index in enumerate(own)}
            changes.append((vars(module), {"_modules": children}))
    return while_replaced(partial(type(module).forward, module, *args, **kwargs), *changes)
