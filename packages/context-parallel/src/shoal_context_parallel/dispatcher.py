"""Attention of DTensors over a sharded sequence, under the names that torch keeps private.

    inputs, labels = context_parallel_shard(mesh, [inputs, labels], [1, 1], head_tail_layout(16, 4))
    enable_context_parallel_dispatcher()
    ...                                  # the model makes DTensors of its queries, keys and values
    F.scaled_dot_product_attention(q, k, v, is_causal=True)

The queries, keys and values of the last line are DTensors that are sharded along the sequence.
Their shards have the positions of the layout with which `context_parallel_shard` has sharded the
inputs.

May import: attention, buffers, context_options, dtensor_arguments, errors, routed_attention,
sequence_layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Shard, Spec
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    check_device_mesh,
    pytree,
    replace_function,
    restore_function,
    run_function,
)
from shoal_mesh import DeviceMesh

from .attention.argument_checks import comm_of_one_axis
from .buffers import check_load_balancer, default_method
from .context_options import ContextOptions
from .dtensor_arguments import (
    are_placed_alike,
    keeps_sequences_whole,
    local_shard,
    specs_of,
    wrap_like,
)
from .errors import UnsupportedAttentionError
from .routed_attention import RoutedAttention
from .sequence_layout import SequenceLayout

# By the axis along which inputs were sharded: its attention, with the latest layout of its inputs.
_attention_of_axes: dict[DeviceMesh, RoutedAttention] = {}


def head_tail_layout(
    seq_length: int, world_size: int, device: torch.device | str | None = None
) -> SequenceLayout:
    """Return `SequenceLayout.head_tail`, with the arguments of torch's load balancer.

    Args:
        seq_length: the length of the sequence.
        world_size: the number of ranks.
        device: ignored; a layout has no tensors.

    Example:
        >>> head_tail_layout(8, 2).positions(0)
        tensor([0, 1, 6, 7])
    """
    return SequenceLayout.head_tail(seq_length, world_size)


def context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor] | Mapping[str, Tensor],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: SequenceLayout | None = None,
) -> Any:
    """Return this rank's shards of tensors, and remember their layout for attention along the axis.

    Args:
        mesh: a mesh with one axis.
        buffers: tensors that are the same on all ranks: inputs, labels, positions.
        seq_dims: the dim of each tensor that is the sequence, in a container like `buffers`.
        load_balancer: the positions of each rank; by default contiguous ones.

    Returns:
        The shards, in a container like `buffers`.

    Raises:
        LayoutError: if the containers or the lengths of the sequences differ, or if the layout is
            not one for this axis.
        LayoutTypeError: if the load balancer is not a `SequenceLayout`.
        UnsupportedAttentionError: if a buffer is the mask of flex attention.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     context_parallel_shard(mesh, [torch.arange(16)], [0], head_tail_layout(16, 4))
        [tensor([ 0,  1, 14, 15])]
    """
    check_device_mesh("context_parallel_shard", mesh)
    comm = comm_of_one_axis(mesh)
    tensors, structure = pytree.tree_flatten(buffers)
    dims, structure_of_dims = pytree.tree_flatten(seq_dims)
    are_of_one_kind = isinstance(buffers, Mapping) == isinstance(seq_dims, Mapping)
    if len(dims) != len(tensors) or not are_of_one_kind:
        raise LayoutError(
            "context_parallel_shard: seq_dims must have one entry for each buffer, in a container "
            f"like buffers; got {structure_of_dims} for {structure}"
        )
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise UnsupportedAttentionError(
                "context_parallel_shard: buffers must be tensors, got "
                f"{type(tensor).__name__}; for flex attention use a context_parallel block, in "
                "which masks have global positions"
            )
    if not tensors:
        return buffers
    check_load_balancer("context_parallel_shard", load_balancer)
    layout = load_balancer
    if layout is None:
        layout = SequenceLayout.contiguous(tensors[0].shape[dims[0]], comm.size)
    if layout.ranks != comm.size:
        raise LayoutError(
            f"context_parallel_shard: the layout is for {layout.ranks} ranks, but the axis has "
            f"{comm.size}"
        )
    shards = [layout.shard(x, dim, comm.rank) for x, dim in zip(tensors, dims, strict=True)]
    _attention_of_axes[mesh] = RoutedAttention(mesh, ContextOptions(default_method(), layout))
    return pytree.tree_unflatten(shards, structure)


def enable_context_parallel_dispatcher() -> None:
    """Have attention of DTensors be attention of the whole sequence, in all threads.

    It is for DTensors that are sharded along the sequence on an axis along which
    `context_parallel_shard` has sharded inputs. Attention of other tensors does not change.

    Example:
        >>> enable_context_parallel_dispatcher()
        >>> disable_context_parallel_dispatcher()
    """
    replace_function(functional.scaled_dot_product_attention, _attend)


def disable_context_parallel_dispatcher() -> None:
    """Undo `enable_context_parallel_dispatcher`, and forget the layouts of sharded inputs.

    Process groups of the axes can be freed then.

    Example:
        >>> enable_context_parallel_dispatcher()
        >>> disable_context_parallel_dispatcher()
    """
    restore_function(functional.scaled_dot_product_attention)
    _attention_of_axes.clear()


class _SequenceAxis(NamedTuple):
    """The axis of a spec that shards the sequence.

    Attributes:
        number: its index in the mesh of the spec.
        mesh: the axis as a mesh.
    """

    number: int
    mesh: DeviceMesh


def _attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute attention of DTensors; it takes the place of `scaled_dot_product_attention`."""
    axis = _sequence_axis_of(query)
    if axis is None:
        # torch's function, by the rules of operators on DTensors
        arguments = (query, key, value, *args)
        function = functional.scaled_dot_product_attention
        return run_function(function, (DTensor,), arguments, kwargs)
    routed = _attention_of_axes.get(axis.mesh)
    if routed is None:
        raise LayoutError(
            f"attention of DTensors that are sharded along the sequence on {axis.mesh}, but "
            "context_parallel_shard was not called with this axis, so their positions are unknown; "
            "shard the inputs of the model with it first"
        )
    specs = specs_of((query, key, value))
    spec: Spec = query.spec
    sequence_dim = len(spec.shape) - 2
    are_sequences_whole = all(
        keeps_sequences_whole(spec, placement, sequence_dim)
        for index, placement in enumerate(spec.placements)
        if index != axis.number
    )
    if not are_placed_alike(specs) or not are_sequences_whole:
        raise LayoutError(
            "attention of a sharded sequence: query, key and value must be DTensors of one layout, "
            "and on other axes replicated or sharded by batch or heads; got "
            f"{', '.join(map(str, specs))}"
        )
    local: list[Any] = [local_shard(x) for x in (query, key, value)]
    return wrap_like(spec, routed.attend(*local, *args, **kwargs))


def _sequence_axis_of(query: Any) -> _SequenceAxis | None:
    """Return the axis that shards the sequence of queries, or None."""
    if not isinstance(query, DTensor) or query.ndim < 2:
        return None
    spec = query.spec
    for index, placement in enumerate(spec.placements):
        if placement == Shard(query.ndim - 2):
            mesh = spec.mesh if spec.mesh.ndim == 1 else spec.mesh[spec.mesh.axis_names[index]]
            return _SequenceAxis(index, mesh)
    return None
