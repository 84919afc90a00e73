"""Row-wise Linear whose reduction overlaps with its own product ("async TP"), on any backend.

The rows of the activation are cut into chunks: while the partial output of one chunk is on its way, the next
chunk is multiplied.  The values are those of the unchunked product; there are as many collectives as chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor
from shoal_mesh import Comm, all_reduce_, reduce_scatter

from .._torch import apply, autocast_dtype, is_compiling
from .forward import spec_of
from .regions import Where, gather_blocks
from .rows import RowLinear, row_backward, save_for_row

__all__ = ["OverlappedRow"]


class _OverlappedRow(Function):
    """x: S(-1), W: S(1), b: R -> y: R | S(d), chunk by chunk along dim 0."""

    @staticmethod
    def forward(  # noqa: PLR0913  # what autograd hands over
        ctx: Any,
        x: Tensor,
        weight: DTensor,
        bias: DTensor | None,
        where: Comm | Where,
        dtype: torch.dtype | None,
        chunks: int,
    ) -> Tensor:
        x, w = save_for_row(ctx, x, weight, bias, where, dtype)
        pending = []
        for piece in x.chunk(chunks):
            out = linear(piece, w)
            if isinstance(where, tuple):
                pending.append(reduce_scatter(out, where[0], where[1], async_op=True))
            else:
                pending.append(all_reduce_(out, where, async_op=True))
        whole = torch.cat([each.wait() for each in pending])
        if bias is not None:
            whole += bias._local_tensor
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if isinstance(ctx.where, tuple):
            grad = gather_blocks(grad.contiguous(), *ctx.where)
        return (*row_backward(ctx, grad), None, None, None)


class OverlappedRow(RowLinear):
    """Stand-in for a row-wise Linear of a style with `.overlapped(chunks)`."""

    __slots__ = ("chunks",)

    def resolve(self) -> None:
        super().resolve()
        chunks: Any = self.sharding.options["chunks"]
        self.chunks = chunks

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            return self.traced(input)  # a compiler orders collectives itself
        spec = spec_of(self.params["weight"], "weight")
        plain = not isinstance(input, DTensor) and self.direct_in and self.sharding.local_outputs
        where = self.target(list(input.shape), spec) if plain else None
        # Chunks are cut along dim 0, so a cut along dim 0 (or with sizes of its own) stays one piece.
        if where is None or input.ndim < 2 or (isinstance(where, tuple) and (where[1] == 0 or where[2] is not None)):
            return super().__call__(input)
        params = self.params
        dtype = autocast_dtype(input)
        out: Tensor = apply(_OverlappedRow, input, params["weight"], params["bias"], where, dtype, self.chunks)
        return out
