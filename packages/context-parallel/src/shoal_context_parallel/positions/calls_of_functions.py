"""`TorchCall`: a call of a torch function with layouts, and its meaning for positions.

Most functions need no entry here, because the rules of operators say what they do. The tables name
functions whose arguments or results are a rank's own: sizes, indices and places.

May import: sequence_dims.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from shoal_dtensor import Spec
from shoal_dtensor.internal import pytree

from ..sequence_layout import SequenceLayout
from .sequence_dims import is_whole, sequence_dim

LISTS = (list, tuple)
PLAIN = (Tensor, Parameter)


# --- functions by name ----------------------------------------------------------------------------

# Their results follow from the shape of the result, in the order of rows.
RESHAPING = frozenset(
    ("view", "reshape", "unflatten", "flatten", "view_as", "reshape_as", "_unsafe_view", "ravel")
)
EXPANDING = frozenset(("expand", "expand_as", "broadcast_to"))
# Functions that take a rank's rows by their local indices or by their values. A program that puts
# its rows back by the same indices treats each position alone, as experts do. So their results have
# no note, and nothing of them is refused.
BY_LOCAL_INDEX = frozenset(
    {
        "argwhere",
        "bincount",
        "histc",
        "histogram",
        "masked_scatter",
        "masked_scatter_",
        "masked_select",
        "nonzero",
        "put",
        "put_",
        "take",
        "unique",
        "unique_consecutive",
    }
)
BY_INDEX = frozenset(
    {
        "__getitem__",
        "__setitem__",
        "gather",
        "index_add",
        "index_add_",
        "index_copy",
        "index_copy_",
        "index_fill",
        "index_fill_",
        "index_put",
        "index_put_",
        "index_reduce",
        "index_reduce_",
        "index_select",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "scatter_reduce",
        "scatter_reduce_",
        "take_along_dim",
    }
)
# Functions that take parts of a dim. A program that computes all parts one by one (a loss of some
# positions at a time) treats each position alone.
SPLITTING = frozenset(
    (
        "chunk",
        "narrow",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unsafe_chunk",
        "unsafe_split",
    )
)
# Their results depend on the place of an element, which the rules count over all ranks.
TRIANGLES = frozenset(("tril", "tril_", "triu", "triu_"))
DIAGONALS = frozenset(
    (
        "diag",
        "diag_embed",
        "diagonal",
        "diagonal_copy",
        "diagonal_scatter",
        "fill_diagonal_",
        "select_scatter",
        "slice_scatter",
        "trace",
    )
)
# windows over the last dims
WINDOWS = re.compile("(?P<kind>conv|avg_pool|max_pool)(?P<dims>[123])d")
# norms over the dims of a given shape, which is that of this rank's tensor
NORMS = frozenset(("layer_norm", "rms_norm"))
ORDERING = frozenset(("sort", "argsort", "msort", "topk", "kthvalue"))
# A mean over shards of different sizes is a sum that is divided by the number of all positions.
SUMS = {
    torch.mean: torch.sum,
    Tensor.mean: Tensor.sum,
    torch.nanmean: torch.nansum,
    Tensor.nanmean: Tensor.nansum,
}
COPYING = frozenset(("to", "cpu", "cuda", "type", "type_as", "contiguous", "clone", "detach"))


class TorchCall(NamedTuple):
    """A call of a torch function.

    Attributes:
        name: the function's name.
        func: the function.
        args: its arguments, with layouts in place of tensors that hold positions.
        kwargs: its keyword arguments, likewise.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def specs(self) -> list[Spec]:
        """The layouts among the arguments."""
        return [value for value in self.leaves if isinstance(value, Spec)]

    @property
    def leaves(self) -> list[Any]:
        """All arguments, in nested lists too."""
        leaves: list[Any] = pytree.tree_leaves((self.args, self.kwargs))
        return leaves


class UnfollowedCallError(Exception):
    """The error for a call whose effect is unknown."""


