"""Sharding of losses, on one mesh axis.

Elementwise losses sum their own part and divide by the global count.  Negative log-likelihood also runs with cut
classes: each rank looks up the targets that fall into its part.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..spec import TensorMeta
from .local import across, cutting, filling_out, replacing, zeros
from .notation import ELLIPSIS, factor_rows, parse, pointwise
from .rule import Entry, LocalCall, LocalFunction, OpCall, P, R, Row, Rule, S, Table
from .table import family

__all__ = ["LOSS"]

NONE, MEAN, SUM = 0, 1, 2

# -- elementwise losses --------------------------------------------------------------------------------------------


def _loss_rows(call: OpCall) -> list[Row]:
    """Without reduction elementwise; else every cut dim leaves a partial sum."""
    if call["reduction"] == NONE:
        return list(pointwise().rows(call))
    text = ", ".join([ELLIPSIS] * len(call.tensors)) + " -> "
    return factor_rows(parse(text), call.tensors, call.outputs)


def _loss(decided: LocalCall) -> LocalFunction | None:
    """A mean over cut elements: this rank's sum over the global count."""
    call = decided.call
    axes = {axis for spec in decided.inputs for axis in cutting(spec)}
    if call["reduction"] != MEAN or not axes:
        return None
    shapes = [meta.shape for meta in call.tensors]
    count = prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]  # torch gives it no types
    summed = replacing(call, reduction=SUM)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        total: Tensor = summed(*args, **kwargs)
        return total.div_(count)

    return run


def _loss_backward_rows(call: OpCall) -> list[Row]:
    return list(pointwise(linear=(0,)).rows(call))


def _loss_backward(decided: LocalCall) -> LocalFunction | None:
    call = decided.call
    axes = {axis for spec in decided.inputs for axis in cutting(spec)}
    if call["reduction"] != MEAN or not axes:
        return None
    count = prod(decided.outputs[0].shape)
    summed = replacing(call, reduction=SUM)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        total: Tensor = summed(*args, **kwargs)
        return total.div_(count)

    return run


# -- losses of one sample each ---------------------------------------------------------------------------------------


def _sample_rows(call: OpCall) -> list[Row]:
    """`multi_margin_loss` and the like: the batch may be cut; classes belong together."""
    source = call["self"]
    if source.ndim < 2:
        return []
    names = _nll_names(call)
    whole = call["reduction"] == NONE
    inputs = tuple(R if n == "weight" or (n == "grad_output" and not whole) else S(0) for n in names)
    made: Entry = S(0) if whole or "grad_output" in names else P("sum")
    rest = [S(0)] * (len(call.outputs) - 1)
    linear = [Row(tuple(P(o) if n == "grad_output" else R for n in names), (P(o),)) for o in ("sum", "avg")]
    return [Row(inputs, (made, *rest)), *(linear if "grad_output" in names else [])]


def _sample(decided: LocalCall) -> LocalFunction | None:
    """A mean over a cut batch: this rank's sum over the global number of samples."""
    call = decided.call
    if not any(cutting(spec) for spec in decided.inputs):
        return None
    if any(0 in spec.local_shape for spec in decided.inputs):
        return zeros(decided)
    if call["reduction"] != MEAN:
        return None
    count, summed = call["self"].shape[0], replacing(call, reduction=SUM)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = summed(*args, **kwargs)
        return result.div_(count) if isinstance(result, Tensor) else (result[0].div_(count), *result[1:])

    return run


# -- negative log-likelihood ---------------------------------------------------------------------------------------


def _class_dim(call: OpCall) -> int:
    return 0 if call["self"].ndim == 1 else 1


def _nll_names(call: OpCall) -> list[str]:
    order = [a.name for a in call.op._schema.arguments]
    return [name for name in order if isinstance(call.get(name), TensorMeta) and not _is_out(call, name)]


def _is_out(call: OpCall, name: str) -> bool:
    return any(a.name == name and a.is_out for a in call.op._schema.arguments)


def _target_dim(dim: int, classes: int) -> int:
    return dim if dim < classes else dim - 1


def _nll_rows(call: OpCall) -> list[Row]:
    """Rows of the batch and spatial dims, then of the classes."""
    names, classes, source = _nll_names(call), _class_dim(call), call["self"]
    whole = call["reduction"] == NONE
    rows = []
    for d in range(source.ndim):
        if d == classes:
            known: dict[str, Entry] = {"self": S(d), "weight": S(0)}
            made: tuple[Entry, ...] = (P("sum"), R)
        else:
            own = S(_target_dim(d, classes))
            known = {"self": S(d), "target": own}
            made = (own if whole else P("sum"), R)
        rows.append(Row(tuple(known.get(n, R) for n in names), made, traffic=8, ordered=d == classes))
    return rows


