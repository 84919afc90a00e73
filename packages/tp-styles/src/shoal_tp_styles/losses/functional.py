"""Losses on logits with a sharded vocabulary (class dim); no rank ever holds full logits.

Every loss uses one differentiable step, `_RowStatistics`, with two collectives of one number per
row and sum; the rest of a loss (weights, smoothing, ignored rows, means) is plain arithmetic on the
results. Logits are DTensors sharded along the class dim on one mesh axis (shards may differ in
size), or plain local shards together with `vocab`. Other axes may shard the rows. Targets and
weights are DTensors, or plain and equal on all ranks; results are plain: sums and means are equal
on all ranks, and unreduced losses have one entry for each of this rank's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import first_order_only
from shoal_mesh import all_reduce, differentiable
from shoal_mesh.internal import Along, all_reduce_

from .._torch import traced_apply
from .logits import LogitRows, Vocab, check_targets, local_logits, plain

Reduction = Literal["none", "mean", "sum"]


class _RowStatistics(Function):
    """Function x: S(-1) over classes -> log-sum-exp, x[target], sum of q * x of each row; all R.

    Target and q (per class, or per row and class) may be None; their sums are then zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor | None, q: Tensor | None, vocab: Vocab) -> Any:
        work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        rows = x.shape[:-1]
        # (rows,); of logits 0 2 | 1 3: 2 and 3
        peak = work.amax(-1) if vocab.own else work.new_full(rows, -torch.inf)
        all_reduce_(peak, vocab.comm, "max")
        # A row of -inf only has no finite peak; zero keeps its sum at zero and its log at -inf, as
        # on one device.
        peak = peak.masked_fill_(peak == -torch.inf, 0)
        zero = work.new_zeros(rows)
        sums = [vocab.sum_of_classes((work - peak.unsqueeze(-1)).exp_())]
        own = None if target is None else own_classes(target, vocab)
        sums.append(zero if own is None else pick(work, *own))
        sums.append(zero if q is None else vocab.sum_of_classes(work * q))
        stacked = all_reduce(torch.stack(sums), vocab.comm)  # (3, rows), in one message
        # logits 0 2 | 1 3, peak 3: log(1.553) + 3 = 3.440
        lse = stacked[0].log().add_(peak)
        ctx.save_for_backward(x, lse, *(own or (None, None)), q)
        ctx.set_materialize_grads(False)
        return lse, stacked[1], stacked[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_order_only("losses on a sharded vocabulary have first derivatives only")
        x, lse, index, inside, q = ctx.saved_tensors
        work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (
            logit_gradient(work - lse.unsqueeze(-1), grads, index, inside, q=q).to(x.dtype),
            None,
            None,
            None,
        )


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
    to_lse, to_picked, to_q = (None if grad is None else grad.unsqueeze(-1) for grad in grads)
    # softmax; of 0 2 | 1 3: 0.03, 0.24 | ...
    dz = shifted.zero_() if to_lse is None else shifted.exp_().mul_(to_lse)
    if to_picked is not None and index is not None and dz.shape[-1]:
        dz.scatter_add_(-1, index.unsqueeze(-1), to_picked * inside.unsqueeze(-1))
    if to_q is not None and q is not None:
        dz.addcmul_(to_q.to(dz.dtype), q.to(dz.dtype))
    return dz


def own_classes(target: Tensor, vocab: Vocab) -> tuple[Tensor, Tensor]:
    """Return each target's index among this rank's classes, and whether this rank holds the target.

    The index is 0 for a target on another rank.
    """
    # 5, 1 and 9 on the rank with 4:8: 1, -3, 5
    local = target - vocab.first
    # of 1, -3, 5 with 4 classes here: True, False, False
    inside = (local >= 0) & (local < vocab.own)
    return local.masked_fill(~inside, 0), inside


def pick(x: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """Return one logit per row, at an index of `own_classes`; zero for classes of other ranks."""
    if x.shape[-1] == 0:
        # zeros, whose backward runs on all ranks
        return x.sum(-1)
    return x.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0)


def log_sum_exp(x: Tensor, vocab: Vocab) -> Tensor:
    """Return the log-sum-exp over all classes for each row of this rank's logits (classes last).

    Args:
        x: this rank's logits `(..., classes of this rank)`.
        vocab: the classes of each rank.
    """
    lse: Tensor = traced_apply(_RowStatistics, x, None, None, vocab)[0]
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
        vocab: the classes of each rank, for plain local logits (or how many are real, where there
            is padding).

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
        ...     logits = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Shard(1)])
        ...     print(cross_entropy(logits, torch.tensor([0, 3])))
        tensor(1.3863)
    """
    class_dim = 0 if input.ndim == 1 else 1
    x, classes, rows = local_logits(input, vocab, class_dim)
    weights = plain(weight)
    q = None
    if target.is_floating_point():
        if target.requires_grad:
            raise LayoutError(
                "cross_entropy on a sharded vocabulary: no gradient of probability targets; detach "
                "them"
            )
        if isinstance(target, DTensor) and isinstance(input, DTensor):
            q = (
                _placed_as(input, target)
                .to_local()
                .movedim(class_dim, -1)
                .narrow(-1, 0, classes.own)
            )
        else:
            q = classes.shard(rows.shard(target.movedim(class_dim, -1)))
        # 0.1 of 4 classes: 1 -> 0.925, 0 -> 0.025
        if label_smoothing > 0:
            q = q * (1 - label_smoothing) + label_smoothing / classes.total
        if weights is not None:
            q = q * classes.shard(weights)
        mass = all_reduce(classes.sum_of_classes(q), classes.comm)
        lse, _, by_q = traced_apply(_RowStatistics, x, None, q, classes)
        # q 1, 0 for logits 0 2: 2.127 * 1 - 0 = 2.127
        loss = lse * mass - by_q
        return reduced(
            loss, max(prod(loss.shape if rows.shape is None else rows.shape), 1), reduction, rows
        )
    labels = rows.shard(target)
    check_targets(labels, classes, ignore_index)
    if label_smoothing > 0:
        q = x.new_ones(classes.own) if weights is None else classes.shard(weights)
    statistics = traced_apply(_RowStatistics, x, labels, q, classes)
    losses = of_labels(
        statistics,
        labels,
        weights,
        ignore_index,
        smoothing=label_smoothing,
        z_loss=0.0,
        classes=classes,
    )
    return reduced(*losses, reduction, rows)


def of_labels(  # noqa: PLR0913  # everything that a row's loss depends on
    statistics: tuple[Tensor, Tensor, Tensor],
    labels: Tensor,
    weights: Tensor | None,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    classes: Vocab,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and the rows' total weight in a mean.

    Rows with `ignore_index` have neither a loss nor a weight.

    `statistics` holds for each row the log-sum-exp, the label's logit, and the sum of all logits
    with the weights of the classes.
    """
    lse, picked, total = statistics
    ignored = labels == ignore_index
    of_target = (
        torch.ones_like(lse)
        if weights is None
        else weights[labels.masked_fill(ignored, 0)].to(lse.dtype)
    )
    of_target = of_target.masked_fill(ignored, 0)
    loss = (lse - picked) * of_target
    if smoothing > 0:
        mass = classes.total if weights is None else weights[: classes.total].sum()
        loss = (1 - smoothing) * loss + (smoothing / classes.total) * (lse * mass - total)
    if z_loss:
        loss = loss + z_loss * lse.square() * of_target
    return loss.masked_fill(ignored, 0), of_target.sum()