class MixedPositionsError(Exception):
    """The error for a call that mixes positions, with the reason."""


def is_torchs(func: Any) -> bool:
    """Tell whether a function is one of torch's that computes: not a collective, not a user's."""
    module = getattr(func, "__module__", None) or "torch"
    return module.split(".")[0] == "torch" and not module.startswith(
        ("torch.distributed", "torch.ops")
    )


def _argument(call: TorchCall, name: str, position: int, default: Any) -> Any:
    """Return an argument that is given by name or by position."""
    if len(call.args) > position:
        return call.args[position]
    return call.kwargs.get(name, default)


def _along(axis: int, value: Any) -> Any:
    """Return the number for one spatial dim, of a number for all or one for each."""
    numbers = value if isinstance(value, LISTS) else (value,)
    return numbers[axis] if len(numbers) > 1 else numbers[0]


def rank_of(value: Any) -> int:
    """Return the number of dims of a tensor or a layout; 0 for another value."""
    return value.ndim if isinstance(value, Tensor | Spec) else 0


def takes_local_rows(call: TorchCall) -> bool:
    """Tell whether the results of a call are rows of this rank, about which nothing is known."""
    if call.name in BY_LOCAL_INDEX | DIAGONALS:
        return True
    if call.name == "where":
        return len(call.args) == 1
    source = call.args[0] if call.args else None
    held = sequence_dim(source) if isinstance(source, Spec) else None
    if held is None or not isinstance(source, Spec):
        return False
    if call.name in SPLITTING:
        dim = _argument(call, "dim", 1 if call.name == "narrow" else 2, default=0)
        return bool(dim % source.ndim == held.dim)
    if call.name in ("__getitem__", "__setitem__"):
        consumer = consumers(source.shape, call.args[1])[held.dim]
        is_ids = isinstance(consumer, list) and not source.dtype.is_floating_point
        return is_ids or _is_one_of_several(consumer, source.local_shape[held.dim])
    return False


def _is_one_of_several(index: Any, count: int) -> bool:
    """Tell whether an index is a part of a dim as loops take it: `x[i : i + size]`."""
    if not isinstance(index, slice) or index.start is None or index.stop is None:
        return False
    is_whole = _is_whole_slice(index, count)
    return not is_whole and index.start >= 0 and index.stop > 0


def takes_rows_by_value(call: TorchCall) -> bool:
    """Tell whether a function takes rows by indices or an order that may be a rank's own.

    So do experts, which sort a rank's tokens and put the results back.
    """
    if call.name in ORDERING:
        return not call.specs[0].dtype.is_floating_point
    if call.name not in BY_INDEX:
        return False
    indices = pytree.tree_leaves((call.args[1:], call.kwargs))
    for index in indices:
        if isinstance(index, Tensor) and not index.is_floating_point():
            return True
        if isinstance(index, Spec) and index.dtype == torch.bool:
            return True
    return False


def reduction_of(call: TorchCall) -> str:
    """Return the reduction of a loss function; empty for another function."""
    is_python = isinstance(call.func, FunctionType)
    if not is_python or "reduction" not in call.func.__code__.co_varnames:
        return ""
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    reduction = bound.arguments["reduction"]
    return "" if reduction == "none" else str(reduction)


def takes_whole_blocks(call: TorchCall, layout: SequenceLayout) -> bool:
    """Tell whether a convolution or a pooling takes blocks of positions that ranks hold whole."""
    source = call.args[0] if call.args else None
    held = sequence_dim(source) if isinstance(source, Spec) else None
    window = WINDOWS.fullmatch(call.name)
    if held is None or not isinstance(source, Spec) or window is None:
        return False
    axis = held.dim - source.ndim + int(window["dims"])
    if window["kind"] == "conv":
        weight = _argument(call, "weight", 1, default=None)
        kernel = weight.shape[2 + axis]
        stride = _along(axis, _argument(call, "stride", 3, default=1))
        padding = _argument(call, "padding", 4, default=0)
        dilation = _along(axis, _argument(call, "dilation", 5, default=1))
    else:
        kernel = _along(axis, _argument(call, "kernel_size", 1, default=1))
        stride = _along(axis, _argument(call, "stride", 2, default=None) or kernel)
        padding = _argument(call, "padding", 3, default=0)
        dilation = 1
    is_blockwise = kernel == stride and dilation == 1
    if axis < 0 or not is_blockwise or _along(axis, padding) not in (0, "valid"):
        return False
    return is_whole(layout, kernel, sum(held.sizes))