def _nll(decided: LocalCall) -> LocalFunction | None:
    """Loss and total weight of this rank's samples and classes; a mean is divided by the all-reduced total weight."""
    call = decided.call
    spec, classes = decided.inputs[0], _class_dim(call)
    axes = cutting(spec)
    if not axes:
        return None
    pick = _picker(decided, spec, classes, call["ignore_index"])
    reduction = call["reduction"]

    def run(x: Tensor, target: Tensor, weight: Tensor | None, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        losses, weights = pick(x, target, weight)
        if reduction == NONE:
            return losses, across(weights, spec, axes) if x.ndim == 1 else x.new_zeros(())
        total = across(weights.sum(), spec, axes)
        loss = losses.sum()
        return (loss / total if reduction == MEAN else loss), total

    return filling_out(call, run)


def _picker(
    decided: LocalCall, spec: Any, classes: int, ignored: int
) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """A function giving the loss and the weight of every target, zero where another rank has the class."""
    start, size = spec.offset(classes), spec.local_shape[classes]

    def run(x: Tensor, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        mine = target - start
        skipped = (mine < 0) | (mine >= size) | (target == ignored)
        if not size:
            zero = x.new_zeros(target.shape)
            return zero, zero
        mine = mine.masked_fill(skipped, 0)
        picked = x.gather(classes, mine.unsqueeze(classes)).squeeze(classes)
        weights = torch.ones_like(picked) if weight is None else weight[mine]
        weights = weights.masked_fill(skipped, 0)
        return (-picked * weights).masked_fill(skipped, 0), weights

    return run


def _nll_backward_rows(call: OpCall) -> list[Row]:
    names, classes, source = _nll_names(call), _class_dim(call), call["self"]
    whole = call["reduction"] == NONE
    rows = []
    for d in range(source.ndim):
        known: dict[str, Entry] = {"self": S(d)}
        if d == classes:
            known["weight"] = S(0)
        else:
            known["target"] = S(_target_dim(d, classes))
            if whole:
                known["grad_output"] = S(_target_dim(d, classes))
        rows.append(Row(tuple(known.get(n, R) for n in names), (S(d),), ordered=d == classes))
    return rows + [Row(tuple(P(op) if n == "grad_output" else R for n in names), (P(op),)) for op in ("sum", "avg")]


def _nll_backward(decided: LocalCall) -> LocalFunction | None:
    """With cut classes: the gradient of the targets that fall into this rank's part."""
    call = decided.call
    spec, classes = decided.inputs[1], _class_dim(call)
    if not cutting(spec, (classes,)):
        return None
    start, size = spec.offset(classes), spec.local_shape[classes]
    ignored, reduction = call["ignore_index"], call["reduction"]

    def run(gradient: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, *rest: Any, **_: Any) -> Tensor:
        result = torch.zeros_like(x)
        if not size:
            return result
        mine = target - start
        skipped = (mine < 0) | (mine >= size) | (target == ignored)
        mine = mine.masked_fill(skipped, 0)
        each = -gradient / rest[-1] if reduction == MEAN else -gradient
        values = each.expand(target.shape) if weight is None else each * weight[mine]
        values = values.masked_fill(skipped, 0).to(x.dtype)
        return result.scatter_(classes, mine.unsqueeze(classes), values.unsqueeze(classes))

    return filling_out(call, run)


LOSS: Table = family(
    {
        "mse_loss smooth_l1_loss huber_loss soft_margin_loss": Rule(_loss_rows, _loss, unordered=True),
        "binary_cross_entropy binary_cross_entropy_with_logits": Rule(_loss_rows, _loss, unordered=True),
        "multi_margin_loss multilabel_margin_loss_forward": Rule(_sample_rows, _sample),
        "multi_margin_loss_backward multilabel_margin_loss_backward": Rule(_sample_rows, _sample),
        "mse_loss_backward smooth_l1_loss_backward huber_loss_backward": Rule(
            _loss_backward_rows, _loss_backward, unordered=True
        ),
        "soft_margin_loss_backward binary_cross_entropy_backward": Rule(
            _loss_backward_rows, _loss_backward, unordered=True
        ),
        "nll_loss_forward nll_loss2d_forward": Rule(_nll_rows, _nll, unordered=True),
        "nll_loss_backward nll_loss2d_backward": Rule(_nll_backward_rows, _nll_backward, unordered=True),
    }
)
