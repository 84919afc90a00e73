"""A grid of ranks as an immutable value: shape, names, coordinates, equality; no communication.

DeviceMesh adds process groups and derived meshes to it. `axis` is a mesh dimension, given by name or index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Any, Self

import torch

from . import _torch
from .errors import AxisError, NoGroupError
from .groups import BackendChoice, Comm
from .layout import Layout
from .world import world_id

__all__ = ["AxisLike", "Parts", "RankGrid"]

AxisLike = int | str


@dataclass(frozen=True, slots=True)
class Parts:
    """What a mesh is made of.

    Attributes:
        device_type: without an index.
        layout: where the ranks lie.
        names: of the axes, or None.
        choices: backend of every axis.
        rank_map: the ranks that the layout points into, None when it gives the ranks themselves.
        abstract_rank: the rank that an abstract mesh is seen from, None for one with process groups.
    """

    device_type: str
    layout: Layout
    names: tuple[str, ...] | None
    choices: tuple[BackendChoice, ...]
    rank_map: tuple[int, ...] | None = None
    abstract_rank: int | None = None


class RankGrid:
    """Ranks at coordinates, and the one this process has; everything of a mesh that needs no communication.

    Attributes:
        device_type: `cpu`, `cuda`, ...: never with an index.
        ndim: number of axes.
        shape: number of ranks along each axis.
        mesh_dim_names: names of the axes, None for an unnamed mesh.
        axis_names: names of the axes; "0", "1", ... for an unnamed mesh.
        is_abstract: whether the mesh is for planning only and has no process groups.
    """

    __slots__ = (
        "__weakref__", "_abstract_rank", "_choices", "_comms", "_coordinate", "_derived", "_flattened", "_hash", "_key",
        "_layout", "_names", "_parts", "_rank_map", "_root", "_tensor", "_world", "axis_names", "device_type",
        "is_abstract", "mesh_dim_names", "ndim", "shape",
    )  # fmt: skip
    _abstract_rank: int | None
    _choices: tuple[BackendChoice, ...]
    _comms: dict[Any, Comm]
    _coordinate: tuple[int, ...] | None
    _derived: dict[Any, Any]
    _flattened: dict[str, Any]
    _hash: int
    _key: tuple[object, ...]
    _layout: Layout
    _names: tuple[str, ...] | None
    _parts: Parts
    _rank_map: tuple[int, ...] | None
    _root: Any
    _tensor: torch.Tensor | None
    _world: int
    device_type: str
    ndim: int
    shape: tuple[int, ...]
    mesh_dim_names: tuple[str, ...] | None
    axis_names: tuple[str, ...]
    is_abstract: bool

    @classmethod
    def _of(cls, parts: Parts, root: Any = None) -> Self:
        """A mesh from checked parts, without communication."""
        self = object.__new__(cls)
        self._set(parts, root)
        return self

    def _set(self, parts: Parts, root: Any) -> None:
        """Fill the slots; the only place that does."""
        self._parts, self._root = parts, root
        self._layout, self._names = parts.layout, parts.names
        self._choices, self._rank_map, self._abstract_rank = parts.choices, parts.rank_map, parts.abstract_rank
        self._comms, self._derived, self._flattened, self._tensor = {}, {}, {}, None
        self._world = 0 if parts.abstract_rank is not None else world_id()
        put = object.__setattr__
        put(self, "device_type", parts.device_type)
        put(self, "ndim", parts.layout.ndim)
        put(self, "shape", parts.layout.shape)
        put(self, "mesh_dim_names", parts.names)
        put(self, "axis_names", parts.names or tuple(map(str, range(parts.layout.ndim))))
        put(self, "is_abstract", parts.abstract_rank is not None)
        where = parts.layout if parts.rank_map is None else self._normal_ranks()
        kinds = tuple(choice.key for choice in parts.choices)
        self._key = (parts.device_type, parts.names, where, parts.layout.shape, kinds, parts.abstract_rank, self._world)
        self._hash = hash(self._key)
        rank = self._own_rank()
        self._coordinate = None if rank is None else self.coordinate_of(rank)

    def _normal_ranks(self) -> Layout | tuple[int, ...]:
        """What identifies the ranks of an irregular mesh: a layout if they follow one after all, else the ranks."""
        ranks = self.ranks
        return Layout.fit(self._layout.shape, ranks) or ranks

    def _own_rank(self) -> int | None:
        if self._abstract_rank is not None:
            return self._abstract_rank
        world = _torch.default_group()
        return None if world is None else world.rank()

    # --- what a mesh is ---------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every global rank of the mesh in row-major order."""
        members = self._layout.members()
        return members if self._rank_map is None else tuple(self._rank_map[m] for m in members)

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an int32 CPU tensor of the mesh's shape, made at first use."""
        if self._tensor is None:
            self._tensor = torch.tensor(self.ranks, dtype=torch.int32, device="cpu").view(self.shape)
        return self._tensor

    def axis_index(self, axis: AxisLike) -> int:
        """The index of an axis given by name or index (negative counts from the end); AxisError when there is none."""
        if isinstance(axis, str):
            if axis in self.axis_names:
                return self.axis_names.index(axis)
        elif -self.ndim <= axis < self.ndim:
            return axis % self.ndim
        raise AxisError(f"no mesh axis {axis!r} in {self!r}: its axes are {', '.join(self.axis_names)}")

    def _axes(self, axes: AxisLike | Iterable[AxisLike]) -> tuple[int, ...]:
        """Indices of one or several axes; AxisError for a repeated one."""
        asked = (axes,) if isinstance(axes, int | str) else tuple(axes)
        found = tuple(self.axis_index(axis) for axis in asked)
        if len(set(found)) != len(found) or not found:
            raise AxisError(f"asked for axes {asked} of {self!r}: name each axis once, and at least one")
        return found

    def size(self, mesh_dim: AxisLike | None = None) -> int:
        """Number of ranks of the mesh, or along one axis."""
        return prod(self.shape) if mesh_dim is None else self.shape[self.axis_index(mesh_dim)]

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank at a coordinate; AxisError when the coordinate lies outside."""
        if len(coordinate) != self.ndim or not all(0 <= c < n for c, n in zip(coordinate, self.shape, strict=True)):
            raise AxisError(f"no coordinate {tuple(coordinate)} in {self!r} of shape {self.shape}")
        member = self._layout(coordinate)
        return member if self._rank_map is None else self._rank_map[member]

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """The coordinate of a global rank, None when it is not in the mesh."""
        if self._rank_map is None:
            return self._layout.coordinate(rank)
        return self._layout.coordinate(self._rank_map.index(rank)) if rank in self._rank_map else None

    def ranks_along(
        self, axes: AxisLike | Iterable[AxisLike], coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Global ranks along some axes through a coordinate (this rank's by default), row-major over the axes."""
        at = self._coordinate if coordinate is None else tuple(coordinate)
        if at is None:
            raise NoGroupError(f"rank {self._own_rank()} is not in {self!r}, so nothing runs through it")
        return self._along(self._axes(axes), at)

    def _along(self, axes: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, ...]:
        line = self._layout.select(axes, {a: i for a, i in enumerate(at) if a not in axes}).members()
        return line if self._rank_map is None else tuple(self._rank_map[m] for m in line)

    # --- where this rank is -----------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """The global rank of this process (of an abstract mesh: the one it was made for)."""
        rank = self._own_rank()
        if rank is None:
            raise NoGroupError(f"{self!r} does not know its rank: there is no default process group")
        return rank

    def get_coordinate(self) -> tuple[int, ...] | None:
        """The coordinate of this rank, None when it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: AxisLike | None = None) -> int:
        """The index of this rank along an axis (the only one by default)."""
        axis = self._only_axis() if mesh_dim is None else self.axis_index(mesh_dim)
        if self._coordinate is None:
            raise NoGroupError(f"rank {self._own_rank()} is not in {self!r}")
        return self._coordinate[axis]

    def _only_axis(self) -> int:
        if self.ndim != 1:
            raise AxisError(f"{self!r} has {self.ndim} axes: say which ({', '.join(self.axis_names)})")
        return 0

    def _is_current_rank_part_of_mesh(self) -> bool:
        return self._coordinate is not None

    # --- as a value -------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        # Public facts are slots, not properties: torch.compile cannot read a property of a constant.
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RankGrid) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """How code that torch.compile generates spells it: by a name of its own."""
        name = f"mesh_{id(self)}"
        return name, {name: self}

    def _stable_hash(self) -> str:
        """A hash that is the same in every process (for caches on disk)."""
        return blake2b(repr(self._key[:-1]).encode(), digest_size=16).hexdigest()

    def __repr__(self) -> str:
        sizes = self.shape
        axes = (
            ", ".join(f"{n}={s}" for n, s in zip(self._names, sizes, strict=True)) if self._names else str(sizes)[1:-1]
        )
        ranks = self.ranks if self.size() <= 64 else ()
        if not ranks:
            where = f"{self._layout!r}"
        elif ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
            where = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        else:
            where = f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
        return f"DeviceMesh(({axes}), {self.device_type!r}, {where}{', abstract' if self.is_abstract else ''})"
