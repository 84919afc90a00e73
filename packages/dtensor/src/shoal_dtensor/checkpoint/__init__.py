"""Checkpoints of a training run that survive a kill at any moment.

Each step is written under a temporary name, verified and renamed; the last steps are kept. The
module is imported on request: `from shoal_dtensor.checkpoint import Checkpointer`.

May import: _torch, api, argument_types, errors, host_memory, layout, redistribute, tensor.
"""

from .checkpointer import Checkpointer
from .held_state import HeldState

__all__ = ["Checkpointer", "HeldState"]
