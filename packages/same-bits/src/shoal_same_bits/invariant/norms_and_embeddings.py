"""Norms, replicated biases and embeddings in invariant arithmetic: gradients are sums in a tree.

A norm reads activations (B, S, D): B samples of S tokens with D features. Under sequence
parallelism, a rank has (B, S / ranks, D). `invariant_arithmetic(blocks=...)` divides S into blocks.
A cell is one block of one sample. The gradients of the parameters are summed in each cell, then in
the tree over blocks, ranks, and samples.

The gradient of an embedding table is a tree over samples. Within a sample, rows are added in the
order of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor, Shard, StridedShard
from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import apply, first_order_only
from shoal_mesh import Comm, all_reduce
from shoal_mesh.internal import tree_sum
from shoal_tp_styles import Collective, Lowered, ModuleCall
from shoal_tp_styles.internal import (
    ColumnEmbedding,
    OwnRows,
    Params,
    RowEmbedding,
    Tokenwise,
    check_ids,
    class_of,
    from_local,
    nbytes,
)

from .blocks import Measured, contiguous_block, required_arithmetic, tree_of


class Cells(NamedTuple):
    """The division of one dim of an activation into blocks.

    Attributes:
        comm: the ranks that shard the dim; None if it is not sharded.
        dim: the dim that is divided.
        blocks: the number of blocks that this rank has.
    """

    comm: Comm | None
    dim: int
    blocks: int


class _ForTokens(Function):
    """Expansion of a parameter to all tokens; the gradient is summed in cells.

    The parameter may have several dims. For one of shape (D,) the result is (B, ..., D).
    """

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shape: torch.Size, cells: Cells) -> Tensor:
        ctx.cells = cells
        ctx.shape = parameter.shape
        return parameter.detach().expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        # Example: for a parameter (4, 8), (B, S, 4, 8) -> (B, S, 32).
        first_dim_of_parameter = grad.ndim - len(ctx.shape)
        grad_of_features = grad.flatten(first_dim_of_parameter)
        cells = ctx.cells
        total = sum_of_cells(grad_of_features, cells.comm, cells.dim, cells.blocks)
        return total.view(ctx.shape), None, None


def sum_of_cells(grad: Tensor, comm: Comm | None, dim: int, blocks: int) -> Tensor:
    """Sum in cells, then in the tree over blocks, ranks, and samples, (B, ..., D) -> (D,).

    Args:
        grad: the gradient for each token.
        comm: the ranks that shard `dim`; None if it is not sharded.
        dim: the dim that is divided into blocks.
        blocks: the number of blocks that this rank has.
    """
    # The blocks divide dim 1. If a style shards dim 0, its ranks have other samples, and dim 1 of
    # the samples is divided all the same.
    if dim > 1:
        grad = grad.movedim(dim, 1)
    # The comments below are for a gradient (2, 16, 32) in 8 blocks, with cells (2, 8, 2, 32).
    cells = grad.reshape(grad.shape[0], blocks, -1, grad.shape[-1])
    # (2, 8, 32), one sum for each sample and block
    cell_sums = _CELL_SUMS(blocks, cells)
    # `tree_sum` adds over dim 0: (8, 2, 32) -> (2, 32), one sum for each sample.
    of_samples = tree_sum(cell_sums.transpose(0, 1))
    if comm is not None:
        of_samples = all_reduce(of_samples, comm)
    return tree_sum(of_samples)


def _sum_cells_one_by_one(_: int, cells: Tensor) -> Tensor:
    """Return the sums of cells of S tokens, (B, blocks, S, D) -> (B, blocks, D)."""
    # Example: (2, 8, 2, 32) has 16 cells of shape (2, 32); each of their sums has the shape (32,).
    sums = [contiguous_block(cell).sum(0) for cell in cells.flatten(0, 1)]
    return torch.stack(sums).view(*cells.shape[:2], -1)


def _sum_cells_at_once(_: int, cells: Tensor) -> Tensor:
    return cells.sum(2)


# A call uses `_sum_cells_at_once` if it has the bits of `_sum_cells_one_by_one` for tensors of this
# shape. Both get the number of blocks first, as all forms of a `Measured`, but the cells have it in
# their shape.
_CELL_SUMS = Measured(_sum_cells_one_by_one, (_sum_cells_at_once,))


def add_bias(lowered: Lowered, out: Tensor) -> Tensor:
    """Add the replicated bias of a row-wise layer to its output."""
    bias = lowered.local("bias")["bias"]
    if bias is None:
        return out
    local = out
    if isinstance(out, DTensor):
        local = out.to_local(grad_placements=out.placements)
    cells = divide_into_cells(lowered, local)
    bias_of_tokens = apply(_ForTokens, bias.to(local.dtype), local.shape, cells)
    total: Tensor = local + bias_of_tokens
    if isinstance(out, DTensor):
        return from_local(total, out.placements[0], lowered.mesh, out.shape)
    return total


def divide_into_cells(lowered: Lowered, local: Tensor) -> Cells:
    """Return how the output of a module is divided into cells."""
    arithmetic = required_arithmetic()
    layout = lowered.port_out.desired
    # SequenceParallel shards dim 1. A replicated output is divided in the same way.
    dim = 1
    if isinstance(layout, Shard | StridedShard):
        dim = layout.dim + local.ndim if layout.dim < 0 else layout.dim
    if not layout.is_replicate():
        comm = lowered.comm
        size = local.shape[dim] * comm.size
        dim_name = f"{lowered.sharding.style}: dim {dim} of the activation"
        blocks = arithmetic.own_blocks(comm.size, size, dim_name)
        return Cells(comm, dim, blocks)
    # Example with 8 blocks: a sample of (2, 16, 32) has 8 cells of 2 tokens. 12 tokens cannot be
    # divided into 8 blocks, so the mode refuses to shard them, on any mesh. Therefore a sample of
    # (2, 12, 32) is one cell.
    could_be_sharded = local.ndim >= 3 and local.shape[dim] % arithmetic.blocks == 0
    return Cells(None, dim, arithmetic.blocks if could_be_sharded else 1)


def _norm(module: Any, x: Tensor, params: Params) -> Tensor:
    """Compute LayerNorm or RMSNorm with a weight and a bias for each token.

    The kernels of torch accept only a weight and a bias for all tokens.
    """
    wide = x.float() if x.dtype.itemsize < 4 else x
    shape = module.normalized_shape
    eps = module.eps
    if isinstance(module, nn.LayerNorm):
        out = functional.layer_norm(wide, shape, None, None, eps)
    else:
        if eps is None:
            eps = torch.finfo(x.dtype).eps
        out = functional.rms_norm(wide, shape, None, eps)
    weight = params["weight"]
    if weight is not None:
        out = out * weight
    bias = params.get("bias")
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def _normalize(lowered: Tokenwise, x: Tensor) -> Tensor:
    """Run the module's forward with parameters that are expanded to all tokens."""
    cells = divide_into_cells(lowered, x)
    names = [name for name, param in lowered.params.items() if param is not None]
    local: Any = lowered.local(*names) if names else {}
    # An absent parameter, such as the bias of `LayerNorm(bias=False)`, stays None.
    params: dict[str, Any] = dict.fromkeys(lowered.params)
    for name in names:
        params[name] = apply(_ForTokens, local[name], x.shape, cells)
    is_of_torch = class_of(lowered.module) in (nn.LayerNorm, nn.RMSNorm)
    compute = _norm if is_of_torch else lowered.compute
    try:
        return compute(lowered.module, x, params)
    except RuntimeError as error:
        shapes = {name: tuple(param.shape) for name, param in local.items()}
        raise UnsupportedModuleError(
            f"invariant_arithmetic: {type(lowered.module).__name__} looks like a norm, but its "
            f"forward fails when its parameters {shapes} are expanded to one entry per token: "
            f"{error}. Replace the module, or leave the mode for this model"
        ) from error


