"""Names of this package for authors of layers: the packages above use them beside the public names.

The names may change with any release. All packages are released together.

May import: _torch, accelerator, argument_types, collectives, differentiable, events, facades,
fault_words, groups, mesh, notebook_html, observers, scoped_value, topology, transport, watch.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from ._torch import (
    constant_when_compiled,
    copy_each,
    forward_levels,
    has_tangent,
    is_traced,
)
from .accelerator import accelerator, module_of, own_device
from .argument_types import (
    FUNCTION,
    check_keywords,
    kind_of,
    near_miss,
    require,
    require_each,
    suggests_keywords,
    ways_out,
)
from .collectives.blocks import pack_blocks, unpack_blocks
from .collectives.calls import Along, is_read_at_start
from .collectives.compared import all_to_all_blocks_compared, broadcast_blocks_compared
from .collectives.even import all_reduce_
from .collectives.flat_messages import parts_like, positions_by_dtype
from .collectives.graph_dependences import contribution, with_dependence
from .collectives.packed import start_packed
from .collectives.reductions import sums_are_in_tree, tree_sum
from .differentiable import adjoint_types, linear_collective
from .events import Event, is_observed, observe, observers, observing, unobserve, unobserved
from .facades import OldAttribute, facade, replaced_names
from .fault_words import missing_all_reduce, times_too, too_large, too_small
from .groups.process_groups import comm_for, comm_of_threads
from .groups.world import agree, all_gather_objects
from .mesh.device_mesh import with_own_groups
from .notebook_html import html_table, html_text
from .observers.lockstep import in_lockstep
from .scoped_value import ScopedValue, value_when_traced
from .topology import USER_TOPOLOGIES, Topology, UserTopologies
from .transport import Flat, Pending, Sizes
from .watch.recorder import note
