"""Errors of this package; each derives from the builtin that torch's shard API raises there.

Every constructor takes one message, so that an error of one rank can be raised on all ranks.
"""

from __future__ import annotations

from shoal_dtensor.errors import OperatorIndexError
from shoal_mesh.internal import replaced_names


class ArgumentTypeError(TypeError, ValueError):
    """An argument of a type that the call does not accept; the message names the allowed types."""


class ShardingSpecError(ValueError, RuntimeError):
    """A spec or a list of shards that does not fit: overlap, gap, unknown rank, or wrong dim."""


class LocalShardError(ValueError):
    """Local tensors that do not fit their metadata in size, dtype, device, layout or contiguity."""


class RankMismatchError(ValueError):
    """Ranks of one process group passed different arguments to a call that takes equal ones."""


class MissingParameterError(AttributeError):
    """A parameter name that is to be sharded and that the module does not have."""


class ParameterError(ValueError):
    """An attribute that cannot be sharded: not a tensor, not contiguous, or sharded already."""


class PlanConflictError(RuntimeError):
    """Two entries of a sharding plan shard the same parameter."""


class SharderPathError(KeyError):
    """A Sharder for the empty path: the root has no parent in which it could be replaced."""

    def __str__(self) -> str:
        """Return the message itself; KeyError would return its repr."""
        return str(self.args[0]) if self.args else ""


class ProcessGroupError(RuntimeError):
    """A missing process group, a rank outside of it, or another group than the saved tensor's."""


class SpecTypeError(ArgumentTypeError, NotImplementedError):
    """An argument of a reshard that is not a sharding spec."""


class NotInGroupError(ProcessGroupError, ValueError, AssertionError):
    """A call on a rank that is not a member of the process group."""


class UnsupportedOpError(RuntimeError):
    """An operation that is not defined on this ShardedTensor."""


class NotExpressibleError(UnsupportedOpError):
    """A ShardedTensor without placements, or a DTensor without a sharding spec."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded into this state dict; the state dict is unchanged."""


_REPLACEMENTS = {"IndexRangeError": OperatorIndexError, "PlanTypeError": ArgumentTypeError}
__getattr__ = replaced_names(__name__, _REPLACEMENTS)
