"""Losses on logits with a sharded vocabulary (class dim); no rank ever holds full logits.

Every loss uses one differentiable step, `RowStatisticsFunction`. The forward of this step runs two
collectives: an all-reduce of the maximum of each row, and an all-reduce of three sums for each row.
The rest of a loss (weights, smoothing, ignored rows, means) is plain arithmetic on the results.

Logits are DTensors sharded along the class dim on one mesh axis (shards may differ in
size), or plain local shards together with `vocab`. Other axes may shard the rows. Targets and
weights are DTensors, or plain and equal on all ranks; results are plain: sums and means are equal
on all ranks, and unreduced losses have one entry for each of this rank's rows.

Examples in comments have one row and two ranks: `0 2 | 1 3` are the logits 0 and 2 on rank 0, and
the logits 1 and 3 on rank 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor, full_tensor
from shoal_dtensor.errors import ArgumentValueError, LayoutError
from shoal_dtensor.internal import first_order_only
from shoal_mesh import all_reduce, differentiable
from shoal_mesh.internal import Along, all_reduce_

from .._torch import traced_apply
from .logits import LogitRows, Vocab, check_targets, local_logits

Reduction = Literal["none", "mean", "sum"]


class RowStatistics(NamedTuple):
    """Sums over all classes, for each row of logits.

    Attributes:
        log_sum_exp: logarithm of the sum of the exponentials.
        picked: the logit of the row's target.
        weighted: the sum of the logits, weighted by `q`.
    """

    log_sum_exp: Tensor
    picked: Tensor
    weighted: Tensor


def _widen(values: Tensor) -> Tensor:
    """Return half-precision values in float32, others as they are."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


