"""`invariant_arithmetic`: the mode in which a model computes the same bits on any number of ranks.

Sums over what ranks may share are taken over a fixed number of blocks and added in one binary tree.
With 8 blocks, a rank of four holds two of them: it computes each block alone, by a kernel that sees
the same shape on any mesh, adds its two, and the ranks add up in the upper part of the same tree
(`shoal_mesh.sums_in_tree`). The mode changes the forms that styles give modules (`invariant/`),
losses on a sharded vocabulary, every sum over ranks, and norms of gradients.

May import: _torch, invariant, row_attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import StyleError, TiedWeightError, UnsupportedModuleError
from shoal_dtensor.internal import ReplacedAttention, arithmetic, set_forward, takes
from shoal_mesh import DeviceMesh, sums_in_tree
from shoal_tp_styles import Lowered, ModuleSharding, Port
from shoal_tp_styles.internal import (
    COMPLETION,
    Boundary,
    ColumnEmbedding,
    ColumnLinear,
    RowEmbedding,
    RowLinear,
    SequenceDropout,
    Tokenwise,
    is_norm,
    lowered_of,
)

from ._torch import NormBase
from .invariant.block_linear import InvariantColumn, InvariantRow, InvariantWhole
from .invariant.blocks import BlockArithmetic, current_arithmetic
from .invariant.norms_and_embeddings import (
    InvariantColumnEmbedding,
    InvariantEmbedding,
    InvariantRowEmbedding,
    InvariantTokenwise,
    InvariantTokenwiseWhole,
)
from .invariant.self_check import check_device
from .row_attention import attention_in_rows

_FORMS: dict[type[Lowered], type[Lowered]] = {
    ColumnLinear: InvariantColumn,
    RowLinear: InvariantRow,
    ColumnEmbedding: InvariantColumnEmbedding,
    RowEmbedding: InvariantRowEmbedding,
    Tokenwise: InvariantTokenwise,
}
_UNCHANGED = (Boundary, SequenceDropout)  # without arithmetic of their own
_WHOLE: dict[type[nn.Module], type[Lowered]] = {
    nn.Linear: InvariantWhole,
    nn.Embedding: InvariantEmbedding,
    nn.LayerNorm: InvariantTokenwiseWhole,
    nn.RMSNorm: InvariantTokenwiseWhole,
}


@dataclass(frozen=True, slots=True)
class InvariantArithmetic(BlockArithmetic):
    """The mode: which forms stand in for lowerings, and for modules that no style shards."""

    def form_of(
        self, lowering: type[Lowered], sharding: ModuleSharding, module: nn.Module
    ) -> type[Lowered]:
        """The form that stands in for a lowering; an UnsupportedModuleError if there is none."""
        form = _FORMS.get(lowering)
        if form is not None:
            return form
        if lowering in _UNCHANGED and not (sharding.distributes and [*module.parameters()]):
            return lowering
        raise _without_form(f"{sharding.style} of {type(module).__name__}")

    def complete(
        self,
        mesh: DeviceMesh,
        module: nn.Module,
        over_data: tuple[torch.dtype | None, torch.dtype | None] | None,
    ) -> None:
        """Give modules that no style has made parallel their forms; refuse gradients with sums of another order."""
        for device, dtype in {
            (p.device.type, p.dtype) for p in module.parameters() if p.is_floating_point()
        }:
            if device != "meta":
                check_device(device, dtype, torch.get_num_threads(), self.rows)
        along = mesh if mesh.ndim == 1 else mesh[mesh.axis_names[0]]
        for path, owner in module.named_modules():
            around = lowered_of(owner)
            open_inside = around is None or (isinstance(around, Boundary) and around.inner is None)
            computes = isinstance(owner, NormBase) or any(
                param is not None for param in owner._parameters.values()
            )
            if not open_inside or not computes:
                continue
            form = _WHOLE.get(type(owner)) or (InvariantTokenwiseWhole if is_norm(owner) else None)
            if form is None:
                raise _without_form(f"module {path!r} ({type(owner).__name__})")
            sharding = ModuleSharding(
                COMPLETION,
                outputs=(Port(Replicate(), Replicate()),),
                lowering=form,
                distributes=False,
            )
            completed = form(owner, sharding, along)
            if isinstance(around, Boundary):
                around.inner = completed
            else:
                set_forward(owner, completed)
        computed, reduced = over_data or (None, None)
        for param in module.parameters():
            dtype = computed or param.dtype
            if param.is_floating_point() and reduced not in (None, dtype):
                raise StyleError(
                    f"invariant_arithmetic: gradients in {dtype} are added in it on each rank, and "
                    "would be over ranks "
                    f"in {reduced}, in which their sum is another. Leave reduce_dtype, or compute "
                    f"in {reduced}"
                )
        if over_data is not None and mesh.size() > 1:
            refuse_tied(module)


@takes(blocks=int, rows=(int, type(None)))
@contextmanager
def invariant_arithmetic(
    blocks: int = 8, *, rows: int | None = None
) -> Iterator[InvariantArithmetic]:
    """Train and serve with the same bits on any number of ranks that divides `blocks`, one rank among them.

    Everything happens inside: `parallelize_module`, `fully_shard` or `replicate`, forward and
    backward passes, clipping and steps. A single device is a mesh of one rank with the same plan.
    Dim 0 of what enters a layer is the batch: each sample is computed alone, so what a request gets
    does not depend on its neighbours either.

    Args:
        blocks: into how many parts sharded dims are divided, a power of two; sizes of sharded dims
            are multiples of it.
        rows: for serving: how many tokens of a sample linear layers and
            `F.scaled_dot_product_attention` compute together; what is missing is filled up. Then
            the chunks in which a prompt is prefilled change no bit either. With None kernels see
            whole sequences.

    Raises:
        StyleError: if `blocks` is no power of two, `rows` is not positive, or others are entered
            already. Inside, if a plan has a module for which there is no invariant form, or a dim
            that the blocks do not divide.

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
        raise StyleError(
            "invariant_arithmetic: blocks are halved again and again, so a power of two; got "
            f"{blocks}"
        )
    if rows is not None and rows < 1:
        raise StyleError(
            f"invariant_arithmetic: rows are computed together, so at least 1; got {rows}"
        )
    before = current_arithmetic()
    entered = InvariantArithmetic(blocks, rows)
    if before is not None and before != entered:
        raise StyleError(f"invariant_arithmetic({blocks=}, {rows=}) inside {before}")
    attention = (
        nullcontext() if rows is None else ReplacedAttention(partial(attention_in_rows, rows))
    )
    with arithmetic(entered), sums_in_tree(), attention:
        yield entered


def refuse_tied(module: nn.Module) -> None:
    """Refuse parameters that several modules share, whose gradients are summed over data ranks: a TiedWeightError."""
    first: dict[nn.Parameter, str] = {}
    for path, owner in module.named_modules():
        for place, param in owner.named_parameters(path, recurse=False, remove_duplicate=False):
            if first.setdefault(param, place) != place:
                raise TiedWeightError(
                    f"invariant_arithmetic: {first[param]!r} and {place!r} are one parameter: its "
                    "gradients are added "
                    "on each rank before they are summed over data ranks, in another order than on "
                    "one. Untie them "
                    "(tie_word_embeddings=False), or use one data rank"
                )


def _without_form(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"invariant_arithmetic: {what} has no form whose bits are the same on any number of ranks. "
        "It has one for "
        "Linear, Embedding, LayerNorm, RMSNorm and norms like them, under ColwiseParallel, "
        "RowwiseParallel, "
        "SequenceParallel or none; leave the mode for this model, or replace the module"
    )
