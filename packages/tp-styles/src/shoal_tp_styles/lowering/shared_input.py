"""One reduction for several readers of an activation (q, k and v; gate and up).

Modules that read the same replicated tensor `x` each contribute a partial gradient, and the sum of the
partials over the readers can be reduced at once.  The first reader (the leader) gives, beside its
output, a *token*: an alias of `x` whose gradient edge is the leader's own autograd node.  Later readers
run on the token, so autograd delivers their partial gradients to the leader, which adds its own and
reduces the sum.  It costs the leader one alias and no extra node.

The token is an attribute of the tensor object `x`.  So its lifetime does not depend on other references
(all ranks take the same decision), it dies with `x`, and no cycle arises: the leader saves aliases, never
`x` itself.  A leaf is never shared, because its gradient edge leads back to it.  A write to `x` (its version
or storage changes), another communicator, layout or dtype, or a change of grad mode ends the sharing.
Readers in separate backward passes, recomputation under checkpointing and `torch.autograd.grad` are
ordinary uses of ordinary nodes.

In compiled code the readers are single nodes of the graph (`whole_when_compiled`), and the tensors on which autograd
traces it carry the tokens.  What merely finds out shapes leaves none.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from shoal_dtensor.internal import FakeTensor, is_compiling
from shoal_mesh.internal import sums_are_in_tree

_ATTRIBUTE = "_shoal_token"


class _Token:
    """The token of a tensor, and the state of the tensor in which it may be used.  It pickles as nothing."""

    __slots__ = ("key", "storage", "token", "version")

    def __init__(self, key: Hashable, version: int, storage: int, token: Tensor) -> None:
        self.key = key
        self.version = version
        self.storage = storage
        self.token = token

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


def find_token(tensor: Tensor, key: Hashable, grad: bool, *, in_tree: bool = False) -> Tensor | None:
    """The token that an earlier reader with the same key left on the tensor, if it still holds.

    Args:
        tensor: what the module was called with.
        key: communicator, layout and dtype of the reading.
        grad: whether the token must carry a gradient.
        in_tree: whether readers add their partials up block by block, as those inside `sums_in_tree` have to.
    """
    if sums_are_in_tree() and not in_tree:
        return None
    entry: _Token | None = getattr(tensor, _ATTRIBUTE, None)
    if entry is None or entry.key != key or entry.version != tensor._version or entry.storage != _storage(tensor):
        return None
    return entry.token if entry.token.requires_grad is grad else None


def keep_token(tensor: Tensor, key: Hashable, token: Tensor) -> None:
    """Leave the token of a reading on the tensor."""
    if not isinstance(tensor, FakeTensor) and not tensor.is_inference():  # whose writes are not counted
        setattr(tensor, _ATTRIBUTE, _Token(key, tensor._version, _storage(tensor), token))


def _storage(tensor: Tensor) -> int:
    """Where the elements are; those of a tensor that is traced are nowhere, and stay there."""
    return 0 if is_compiling() else tensor.data_ptr()
