"""The order of a tensor's dims in memory, from its shape and stride. Integers only.

The shape and an order of dims determine the stride of a dense tensor. For example, a tensor of
shape (2, 3) and stride (1, 2) has the order (1, 0), because dim 1 has the larger stride.
"""

from __future__ import annotations

from collections.abc import Sequence

# Dims from the largest stride to the smallest, with `~dim` for an expanded dim. Empty for a
# row-major tensor.
MemoryOrder = tuple[int, ...]


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major stride in elements: (12, 4, 1) for (2, 3, 4)."""
    return dense_stride(shape, ())


def dense_stride(shape: Sequence[int], order: MemoryOrder) -> tuple[int, ...]:
    """Return the stride in elements of a dense tensor with this order of dims in memory.

    The stride of an expanded dim is 0.
    """
    stride = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        if dim >= 0:
            stride[dim] = step
            # As in torch, an empty dim counts as a dim of one element.
            step *= shape[dim] or 1
    return tuple(stride)


def dims_by_stride(stride: Sequence[int], shape: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the dims by descending stride.

    Dims of equal stride are ordered by descending size if there is a shape, then by number.
    """
    # Example: (1, 2, 0) for the stride (1, 8, 2).
    sizes = stride if shape is None else shape
    dims = range(len(stride))
    return tuple(sorted(dims, key=lambda dim: (-stride[dim], -sizes[dim])))


def walking_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the dims by descending stride; dims of one element go first.

    The position of a dim of one element does not matter.
    """
    # Example: (1, 2, 0) for the shape (2, 1, 4) and the stride (1, 9, 2).
    short = [dim for dim, n in enumerate(shape) if n <= 1]
    long = [dim for dim in dims_by_stride(stride) if shape[dim] > 1]
    return (*short, *long)


def dense_order(shape: Sequence[int], stride: Sequence[int]) -> MemoryOrder | None:
    """Return the order of a dense tensor's dims in memory.

    Return None if elements have gaps between them or overlap, except along expanded dims.
    """
    if tuple(stride) == contiguous_stride(shape):
        return ()
    dims = dims_by_stride(stride, shape)
    order = tuple([dim if stride[dim] else ~dim for dim in dims])
    return order if dense_stride(shape, order) == tuple(stride) else None


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> MemoryOrder:
    """Return the dims from the largest stride to the smallest.

    Return () for a row-major or an expanded tensor.
    """
    if tuple(stride) == contiguous_stride(shape):
        return ()
    # Shards of an expanded tensor are row-major.
    if is_expanded(shape, stride):
        return ()
    order = dims_by_stride(stride)
    significant = [dim for dim in order if shape[dim] > 1]
    is_row_major = significant == sorted(significant)
    return () if is_row_major else order


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether the elements along some dim share their memory, because its stride is 0."""
    pairs = zip(shape, stride, strict=True)
    return any(n > 1 and step == 0 for n, step in pairs)


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether a tensor of this shape and stride is row-major.

    Strides of one-element dims do not count.
    """
    if 0 in shape:
        return True
    dense = contiguous_stride(shape)
    triples = zip(shape, stride, dense, strict=True)
    return all(n == 1 or step == dense_step for n, step, dense_step in triples)