def _placed_as(logits: DTensor, tensor: DTensor) -> DTensor:
    return tensor.redistribute(
        logits.device_mesh, logits.placements, shard_order=logits.shard_order
    )


def reduced(loss: Tensor, weight: Tensor | int, reduction: Reduction, rows: LogitRows) -> Tensor:
    """Reduce the losses of this rank's rows over all rows.

    `weight` is the weight of this rank's rows (a tensor), or of all rows.
    """
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'none', 'mean' or 'sum', got {reduction!r}")
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
        ...     logits = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Shard(1)])
        ...     print(log_prob(logits, torch.tensor([0, 3])))
        tensor([-1.3863, -1.3863])
    """
    x, classes, rows = local_logits(logits, vocab, dim)
    own_tokens = rows.shard(tokens)
    check_targets(own_tokens, classes)
    lse, picked, _ = traced_apply(_RowStatistics, x, own_tokens, None, classes)
    return picked - lse  # type: ignore[no-any-return]  # of a traced function


def log_softmax(logits: Tensor, *, dim: int = -1, vocab: Vocab | None = None) -> Tensor:
    """Return this rank's shard of the log-probabilities, sharded like the logits (plain).

    The incoming gradient must be the gradient of this shard.

    Args:
        logits: sharded along `dim`.
        dim: the class dim.
        vocab: the classes of each rank, for plain local logits.
    """
    x, classes, _ = local_logits(logits, vocab, dim)
    out: Tensor = traced_apply(_LogSoftmax, x, classes)
    return out.movedim(-1, dim)


class _LogSoftmax(Function):
    """Function x: S(-1) -> log-probabilities: S(-1).

    Backward: one all-reduce of a number per row.
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
        total = all_reduce(ctx.vocab.sum_of_classes(grad).unsqueeze(-1), ctx.vocab.comm)
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
        weight: of each class `(C,)`.
        ignore_index: rows with this target count nothing.
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
    picked = differentiable.all_reduce_replicated(
        pick(x, *own_classes(labels, classes)), classes.comm
    )
    # The sum of half types over many rows may leave the range where the mean does not.
    wide = picked.float() if picked.dtype in (torch.float16, torch.bfloat16) else picked
    # Log-probabilities are logits whose log-sum-exp is zero.
    statistics = torch.zeros_like(wide), wide, wide
    losses, weights = of_labels(
        statistics,
        labels,
        plain(weight),
        ignore_index,
        smoothing=0.0,
        z_loss=0.0,
        classes=classes,
    )
    return reduced(losses, weights, reduction, rows).to(picked.dtype)


