"""Lines that take values elsewhere: views, indices, joins, redistributions."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from .draft import Draft, Skip

__all__ = ["SHAPES", "basic_index", "view"]


def factors(d: Draft, n: int) -> list[int]:
    """Sizes whose product is `n`."""
    found = []
    for _ in range(d.integer(0, 2)):
        k = d.pick([k for k in range(1, n + 1) if n % k == 0] or [1])
        found.append(k)
        n //= k
    return [*found, n]


def reshaped(d: Draft, x: str) -> str:
    shape, ndim = list(d[x].shape), d[x].ndim
    kind = d.integer(0, 4)
    if kind == 0 and ndim > 1:
        first = d.integer(0, ndim - 2)
        return f"{x}.flatten({first}, {d.integer(first + 1, ndim - 1)})"
    if kind == 1 and ndim:
        dim = d.integer(0, ndim - 1)
        return f"{x}.unflatten({dim}, {tuple(factors(d, shape[dim]))})"
    if kind == 2:
        return f"{x}.reshape({tuple(factors(d, prod(shape)))})"
    if kind == 3:
        return f"{x}.view({tuple(factors(d, prod(shape)))})"
    made: list[int] = []
    for n in shape:
        made += factors(d, n) if d.chance(0.4) else [n]
    return f"{x}.view({tuple(made)})"


def turned(d: Draft, x: str) -> str:
    ndim = d[x].ndim
    order = list(range(ndim))
    d.random.shuffle(order)
    a, b = d.dim(x), d.dim(x)
    return d.pick(
        [
            f"{x}.permute({tuple(order)})",
            f"{x}.transpose({a}, {b})",
            f"{x}.movedim({a}, {b})",
            f"{x}.swapaxes({a}, {b})",
            f"{x}.mT",
        ]
    )


def part(d: Draft, x: str) -> str:
    dim = d.dim(x)
    size = d[x].shape[dim]
    start = d.integer(0, size)
    length = d.integer(0, size - start)
    kind = d.integer(0, 5)
    if kind == 0:
        return f"{x}.narrow({dim}, {start}, {length})"
    if kind == 1 and size:
        return f"{x}.select({dim}, {d.integer(-size, size - 1)})"
    if kind == 2 and size:
        k = d.integer(1, size)
        return f"{x}.split({k}, {dim})[{d.integer(0, -(-size // k) - 1)}]"
    if kind == 3 and size:
        k = d.integer(1, 4)
        return f"{x}.chunk({k}, {dim})[{d.integer(0, len(d[x].chunk(k, dim)) - 1)}]"
    if kind == 4 and size:
        return f"{x}.unbind({dim})[{d.integer(0, size - 1)}]"
    return f"{x}.split([{start}, {length}, {size - start - length}], {dim})[{d.integer(0, 2)}]"


def basic_index(d: Draft, x: str) -> str:
    """An index of numbers, slices, None and Ellipsis."""
    parts = []
    for n in d[x].shape[: d.integer(0, d[x].ndim)]:
        kind = d.integer(0, 4)
        if kind == 0 and n:
            parts.append(str(d.integer(-n, n - 1)))
        elif kind == 1:
            parts.append(f"{d.integer(-n - 1, n)}:")
        elif kind == 2:
            parts.append(f":{d.integer(-n - 1, n)}")
        elif kind == 3:
            parts.append(f"{d.integer(0, n)}::{d.integer(1, 3)}")
        else:
            parts.append(":")
    if d.chance(0.2):
        parts.append("...")
    if d.chance(0.2):
        parts.insert(d.integer(0, len(parts)), "None")
    return ", ".join(parts) or "..."


def sliced(d: Draft, x: str) -> str:
    return f"{x}[{basic_index(d, x)}]"


def dims(d: Draft, x: str) -> str:
    n = d[x].ndim
    kind = d.integer(0, 4)
    if kind == 0:
        return f"{x}.unsqueeze({d.integer(-n - 1, n)})"
    if kind == 1:
        return f"{x}.squeeze()" if d.chance(0.4) else f"{x}.squeeze({d.dim(x)})"
    if kind == 2 and n > 1:
        return f"{x}.diagonal({d.integer(-1, 2)}, {d.integer(0, n - 2)}, {n - 1})"
    if kind == 3 and n:
        dim = d.integer(0, n - 1)
        size = d.integer(1, max(1, d[x].shape[dim]))
        return f"{x}.unfold({dim}, {size}, {d.integer(1, 3)})"
    if n > 1:
        return f"{x}.diagonal()"
    return f"{x}.view_as({x})"


def expanded(d: Draft, x: str) -> str:
    shape = [d.integer(1, 4) if n == 1 else d.pick([n, -1]) for n in d[x].shape]
    front = [d.integer(1, 3)] if d.chance(0.4) else []
    return f"{x}.expand({tuple(front + shape)})"


VIEWS: tuple[Callable[[Draft, str], str], ...] = (
    reshaped,
    reshaped,
    turned,
    part,
    part,
    sliced,
    sliced,
    dims,
    expanded,
)


def view(d: Draft, x: str) -> str:
    """A view of a tensor."""
    made: str = d.pick(VIEWS)(d, x)
    return made


def viewed(d: Draft) -> str:
    return view(d, d.any())


def joined(d: Draft) -> str:
    x = d.real()
    y = d.any(lambda t: t.shape == d[x].shape) if d.chance(0.5) else x
    if d.chance(0.3):
        return f"torch.stack([{x}, {y} * 2], {d.integer(-d[x].ndim - 1, d[x].ndim)})"
    dim = d.dim(x)
    if d.chance(0.5):
        shape = list(d[x].shape)
        shape[dim] = d.integer(0, 4)
        y = d.made("leaf", shape)
    function = d.pick(["cat", "cat", "concatenate"])
    more = ", " + x if d.chance(0.3) else ""
    return f"torch.{function}([{x}, {y}{more}], {dim})"


def moved(d: Draft) -> str:
    x = d.any()
    return d.pick(
        [
            f"{x}.flip({d.dim(x)})",
            f"{x}.roll({d.integer(-5, 5)}, {d.dim(x)})",
            f"{x}.repeat_interleave({d.integer(1, 3)}, {d.dim(x)})",
            f"{x}.repeat({', '.join(str(d.integer(1, 2)) for _ in d[x].shape) or '2'})",
            f"{x}.tril({d.integer(-1, 1)})",
            f"F.pad({x}, ({d.integer(0, 2)}, {d.integer(-1, 2)}))",
            f"{x}.tile(2)",
            f"{x}.rot90()",
            f"{x}.roll(2)",
        ]
    )


def copied(d: Draft) -> str:
    return d.pick(
        ["{}.detach()", "{}.clone()", "{}.contiguous()", "{} * 1.0", "torch.zeros_like({})"]
    ).format(d.any())


def layout_of(d: Draft) -> str:
    x = d.any()
    return f"place({x}, {d.layout_of(d[x].shape)})"


def picked(d: Draft) -> str:
    """Rows or elements by tensors of numbers."""
    x = d.real(1)
    dim = d.integer(0, d[x].ndim - 1)
    size = d[x].shape[dim]
    if not size:
        raise Skip("empty")
    numbers = [d.integer(-size if d.chance(0.3) else 0, size - 1) for _ in range(d.integer(0, 5))]
    index = (
        d.const(numbers)
        if numbers
        else "const([], [Replicate()" + ", Replicate()" * (len(d.mesh) - 1) + "]).long()"
    )
    before = ":, " * dim
    other = d.const([[d.integer(0, size - 1)] for _ in range(2)])
    if min(numbers, default=0) >= 0 and d.chance(0.3):
        return f"{x}.index_select({dim}, {index})"
    if d.chance(0.3):
        return f"{x}[{before}{numbers}]" if numbers else f"{x}[{before}{other}]"
    return d.pick(
        [
            f"{x}[{before}{index}]",
            f"{x}[{before}{other}]",
            f"{x}[..., None][{before}{index}]",
            f"{x}.take({index} % 2)",
        ]
    )


def picked_twice(d: Draft) -> str:
    x = d.filled(d.real(2))
    n, m = d[x].shape[:2]
    count = d.integer(1, 4)
    one, two = ([d.integer(0, k - 1) for _ in range(count)] for k in (n, m))
    if d.chance(0.4):
        return f"{x}[{d.const([[i] for i in one])}, {d.const(two)}]"
    if d[x].ndim > 2 and d.chance(0.5):
        first = d.const(one)
        last = d.const([d.integer(0, d[x].shape[2] - 1) for _ in range(count)])
        return f"{x}[{first}, :, {last}]"
    return f"{x}[{d.const(one)}, {d.const(two)}]"


def masked(d: Draft) -> str:
    x = d.real(1)
    whole = d.chance(0.5)
    mask = d.made("flags", d[x].shape if whole else d[x].shape[:1])
    return f"{x}.masked_select({mask})" if whole and d.chance(0.5) else f"{x}[{mask}]"


def gathered(d: Draft) -> str:
    x = d.filled(d.real(1, 3))
    dim = d.dim(x)
    shape = [d.integer(1, n) for n in d[x].shape]
    shape[dim] = d.integer(1, 4)
    index = torch.tensor([d.integer(0, d[x].shape[dim] - 1) for _ in range(prod(shape))]).reshape(
        shape
    )
    return f"{x}.{d.pick(['gather({0}, {1})', 'gather({0}, {1})'])}".format(
        dim, d.const(index.tolist())
    )


def counted(d: Draft) -> str:
    x = d.away(d.real(1), 0.2)
    return f"({x} > 0.2).nonzero()"


SHAPES: tuple[Callable[[Draft], str], ...] = (
    viewed, viewed, viewed, viewed, viewed, viewed, viewed, joined, joined, moved, moved, copied,
    layout_of, layout_of, layout_of,
    picked, picked, picked_twice, masked, gathered, counted,
)  # fmt: skip
