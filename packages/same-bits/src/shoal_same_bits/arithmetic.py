r"""`invariant_arithmetic`: the mode in which a model computes the same bits on any number of ranks.

A dim that ranks may share is divided into a fixed number of blocks, and the sums of the blocks are
added in one fixed binary tree. With 8 blocks on 4 ranks, rank 0 computes blocks 0 and 1, and adds
their sums. Each block is computed by a kernel of its own, so the kernel sees the same shape on any
mesh. The ranks add their results in the upper part of the same tree (`shoal_mesh.sums_in_tree`):

    blocks      0   1   2   3   4   5   6   7
                 \ /     \ /     \ /     \ /
    ranks         0       1       2       3
                   \_____/         \_____/
                       \_____________/

A tensor-parallel style replaces the forward of a module by a lowering: a forward on local shards.
The mode replaces each lowering by its invariant form (`invariant/`), which computes in blocks. It
also changes losses on a sharded vocabulary, every sum over ranks, and norms of gradients.

May import: _torch, invariant, row_attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import StyleError, TiedWeightError, UnsupportedModuleError
from shoal_dtensor.internal import (
    DataDtypes,
    ReplacedAttention,
    arithmetic,
    check_types,
    set_forward,
)
from shoal_mesh import DeviceMesh, sums_in_tree
from shoal_tp_styles import Lowered, ModuleSharding, Port
from shoal_tp_styles.internal import (
    ColumnEmbedding,
    ColumnLinear,
    DTensorForward,
    RowEmbedding,
    RowLinear,
    SequenceDropout,
    StyleOrigin,
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

# lowering of a style -> its invariant form
_FORMS: dict[type[Lowered], type[Lowered]] = {
    ColumnLinear: InvariantColumn,
    RowLinear: InvariantRow,
    ColumnEmbedding: InvariantColumnEmbedding,
    RowEmbedding: InvariantRowEmbedding,
    Tokenwise: InvariantTokenwise,
}
# Lowerings without arithmetic of their own: redistribution around a module, and dropout. They need
# no other form, unless they shard parameters (`form_of`).
_UNCHANGED = (DTensorForward, SequenceDropout)
# class of a module that no style shards -> its invariant form
_WHOLE: dict[type[nn.Module], type[Lowered]] = {
    nn.Linear: InvariantWhole,
    nn.Embedding: InvariantEmbedding,
    nn.LayerNorm: InvariantTokenwiseWhole,
    nn.RMSNorm: InvariantTokenwiseWhole,
}


@dataclass(frozen=True, slots=True)
class InvariantArithmetic(BlockArithmetic):
    """The mode, which replaces lowerings by invariant forms.

    Modules that no style shards get invariant forms too.
    """

    def form_of(
        self, lowering: type[Lowered], sharding: ModuleSharding, module: nn.Module
    ) -> type[Lowered]:
        """Return the form that replaces a lowering; raise UnsupportedModuleError if none does."""
        form = _FORMS.get(lowering)
        if form is not None:
            return form
        # If the style distributes parameters, the module's own forward computes on their shards. It
        # does not compute in blocks, so its bits would depend on the number of ranks.
        has_parameters = next(module.parameters(), None) is not None
        shards_parameters = sharding.distributes and has_parameters
        if lowering in _UNCHANGED and not shards_parameters:
            return lowering
        raise _without_form(f"{sharding.style} of {type(module).__name__}")

    def complete(
        self,
        mesh: DeviceMesh,
        module: nn.Module,
        over_data: DataDtypes | None,
    ) -> None:
        """Give invariant forms to the modules without a style, and check the sums over data ranks.

        Args:
            mesh: the mesh on which the model is made parallel: by data parallelism, which sums
                gradients over this mesh, if `over_data` is given; otherwise by a plan of styles.
            module: the model.
            over_data: the dtypes of gradients that are summed over `mesh`; None if none are.
        """
        self._check_devices(module)
        # A lowering takes a mesh of one axis, over which it shards. The forms below shard nothing,
        # so any axis serves.
        axis = mesh[mesh.axis_names[0]]
        for path, owner in module.named_modules():
            lowered = lowered_of(owner)
            # An empty boundary is a style that only moves inputs and outputs. The module inside of
            # it still computes by its own forward, and needs a form like a module without a style.
            has_form = lowered is not None and not _is_empty_boundary(lowered)
            if has_form or not _computes(owner):
                continue
            form = _form_without_style(owner)
            if form is None:
                raise _without_form(f"module {path!r} ({type(owner).__name__})")
            # The output is computed replicated, and leaves the module replicated. A style that is
            # applied to the module later replaces this form (`StyleOrigin.ARITHMETIC`).
            replicated = Port(Replicate(), Replicate())
            sharding = ModuleSharding(
                "completed by the active arithmetic",
                outputs=(replicated,),
                lowering=form,
                distributes=False,
                origin=StyleOrigin.ARITHMETIC,
            )
            completed = form(owner, sharding, axis)
            # Here `lowered` is None or an empty boundary. The boundary stays, and redistributes
            # around the form.
            if isinstance(lowered, DTensorForward):
                lowered.inner = completed
            else:
                set_forward(owner, completed)
        if over_data is not None:
            _check_reduction(module, over_data)
            # Here `mesh` has the data ranks. One data rank sums nothing over ranks.
            if mesh.size() > 1:
                refuse_tied(module)

    def _check_devices(self, module: nn.Module) -> None:
        """Check the operators of every device and dtype of the parameters.

        Raises:
            VariantArithmeticError: if an operator gives other bits for other numbers of ranks.
        """
        # Kernels depend on the number of threads, so each number has a check of its own.
        threads = torch.get_num_threads()
        kinds = set()
        for param in module.parameters():
            if param.is_floating_point():
                kinds.add((param.device.type, param.dtype))
        for device, dtype in kinds:
            if device != "meta":
                check_device(device, dtype, threads, self.rows)


def _is_empty_boundary(lowered: Lowered) -> bool:
    """Tell whether a style left the computation of a module as it is.

    Such a style only changes the layouts of the inputs and outputs.
    """
    return isinstance(lowered, DTensorForward) and lowered.inner is None


def _computes(module: nn.Module) -> bool:
    """Tell whether a module needs an invariant form.

    Modules with parameters of their own need one. Norms need one with or without parameters.
    """
    has_parameters = any(param is not None for param in module._parameters.values())
    return isinstance(module, NormBase) or has_parameters


def _form_without_style(module: nn.Module) -> type[Lowered] | None:
    """Return the invariant form of a module that no style shards; None if there is none."""
    form = _WHOLE.get(type(module))
    if form is None and is_norm(module):
        return InvariantTokenwiseWhole
    return form


def _check_reduction(module: nn.Module, over_data: DataDtypes) -> None:
    """Refuse a reduction over data ranks in another dtype than the sums on each rank."""
    for param in module.parameters():
        dtype = over_data.compute or param.dtype
        if param.is_floating_point() and over_data.reduce not in (None, dtype):
            raise StyleError(
                f"invariant_arithmetic: each rank adds gradients in {dtype}, but ranks would add "
                f"them in {over_data.reduce}, which gives a different sum. Leave out "
                f"reduce_dtype, or compute in {over_data.reduce}"
            )


@check_types(blocks=int, rows=(int, type(None)))
@contextmanager
def invariant_arithmetic(
    blocks: int = 8, *, rows: int | None = None
) -> Iterator[InvariantArithmetic]:
    """Train and serve with the same bits on any number of ranks that divides `blocks`, 1 included.

    The mode holds inside of a `with` statement. Put everything there: `parallelize_module`,
    `fully_shard` or `replicate`, forward and backward passes, clipping and optimizer steps. A
    single device is a mesh of one rank with the same plan. Dim 0 of a layer's input is the batch.
    Each sample is computed alone, so the result of a request does not depend on its neighbors
    either.

    Args:
        blocks: the number of blocks of a sharded dim, a power of two; it divides the sizes of all
            sharded dims.
        rows: the number of tokens of a sample that linear layers and
            `F.scaled_dot_product_attention` compute together. The last tokens of a sample are
            padded to this number. Set it for serving: then the sizes of the chunks in which a
            prompt is prefilled do not change the bits either. With None, kernels see whole
            sequences.

    Yields:
        The mode.

    Raises:
        StyleError: if `blocks` is not a power of two, if `rows` is not positive, or if the mode is
            entered already with other arguments. Inside the block: if a plan has a module without
            an invariant form, or a dim whose size is not a multiple of `blocks`.

    Example:
        >>> from torch import nn
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic(blocks=4):
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     linear = parallelize_module(nn.Linear(8, 8), mesh, "colwise")
        ...     type(linear.forward.__self__).__name__
        'InvariantColumn'
    """
    is_power_of_two = blocks > 0 and blocks.bit_count() == 1
    if not is_power_of_two:
        raise StyleError(f"invariant_arithmetic: blocks must be a power of two, got {blocks}")
    if rows is not None and rows < 1:
        raise StyleError(f"invariant_arithmetic: rows must be at least 1; got {rows}")
    before = current_arithmetic()
    entered = InvariantArithmetic(blocks, rows)
    if before is not None and before != entered:
        raise StyleError(
            f"invariant_arithmetic(blocks={blocks!r}, rows={rows!r}) inside {before}: nested "
            "modes must have the same arguments"
        )
    attention: AbstractContextManager[Any] = nullcontext()
    if rows is not None:
        attention = ReplacedAttention(partial(attention_in_rows, rows))
    with arithmetic(entered), sums_in_tree(), attention:
        yield entered


def refuse_tied(module: nn.Module) -> None:
    """Raise a TiedWeightError for a parameter that several modules share.

    The gradient of such a parameter is a sum over the modules and over the ranks. Each rank would
    first add over the modules, and the ranks would then add these sums. A single device adds the
    same numbers in another order, so the bits would differ.
    """
    first: dict[nn.Parameter, str] = {}
    for path, owner in module.named_modules():
        for place, param in owner.named_parameters(path, recurse=False, remove_duplicate=False):
            first_place = first.setdefault(param, place)
            if first_place != place:
                raise TiedWeightError(
                    f"invariant_arithmetic: {first_place!r} and {place!r} are one parameter: "
                    "each rank adds its gradients before they are summed over data ranks, in a "
                    "different order than on one device. Untie them (tie_word_embeddings=False), "
                    "or use one data rank"
                )


def _without_form(module: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"invariant_arithmetic: {module} does not have an implementation with the same bits on "
        "any number of ranks. Supported are Linear, Embedding, LayerNorm, RMSNorm and similar "
        "norms, under ColwiseParallel, RowwiseParallel, SequenceParallel or no style; leave the "
        "mode for this model, or replace the module"
    )
