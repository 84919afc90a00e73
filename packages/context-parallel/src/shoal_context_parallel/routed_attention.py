"""`RoutedAttention`: a block in which attention is the attention of the whole sequence.

A mode of torch observes the functions that the block calls: it replaces
`F.scaled_dot_product_attention`, and refuses functions that would mix this rank's positions.

May import: attention, context_options, dtensor_arguments, errors, interceptions, positions,
sequence_layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    UNSEEN,
    ReplacedAttention,
    in_backward,
    is_compiling,
    known_layout,
    note_layout,
    unwatched,
    unwatched_functions,
)
from shoal_mesh import DeviceMesh, all_gather

from .attention.argument_checks import QKV, check_attention
from .attention.parallel_attention import sharded_attention
from .context_options import ContextOptions
from .dtensor_arguments import local_shard, options_of_dtensors, wrap_like
from .errors import UnsupportedAttentionError
from .interceptions.interceptions import Interceptions
from .interceptions.position_mask import PositionMask
from .positions.followed_positions import UNFOLLOWED_RESULTS, FollowedPositions, followed_positions
from .sequence_layout import AttentionMask

# Functions of torch that carry a state along a dim of their first argument, the input.
_RECURRENT_LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
# Place of `batch_first` among their arguments: input, state, weights, has_biases, num_layers,
# dropout, train, bidirectional, batch_first.
_BATCH_FIRST = 8
# Prefixes of the names of this package's modules and of the modules of packages below. Their
# functions, such as collectives, move positions between ranks by functions of torch, in which
# positions are not followed. Example: "shoal_mesh.", or "vendor.shoal_mesh." in a copy of shoal.
_PACKAGES_THAT_COMMUNICATE = tuple(
    f"{__name__.partition('context_parallel.')[0]}{package}."
    for package in ("mesh", "dtensor", "context_parallel")
)


class RoutedAttention(ReplacedAttention):
    """Attention of the whole sequence inside a block, on a mesh of one axis.

    Inside, `F.scaled_dot_product_attention` takes and returns this rank's positions.

    Args:
        mesh: a mesh with one axis.
        options: the options of attention.
    """

    def __init__(self, mesh: DeviceMesh, options: ContextOptions) -> None:
        super().__init__(self.attend)
        self.mesh = mesh
        self.comm = mesh.comm(0)
        self.options = options
        # whether no rank had an error at the first attention of the block
        self._has_agreed = self.comm.size == 1
        # An error that this rank found before the first attention of the block. At the first
        # attention the ranks exchange whether they have errors, and all of them raise.
        self._refusal: StyleError | None = None
        # mask of the attention that runs now, in addition to the mask of the options
        self._added_mask: AttentionMask | None = None
        # None outside of a block with buffers
        self._followed: FollowedPositions | None = None

    def __enter__(self) -> Self:
        # Replaces the kinds of attention that this mode of torch does not observe.
        _INTERCEPTIONS.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _INTERCEPTIONS.leave()

    @contextmanager
    def following(self, buffers: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Follow positions from the buffers through the functions of torch, inside this scope.

        Args:
            buffers: this rank's shards, each with its sequence dim.
        """
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
        if func in _RECURRENT_LAYERS or func is functional.conv1d:
            self._refuse_mixing_layer(func, *args, **(kwargs or {}))
        out = super().__torch_function__(func, types, args, kwargs)
        if self._followed is None or is_compiling() or type(out) in UNFOLLOWED_RESULTS:
            return out
        # A backward pass recomputes functions that the forward has followed.
        if in_backward():
            return out
        calling_module = sys._getframe(1).f_globals.get("__name__", "")
        if not calling_module.startswith(_PACKAGES_THAT_COMMUNICATE):
            self._followed.follow(func, args, kwargs or {}, out, refuse_later=self._note_refusal)
        return out

    def _refuse_mixing_layer(self, func: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse a recurrent layer or a convolution that runs along this rank's positions.

        Its input may hold positions in a dim of their number. Inputs that are followed are left to
        `FollowedPositions`, which knows the dim.
        """
        values = args[0]
        layout = self.options.layout
        if self.comm.size == 1 or isinstance(layout, str):
            return
        if not isinstance(values, Tensor):
            return
        if self._followed is not None and self._followed.follows(values):
            return
        positions = layout.sizes[self.comm.rank]
        if func is functional.conv1d:
            # (batch, channels, length), and a weight (channels, channels of a group, kernel)
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            reach = weight.shape[-1] - 1
            # The input has this rank's positions, or more: a causal convolution pads its input by
            # `reach` positions before the call.
            lengths = (positions, positions + reach)
            is_mixed = reach > 0 and values.shape[-1] in lengths
        else:
            has_batch_first = len(args) > _BATCH_FIRST and bool(args[_BATCH_FIRST])
            sequence_dim = 1 if has_batch_first else 0
            is_mixed = values.shape[sequence_dim] == positions
        if is_mixed:
            raise UnsupportedAttentionError(
                f"{func.__name__} inside of context parallelism: it would run along this rank's "
                f"{positions} positions only, without the state from positions on other ranks. "
                "Run the layer outside of the block on whole sequences, or shard the batch "
                "instead"
            )

    def agree(self, qkv: Any, attn_mask: Tensor | None) -> None:
        """Raise on all ranks the errors of some ranks, at the first attention of a block.

        It is for attention that gathers the keys of all ranks itself.
        """
        if not self._has_agreed:
            # The method of the options is not used then. "allgather" supports every mask.
            options = replace(self.options, method="allgather")
            # The attention that follows handles or refuses shared heads of keys itself.
            self._agree(qkv, attn_mask, enable_gqa=True, options=options)

    def refuse(self, error: StyleError) -> None:
        """Make all ranks raise at the first attention; after it, raise on this rank."""
        if self._has_agreed:
            raise error
        self._note_refusal(error)

    def _note_refusal(self, error: StyleError) -> None:
        """Make all ranks raise at the first attention; do nothing after it."""
        # The first error is the most likely cause of others.
        self._refusal = self._refusal or error

    @contextmanager
    def adding_mask(self, mask: AttentionMask) -> Iterator[None]:
        outer_mask = self._added_mask
        self._added_mask = mask
        try:
            yield
        finally:
            self._added_mask = outer_mask

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
            failed_ranks = failures.nonzero().flatten().tolist()
        if failed_ranks:
            axis = "x".join(self.comm.axes)
            raise failure or LayoutError(
                f"attention of a sharded sequence: ranks {failed_ranks} along {axis} "
                "were called with invalid arguments; see the errors that those ranks raised. No "
                "keys or values were sent"
            )
        self._has_agreed = True

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
        added_mask = self._added_mask
        if isinstance(attn_mask, PositionMask):
            added_mask = attn_mask.rule
            attn_mask = None
        spec = query.spec if isinstance(query, DTensor) else None
        arguments = (*qkv, attn_mask)
        if any(isinstance(argument, DTensor) for argument in arguments):
            options = options_of_dtensors(qkv, attn_mask, options, self.comm)
            qkv = QKV(*map(local_shard, qkv))
        # torch broadcasts a single head of keys over the heads of queries.
        has_single_key_head = qkv.key.shape[-3:-2] == (1,)
        enable_gqa = enable_gqa or has_single_key_head
        if added_mask is not None:
            options = options.with_mask(added_mask)
            is_causal = added_mask.causal
        with unwatched_functions():
            if not self._has_agreed:
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
        # A plain tensor may have a note of its sharding, by heads for instance. Dropout draws this
        # rank's part of the random numbers by the note. The output is sharded like the queries.
        noted_layout = known_layout(query)
        if noted_layout is not UNSEEN and out.shape == query.shape:
            note_layout(out, noted_layout)
        return out


def active_block() -> RoutedAttention | None:
    """Return the innermost active block of this thread."""
    return next(iter(RoutedAttention.active()), None)


_INTERCEPTIONS = Interceptions(active_block)
