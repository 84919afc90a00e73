"""Lines at the edges.

They have values out of range, layouts passed on, settings that change, half numbers, watched calls.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .draft import Draft, Skip
from .shapes import SHAPES
from .values import VALUES

__all__ = ["EDGES"]

# Functions that make plain tensors inside of themselves, which a mode must not take for the user's.
COMPOSITES = (
    "F.one_hot(({0} > 0).long(), 3)",
    "torch.cov({0}.reshape(1, -1).expand(2, -1))",
    "torch.block_diag({0}.flatten(), {0}.flatten())",
    "torch.combinations({0}.flatten()[:4])",
    "torch.cartesian_prod({0}.flatten()[:3], {0}.flatten()[:2])",
    "torch.trapezoid({0}.flatten())",
    "{0}.flatten().nanquantile(0.3)",
    "F.gaussian_nll_loss({0}, {0}, {0}.abs() + 1)",
    "torch.isin({0}.sign(), {0}.sign().flatten()[:1])",
)
# Of an index `{1}` along dim 0 of a matrix; plain torch takes -1 in the last ones.
INDEXED = (
    "{0}.gather(0, {1}[:, None])",
    "{0}.scatter(0, {1}[:, None], 0.5)",
    "{0}.scatter_add(0, {1}[:, None], {0}[:1, :1].expand(len({1}), 1))",
    "{0}.index_select(0, {1})",
    "{0}.index_add(0, {1}, {0}[:1].expand(len({1}), -1))",
    "{0}.index_copy(0, {1}, {0}[:1].expand(len({1}), -1))",
    "F.embedding({1}, {0})",
    "{0}[{1}]",
    "{0}.take({1})",
    "{0}.index_fill(0, {1}, 2.0)",
)
# Of labels `{1}`, one for each row of a matrix.
LABELED = (
    "F.cross_entropy({0}, {1})",
    "F.cross_entropy({0}, {1}, label_smoothing=0.1)",
    "F.nll_loss({0}.log_softmax(1), {1})",
    "{0}.log_softmax(1).gather(1, {1}[:, None])",
    "F.multi_margin_loss({0}, {1})",
    "F.one_hot({1}, {0}.shape[1])",
)
# Of half numbers near the end of their range, `{0}` at most 60,000 or at least 1e-6.
AVERAGED = (
    "{0}.mean()",
    "{0}.mean({1})",
    "F.l1_loss({0}, {0} * 0.5)",
    "F.mse_loss({0}, {0} + 1)",
    "{0}.softmax({1})",
    "{0}.logsumexp({1})",
    "place({0}, [Replicate()] * {2}).mean({1}, keepdim=True)",
)
WIDENED = (
    "{} / 3",
    "({} * 2.5).softmax(0)",
    "{}.sin()",
    "{}.sqrt().nan_to_num()",
    "{} * 0.5",
    "torch.where({} > 0, 1.5, 0.5)",
    "{}.sum() / 7",
    "torch.true_divide({}, 2)",
)


def tried(d: Draft) -> str:
    """A call with an index or label that may be out of range, on all ranks that have the value."""
    x = d.filled(d.double(2))
    if d[x].ndim != 2:
        raise Skip("not a matrix")
    rows, columns = d[x].shape
    replicated = ", ".join(["Replicate()"] * len(d.mesh))
    by_label = d.chance(0.5)
    size = columns if by_label else rows
    count = rows if by_label else d.integer(1, 4)
    numbers = [
        d.pick([-1, -100, size, -size - 1, 0, size - 1])
        if d.chance(0.3)
        else d.integer(0, size - 1)
        for _ in range(count)
    ]
    form = d.pick(LABELED if by_label else INDEXED)
    call = form.format(x, f"const({numbers}, [{replicated}])")
    return f"{d.name()} = tried(lambda: {call})"


def passed(d: Draft) -> str:
    """The placements of one tensor, passed to another call."""
    x = d.any(lambda t: t.is_floating_point())
    y = d.any(lambda t: t.shape == d[x].shape)
    way = d.pick(
        ["rebuilt({0})", "spread({0}, {1})", "placed({0}, {1})", "filled({0}, {1})", "mapped({0})"]
    )
    return f"{d.name()} = {way.format(x, y)}"


def watched(d: Draft) -> str:
    """A call that a dispatch mode watches."""
    if d.chance(0.5):
        made = d.pick(COMPOSITES).format(d.filled(d.double()))
    else:
        made = d.pick(VALUES if d.chance(0.5) else SHAPES)(d)
    return f"{d.name()} = watched(lambda: {made})"


def near(d: Draft) -> str:
    """A mean of half numbers that is in range, though their sum may not be."""
    shape = (*d.shape(d.integer(0, 1)), d.integer(1, 8))
    if not all(shape):
        raise Skip("empty")
    layout = d.layout_of(shape, partial=d.chance(0.3))
    scale = d.pick([40000.0, 20000.0, 1e-6])
    half = d.pick(["float16", "bfloat16"])
    made = f"near({d.integer(0, 9)}, {shape}, {layout}, scale={scale}, dtype=torch.{half})"
    call = d.pick(AVERAGED).format("h", d.integer(0, len(shape) - 1), len(d.mesh))
    factor = 2.0**-14 if scale > 1 else 2.0**14
    return f"{d.name()} = (lambda h: {call} * {factor})({made})"


def switched(d: Draft) -> str:
    """Another default dtype, and what follows from it."""
    if d.chance(0.5):
        return f"default(torch.{d.pick(['float32', 'float64'])})"
    x = d.any(lambda t: t.dtype == torch.int64) if d.chance(0.6) else d.made("ints", d.shape())
    return f"{d.name()} = {d.pick(WIDENED).format(x)}"


def deterministic(d: Draft) -> str:
    """Calls for which torch has other kernels where they have to be deterministic."""
    made = d.pick(VALUES if d.chance(0.5) else SHAPES)(d)
    return f"with deterministic(): {d.name()} = {made}"


EDGES: tuple[Callable[[Draft], str], ...] = (
    tried, tried, passed, passed, watched, watched, near, near, switched, deterministic,
)  # fmt: skip
