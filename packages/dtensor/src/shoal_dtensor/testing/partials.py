"""Partial values taken apart and put together: tensors whose reduction over mesh axes is a given tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import inf

import torch
from torch import Generator, Tensor

from ..layout.placements import Partial, norm_order
from ..redistribute.reductions import identity_of, powers, root

Coordinate = tuple[int, ...]
Split = Callable[[str, Tensor, int], list[Tensor]]  # (reduction, value, n): n terms that reduce to the value

# How a reduction takes two tensors, by its name; an average is a sum that is divided afterwards.
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduce_all(tensors: Sequence[Tensor], op: str) -> Tensor:
    """The reduction of equally shaped tensors."""
    first, *others = tensors
    order = norm_order(op)
    if order is not None:
        return root(reduce(torch.add, [powers(tensor, order) for tensor in tensors]), order, first.dtype)
    total = reduce(COMBINE[op], others, first.clone())
    return (total / len(tensors)).to(first.dtype) if op == "avg" else total


def first_term(op: str, value: Tensor, n: int) -> list[Tensor]:
    """`n` tensors whose reduction by `op` is `value`: all of it is in the first."""
    neutral = torch.full_like(value, identity_of(op, value.dtype))
    return [value * n if op == "avg" else value, *[neutral] * (n - 1)]


def random_terms(op: str, value: Tensor, n: int, generator: Generator | None = None) -> list[Tensor]:
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
    if order is None:
        return _TERMS[op](value, n, generator)
    if not value.is_floating_point():
        raise NotImplementedError(f"no partial norm of {value.dtype}")
    return _of_norm(value, n, order, generator)


def deal(
    value: Tensor, entries: Sequence[object], shape: Sequence[int], split: Split = random_terms
) -> dict[Coordinate, Tensor]:
    """For every mesh coordinate what it holds of `value` before any sharding: its term along partial axes.

    Args:
        value: a global tensor.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: of the mesh.
        split: makes the terms.

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
    ops = {axis: entry.reduce_op for axis, entry in enumerate(entries) if isinstance(entry, Partial)}
    terms: dict[Coordinate, Tensor] = {(): value}  # by the coordinates along partial axes: replicas have the same
    for axis, op in ops.items():
        terms = {(*c, i): term for c, whole in terms.items() for i, term in enumerate(split(op, whole, shape[axis]))}
    return {c: terms[tuple(c[axis] for axis in ops)] for c in product(*map(range, shape))}


def gather(
    terms: Mapping[Coordinate, Tensor], entries: Sequence[object], shape: Sequence[int]
) -> dict[Coordinate, Tensor]:
    """For every mesh coordinate the reduction of the terms along the partial axes through it.

    Args:
        terms: tensors of one shape, by mesh coordinate.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: of the mesh.

    Example:
        >>> from shoal_dtensor import Partial
        >>> gather({(0,): torch.ones(2), (1,): torch.ones(2)}, [Partial("sum")], (2,))
        {(0,): tensor([2., 2.]), (1,): tensor([2., 2.])}
    """
    ops = {axis: entry.reduce_op for axis, entry in enumerate(entries) if isinstance(entry, Partial)}
    reduced = dict(terms)
    for op in dict.fromkeys(ops.values()):
        lines = {c: product(*([i] if ops.get(a) != op else range(shape[a]) for a, i in enumerate(c))) for c in reduced}
        reduced = {c: reduce_all([reduced[other] for other in line], op) for c, line in lines.items()}
    return reduced


def _noise(value: Tensor, generator: Generator | None) -> Tensor:
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.is_complex():
        return torch.randn(value.shape, dtype=value.dtype, generator=generator)
    if value.is_floating_point():  # coarse: terms of values as coarse add up to them exactly
        return torch.randn(value.shape, dtype=value.dtype, generator=generator).mul_(64).round_().div_(64)
    high = 3 if value.dtype == torch.uint8 else 50
    return torch.randint(0, high, value.shape, dtype=value.dtype, generator=generator)


def _of_sum(value: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    terms = [_noise(value, generator) for _ in range(n - 1)]
    return [*terms, value - reduce(torch.add, terms, torch.zeros_like(value))]


def _of_product(value: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    signs = [1 - 2 * torch.randint(0, 2, value.shape, generator=generator).to(value.dtype) for _ in range(n - 1)]
    return [*signs, value * reduce(torch.mul, signs, torch.ones_like(value))]


def _of_norm(value: Tensor, n: int, order: float, generator: Generator | None) -> list[Tensor]:
    """Random shares of what is positive; what is negative, one coordinate holds alone."""
    share = torch.rand((n, *value.shape), dtype=value.dtype, generator=generator) + 0.1
    shares = (share / share.sum(0)).pow(1 / order)
    alone = [0.0 if order > 0 else inf] * (n - 1)
    return [
        torch.where(value >= 0, value * part, other)
        for part, other in zip(shares, [value, *map(value.new_tensor, alone)], strict=True)
    ]


def _somewhere(value: Tensor, other: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    """`value` on a random one of the coordinates, element by element, and `other` elsewhere."""
    owner = torch.randint(0, n, value.shape, generator=generator)
    return [torch.where(owner == i, value, other) for i in range(n)]


def _of_max(value: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    if value.dtype == torch.bool:
        return _somewhere(value, value & _noise(value, generator), n, generator)
    below = torch.zeros_like(value) if value.dtype == torch.uint8 else value - value.new_ones(())
    return _somewhere(value, below, n, generator)


def _of_min(value: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    above = value | _noise(value, generator) if value.dtype == torch.bool else value + value.new_ones(())
    return _somewhere(value, above, n, generator)


def _of_exclusive(value: Tensor, n: int, generator: Generator | None) -> list[Tensor]:
    terms = [_noise(value, generator) for _ in range(n - 1)]
    return [*terms, value ^ reduce(torch.bitwise_xor, terms, torch.zeros_like(value))]


_TERMS: dict[str, Callable[[Tensor, int, Generator | None], list[Tensor]]] = {
    "sum": _of_sum,
    "avg": lambda value, n, g: [value + term for term in _of_sum(torch.zeros_like(value), n, g)],
    "product": _of_product,
    "max": _of_max,
    "min": _of_min,
    "band": lambda value, n, g: _somewhere(value, value | _noise(value, g), n, g),
    "bor": lambda value, n, g: _somewhere(value, value & _noise(value, g), n, g),
    "bxor": _of_exclusive,
}
