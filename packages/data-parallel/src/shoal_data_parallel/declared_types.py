"""SPMD types of the autograd functions that show modules their parameters.

May import: gradients, units.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal_dtensor.internal import spmd

from .gradients.replica import ReplicaView
from .units.unit_passes import GatheredUnit


def _declare_nothing(outputs: Any, args: tuple[Any, ...]) -> None:
    """Leave the outputs without types.

    `fully_shard` and `replicate` give all tensors types that they show to modules, also those
    without gradients.
    """


spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(GatheredUnit, _declare_nothing)
spmd.declare_types(ReplicaView, _declare_nothing)
