"""Tensor-parallel styles for modules, lowered to local computation with explicit collectives."""

from shoal_dtensor.errors import (
    LayoutError,
    PlanError,
    SecondOrderError,
    StyleError,
    TiedWeightError,
    UnsupportedModuleError,
)
from shoal_dtensor.internal import on_first_check
from shoal_mesh.internal import facade

from . import losses
from .__about__ import __version__
from .errors import UnmatchedPlanWarning
from .losses import sampling as choose
from .losses.logits import Vocab
from .losses.loss_parallel import loss_parallel
from .lowering.lowered import Lowered
from .lowering.parameters import local_parameters
from .plan.parallelize import parallelize_module, unparallelize_module
from .plan.preview import Preview, preview
from .plan.verify import Verification, verify
from .sharding.module_sharding import Collective, Heads, ModuleCall, ModuleSharding, Port
from .styles.activation import (
    ChannelParallel,
    ContextParallel,
    HeadParallel,
    LatentProjection,
    OwnParameters,
    SequenceParallel,
)
from .styles.expert import ExpertParallel, ExpertTensorParallel, IdentityExpert, SharedExpertOverlap
from .styles.linear import ColwiseParallel, PackedColwiseParallel, RowwiseParallel
from .styles.lora import LoRA, adapter_parameters, merge_adapters
from .styles.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    input_reshard,
)
from .styles.style import DeclaredStyle, ParallelStyle

__all__ = [
    "ChannelParallel",
    "Collective",
    "ColwiseParallel",
    "ContextParallel",
    "DeclaredStyle",
    "ExpertParallel",
    "ExpertTensorParallel",
    "HeadParallel",
    "Heads",
    "IdentityExpert",
    "LatentProjection",
    "LayoutError",
    "LoRA",
    "Lowered",
    "ModuleCall",
    "ModuleSharding",
    "OwnParameters",
    "PackedColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "Port",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Preview",
    "RowwiseParallel",
    "SecondOrderError",
    "SequenceParallel",
    "SharedExpertOverlap",
    "StyleError",
    "TiedWeightError",
    "UnmatchedPlanWarning",
    "UnsupportedModuleError",
    "Verification",
    "Vocab",
    "__version__",
    "adapter_parameters",
    "choose",
    "input_reshard",
    "local_parameters",
    "loss_parallel",
    "losses",
    "merge_adapters",
    "parallelize_module",
    "preview",
    "unparallelize_module",
    "verify",
]


# Names of torch's stack that are not here, and what does their work.
_CONTEXT = (
    "shoal_context_parallel.context_parallel, or the style ContextParallel; SequenceLayout "
    "assigns tokens to ranks"
)
_INSTEAD = {
    "DTensorExtensions": (
        "shoal_data_parallel.fully_shard accepts tensor-parallel parameters directly"
    ),
    "_pre_dp_module_transform": (
        'shoal_data_parallel.replicate(module, mesh["data"]) accepts all parameters'
    ),
    "tensor_parallel_transformation": "parallelize_module",
    **dict.fromkeys(
        ("_ContextParallel", "_context_parallel_shard", "_cp_options", "flex_cp_allgather"),
        _CONTEXT,
    ),
    **dict.fromkeys(
        ("_enable_context_parallel_dispatcher", "_disable_context_parallel_dispatcher"), _CONTEXT
    ),
    **dict.fromkeys(
        (f"_{kind}LoadBalancer" for kind in ("", "HeadTail", "PTRR", "PerDocumentHeadTail")),
        _CONTEXT,
    ),
}


__dir__, __getattr__ = facade(__name__, __all__, _INSTEAD)


@on_first_check
def _declare_types() -> None:
    from . import declared_functions as declared_functions, declared_types as declared_types
