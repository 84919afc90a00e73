"""One reduction of the gradient for all readers of the same tensor.

Readers of a tensor `x` (the projections q, k and v; gate and up) compute on the whole `x`, and each
returns a partial gradient. `x` is replicated, or it is a shard that has to be gathered. The first
reader also returns the *shared input*: an alias of a replicated `x`, or the gathered `x`. The
gradient edge of the shared input is the first reader's own node. Later readers run on the shared
input, so autograd adds their partials and delivers the sum to the first reader, which adds its own
partial and reduces once:

    forward     x ----> q(x), shared     first reader; it gathers x once if x is a shard
                        shared ----> k(shared)
                        shared ----> v(shared)

    backward    dk ----+
                dv ----+--> d shared ---+
                dq ---------------------+--> one all-reduce (or reduce-scatter) ----> dx

The shared input is an attribute of the tensor object `x`, so it exists exactly as long as `x`. A
weak reference would end when a rank's garbage collector runs, and ranks would decide differently
whether to share.

The graph of the shared input must not refer to `x`, or `x` would be in a cycle (`x`, its attribute,
the graph, `x`). The first reader therefore saves aliases of `x` for backward, never `x` itself. The
gradient edge of a leaf refers to the leaf, so a leaf is never shared.

A write to `x` (its version or storage changes), another communicator, layout or dtype, or a change
of grad mode ends the sharing. In compiled code the readers are single nodes of the graph
(`whole_when_compiled`). The compiler runs these nodes on tensors of its own to trace the backward,
and the shared inputs are attributes of those tensors.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.internal import (
    FakeTensor,
    TensorNote,
    is_compiling,
    memory_of,
    whole_when_compiled,
)
from shoal_mesh import Comm
from shoal_mesh.internal import sums_are_in_tree

from .collective_functions import Move, Sizes, apply_move, gather_dim, reduce, scatter

_ATTRIBUTE = "_shoal_shared_input"


@dataclass(slots=True, eq=False)
class _SharedInputNote(TensorNote):
    """The shared input of a tensor, and the state of the tensor in which it may be used."""

    key: Hashable
    version: int
    memory: object
    shared_input: Tensor


def find_shared_input(
    tensor: Tensor, key: Hashable, grad: bool, *, in_tree: bool = False
) -> Tensor | None:
    """Return the shared input that an earlier reader with the same key left, if it is still valid.

    Args:
        tensor: the tensor that is read.
        key: communicator, layout and dtype of the reader.
        grad: whether the reader needs a gradient of the tensor.
        in_tree: True if the readers add their partials in the fixed tree of
            `shoal_mesh.sums_in_tree`. Inside that mode, other readers find no shared input, because
            autograd would add their partials in another order.
    """
    if sums_are_in_tree() and not in_tree:
        return None
    note: _SharedInputNote | None = getattr(tensor, _ATTRIBUTE, None)
    # A `TensorNote` is saved as an empty `torch.Size`, so a tensor that was loaded from a file may
    # have this false value in place of a note.
    if not note or note.key != key:
        return None
    if note.version != tensor._version or note.memory != _memory(tensor):
        return None
    shared_input = note.shared_input
    return shared_input if shared_input.requires_grad is grad else None


def keep_shared_input(tensor: Tensor, key: Hashable, shared_input: Tensor) -> None:
    """Leave the shared input of a reading on the tensor."""
    # A fake tensor only serves to find out shapes. A tensor of inference mode has no version, so a
    # write to it would not end the sharing.
    if isinstance(tensor, FakeTensor) or tensor.is_inference():
        return
    note = _SharedInputNote(key, tensor._version, _memory(tensor), shared_input)
    setattr(tensor, _ATTRIBUTE, note)


def _memory(tensor: Tensor) -> object:
    """Return the memory of the elements; None for a traced tensor."""
    return None if is_compiling() else memory_of(tensor)


def copy(tensor: Tensor, comm: Comm) -> Tensor:
    """Return the tensor (`R -> R`) for consumers whose gradients are partial.

    The gradients are all-reduced once for all readers of `tensor`.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return _copy_for_readers(tensor, comm)
    return tensor


@whole_when_compiled
def _copy_for_readers(tensor: Tensor, comm: Comm) -> Tensor:
    # `ColumnLinear` has the same key for a replicated input, so both share one input.
    key = (comm, None, None)
    return _read_once(tensor, key, _alias, reduce, comm)


def _alias(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.detach()


@whole_when_compiled
def gather_partial(tensor: Tensor, comm: Comm, dim: int, sizes: Sizes = None) -> Tensor:
    """Gather shards (`S(dim) -> R`) for consumers whose gradients are partial.

    The gradients are reduce-scattered once for all readers of `tensor`.
    """
    # None stands for the dtype of the tensor itself.
    key = (comm, dim, sizes, None)
    return _read_once(tensor, key, gather_dim, scatter, comm, dim, sizes)


def _read_once(tensor: Tensor, key: Hashable, move: Move, back: Move, *place: Any) -> Tensor:
    """Apply `move`, or return the result of the tensor's first reader with the same key.

    Autograd adds the gradients of all readers at the result, and then applies `back` once. A leaf
    is not shared.

    Args:
        tensor: the tensor that is read.
        key: communicator, layout and dtype of the reader.
        move: the forward, from the tensor to the whole tensor.
        back: the move of the gradient.
        place: the arguments of both moves after the tensor.
    """
    grad = tensor.requires_grad and torch.is_grad_enabled()
    if tensor.is_leaf and grad:
        return apply_move(tensor, move, back, *place)
    shared_input = find_shared_input(tensor, key, grad)
    if shared_input is None:
        shared_input = apply_move(tensor, move, back, *place)
        keep_shared_input(tensor, key, shared_input)
    return shared_input