def reason(call: TorchCall) -> str:
    """Return the reason why a call is refused."""
    for spec in call.specs:
        held = sequence_dim(spec)
        if held is not None:
            return (
                f"dim {held.dim} of its argument of local shape {tuple(spec.local_shape)} holds "
                "this rank's positions of the sequence, and its result would need positions of other ranks"
            )
    return (
        f"its argument of shape {tuple(call.specs[0].local_shape)} is what this rank's positions "
        "contribute to a sum or mean over the sequence, and the function of the sum is not the sum "
        "of the ranks' results"
    )


# --- indices --------------------------------------------------------------------------------------


def consumers(shape: Sequence[int], index: Any) -> list[Any]:
    """Return for each dim what an index selects of it; a whole slice for dims that it leaves out."""
    items = list(index) if isinstance(index, tuple) else [index]
    consuming = [item for item in items if item is not None and item is not Ellipsis]
    taken = 0
    for item in consuming:
        is_mask = isinstance(item, Tensor | Spec) and item.dtype == torch.bool
        taken += item.ndim if isinstance(item, Tensor | Spec) and is_mask else 1
    found: list[Any] = []
    for item in items:
        if item is None:
            continue
        if item is Ellipsis:
            found += [slice(None)] * (len(shape) - taken)
        elif isinstance(item, Tensor | Spec) and item.dtype == torch.bool:
            found += [item] * item.ndim
        else:
            found.append(item)
    return found + [slice(None)] * (len(shape) - len(found))


def check_dims(call: TorchCall) -> None:
    """Raise if a call selects one position, each position in turn, or a norm of all."""
    source = call.args[0]
    held = sequence_dim(source)
    if held is None:
        return
    if call.name in ("__getitem__", "__setitem__"):
        consumer = consumers(source.shape, call.args[1])[held.dim]
        if isinstance(consumer, int) and not isinstance(consumer, bool):
            raise MixedPositionsError(reason(call))
    if call.name in TRIANGLES and held.dim >= source.ndim - 2:
        raise MixedPositionsError(reason(call))
    if call.name in NORMS:
        sizes = _argument(call, "normalized_shape", 1, default=())
        if held.dim >= source.ndim - len(sizes):
            raise MixedPositionsError(reason(call))
    if call.name == "unbind":
        dim = _argument(call, "dim", 1, default=0)
        if dim % source.ndim == held.dim:
            raise MixedPositionsError(reason(call))


def with_whole_slices(call: TorchCall) -> TorchCall:
    """Return a call of global tensors for a call that takes all of a rank's rows.

    Example: for 4 of 8 positions on this rank, `x[:, :4]` is `x[:, :]`.
    """
    source = call.args[0]
    held = sequence_dim(source)
    if held is None:
        return call
    count = source.local_shape[held.dim]
    if call.name not in ("__getitem__", "__setitem__"):
        return call
    func: Any = Tensor.__getitem__
    index = call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    consumer = consumers(source.shape, index)[held.dim]
    if type(consumer) is slice and _is_whole_slice(consumer, count):
        items = [slice(None) if item is consumer else item for item in items]
    return call._replace(func=func, args=(source, tuple(items)))


def _is_whole_slice(index: slice, count: int) -> bool:
    numbers = (index.start, index.stop, index.step)
    is_static = all(number is None or isinstance(number, int) for number in numbers)
    return is_static and index.indices(count) == (0, count, 1)
