"""`context_parallel`: a block with sharded buffers and attention of the global sequence.

Inside the block a buffer has this rank's positions of the sequence, and `RoutedAttention` replaces
attention: queries at these positions see the keys of all ranks. When the block ends, the buffers
get their old contents.

May import: attention, context_options, errors, routed_attention, sequence_layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from shoal_dtensor.errors import LayoutError, LayoutTypeError
from shoal_dtensor.internal import (
    device_of_numbers,
    upload,
)
from shoal_mesh import DeviceMesh, all_gather, all_gather_v
from shoal_mesh.internal import require, require_each

from .attention.argument_checks import comm_of_one_axis
from .context_options import ContextOptions, Method
from .errors import UnsupportedAttentionError
from .routed_attention import RoutedAttention, active_block
from .sequence_layout import Documents, SequenceLayout, layout_named, order_gathered

# torch's names of methods, and the names in this package
_ROTATE_METHODS: dict[str, Method] = {"allgather": "allgather", "alltoall": "ring"}
# A list of one element, which `set_rotate_method` replaces.
_default_method: list[Method] = ["allgather"]


@contextmanager
def context_parallel(  # noqa: PLR0913  # torch's arguments, and options of the attention
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    layout: SequenceLayout | Literal["head_tail", "contiguous"] = "head_tail",
    method: Method | None = None,
    window: tuple[int | None, int | None] = (None, None),
    documents: Documents | None = None,
) -> Iterator[SequenceLayout | None]:
    """Shard buffers inside the block, where attention is the attention of the whole sequence.

    The block replaces `F.scaled_dot_product_attention`; buffers are this rank's shards.

    Run forward and backward inside: the shards that backward needs are gone after the block, and a
    later backward raises an error. Activation checkpoints are supported: when backward recomputes
    a function of the block, the attention in it is again the attention of the whole sequence.

    Args:
        mesh: a mesh with one axis.
        buffers: the same on all ranks: inputs, labels, positions, tables of rotary embeddings. They
            are sharded in place, and get their contents back after the block.
        buffer_seq_dims: the dim of each buffer that is the sequence.
        no_restore_buffers: the members of `buffers` that stay sharded.
        layout: which positions each rank holds. By default early and late ones, so that a causal
            mask leaves all ranks equal work.
        method: "allgather", "ring" or "ulysses", as described at `context_parallel_attention`; if
            left out, the method of `set_rotate_method`.
        window: (left, right), the numbers of keys before and after its own position that a query
            reads; None for no bound.
        documents: documents of a packed sequence; queries read keys of their own document only.

    Yields:
        The layout: `layout.positions(mesh.get_local_rank())` are this rank's global positions. None
            if there are no buffers and `layout` is a name.

    Raises:
        LayoutError: before anything is changed, if the mesh has several axes, lists or sequences
            have different lengths, or a buffer needs a gradient.
        UnsupportedAttentionError: at an attention with dropout, and at `nn.MultiheadAttention`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> tokens = torch.arange(16).view(1, 16)
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
        ...         print(tokens)
        tensor([[ 0,  1, 14, 15]])
        >>> tokens.shape
        torch.Size([1, 16])
    """
    comm = comm_of_one_axis(mesh)
    unrestored = set() if no_restore_buffers is None else no_restore_buffers
    sequences = _with_sequence_dims("context_parallel", buffers, buffer_seq_dims)
    _check_buffers(sequences, unrestored)
    method = _default_method[0] if method is None else method
    options = ContextOptions(method, layout, window, documents)
    known_layout: SequenceLayout | None = None
    if isinstance(layout, SequenceLayout):
        known_layout = layout
    elif sequences:
        first, dim = sequences[0]
        known_layout = layout_named(layout, first.shape[dim], comm.size)
        options = replace(options, layout=known_layout)
    shards = []
    for buffer, dim in sequences:
        assert known_layout is not None, "the first buffer determines the length of the sequence"
        shard = known_layout.shard(buffer.detach(), dim, comm.rank)
        shards.append((buffer, shard))
    block = RoutedAttention(mesh, options)
    with _swap_contents(shards, unrestored), block, block.following(sequences):
        yield known_layout


@contextmanager
def _swap_contents(
    buffers_and_shards: Sequence[tuple[Tensor, Tensor]], unrestored: set[Tensor]
) -> Iterator[None]:
    """Replace the contents of buffers by their shards inside this scope.

    Afterwards the buffers that are not in `unrestored` get their contents back.
    """
    with ExitStack() as restoring:
        for buffer, shard in buffers_and_shards:
            # By identity, because `in` would compare the elements of tensors in a list.
            if not any(buffer is other for other in unrestored):
                restoring.callback(_set_contents, buffer, buffer.data)
            _set_contents(buffer, shard)
        yield


def _set_contents(buffer: Tensor, contents: Tensor) -> None:
    """Give a tensor other contents, of another shape.

    Autograd does not notice this by itself. The new version makes a backward that has saved the
    tensor raise an error.
    """
    buffer.data = contents
    torch.autograd.graph.increment_version(buffer)


def _with_sequence_dims(call: str, buffers: Any, dims: Any) -> list[tuple[Tensor, int]]:
    """Return each buffer with its sequence dim; raise if they are not lists of one length.

    Args:
        call: the name of the called function, for errors.
        buffers: tensors, or None.
        dims: their sequence dims, or None.
    """
    buffers = [] if buffers is None else buffers
    dims = [] if dims is None else dims
    require_each(buffers, Tensor, f"{call}: buffers is a list of Tensor", LayoutTypeError)
    require_each(dims, int, f"{call}: the sequence dims are a list of int", LayoutTypeError)
    if len(buffers) != len(dims):
        raise LayoutError(
            f"{call}: expected one sequence dim for each buffer; got {len(dims)} dims for "
            f"{len(buffers)} buffers"
        )
    return list(zip(buffers, dims, strict=True))


def _check_buffers(sequences: Sequence[tuple[Tensor, int]], unrestored: set[Tensor]) -> None:
    """Refuse buffers that cannot be sharded along one sequence."""
    require(
        unrestored,
        Collection,
        "context_parallel: no_restore_buffers is a set of tensors",
        LayoutTypeError,
    )
    buffer_ids = {id(buffer) for buffer, _ in sequences}
    if any(id(buffer) not in buffer_ids for buffer in unrestored):
        raise LayoutError("context_parallel: no_restore_buffers must be a subset of buffers")
    for index, (buffer, dim) in enumerate(sequences):
        shape = tuple(buffer.shape)
        if type(buffer) is not Tensor or buffer.requires_grad:
            raise LayoutError(
                "context_parallel: buffers must be plain tensors that do not require gradients "
                f"(inputs, labels, tables of positions); got a {type(buffer).__name__} of shape "
                f"{shape}. Shard a tensor that needs a gradient with SequenceLayout.shard"
            )
        if not buffer.ndim:
            raise LayoutError(
                "context_parallel: a buffer has 0 dims, so it cannot be sharded along a "
                "sequence; leave it out of buffers"
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise LayoutError(
                f"context_parallel: a buffer of shape {shape} has no dim {dim}; its entry in "
                f"buffer_seq_dims must be from {-buffer.ndim} to {buffer.ndim - 1}"
            )
        first, first_dim = sequences[0]
        if shape[dim] != first.shape[first_dim]:
            in_first = f"buffers[0] (dim {first_dim} of shape {tuple(first.shape)})"
            in_this = f"buffers[{index}] (dim {dim} of shape {shape})"
            raise LayoutError(
                "context_parallel: all buffers must have the same sequence length; it is "
                f"{first.shape[first_dim]} in {in_first} and {shape[dim]} in {in_this}. Name each "
                "buffer's sequence in buffer_seq_dims"
            )


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: SequenceLayout | None = None,
) -> list[Tensor]:
    """Gather the global tensors from the ranks' shards, with positions in order.

    Args:
        mesh: a mesh with one axis.
        buffers: this rank's shards; all of the same sequence length.
        seq_dims: the dim of each buffer that is the sequence.
        load_balancer: the layout of the sequence, under torch's name for this argument. If left
            out, it is the layout of the `context_parallel` block around the call, or the default
            layout of such a block if there is none.

    Raises:
        LayoutError: on all ranks, if the ranks' shards do not fit the layout.
        LayoutTypeError: if the load balancer is not a `SequenceLayout`.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     context_parallel_unshard(init_device_mesh("cpu", (1,)), [torch.arange(3)], [0])
        [tensor([0, 1, 2])]
    """
    comm = comm_of_one_axis(mesh)
    check_load_balancer("context_parallel_unshard", load_balancer)
    sequences = _with_sequence_dims("context_parallel_unshard", buffers, seq_dims)
    if not sequences:
        return []
    lengths = [shard.shape[dim] for shard, dim in sequences]
    # The lengths are a tensor of one row, so that the gathered tensor has one row per rank.
    # `upload` copies them to the device from which the backend sends numbers, the CPU if possible.
    row_of_lengths = upload([lengths], device_of_numbers(comm, buffers[0].device))
    lengths_of_ranks = all_gather(row_of_lengths, comm).tolist()
    layout = load_balancer
    if layout is None:
        total = sum(lengths[0] for lengths in lengths_of_ranks)
        layout = _layout_of_block(total, comm.size)
    expected_lengths = [[size] * len(sequences) for size in layout.sizes]
    if lengths_of_ranks != expected_lengths:
        # For the message: one length per rank, or all lengths of a rank if its buffers differ.
        held = [lengths[0] if len(set(lengths)) == 1 else lengths for lengths in lengths_of_ranks]
        raise LayoutError(
            f"context_parallel_unshard: the ranks hold {held} positions, but shards of this "
            f"layout have {list(layout.sizes)}; pass the layout that sharded the buffers as "
            "load_balancer"
        )
    tensors = []
    for shard, dim in sequences:
        gathered = all_gather_v(shard.detach().contiguous(), comm, layout.sizes, dim)
        tensors.append(order_gathered(gathered, layout, dim))
    return tensors


def check_load_balancer(call: str, load_balancer: object) -> None:
    """Refuse a load balancer that is not a layout; None stands for the default."""
    if load_balancer is not None and not isinstance(load_balancer, SequenceLayout):
        raise LayoutTypeError(
            f"{call}: load_balancer must be a SequenceLayout, such as "
            f"head_tail_layout(length, ranks), got {type(load_balancer).__name__}"
        )


def _layout_of_block(length: int, ranks: int) -> SequenceLayout:
    """Return the layout of the block around the call, or the default layout of such a block."""
    block = active_block()
    layout = "head_tail" if block is None else block.options.layout
    return layout_named(layout, length, ranks) if isinstance(layout, str) else layout


def set_rotate_method(rotate_method: str) -> None:
    """Set the method of `context_parallel` blocks for which no method is passed.

    Args:
        rotate_method: "allgather", or "alltoall" for the ring, as torch names them.

    Raises:
        UnsupportedAttentionError: if the name is another one.

    Example:
        >>> set_rotate_method("alltoall")
        >>> set_rotate_method("allgather")
    """
    # compared with a tuple, because a wrong argument such as a list is not hashable
    if rotate_method not in tuple(_ROTATE_METHODS):
        raise UnsupportedAttentionError(
            f"rotate_method must be one of {', '.join(_ROTATE_METHODS)}; got {rotate_method!r}"
        )
    _default_method[0] = _ROTATE_METHODS[rotate_method]


def default_method() -> Method:
    """Return the method that `set_rotate_method` has set."""
    return _default_method[0]
