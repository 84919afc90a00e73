"""`linear_cross_entropy`: the last product and the loss as one function, a block of rows at a time.

Logits are the largest tensor of a training step: 8,192 tokens of 128,000 classes take 4 GB in
float32, and their gradient takes 4 GB more. Here logits exist for one block of rows at a time. The
operands and one number per row are saved for backward, which computes the blocks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shoal_dtensor import DTensor, Partial, full_tensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import first_order_only
from shoal_mesh import all_reduce
from shoal_mesh.internal import all_reduce_

from .._torch import autocast_dtype, traced_apply
from .functional import (
    Reduction,
    RowStatistics,
    local_classes,
    logit_gradient,
    losses_of_labels,
    pick_logits,
    reduce_losses,
)
from .logits import LogitRows, Vocab, check_targets

# Logits of a block of rows: 16 MiB in float32.
BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class _LogitBlocks:
    """The operands and options that all blocks of rows share.

    Attributes:
        vocab: the classes of each rank.
        cap: logits are `cap * tanh(logits / cap)`; None for no bound.
        size: number of rows whose logits exist at a time.
    """

    vocab: Vocab
    cap: float | None
    size: int

    def slices(self, rows: int) -> list[slice]:
        """Return the slices of the blocks of so many rows."""
        return [slice(start, start + self.size) for start in range(0, rows, self.size)]

    def logits(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Compute logits (rows, own classes) in the dtype of the statistics, at least float32."""
        z = torch.nn.functional.linear(x, w, b)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        if self.cap is None:
            return z
        return z.div_(self.cap).tanh_().mul_(self.cap)


