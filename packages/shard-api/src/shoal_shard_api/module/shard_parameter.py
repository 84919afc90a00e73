"""Sharding of one tensor or parameter, after all ranks have agreed on the arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..ranks.process_groups import agree_on, check_rank, resolve
from ..spec.sharding_spec import ShardingSpec
from ..tensor.sharded_tensor import ShardedTensor
from .plan import attribute_of, check_shardable


def _shard_tensor(
    tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> ShardedTensor:
    """Plain on ``src_rank`` -> sharded: the ShardedTensor of the tensor there; all ranks of the group call it.

    Args:
        tensor: Contiguous global tensor, of the same size and dtype on every rank.
        sharding_spec: The spec of the result.
        src_rank: Rank in the process group whose data are used.
        process_group: The ranks that hold the result; None is the default group.

    Raises:
        ArgumentTypeError: The group is no process group.
        ParameterError: The tensor is no tensor, is sharded already, or is not contiguous.
        PlanTypeError: The spec is no ShardingSpec.
        ProcessGroupError: ``src_rank`` is not a rank of the group.
        RankMismatchError: Ranks passed a different source, spec, size or dtype; names both values and both ranks.
        ShardingSpecError: The spec does not fit the tensor or the group.

        Each is raised on every rank.
    """
    group = resolve(process_group)
    agree_on(group, lambda: _facts(tensor, sharding_spec, src_rank, "tensor", group))
    sharded: ShardedTensor = sharding_spec.shard(tensor, src_rank=src_rank, process_group=group)
    return sharded


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
        return _facts(attribute_of(module, param_name, where), sharding_spec, src_rank, where, group)

    agree_on(group, facts)
    tensor = getattr(module, param_name)
    _install(module, param_name, sharding_spec.shard(tensor, src_rank=src_rank, process_group=group))


def _facts(tensor: Any, spec: Any, src_rank: int, where: str, group: dist.ProcessGroup) -> dict[str, Any]:
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


def _install(module: nn.Module, name: str, tensor: ShardedTensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)
