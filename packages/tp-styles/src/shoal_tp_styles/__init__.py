"""Tensor-parallel styles for modules, lowered to local computation with explicit collectives."""

from . import choose, losses
from .__about__ import __version__
from .auto import auto_plan, format_plan
from .channel import ChannelParallel
from .costs import Preview, preview
from .errors import (
    LayoutError,
    PlanError,
    SecondOrderError,
    StyleError,
    TiedWeightError,
    UnmatchedPlanWarning,
    UnsupportedModuleError,
)
from .findings import Verification, verify
from .fused import PackedColwiseParallel
from .heads import HeadParallel
from .linear import ColwiseParallel, RowwiseParallel
from .loading import Loaded, load_sharded
from .lora import LoRA, adapter_parameters, merge_adapters
from .loss import loss_parallel
from .parallelize import parallelize_module, unparallelize_module
from .prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from .reshard import input_reshard
from .sequence import SequenceParallel
from .sharding import Heads, ModuleSharding, Port
from .style import ParallelStyle
from .vocab import Vocab

__all__ = [
    "ChannelParallel",
    "ColwiseParallel",
    "HeadParallel",
    "Heads",
    "LayoutError",
    "LoRA",
    "Loaded",
    "ModuleSharding",
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
    "StyleError",
    "TiedWeightError",
    "UnmatchedPlanWarning",
    "UnsupportedModuleError",
    "Verification",
    "Vocab",
    "__version__",
    "adapter_parameters",
    "auto_plan",
    "choose",
    "format_plan",
    "input_reshard",
    "load_sharded",
    "loss_parallel",
    "losses",
    "merge_adapters",
    "parallelize_module",
    "preview",
    "unparallelize_module",
    "verify",
]
