"""`invariant_arithmetic`: the mode in which a model computes the same bits on any number of ranks.

Sums over what ranks may share are taken over a fixed number of blocks and added in one binary tree. With 8 blocks, a
rank of four holds two of them: it computes each block alone, by a kernel that sees the same shape on any mesh, adds its
two, and the ranks add up in the upper part of the same tree (`shoal_mesh.sums_in_tree`).

What the mode changes: the forms that styles give modules inside it (`invariant/`), losses on a sharded vocabulary,
every sum over ranks, and norms of gradients.

May import: invariant, row_attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import ReplacedAttention, arithmetic, takes
from shoal_mesh import DeviceMesh, sums_in_tree
from shoal_mesh.internal import dataclass
from shoal_tp_styles import Lowered, ModuleSharding

from .invariant.forms import complete, invariant_form, refuse_reduce_dtype, refuse_tied
from .invariant.mode import BlockArithmetic, current_arithmetic


@dataclass(frozen=True, slots=True)
class InvariantArithmetic(BlockArithmetic):
    """The mode: which forms stand in for lowerings, and for modules that no style shards."""

    def form_of(self, lowering: type[Lowered], sharding: ModuleSharding, module: nn.Module) -> type[Lowered]:
        """The form that stands in for a lowering.

        Raises:
            UnsupportedModuleError: if there is none.
        """
        return invariant_form(lowering, sharding, module)

    def complete(
        self, mesh: DeviceMesh, module: nn.Module, over_data: tuple[torch.dtype | None, torch.dtype | None] | None
    ) -> None:
        """Give the modules of a tree that no style shards their forms.

        Raises:
            UnsupportedModuleError: if there is none for one of them.
            StyleError: if gradients would be reduced in another dtype than they are computed in.
            TiedWeightError: if gradients of a shared parameter would be summed over data ranks.
        """
        complete(module, mesh)
        if over_data is not None:
            refuse_reduce_dtype(module, *over_data)
            if mesh.size() > 1:
                refuse_tied(module)


@takes(blocks=int, rows=(int, type(None)))
@contextmanager
def invariant_arithmetic(blocks: int = 8, *, rows: int | None = None) -> Iterator[InvariantArithmetic]:
    """Train and serve with the same bits on any number of ranks that divides `blocks`, one rank among them.

    Everything happens inside: `parallelize_module`, `fully_shard` or `replicate`, forward and backward passes, clipping
    and steps. A single device is a mesh of one rank with the same plan. Dim 0 of what enters a layer is the batch: each
    sample is computed alone, so what a request gets does not depend on its neighbours either.

    Args:
        blocks: into how many parts sharded dims are divided, a power of two; sizes of sharded dims are multiples of it.
        rows: for serving: how many tokens of a sample linear layers and `F.scaled_dot_product_attention` compute
            together; what is missing is filled up. Then the chunks in which a prompt is prefilled change no bit
            either. With None kernels see whole sequences.

    Raises:
        StyleError: if `blocks` is no power of two, `rows` is not positive, or others are entered already. Inside, if a
            plan has a module for which there is no invariant form, or a dim that the blocks do not divide.

    Example:
        >>> from torch import nn
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic(blocks=4):
        ...     linear = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (1,)), "colwise")
        ...     type(linear.forward.__self__).__name__
        'InvariantColumn'
    """
    if blocks < 1 or blocks & (blocks - 1):
        raise StyleError(f"invariant_arithmetic: blocks are halved again and again, so a power of two; got {blocks}")
    if rows is not None and rows < 1:
        raise StyleError(f"invariant_arithmetic: rows are computed together, so at least 1; got {rows}")
    before, entered = current_arithmetic(), InvariantArithmetic(blocks, rows)
    if before is not None and before != entered:
        raise StyleError(f"invariant_arithmetic({blocks=}, {rows=}) inside {before}")
    with arithmetic(entered), sums_in_tree(), _attention(rows):
        yield entered


def _attention(rows: int | None) -> AbstractContextManager[object]:
    """Inside, attention by so many rows; torch's own where there is no number."""
    if rows is None:
        return nullcontext()
    from .row_attention import attention_in_rows  # a millisecond of every import, for those who serve

    return ReplacedAttention(partial(attention_in_rows, rows))