class RowStatisticsFunction(Function):
    """Differentiable map from the logits of all ranks to the `RowStatistics` of each row.

    The layouts are over the ranks of the classes:

    | argument or result                 | shape                        | layout                |
    | ---------------------------------- | ---------------------------- | --------------------- |
    | `x`, the logits                    | (rows, classes of this rank) | sharded along classes |
    | `target`, the class of each row    | (rows,)                      | replicated            |
    | `q`, weights in the sum `weighted` | (classes of this rank,), or  | sharded along classes |
    |                                    | (rows, classes of this rank) |                       |
    | each of the `RowStatistics`        | (rows,)                      | replicated            |

    Without `target` (None), `picked` is zero. Without `q` (None), `weighted` is zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor | None, q: Tensor | None, vocab: Vocab) -> Any:
        work = _widen(x)
        rows = x.shape[:-1]
        # This rank's maximum of each row, (rows,). Example: 0 2 | 1 3 -> 2 on rank 0, 3 on rank 1.
        peak = work.amax(-1) if vocab.own_classes else work.new_full(rows, -torch.inf)
        all_reduce_(peak, vocab.comm, "max")
        # If all logits of a row are -inf, its peak is -inf, and `work - peak` would be NaN. With a
        # peak of 0 instead, the sum of exponentials is 0 and its logarithm is -inf, as on one
        # device.
        peak = peak.masked_fill_(peak == -torch.inf, 0)
        total = vocab.sum_of_classes((work - peak.unsqueeze(-1)).exp_())
        zeros = work.new_zeros(rows)
        picked = zeros
        index = None
        inside = None
        if target is not None:
            index, inside = local_classes(target, vocab)
            picked = pick_logits(work, index, inside)
        weighted = zeros if q is None else vocab.sum_of_classes(work * q)
        # (3, rows), in one message
        sums = all_reduce(torch.stack([total, picked, weighted]), vocab.comm)
        # Example: 0 2 | 1 3 with the peak 3 -> log(1.553) + 3 = 3.440.
        lse = sums[0].log().add_(peak)
        ctx.save_for_backward(x, lse, index, inside, q)
        ctx.set_materialize_grads(False)
        return lse, sums[1], sums[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_order_only("losses on a sharded vocabulary have first derivatives only")
        x, lse, index, inside, q = ctx.saved_tensors
        shifted = _widen(x) - lse.unsqueeze(-1)
        dx = logit_gradient(shifted, grads, index, inside, q=q).to(x.dtype)
        return dx, None, None, None


def logit_gradient(
    shifted: Tensor,
    grads: Sequence[Tensor | None],
    index: Tensor | None,
    inside: Tensor,
    q: Tensor | None,
) -> Tensor:
    """Compute the gradient of logits from the gradients of their statistics, in place.

    The result replaces the logits minus their log-sum-exp in memory.
    """
    lse_grad, picked_grad, weighted_grad = grads
    # The gradient of `log_sum_exp` is the softmax. Example: 0 2 | 1 3 -> 0.03 0.24 | 0.09 0.64.
    if lse_grad is None:
        dz = shifted.zero_()
    else:
        dz = shifted.exp_().mul_(lse_grad.unsqueeze(-1))
    if picked_grad is not None and index is not None and dz.shape[-1]:
        addend = picked_grad.unsqueeze(-1) * inside.unsqueeze(-1)
        dz.scatter_add_(-1, index.unsqueeze(-1), addend)
    if weighted_grad is not None and q is not None:
        dz.addcmul_(weighted_grad.unsqueeze(-1).to(dz.dtype), q.to(dz.dtype))
    return dz


def local_classes(target: Tensor, vocab: Vocab) -> tuple[Tensor, Tensor]:
    """Return each target's index among this rank's classes, and whether this rank holds the target.

    The index is 0 for a target on another rank.
    """
    # Example for the rank that has the classes 4 to 7: targets 5, 1, 9 -> local indices 1, -3, 5.
    local = target - vocab.first
    # Example, continued: local indices 1, -3, 5 -> True, False, False.
    inside = (local >= 0) & (local < vocab.own_classes)
    return local.masked_fill(~inside, 0), inside


def pick_logits(x: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """Return one logit per row, at an index of `local_classes`; zero for classes of other ranks."""
    if x.shape[-1] == 0:
        # This rank has no classes. The sum of each row is zero and depends on `x`, so that autograd
        # runs the same backward here, with its collectives, as on the other ranks.
        return x.sum(-1)
    picked = x.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(~inside, 0)


def log_sum_exp(x: Tensor, vocab: Vocab) -> Tensor:
    """Return the log-sum-exp over all classes for each row of this rank's logits (classes last).

    Args:
        x: this rank's logits `(..., classes of this rank)`.
        vocab: the classes of each rank.
    """
    lse: Tensor = traced_apply(RowStatisticsFunction, x, None, None, vocab)[0]
    return lse


def cross_entropy(  # noqa: PLR0913  # torch's signature
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    vocab: Vocab | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the full logits.

    Args:
        input: logits `(C,)`, `(N, C)` or `(N, C, d1, ...)`, C sharded over ranks.
        target: class indices, or probabilities of the full shape (a DTensor sharded like the logits
            is not moved).
        weight: one per class, `(C,)`, replicated.
        ignore_index: class index of rows that enter no sum.
        reduction: "none", "mean" or "sum".
        label_smoothing: fraction of the uniform distribution in the target, 0 to 1.
        vocab: the classes of each rank. Plain local logits need it. For DTensors, only `vocab.real`
            is used: the number of classes that are not padding.

    Returns:
        The loss, plain and equal on all ranks ("none": of this rank's rows); in float32 for
        half-precision logits.

    Raises:
        LayoutError: if probabilities need a gradient.
        OperatorIndexError: a target is neither a class nor `ignore_index`; on all ranks that share
            its row.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
        ...     print(cross_entropy(logits, torch.tensor([0, 3])))
        tensor(1.3863)
    """
    class_dim = 0 if input.ndim == 1 else 1
    x, classes, rows = local_logits(input, vocab, class_dim)
    weights = full_tensor(weight)
    if target.is_floating_point():
        q = _probabilities(input, target, classes, rows, class_dim=class_dim)
        # Example for a smoothing of 0.1 and 4 classes: probability 1 -> 0.925, 0 -> 0.025.
        if label_smoothing > 0:
            q = q * (1 - label_smoothing) + label_smoothing / classes.total
        if weights is not None:
            q = q * classes.shard(weights)
        mass = all_reduce(classes.sum_of_classes(q), classes.comm)
        lse, _, weighted = traced_apply(RowStatisticsFunction, x, None, q, classes)
        # Example for one rank: logits 0 2 and probabilities 1 0 -> log-sum-exp 2.127, mass 1,
        # weighted sum 0 -> loss 2.127 * 1 - 0 = 2.127.
        loss = lse * mass - weighted
        return reduce_losses(loss, _row_count(loss, rows), reduction, rows)
    labels = rows.shard(target)
    check_targets(labels, classes, ignore_index)
    class_weights = None
    if label_smoothing > 0:
        class_weights = (
            x.new_ones(classes.own_classes) if weights is None else classes.shard(weights)
        )
    statistics = RowStatistics(
        *traced_apply(RowStatisticsFunction, x, labels, class_weights, classes)
    )
    losses = losses_of_labels(
        statistics,
        labels,
        weights,
        ignore_index,
        smoothing=label_smoothing,
        z_loss=0.0,
        classes=classes,
    )
    return reduce_losses(losses.losses, losses.weight, reduction, rows)


