"""Styles by the names that Hugging Face transformers uses in its `tp_plan`s."""

from __future__ import annotations

from collections.abc import Callable

from shoal_dtensor import Partial, Replicate

from ..errors import PlanError
from ..styles.fused import PackedColwiseParallel
from ..styles.linear import ColwiseParallel, RowwiseParallel
from ..styles.prepare import PrepareModuleOutput
from ..styles.sequence import SequenceParallel
from ..styles.style import ParallelStyle

__all__ = ["REFUSED", "STYLE_NAMES", "style_named"]


def _none() -> None:
    """A name that leaves the module unchanged: replicated parameters, replicated activations."""


STYLE_NAMES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "local_colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "local_rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "packed_colwise": lambda: PackedColwiseParallel(blocks=2),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "all_reduce": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "gather": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    "replicate": _none,
    "replicated": _none,
}

_EXPERTS = "experts of a mixture are not sharded here; leave the entry out and every rank holds all experts"
_ATTENTION = "the module splits its own output or parameters; write a style for it (docs/how-to/write-a-style.md)"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "packed_rowwise"), _EXPERTS),
    **dict.fromkeys(("local_packed_rowwise", "ep_router", "ep_dispatch_experts"), _EXPERTS),
    **dict.fromkeys(("megamoe_router", "megamoe_experts"), _EXPERTS),
    **dict.fromkeys(("mla_kv_a_proj", "local_params", "local"), _ATTENTION),
}


def style_named(name: str) -> ParallelStyle | None:
    """The style of a Hugging Face name; None for names that leave a module unchanged.

    Raises:
        PlanError: if the name is unknown, listing those that are known, or stands for something that is not supported.

    Example:
        >>> style_named("rowwise")
        RowwiseParallel()
    """
    if name in REFUSED:
        raise PlanError(f"style {name!r}: {REFUSED[name]}")
    if name not in STYLE_NAMES:
        raise PlanError(f"unknown style {name!r}; known are {', '.join(sorted(STYLE_NAMES))}")
    return STYLE_NAMES[name]()
