"""ShardedTensors made from nothing or from local shards: the factories of ``torch``, with a sharding spec first.

Random ones hold what the same call without sharding would have drawn from the same generator state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import Shard as CutDim
from shoal_dtensor import rand as draw_uniform
from shoal_dtensor import randn as draw_normal

from . import bridge
from .errors import NotExpressibleError
from .groups import line_mesh
from .ops import grid_or_none
from .shard import Shard
from .sharded_tensor import ShardedTensor
from .spec import ShardingSpec


def empty(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """A tensor of unset values; all ranks of the group call it.

    Args:
        sharding_spec: How it is cut and who holds what.
        size: Global size, as numbers or one sequence.
        properties: dtype, layout, requires_grad, pin_memory, memory_format, process_group, init_rrefs.
    """
    return ShardedTensor(sharding_spec, *size, **properties)


def zeros(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """A tensor of zeros; arguments as for ``empty``."""
    return _filled(empty(sharding_spec, *size, **properties), 0)


def ones(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """A tensor of ones; arguments as for ``empty``."""
    return _filled(empty(sharding_spec, *size, **properties), 1)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **properties: Any) -> ShardedTensor:
    """A tensor of one value, whose dtype is the value's unless given; other arguments as for ``empty``."""
    if properties.get("dtype") is None:
        properties["dtype"] = torch.full((), fill_value).dtype
    return _filled(empty(sharding_spec, size, **properties), fill_value)


def rand(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Uniform numbers in [0, 1); arguments as for ``empty``."""
    return _drawn(draw_uniform, empty(sharding_spec, *size, **properties))


def randn(sharding_spec: ShardingSpec, *size: Any, **properties: Any) -> ShardedTensor:
    """Normal numbers; arguments as for ``empty``."""
    return _drawn(draw_normal, empty(sharding_spec, *size, **properties))


def init_from_local_shards(
    local_shards: Sequence[Shard],
    *global_size: Any,
    process_group: dist.ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """The tensor of the shards that the ranks have; see ``ShardedTensor._init_from_local_shards``."""
    return ShardedTensor._init_from_local_shards(
        local_shards, *global_size, process_group=process_group, init_rrefs=init_rrefs
    )


def _filled(tensor: ShardedTensor, value: Any) -> ShardedTensor:
    with torch.no_grad():
        for shard in tensor.local_shards():
            shard.tensor.fill_(value)
    return tensor


def _drawn(factory: Callable[..., Any], tensor: ShardedTensor) -> ShardedTensor:
    """The tensor filled by a DTensor factory, which knows what a single device would draw.

    A layout without placements is drawn in rows and moved.
    """
    grid = grid_or_none(tensor)
    if grid is None:
        mesh = line_mesh(tensor.process_group, tensor.device.type)
        placements: Any = (CutDim(0),)
    else:
        mesh, placements = bridge.mesh_for(tensor, grid), grid.placements
    if tensor.dim() == 0:
        raise NotExpressibleError("a random 0-dim ShardedTensor has no use: draw a plain tensor")
    drawn = factory(tuple(tensor.size()), dtype=tensor.dtype, device_mesh=mesh, placements=placements)
    with torch.no_grad():
        tensor.copy_(bridge.from_dtensor(ShardedTensor, drawn, like=tensor))
    return tensor
