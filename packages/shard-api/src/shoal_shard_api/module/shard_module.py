"""Sharding of tensors, of parameters, and of modules by a plan.

Each rank checks its arguments, then the ranks exchange errors and arguments.  Either all ranks raise the same error and
nothing has changed, or none does.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shoal_mesh.internal import agree, kind_of

from ..arguments import expect
from ..errors import PlanTypeError, UnsupportedOpError
from ..ranks.process_groups import agree_on, check_rank, resolve
from ..spec.specs import ChunkShardingSpec, ShardingSpec
from ..tensor.sharded_tensor import ShardedTensor
from .plan import CheckedPlan, ShardingPlan, attribute_of, check_plan, check_shardable, submodule


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Plain on ``src_rank`` -> sharded: replaces a parameter by a ShardedTensor; all ranks of the group call it.

    Args:
        module: The module that owns the parameter.
        param_name: Its name in the module.  A buffer stays a buffer, a tensor attribute an attribute.
        sharding_spec: The spec of the result.
        src_rank: Rank in the process group whose data are used.
        process_group: The ranks that hold the result; None is the default group.

    Raises:
        ArgumentTypeError: ``module`` is no module, ``param_name`` no string, or the group no process group.
        MissingParameterError: The module has no such attribute.
        ParameterError: It is no tensor, is sharded already, or is not contiguous.
        PlanTypeError: The spec is no ShardingSpec.
        ProcessGroupError: ``src_rank`` is not a rank of the group.
        RankMismatchError: Ranks passed a different source, spec, size or dtype; names both values and both ranks.
        ShardingSpecError: The spec does not fit the tensor or the group.

        Each is raised on every rank, and the module is unchanged then.

    Example:
        >>> linear = torch.nn.Linear(3, 4)
        >>> shard_parameter(linear, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
        >>> linear.weight.local_tensor().shape
        torch.Size([2, 3])
    """
    group = resolve(process_group)

    def facts() -> dict[str, Any]:
        where = f"{type(module).__name__}.{param_name}"
        return _facts_of_tensor(attribute_of(module, param_name, where), sharding_spec, src_rank, where, group)

    agree_on(group, facts)
    tensor = sharding_spec.shard(getattr(module, param_name), src_rank=src_rank, process_group=group)
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
    """Plain on ``src_rank`` -> sharded: the ShardedTensor of the tensor there; all ranks of the group call it.

    Arguments and errors are those of ``shard_parameter``.  The tensor is contiguous, of one size and dtype on all.
    """
    group = resolve(process_group)
    agree_on(group, lambda: _facts_of_tensor(tensor, sharding_spec, src_rank, "tensor", group))
    sharded: ShardedTensor = sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return sharded


