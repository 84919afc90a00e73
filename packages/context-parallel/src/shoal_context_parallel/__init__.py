"""Attention of a sequence that is sharded over an axis of a mesh: ring, all-gather and Ulysses."""

from shoal_dtensor.errors import LayoutError, LayoutTypeError, SecondOrderError, StyleError
from shoal_dtensor.internal import on_first_check
from shoal_mesh.internal import facade

from .__about__ import __version__
from .attention.parallel_attention import context_parallel_attention
from .buffers import context_parallel, context_parallel_unshard, set_rotate_method
from .dispatcher import (
    context_parallel_shard,
    disable_context_parallel_dispatcher,
    enable_context_parallel_dispatcher,
    head_tail_layout,
)
from .errors import UnsupportedAttentionError
from .sequence_layout import Documents, SequenceLayout

__all__ = [
    "Documents",
    "LayoutError",
    "LayoutTypeError",
    "SecondOrderError",
    "SequenceLayout",
    "StyleError",
    "UnsupportedAttentionError",
    "__version__",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_shard",
    "context_parallel_unshard",
    "disable_context_parallel_dispatcher",
    "enable_context_parallel_dispatcher",
    "head_tail_layout",
    "set_rotate_method",
]

__dir__, __getattr__ = facade(__name__, __all__)


@on_first_check
def _declare_types() -> None:
    from . import declared_types as declared_types
