"""`TorchCall`: a call of a torch function with layouts, and its meaning for positions.

Most functions need no entry here, because the rules of operators describe them. The tables name
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
from .sequence_dims import are_whole_blocks, sequence_dim

LISTS = (list, tuple)
# Classes of tensors that are followed. DTensors and tensors of other classes have their own rules.
PLAIN = (Tensor, Parameter)


# --- functions by name ----------------------------------------------------------------------------

# Functions whose results have the elements of the argument, in the same order, in another shape.
RESHAPING = frozenset(
    ("view", "reshape", "unflatten", "flatten", "view_as", "reshape_as", "_unsafe_view", "ravel")
)
# Functions that repeat elements along dims of size 1 and along new first dims.
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
# Functions that read or write rows by an index, a mask or a slice.
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
# Functions whose results depend on the place of an element. Rules of operators count places over
# all ranks; on local tensors torch counts them from 0 on each rank.
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
# Functions that compute windows over the last 1, 2 or 3 dims.
WINDOWS = re.compile("(?P<kind>conv|avg_pool|max_pool)(?P<dims>[123])d")
# Norms over the last dims, whose sizes are an argument: here the sizes on this rank.
NORMS = frozenset(("layer_norm", "rms_norm"))
# Functions that sort or select by value.
ORDERING = frozenset(("sort", "argsort", "msort", "topk", "kthvalue"))
# For a mean the sum of the same elements. Ranks may hold different numbers of positions, so a mean
# of the ranks' means is not the mean of all positions.
SUMS = {
    torch.mean: torch.sum,
    Tensor.mean: Tensor.sum,
    torch.nanmean: torch.nansum,
    Tensor.nanmean: Tensor.nansum,
}
# Functions whose result has the layout of the argument, whatever device or dtype it has.
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


def computes_in_torch(func: Any) -> bool:
    """Tell whether a function is torch's, and neither a collective nor a custom operator.

    Functions of C have no module, or None.
    """
    module = getattr(func, "__module__", None) or "torch"
    is_of_torch = module.split(".")[0] == "torch"
    return is_of_torch and not module.startswith(("torch.distributed", "torch.ops"))


def _argument(call: TorchCall, name: str, position: int, default: Any) -> Any:
    """Return an argument that is given by name or by position."""
    if len(call.args) > position:
        return call.args[position]
    return call.kwargs.get(name, default)


def _number_along(axis: int, value: Any) -> Any:
    """Return the number for a spatial dim from an argument such as `stride`.

    The argument is one number for all spatial dims, or a list with a number for each.
    """
    numbers = value if isinstance(value, LISTS) else (value,)
    return numbers[axis] if len(numbers) > 1 else numbers[0]


def ndim_of(value: Any) -> int:
    """Return the number of dims of a tensor or a layout; 0 for another value."""
    return value.ndim if isinstance(value, Tensor | Spec) else 0


def takes_local_rows(call: TorchCall) -> bool:
    """Tell whether a call takes some of this rank's rows, so that its results are not followed.

    Such rows are not a shard: other ranks may take others.
    """
    if call.name in BY_LOCAL_INDEX | DIAGONALS:
        return True
    if call.name == "where":
        # `where(condition)` returns indices, as `nonzero` does.
        return len(call.args) == 1
    source = call.args[0] if call.args else None
    held = sequence_dim(source) if isinstance(source, Spec) else None
    if held is None or not isinstance(source, Spec):
        return False
    if call.name in SPLITTING:
        # narrow(x, dim, start, length); split(x, sizes, dim), and the others likewise
        position_of_dim = 1 if call.name == "narrow" else 2
        dim = _argument(call, "dim", position_of_dim, default=0)
        return bool(dim % source.ndim == held.dim)
    if call.name in ("__getitem__", "__setitem__"):
        index = indices_by_dim(source.shape, call.args[1])[held.dim]
        # a list of indices into a tensor of integers, such as token ids
        is_list_of_ids = isinstance(index, list) and not source.dtype.is_floating_point
        return is_list_of_ids or _is_part_in_loop(index, source.local_shape[held.dim])
    return False


def _is_part_in_loop(index: Any, count: int) -> bool:
    """Tell whether an index is a part of a dim of `count` rows as loops take it: `x[i : i + n]`."""
    if not isinstance(index, slice) or index.start is None or index.stop is None:
        return False
    are_whole_blocks = _is_whole_slice(index, count)
    return not are_whole_blocks and index.start >= 0 and index.stop > 0


def takes_rows_by_value(call: TorchCall) -> bool:
    """Tell whether a function takes rows by indices or an order that may be a rank's own.

    Example: experts sort a rank's tokens by expert, and put the results back.
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
    # torch's loss functions are Python functions with an argument `reduction`.
    if not isinstance(call.func, FunctionType):
        return ""
    if "reduction" not in call.func.__code__.co_varnames:
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
    # Example: conv1d of (batch, channels, positions): dim 2 is the spatial dim 0.
    axis = held.dim - source.ndim + int(window["dims"])
    if window["kind"] == "conv":
        weight = _argument(call, "weight", 1, default=None)
        # (channels, channels of a group, kernel sizes)
        kernel = weight.shape[2 + axis]
        stride = _number_along(axis, _argument(call, "stride", 3, default=1))
        padding = _argument(call, "padding", 4, default=0)
        dilation = _number_along(axis, _argument(call, "dilation", 5, default=1))
    else:
        kernel = _number_along(axis, _argument(call, "kernel_size", 1, default=1))
        stride = _number_along(axis, _argument(call, "stride", 2, default=None) or kernel)
        padding = _argument(call, "padding", 3, default=0)
        dilation = 1
    is_blockwise = kernel == stride and dilation == 1
    if axis < 0 or not is_blockwise or _number_along(axis, padding) not in (0, "valid"):
        return False
    return are_whole_blocks(layout, kernel, sum(held.sizes))


