"""The lab: a backend of c10d and a scheduler, on which programs run unchanged on one machine.

`simulate_ranks` runs a function of a mesh on threads, and neither reads nor changes the state of
c10d. Library code that tries a plan imports it from here, inside functions, because few programs
need the lab.

May import: _torch, argument_types, errors, groups, local_ranks, mesh, watch.
"""

from .rank_state import RandomStates
from .run import Lab, lab
from .simulated_ranks import Simulation, ThreadMesh, on_threads, simulate_ranks, thread_meshes

__all__ = [
    "Lab",
    "RandomStates",
    "Simulation",
    "ThreadMesh",
    "lab",
    "on_threads",
    "simulate_ranks",
    "thread_meshes",
]
