"""Sharding of tensors, parameters and modules; all ranks raise the same error, or none does.

A `ShardingPlan` has specs for parameters, Sharders for sub-modules, and specs for outputs.
`shard_module` checks the plan on all ranks, then shards what it names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import DTensor
from shoal_mesh.internal import agree, kind_of, require, require_each

from ..arguments import is_plain
from ..errors import (
    ArgumentTypeError,
    MissingParameterError,
    ParameterError,
    PlanConflictError,
    SharderPathError,
    UnsupportedOpError,
)
from ..ranks.process_groups import agree_on, check_rank, resolve
from ..spec.metadata import TensorProperties
from ..spec.specs import ChunkShardingSpec, ShardingSpec
from ..tensor.shard import checked_metadata
from ..tensor.sharded_tensor import ShardedTensor


class Sharder(ABC):
    """Shards a sub-module by code, where one spec per parameter is not enough.

    Example:
        >>> class RowParallel(Sharder):
        ...     def shard(self, module):
        ...         columns = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
        ...         shard_parameter(module, "weight", columns)
        ...         return module
    """

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """Return the sharded module, which replaces ``module``; all ranks call it."""


@dataclass(frozen=True)
class ShardingPlan:
    """The specs and Sharders by which ``shard_module`` shards a module.

    Args:
        plan: Path of a parameter -> its spec, or path of a sub-module -> its Sharder.
        output_plan: Path of a module ("" is the root) -> spec to which its ShardedTensor output is
            resharded.
        return_local_tensor: Paths of modules whose ShardedTensor output is returned as this rank's
            local tensor.

    Example:
        >>> ranks = ["rank:0/cpu", "rank:1/cpu"]
        >>> rows = ChunkShardingSpec(0, ranks)
        >>> columns = ChunkShardingSpec(1, ranks)
        >>> plan = ShardingPlan(
        ...     plan={"up.weight": rows, "down.weight": columns},
        ...     output_plan={"": rows},
        ...     return_local_tensor=[""],
        ... )
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None


class ShardingPlanner(ABC):
    """Base class for code that builds the sharding plan of a module.

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
        """Return the sharding plan of ``module``; the same on every rank."""


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace a parameter of ``src_rank`` by a ShardedTensor; all ranks call it.

    Args:
        module: The module that owns the parameter.
        param_name: Its name in the module. A buffer stays a buffer, a tensor attribute an
            attribute.
        sharding_spec: The spec of the result.
        src_rank: Rank in the process group whose data are used.
        process_group: The ranks that hold the result; None is the default group.

    Raises:
        ArgumentTypeError: ``module`` is not a module, ``param_name`` not a string, or the group not
            a process group.
        MissingParameterError: The module has no such attribute.
        ParameterError: The attribute is not a tensor, is sharded already, or is not contiguous.
        ArgumentTypeError: The spec is not a ShardingSpec.
        ProcessGroupError: ``src_rank`` is not a rank of the group.
        RankMismatchError: Ranks passed a different source, spec, size or dtype; it names both
            values and both ranks.
        ShardingSpecError: The spec does not fit the tensor or the group.

        Each is raised on every rank, and the module is unchanged then.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> shard_parameter(linear, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
        >>> linear.weight.local_tensor().shape
        torch.Size([2, 3])
    """
    group = resolve(process_group)
    parameter_path = f"{type(module).__name__}.{param_name}"

    def facts() -> dict[str, Any]:
        plain = _attribute_of(module, param_name, parameter_path)
        return _facts_of_tensor(plain, sharding_spec, src_rank, parameter_path, group=group)

    agree_on(group, facts)
    plain = getattr(module, param_name)
    tensor = sharding_spec.shard(plain, src_rank=src_rank, process_group=group)
    if param_name in module._parameters:
        module._parameters[param_name] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    elif param_name in module._buffers:
        module._buffers[param_name] = tensor
    else:
        setattr(module, param_name, tensor)


def _shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """Shard a contiguous tensor of ``src_rank``; see ``shard_parameter``."""
    group = resolve(process_group)

    def facts() -> dict[str, Any]:
        return _facts_of_tensor(tensor, sharding_spec, src_rank, "tensor", group=group)

    agree_on(group, facts)
    sharded: ShardedTensor = sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return sharded