def reason(call: TorchCall) -> str:
    """Return the reason why a call is refused, as the end of a sentence about its function."""
    for spec in call.specs:
        held = sequence_dim(spec)
        if held is not None:
            return (
                f"dim {held.dim} of its argument of local shape {tuple(spec.local_shape)} holds "
                "this rank's positions of the sequence, and its result would need positions of "
                "other ranks"
            )
    return (
        f"its argument of shape {tuple(call.specs[0].local_shape)} is what this rank's positions "
        "contribute to a sum or mean over the sequence, and the function of the sum is not the sum "
        "of the ranks' results"
    )


# --- indices --------------------------------------------------------------------------------------


def indices_by_dim(shape: Sequence[int], index: Any) -> list[Any]:
    """Return for each dim the index that selects from it; a whole slice for a dim without one.

    Args:
        shape: the shape of the indexed tensor.
        index: the argument of `__getitem__`.

    Example:
        >>> indices_by_dim((2, 3, 4), (..., None, 1))
        [slice(None, None, None), slice(None, None, None), 1]
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dims_with_index = sum(_dims_of_index(item) for item in items)
    indices: list[Any] = []
    for item in items:
        if item is Ellipsis:
            indices += [slice(None)] * (len(shape) - dims_with_index)
        else:
            indices += [item] * _dims_of_index(item)
    return indices + [slice(None)] * (len(shape) - len(indices))


def _dims_of_index(item: Any) -> int:
    """Return the number of dims from which an item of an index selects."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = isinstance(item, Tensor | Spec) and item.dtype == torch.bool
    return ndim_of(item) if is_mask else 1


def check_dims(call: TorchCall) -> None:
    """Refuse calls that rules of operators would allow, but that mix positions on local tensors.

    They select one position or each position in turn, mask by places, or compute a norm over
    positions.
    """
    source = call.args[0]
    held = sequence_dim(source)
    if held is None:
        return
    if call.name in ("__getitem__", "__setitem__"):
        index = indices_by_dim(source.shape, call.args[1])[held.dim]
        # A bool is a mask, not a position.
        if isinstance(index, int) and not isinstance(index, bool):
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
    if call.name not in ("__getitem__", "__setitem__"):
        return call
    index = call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    index_of_positions = indices_by_dim(source.shape, index)[held.dim]
    count = source.local_shape[held.dim]
    if type(index_of_positions) is slice and _is_whole_slice(index_of_positions, count):
        items = [slice(None) if item is index_of_positions else item for item in items]
    # A write concerns the same rows as a read, whose layout the rules derive.
    func: Any = Tensor.__getitem__
    return call._replace(func=func, args=(source, tuple(items)))


def _is_whole_slice(index: slice, count: int) -> bool:
    """Tell whether a slice takes all of `count` rows, in order; False if its bounds are tensors."""
    numbers = (index.start, index.stop, index.step)
    is_static = all(number is None or isinstance(number, int) for number in numbers)
    return is_static and index.indices(count) == (0, count, 1)
