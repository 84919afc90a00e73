"""Sharding of losses.

A mean over even shards is the average of their means; a mean over uneven shards is all-reduced.
Negative log-likelihood also runs with sharded classes: each rank looks up the targets whose class
it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ...layout.spec import Spec
from ..language.local_ops import (
    all_reduce_traffic,
    all_reduced,
    bytes_of,
    check_bounds,
    check_values,
    functional,
    in_shard,
    mean_of_sums,
    mean_rows,
    sharding_axes,
    where_sharded,
    wide_dtype,
    with_arguments,
)
from ..language.notation import ELLIPSIS, factor_rows, parse, pointwise
from ..language.rule import (
    Check,
    Entry,
    LocalCall,
    LocalFunction,
    OpCall,
    P,
    R,
    Row,
    Rule,
    S,
    Table,
    backward,
    family,
)

NONE = 0
MEAN = 1
SUM = 2


def loss(call: OpCall) -> Iterator[Row]:
    """Yield elementwise rows if the loss is not reduced, else rows with a partial loss."""
    if call["reduction"] == NONE:
        yield from pointwise().rows(call)
        return
    inputs = ", ".join([ELLIPSIS] * len(call.tensors))
    for row in factor_rows(parse(f"{inputs} -> "), call.tensors, call.outputs):
        if call["reduction"] == MEAN:
            yield from mean_rows(call, row)
        else:
            yield row


def _loss(local_call: LocalCall) -> LocalFunction | None:
    """Run the operator itself on even shards, else add up this shard's sum / global count."""
    call = local_call.call
    axes: set[int] = set()
    if call["reduction"] == MEAN:
        for spec in local_call.inputs:
            axes.update(sharding_axes(spec))
    is_gradient = "grad_output" in call.places
    has_samples = "multi" in call.op.__name__
    partials = local_call.outputs[0].partials
    if all((axis, "avg") in partials for axis in axes):
        return None
    count = call["self"].shape[0] if has_samples else _broadcast_count(call)
    finish: Callable[[Tensor], Tensor] = _keep_part
    if not is_gradient:
        finish = mean_of_sums(local_call, tuple(sorted(axes)))
    if wide_dtype(call.outputs[0].dtype) is not call.outputs[0].dtype:
        return _loss_of_half_type(local_call, count, finish)
    has_nothing = 0 in local_call["self"].local_shape
    sum_of = with_arguments(call, reduction=SUM)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = sum_of(*args, **kwargs)
        total, *rest = [result] if isinstance(result, Tensor) else result
        # Some kernels do not initialize the sum of no samples.
        if has_nothing:
            total.zero_()
        # A gradient of the sum is divided by the global count too.
        total = finish(total.div_(count))
        return (total, *rest) if rest else total

    return run


def _keep_part(part: Tensor) -> Tensor:
    return part


def _broadcast_count(call: OpCall) -> int:
    """Return the number of elements of the operands broadcast together."""
    # `torch.broadcast_shapes` would import sympy. Dims are aligned at the last dim.
    by_dim = zip_longest(*[reversed(meta.shape) for meta in call.tensors], fillvalue=1)
    count = 1
    for sizes in by_dim:
        count *= next((n for n in sizes if n != 1), 1)
    return count


def _loss_of_half_type(
    local_call: LocalCall, count: int, finish: Callable[[Tensor], Tensor]
) -> LocalFunction:
    """Run `_loss` with sums in float32, for half types whose sums would overflow."""
    call = local_call.call
    spec = local_call["self"]
    if "grad_output" in call.places:
        mean_of = with_arguments(call, reduction=MEAN)
        has_samples = "multi" in call.op.__name__
        local_count = spec.local_shape[0] if has_samples else spec.local_shape.numel()
        # The gradient of the global mean is the gradient of this shard's mean * local count /
        # global count.
        return lambda *args, **kwargs: mean_of(*args, **kwargs).mul_(local_count / count)
    losses_of = with_arguments(call, reduction=NONE)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = losses_of(*args, **kwargs)
        losses, *rest = [result] if isinstance(result, Tensor) else result
        total = finish(losses.sum(dtype=torch.float32).div_(count))
        return (total, *rest) if rest else total

    return run


