"""Norms, replicated biases and embeddings: gradients are sums over samples, and over blocks of a dim that ranks share.

A norm reads x: (B, S, D) or, under sequence parallelism, (B, S / ranks, D). The gradients of its
parameters are summed in each of the blocks of S of each sample, then in the tree over blocks,
ranks, and samples. The gradient of an embedding table is a tree over samples; a sample's own rows
are added in the order of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shoal_dtensor import DTensor
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

from .blocks import Measured, contiguous_block, entered, tree_of

# Over which ranks a dim of an activation is sharded, which, and how many of its blocks are here.
Cells = tuple[Comm | None, int, int]


class _ForTokens(Function):
    """A parameter (D...), expanded to all tokens of x: (B, ..., D...); its gradients are summed in cells."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shape: torch.Size, cells: Cells) -> Tensor:
        ctx.cells = cells
        ctx.shape = parameter.shape
        return parameter.detach().expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        shape = ctx.shape
        return (
            sum_of_cells(grad.flatten(grad.ndim - len(shape)), *ctx.cells).view(shape),
            None,
            None,
        )


def sum_of_cells(grad: Tensor, comm: Comm | None, dim: int, blocks: int) -> Tensor:
    """(B, ..., D) -> (D,): cells, then the tree over the blocks of each sample, over ranks, and over samples."""
    if dim > 1:
        grad = grad.movedim(dim, 1)
    # (2, 16, 32) in 8 blocks: (2, 8, 2, 32)
    cells = grad.reshape(grad.shape[0], blocks, -1, grad.shape[-1])
    of_samples = tree_sum(_CELL_SUMS(blocks, cells).transpose(0, 1))  # (8, 2, 32) -> (2, 32)
    return tree_sum(of_samples if comm is None else all_reduce(of_samples, comm))


def _sums_one_by_one(_: int, cells: Tensor) -> Tensor:
    # 16 of (2, 32): 16 of (32,)
    sums = [contiguous_block(cell).sum(0) for cell in cells.flatten(0, 1)]
    return torch.stack(sums).view(*cells.shape[:2], -1)


_CELL_SUMS = Measured(_sums_one_by_one, (lambda _, cells: cells.sum(2),))


def add_bias(lowered: Lowered, out: Tensor) -> Tensor:
    """The output of a row-wise layer plus its replicated bias."""
    bias = lowered.local("bias")["bias"]
    if bias is None:
        return out
    local = out.to_local(grad_placements=out.placements) if isinstance(out, DTensor) else out
    plus: Tensor = local + apply(
        _ForTokens, bias.to(local.dtype), local.shape, cells_of(lowered, local)
    )
    return (
        from_local(plus, out.placements[0], lowered.mesh, out.shape)
        if isinstance(out, DTensor)
        else plus
    )


def cells_of(lowered: Lowered, local: Tensor) -> Cells:
    """Which dim of an activation is divided, over which ranks it is sharded, and how many of the blocks are here."""
    arithmetic = entered()
    layout = lowered.port_out.desired
    # where nothing is sharded, that of SequenceParallel
    dim = getattr(layout, "dim", 1)
    dim = dim + local.ndim if dim < 0 else dim  # -2 of 3 dims: 1
    if not layout.is_replicate():
        what = f"{lowered.sharding.style}: dim {dim} of the activation"
        return (
            lowered.comm,
            dim,
            arithmetic.own_blocks(lowered.comm.size, local.shape[dim] * lowered.comm.size, what),
        )
    if local.ndim < 3 or local.shape[dim] % arithmetic.blocks:  # nothing that could be sharded
        return None, dim, 1
    # (2, 16, 32): 8 blocks of 2 tokens; (2, 12, 32) is one, as 12 % 8 = 4
    return None, dim, arithmetic.blocks


