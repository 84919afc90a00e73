"""Lines that compute: elementwise operators, reductions, products, operators along a dim."""

from __future__ import annotations

from collections.abc import Callable

from .draft import Draft, Skip

__all__ = ["VALUES"]


def unary(d: Draft) -> str:
    x = d.real()
    smooth = [
        "F.gelu({})",
        "{}.tanh()",
        "{}.sin()",
        "{}.sigmoid()",
        "-{}",
        "({} * 0.1).exp()",
        "{}.square()",
        "F.silu({})",
    ]
    kinked = [
        "{}.relu()",
        "{}.abs()",
        "{}.clamp(-0.5, 0.5)",
        "{}.clamp_min(0.25)",
        "F.leaky_relu({}, 0.1)",
        "F.hardtanh({})",
        "{}.sign()",
    ]
    if d.chance(0.6):
        return d.pick(smooth).format(x)
    return d.pick(kinked).format(d.away(x, 0, -0.5, 0.5, 0.25, 1, -1))


def scalar(d: Draft) -> str:
    x, n = d.any(), d.number()
    form = d.pick(
        ["{} + {}", "{} * {}", "{1} - {0}", "{} / {}", "torch.add({}, {}, alpha=2)", "{} - {}"]
    )
    return form.format(x, n)


def binary(d: Draft) -> str:
    x = d.real()
    y = d.like(x)
    form = d.pick(
        [
            "{} + {}",
            "{} * {}",
            "{} - {}",
            "{} / ({}.square() + 1)",
            "torch.add({}, {}, alpha=0.5)",
            "torch.addcmul({0}, {0}, {1}, value=2)",
            "torch.lerp({}, {}, 0.3)",
            "torch.hypot({}, {} + 3)",
        ]
    )
    return form.format(*((x, y) if d.chance(0.7) else (y, x)))


def promoted(d: Draft) -> str:
    x = d.real()
    other = d.made(d.pick(["ints", "flags"]), d[x].shape)
    return f"{x} {d.pick(['+', '*'])} {other}"


def converted(d: Draft) -> str:
    return f"{d.real()}.to(torch.{d.pick(['float32', 'float64', 'float64', 'complex128'])})"


def compared(d: Draft) -> str:
    x = d.real()
    return f"{d.away(x, 0.125)} {d.pick(['>', '<=', '!='])} 0.125"


def extremes(d: Draft) -> str:
    x = d.real()
    y = d.like(x)
    if ((d[x] - d[y]).abs() < 1e-6).any():
        raise Skip("equal values")
    return f"torch.{d.pick(['maximum', 'minimum'])}({x}, {y})"


def where(d: Draft) -> str:
    x = d.real()
    mask = d.made("flags", d[x].shape if d.chance(0.6) else d[x].shape[-1:])
    return f"torch.where({mask}, {x}, {d.like(x) if d.chance(0.6) else d.number()})"


def masked_fill(d: Draft) -> str:
    x = d.real()
    return f"{x}.masked_fill({d.made('flags', d[x].shape)}, {d.number()})"


def reduced(d: Draft) -> str:
    x = d.real()
    op = d.pick(["sum", "mean", "sum", "mean", "logsumexp", "norm"])
    keep = d.chance(0.5)
    if not d[x].ndim or (d.chance(0.2) and op in ("sum", "mean")):
        return f"{x}.{op if op in ('sum', 'mean') else 'sum'}()"
    dims = tuple(sorted({d.dim(x) % d[x].ndim for _ in range(2)}))
    if any(d[x].shape[dim] == 0 for dim in dims) and op != "sum":
        raise Skip("mean of nothing")
    if op == "norm":
        return f"({x}.square() + 0.1).norm({d.pick([1, 2, 3])}, dim={dims}, keepdim={keep})"
    return f"{x}.{op}({dims}, keepdim={keep})"


def spread(d: Draft) -> str:
    x = d.filled(d.real(1))
    return (
        f"{x}.{d.pick(['var', 'var', 'std'])}({d.dim(x)}, correction=0, keepdim={d.chance(0.5)})"
        if d.chance(0.5)
        else f"({x}.var({d.dim(x)}, correction=0) + 0.1).sqrt()"
    )


def extreme(d: Draft) -> str:
    x = d.distinct(d.filled(d.real(1)))
    form = d.pick(
        [
            "{}.amax({}, keepdim=True)",
            "{}.max({}).values",
            "{}.min({})[0]",
            "{}.argmax({})",
            "{}.argmin({}, keepdim=True)",
            "{}.amin({})",
            "{}.aminmax(dim={})[1]",
            "{}.median({})[0]",
            "{}.kthvalue(1, {}).values",
        ]
    )
    return form.format(x, d.dim(x)) if d.chance(0.85) else f"{x}.max()"


def product(d: Draft) -> str:
    x = d.real(1)
    return f"({x} * 0.5 + 1).{d.pick(['prod', 'cumprod'])}({d.dim(x)})"


def truths(d: Draft) -> str:
    x = d.away(d.real(1), 0.1)
    return f"({x} > 0.1).{d.pick(['any', 'all', 'sum', 'cumsum', 'count_nonzero'])}({d.dim(x)})"


