"""Tensor-parallel styles for modules, lowered to local computation with explicit collectives."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import losses
from .__about__ import __version__
from .apply.input_reshard import input_reshard
from .arithmetic import invariant_arithmetic
from .context_parallel.attention_mask import Documents
from .context_parallel.buffers import context_parallel, context_parallel_unshard, set_rotate_method
from .context_parallel.parallel_attention import context_parallel_attention
from .context_parallel.sequence_layout import SequenceLayout
from .errors import (
    CheckpointError,
    LayoutCountError,
    LayoutError,
    LayoutTypeError,
    PlanError,
    SecondOrderError,
    StyleError,
    StyleNameError,
    StyleTypeError,
    TiedWeightError,
    UnmatchedPlanWarning,
    UnsupportedAttentionError,
    UnsupportedModuleError,
    VariantArithmeticError,
)
from .losses import sampling as choose
from .losses.loss_parallel import loss_parallel
from .losses.vocab import Vocab
from .lowering.lowered import Lowered
from .lowering.parameters import local_parameters
from .plan.parallelize import parallelize_module, unparallelize_module
from .sharding.collective import Collective
from .sharding.heads import Heads
from .sharding.module_sharding import ModuleCall, ModuleSharding, Port
from .styles.attention_parameters import LatentProjection, OwnParameters
from .styles.channel import ChannelParallel
from .styles.expert import ExpertParallel, ExpertTensorParallel, IdentityExpert, SharedExpertOverlap
from .styles.fused import PackedColwiseParallel
from .styles.linear import ColwiseParallel, RowwiseParallel
from .styles.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .styles.sequence import SequenceParallel
from .styles.style import DeclaredStyle, ParallelStyle

if TYPE_CHECKING:
    from . import hf
    from .apply.loading import Loaded, load_sharded
    from .apply.saving import Saved, save_sharded
    from .data_parallel.fsdp_module import (
        FSDPModule,
        UnshardHandle,
        reduce_after_last_microbatch,
        register_fsdp_forward_method,
    )
    from .data_parallel.fully_shard import fully_shard
    from .data_parallel.microbatches import accumulate_in_tree, accumulate_stage_in_tree
    from .data_parallel.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from .data_parallel.replicate import ReplicateModule, replicate
    from .invariant.fingerprints import StepFingerprints
    from .invariant.self_check import check_arithmetic
    from .plan.auto import auto_plan, format_plan
    from .plan.preview import Preview, preview
    from .plan.propose import Candidate, Proposal, propose
    from .plan.verify import Verification, verify
    from .runs.compare import Comparison, compare_runs
    from .runs.record import RunRecord, record_run
    from .styles.context import ContextParallel
    from .styles.lora import LoRA, adapter_parameters, merge_adapters
    from .styles.multihead import HeadParallel

__all__ = [
    "CPUOffloadPolicy",
    "Candidate",
    "ChannelParallel",
    "CheckpointError",
    "Collective",
    "ColwiseParallel",
    "Comparison",
    "ContextParallel",
    "DeclaredStyle",
    "Documents",
    "ExpertParallel",
    "ExpertTensorParallel",
    "FSDPModule",
    "HeadParallel",
    "Heads",
    "IdentityExpert",
    "LatentProjection",
    "LayoutCountError",
    "LayoutError",
    "LayoutTypeError",
    "LoRA",
    "Loaded",
    "Lowered",
    "MixedPrecisionPolicy",
    "ModuleCall",
    "ModuleSharding",
    "OffloadPolicy",
    "OwnParameters",
    "PackedColwiseParallel",
    "ParallelStyle",
    "PlanError",
    "Port",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Preview",
    "Proposal",
    "ReplicateModule",
    "RowwiseParallel",
    "RunRecord",
    "Saved",
    "SecondOrderError",
    "SequenceLayout",
    "SequenceParallel",
    "SharedExpertOverlap",
    "StepFingerprints",
    "StyleError",
    "StyleNameError",
    "StyleTypeError",
    "TiedWeightError",
    "UnmatchedPlanWarning",
    "UnshardHandle",
    "UnsupportedAttentionError",
    "UnsupportedModuleError",
    "VariantArithmeticError",
    "Verification",
    "Vocab",
    "__version__",
    "accumulate_in_tree",
    "accumulate_stage_in_tree",
    "adapter_parameters",
    "auto_plan",
    "check_arithmetic",
    "choose",
    "compare_runs",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_unshard",
    "format_plan",
    "fully_shard",
    "hf",
    "input_reshard",
    "invariant_arithmetic",
    "load_sharded",
    "local_parameters",
    "loss_parallel",
    "losses",
    "merge_adapters",
    "parallelize_module",
    "preview",
    "propose",
    "record_run",
    "reduce_after_last_microbatch",
    "register_fsdp_forward_method",
    "replicate",
    "save_sharded",
    "set_rotate_method",
    "unparallelize_module",
    "verify",
]


# A fifth of the time of this import, for what many programs do without: imported when it is first asked for.
_LATER = {
    name: module
    for module, names in {
        ".apply.loading": ("Loaded", "load_sharded"),
        ".apply.saving": ("Saved", "save_sharded"),
        ".styles.context": ("ContextParallel",),
        ".styles.lora": ("LoRA", "adapter_parameters", "merge_adapters"),
        ".styles.multihead": ("HeadParallel",),
        ".data_parallel.fsdp_module": (
            "FSDPModule",
            "UnshardHandle",
            "reduce_after_last_microbatch",
            "register_fsdp_forward_method",
        ),
        ".data_parallel.fully_shard": ("fully_shard",),
        ".data_parallel.microbatches": ("accumulate_in_tree", "accumulate_stage_in_tree"),
        ".data_parallel.policies": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy"),
        ".data_parallel.replicate": ("ReplicateModule", "replicate"),
        ".hf": ("hf",),
        ".invariant.fingerprints": ("StepFingerprints",),
        ".runs.compare": ("Comparison", "compare_runs"),
        ".runs.record": ("RunRecord", "record_run"),
        ".invariant.self_check": ("check_arithmetic",),
        ".plan.auto": ("auto_plan", "format_plan"),
        ".plan.preview": ("Preview", "preview"),
        ".plan.propose": ("Candidate", "Proposal", "propose"),
        ".plan.verify": ("Verification", "verify"),
    }.items()
    for name in names
}


# Names of torch's stack that are not here, and what does their work.
_CONTEXT = "context_parallel, or the style ContextParallel; SequenceLayout says who holds which tokens"
_INSTEAD = {
    "DTensorExtensions": "fully_shard takes tensor-parallel parameters as they are",
    "_pre_dp_module_transform": 'replicate(module, mesh["data"]) takes tensor-parallel and plain parameters',
    "tensor_parallel_transformation": "parallelize_module",
    **dict.fromkeys(("_ContextParallel", "_context_parallel_shard", "_cp_options", "flex_cp_allgather"), _CONTEXT),
    **dict.fromkeys(("_enable_context_parallel_dispatcher", "_disable_context_parallel_dispatcher"), _CONTEXT),
    **dict.fromkeys((f"_{kind}LoadBalancer" for kind in ("", "HeadTail", "PTRR", "PerDocumentHeadTail")), _CONTEXT),
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise ImportError(f"shoal_tp_styles has no {name}: {_INSTEAD[name]}", name=__name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name], __name__)
    value = globals()[name] = module if _LATER[name] == f".{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return __all__
