"""Ranks in a grid: device meshes, process groups and collectives for PyTorch."""

from . import differentiable, errors
from .__about__ import __version__
from .collectives.blocks import all_to_all_blocks
from .collectives.even import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
from .collectives.graph_operators import define_operators
from .collectives.packed import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from .collectives.reductions import sums_in_tree
from .collectives.uneven import (
    all_gather_v,
    all_to_all_v,
    gather,
    permute,
    reduce_scatter_v,
    scatter,
)
from .elastic import ElasticWorld
from .errors import CollectiveError, DeadlockError, LockstepError, MeshError, PeerError
from .events import purpose
from .facades import facade
from .groups.process_groups import Comm, comm_over
from .groups.world import restart_world
from .local_ranks.launch import launch
from .mesh.create import (
    _mesh_resources as _mesh_resources,
    abstract_mesh,
    init_device_mesh,
    safe_globals,
)
from .mesh.device_mesh import DeviceMesh, current_mesh
from .observers.comm_debug import CommDebugMode
from .observers.lockstep import lockstep
from .observers.logs import annotate_collectives, log_from_environment, log_to_stderr
from .observers.replicas import check_distinct, check_replicas
from .observers.stragglers import stragglers
from .topology import Link, measure as measure_topology, set_topology, topology_of

__all__ = [
    "CollectiveError",
    "Comm",
    "CommDebugMode",
    "DeadlockError",
    "DeviceMesh",
    "ElasticWorld",
    "Link",
    "LockstepError",
    "MeshError",
    "PeerError",
    "__version__",
    "abstract_mesh",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_v",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_blocks",
    "all_to_all_v",
    "annotate_collectives",
    "broadcast",
    "check_distinct",
    "check_replicas",
    "comm_over",
    "current_mesh",
    "differentiable",
    "errors",
    "gather",
    "init_device_mesh",
    "launch",
    "lockstep",
    "log_to_stderr",
    "measure_topology",
    "permute",
    "purpose",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_v",
    "restart_world",
    "safe_globals",
    "scatter",
    "set_topology",
    "stragglers",
    "sums_in_tree",
    "topology_of",
]


log_from_environment()
Comm.on_first_use += [define_operators]

__dir__, __getattr__ = facade(__name__, __all__)


def load_ipython_extension(shell: object) -> None:
    """Add the cell magic `%%ranks` to IPython, for `%load_ext shoal_mesh`."""
    from .notebook import register_magics

    register_magics(shell)
