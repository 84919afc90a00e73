"""The lab: a backend of c10d and a scheduler, on which programs run unchanged on one machine.

May import: _torch, argument_types, errors, local_ranks, watch.
"""

from .run import Lab, lab

__all__ = ["Lab", "lab"]
