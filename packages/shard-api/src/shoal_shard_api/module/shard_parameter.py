"""Sharding of one tensor or parameter, after all ranks have agreed on the arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shoal_dtensor import DTensor

from ..arguments import is_plain, type_error, type_name
from ..errors import (
    MissingParameterError,
    ParameterError,
    PlanTypeError,
)
from ..ranks.agreement import agree
from ..ranks.process_groups import check_rank, resolve
from ..spec.metadata import TensorProperties
from ..spec.sharding_spec import ShardingSpec
from ..tensor.assemble import checked_metadata
from ..tensor.sharded_tensor import ShardedTensor


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
    _agree_on_tensor(group, tensor, sharding_spec, src_rank, _tensor_error(tensor, sharding_spec, "tensor", group))
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
    error = parameter_error(module, param_name, sharding_spec, group)
    tensor = getattr(module, param_name) if error is None else None
    _agree_on_tensor(group, tensor, sharding_spec, src_rank, error)
    assert tensor is not None, "agree raises if a rank has an error"
    _install(module, param_name, sharding_spec.shard(tensor, src_rank=src_rank, process_group=group))


def parameter_error(
    module: nn.Module, name: str, spec: Any, group: dist.ProcessGroup, path: str | None = None
) -> Exception | None:
    """The error in the arguments of ``shard_parameter`` on this rank, None if there is none."""
    error = type_error("shard_parameter", "module", module, nn.Module)
    error = error or type_error("shard_parameter", "param_name", name, str)
    if error is not None:
        return error
    where = path or f"{type(module).__name__}.{name}"
    if not hasattr(module, name):
        return MissingParameterError(f"{type(module).__name__} has no attribute {name!r} (asked for {where!r})")
    return _tensor_error(getattr(module, name), spec, where, group)


def _tensor_error(tensor: Any, spec: Any, where: str, group: dist.ProcessGroup) -> Exception | None:
    """The error in a tensor that is to be sharded, None if there is none."""
    if not isinstance(tensor, torch.Tensor):
        return ParameterError(f"{where} must be a Tensor, got {type_name(tensor)}")
    if isinstance(tensor, ShardedTensor):
        return ParameterError(f"{where} is a ShardedTensor already: use its reshard()")
    if isinstance(tensor, DTensor):
        return ParameterError(f"{where} is a DTensor already: use ShardedTensor.from_dtensor(), or redistribute it")
    if tensor.is_meta or not is_plain(tensor):
        return ParameterError(f"{where} must be a plain strided tensor with data, got {type_name(tensor)}: {tensor!r}")
    if not tensor.is_contiguous():
        return ParameterError(f"{where} is not contiguous: size {tuple(tensor.size())}, strides {tensor.stride()}")
    if not isinstance(spec, ShardingSpec):
        return PlanTypeError(f"{where}: expected a ShardingSpec of this package, got {type_name(spec)}")
    try:
        checked_metadata(spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor)), group)
    except (ValueError, TypeError) as error:
        return type(error)(f"{where}: {error}")
    return None


def _agree_on_tensor(
    group: dist.ProcessGroup, tensor: torch.Tensor | None, spec: Any, src_rank: int, error: Exception | None
) -> None:
    facts: dict[str, Any] = {"src_rank": src_rank, "sharding_spec": spec}
    if tensor is not None and error is None:
        facts |= {"size": tuple(tensor.size()), "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
    agree(group, facts, error or source_error(src_rank, group))


def source_error(src_rank: Any, group: dist.ProcessGroup) -> Exception | None:
    """The error in the rank whose data are used, None if it is a rank of the group."""
    try:
        check_rank("shard", "src_rank", src_rank, group)
    except (TypeError, RuntimeError) as error:
        return error
    return None


def _install(module: nn.Module, name: str, tensor: ShardedTensor) -> None:
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=tensor.requires_grad)
    elif name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)
