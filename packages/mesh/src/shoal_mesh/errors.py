"""The errors of meshes, groups and collectives.

Every error class also derives from the builtin error that torch raises in the same case. For
example, torch's `DeviceMesh` raises `KeyError` for a wrong axis name, and so does shoal's:
`AxisError` is a `KeyError`. A program that changes its import from torch to shoal keeps its
`except` clauses.
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
    """A collective that cannot be completed because of another rank.

    The other rank has ended, has stopped, no longer waits for the collective, or runs another one.

    Attributes:
        ranks: the global ranks at fault, as far as this rank can know; () if it cannot.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class LockstepError(PeerError):
    """Ranks that do not run the same program on the same values; raised on all of these ranks.

    There are three cases: the ranks were about to run different collectives; some ranks did not
    reach the collective that the other ranks run; or values that must be equal on all ranks differ.
    """


class DeadlockError(LockstepError):
    """All ranks of a lab wait for each other, or for ranks that have returned."""


class NewcomerError(RuntimeError):
    """New ranks that wait to join the world of an elastic program.

    `ElasticWorld.admit` raises this error on all ranks of the world. `ElasticWorld.run` catches the
    error, and makes a world with the new ranks.
    """


class RankError(RuntimeError):
    """One or more ranks of a local launch failed or did not return.

    The message has the tracebacks of the ranks, at most ten lines of each. A traceback that several
    ranks have in common appears once. The message ends with the reason of the failure, and names a
    file with the whole tracebacks, the values of their variables, and the output of the ranks.

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
