"""Partial values taken apart and put together: tensors whose reduction over mesh axes is a given tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import inf

import torch
from torch import Tensor

from ..layout.placements import Partial, norm_order
from ..rules.language.rule import Entry
from .simulate import reduce_all

Coordinate = tuple[int, ...]


def deal(value: Tensor, entries: Sequence[Entry], shape: Coordinate) -> dict[Coordinate, Tensor]:
    """For every mesh coordinate what it holds of `value` before any sharding: its term along partial axes.

    Args:
        value: a global tensor.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: of the mesh.

    Returns:
        Tensors of the shape of `value`, by mesh coordinate.

    Raises:
        NotImplementedError: if the dtype has no such terms (sums of bool, maxima of complex numbers).

    Example:
        >>> from shoal_dtensor import Partial
        >>> terms = deal(torch.ones(3), [Partial("sum")], (2,))
        >>> terms[(0,)] + terms[(1,)]
        tensor([1., 1., 1.])
    """
    held: dict[Coordinate, Tensor] = {(): value}
    for entry, n in zip(entries, shape, strict=True):
        split = {c: _parts(entry.reduce_op, t, n) if isinstance(entry, Partial) else [t] * n for c, t in held.items()}
        held = {(*c, i): part for c, parts in split.items() for i, part in enumerate(parts)}
    return held


def gather(held: Mapping[Coordinate, Tensor], entries: Sequence[Entry], shape: Coordinate) -> dict[Coordinate, Tensor]:
    """For every mesh coordinate the reduction of what is held along the partial axes through it.

    Args:
        held: tensors of one shape, by mesh coordinate.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: of the mesh.

    Example:
        >>> from shoal_dtensor import Partial
        >>> gather({(0,): torch.ones(2), (1,): torch.ones(2)}, [Partial("sum")], (2,))
        {(0,): tensor([2., 2.]), (1,): tensor([2., 2.])}
    """
    result: dict[Coordinate, Tensor] = {}
    partial = [axis for axis, entry in enumerate(entries) if isinstance(entry, Partial)]
    for coordinate in held:
        around = [range(n) if axis in partial else (coordinate[axis],) for axis, n in enumerate(shape)]
        parts = [held[c] for c in product(*around)]
        op = next((e.reduce_op for e in entries if isinstance(e, Partial)), None)
        result[coordinate] = parts[0] if op is None else reduce_all(parts, op)
    return result


def _parts(op: str, value: Tensor, n: int) -> list[Tensor]:
    """`n` tensors whose reduction by `op` is `value`."""
    if value.dtype == torch.bool and op in ("sum", "avg", "product"):
        raise NotImplementedError(f"no partial {op} of truth values")
    if op == "avg" and not (value.is_floating_point() or value.is_complex()):
        raise NotImplementedError(f"averages of {value.dtype} are rounded")
    if value.is_complex() and op in ("max", "min"):
        raise NotImplementedError(f"no partial {op} of complex values")
    if op in ("band", "bor", "bxor") and (value.is_floating_point() or value.is_complex()):
        raise NotImplementedError(f"no partial {op} of {value.dtype}")
    order = norm_order(op)
    if order is not None and not value.is_floating_point():
        raise NotImplementedError(f"no partial norm of {value.dtype}")
    return _PARTS[op](value, n) if order is None else _of_norm(value, n, order)


def _noise(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return torch.rand(value.shape) < 0.5
    if value.dtype == torch.float32:  # coarse: parts of values as coarse add up to them exactly
        return torch.randn(value.shape).mul_(64).round_().div_(64)
    if value.is_floating_point() or value.is_complex():
        return torch.randn(value.shape, dtype=value.dtype)
    high = 3 if value.dtype == torch.uint8 else 50
    return torch.randint(0, high, value.shape, dtype=value.dtype)


def _of_sum(value: Tensor, n: int) -> list[Tensor]:
    parts = [_noise(value) for _ in range(n - 1)]
    return [*parts, value - reduce(torch.add, parts, torch.zeros_like(value))]


def _of_product(value: Tensor, n: int) -> list[Tensor]:
    signs = [1 - 2 * torch.randint(0, 2, value.shape).to(value.dtype) for _ in range(n - 1)]
    return [*signs, value * reduce(torch.mul, signs, torch.ones_like(value))]


def _of_norm(value: Tensor, n: int, order: float) -> list[Tensor]:
    """Random shares of what is positive; what is negative, one coordinate holds alone."""
    share = torch.rand((n, *value.shape), dtype=value.dtype) + 0.1
    shares = (share / share.sum(0)).pow(1 / order)
    alone = [0.0 if order > 0 else inf] * (n - 1)
    return [
        torch.where(value >= 0, value * part, other)
        for part, other in zip(shares, [value, *map(value.new_tensor, alone)], strict=True)
    ]


def _somewhere(value: Tensor, n: int, others: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """`value` on a random one of the coordinates, element by element, and `others(value)` elsewhere."""
    owner = torch.randint(0, n, value.shape)
    return [torch.where(owner == i, value, others(value)) for i in range(n)]


def _below(value: Tensor) -> Tensor:
    if value.dtype == torch.bool:
        return value & _noise(value)
    return value - value.new_ones(()) if value.dtype != torch.uint8 else torch.zeros_like(value)


def _above(value: Tensor) -> Tensor:
    return value | _noise(value) if value.dtype == torch.bool else value + value.new_ones(())


def _of_exclusive(value: Tensor, n: int) -> list[Tensor]:
    parts = [_noise(value) for _ in range(n - 1)]
    return [*parts, value ^ reduce(torch.bitwise_xor, parts, torch.zeros_like(value))]


_PARTS: dict[str, Callable[[Tensor, int], list[Tensor]]] = {
    "sum": _of_sum,
    "avg": lambda value, n: [value + part for part in _of_sum(torch.zeros_like(value), n)],
    "product": _of_product,
    "max": lambda value, n: _somewhere(value, n, _below),
    "min": lambda value, n: _somewhere(value, n, _above),
    "band": lambda value, n: _somewhere(value, n, lambda v: v | _noise(v)),
    "bor": lambda value, n: _somewhere(value, n, lambda v: v & _noise(v)),
    "bxor": _of_exclusive,
}
