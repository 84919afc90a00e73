"""A grid of ranks as an immutable value, and the communicators along its axes.

`DeviceMesh` extends `RankGrid` by the creation and derivation of meshes. `axis` is a mesh
dimension, given by name or index.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from itertools import product
from math import prod
from threading import Lock
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import torch

from .. import _torch
from .._torch import ProcessGroup, is_compiling, refuse_torch_as_caller
from ..argument_types import require, require_each
from ..errors import AxisError, NoGroupError
from ..groups.process_groups import (
    GROUPS_IN_GRAPHS,
    BackendChoice,
    Comm,
    find_or_create,
    note_group,
    number_of_given,
)
from ..groups.world import WorldPlace, world_place
from ..notebook_html import html_table, html_text
from .rank_layout import Layout, MeshFields, read_sizes

# ranks of a mesh that a notebook shows as a table
_LARGEST_TABLE = 256

AxisLike = int | str


class MeshIdentity:
    """A key for caches: one object for all equal meshes over the same groups.

    Equal meshes (`==`) have the same ranks, names and devices. They may still communicate by
    different groups: two meshes of `from_group`, made of two groups over the same ranks, are equal.
    So a cache of objects that send on the groups of a mesh has the identity as its key, not the
    mesh. Identities are compared and hashed as objects.
    """

    __slots__ = ("__weakref__",)
    _by_key: ClassVar[WeakValueDictionary[object, MeshIdentity]] = WeakValueDictionary()
    _lock: ClassVar[Lock] = Lock()

    @classmethod
    def of(cls, key: object) -> MeshIdentity:
        """Return the identity with a key; simultaneous calls of threads return one object."""
        with cls._lock:
            return cls._by_key.setdefault(key, cls())


class RankGrid:
    """Ranks at coordinates, the coordinate of this process, and its communicators."""

    __slots__ = (
        "__weakref__",
        "_choices",
        "_comms",
        "_coordinate",
        "_derived",
        "_fields",
        "_flattened",
        "_groups_of_program",
        "_hash",
        "_key",
        "_layout",
        "_root",
        "_shared",
        "_tensor",
        "_unflattened",
        "_world",
        "axis_names",
        "device_type",
        "identity",
        "is_abstract",
        "mesh_dim_names",
        "ndim",
        "shape",
    )
    # the backend of each axis
    _choices: tuple[BackendChoice, ...]
    # the checked values from which the mesh was made
    _fields: MeshFields
    # the rank at each coordinate
    _layout: Layout
    # the mesh from which this one was derived; None for a mesh that a program created
    _root: Any
    # this process in the default group under which the mesh was created: size, rank and backend;
    # None for an abstract mesh
    _world: WorldPlace | None
    # axes, as a caller wrote them or as a tuple of indices -> the communicator along them
    _comms: dict[Any, Comm]
    # (names, ranks, backend choice) -> communicator; one dict for a mesh and all that are derived
    # from it
    _shared: dict[Any, Comm]
    # Ranks -> the communicator of a group that a program gave, and the number of the group. One
    # dict for a mesh and all that are derived from it.
    _groups_of_program: dict[frozenset[int], tuple[Comm, int]]
    # axes, as a caller wrote them -> the mesh of these axes only
    _derived: dict[Any, Any]
    # names of flattened axes -> 1-D mesh
    _flattened: dict[str, Any]
    # meshes that `unflatten` derived from this root
    _unflattened: set[Any]
    # the result of `mesh`, once it was read
    _tensor: torch.Tensor | None
    # `cpu`, `cuda`, ...: never with an index
    device_type: str
    # number of axes
    ndim: int
    # number of ranks along each axis
    shape: tuple[int, ...]
    # names of the axes, None for an unnamed mesh
    mesh_dim_names: tuple[str, ...] | None
    # names of the axes; "0", "1", ... for an unnamed mesh
    axis_names: tuple[str, ...]
    # whether the mesh is for planning only and has no process groups
    is_abstract: bool
    # the key of caches: equal for equal meshes over the same groups
    identity: MeshIdentity
    # The methods that torch.compile traces into; it calls all others itself and keeps the result.
    # The decorator of DeviceMesh, `constant_when_compiled`, reads this.
    _TRACED = ("get_group",)

    @classmethod
    def _of(cls, fields: MeshFields, root: Any = None) -> Self:
        """Create a mesh of checked fields, without communication."""
        created = object.__new__(cls)
        created._set(fields, root)
        return created

    def _set(self, fields: MeshFields, root: Any) -> None:
        """Fill all slots."""
        self._fields = fields
        self._root = root
        self._layout = fields.layout
        self._choices = fields.choices
        self._comms = {}
        self._derived = {}
        self._flattened = {}
        self._unflattened = set()
        self._tensor = None
        self._shared = {} if root is None else root._shared
        self._groups_of_program = {} if root is None else root._groups_of_program
        self._world = None if fields.abstract_rank is not None else world_place()
        ndim = fields.layout.ndim
        # public slots, which `__setattr__` refuses to set
        set_slot = object.__setattr__
        set_slot(self, "device_type", fields.device_type)
        set_slot(self, "ndim", ndim)
        set_slot(self, "shape", fields.layout.shape)
        set_slot(self, "mesh_dim_names", fields.names)
        set_slot(self, "axis_names", fields.names or tuple(map(str, range(ndim))))
        set_slot(self, "is_abstract", fields.abstract_rank is not None)
        choices = tuple([choice.key for choice in fields.choices])
        self._key = (
            fields.device_type,
            fields.names,
            fields.layout,
            choices,
            fields.abstract_rank,
            fields.connect,
            self._world,
        )
        self._hash = hash(self._key)
        self._identify()
        rank = self._own_rank()
        self._coordinate = None if rank is None else self.coordinate_of(rank)

    def _identify(self) -> None:
        """Set the identity: it belongs to the mesh's key and the numbers of its given groups."""
        numbers = tuple([number for _, number in self._groups_of_program.values()])
        object.__setattr__(self, "identity", MeshIdentity.of((self._key, numbers)))

    def _use_given(self, comms: Sequence[Comm]) -> None:
        """Use groups that a program gave instead of finding or creating groups."""
        for comm in comms:
            # `from_group` does not choose a backend for its axes, so requests have this choice.
            self._shared[comm.axes, comm.line, BackendChoice()] = comm
            # None for a group that any equal mesh would find, too
            number = number_of_given(comm.group)
            if number is not None:
                self._groups_of_program[frozenset(comm.line)] = comm, number
        self._identify()

    def _own_rank(self) -> int | None:
        if self._fields.abstract_rank is not None:
            return self._fields.abstract_rank
        world = _torch.default_group()
        return None if world is None else world.rank()

    # --- ranks and axes ---------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every global rank of the mesh in row-major order."""
        return tuple(self._layout.ranks)

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an int32 CPU tensor of the mesh's shape, created at first use."""
        if self._tensor is None:
            ranks = torch.tensor(self.ranks, dtype=torch.int32, device="cpu")
            self._tensor = ranks.view(self.shape)
        return self._tensor

    def axis_index(self, axis: AxisLike) -> int:
        """Return the index of an axis given by name or index (negative counts from the end).

        Raises:
            MeshTypeError: neither a name nor an index.
            AxisError: the mesh has no such axis.

        Example:
            >>> abstract_mesh((2, 4), ("dp", "tp")).axis_index("tp")
            1
        """
        if isinstance(axis, str):
            if axis in self.axis_names:
                return self.axis_names.index(axis)
        else:
            require(axis, int, f"a mesh axis is a name or an index of {', '.join(self.axis_names)}")
            if -self.ndim <= axis < self.ndim:
                # -1 of 2 axes: 1
                return axis % self.ndim
        raise AxisError(
            f"no mesh axis {axis!r} in {self!r}: its axes are {', '.join(self.axis_names)}"
        )

    def _axes(self, axes: AxisLike | Iterable[AxisLike]) -> tuple[int, ...]:
        """Return the indices of one or several axes; raise AxisError for a repeated one."""
        given_axes = self._as_tuple(axes)
        indices = tuple(self.axis_index(axis) for axis in given_axes)
        if len(set(indices)) != len(indices) or not indices:
            raise AxisError(
                f"asked for axes {given_axes} of {self!r}: name each axis once, and at least one"
            )
        return indices

    def _as_tuple(self, axes: AxisLike | Iterable[AxisLike]) -> tuple[AxisLike, ...]:
        """Return one or several axes as a tuple, as the user wrote them."""
        if isinstance(axes, int | str):
            return (axes,)
        names = ", ".join(self.axis_names)
        require_each(axes, int | str, f"mesh axes are names or indices of {names}")
        return tuple(axes)

    def size(self, mesh_dim: AxisLike | None = None) -> int:
        """Return the number of ranks of the mesh, or along one axis.

        Raises:
            AxisError: the mesh has no such axis.

        Example:
            >>> mesh = abstract_mesh((2, 4), ("dp", "tp"))
            >>> mesh.size(), mesh.size("tp")
            (8, 4)
        """
        return prod(self.shape) if mesh_dim is None else self.shape[self.axis_index(mesh_dim)]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the global rank at a coordinate.

        Args:
            coordinate: one index per axis.

        Raises:
            MeshTypeError: the coordinate is not a sequence of integers.
            AxisError: the mesh has no such coordinate.

        Example:
            >>> abstract_mesh((2, 4)).rank_at((1, 2))
            6
        """
        coordinate = read_sizes(coordinate, "coordinate")
        exists = len(coordinate) == self.ndim
        if exists:
            pairs = zip(coordinate, self.shape, strict=True)
            exists = all(0 <= position < size for position, size in pairs)
        if not exists:
            raise AxisError(f"no coordinate {tuple(coordinate)} in {self!r} of shape {self.shape}")
        return self._layout.rank_at(coordinate)

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a global rank; None if it is not in the mesh.

        Raises:
            MeshTypeError: the rank is not an integer.

        Example:
            >>> abstract_mesh((2, 4)).coordinate_of(6)
            (1, 2)
        """
        require(rank, int, "a rank is an int")
        return self._layout.coordinate(rank)

    def ranks_along(
        self, axes: AxisLike | Iterable[AxisLike], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Return the global ranks along some axes through a coordinate, row-major over the axes.

        Args:
            axes: one axis, or several.
            coordinate: one index per axis of the mesh; the indices of `axes` do not matter. By
                default it is the coordinate of this rank.

        Raises:
            AxisError: the mesh has no such axis or coordinate.
            NoGroupError: no coordinate is given and this rank is not in the mesh.

        Example:
            >>> abstract_mesh((2, 4), ("dp", "tp")).ranks_along("dp", (0, 3))
            (3, 7)
        """
        at = self._coordinate
        if coordinate is not None:
            at = read_sizes(coordinate, "coordinate")
            # raises for a coordinate that does not exist
            self.rank_at(at)
        if at is None:
            raise NoGroupError(
                f"rank {self._own_rank()} is not in {self!r}, so it cannot run collectives along "
                "the mesh"
            )
        return tuple(self._layout.select(self._axes(axes), at).ranks)

    # --- the place of this rank -------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return the global rank of this process.

        For an abstract mesh it is the rank whose view the mesh is.

        Raises:
            NoGroupError: there is no default process group.
        """
        rank = self._own_rank()
        if rank is None:
            raise NoGroupError(
                f"the rank in {self!r} is unknown, because there is no default process group"
            )
        return rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return the coordinate of this rank; None if it is not in the mesh."""
        # torch's own DTensor and FSDP call this first, but need torch's own mesh.
        refuse_torch_as_caller(self)
        return self._coordinate

    def get_local_rank(self, mesh_dim: AxisLike | None = None) -> int:
        """Return the index of this rank along an axis.

        The axis may be omitted if the mesh has one axis.

        Raises:
            AxisError: the mesh has no such axis, or several and none is given.
            NoGroupError: this rank is not in the mesh.

        Example:
            >>> abstract_mesh((2, 4), ("dp", "tp"), rank=6).get_local_rank("tp")
            2
        """
        axis = self._only_axis() if mesh_dim is None else self.axis_index(mesh_dim)
        if self._coordinate is None:
            raise NoGroupError(f"rank {self._own_rank()} is not in {self!r}")
        return self._coordinate[axis]

    def _only_axis(self) -> int:
        """Return the axis of a 1-D mesh; raise AxisError for other meshes."""
        if self.ndim != 1:
            raise AxisError(
                f"{self!r} has {self.ndim} axes: name one of them ({', '.join(self.axis_names)})"
            )
        return 0

    def _is_current_rank_part_of_mesh(self) -> bool:
        refuse_torch_as_caller(self)
        return self._coordinate is not None

    # --- communicators ----------------------------------------------------------------------------

    def _create_groups(self) -> None:
        """Create the group of every axis; the ranks of the mesh call this."""
        if self._coordinate is not None:
            for axis in range(self.ndim):
                self.comm(axis)

    def comm(self, axes: AxisLike | tuple[AxisLike, ...]) -> Comm:
        """Return the communicator of this rank along one or several axes.

        It is created at first use, by its members only.

        Args:
            axes: one axis, or several: then the ranks count row-major over them in the order given.

        Raises:
            MeshTypeError: neither names nor indices.
            AxisError: unknown or repeated axis.
            NoGroupError: the mesh is abstract, this rank is not in it, or its default group was
                destroyed.
        """
        # `_comms` has an entry for each way to write the axes ("dp", 0, ("dp", "tp")), and one for
        # their indices, (0, 1). The first use of a way to write them needs the indices.
        try:
            comm = self._comms.get(axes)
        except TypeError:
            # unhashable: a list of axes, or an argument that `_axes` refuses
            comm = None
        if comm is not None:
            return comm
        indices = self._axes(axes)
        comm = self._comms.get(indices)
        if comm is None:
            # if several threads create a communicator, all get the one that was stored first
            comm = self._comms.setdefault(indices, self._create_comm(indices))
        # a list of axes cannot be a key
        if isinstance(axes, Hashable):
            self._comms[axes] = comm
        return comm

    def _create_comm(self, axes: tuple[int, ...]) -> Comm:
        """Return a communicator along axes; raise NoGroupError if this rank cannot have one."""
        # `connect` returns the communicators of simulated ranks.
        if self.is_abstract and self._fields.connect is None:
            raise NoGroupError(
                f"{self!r} is abstract: it does not have process groups to communicate along {axes}"
            )
        if self._coordinate is None:
            raise NoGroupError(
                f"rank {self._own_rank()} is not in {self!r}, so it has no group along its axes"
            )
        if self._fields.connect is not None:
            return self._fields.connect(self.ranks_along(axes))
        names = tuple([self.axis_names[axis] for axis in axes])
        ranks = self._layout.select(axes, self._coordinate).ranks
        choices = {self._choices[axis] for axis in axes}
        choice = choices.pop() if len(choices) == 1 else self._default_choice()
        key = (names, ranks, choice)
        if key not in self._shared:
            self._check_groups_can_be_created()
            group = self._find_group(ranks, choice, names)
            # if several threads come here, all get the communicator that was stored first
            self._shared.setdefault(key, Comm.over(group, names, ranks, choice))
        return self._shared[key]

    def _check_groups_can_be_created(self) -> None:
        """Raise NoGroupError if the groups of the mesh were aborted, or its world destroyed."""
        # Groups are aborted if a rank is lost. The lost rank would be missing in a new group, too.
        if any(comm.is_ended for comm in self._shared.values()):
            raise NoGroupError(
                f"the groups of {self!r} were aborted: make a new mesh over ranks that are "
                "alive, or begin a new default group (restart_world)"
            )
        if self._world != world_place():
            raise NoGroupError(
                f"the default process group that {self!r} was created under has been destroyed"
            )

    def _find_group(
        self, ranks: Sequence[int], choice: BackendChoice, names: tuple[str, ...]
    ) -> ProcessGroup:
        """Return the group of ranks that a program gave, or else find or create one."""
        given = self._groups_of_program.get(frozenset(ranks))
        if given is not None and choice == BackendChoice():
            comm, _ = given
            return comm.group
        return find_or_create(ranks, choice, f"mesh_{'_'.join(names)}")

    def _default_choice(self) -> BackendChoice:
        """Return the choice for axes without a common one: the default backend."""
        # all axes of a mesh have the same `keeps_rank_order`
        return BackendChoice(keeps_rank_order=self._choices[0].keeps_rank_order)

    def get_group(self, mesh_dim: AxisLike | tuple[AxisLike, ...] | None = None) -> ProcessGroup:
        """Return the process group along one or several axes.

        The axes may be omitted if the mesh is 1-D. Raises the same errors as `comm`.
        """
        if is_compiling():
            # A graph cannot contain a group. It reads an attribute by name each time it runs.
            group: ProcessGroup = getattr(GROUPS_IN_GRAPHS, self._noted_group(mesh_dim))
            return group
        refuse_torch_as_caller(self)
        return self.comm(self._only_axis() if mesh_dim is None else mesh_dim).group

    def _noted_group(self, mesh_dim: AxisLike | tuple[AxisLike, ...] | None) -> str:
        """Return the name under which traced code finds a group; called while it is traced."""
        return note_group(self.comm(self._only_axis() if mesh_dim is None else mesh_dim))

    def get_all_groups(self) -> list[ProcessGroup]:
        """Return the process group of every axis, in the order of the axes."""
        return [self.comm(axis).group for axis in range(self.ndim)]

    @property
    def _dim_group_names(self) -> list[str]:
        return [self.comm(axis).name for axis in range(self.ndim)]

    # --- as a value -------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        # Public attributes are slots that cannot be set. They are not properties, because
        # torch.compile cannot read a property of a constant.
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, RankGrid):
            return False
        return self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def _stable_hash(self) -> str:
        """Return a hash that is the same in every process (for caches on disk)."""
        # Without the last entry, the place of this process in the default group. The other entries
        # are texts, numbers and layouts, whose `repr` does not contain an address.
        return blake2b(repr(self._key[:-1]).encode(), digest_size=16).hexdigest()

    def _repr_html_(self) -> str:
        """Return the ranks as a table for notebooks, the last axis from left to right."""
        if self.size() > _LARGEST_TABLE:
            return html_text(repr(self))
        *names_down, name_across = self.axis_names
        # (2, 4): 4, so row 1 has the ranks at 4:8
        across = self.shape[-1]
        columns = [f"{name_across} {position}" for position in range(across)]
        rows = []
        for row, index in enumerate(product(*map(range, self.shape[:-1]))):
            ranks = self.ranks[row * across : (row + 1) * across]
            rows.append([", ".join(map(str, index)), *ranks])
        header = [" x ".join(names_down), *columns]
        return html_table(rows, header=header, caption=repr(self))

    def __repr__(self) -> str:
        if self.mesh_dim_names:
            sizes = zip(self.mesh_dim_names, self.shape, strict=True)
            axes = ", ".join([f"{name}={size}" for name, size in sizes])
        else:
            # (2, 4) and (2,) without the parentheses
            axes = str(self.shape)[1:-1]
        suffix = ", abstract" if self.is_abstract else ""
        ranks = _abbreviate(self._layout.ranks)
        return f"DeviceMesh(({axes}), {self.device_type!r}, {ranks}{suffix})"


def _abbreviate(ranks: Sequence[int]) -> str:
    """Return the text of ranks in their order: `rank 3`, `ranks 4-7`, `ranks 0, 2, 1, 3`."""
    first = ranks[0]
    if len(ranks) == 1:
        return f"rank {first}"
    if ranks == range(first, first + len(ranks)):
        return f"ranks {first}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:8]))
    more = ", ..." if len(ranks) > 8 else ""
    return f"ranks {shown}{more}"