class LinearStatisticsFunction(Function):
    """Differentiable map from rows and a sharded Linear to the `RowStatistics` of its logits.

    The layouts are over the ranks of the classes:

    | argument or result                  | shape                   | layout                    |
    | ----------------------------------- | ----------------------- | ------------------------- |
    | `x`, the rows                       | (rows, features)        | replicated                |
    | `w`, the weight                     | (classes of this rank,  | sharded along the classes |
    |                                     | features)               |                           |
    | `b`, the bias; None for none        | (classes of this rank,) | sharded along the classes |
    | `target`, the class of each row     | (rows,)                 | replicated                |
    | `q`, weights in the sum `weighted`; | (classes of this rank,) | sharded along the classes |
    | None: the sum is zero               |                         |                           |
    | each of the `RowStatistics`         | (rows,)                 | replicated                |

    The backward runs one all-reduce, of the gradient of `x`.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        target: Tensor,
        q: Tensor | None,
        blocks: _LogitBlocks,
    ) -> Any:
        index, inside = local_classes(target, blocks.vocab)
        parts = []
        for rows in blocks.slices(x.shape[0]):
            z = blocks.logits(x[rows], w, b)
            picked = pick_logits(z, index[rows], inside[rows])
            weighted = z.new_zeros(z.shape[0]) if q is None else z @ q.to(z.dtype)
            parts.append(torch.stack([z.logsumexp(-1), picked, weighted]))
        if parts:
            sums = torch.cat(parts, 1)
        else:
            dtype = torch.promote_types(x.dtype, torch.float32)
            sums = x.new_zeros((3, 0), dtype=dtype)
        comm = blocks.vocab.comm
        peak = all_reduce(sums[0], comm, "max")
        # as on one device, a row of -inf has the log-sum -inf
        peak = peak.masked_fill_(peak == -torch.inf, 0)
        sums[0] = (sums[0] - peak).exp_()
        total, picked, weighted = all_reduce_(sums, comm)
        lse = total.log().add_(peak)
        ctx.save_for_backward(x, w, b, index, inside, q, lse)
        ctx.blocks = blocks
        ctx.set_materialize_grads(False)
        return lse, picked.clone(), weighted.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        first_order_only(
            "linear_cross_entropy cannot be differentiated twice: call backward() without "
            "create_graph=True"
        )
        x, w, b, index, inside, q, lse = ctx.saved_tensors
        blocks: _LogitBlocks = ctx.blocks
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = torch.zeros_like(x) if needs_x else None
        # Summed over blocks in float32 at least: after hundreds of blocks, a sum in bfloat16 would
        # not change by the next block.
        dw = torch.zeros_like(w, dtype=lse.dtype) if needs_w else None
        db = torch.zeros_like(b, dtype=lse.dtype) if needs_b else None
        for rows in blocks.slices(x.shape[0]):
            z = blocks.logits(x[rows], w, b)
            slope = None if blocks.cap is None else 1 - (z / blocks.cap).square_()
            row_grads = [None if grad is None else grad[rows] for grad in grads]
            # The gradient of the capped logits, in the memory of the logits.
            shifted = z.sub_(lse[rows].unsqueeze(-1))
            dz = logit_gradient(shifted, row_grads, index[rows], inside[rows], q=q)
            if slope is not None:
                dz = dz.mul_(slope)
            if db is not None:
                db += dz.sum(0)
            dz = dz.to(x.dtype)
            if dx is not None:
                torch.mm(dz, w, out=dx[rows])
            if dw is not None and dw.dtype is dz.dtype:
                dw.addmm_(dz.t(), x[rows])
            elif dw is not None:
                dw += dz.t() @ x[rows]
        if dx is not None:
            all_reduce_(dx, blocks.vocab.comm)
        if dw is not None:
            dw = dw.to(w.dtype)
        if db is not None:
            db = db.to(b.dtype)
        return dx, dw, db, None, None, None


def linear_cross_entropy(  # noqa: PLR0913  # torch's signature, and options of language models
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_cap: float | None = None,
    block_rows: int | None = None,
    vocab: Vocab | None = None,
) -> Tensor:
    """Compute the cross entropy of `linear(input, linear_weight, linear_bias)` without the logits.

    The classes are sharded.

    The forward runs two all-reduces of up to three numbers per row, the backward one all-reduce of
    the shape of `input`.

    Args:
        input: (..., features): plain and equal on the ranks that shard the classes, or a DTensor
            whose rows other mesh axes may shard.
        linear_weight: (classes, features), a DTensor sharded by classes on one mesh axis; or this
            rank's rows of it.
        target: (...) class indices.
        linear_bias: (classes,), sharded like the weight.
        weight: one per class, (classes,), replicated.
        reduction: "none", "mean" or "sum".
        ignore_index: class index of rows that enter no sum; -100 if left out.
        label_smoothing: fraction of the uniform distribution in the target, 0 to 1.
        z_loss: factor of the squared log-sum-exp of each row, which is added to the row's loss
            (weighted and ignored like the row).
        logit_cap: bound of the logits, `cap * tanh(logits / cap)`.
        block_rows: number of rows whose logits exist at a time; rows with about 4 million logits if
            left out.
        vocab: the classes of each rank, for plain local weights.

    Returns:
        The loss, plain and equal on all ranks ("none": of this rank's rows); in float32 for
        half-precision inputs.

    Raises:
        LayoutError: if the classes are not sharded on exactly one mesh axis, or shapes do not fit.
        OperatorIndexError: a target is neither a class nor `ignore_index`; on all ranks that share
            its row.

    Example:
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(1):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     head = distribute_tensor(torch.zeros(4, 8), mesh, [Shard(0)])
        ...     print(linear_cross_entropy(torch.randn(2, 8), head, torch.tensor([0, 3])))
        tensor(1.3863)
    """
    _check_operands(input, linear_weight, target)
    if vocab is None or isinstance(linear_weight, DTensor):
        real = None if vocab is None else vocab.real
        vocab = Vocab.of(linear_weight, 0, real)
    x, w, b, rows = _operands(input, linear_weight, linear_bias, vocab)
    ignored = -100 if ignore_index is None else ignore_index
    labels = rows.shard(target)
    weights = full_tensor(weight)
    check_targets(labels, vocab, ignored)
    q = None
    if label_smoothing:
        q = w.new_ones(vocab.own_classes) if weights is None else vocab.shard(weights)
    block_size = block_rows or max(1, BLOCK // max(vocab.own_classes, 1))
    blocks = _LogitBlocks(vocab, logit_cap, block_size)
    flat_x = x.reshape(-1, x.shape[-1])
    flat = traced_apply(LinearStatisticsFunction, flat_x, w, b, labels.reshape(-1), q, blocks)
    statistics = RowStatistics(*[values.view(labels.shape) for values in flat])
    losses = losses_of_labels(
        statistics,
        labels,
        weights,
        ignored,
        smoothing=label_smoothing,
        z_loss=z_loss,
        classes=vocab,
    )
    return reduce_losses(losses.losses, losses.weight, reduction, rows)


def _check_operands(input: Tensor, weight: Tensor, target: Tensor) -> None:
    """Refuse shapes that do not fit together, and probabilities."""
    has_rows = input.shape[:-1] == target.shape
    has_features = weight.ndim == 2 and weight.shape[1] == input.shape[-1]
    if not has_rows or not has_features:
        raise LayoutError(
            "linear_cross_entropy: expected input (..., features), linear_weight (classes, "
            f"features) and class indices (...); got {tuple(input.shape)}, {tuple(weight.shape)} "
            f"and {tuple(target.shape)}"
        )
    if target.is_floating_point():
        raise LayoutError(
            "linear_cross_entropy: the target must be class indices; for probabilities call "
            "cross_entropy on the logits"
        )


class _Operands(NamedTuple):
    """The local operands in the dtype of the product, and the layout of the rows.

    Attributes:
        input: this rank's rows, with all features.
        weight: this rank's classes without padding.
        bias: this rank's classes without padding.
        rows: the layout of the rows.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: LogitRows


def _operands(input: Tensor, weight: Tensor, bias: Tensor | None, vocab: Vocab) -> _Operands:
    """Return the local operands, and the layout of the rows."""
    if isinstance(input, DTensor):
        input = _with_all_features(input, vocab)
    rows = LogitRows.of(input, -1)
    if isinstance(input, DTensor):
        input = input.to_local()
    row_axes = {axis for _, axes in rows.order for axis in axes}
    w = _local_classes_of(weight, vocab, row_axes)
    b = None if bias is None else _local_classes_of(bias, vocab, row_axes)
    dtype = autocast_dtype(input)
    if dtype is not None:
        input = input.to(dtype)
        w = w.to(dtype)
        b = None if b is None else b.to(dtype)
    return _Operands(input, w, b, rows)


def _with_all_features(input: DTensor, vocab: Vocab) -> DTensor:
    """Redistribute the input so that the ranks of the classes have the same complete rows."""
    mesh = input.device_mesh
    gathered_axes = []
    for axis, placement in enumerate(input.placements):
        shards_rows = placement.is_shard() and not placement.is_shard(input.ndim - 1)
        shards_classes = mesh.comm(axis).ranks == vocab.comm.ranks
        if not shards_rows or shards_classes:
            gathered_axes.append(axis)
    return input.redistribute(placements=input.spec.without_axes(gathered_axes).placements)


def _local_classes_of(param: Tensor, vocab: Vocab, row_axes: set[int]) -> Tensor:
    """Return the shard of a weight or bias that has one row per class.

    Ranks with other rows hold other summands of the gradient of a replicated parameter.
    """
    if isinstance(param, DTensor):
        grads = [
            Partial() if axis in row_axes else placement
            for axis, placement in enumerate(param.placements)
        ]
        param = param.to_local(grad_placements=grads)
    return param.narrow(0, 0, vocab.own_classes)
