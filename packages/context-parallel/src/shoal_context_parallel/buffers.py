"""`context_parallel`: a block with sharded buffers and attention of the global sequence.

Inside the block a buffer has this rank's positions of the sequence, and `RoutedAttention` replaces
attention: queries at these positions see the keys of all ranks. When the block ends, the buffers
get their old contents.

May import: attention, context_options, errors, interceptions, positions, sequence_layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor, Placement, Replicate, Shard, Spec
from shoal_dtensor.errors import LayoutError, LayoutTypeError, StyleError
from shoal_dtensor.internal import (
    UNSEEN,
    ReplacedAttention,
    device_of_numbers,
    in_backward,
    is_compiling,
    known_layout,
    note_layout,
    unwatched,
    unwatched_functions,
    upload,
)
from shoal_mesh import DeviceMesh, all_gather, all_gather_v
from shoal_mesh.internal import require_each

from .attention.argument_checks import QKV, check_attention, comm_of_one_axis
from .attention.parallel_attention import sharded_attention
from .context_options import ContextOptions, Method
from .errors import UnsupportedAttentionError
from .interceptions.interceptions import Interceptions
from .interceptions.position_mask import PositionMask
from .positions.followed_positions import UNFOLLOWED_RESULTS, FollowedPositions, followed_positions
from .sequence_layout import AttentionMask, Documents, SequenceLayout, layout_named, order_gathered

# Functions of torch that carry a state along a dim of their first argument.
_RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# Names of the modules of this package and of those below. Their functions, such as collectives,
# move positions between ranks by functions of torch, in which positions are not followed.
_LAYERS_BELOW = tuple(
    f"{__name__.partition('context_parallel.')[0]}{layer}."
    for layer in ("mesh", "dtensor", "context_parallel")
)
_ROTATE_METHODS: dict[str, Method] = {"allgather": "allgather", "alltoall": "ring"}
# a list of one element, which `set_rotate_method` replaces
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
        >>> with fake_world(4):
        ...     tokens = torch.arange(16).view(1, 16)
        ...     with context_parallel(init_device_mesh("cpu", (4,)), buffers=[tokens], buffer_seq_dims=[1]):
        ...         print(tokens)
        tensor([[ 0,  1, 14, 15]])
        >>> tokens.shape
        torch.Size([1, 16])
    """
    comm = comm_of_one_axis(mesh)
    unrestored = no_restore_buffers or set()
    sequences = _sequences("context_parallel", buffers, buffer_seq_dims)
    _check(sequences, unrestored)
    options = ContextOptions(method or _default_method[0], layout, window, documents)
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
    contents: Sequence[tuple[Tensor, Tensor]], unrestored: set[Tensor]
) -> Iterator[None]:
    """Replace the contents of buffers; restore all of them that are not in `unrestored`."""
    with ExitStack() as after:
        for buffer, shard in contents:
            if not any(buffer is other for other in unrestored):
                after.callback(_replace, buffer, buffer.data)
            _replace(buffer, shard)
        yield


def _replace(buffer: Tensor, contents: Tensor) -> None:
    """Give a tensor other contents, of another shape; a backward that saved it detects this."""
    buffer.data = contents
    torch.autograd.graph.increment_version(buffer)


def _sequences(call: str, buffers: Any, dims: Any) -> list[tuple[Tensor, int]]:
    """Return each buffer with its sequence dim."""
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


