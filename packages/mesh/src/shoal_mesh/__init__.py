"""Ranks in a grid: device meshes, process groups and collectives for PyTorch."""

from . import differentiable, errors, topology
from .__about__ import __version__
from ._torch import constant_when_compiled
from .collectives.blocks import all_to_all_blocks, pack_blocks, unpack_blocks
from .collectives.coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from .collectives.even import all_gather, all_reduce, all_reduce_, all_to_all, reduce_scatter
from .collectives.graph_dependences import bound, contribution
from .collectives.graph_operators import define_operators
from .collectives.operands import Along
from .collectives.packed import PackedPending, all_gather_packed, all_reduce_packed, reduce_scatter_packed
from .collectives.pending import Pending
from .collectives.rooted import broadcast, gather, permute, scatter
from .collectives.tree_sums import sums_are_in_tree, sums_in_tree, tree_sum
from .collectives.uneven import all_gather_v, all_to_all_v, reduce_scatter_v
from .elastic import ElasticWorld
from .errors import (
    AxisError,
    BackendError,
    CollectiveError,
    CollectiveTypeError,
    DimError,
    LockstepError,
    MeshError,
    MeshMismatchError,
    MeshTypeError,
    MissingExtraError,
    NewcomerError,
    NoGroupError,
    PeerError,
    RankError,
)
from .events import Event, Observer, is_observed, observe, purpose, unobserve
from .groups.process_groups import BackendChoice, Comm, comm_over
from .groups.world import restart_world
from .local_ranks.launch import launch
from .logs import log_from_environment, log_to_stderr
from .mesh.create import abstract_mesh, init_device_mesh, measured_order, safe_globals
from .mesh.device_mesh import DeviceMesh, current_mesh
from .mesh.rank_layout import Layout
from .mesh.rank_order import RankOrder
from .mesh.resources import _mesh_resources as _mesh_resources
from .observers.comm_debug import CommDebugMode
from .observers.lockstep import in_lockstep, lockstep
from .observers.memory import MemoryTrace
from .observers.pictures import draw_memory, draw_timeline, new_axes
from .observers.profiling import annotate_collectives
from .observers.replicas import check_replicas
from .observers.timeline import Timeline
from .observers.trace import trace
from .shared_memory.recorder import note
from .terminal import progress
from .topology import Link, Topology, set_topology, topology_of, topology_version
from .topology import measure as measure_topology
from .values import cached_property, dataclass

__all__ = [
    "Along",
    "AxisError",
    "BackendChoice",
    "BackendError",
    "CollectiveError",
    "CollectiveTypeError",
    "Comm",
    "CommDebugMode",
    "DeviceMesh",
    "DimError",
    "ElasticWorld",
    "Event",
    "Layout",
    "Link",
    "LockstepError",
    "MemoryTrace",
    "MeshError",
    "MeshMismatchError",
    "MeshTypeError",
    "MissingExtraError",
    "NewcomerError",
    "NoGroupError",
    "Observer",
    "PackedPending",
    "PeerError",
    "Pending",
    "RankError",
    "RankOrder",
    "Timeline",
    "Topology",
    "__version__",
    "abstract_mesh",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_packed",
    "all_gather_v",
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_packed",
    "all_to_all",
    "all_to_all_blocks",
    "all_to_all_v",
    "annotate_collectives",
    "bound",
    "broadcast",
    "cached_property",
    "check_replicas",
    "comm_over",
    "constant_when_compiled",
    "contribution",
    "current_mesh",
    "dataclass",
    "differentiable",
    "draw_memory",
    "draw_timeline",
    "errors",
    "gather",
    "in_lockstep",
    "init_device_mesh",
    "is_observed",
    "launch",
    "lockstep",
    "log_to_stderr",
    "measure_topology",
    "measured_order",
    "new_axes",
    "note",
    "observe",
    "pack_blocks",
    "permute",
    "progress",
    "purpose",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_packed",
    "reduce_scatter_v",
    "restart_world",
    "safe_globals",
    "scatter",
    "set_topology",
    "sums_are_in_tree",
    "sums_in_tree",
    "topology",
    "topology_of",
    "topology_version",
    "trace",
    "tree_sum",
    "unobserve",
    "unpack_blocks",
]


log_from_environment()
Comm.at_first += [define_operators]


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: object) -> None:
    """`%load_ext shoal_mesh`: the cell magic `%%ranks`."""
    from .notebook import register_magics

    register_magics(shell)
