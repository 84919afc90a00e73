"""Sharding plans as data, and the checks of a plan or one tensor that one rank can make alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import DTensor
from shoal_mesh.internal import kind_of

from ..arguments import expect, expect_all, is_plain
from ..errors import MissingParameterError, ParameterError, PlanConflictError, PlanTypeError, SharderPathError
from ..spec.metadata import TensorProperties
from ..spec.specs import ShardingSpec
from ..tensor.shard import checked_metadata
from ..tensor.sharded_tensor import ShardedTensor


class Sharder(ABC):
    """Shards a sub-module by code, where one spec per parameter is not enough.

    Example:
        >>> class RowParallel(Sharder):
        ...     def shard(self, module):
        ...         shard_parameter(module, "weight", ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]))
        ...         return module
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The sharded module, which replaces ``module``; all ranks call it."""


@dataclass(frozen=True)
class ShardingPlan:
    """The specs and Sharders by which ``shard_module`` shards a module.

    Args:
        plan: Path of a parameter -> its spec, or path of a sub-module -> its Sharder.
        output_plan: Path of a module ("" is the root) -> spec to which its ShardedTensor output is resharded.
        return_local_tensor: Paths of modules whose ShardedTensor output is returned as this rank's local tensor.

    Example:
        >>> ranks = ["rank:0/cpu", "rank:1/cpu"]
        >>> plan = ShardingPlan(
        ...     plan={"up.weight": ChunkShardingSpec(0, ranks), "down.weight": ChunkShardingSpec(1, ranks)},
        ...     output_plan={"": ChunkShardingSpec(0, ranks)},
        ...     return_local_tensor=[""],
        ... )
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(ABC):
    """Builds the sharding plan of a module.

    Example:
        >>> class ShardAllRows(ShardingPlanner):
        ...     def build_plan(self, module):
        ...         rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...         return ShardingPlan({name: rows for name, _ in module.named_parameters()})
        >>> sorted(ShardAllRows().build_plan(torch.nn.Linear(4, 4)).plan)
        ['bias', 'weight']
    """

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """The sharding plan of ``module``; the same on every rank."""


@dataclass(slots=True)
class CheckedPlan:
    """The entries of a plan by kind, after every check that one rank can make."""

    parameters: dict[str, ShardingSpec] = field(default_factory=dict)
    sharders: dict[str, Sharder] = field(default_factory=dict)
    outputs: dict[str, ShardingSpec] = field(default_factory=dict)
    locals_: list[str] = field(default_factory=list)


def check_plan(module: nn.Module, plan: Any, group: dist.ProcessGroup) -> CheckedPlan:
    """The entries of the plan by kind, after every check that one rank can make; one entry for each parameter."""
    expect("shard_module", "module", module, nn.Module)
    expect("shard_module", "plan", plan, ShardingPlan, error=PlanTypeError)
    outputs, local = plan.output_plan or {}, plan.return_local_tensor or ()
    _check_table("plan", plan.plan, ShardingSpec, Sharder)
    _check_table("output_plan", outputs, ShardingSpec)
    expect_all("shard_module", "return_local_tensor", local, str, error=PlanTypeError)
    checked = CheckedPlan(outputs=dict(outputs), locals_=list(local))
    owned: dict[int, tuple[str, str]] = {}  # by the id of a parameter in the sub-tree of a Sharder, its name and that
    for path, entry in plan.plan.items():
        if not isinstance(entry, Sharder):
            continue
        if not path:
            raise SharderPathError("a Sharder needs the path of a sub-module; '' has no parent to replace it in")
        sub_tree = submodule(module, path, "plan").named_parameters(path)
        checked.sharders[path] = entry
        owned.update({id(parameter): (name, path) for name, parameter in sub_tree})
        for other in plan.plan:
            if other.startswith(f"{path}."):
                raise PlanConflictError(f"{other!r} is in the sub-tree of the Sharder of {path!r}")
    first: dict[int, str] = {}
    for path, spec in plan.plan.items():
        if path in checked.sharders:
            continue
        parent, _, name = path.rpartition(".")
        owner = submodule(module, parent, "plan")
        tensor = attribute_of(owner, name, path)
        if id(tensor) in owned:
            inside, sharder = owned[id(tensor)]
            raise PlanConflictError(f"{path!r} is tied to {inside!r}, which belongs to the Sharder of {sharder!r}")
        check_shardable(tensor, spec, path, group)
        if name not in owner._parameters:
            raise ParameterError(f"{path} is a tensor but no parameter of {type(owner).__name__}; use shard_parameter")
        other = first.setdefault(id(tensor), path)
        if checked.parameters.setdefault(other, spec) != spec:
            raise PlanConflictError(
                f"{other!r} and {path!r} are one tied parameter, but the plan gives it two specs: "
                f"{checked.parameters[other]} and {spec}"
            )
    for path in (*checked.outputs, *checked.locals_):
        if not any(path.startswith(f"{sharder}.") for sharder in checked.sharders):
            submodule(module, path, "output_plan or return_local_tensor")
    return checked


def _check_table(name: str, table: Any, *types: type) -> None:
    """Raise PlanTypeError unless a table maps paths to entries of these types."""
    expect("shard_module", name, table, Mapping, error=PlanTypeError)
    for path, entry in table.items():
        expect("shard_module", f"a path in {name}", path, str, error=PlanTypeError)
        expect("shard_module", f"{name}[{path!r}]", entry, *types, error=PlanTypeError)


def submodule(module: nn.Module, path: str, where: str) -> nn.Module:
    """The sub-module at a path; MissingParameterError if there is none, where ``where`` is the argument of the path."""
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise MissingParameterError(f"{where}: {type(module).__name__} has no sub-module {path!r} ({error})") from None


def attribute_of(module: nn.Module, name: str, where: str) -> Any:
    """The attribute of a module that is to be sharded; MissingParameterError if the module has none of the name."""
    expect("shard_parameter", "module", module, nn.Module)
    expect("shard_parameter", "param_name", name, str)
    if not hasattr(module, name):
        raise MissingParameterError(f"{type(module).__name__} has no attribute {name!r} (asked for {where!r})")
    return getattr(module, name)


def check_shardable(tensor: Any, spec: Any, where: str, group: dist.ProcessGroup) -> None:
    """Raise what is wrong with a tensor that is to be sharded, or with its spec."""
    if not isinstance(tensor, torch.Tensor):
        raise ParameterError(f"{where} must be a Tensor, got {kind_of(tensor)}")
    if isinstance(tensor, ShardedTensor):
        raise ParameterError(f"{where} is a ShardedTensor already: use its reshard()")
    if isinstance(tensor, DTensor):
        raise ParameterError(f"{where} is a DTensor already: use ShardedTensor.from_dtensor(), or redistribute it")
    if tensor.is_meta or not is_plain(tensor):
        raise ParameterError(f"{where} must be a plain strided tensor with data, got {kind_of(tensor)}: {tensor!r}")
    if not tensor.is_contiguous():
        raise ParameterError(f"{where} is not contiguous: size {tuple(tensor.size())}, strides {tensor.stride()}")
    expect(where, "the spec", spec, ShardingSpec, error=PlanTypeError)
    try:
        checked_metadata(spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor)), group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}: {error}") from error