def _norm(module: Any, x: Tensor, p: Params) -> Tensor:
    """LayerNorm or RMSNorm with entries of weight and bias for every token, which no kernel of a norm takes."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    shape = module.normalized_shape
    eps = module.eps
    if isinstance(module, nn.LayerNorm):
        out = functional.layer_norm(wide, shape, None, None, eps)
    else:
        out = functional.rms_norm(
            wide, shape, None, torch.finfo(x.dtype).eps if eps is None else eps
        )
    weight = p["weight"]
    bias = p.get("bias")
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias).to(x.dtype)


def _normalized(lowered: Tokenwise, x: Tensor) -> Tensor:
    """The module's forward, whose parameters have an entry for every token."""
    cells = cells_of(lowered, x)
    names = [name for name, param in lowered.params.items() if param is not None]
    local: Any = lowered.local(*names) if names else {}
    tokens = {name: apply(_ForTokens, local[name], x.shape, cells) for name in names}
    absent = dict.fromkeys(lowered.params.keys() - names)
    compute = _norm if class_of(lowered.module) in (nn.LayerNorm, nn.RMSNorm) else lowered.compute
    try:
        return compute(lowered.module, x, tokens | absent)
    except RuntimeError as error:
        shapes = {name: tuple(param.shape) for name, param in local.items()}
        raise UnsupportedModuleError(
            f"invariant_arithmetic: {type(lowered.module).__name__} is taken for a norm, and its "
            "forward fails with an "
            f"entry of its parameters {shapes} for every token: {error}"
        ) from error


class InvariantTokenwise(Tokenwise):
    """A norm on this rank's shard of the sequence, in cells."""

    __slots__ = ()

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for param in call.module.parameters():
            if param.requires_grad:  # the sums of each sample
                yield Collective("all_reduce", call.output.shape[0] * nbytes(param), backward=True)

    def computed(self, local: Tensor) -> Tensor:
        return (
            _normalized(self, local)
            if local.numel()
            else self.compute(self.module, local, self.local(*self.params))
        )


class InvariantTokenwiseWhole(Tokenwise):
    """A norm that no style shards, in cells."""

    __slots__ = ()

    def __call__(self, input: Tensor) -> Tensor:
        return _normalized(self, input)


# --- embeddings -----------------------------------------------------------------------------------


class _RowsOfSamples(OwnRows):
    """`OwnRows`, of which the gradient of the table is a tree over samples."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only()
        (local_rows,) = ctx.saved_tensors
        rows, padding, _ = ctx.table
        tokens, grads = (
            (local_rows.unsqueeze(0), grad.unsqueeze(0))
            if local_rows.ndim < 2
            else (local_rows, grad)
        )
        return None, embedding_gradient(grads, tokens, rows, padding), None, None, None


def embedding_gradient(grads: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """(B, ..., D), (B, ...) -> (rows, D): the tree over samples; token `rows` counts for none."""

    def of_sample(i: int) -> Tensor:
        dense: Tensor = torch.ops.aten.embedding_dense_backward(
            grads[i].contiguous(), tokens[i], rows + 1, padding, False
        )
        # without the row of other ranks' tokens: (5, D) -> (4, D)
        return dense[:rows]

    return tree_of(len(tokens), of_sample)


def _look_up(lowered: Lowered, tokens: Tensor) -> Tensor:
    module: Any = lowered.module
    if module.scale_grad_by_freq or module.max_norm is not None or module.sparse:
        raise UnsupportedModuleError(
            f"invariant_arithmetic: {module} counts or changes rows over all samples "
            "(scale_grad_by_freq, max_norm, "
            "sparse), so its gradient is no sum over samples"
        )
    table: Any = lowered.local("weight")["weight"]
    first = 0
    if isinstance(lowered, RowEmbedding):  # which has checked the ids
        first = lowered.spec("weight").offset(0)
    else:
        check_ids(tokens, len(table))
    out: Tensor = apply(_RowsOfSamples, tokens, table, first, module.padding_idx, False)
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
