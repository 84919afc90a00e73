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
    """`n` tensors whose reduction by `op` is `value`.

    Raises:
        NotImplementedError: if the dtype has none: sums of truth values, averages of integers, which are rounded.
    """
    order, is_bool, is_complex = norm_order(op), value.dtype == torch.bool, value.is_complex()
    has_fractions = value.is_floating_point() or is_complex
    refused = {"sum": is_bool, "product": is_bool, "avg": not has_fractions, "max": is_complex, "min": is_complex}
    if refused.get(op, has_fractions if order is None else not value.is_floating_point()):
        raise NotImplementedError(f"no partial {op} of {value.dtype}")
    if n == 1:
        return [value]
    if op == "avg":
        return [value + term for term in random_terms("sum", torch.zeros_like(value), n, generator)]
    if order is not None:  # random shares of what is positive; what is negative, one coordinate holds alone
        share = torch.rand((n, *value.shape), dtype=value.dtype, generator=generator) + 0.1
        shares = value * (share / share.sum(0)).pow(1 / order)
        alone = [value, *[value.new_tensor(0.0 if order > 0 else inf)] * (n - 1)]
        return [torch.where(value >= 0, part, other) for part, other in zip(shares, alone, strict=True)]
    if op in _REST:  # any terms, and the one that is missing then
        terms = [_noise(value, generator, signs=op == "product") for _ in range(n - 1)]
        return [*terms, _REST[op](value, reduce(COMBINE[op], terms))]
    # The value on a random one of the coordinates, element by element; elsewhere what loses against it.
    if is_bool or op in ("band", "bor"):
        noise = _noise(value, generator)
        other = value | noise if op in ("min", "band") else value & noise
    else:
        other = value + 1 if op == "min" else torch.zeros_like(value) if value.dtype == torch.uint8 else value - 1
    owner = torch.randint(0, n, value.shape, generator=generator)
    return [torch.where(owner == i, value, other) for i in range(n)]


# What is missing of a value, given the reduction of all other terms.
_REST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.sub,
    "product": torch.mul,
    "bxor": torch.bitwise_xor,
}


def _noise(value: Tensor, generator: Generator | None, *, signs: bool = False) -> Tensor:
    """Random values of the same shape and dtype; with `signs` they are 1 and -1."""
    if signs:
        return 1 - 2 * torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < 0.5
    if value.is_complex():
        return torch.randn(value.shape, dtype=value.dtype, generator=generator)
    if value.is_floating_point():  # coarse: terms of values as coarse add up to them exactly
        return torch.randn(value.shape, dtype=value.dtype, generator=generator).mul_(64).round_().div_(64)
    high = 3 if value.dtype == torch.uint8 else 50
    return torch.randint(0, high, value.shape, dtype=value.dtype, generator=generator)


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
