"""The errors of meshes, groups and collectives.

Every error is also the builtin error that a caller of torch would expect, so `except KeyError`
written for a wrong axis name keeps working after the import line has changed.
"""

from __future__ import annotations


class MeshError(ValueError, RuntimeError):
    """A mesh that cannot exist: shape, ranks, names or world size do not fit together."""


class MeshTypeError(MeshError, TypeError):
    """An argument of a type that a mesh, a topology or a launch does not take."""


class AxisError(MeshError, KeyError, IndexError):
    """An axis name or index that the mesh does not have, or that the call does not allow."""

    def __str__(self) -> str:
        # KeyError would print the repr of the text
        return str(self.args[0]) if self.args else ""


class BackendError(MeshError):
    """A backend or backend option that does not exist or does not fit the device type."""


class NoGroupError(MeshError):
    """Communication on a mesh without groups: an abstract mesh, or a rank outside of the mesh."""


class MeshMismatchError(MeshError):
    """Ranks passed different arguments to one mesh; raised on all ranks."""


class CollectiveError(ValueError, RuntimeError):
    """A collective whose arguments cannot give a right answer; raised before anything is sent."""


class CollectiveTypeError(CollectiveError, TypeError):
    """An argument of a type that a collective does not take; raised before anything is sent."""


class DimError(CollectiveError, IndexError):
    """A dim that the tensor given to a collective does not have; raised before anything is sent."""


class PeerError(CollectiveError):
    """Another rank has ended, stopped, given up or differs, so a collective cannot be completed.

    Attributes:
        ranks: the global ranks at fault, as far as this rank can know; () if it cannot.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class LockstepError(PeerError):
    """Ranks that differ, raised on all of them.

    They were about to run different collectives, one of them did not arrive, or replicas differ.
    """


class DeadlockError(LockstepError):
    """All ranks of a lab wait for each other, or for ranks that have returned."""


class NewcomerError(RuntimeError):
    """Ranks wait to join.

    `ElasticWorld.admit` raises it on all ranks, and `ElasticWorld.run` catches it.
    """


class RankError(RuntimeError):
    """One or more ranks of a local launch failed or did not return.

    The text has up to ten lines for each traceback, equal tracebacks once, and ends with the
    reason. It names a file with the whole tracebacks, their variables, and the output of the ranks.

    Attributes:
        failures: text of the failure by rank.
        hung: ranks that had not returned when time was up.
    """

    def __init__(
        self, message: str, failures: dict[int, str] | None = None, hung: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = failures or {}
        self.hung = hung


class MissingExtraError(MeshError, ImportError):
    """A feature needs a package that is not installed."""
