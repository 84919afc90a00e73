"""Ranks in a grid: device meshes, process groups and collectives for PyTorch."""

from . import errors
from .__about__ import __version__
from .collectives import (
    Pending,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_,
    all_to_all,
    all_to_all_v,
    broadcast,
    gather,
    permute,
    reduce_scatter,
    reduce_scatter_v,
    scatter,
)
from .comm_debug import CommDebugMode
from .create import abstract_mesh, init_device_mesh
from .device_mesh import DeviceMesh, current_mesh
from .errors import (
    AxisError,
    BackendError,
    CollectiveError,
    LockstepError,
    MeshError,
    MeshMismatchError,
    NoGroupError,
    RankError,
)
from .groups import BackendChoice, Comm
from .layout import Layout
from .observe import Event, Observer, observe, unobserve

__all__ = [
    "AxisError",
    "BackendChoice",
    "BackendError",
    "CollectiveError",
    "Comm",
    "CommDebugMode",
    "DeviceMesh",
    "Event",
    "Layout",
    "LockstepError",
    "MeshError",
    "MeshMismatchError",
    "NoGroupError",
    "Observer",
    "Pending",
    "RankError",
    "__version__",
    "abstract_mesh",
    "all_gather",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "current_mesh",
    "errors",
    "gather",
    "init_device_mesh",
    "observe",
    "permute",
    "reduce_scatter",
    "reduce_scatter_v",
    "scatter",
    "unobserve",
]
