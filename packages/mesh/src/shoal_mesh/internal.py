"""For authors of layers: names of this package that the packages above use beside its facade.

They may change with any release; all packages are released together.

May import: _torch, accelerator, argument_types, collectives, events, facades, groups, observers, shared_memory,
topology, transport.
"""

from ._torch import constant_when_compiled as constant_when_compiled
from .accelerator import accelerator as accelerator, module_of as module_of, own_device as own_device
from .argument_types import kind_of as kind_of
from .collectives.blocks import pack_blocks as pack_blocks, unpack_blocks as unpack_blocks
from .collectives.calls import Along as Along
from .collectives.even import all_reduce_ as all_reduce_
from .collectives.graph_dependences import bound as bound, contribution as contribution
from .collectives.packed import start_packed as start_packed
from .collectives.reductions import sums_are_in_tree as sums_are_in_tree, tree_sum as tree_sum
from .events import (
    Event as Event,
    is_observed as is_observed,
    observe as observe,
    observing as observing,
    unobserve as unobserve,
)
from .facades import facade as facade
from .groups.process_groups import comm_of_threads as comm_of_threads
from .groups.world import agree as agree
from .observers.lockstep import in_lockstep as in_lockstep
from .shared_memory.recorder import note as note
from .topology import Topology as Topology, topology_version as topology_version
from .transport import Flat as Flat, Pending as Pending, Sizes as Sizes
