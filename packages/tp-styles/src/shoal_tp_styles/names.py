"""Styles by the names that Hugging Face transformers uses in its `tp_plan`s."""

from __future__ import annotations

from collections.abc import Callable

from shoal_dtensor import Replicate

from .errors import PlanError
from .fused import PackedColwiseParallel
from .linear import ColwiseParallel, RowwiseParallel
from .sequence import SequenceParallel
from .style import ParallelStyle

__all__ = ["STYLE_NAMES", "style_named"]


def _none() -> None:
    """A name that leaves the module as it is: replicated parameters, replicated activations."""


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
    "replicate": _none,
    "replicated": _none,
}


def style_named(name: str) -> ParallelStyle | None:
    """The style of a Hugging Face name; None for names that leave a module as it is.

    Raises:
        PlanError: if the name is unknown, listing those that are known.

    Example:
        >>> style_named("rowwise")
        RowwiseParallel()
    """
    if name not in STYLE_NAMES:
        raise PlanError(f"unknown style {name!r}; known are {', '.join(sorted(STYLE_NAMES))}")
    return STYLE_NAMES[name]()
