"""Factories of ShardedTensors: those of ``torch``, with a sharding spec as first argument.

Random factories draw the values that the same call without a spec draws from the same generator
state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal_mesh.internal import require

from ..errors import ArgumentTypeError, NotExpressibleError, UnsupportedOpError
from ..ops.via_dtensor import DTensorCall, implicit_reshard
from ..spec.specs import ShardingSpec
from .shard import Shard
from .sharded_tensor import ShardedTensor
from .sharded_tensor_base import ShardedTensorBase


def empty(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Return an uninitialized ShardedTensor; all ranks of the group call it, no communication.

    Args:
        sharding_spec: The shards of the tensor and their placements.
        size: Global size, as integers or one sequence.
        properties: dtype, layout, requires_grad, pin_memory, memory_format, process_group,
            init_rrefs.

    Raises:
        ArgumentTypeError: The spec is not a ShardingSpec, or the size not a sequence of integers.
        ProcessGroupError: There is no default group, or this rank is not in the group.
        ShardingSpecError: The spec does not fit the size or the group.

    Example:
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> empty(rows, 4, 3, dtype=torch.int64).size()
        torch.Size([4, 3])
    """
    return ShardedTensor(sharding_spec, *size, **properties)


def zeros(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Return a ShardedTensor of zeros; arguments and errors as for ``empty``.

    Example:
        >>> zeros(ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 3).full_tensor()
        tensor([0., 0., 0.])
    """
    return _fill(empty(sharding_spec, *size, **properties), 0)


def ones(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Return a ShardedTensor of ones; arguments and errors as for ``empty``.

    Example:
        >>> ones(ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]), 3).full_tensor()
        tensor([1., 1., 1.])
    """
    return _fill(empty(sharding_spec, *size, **properties), 1)


def full(
    sharding_spec: ShardingSpec, size: Any, fill_value: Any, **properties: Any
) -> ShardedTensor:
    """Return a ShardedTensor filled with one value; other arguments and errors as for ``empty``.

    Args:
        sharding_spec: The shards of the tensor and their placements.
        size: Global size.
        fill_value: A number or bool. Its type does not change the dtype, which is torch's default
            dtype unless ``dtype`` is given.
        properties: As for ``empty``.

    Example:
        >>> full(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), [3], 7).full_tensor()
        tensor([7., 7., 7.])
    """
    require(
        fill_value,
        bool | int | float | complex | torch.Tensor,
        "full: fill_value is a number or a Tensor",
        ArgumentTypeError,
    )
    return _fill(empty(sharding_spec, size, **properties), fill_value)


def rand(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Return a ShardedTensor of uniform numbers in [0, 1); arguments and errors as for ``empty``.

    Raises:
        NotExpressibleError: The tensor has no dims.
        UnsupportedOpError: The dtype is not a floating point type.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> rand(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 3).full_tensor()
        tensor([0.4963, 0.7682, 0.0885])
    """
    return _draw(empty(sharding_spec, *size, **properties), torch.Tensor.uniform_)


def randn(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Return a ShardedTensor of standard normal numbers; arguments and errors as for ``rand``.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> randn(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 3).full_tensor()
        tensor([ 1.5410, -0.2934, -2.1788])
    """
    return _draw(empty(sharding_spec, *size, **properties), torch.Tensor.normal_)


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Wrap the shards of all ranks, without a copy; all ranks call it.

    Args:
        local_shards: This rank's shards, placed on this rank; may be empty.
        global_size: Global size, as integers or one sequence. One dim may be None if every rank has
            one shard: the shards are then concatenated along it in the order of the ranks.
        process_group: The ranks that hold the tensor; None is the default group.
        init_rrefs: Must be False.

    Raises:
        ArgumentTypeError: The shards are not a sequence of Shards, or the size not a sequence of
            integers.
        LocalShardError: Local shards differ in dtype, are not contiguous, or are placed on another
            rank.
        RankMismatchError: The size, or dtype, requires_grad or pinning, differs between ranks.
        ShardingSpecError: The shards overlap, leave a gap, reach beyond the size, or are outside
            the group.

        Each is raised on every rank.

    Example:
        >>> rank = torch.distributed.get_rank()
        >>> shard = Shard.from_tensor_and_offsets(torch.full((2,), float(rank)), [2 * rank], rank)
        >>> init_from_local_shards([shard], 4).full_tensor()
        tensor([0., 0., 1., 1.])
    """
    options: dict[str, Any] = {"process_group": process_group, "init_rrefs": init_rrefs}
    return ShardedTensor._init_from_local_shards(local_shards, *global_size, **options)


def _fill(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.fill_(value)
    return tensor


def _draw(tensor: ShardedTensor, draw: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensor:
    """Fill a tensor by the operator of torch's factory; shoal_dtensor draws as one device does."""
    if tensor.dim() == 0:
        raise NotExpressibleError(
            "a random ShardedTensor needs at least one dim; draw a plain tensor for 0 dims"
        )
    if not tensor.dtype.is_floating_point:
        raise UnsupportedOpError(
            f"random ShardedTensors must have a floating-point dtype, got {tensor.dtype}"
        )
    # A layout without placements is drawn as Shard(0) and moved.
    with torch.no_grad(), implicit_reshard():
        DTensorCall(ShardedTensor, draw, [tensor]).run((tensor,), {})
    return tensor


def _list_properties(*factories: Any) -> None:
    """Name the properties of a ShardedTensor in the signatures that ``help`` and tools show."""
    properties = list[inspect.Parameter]()
    for cls in (ShardedTensorBase, ShardedTensor):
        parameters = inspect.signature(cls.__new__).parameters.values()
        properties += [
            parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
        ]
    for factory in factories:
        signature = inspect.signature(factory)
        parameters = signature.parameters.values()
        named = [
            parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD
        ]
        factory.__signature__ = signature.replace(parameters=[*named, *properties])


_list_properties(empty, zeros, ones, full, rand, randn)