def kl_div(
    logits: Tensor,
    target_logits: Tensor,
    *,
    dim: int = -1,
    reduction: Reduction | Literal["batchmean"] = "batchmean",
    vocab: Vocab | None = None,
) -> Tensor:
    """Compute KL(softmax(target_logits) || softmax(logits)) of logits that are sharded alike.

    Gradients go to `logits` only (distillation).

    Args:
        logits: logits of the student, sharded along `dim`.
        target_logits: logits of the teacher, sharded alike; treated as constant.
        dim: the class dim.
        reduction: "none" gives one value per row; "batchmean" divides the sum by the first dim,
            "mean" by the rows.
        vocab: the classes of each rank, for plain local logits.
    """
    x, classes, rows = local_logits(logits, vocab, dim)
    if isinstance(logits, DTensor) and isinstance(target_logits, DTensor):
        target_logits = _placed_as(logits, target_logits)
    teacher, _, _ = local_logits(target_logits.detach(), vocab, dim)
    lse_t = log_sum_exp(teacher, classes)
    log_q = teacher - lse_t.unsqueeze(-1)
    q = log_q.exp()
    entropy = all_reduce(classes.sum_of_classes(torch.special.entr(q)), classes.comm)
    lse, _, by_q = traced_apply(_RowStatistics, x, None, q, classes)
    # q 1/2, 1/2 for logits 0 2: 2.127 - 1 - 0.693 = 0.434
    divergence = lse - by_q - entropy
    shape = divergence.shape if rows.shape is None else rows.shape
    if reduction == "batchmean":
        return reduced(divergence, shape[0], "mean", rows)  # (8, 16) rows: by 8
    return reduced(divergence, max(prod(shape), 1), reduction, rows)  # (8, 16) rows: by 128


def load_balance(probabilities: Tensor, chosen: Tensor, along: Along | None = None) -> Tensor:
    """Return a router's imbalance over the tokens of all ranks: 1 if experts are filled evenly.

    `experts * sum over experts of (share of choices * mean probability)`, as in the Switch
    Transformer; shares and means are taken over all tokens; the mean of the ranks' own losses would
    differ. Every rank gets the same value. Gradients are the gradients of the sum of the ranks'
    values: they are correct if data parallelism averages them over the same ranks; if it sums them,
    divide the loss by the number of ranks.

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
    rows = probabilities.reshape(-1, experts)
    # In bfloat16 a count stops at 256.
    rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    # choices of each; the last is tokens
    shares = torch.zeros(experts + 1, dtype=rows.dtype, device=rows.device)
    shares[:experts].index_add_(
        0, chosen.reshape(-1), torch.ones_like(chosen.reshape(-1), dtype=rows.dtype)
    )
    shares[experts] = len(rows)
    total = rows.sum(0)
    if along is not None:
        shares, total = all_reduce(shares, along), differentiable.all_reduce(total, along)
    tokens = shares[experts].clamp(min=1)
    shares_of_choices = shares[:experts] / (tokens * max(chosen.shape[-1], 1))
    return (experts * (shares_of_choices * (total / tokens)).sum()).to(probabilities.dtype)