def _facts_of_tensor(
    tensor: Any, spec: Any, src_rank: int, parameter_path: str, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Check a tensor on this rank; return the facts that must be equal on all ranks."""
    _check_shardable(tensor, spec, parameter_path, group)
    check_rank("shard", "src_rank", src_rank, group)
    return {
        "src_rank": src_rank,
        "sharding_spec": spec,
        "size": tuple(tensor.size()),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
    }


def shard_module(
    module: nn.Module,
    plan: ShardingPlan,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Shard a module of ``src_rank`` by a plan, in place; all ranks call it.

    Parameters become ShardedTensors by their specs; tied parameters stay tied. Sub-modules with a
    Sharder are replaced by the module that it returns. Hooks reshard outputs, or replace them by
    local tensors.

    Args:
        module: The root; paths in the plan are relative to it.
        plan: The plan, the same on every rank.
        src_rank: Rank in the process group whose data are used.
        process_group: The ranks that hold the shards; None is the default group.

    Raises:
        ArgumentTypeError: ``module`` is not a module, or the group not a process group.
        ArgumentTypeError: The plan, or an entry, has a wrong type.
        SharderPathError: A Sharder has the empty path.
        PlanConflictError: A parameter belongs to the sub-tree of a Sharder, Sharders are nested, or
            one tied parameter has two different specs.
        MissingParameterError: A path of the plan is not in the module.
        ParameterError, ShardingSpecError, RankMismatchError, ProcessGroupError: As for
            ``shard_parameter``.

        Each is raised on every rank, and the module is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU())
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> plan = ShardingPlan({"0.weight": rows}, {"": rows}, return_local_tensor=[""])
        >>> shard_module(model, plan)
        >>> model(torch.ones(2, 4)).shape
        torch.Size([6])
    """
    group = resolve(process_group)
    specs: dict[str, ShardingSpec] = {}

    def facts() -> dict[str, Any]:
        _check_types(module, plan)
        _check_outputs(module, plan)
        owned = _parameters_of_sharders(module, plan)
        checked_specs, facts_of_plan = _check_specs(module, plan, owned, group)
        specs.update(checked_specs)
        check_rank("shard", "src_rank", src_rank, group)
        return {"src_rank": src_rank, **facts_of_plan}

    agree_on(group, facts)
    replacements = _run_sharders(module, plan, group)
    sharded = {}
    for path, spec in sorted(specs.items()):
        plain = module.get_parameter(path)
        sharded[path] = spec.shard(plain, src_rank=src_rank, process_group=group)
    for path, tensor in sharded.items():
        old_parameter = module.get_parameter(path)
        new_parameter = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        _replace_everywhere(module, "_parameters", old_parameter, new_parameter)
    for path, new in replacements.items():
        _replace_everywhere(module, "_modules", module.get_submodule(path), new)
    for path, spec in (plan.output_plan or {}).items():
        _reshard_output(module.get_submodule(path), spec)
    for path in plan.return_local_tensor or ():
        _collect_local_shard(module.get_submodule(path))


def _check_types(module: Any, plan: Any) -> None:
    require(module, nn.Module, "shard_module: module is an nn.Module", ArgumentTypeError)
    require(plan, ShardingPlan, "shard_module: plan is a ShardingPlan", ArgumentTypeError)
    tables: dict[str, Any] = {"plan": plan.plan, "output_plan": plan.output_plan or {}}
    for name, table in tables.items():
        kinds: type | UnionType = ShardingSpec
        allowed = "a ShardingSpec"
        if name == "plan":
            kinds = ShardingSpec | Sharder
            allowed = "a ShardingSpec or a Sharder"
        require(table, Mapping, f"shard_module: {name} is a mapping", ArgumentTypeError)
        for path, entry in table.items():
            require(path, str, f"shard_module: a path in {name} is a str", ArgumentTypeError)
            require(entry, kinds, f"shard_module: {name}[{path!r}] is {allowed}", ArgumentTypeError)
    paths = plan.return_local_tensor or ()
    require_each(
        paths, str, "shard_module: return_local_tensor is a sequence of strings", ArgumentTypeError
    )


def _paths_of_outputs(plan: ShardingPlan) -> list[str]:
    """Return the paths of the modules whose outputs a plan converts."""
    return [*(plan.output_plan or ()), *(plan.return_local_tensor or ())]


def _check_outputs(module: nn.Module, plan: ShardingPlan) -> None:
    """Raise MissingParameterError for a path of an output that is not in the module.

    Paths below a Sharder are checked in the module that it returns.
    """
    entries = plan.plan.items()
    below_sharders = tuple([f"{path}." for path, entry in entries if isinstance(entry, Sharder)])
    for path in _paths_of_outputs(plan):
        if not path.startswith(below_sharders):
            _submodule(module, path, "output_plan or return_local_tensor")


class _OwnedParameter(NamedTuple):
    """A parameter in the sub-tree of a Sharder."""

    name: str
    sharder: str


def _parameters_of_sharders(module: nn.Module, plan: ShardingPlan) -> dict[int, _OwnedParameter]:
    """Return, by id, the parameters that belong to Sharders; refuse other entries for them."""
    owned: dict[int, _OwnedParameter] = {}
    for path, entry in plan.plan.items():
        if not isinstance(entry, Sharder):
            continue
        if not path:
            raise SharderPathError(
                "a Sharder needs the path of a sub-module; the root module '' cannot be "
                "replaced, because it does not have a parent"
            )
        for name, parameter in _submodule(module, path, "plan").named_parameters(path):
            owned[id(parameter)] = _OwnedParameter(name, path)
        for other in plan.plan:
            if other.startswith(f"{path}."):
                raise PlanConflictError(f"{other!r} is in the sub-tree of the Sharder of {path!r}")
    return owned


def _check_specs(
    module: nn.Module,
    plan: ShardingPlan,
    owned: Mapping[int, _OwnedParameter],
    group: dist.ProcessGroup,
) -> tuple[dict[str, ShardingSpec], dict[str, Any]]:
    """Check the entries of a plan.

    Returns:
        The specs by path; a tied parameter is under the first of its paths only. And the facts
        about the plan that must be equal on all ranks.
    """
    first_path: dict[int, str] = {}
    specs: dict[str, ShardingSpec] = {}
    facts: dict[str, Any] = {"plan entries": sorted(plan.plan)}
    facts["output_plan"] = dict(plan.output_plan or {})
    facts["return_local_tensor"] = list(plan.return_local_tensor or ())
    for path, spec in plan.plan.items():
        if isinstance(spec, Sharder):
            cls = type(spec)
            facts[f"Sharder of {path}"] = f"{cls.__module__}.{cls.__qualname__}"
            continue
        parent, _, name = path.rpartition(".")
        owner = _submodule(module, parent, "plan")
        tensor = _attribute_of(owner, name, path)
        if id(tensor) in owned:
            tied = owned[id(tensor)]
            raise PlanConflictError(
                f"{path!r} is tied to {tied.name!r}, which belongs to the Sharder of "
                f"{tied.sharder!r}"
            )
        _check_shardable(tensor, spec, path, group)
        if name not in owner._parameters:
            raise ParameterError(
                f"{path} is a tensor of {type(owner).__name__} but not a parameter; use "
                "shard_parameter"
            )
        first = first_path.setdefault(id(tensor), path)
        first_spec = specs.setdefault(first, spec)
        if first_spec != spec:
            raise PlanConflictError(
                f"{first!r} and {path!r} are one tied parameter, but have two specs: "
                f"{first_spec} and {spec}"
            )
        facts[f"sharding_spec of {path}"] = spec
        facts[f"size and dtype of {path}"] = (tuple(tensor.size()), tensor.dtype)
    return specs, facts


def _run_sharders(
    module: nn.Module, plan: ShardingPlan, group: dist.ProcessGroup
) -> dict[str, nn.Module]:
    """Run the Sharders of a plan; an error of any rank's Sharder is raised on all ranks.

    Returns:
        The new sub-modules by path, which are not installed yet.
    """
    replacements: dict[str, nn.Module] = {}

    def run() -> None:
        for path, entry in sorted(plan.plan.items()):
            if not isinstance(entry, Sharder):
                continue
            new: Any = entry.shard(module.get_submodule(path))
            if not isinstance(new, nn.Module):
                raise ArgumentTypeError(
                    f"the Sharder of {path!r} returned {kind_of(new)}, not a Module"
                )
            replacements[path] = new
        for path, new in replacements.items():
            prefix = f"{path}."
            for below in _paths_of_outputs(plan):
                if below.startswith(prefix):
                    where = f"the module that replaces {path!r}"
                    _submodule(new, below.removeprefix(prefix), where)

    has_sharders = any(isinstance(entry, Sharder) for entry in plan.plan.values())
    if has_sharders:
        agree(run, group)
    return replacements


def _submodule(module: nn.Module, path: str, subject: str) -> nn.Module:
    """Return the sub-module at a path; ``subject`` is for the message.

    Raises:
        MissingParameterError: There is none.
    """
    try:
        return module.get_submodule(path)
    except AttributeError as error:
        raise MissingParameterError(
            f"{subject}: {type(module).__name__} has no sub-module {path!r} ({error})"
        ) from None


def _attribute_of(module: nn.Module, name: str, subject: str) -> Any:
    require(module, nn.Module, "shard_parameter: module is an nn.Module", ArgumentTypeError)
    require(name, str, "shard_parameter: param_name is a str", ArgumentTypeError)
    if not hasattr(module, name):
        raise MissingParameterError(
            f"{type(module).__name__} has no attribute {name!r}, requested as {subject!r}"
        )
    return getattr(module, name)


def _check_shardable(tensor: Any, spec: Any, parameter_path: str, group: dist.ProcessGroup) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ParameterError(f"{parameter_path} must be a Tensor, got {kind_of(tensor)}")
    if isinstance(tensor, ShardedTensor):
        raise ParameterError(f"{parameter_path} is a ShardedTensor already: use its reshard()")
    if isinstance(tensor, DTensor):
        raise ParameterError(
            f"{parameter_path} is a DTensor already: use ShardedTensor.from_dtensor(), or "
            "redistribute it"
        )
    if tensor.is_meta or not is_plain(tensor):
        raise ParameterError(
            f"{parameter_path} must be a plain strided tensor with data, got {kind_of(tensor)}: "
            f"{tensor!r}"
        )
    if not tensor.is_contiguous():
        size = tuple(tensor.size())
        raise ParameterError(
            f"{parameter_path} is not contiguous: size {size}, strides {tensor.stride()}"
        )
    require(spec, ShardingSpec, f"{parameter_path}: the spec is a ShardingSpec", ArgumentTypeError)
    properties = TensorProperties.of_shards_like(tensor)
    try:
        metadata = spec.build_metadata(tensor.size(), properties)
        checked_metadata(metadata, group)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{parameter_path}: {error}") from error


def _replace_everywhere(
    module: nn.Module, table: Literal["_parameters", "_modules"], old: Any, new: Any
) -> None:
    """Replace a parameter or a sub-module under each of its names."""
    for owner in list(module.modules()):
        entries: dict[str, Any] = getattr(owner, table)
        for name, entry in entries.items():
            if entry is old:
                entries[name] = new


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """Add a hook that reshards a ShardedTensor output by a spec; other outputs pass unchanged."""
    require(module, nn.Module, "_reshard_output: module is an nn.Module", ArgumentTypeError)
    require(
        resharding_spec,
        ShardingSpec,
        "_reshard_output: resharding_spec is a ShardingSpec",
        ArgumentTypeError,
    )
    return _convert_output(module, lambda output: output.resharded(resharding_spec))


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """Add a hook that replaces a ShardedTensor output by its local tensor; other outputs pass."""
    require(module, nn.Module, "_collect_local_shard: module is an nn.Module", ArgumentTypeError)

    def local_tensor(output: ShardedTensor) -> torch.Tensor:
        count = len(output.local_shards())
        if count > 1:
            raise UnsupportedOpError(
                f"return_local_tensor: rank {dist.get_rank()} has {count} shards of the output"
            )
        local = output._local_tensors[0]
        spec = output.sharding_spec()
        if not isinstance(spec, ChunkShardingSpec) or not isinstance(spec.dim, int):
            return local
        if local.dim() != output.dim():
            return local
        # torch removes the sharded dim too if its local size is 1.
        return local.squeeze(spec.dim)

    return _convert_output(module, local_tensor)


def _convert_output(module: nn.Module, convert: Callable[[ShardedTensor], Any]) -> nn.Module:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return convert(output) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module
