"""What this package refuses, each kind a subclass of the builtin that torch's shard API raises in the same place.

Every class takes one finished message, so an error met on one rank can be sent to the others and raised there too.
"""

from __future__ import annotations


class ShardingSpecError(ValueError):
    """A sharding spec or a list of shards that does not describe the tensor: overlap, gap, unknown rank, bad dim."""


class LocalShardError(ValueError):
    """Local data that does not fit the metadata it is declared with (size, dtype, device, layout, contiguity)."""


class RankMismatchError(ValueError):
    """Ranks of one process group passed different arguments to a call that all of them must make alike."""


class MissingParameterError(AttributeError):
    """The module has no attribute of the parameter name that is to be sharded."""


class ParameterError(ValueError):
    """The attribute that is to be sharded is no tensor, is not contiguous, or is sharded already."""


class PlanTypeError(TypeError):
    """A sharding plan, or an entry of it, of a type that means nothing there."""


class PlanConflictError(RuntimeError):
    """Two entries of a sharding plan claim the same parameter."""


class SharderPathError(KeyError):
    """A Sharder was planned for the empty path: there is no parent in which its module could be replaced."""

    def __str__(self) -> str:
        """The message itself; KeyError would show its repr."""
        return str(self.args[0]) if self.args else ""


class ProcessGroupError(RuntimeError):
    """No process group, a rank outside of it, or one that is not the group a tensor was saved with."""


class UnsupportedOpError(RuntimeError):
    """An operation that means nothing, or cannot be done, on this ShardedTensor."""


class NotExpressibleError(UnsupportedOpError):
    """A layout that has no counterpart on the other side of a ShardedTensor <-> DTensor conversion."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read into this state dict; nothing was changed by the attempt."""