def matmul(d: Draft) -> str:
    x = d.double(1)
    width = d[x].shape[-1]
    right = (width,) if d.chance(0.15) else (width, d.integer(1, 6))
    if d[x].ndim > 2 and d.chance(0.4):
        right = (*d[x].shape[:-2], width, d.integer(1, 4))
    return f"{x} @ {d.made('leaf', right)} / {max(width, 1)}"


def product_of_two(d: Draft) -> str:
    x = d.double(2)
    if d[x].ndim > 3:
        raise Skip("many dims")
    batch = "b" if d[x].ndim == 3 else ""
    form = d.pick(
        [
            f"torch.einsum('{batch}ij,{batch}kj->{batch}ik', {x}, {x})",
            f"{x} @ {x}.mT",
            f"{x}.mT @ {x}",
            f"torch.einsum('{batch}ij,{batch}ij->{batch}i', {x}, {x})",
            f"torch.einsum('...ij->...j', {x})",
        ]
    )
    return f"{form} / {max(d[x].shape[-1], d[x].shape[-2], 1)}"


def linear(d: Draft) -> str:
    x = d.double(1)
    width, out = d[x].shape[-1], d.integer(1, 6)
    weight = d.made("leaf", (out, width))
    bias = f", {d.made('leaf', (out,))}" if d.chance(0.6) else ""
    return f"F.linear({x}, {weight}{bias}) / {max(width, 1)}"


def addmm(d: Draft) -> str:
    x = d.double(2)
    if d[x].ndim != 2:
        raise Skip("not a matrix")
    rows, width = d[x].shape
    out = d.integer(1, 5)
    bias = d.made("leaf", (rows, out) if d.chance(0.5) else (out,))
    return f"torch.addmm({bias}, {x}, {d.made('leaf', (width, out))}, alpha=0.3)"


def soft(d: Draft) -> str:
    x = d.double(1)
    return f"{x}.{d.pick(['softmax', 'log_softmax', 'softmax', 'logcumsumexp'])}({d.dim(x)})"


def scanned(d: Draft) -> str:
    x = d.real(1)
    return f"{x}.cumsum({d.dim(x)}) / 4"


def ordered(d: Draft) -> str:
    x = d.distinct(d.filled(d.real(1)))
    dim = d.dim(x)
    k = d.integer(1, d[x].shape[dim])
    return d.pick(
        [
            f"{x}.sort({dim}).values",
            f"{x}.sort({dim}, descending=True).values",
            f"{x}.argsort({dim})",
            f"{x}.topk({k}, {dim}).values",
            f"{x}.topk({k}, {dim}, largest=False).indices",
            f"{x}.cummax({dim}).values",
        ]
    )


def normed(d: Draft) -> str:
    x = d.filled(d.double(1))
    last = d[x].shape[-1:]
    if last[0] < 2:
        raise Skip("nothing to norm")
    weight = d.made("leaf", last)
    if d.chance(0.5):
        return f"F.layer_norm({x}, {tuple(last)}, {weight}, eps=0.1)"
    return f"F.rms_norm({x}, {tuple(last)}, {weight}, eps=0.1)"


def loss(d: Draft) -> str:
    x = d.filled(d.double(2))
    if d[x].ndim != 2:
        raise Skip("not a matrix")
    rows, classes = d[x].shape
    target = d.const([d.integer(0, classes - 1) for _ in range(rows)])
    return f"F.cross_entropy({x}, {target}, reduction={d.pick(['mean', 'sum', 'none'])!r})"


def drawn(d: Draft) -> str:
    x = d.double()
    return f"F.dropout({x}, 0.3)" if d.chance(0.5) else f"{x} + torch.randn_like({x})"


def listed(d: Draft) -> str:
    x = d.double()
    y = d.any(lambda t: t.is_floating_point())
    form = d.pick(
        [
            f"torch._foreach_add([{x}, {y}], 0.5)",
            f"torch._foreach_mul([{x}, {y}], [2.0, 3.0])",
            f"torch._foreach_mul([{x}, {y}], [{x}, {y}])",
            f"torch._foreach_sub([{x}, {x}], [{x}, {x}.square()], alpha=2)",
            f"torch._foreach_addcmul([{x}, {y}], [{x}, {y}], [{x}, {y}], 0.5)",
            f"torch._foreach_neg([{y}, {x}])",
        ]
    )
    return f"{form}[{d.integer(0, 1)}]"


def norm_of_list(d: Draft) -> str:
    x = d.filled(d.double())
    return f"torch._foreach_norm([{x}, {x} * 2])[{d.integer(0, 1)}]"


def complexes(d: Draft) -> str:
    x = d.any(lambda t: t.is_complex())
    return d.pick(
        [
            "{}.real",
            "{}.imag",
            "{}.conj() * (1 + 2j)",
            "{}.mul(2 - 1j)",
            "torch.view_as_real({}).sum(-1)",
        ]
    ).format(x)


VALUES: tuple[Callable[[Draft], str], ...] = (
    unary, unary, scalar, scalar, binary, binary, binary, promoted, converted, compared, extremes,
    where, masked_fill, reduced, reduced, reduced, spread, extreme, product, truths, matmul, matmul,
    product_of_two, linear, addmm, soft, scanned, ordered, normed, loss, drawn, listed,
    norm_of_list, complexes,
)  # fmt: skip