class InvariantTokenwise(Tokenwise):
    """A norm on this rank's shard of the sequence; its gradients are summed in cells."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for param in call.module.parameters():
            if param.requires_grad:
                # Each sample has a tree of its own, so the ranks reduce a gradient for each sample.
                samples = call.output.shape[0]
                yield Collective("all_reduce", samples * nbytes(param), backward=True)

    def compute_tokens(self, local: Tensor) -> Tensor:
        if not local.numel():
            # The shards of all ranks are equally large, so no rank has a token or a cell to sum.
            return self.compute(self.module, local, self.local(*self.params))
        return _normalize(self, local)


class InvariantTokenwiseWhole(Tokenwise):
    """A norm that no style shards; its gradients are summed in cells."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        return _normalize(self, input)


# --- embeddings -----------------------------------------------------------------------------------


class _RowsOfSamples(OwnRows):
    """Look-up of rows as in `OwnRows`, but the gradient of the table is a tree over samples."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (local_rows,) = ctx.saved_tensors
        # `OwnRows.forward` keeps the number of rows of the local table, the local padding row, and
        # `scale_grad_by_freq`, which `_look_up` refuses.
        rows, padding, _ = ctx.table
        if local_rows.ndim < 2:
            # Tokens without a batch dim are one sample.
            local_rows = local_rows.unsqueeze(0)
            grad = grad.unsqueeze(0)
        return None, embedding_gradient(grad, local_rows, rows, padding), None, None, None


def embedding_gradient(grads: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """Return the gradient of a table, a tree over samples, (B, ..., D) and (B, ...) -> (rows, D).

    Args:
        grads: gradients of the rows that were looked up, (B, ..., D).
        tokens: the rows that were looked up, (B, ...), as indices 0 to `rows` - 1 of this rank's
            shard. The index `rows` is the mark of a token whose row is on another rank; its
            gradient is left out.
        rows: the number of rows of this rank's shard of the table.
        padding: the row without a gradient; -1 if there is none.
    """

    def of_sample(i: int) -> Tensor:
        grad = grads[i].contiguous()
        dense_backward = torch.ops.aten.embedding_dense_backward
        dense: Tensor = dense_backward(grad, tokens[i], rows + 1, padding, False)
        # Leave out the row of the tokens of other ranks: (rows + 1, D) -> (rows, D).
        return dense[:rows]

    return tree_of(len(tokens), of_sample)


def _look_up(lowered: Lowered, tokens: Tensor) -> Tensor:
    """Return the rows of tokens.

    Raise UnsupportedModuleError for options that depend on the whole batch.
    """
    module: Any = lowered.module
    if module.scale_grad_by_freq or module.max_norm is not None or module.sparse:
        raise UnsupportedModuleError(
            f"invariant_arithmetic: {module} counts or changes rows over all samples "
            "(scale_grad_by_freq, max_norm, sparse), so its gradient is not a sum over samples. "
            "Use an Embedding without these options"
        )
    table: Any = lowered.local("weight")["weight"]
    first_own_row = 0
    if isinstance(lowered, RowEmbedding):
        # `RowEmbedding.__call__` has checked the ids.
        first_own_row = lowered.spec("weight").offset(0)
    else:
        check_ids(tokens, len(table))
    # autograd functions take no keywords: the last argument is `scale_grad_by_freq`
    out: Tensor = apply(_RowsOfSamples, tokens, table, first_own_row, module.padding_idx, False)
    return out


class InvariantRowEmbedding(RowEmbedding):
    """An embedding whose vocabulary is sharded."""

    __slots__ = ()
    look_up = _look_up


class InvariantColumnEmbedding(ColumnEmbedding):
    """An embedding whose features are sharded."""

    __slots__ = ()
    look_up = _look_up


class InvariantEmbedding(Lowered):
    """An embedding that no style shards."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        return _look_up(self, input)
