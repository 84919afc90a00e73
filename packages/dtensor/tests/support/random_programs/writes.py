"""Lines that write: in place, through views and chains of views, by index, into `out=`, lists."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from .draft import Draft, Skip
from .shapes import basic_index, view

__all__ = ["WRITES"]


def target(d: Draft, ndim: int = 0) -> str:
    """The name of a tensor that may be written to."""
    kept = {x.untyped_storage().data_ptr() for x in d.machine.kept}
    return d.any(
        lambda x: (
            x.is_floating_point()
            and x.ndim >= ndim
            and not (x.is_leaf and x.requires_grad)
            and x.untyped_storage().data_ptr() not in kept
        )
    )


def place(d: Draft, ndim: int = 0) -> str:
    """A target, or a view of one: its name; views get names of their own."""
    x = target(d, ndim)
    while d.chance(0.45):
        name = d.name()
        d.add(f"{name} = {view(d, x)}")
        x = name
    if d[x].ndim < ndim:
        raise Skip("few dims")
    return x


def number(d: Draft) -> str:
    form = d.pick(
        [
            "{}.add_({})",
            "{}.mul_({})",
            "{} -= {}",
            "{}.div_({})",
            "{}.fill_({})",
            "{}.sub_({}, alpha=2)",
        ]
    )
    return form.format(place(d), d.number())


def smooth(d: Draft) -> str:
    x = place(d)
    if d.chance(0.3):
        d.away(x, 0, 0.5, -0.5)
        return d.pick(["{}.relu_()", "{}.abs_()", "{}.clamp_(-0.5, 0.5)"]).format(x)
    return d.pick(
        [
            "{}.tanh_()",
            "{}.sigmoid_()",
            "{}.neg_()",
            "{}.zero_()",
            "{}.square_()",
            "F.silu({}, inplace=True)",
        ]
    ).format(x)


def other(d: Draft) -> str:
    x = place(d)
    shape = list(d[x].shape)
    if d.chance(0.4):
        shape = [1 if d.chance(0.3) else n for n in shape[d.integer(0, len(shape)) :]]
    y = d.made(d.pick(["leaf", "real", "real", "ints"]), shape)
    form = d.pick(
        [
            "{}.add_({})",
            "{}.mul_({})",
            "{}.copy_({})",
            "{}.sub_({})",
            "{}.addcmul_({1}, {1})",
            "{0} += {1}",
            "{}.lerp_({} * 1.0, 0.25)",
        ]
    )
    return form.format(x, y)


def itself(d: Draft) -> str:
    """What is read and what is written share memory where torch defines the result."""
    x = place(d)
    return d.pick(
        [
            "{0}.add_({0})",
            "{0}.mul_({0}.flip(0))",
            "{0}.copy_({0} * 2)",
            "{0}.add_({0}.sum())",
            "{0}.mul_({0}.detach().clone())",
            "{0}.sub_({0}.clone())",
        ]
    ).format(x)


def between(d: Draft) -> str:
    """One part of a tensor from another part of it."""
    x = target(d, 1)
    dim = d.integer(0, d[x].ndim - 1)
    n = d[x].shape[dim]
    if n < 2:
        raise Skip("one part only")
    k = n // 2
    method = d.pick(["copy_", "add_", "mul_"])
    return f"{x}.narrow({dim}, 0, {k}).{method}({x}.narrow({dim}, {n - k}, {k}))"


def assigned(d: Draft) -> str:
    x = place(d)
    index = basic_index(d, x)
    if d.chance(0.4):
        return f"{x}[{index}] = {d.number()}"
    shape = list(eval(f"x[{index}]", {}, {"x": d[x]}).shape)
    if d.chance(0.4):
        shape = [1 if d.chance(0.3) else n for n in shape[d.integer(0, len(shape)) :]]
    return (
        f"{x}[{index}] {d.pick(['=', '=', '+=', '*='])} {d.made(d.pick(['leaf', 'real']), shape)}"
    )


def assigned_by_tensor(d: Draft) -> str:
    x = place(d, 1)
    dim = d.integer(0, min(1, d[x].ndim - 1))
    size = d[x].shape[dim]
    numbers = d.random.sample(range(size), d.integer(0, min(4, size)))
    if not numbers:
        raise Skip("no numbers")
    before = ":, " * dim
    index = d.const(numbers) if d.chance(0.7) else str(numbers)
    if d.chance(0.3):
        return f"{x}[{before}{index}] = {d.number()}"
    shape = list(d[x].shape)
    shape[dim] = len(numbers)
    sign = d.pick(["=", "+="])
    value = d.made(d.pick(["leaf", "real"]), shape[d.integer(0, dim) :])
    return f"{x}[{before}{index}] {sign} {value}"


def assigned_by_mask(d: Draft) -> str:
    x = place(d, 1)
    whole = d.chance(0.5)
    mask = d.made("flags", d[x].shape if whole else d[x].shape[:1])
    count = int(d[mask].sum())
    if d.chance(0.5):
        return f"{x}[{mask}] = {d.number()}"
    return f"{x}[{mask}] = {d.made('leaf', (count,) if whole else (count, *d[x].shape[1:]))}"


def filled(d: Draft) -> str:
    x = place(d)
    mask = d.made("flags", d[x].shape if d.chance(0.7) else d[x].shape[-1:])
    if d.chance(0.6):
        return f"{x}.masked_fill_({mask}, {d.number()})"
    return f"{x}.masked_scatter_({mask}, {d.made('leaf', (d[x].numel(),))})"


def put(d: Draft) -> str:
    x = d.filled(place(d, 1))
    n = d[x].shape[0]
    numbers = [d.integer(0, n - 1) for _ in range(d.integer(1, 4))]
    values = d.made("leaf", (len(numbers), *d[x].shape[1:]))
    return f"{x}.index_put_(({d.const(numbers)},), {values}, accumulate=True)"


def indexed(d: Draft) -> str:
    x = place(d, 1)
    dim = d.integer(0, d[x].ndim - 1)
    size = d[x].shape[dim]
    if not size:
        raise Skip("empty")
    numbers = d.random.sample(range(size), d.integer(1, min(4, size)))
    shape = list(d[x].shape)
    shape[dim] = len(numbers)
    index = d.const(numbers)
    op = d.pick(["index_add", "index_copy", "index_fill"])
    end = "_" if d.chance(0.7) else ""
    value = d.number() if op == "index_fill" else d.made("leaf", shape)
    line = f"{x}.{op}{end}({dim}, {index}, {value})"
    return line if end else f"{d.name()} = {line}"


def scattered(d: Draft) -> str:
    x = d.filled(place(d, 1))
    if d[x].ndim > 3:
        raise Skip("many dims")
    dim = d.integer(0, d[x].ndim - 1)
    shape = [d.integer(1, n) for n in d[x].shape]
    columns = [
        torch.randperm(d[x].shape[dim], generator=torch.Generator().manual_seed(d.integer(0, 999)))[
            : shape[dim]
        ]
        for _ in range(prod(shape) // shape[dim])
    ]
    index = (
        torch.stack(columns).reshape(*shape[:dim], *shape[dim + 1 :], shape[dim]).movedim(-1, dim)
    )
    op = d.pick(["scatter", "scatter_add"])
    end = "_" if d.chance(0.6) else ""
    line = f"{x}.{op}{end}({dim}, {d.const(index.tolist())}, {d.made('leaf', shape)})"
    return line if end else f"{d.name()} = {line}"


def out(d: Draft) -> str:
    x = target(d)
    if d[x].requires_grad:
        raise Skip("out= with a gradient")
    y = d.any(lambda t: t.shape == d[x].shape and t.dtype == d[x].dtype and not t.requires_grad)
    return d.pick(
        [
            "torch.add({0}, {0}, out={1})",
            "torch.mul({0}, 2, out={1})",
            "torch.sin({0}, out={1})",
            "torch.add({1}, {0}, out={1})",
        ]
    ).format(y, x)


def listed(d: Draft) -> str:
    x, y = place(d), place(d)
    pair = f"[{x}, {y}]"
    form = d.pick(
        [
            "torch._foreach_add_({}, 0.5)",
            "torch._foreach_mul_({}, [2.0, 3.0])",
            "torch._foreach_neg_({})",
            "torch._foreach_mul_({0}, {0})",
            "torch._foreach_add_({0}, [{1}, {2}], alpha=0.5)",
            "torch._foreach_zero_({})",
        ]
    )
    return form.format(pair, f"{x}.detach().clone()", f"{y}.detach().clone()")


def reshaped(d: Draft) -> str:
    x = target(d)
    return d.pick(
        [
            f"{x}.unsqueeze_(0)",
            f"{x}.squeeze_()",
            f"{x}.t_()",
            f"{x}.transpose_({d.dim(x)}, {d.dim(x)})",
        ]
    )


def scanned(d: Draft) -> str:
    x = place(d, 1)
    return d.pick(
        [
            f"{x}.cumsum_({d.dim(x)})",
            f"{x}.tril_()",
            f"{x}.fill_diagonal_(2)",
            f"{x}.uniform_()",
            f"{x}.normal_()",
            f"{x}.bernoulli_(0.5)",
        ]
    )


WRITES: tuple[Callable[[Draft], str], ...] = (
    number, number, smooth, other, other, itself, between, assigned, assigned, assigned,
    assigned_by_tensor, assigned_by_mask, filled, put, indexed, scattered, out, listed, reshaped,
    scanned,
)  # fmt: skip