def _probabilities(
    logits: Tensor, target: Tensor, classes: Vocab, rows: LogitRows, *, class_dim: int
) -> Tensor:
    """Return this rank's rows and classes of probability targets; the classes come last."""
    if target.requires_grad:
        raise LayoutError(
            "cross_entropy on a sharded vocabulary cannot compute the gradient of probability "
            "targets; detach the targets"
        )
    if isinstance(target, DTensor) and isinstance(logits, DTensor):
        local = _redistribute_like(logits, target).to_local()
        return local.movedim(class_dim, -1).narrow(-1, 0, classes.own_classes)
    return classes.shard(rows.shard(target.movedim(class_dim, -1)))


def _row_count(loss: Tensor, rows: LogitRows) -> int:
    """Return the number of rows of all ranks, at least one."""
    shape = loss.shape if rows.shape is None else rows.shape
    return max(prod(shape), 1)


class RowLosses(NamedTuple):
    """The losses of this rank's rows, and the rows' total weight in a mean."""

    losses: Tensor
    weight: Tensor


def losses_of_labels(  # noqa: PLR0913  # everything that a row's loss depends on
    statistics: RowStatistics,
    labels: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    classes: Vocab,
) -> RowLosses:
    """Return the loss of each row, and the rows' total weight in a mean.

    Rows with `ignore_index` have neither a loss nor a weight.

    Args:
        statistics: the statistics of each row. With `smoothing`, `statistics.weighted` is the sum
            of the row's logits, each multiplied by the weight of its class.
        labels: the class of each row.
        weights: the weight of each class; None for weights of 1.
        ignore_index: the label of ignored rows.
        smoothing: fraction of the uniform distribution in the target.
        z_loss: factor of the squared log-sum-exp, which is added to the loss.
        classes: the classes of each rank.
    """
    lse, picked, weighted = statistics
    ignored = labels == ignore_index
    if weights is None:
        target_weights = torch.ones_like(lse)
    else:
        target_weights = weights[labels.masked_fill(ignored, 0)].to(lse.dtype)
    target_weights = target_weights.masked_fill(ignored, 0)
    loss = (lse - picked) * target_weights
    if smoothing > 0:
        mass = classes.total if weights is None else weights[: classes.total].sum()
        uniform_loss = lse * mass - weighted
        loss = (1 - smoothing) * loss + (smoothing / classes.total) * uniform_loss
    if z_loss:
        loss = loss + z_loss * lse.square() * target_weights
    return RowLosses(loss.masked_fill(ignored, 0), target_weights.sum())


def _redistribute_like(logits: DTensor, tensor: DTensor) -> DTensor:
    """Redistribute a tensor to the mesh and the layout of the logits."""
    return tensor.redistribute(
        logits.device_mesh, logits.placements, shard_order=logits.shard_order
    )


def reduce_losses(
    loss: Tensor, weight: Tensor | int, reduction: Reduction, rows: LogitRows
) -> Tensor:
    """Reduce the losses of this rank's rows over all rows.

    `weight` is the weight of this rank's rows (a tensor), or of all rows.
    """
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ArgumentValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
    total = rows.total(loss)
    if reduction == "sum":
        return total
    if isinstance(weight, Tensor) and rows.comm is not None:
        weight = all_reduce(weight, rows.comm)
    return total / weight


