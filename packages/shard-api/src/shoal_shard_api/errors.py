"""The errors of this package, each a subclass of the builtin that torch's shard API raises in the same place.

The constructor takes one message, so an error of one rank can be sent to the other ranks and raised
there.
"""

from __future__ import annotations


class ArgumentTypeError(TypeError, ValueError):
    """An argument of a type that the call does not take; names the type that was expected."""


class ShardingSpecError(ValueError, RuntimeError):
    """A sharding spec or a list of shards that does not cover the tensor: overlap, gap, unknown rank, bad dim."""


class IndexRangeError(IndexError):
    """An index beyond the size of the dim that it selects from."""


class LocalShardError(ValueError):
    """Local tensors that do not fit their metadata in size, dtype, device, layout or contiguity."""


class RankMismatchError(ValueError):
    """Ranks of one process group passed different arguments to a call that takes equal ones."""


class MissingParameterError(AttributeError):
    """The module has no attribute of the parameter name that is to be sharded."""


class ParameterError(ValueError):
    """The attribute that is to be sharded is no tensor, is not contiguous, or is sharded already."""


class PlanTypeError(TypeError):
    """A sharding plan, or an entry of it, of a wrong type."""


class PlanConflictError(RuntimeError):
    """Two entries of a sharding plan shard the same parameter."""


class SharderPathError(KeyError):
    """A Sharder was planned for the empty path: there is no parent in which its module could be replaced."""

    def __str__(self) -> str:
        """The message itself; KeyError would show its repr."""
        return str(self.args[0]) if self.args else ""


class ProcessGroupError(RuntimeError):
    """No process group, a rank outside it, or another group than the one that a tensor was saved with."""


class SpecTypeError(ArgumentTypeError, NotImplementedError):
    """A tensor was to be resharded by something that is no sharding spec."""


class NotInGroupError(ProcessGroupError, ValueError, AssertionError):
    """A rank outside of a process group made a call of its members."""


class UnsupportedOpError(RuntimeError):
    """An operation that is not defined on this ShardedTensor."""


class NotExpressibleError(UnsupportedOpError):
    """A ShardedTensor without placements, or a DTensor without a sharding spec."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be loaded into this state dict; the state dict is unchanged."""