def sample_loss(call: OpCall) -> Iterator[Row]:
    """Yield rows of `multi_margin_loss` and the like: the batch may be sharded, classes may not."""
    if call["self"].ndim < 2:
        return
    is_backward = "grad_output" in call.places
    reduces = call["reduction"] != NONE
    inputs: dict[str, Entry] = {name: S(0) for name in call.places if name != "weight"}
    if is_backward and reduces:
        inputs["grad_output"] = R
    is_sum = reduces and not is_backward
    loss_entry = P("sum") if is_sum else S(0)
    row = call.row(inputs, out0=loss_entry, out=S(0))
    if call["reduction"] == MEAN and not is_backward:
        yield from mean_rows(call, row)
    else:
        yield row


def _class_dim(call: OpCall) -> int:
    return 0 if call["self"].ndim == 1 else 1


def nll_loss(call: OpCall) -> Iterator[Row]:
    """Yield rows for batch and spatial dims, then for classes.

    The total weight of the targets is all-reduced where it is returned.
    """
    classes = _class_dim(call)
    source = call["self"]
    reduces = call["reduction"] != NONE
    is_gradient = "grad_output" in call.places
    returns_weight = reduces or source.ndim == 1
    traffic = all_reduce_traffic(source.dtype.itemsize) if returns_weight else None
    both = all_reduce_traffic(bytes_of(*call.outputs))
    for d in range(source.ndim):
        # Example: scores of shape (N, C, H) have targets of shape (N, H).
        target = S(d - (d > classes))
        if d == classes:
            # Losses are all-reduced too, because `to_local` would show a partial sum as if it were
            # the loss.
            loss = S(d) if is_gradient else R
            summed = None if is_gradient else both
            yield call.row(self=S(d), weight=S(0), out0=loss, traffic=summed, ordered=True)
            continue
        if is_gradient:
            gradient = R if reduces else target
            yield call.row(grad_output=gradient, self=S(d), target=target, out=S(d))
            continue
        loss_of_shard: Entry = P("sum") if reduces else target
        row = call.row(self=S(d), target=target, out0=loss_of_shard, traffic=traffic)
        if call["reduction"] != MEAN:
            yield row
            continue
        averaged, all_reduced_mean = mean_rows(call, row)
        # As a partial average, the rank with most of the weight would hold several times the mean,
        # which may overflow half types. They are all-reduced.
        is_half = wide_dtype(source.dtype) is not source.dtype
        if not is_half:
            yield averaged
        yield all_reduced_mean


# a target that is not a position in a shard
_IGNORED = -100


def _target_check(call: OpCall) -> dict[str, list[Check]]:
    """Return the check that targets are classes or the ignored index."""
    ignored = call["ignore_index"]
    count = call["self"].shape[_class_dim(call)]

    def check(target: Tensor) -> None:
        is_class = (target >= 0) & (target < count)
        check_bounds(target, is_class | (target == ignored), count)

    return {"target": [check]}


def _targets_here(local_call: LocalCall, spec: Spec) -> Callable[[Tensor], Tensor]:
    """Return a function from targets to positions among this rank's classes.

    A target whose class is on another rank becomes `_IGNORED`.
    """
    call = local_call.call
    classes = _class_dim(call)
    ignored = call["ignore_index"]
    (check,) = _target_check(call)["target"]

    def run(target: Tensor) -> Tensor:
        check(target)
        # Targets may be bytes, which cannot be negative.
        position, is_here = in_shard(target.long(), spec, classes)
        return position.masked_fill(~is_here | (target == ignored), _IGNORED)

    return run