def log_prob(
    logits: Tensor, tokens: Tensor, *, dim: int = -1, vocab: Vocab | None = None
) -> Tensor:
    """Return the log-probability of one given token per row.

    Args:
        logits: sharded along `dim`.
        tokens: class indices, of the logits' shape without `dim`; results are of this rank's rows.
        dim: the class dim.
        vocab: the classes of each rank, for plain local logits.

    Raises:
        OperatorIndexError: a token is not a class; on all ranks that share its row.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
        ...     print(log_prob(logits, torch.tensor([0, 3])))
        tensor([-1.3863, -1.3863])
    """
    x, classes, rows = local_logits(logits, vocab, dim)
    local_tokens = rows.shard(tokens)
    check_targets(local_tokens, classes)
    statistics = RowStatistics(*traced_apply(RowStatisticsFunction, x, local_tokens, None, classes))
    return statistics.picked - statistics.log_sum_exp


def log_softmax(logits: Tensor, *, dim: int = -1, vocab: Vocab | None = None) -> Tensor:
    """Return this rank's shard of the log-probabilities, sharded like the logits (plain).

    The incoming gradient must be the gradient of this shard.

    Args:
        logits: sharded along `dim`.
        dim: the class dim.
        vocab: the classes of each rank, for plain local logits.
    """
    x, classes, _ = local_logits(logits, vocab, dim)
    out: Tensor = traced_apply(LogSoftmaxFunction, x, classes)
    return out.movedim(-1, dim)