def _facts_of_tensor(tensor: Any, spec: Any, src_rank: int, where: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """What is equal on all ranks that shard a tensor, after every check that one rank can make."""
    check_shardable(tensor, spec, where, group)
    check_rank("shard", "src_rank", src_rank, group)
    return {
        "src_rank": src_rank,
        "sharding_spec": spec,
        "size": tuple(tensor.size()),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
    }


def shard_module(
    module: nn.Module, plan: ShardingPlan, src_rank: int = 0, process_group: dist.ProcessGroup | None = None
) -> None:
    """Plain on ``src_rank`` -> sharded: shards a module by a plan, in place; all ranks of the group call it.

    Parameters become ShardedTensors by their specs; tied parameters stay tied.  Sub-modules with a Sharder are replaced
    by the module that it returns.  Hooks reshard outputs, or replace them by local tensors.

    Args:
        module: The root; paths in the plan are relative to it.
        plan: The plan, the same on every rank.
        src_rank: Rank in the process group whose data are used.
        process_group: The ranks that hold the shards; None is the default group.

    Raises:
        ArgumentTypeError: ``module`` is no module, or the group no process group.
        PlanTypeError: The plan, or an entry, has a wrong type.
        SharderPathError: A Sharder has the empty path.
        PlanConflictError: A parameter belongs to the sub-tree of a Sharder, Sharders are nested, or one tied parameter
            has two different specs.
        MissingParameterError: A path of the plan is not in the module.
        ParameterError, ShardingSpecError, RankMismatchError, ProcessGroupError: As for ``shard_parameter``.

        Each is raised on every rank, and the module is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU())
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> shard_module(model, ShardingPlan({"0.weight": rows}, {"": rows}, return_local_tensor=[""]))
        >>> model(torch.ones(2, 4)).shape
        torch.Size([6])
    """
    group = resolve(process_group)
    checked = CheckedPlan()

    def facts() -> dict[str, Any]:
        nonlocal checked
        checked = check_plan(module, plan, group)
        check_rank("shard", "src_rank", src_rank, group)
        return _facts_of_plan(module, checked, src_rank)

    agree_on(group, facts)
    replacements = _run_sharders(module, checked, group)
    sharded = {
        path: spec.shard(module.get_parameter(path), src_rank=src_rank, process_group=group)
        for path, spec in sorted(checked.parameters.items())
    }
    for path, tensor in sharded.items():
        new_parameter = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        _replace_everywhere(module, "_parameters", module.get_parameter(path), new_parameter)
    for path, new in replacements.items():
        _replace_everywhere(module, "_modules", module.get_submodule(path), new)
    for path, spec in checked.outputs.items():
        _reshard_output(module.get_submodule(path), spec)
    for path in checked.locals_:
        _collect_local_shard(module.get_submodule(path))


def _facts_of_plan(module: nn.Module, checked: CheckedPlan, src_rank: int) -> dict[str, Any]:
    """Values that must be equal on all ranks; Sharders are compared by their class."""
    facts: dict[str, Any] = {
        "src_rank": src_rank,
        "plan entries": sorted((*checked.parameters, *checked.sharders)),
        "output_plan": checked.outputs,
        "return_local_tensor": checked.locals_,
    }
    for path, spec in checked.parameters.items():
        parameter = module.get_parameter(path)
        facts[f"sharding_spec of {path}"] = spec
        facts[f"size and dtype of {path}"] = (tuple(parameter.size()), parameter.dtype)
    for path, sharder in checked.sharders.items():
        facts[f"Sharder of {path}"] = f"{type(sharder).__module__}.{type(sharder).__qualname__}"
    return facts


def _run_sharders(module: nn.Module, checked: CheckedPlan, group: dist.ProcessGroup) -> dict[str, nn.Module]:
    """The new sub-modules by path, not installed yet; an error of any rank's Sharder is raised on all ranks."""
    if not checked.sharders:
        return {}
    new: dict[str, nn.Module] = {}

    def run() -> None:
        for path, sharder in sorted(checked.sharders.items()):
            result: Any = sharder.shard(module.get_submodule(path))
            if not isinstance(result, nn.Module):
                raise PlanTypeError(f"the Sharder of {path!r} returned {kind_of(result)}, not a Module")
            new[path] = result
        for path in (*checked.outputs, *checked.locals_):
            for sharded, replacement in new.items():
                if path.startswith(f"{sharded}."):
                    submodule(replacement, path.removeprefix(f"{sharded}."), f"the module that replaces {sharded!r}")

    agree(run, group)
    return new


def _replace_everywhere(module: nn.Module, table: Literal["_parameters", "_modules"], old: Any, new: Any) -> None:
    """Replace a parameter or a sub-module under each of its names."""
    for owner in list(module.modules()):
        entries: dict[str, Any] = getattr(owner, table)
        entries.update({name: new for name, entry in entries.items() if entry is old})


def _reshard_output(module: nn.Module, resharding_spec: ShardingSpec) -> nn.Module:
    """The module, with a hook that reshards its ShardedTensor output by a spec; other outputs pass unchanged."""
    expect("_reshard_output", "module", module, nn.Module)
    expect("_reshard_output", "resharding_spec", resharding_spec, ShardingSpec)

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return output.resharded(resharding_spec) if isinstance(output, ShardedTensor) else output

    module.register_forward_hook(hook)
    return module


def _collect_local_shard(module: nn.Module) -> nn.Module:
    """The module, with a hook that replaces its ShardedTensor output by its local tensor; other outputs pass unchanged.

    A dim of a ChunkShardingSpec along which the local tensor has size 1 is squeezed, as torch does.
    """
    expect("_collect_local_shard", "module", module, nn.Module)

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if not isinstance(output, ShardedTensor):
            return output
        if len(output.local_shards()) > 1:
            raise UnsupportedOpError(
                f"return_local_tensor: rank {dist.get_rank()} has {len(output.local_shards())} shards of the output"
            )
        local, spec = output._local_tensors[0], output.sharding_spec()
        if isinstance(spec, ChunkShardingSpec) and isinstance(spec.dim, int) and local.dim() == output.dim():
            return local.squeeze(spec.dim)
        return local

    module.register_forward_hook(hook)
    return module
