"""Which form stands in for which lowering, and for modules that no style shards."""

from __future__ import annotations

import torch
from torch import nn

from shoal_dtensor import Replicate
from shoal_dtensor.errors import StyleError, TiedWeightError, UnsupportedModuleError
from shoal_dtensor.internal import set_forward
from shoal_mesh import DeviceMesh
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

from .._torch import NormBase
from .block_linear import InvariantColumn, InvariantRow, InvariantWhole
from .block_sums import entered
from .replicated import InvariantTokenwise, InvariantTokenwiseWhole
from .sample_embedding import InvariantColumnEmbedding, InvariantEmbedding, InvariantRowEmbedding
from .self_check import check_device

_FORMS: dict[type[Lowered], type[Lowered]] = {
    ColumnLinear: InvariantColumn,
    RowLinear: InvariantRow,
    ColumnEmbedding: InvariantColumnEmbedding,
    RowEmbedding: InvariantRowEmbedding,
    Tokenwise: InvariantTokenwise,
}
# Without arithmetic of their own.
_UNCHANGED = (Boundary, SequenceDropout)
_WHOLE: dict[type[nn.Module], type[Lowered]] = {
    nn.Linear: InvariantWhole,
    nn.Embedding: InvariantEmbedding,
    nn.LayerNorm: InvariantTokenwiseWhole,
    nn.RMSNorm: InvariantTokenwiseWhole,
}
_SUPPORTED = "It has one for Linear, Embedding, LayerNorm, RMSNorm and norms like them, under ColwiseParallel, "


def invariant_form(lowering: type[Lowered], sharding: ModuleSharding, module: nn.Module) -> type[Lowered]:
    """The form that stands in for a lowering.

    Raises:
        UnsupportedModuleError: if there is none.
    """
    form = _FORMS.get(lowering)
    if form is not None:
        return form
    if lowering in _UNCHANGED and not (sharding.distributes and [*module.parameters()]):
        return lowering
    raise _without_form(f"{sharding.style} of {type(module).__name__}")


def complete(module: nn.Module, mesh: DeviceMesh) -> None:
    """Give the modules with parameters that no style has made parallel their forms; others follow by their inputs.

    Raises:
        UnsupportedModuleError: if there is none for a module, by its path.
        VariantArithmeticError: if the self-check of the device finds operators that are not invariant.
    """
    for device, dtype in {(p.device.type, p.dtype) for p in module.parameters() if p.is_floating_point()}:
        if device != "meta":
            check_device(device, dtype, torch.get_num_threads(), entered().rows)
    along = mesh if mesh.ndim == 1 else mesh[mesh.axis_names[0]]
    for path, owner in module.named_modules():
        around = lowered_of(owner)
        open_inside = around is None or (isinstance(around, Boundary) and around.inner is None)
        computes = isinstance(owner, NormBase) or any(param is not None for param in owner._parameters.values())
        if not open_inside or not computes:
            continue
        form = _WHOLE.get(type(owner)) or (InvariantTokenwiseWhole if is_norm(owner) else None)
        if form is None:
            raise _without_form(f"module {path!r} ({type(owner).__name__})")
        sharding = ModuleSharding(
            COMPLETION, outputs=(Port(Replicate(), Replicate()),), lowering=form, distributes=False
        )
        completed = form(owner, sharding, along)
        if isinstance(around, Boundary):
            around.inner = completed
        else:
            set_forward(owner, completed)


def refuse_reduce_dtype(module: nn.Module, computed: torch.dtype | None, reduced: torch.dtype | None) -> None:
    """Refuse gradients that are reduced in another dtype than they are computed in.

    Raises:
        StyleError: naming the dtypes.
    """
    for param in module.parameters():
        dtype = computed or param.dtype
        if param.is_floating_point() and reduced not in (None, dtype):
            raise StyleError(
                f"invariant_arithmetic: gradients in {dtype} are added in it on each rank, and would be over ranks in "
                f"{reduced}, in which their sum is another. Leave reduce_dtype, or compute in {reduced}"
            )


def refuse_tied(module: nn.Module) -> None:
    """Refuse parameters that several modules share, whose gradients are summed over data ranks.

    Raises:
        TiedWeightError: naming them.
    """
    first: dict[nn.Parameter, str] = {}
    for path, owner in module.named_modules():
        for name, param in owner._parameters.items():
            place = f"{path}.{name}" if path else name
            if param is not None and first.setdefault(param, place) != place:
                raise TiedWeightError(
                    f"invariant_arithmetic: {first[param]!r} and {place!r} are one parameter: its gradients are added "
                    "on each rank before they are summed over data ranks, in another order than on one. Untie them "
                    "(tie_word_embeddings=False), or use one data rank"
                )


def _without_form(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"invariant_arithmetic: {what} has no form whose bits are the same on any number of ranks. {_SUPPORTED}"
        "RowwiseParallel, SequenceParallel or none; leave the mode for this model, or replace the module"
    )