class LogSoftmaxFunction(Function):
    """Differentiable map from logits to log-probabilities, both sharded along the last dim.

    The backward runs one all-reduce, of one number per row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, vocab: Vocab) -> Tensor:
        lse = log_sum_exp(x, vocab)
        out = (x - lse.unsqueeze(-1)).to(x.dtype)
        ctx.save_for_backward(out)
        ctx.vocab = vocab
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only("losses on a sharded vocabulary have first derivatives only")
        (out,) = ctx.saved_tensors
        local_total = ctx.vocab.sum_of_classes(grad).unsqueeze(-1)
        total = all_reduce(local_total, ctx.vocab.comm)
        return grad - out.exp() * total, None


def nll_loss(
    log_probs: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    vocab: Vocab | None = None,
) -> Tensor:
    """Compute `torch.nn.functional.nll_loss` of the full log-probabilities.

    Their shape is `(N, C)` or `(N, C, d1, ...)`.

    Args:
        log_probs: sharded along dim 1, or dim 0 of a vector.
        target: class indices, of the log-probabilities' shape without their class dim.
        weight: the weight of each class, `(C,)`.
        ignore_index: rows with this target have neither a loss nor a weight.
        reduction: "none", "mean" or "sum".
        vocab: the classes of each rank, for plain local log-probabilities.

    Raises:
        OperatorIndexError: a target is neither a class nor `ignore_index`; on all ranks that share
            its row.
    """
    class_dim = 0 if log_probs.ndim == 1 else 1
    x, classes, rows = local_logits(log_probs, vocab, class_dim)
    labels = rows.shard(target)
    check_targets(labels, classes, ignore_index)
    index, inside = local_classes(labels, classes)
    local_picked = pick_logits(x, index, inside)
    picked = differentiable.all_reduce_replicated(local_picked, classes.comm)
    # In half precision the sum over many rows may overflow although the mean does not.
    wide = _widen(picked)
    # Log-probabilities are logits whose log-sum-exp is zero.
    statistics = RowStatistics(torch.zeros_like(wide), picked=wide, weighted=wide)
    losses = losses_of_labels(
        statistics,
        labels,
        full_tensor(weight),
        ignore_index,
        smoothing=0.0,
        z_loss=0.0,
        classes=classes,
    )
    return reduce_losses(losses.losses, losses.weight, reduction, rows).to(picked.dtype)


def kl_div(
    logits: Tensor,
    target_logits: Tensor,
    *,
    dim: int = -1,
    reduction: Reduction | Literal["batchmean"] = "batchmean",
    vocab: Vocab | None = None,
) -> Tensor:
    """Compute KL(softmax(target_logits) || softmax(logits)) of logits with equal shardings.

    Gradients go to `logits` only (distillation).

    Args:
        logits: logits of the student, sharded along `dim`.
        target_logits: logits of the teacher, with the same sharding. They are treated as constant.
        dim: the class dim.
        reduction: "none" gives one value per row; "batchmean" divides the sum by the first dim,
            "mean" by the rows.
        vocab: the classes of each rank, for plain local logits.
    """
    x, classes, rows = local_logits(logits, vocab, dim)
    if isinstance(logits, DTensor) and isinstance(target_logits, DTensor):
        target_logits = _redistribute_like(logits, target_logits)
    teacher = local_logits(target_logits.detach(), vocab, dim).values
    teacher_lse = log_sum_exp(teacher, classes)
    q = (teacher - teacher_lse.unsqueeze(-1)).exp()
    entropy = all_reduce(classes.sum_of_classes(torch.special.entr(q)), classes.comm)
    lse, _, weighted = traced_apply(RowStatisticsFunction, x, None, q, classes)
    # Example for one rank: logits 0 2 and probabilities 1/2 1/2 of the teacher -> log-sum-exp
    # 2.127, weighted sum 1, entropy 0.693 -> divergence 2.127 - 1 - 0.693 = 0.434.
    divergence = lse - weighted - entropy
    if reduction == "batchmean":
        # Example: rows of shape (8, 16) -> the sum is divided by 8.
        shape = divergence.shape if rows.shape is None else rows.shape
        return reduce_losses(divergence, shape[0], "mean", rows)
    # Example: rows of shape (8, 16) -> the sum is divided by 128.
    return reduce_losses(divergence, _row_count(divergence, rows), reduction, rows)


def load_balance(probabilities: Tensor, chosen: Tensor, along: Along | None = None) -> Tensor:
    """Return a router's imbalance over the tokens of all ranks: 1 if experts are filled evenly.

    The value is `experts * sum over experts of (share of choices * mean probability)`, as in the
    Switch Transformer. Shares and means are over the tokens of all ranks, so the value is not the
    mean of the ranks' own values. Every rank gets the same value. Gradients are the gradients of
    the sum of the ranks' values: they are correct if data parallelism averages them over the same
    ranks. If data parallelism sums them, divide the loss by the number of ranks.

    Args:
        probabilities: `(*tokens, experts)` of this rank's tokens, after the softmax.
        chosen: `(*tokens, choices)` the experts that each token goes to.
        along: a communicator, or (mesh, axes), whose ranks have tokens of their own; None: this
            rank has all tokens.

    Raises:
        LayoutError: if the probabilities and the choices differ in their tokens.

    Example:
        >>> load_balance(torch.full((4, 2), 0.5), torch.tensor([[0], [1], [0], [1]]))
        tensor(1.)
    """
    if probabilities.shape[:-1] != chosen.shape[:-1]:
        raise LayoutError(
            "load_balance: expected probabilities (*tokens, experts) and choices (*tokens, "
            f"choices), got {tuple(probabilities.shape)} and {tuple(chosen.shape)}"
        )
    experts = probabilities.shape[-1]
    # Counts in bfloat16 cannot exceed 256: 256 + 1 is 256.
    rows = _widen(probabilities.reshape(-1, experts))
    # choices of each expert; the last element is the number of tokens
    counts = torch.zeros(experts + 1, dtype=rows.dtype, device=rows.device)
    choices = chosen.reshape(-1)
    counts[:experts].index_add_(0, choices, torch.ones_like(choices, dtype=rows.dtype))
    counts[experts] = len(rows)
    total = rows.sum(0)
    if along is not None:
        counts = all_reduce(counts, along)
        total = differentiable.all_reduce(total, along)
    tokens = counts[experts].clamp(min=1)
    shares = counts[:experts] / (tokens * max(chosen.shape[-1], 1))
    mean_probabilities = total / tokens
    imbalance = experts * (shares * mean_probabilities).sum()
    return imbalance.to(probabilities.dtype)
