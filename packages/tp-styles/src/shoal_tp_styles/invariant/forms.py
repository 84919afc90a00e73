"""Which form stands in for which lowering, and for modules that no style shards."""

from __future__ import annotations

from torch import nn

from shoal_dtensor import Replicate
from shoal_mesh import DeviceMesh

from ..arithmetic import COMPLETION
from ..errors import UnsupportedModuleError
from ..lowering.boundary import Boundary
from ..lowering.lowered import Lowered, lowered_of, set_lowered
from ..modules.column_linear import ColumnLinear
from ..modules.dropout import SequenceDropout
from ..modules.embedding import ColumnEmbedding, RowEmbedding
from ..modules.norm import Tokenwise, is_norm
from ..modules.row_linear import OverlappedRow, RowLinear
from ..sharding.module_sharding import ModuleSharding, Port
from .block_linear import InvariantColumn, InvariantRow, InvariantWhole
from .replicated import InvariantTokenwise, InvariantTokenwiseWhole
from .sample_embedding import InvariantColumnEmbedding, InvariantEmbedding, InvariantRowEmbedding

__all__ = ["complete", "invariant_form"]

_FORMS: dict[type[Lowered], type[Lowered]] = {
    ColumnLinear: InvariantColumn,
    RowLinear: InvariantRow,
    OverlappedRow: InvariantRow,
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
    """
    along = mesh if mesh.ndim == 1 else mesh[mesh.axis_names[0]]
    for path, owner in module.named_modules():
        around = lowered_of(owner)
        open_inside = around is None or (isinstance(around, Boundary) and around.inner is None)
        if not open_inside or not _computes_on_its_own(owner):
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
            set_lowered(owner, completed)


def _computes_on_its_own(module: nn.Module) -> bool:
    counts = isinstance(module, nn.modules.batchnorm._NormBase)
    return counts or any(param is not None for param in module._parameters.values())


def _without_form(what: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"invariant_arithmetic: {what} has no form whose bits are the same on any number of ranks. {_SUPPORTED}"
        "RowwiseParallel, SequenceParallel or none; leave the mode for this model, or replace the module"
    )
