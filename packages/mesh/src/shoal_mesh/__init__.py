"""Ranks in a grid: device meshes, process groups and collectives for PyTorch."""

from . import differentiable, errors, topology
from .__about__ import __version__
from ._torch import constant_when_compiled
from .coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from .collectives import Along, Pending, all_gather, all_reduce, all_reduce_, all_to_all, reduce_scatter
from .comm_debug import CommDebugMode
from .create import abstract_mesh, init_device_mesh, safe_globals
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
from .groups import BackendChoice, Comm, comm_over
from .launch import launch
from .layout import Layout
from .lockstep import check_replicas, in_lockstep, lockstep
from .observe import Event, Observer, observe, purpose, unobserve
from .profiling import annotate_collectives
from .resources import _mesh_resources as _mesh_resources
from .rooted import broadcast, gather, permute, scatter
from .topology import Link, Topology, set_topology, topology_of, topology_version
from .topology import measure as measure_topology
from .uneven import all_gather_v, all_to_all_v, reduce_scatter_v

__all__ = [
    "Along",
    "AxisError",
    "BackendChoice",
    "BackendError",
    "CollectiveError",
    "Comm",
    "CommDebugMode",
    "DeviceMesh",
    "Event",
    "Layout",
    "Link",
    "LockstepError",
    "MeshError",
    "MeshMismatchError",
    "NoGroupError",
    "Observer",
    "Pending",
    "RankError",
    "Topology",
    "__version__",
    "abstract_mesh",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_v",
    "annotate_collectives",
    "broadcast",
    "check_replicas",
    "comm_over",
    "constant_when_compiled",
    "current_mesh",
    "differentiable",
    "errors",
    "gather",
    "in_lockstep",
    "init_device_mesh",
    "launch",
    "lockstep",
    "measure_topology",
    "observe",
    "permute",
    "purpose",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_v",
    "safe_globals",
    "scatter",
    "set_topology",
    "topology",
    "topology_of",
    "topology_version",
    "unobserve",
]