@where_sharded
def _nll_loss(local_call: LocalCall, spec: Spec, axes: tuple[int, ...]) -> LocalFunction:
    """Compute the losses of this shard; a mean divides them by the total weight of all shards."""
    call = local_call.call
    over_classes = sharding_axes(spec, (_class_dim(local_call.call),))
    over_samples = tuple(axis for axis in axes if axis not in over_classes)
    kernel = functional(call)
    targets_here = _targets_here(local_call, spec)
    finish = mean_of_sums(local_call, over_samples)
    reduces = call["reduction"] != NONE
    is_mean = call["reduction"] == MEAN
    dtype = call.outputs[0].dtype
    if is_mean and wide_dtype(dtype) is not dtype:
        return _mean_nll_of_half_type(local_call, axes, targets_here)

    def run(
        x: Tensor, target: Tensor, weight: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        reduction = SUM if reduces else NONE
        loss, total = kernel(x, targets_here(target), weight, reduction, _IGNORED)
        if reduces or x.ndim == 1:
            total = all_reduced(total, spec, axes)
        loss = all_reduced(loss, spec, over_classes)
        if is_mean:
            loss = finish(loss / total)
        return loss, total

    return run


def _mean_nll_of_half_type(
    local_call: LocalCall, axes: tuple[int, ...], targets_here: Callable[[Tensor], Tensor]
) -> LocalFunction:
    """Run `_nll_loss` with losses and weights in one all-reduce in float32.

    Sums of half types would overflow.
    """
    call = local_call.call
    spec = local_call.inputs[0]
    kernel = functional(call)
    dtype = call.outputs[0].dtype

    def run(
        x: Tensor, target: Tensor, weight: Tensor | None, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        local_target = targets_here(target)
        losses, _unused = kernel(x, local_target, None, NONE, _IGNORED)
        weights = (local_target != _IGNORED).float()
        if weight is not None and weight.numel():
            weights *= weight[local_target.clamp(min=0)]
        sums = torch.stack([(losses * weights).sum(), weights.sum()])
        loss, total = all_reduced(sums, spec, axes).unbind()
        return (loss / total).to(dtype), total.to(dtype)

    return run


def _nll_loss_backward(local_call: LocalCall) -> LocalFunction | None:
    """With sharded classes, compute the gradient for the targets whose class this rank has."""
    call = local_call.call
    spec = local_call.inputs[1]
    if not sharding_axes(spec, (_class_dim(call),)):
        return None
    back = with_arguments(call, ignore_index=_IGNORED)
    targets_here = _targets_here(local_call, spec)

    return lambda gradient, x, target, *args, **kwargs: back(
        gradient, x, targets_here(target), *args, **kwargs
    )


def _label_check(call: OpCall) -> dict[str, list[Check]]:
    """Return the check of the labels of `multi_margin_loss` and `multilabel_margin_loss`.

    In `multilabel_margin_loss`, the list of a sample's labels ends with -1.
    """
    count = call["self"].shape[-1]
    lowest = -1 if "multilabel" in call.op.__name__ else 0

    def check(target: Tensor) -> None:
        check_bounds(target, (target >= lowest) & (target < count), count)

    return {"target": [check]}


def _probability_check(call: OpCall) -> dict[str, list[Check]]:
    """Return the check that inputs of `binary_cross_entropy` are between 0 and 1."""

    def check(probabilities: Tensor) -> None:
        is_valid = (probabilities >= 0) & (probabilities <= 1)
        check_values(is_valid, f"{call.op}: all elements of input should be between 0 and 1")

    return {"self": [check]}


_LOSSES = "mse_loss smooth_l1_loss huber_loss soft_margin_loss"
_SAMPLE_LOSS = Rule(sample_loss, _loss, skip_empty=True, linear="grad_output", checks=_label_check)

LOSS: Table = family(
    {
        f"{_LOSSES} binary_cross_entropy_with_logits": Rule(loss, _loss, sizes=()),
        "binary_cross_entropy": Rule(loss, _loss, sizes=(), checks=_probability_check),
        backward(f"{_LOSSES} binary_cross_entropy"): Rule(
            pointwise(linear=(0,)).rows, _loss, sizes=()
        ),
        "nll_loss_forward nll_loss2d_forward": Rule(
            nll_loss, _nll_loss, sizes=(), checks=_target_check
        ),
        "nll_loss_backward nll_loss2d_backward": Rule(
            nll_loss, _nll_loss_backward, sizes=(), linear="grad_output"
        ),
    },
    unordered=True,
) | family(
    {
        "multi_margin_loss multilabel_margin_loss_forward": _SAMPLE_LOSS,
        "multi_margin_loss_backward multilabel_margin_loss_backward": _SAMPLE_LOSS,
    }
)