def _check(sequences: Sequence[tuple[Tensor, int]], unrestored: set[Tensor]) -> None:
    """Refuse buffers that cannot be sharded along one sequence."""
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
        buffers: this rank's shards; all of the same positions.
        seq_dims: the dim of each buffer that is the sequence.
        load_balancer: the layout of the sequence, under torch's name for this argument. If left
            out, it is the layout of the `context_parallel` block around the call, or the default
            layout of such a block if there is none.

    Raises:
        LayoutError: on all ranks, if the ranks' shards do not fit the layout.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     context_parallel_unshard(init_device_mesh("cpu", (1,)), [torch.arange(3)], [0])
        [tensor([0, 1, 2])]
    """
    comm = comm_of_one_axis(mesh)
    sequences = _sequences("context_parallel_unshard", buffers, seq_dims)
    if not sequences:
        return []
    lengths = [shard.shape[dim] for shard, dim in sequences]
    # The lengths are a tensor of one row, so that the gathered tensor has one row per rank.
    # `upload` copies them to the device from which the backend sends numbers, the CPU if possible.
    sent = upload([lengths], device_of_numbers(comm, buffers[0].device))
    lengths_of_ranks = all_gather(sent, comm).tolist()
    layout = load_balancer
    if layout is None:
        total = sum(row[0] for row in lengths_of_ranks)
        layout = _layout_of_block(total, comm.size)
    wanted = [[size] * len(sequences) for size in layout.sizes]
    if lengths_of_ranks != wanted:
        # For the message: one length per rank, or all lengths of a rank if its buffers differ.
        held = [row[0] if len(set(row)) == 1 else row for row in lengths_of_ranks]
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


def _layout_of_block(length: int, ranks: int) -> SequenceLayout:
    """Return the layout of the block around the call, or the default layout of such a block."""
    block = _active_block()
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


class RoutedAttention(ReplacedAttention):
    """Attention of the whole sequence inside a block, on a mesh of one axis.

    Inside, `F.scaled_dot_product_attention` takes and returns this rank's positions.
    """

    def __init__(self, mesh: DeviceMesh, options: ContextOptions) -> None:
        super().__init__(self.attend)
        self.mesh = mesh
        self.comm = mesh.comm(0)
        self.options = options
        self._agreed = self.comm.size == 1
        # An error that this rank found before the first attention of the block. At the first
        # attention the ranks exchange whether they have errors, and all of them raise.
        self._refusal: StyleError | None = None
        # Mask of the attention that runs now, in addition to the mask of the options.
        self._rule: AttentionMask | None = None
        # None outside of a block with buffers
        self._followed: FollowedPositions | None = None

    def __enter__(self) -> Self:
        # other kinds of attention, which this mode of torch does not observe
        _INTERCEPTIONS.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _INTERCEPTIONS.leave()

    @contextmanager
    def following(self, buffers: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Follow positions from the buffers, each with its sequence dim, through the functions."""
        layout = self.options.layout
        followed = None
        if not isinstance(layout, str):
            followed = followed_positions(tuple(self.comm.line), self.comm.rank, layout)
        if followed is None:
            yield
            return
        for buffer, dim in buffers:
            followed.note_shard(buffer, dim)
        self._followed = followed
        try:
            yield
        finally:
            self._followed = None
            for buffer, _ in buffers:
                followed.forget(buffer)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.multi_head_attention_forward:
            raise UnsupportedAttentionError(
                "nn.MultiheadAttention inside of context parallelism: context parallelism cannot "
                "replace its attention, which does not go through a Python call of "
                "F.scaled_dot_product_attention. Project queries, keys and values with Linear "
                "modules and call F.scaled_dot_product_attention"
            )
        if func in _RECURRENT or func is functional.conv1d:
            self._check_positions_apart(func, *args, **(kwargs or {}))
        out = super().__torch_function__(func, types, args, kwargs)
        if self._followed is None or is_compiling() or type(out) in UNFOLLOWED_RESULTS:
            return out
        # A backward pass recomputes functions that the forward has followed.
        if in_backward():
            return out
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not caller.startswith(_LAYERS_BELOW):
            self._followed.follow(func, args, kwargs or {}, out, refuse_later=self._note_refusal)
        return out

    def _check_positions_apart(self, func: Any, *args: Any, **kwargs: Any) -> None:
        """Raise if a recurrent layer or a convolution runs along this rank's positions."""
        values = args[0]
        layout = self.options.layout
        if self.comm.size == 1 or isinstance(layout, str):
            return
        if not isinstance(values, Tensor):
            return
        if self._followed is not None and self._followed.follows(values):
            # The dim that holds positions is known.
            return
        positions = layout.sizes[self.comm.rank]
        if func is functional.conv1d:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            reach = weight.shape[-1] - 1
            # The input has this rank's positions, or more: a causal convolution pads its input by
            # `reach` positions before the call.
            lengths = (positions, positions + reach)
            is_mixed = reach > 0 and values.shape[-1] in lengths
        else:
            # input, state, weights, bias, layers, dropout, training, bidirectional, batch first
            is_batch_first = len(args) > 8 and bool(args[8])
            # The positions are dim 1 if the batch comes first, else dim 0.
            is_mixed = values.shape[int(is_batch_first)] == positions
        if is_mixed:
            raise UnsupportedAttentionError(
                f"{func.__name__} inside of context parallelism: it would run along this rank's "
                f"{positions} positions only, without the state from positions on other ranks. "
                "Run the layer outside of the block on whole sequences, or shard the batch "
                "instead"
            )

    def agree(self, qkv: Any, attn_mask: Tensor | None) -> None:
        """Raise on all ranks the errors of some ranks, at the first attention of a block."""
        if not self._agreed:
            # The callers gather the keys themselves, so the method of their options does not
            # matter, and "allgather" stands for it. Query heads may share key heads here (True),
            # because the callers' attention handles or refuses shared heads.
            self._agree(qkv, attn_mask, True, replace(self.options, method="allgather"))

    def refuse(self, error: StyleError) -> None:
        """Make all ranks raise at the first attention; after it, raise on this rank."""
        if self._agreed:
            raise error
        self._note_refusal(error)

    def _note_refusal(self, error: StyleError) -> None:
        """Make all ranks raise at the first attention; do nothing after it."""
        self._refusal = self._refusal or error

    @contextmanager
    def adding_mask(self, mask: AttentionMask) -> Iterator[None]:
        before = self._rule
        self._rule = mask
        try:
            yield
        finally:
            self._rule = before

    def _agree(
        self, qkv: Any, attn_mask: Tensor | None, enable_gqa: bool, options: ContextOptions
    ) -> None:
        """Raise on all ranks if arguments of some are wrong, at a block's first attention."""
        failure = self._refusal
        try:
            check_attention(qkv, attn_mask, enable_gqa, self.comm, options=options)
        except StyleError as error:
            failure = failure or error
        # A selective checkpoint compares the operators of a forward with the operators of its
        # recomputation. The recomputation does not repeat this all-gather, so `unwatched` hides the
        # all-gather from the checkpoint.
        with unwatched():
            device = qkv[0].device
            failed = torch.tensor([failure is not None], dtype=torch.int32, device=device)
            failures = all_gather(failed, self.comm)
            wrong = failures.nonzero().flatten().tolist()
        if wrong:
            raise failure or LayoutError(
                f"attention of a sharded sequence: ranks {wrong} along {'x'.join(self.comm.axes)} "
                "were called with invalid arguments; see the errors that those ranks raised. No "
                "keys or values were sent"
            )
        self._agreed = True

    def attend(  # noqa: PLR0913  # the signature of scaled_dot_product_attention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention of the global sequence at this rank's positions."""
        if dropout_p:
            raise UnsupportedAttentionError(
                f"dropout of attention weights (dropout_p={dropout_p}) is not supported over a "
                "sharded sequence, because no rank has all weights that one device would draw "
                "random numbers for. Use dropout_p=0, and dropout after the output projection"
            )
        qkv = QKV(query, key, value)
        options = self.options
        rule = self._rule
        if isinstance(attn_mask, PositionMask):
            rule = attn_mask.rule
            attn_mask = None
        spec = query.spec if isinstance(query, DTensor) else None
        arguments = (*qkv, attn_mask)
        if any(isinstance(argument, DTensor) for argument in arguments):
            options = self._options_of(qkv, attn_mask)
            qkv = QKV(*map(local_shard, qkv))
        # torch broadcasts a single head of keys over the heads of queries.
        has_single_key_head = qkv.key.shape[-3:-2] == (1,)
        enable_gqa = enable_gqa or has_single_key_head
        if rule is not None:
            options = options.also(rule)
            is_causal = rule.causal
        with unwatched_functions():
            if not self._agreed:
                self._agree(qkv, attn_mask, enable_gqa, options)
            out = sharded_attention(
                qkv,
                attn_mask,
                is_causal,
                scale,
                enable_gqa=enable_gqa,
                mesh=self.mesh,
                options=options,
            )
            if spec is not None:
                return wrap_like(spec, out)
        layout = known_layout(query)
        if layout is not UNSEEN and out.shape == query.shape:
            note_layout(out, layout)
        return out

    def _options_of(self, tensors: Sequence[Any], attn_mask: object) -> ContextOptions:
        """Return the options for DTensors.

        DTensors are sharded along the sequence on the axis of the sequence, if their mesh has this
        axis.
        """
        specs = [x.spec if isinstance(x, DTensor) else None for x in tensors]
        first = specs[0]
        if first is None or isinstance(attn_mask, DTensor) or not are_alike(specs):
            got = ", ".join("a plain tensor" if spec is None else str(spec) for spec in specs)
            raise LayoutError(
                "attention of a sharded sequence: query, key and value must be all plain tensors "
                f"or all DTensors of one layout, and attn_mask must be plain; got {got}"
            )
        sequence = len(first.shape) - 2
        options = self.options
        for axis, placement in enumerate(first.placements):
            axis_line = first.mesh.comm(axis).line
            is_own_axis = tuple(axis_line) == tuple(self.comm.line)
            if is_own_axis and placement == Shard(sequence):
                layout = SequenceLayout.contiguous(first.shape[sequence], self.comm.size)
                if options.layout not in ("contiguous", layout):
                    raise LayoutError(
                        f"DTensors with the placement {placement} hold contiguous positions, but "
                        f"this context_parallel block has the layout {options.layout}; pass plain "
                        "local tensors"
                    )
                options = replace(options, layout=layout)
            elif is_own_axis or not keeps_positions(first, placement, sequence):
                raise LayoutError(
                    f"attention of a sharded sequence: DTensors must be Shard({sequence}) on the "
                    "axis of the sequence, and on other axes replicated or sharded by batch or "
                    f"heads; got {first}"
                )
        return options


def are_alike(specs: Sequence[Spec | None]) -> bool:
    """Tell whether all tensors are DTensors with the same placements on the same mesh."""
    layouts = set()
    for spec in specs:
        if spec is None:
            return False
        layouts.add((spec.mesh, spec.placements))
    return len(layouts) == 1


def keeps_positions(spec: Spec, placement: Placement, sequence: int) -> bool:
    """Tell whether an axis with this placement leaves whole sequences of whole heads on a rank."""
    if isinstance(placement, Replicate):
        return True
    # A placement that names an order of axes is a `StridedShard`.
    if spec.is_strided or not placement.is_shard():
        return False
    dim: int = placement.dim  # type: ignore[attr-defined]  # it shards a dim
    return dim < sequence


def local_shard(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor, whose gradient has the same placements."""
    local: Tensor = tensor.to_local(grad_placements=tensor.placements)
    return local


def wrap_like(query: Spec, out: Tensor) -> DTensor:
    """Wrap the local output of an attention as a DTensor placed like the queries."""
    shape = torch.Size((*query.shape[:-1], out.shape[-1]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, query.mesh, query.placements, shape=shape, stride=stride)


def _active_block() -> RoutedAttention | None:
    """Return the innermost active block of this thread."""
    return next(iter(RoutedAttention.active()), None)


_INTERCEPTIONS = Interceptions(_active_block)
