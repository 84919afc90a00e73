"""The beginning and the end of a sharded parameter.

`shard_parameter` makes it from a parameter of a module, and `make_whole` makes whole parameters
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    carry_gradient,
    grad_hooked,
    local_of,
    local_shard,
    move_attachments,
    note_replaced,
    redistribute_shards,
)
from shoal_mesh import purpose

from .data_axes import (
    DataAxes,
    narrow_to_shard,
    resting_and_gathered_layouts,
    shared_layout,
    without_data_axes,
)
from .declared_layouts import declared_layout
from .gather_extensions import extension_of, has_extension
from .layout_move import LayoutMove
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from .sharded_parameters import ShardedParameter, Site


def shard_parameter(
    param: nn.Parameter,
    sites: Sequence[Site],
    axes: DataAxes,
    placement: Shard | None,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    *,
    view: bool = False,
) -> ShardedParameter:
    """Return a parameter that is sharded over the data axes, too.

    The parameter may be plain, or a DTensor on the axes of styles, whose local tensor is then
    sharded. A plain parameter for which a program has asserted SPMD types is sharded like a DTensor
    of its `declared_layout`. `placement` has the dim to shard, by default the first. With `view`
    the shard may share the parameter's memory.
    """
    precision = policies[0].for_parameter(param)
    offload = policies[1]
    inner = param.spec if isinstance(param, DTensor) else None
    if inner is not None and has_extension(local_of(param)):
        raise LayoutError(
            f"fully_shard: a parameter that styles have placed holds a "
            f"{type(local_of(param)).__name__}, whose class decides what is gathered over data "
            "axes; that is for parameters on no other axes"
        )
    styled = None if inner is None else without_data_axes(inner, axes)
    declared = declared_layout(param, axes)
    if declared is not None:
        styled = declared.parameter
    resting, gathered = resting_and_gathered_layouts(param, axes, styled, placement)

    def to_shard(tensor: Tensor) -> DTensor:
        shard = narrow_to_shard(local_of(tensor).detach(), gathered, resting)
        shard = shard.contiguous() if view else shard.clone(memory_format=torch.contiguous_format)
        # A meta shard is not moved to the CPU: `to_empty` allocates it later, on the device that
        # its caller names.
        awaits_values = shard.is_meta and axes.mesh.device_type != "meta"
        if isinstance(offload, CPUOffloadPolicy) and not awaits_values:
            pinned = offload.pin_memory and axes.mesh.device_type != "cpu"
            shard = shard.cpu().pin_memory() if pinned else shard.cpu()
        return DTensor(shard, resting)

    if inner is not None and grad_hooked(param):
        raise LayoutError(
            "fully_shard: a parameter that was placed by a style has gradient hooks, which would "
            "not get the reduced gradient; register the hooks after fully_shard, on the module's "
            "new parameter"
        )
    extension = extension_of(param, resting, sites[0][0], precision)
    leaf = _replacement(param, to_shard, is_styled=inner is not None)
    parameter = ShardedParameter(
        tuple(sites),
        leaf,
        resting,
        gathered,
        inner=inner,
        reduced=resting,
        styled=styled,
        declared=declared,
        precision=precision,
        shared=shared_layout(param, axes, styled, placement),
        extension=extension,
    )
    parameter.set_dtypes()
    return parameter


@torch.no_grad()
def make_whole(parameters: Sequence[ShardedParameter]) -> None:
    """Have the modules hold the parameters as before data axes sharded them.

    Gradients are made whole, too, in one collective for all.
    """
    for parameter in parameters:
        if parameter.extension is not None:
            raise parameter.extension.refuse("stays sharded over the data axes")
        parameter.adopt()
    # leaves and gradients, whose shards are gathered
    sharded_tensors: list[Tensor] = []
    moves: list[LayoutMove] = []
    shards: list[Tensor] = []
    for parameter in parameters:
        for tensor in (parameter.leaf, parameter.leaf.grad):
            if tensor is None or tensor.is_meta:
                continue
            resting = parameter.resting.with_(dtype=tensor.dtype)
            gathered = parameter.gathered.with_(dtype=tensor.dtype)
            shard = local_shard(cast(DTensor, tensor)).detach()
            sharded_tensors.append(tensor)
            moves.append(LayoutMove(resting, gathered))
            shards.append(shard.to(gathered.mesh.device_type))
    with purpose("styles after data parallelism"):
        whole_tensors = redistribute_shards(shards, moves).wait() if moves else []
    pairs = zip(sharded_tensors, whole_tensors, strict=True)
    local_of_tensor = {id(tensor): local for tensor, local in pairs}

    # `_replacement` calls this function for a leaf and for its gradient.
    def whole(parameter: ShardedParameter, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            shape = parameter.gathered.local_shape
            local = torch.empty(shape, dtype=tensor.dtype, device="meta")
        else:
            local = local_of_tensor[id(tensor)]
        if parameter.inner is None:
            return local
        return DTensor(local, parameter.inner.with_(dtype=tensor.dtype))

    for parameter in parameters:
        is_styled = parameter.inner is not None
        whole_leaf = _replacement(parameter.leaf, partial(whole, parameter), is_styled=is_styled)
        parameter.put(whole_leaf)


def _replacement(
    old: nn.Parameter, convert: Callable[[Tensor], Tensor], *, is_styled: bool
) -> nn.Parameter:
    """Return a parameter with converted values and gradient.

    It has the attributes and hooks of the parameter that it replaces.

    Args:
        old: the parameter that is replaced.
        convert: is called for the parameter, and for its gradient if it has one.
        is_styled: whether the modules see a DTensor, which a style has made.
    """
    new = nn.Parameter(convert(old), requires_grad=old.requires_grad)
    carry_gradient(old, new, None if old.grad is None else convert(old.grad))
    if is_styled:
        vars(new).update(vars(old))
        note_replaced(old)
    else:
        move_attachments(old, new)
    return new
