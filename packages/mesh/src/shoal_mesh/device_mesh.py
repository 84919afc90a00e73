"""DeviceMesh: ranks in a grid, with a process group along every axis.

Meshes derived from another one (slices, flattened, split and joined axes) refer to the same ranks and share its groups.
Not here: where ranks are (grid.py), reading user arguments (arguments.py), making groups (groups.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import product
from types import TracebackType
from typing import Any

import torch

from . import _torch
from ._torch import ProcessGroup, constant_when_compiled
from .arguments import BackendOverride, read_backends, read_device_type, read_names, read_ranks
from .errors import AxisError, MeshError, NoGroupError
from .grid import AxisLike, Parts, RankGrid
from .groups import BackendChoice, Comm, find_or_make
from .layout import Layout
from .world import check_agreement, ensure_world, world_id

__all__ = ["DeviceMesh", "current_mesh", "rebuild_mesh"]

_ENTERED: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("shoal_mesh_entered", default=())


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost enclosing `with mesh:`, or None."""
    entered = _ENTERED.get()
    return entered[-1] if entered else None


@constant_when_compiled
class DeviceMesh(RankGrid):
    """Ranks in a grid with named axes and a process group along each of them.

    Make one with `init_device_mesh`, `DeviceMesh(device_type, ranks)`, `DeviceMesh.from_group` or `abstract_mesh`.
    Two meshes are equal when they put the same ranks at the same coordinates, under the same names, with the same
    backend choices, in the same lifetime of the default process group.

    Args:
        device_type: `cpu`, `cuda`, ...: without an index.
        mesh: global ranks as a tensor or nested list; all ranks of the world by default. Every rank of the world must
            construct the mesh with equal arguments, also those that are not in it.
        mesh_dim_names: one name per axis.
        backend_override: per axis (name or index) a backend, its options, or both as a pair.
        _init_backend: False makes the groups at first use instead of now (then nothing is validated either).
        _rank: with `_init_backend=False`: a mesh as this rank sees it, without process groups (`abstract_mesh`).
        validate: compare the arguments of all ranks in one small collective before groups are made.

    Raises:
        MeshError: ranks, names or device type make no mesh, or do not fit the world.
        MeshMismatchError: ranks passed different arguments; raised on all of them.

    Example:
        >>> mesh = abstract_mesh((2, 4), ("dp", "tp"), rank=5)
        >>> mesh["tp"]
        DeviceMesh((tp=4), 'cpu', ranks 4-7)
    """

    __slots__ = ()
    _derived: dict[Any, DeviceMesh]
    _flattened: dict[str, DeviceMesh]
    _root: DeviceMesh | None

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
        _init_backend: bool = True,
        _rank: int | None = None,
        validate: bool = True,
    ) -> None:
        device_type = read_device_type(device_type)
        abstract = None if _init_backend else _rank
        world = None if abstract is not None else ensure_world(device_type).size()
        layout, rank_map = read_ranks(mesh, world)
        names = read_names(mesh_dim_names, layout.ndim)
        choices = read_backends(backend_override, names, layout.ndim)
        if _init_backend and validate:
            kinds = [c.key for c in choices] if any(c != BackendChoice() for c in choices) else "default"
            where = rank_map if rank_map is not None else layout
            check_agreement(
                f"{device_type} mesh of shape {layout.shape}, names {names}, ranks {where}, backends {kinds}"
            )
        self._set(Parts(device_type, layout, names, choices, rank_map, abstract), None)
        if _init_backend:
            self._make_groups()

    def _make_groups(self) -> None:
        """The group of every axis, made or found by the ranks of the mesh."""
        if self._coordinate is not None:
            for axis in range(self.ndim):
                self.comm(axis)

    @classmethod
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh over groups that exist: of one group its ranks, of several those of `mesh`, one group per axis.

        Nothing is sent. For several axes `mesh` gives the ranks.

        Raises:
            MeshError: `mesh` is missing or its axes are not the ranks of the groups.
        """
        groups = [group] if isinstance(group, ProcessGroup) else list(group)
        if not groups:
            raise MeshError("from_group needs at least one process group")
        if mesh is None:
            if len(groups) != 1 or isinstance(group, Sequence):
                raise MeshError(f"from_group of {len(groups)} groups in a list needs mesh= for where the ranks lie")
            mesh = list(_torch.group_ranks(groups[0]))
        layout, rank_map = read_ranks(mesh, ensure_world(device_type).size())
        if layout.ndim != len(groups):
            raise MeshError(f"from_group got {len(groups)} groups for a mesh of shape {layout.shape}: one per axis")
        names = read_names(mesh_dim_names, layout.ndim)
        self = cls._of(Parts(read_device_type(device_type), layout, names, (BackendChoice(),) * layout.ndim, rank_map))
        if self._coordinate is not None:
            for axis, given in enumerate(groups):
                ranks = self._along((axis,), self._coordinate)
                if set(ranks) != set(_torch.group_ranks(given)):
                    raise MeshError(
                        f"axis {self.axis_names[axis]} of {self!r} runs through ranks {ranks}, but its group holds "
                        f"{tuple(_torch.group_ranks(given))}"
                    )
                self._comms[axis,] = Comm.over(given, (self.axis_names[axis],), ranks)
        return self

    # --- communication ----------------------------------------------------------------------------------------------

    def comm(self, axes: AxisLike | tuple[AxisLike, ...]) -> Comm:
        """The communicator of this rank along one or several axes; made at first use, by its members only.

        Args:
            axes: one axis, or several: then the ranks count row-major over them in the order given.

        Raises:
            AxisError: unknown or repeated axis.
            NoGroupError: the mesh is abstract, this rank is not in it, or its default group was destroyed.
        """
        found = self._comms.get(axes)
        if found is None:
            indices = self._axes(axes)
            found = self._comms.get(indices)
            if found is None:
                found = self._comms[indices] = self._make_comm(indices)
            self._comms[axes] = found
        return found

    def _make_comm(self, axes: tuple[int, ...]) -> Comm:
        if self._abstract_rank is not None:
            raise NoGroupError(f"{self!r} is abstract: it has no process groups, so nothing can be sent along {axes}")
        if self._coordinate is None:
            raise NoGroupError(f"rank {self._own_rank()} is not in {self!r}, so it has no group along its axes")
        if self._world != world_id():
            raise NoGroupError(f"the default process group that {self!r} was made under has been destroyed")
        names = tuple(self.axis_names[a] for a in axes)
        ranks = self._along(axes, self._coordinate)
        choices = {self._choices[a] for a in axes}
        choice = choices.pop() if len(choices) == 1 else BackendChoice()
        return Comm.over(find_or_make(ranks, choice, f"mesh_{'_'.join(names)}"), names, ranks)

    def get_group(self, mesh_dim: AxisLike | tuple[AxisLike, ...] | None = None) -> ProcessGroup:
        """The process group along an axis (the only one by default) or along several."""
        return self.comm(self._only_axis() if mesh_dim is None else mesh_dim).group

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process group of every axis."""
        return [self.comm(axis).group for axis in range(self.ndim)]

    @property
    def _dim_group_names(self) -> list[str]:
        return [self.comm(axis).name for axis in range(self.ndim)]

    # --- derived meshes ---------------------------------------------------------------------------------------------

    def _derive(
        self, layout: Layout, names: tuple[str, ...] | None, choices: tuple[BackendChoice, ...], kept: dict[int, int]
    ) -> DeviceMesh:
        """A mesh over ranks of this one; `kept` maps its axes to those of this mesh that have the same group."""
        parts = replace(self._parts, layout=layout, names=names, choices=choices)
        mesh = self._of(parts, root=self._get_root_mesh())
        for new, old in kept.items():
            comm = self._comms.get((old,))
            if comm is not None and comm.axes == (mesh.axis_names[new],):
                mesh._comms[new,] = comm
        return mesh

    def _get_root_mesh(self) -> DeviceMesh:
        """The mesh that this one was derived from, itself for one that was constructed."""
        return self if self._root is None else self._root

    def __getitem__(self, axes: AxisLike | Sequence[AxisLike]) -> DeviceMesh:
        """The mesh of some axes, in the order asked for, through this rank; flattened axes by the name they were given.

        Args:
            axes: a name or index, or several.

        Raises:
            AxisError: unknown or repeated axis.
        """
        asked = (axes,) if isinstance(axes, int | str) else tuple(axes)
        found = self._derived.get(asked)
        if found is None:
            found = self._derived[asked] = self._slice(asked)
        return found

    def _slice(self, asked: tuple[AxisLike, ...]) -> DeviceMesh:
        root = self._get_root_mesh()
        flattened = [a for a in asked if isinstance(a, str) and a not in self.axis_names and a in root._flattened]
        if flattened:
            parts = [root._flattened[a] if isinstance(a, str) and a in flattened else self._slice((a,)) for a in asked]
            return parts[0] if len(parts) == 1 else self.concatenate(parts)
        axes = self._axes(asked)
        if axes == tuple(range(self.ndim)):
            return self
        at = self._coordinate or (0,) * self.ndim
        layout = self._layout.select(axes, {a: i for a, i in enumerate(at) if a not in axes})
        names = None if self._names is None else tuple(self._names[a] for a in axes)
        return self._derive(layout, names, tuple(self._choices[a] for a in axes), dict(enumerate(axes)))

    def flatten(self, name: str | None = None, backend_override: object | None = None) -> DeviceMesh:
        """The 1-D mesh over all ranks of this one in row-major order.

        Its group is made at first use (or found: the default group for the whole world). The name (`a_b` for axes a
        and b by default) also works as an axis of the mesh this one was sliced from: `mesh["a_b"]`.

        Raises:
            AxisError: the name is that of another axis.
        """
        root = self._get_root_mesh()
        name = name or "_".join(self.axis_names)
        if self.ndim == 1 and name == self.axis_names[0] and backend_override is None:
            return self
        if self._names is not None and name in root.axis_names and (root.ndim > 1 or root is not self):
            raise AxisError(f"cannot name a flattened mesh {name!r}: {root!r} has an axis of that name")
        choices = read_backends(None if backend_override is None else {0: backend_override}, None, 1)
        if backend_override is None and len(set(self._choices)) == 1:
            choices = self._choices[:1]
        mesh = self._derive(self._layout.flatten(), (name,), choices, {})
        if self._coordinate is None and root._coordinate is not None:
            return mesh  # a slice elsewhere in the mesh: the name stays for the one through this rank
        before = root._flattened.setdefault(name, mesh)
        if before != mesh:
            raise AxisError(f"{name!r} is already the name of {before!r}, flattened from the same mesh")
        return before

    def unflatten(
        self,
        dim: AxisLike,
        sizes: Sequence[int],
        names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
    ) -> DeviceMesh:
        """The mesh with one axis split row-major into several.

        Raises:
            MeshError: the sizes do not multiply to that axis, names are missing on a named mesh or repeated.
        """
        axis = self.axis_index(dim)
        if (names is None) != (self._names is None) or (names is not None and len(names) != len(sizes)):
            raise MeshError(
                f"unflatten of axis {dim!r} of {self!r} into {tuple(sizes)} needs one name per size, got {names}"
            )
        layout, rank_map = self._layout.unflatten(axis, sizes), self._rank_map
        if layout is None:  # no strides say it: list the ranks
            layout, rank_map = Layout.dense((*self.shape[:axis], *sizes, *self.shape[axis + 1 :])), self.ranks
        every = None if self._names is None else (*self._names[:axis], *(names or ()), *self._names[axis + 1 :])
        every = read_names(every, layout.ndim)
        new = read_backends(backend_override, tuple(names) if names else None, len(sizes))
        if backend_override is None:
            new = (self._choices[axis],) * len(sizes)
        kept = {a if a < axis else a + len(sizes) - 1: a for a in range(self.ndim) if a != axis}
        choices = (*self._choices[:axis], *new, *self._choices[axis + 1 :])
        mesh = self._derive(layout, every, choices, kept)
        if rank_map is not self._rank_map:
            mesh = self._of(replace(self._parts, layout=layout, names=every, choices=choices, rank_map=rank_map))
        return mesh

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """The mesh with the axes of several meshes that were sliced from one, in the order given.

        Raises:
            MeshError: they come from different meshes, or two of them run along the same ranks.
        """
        if not meshes:
            raise MeshError("concatenate needs at least one mesh")
        root = meshes[0]._get_root_mesh()
        if any(m._get_root_mesh() != root or m._rank_map != meshes[0]._rank_map for m in meshes):
            raise MeshError(f"only meshes sliced from one mesh can be concatenated, got {', '.join(map(repr, meshes))}")
        axes = tuple(axis for mesh in meshes for axis in mesh._layout.axes)
        if meshes[0]._coordinate is None:
            offset = root._layout.offset
        else:
            offset = meshes[0]._layout(meshes[0]._coordinate)
            for mesh in meshes:
                offset -= mesh._layout(mesh._coordinate or ()) - mesh._layout.offset
        layout = Layout(axes, offset)
        if not layout.is_injective():
            raise MeshError(f"two of {', '.join(map(repr, meshes))} run along the same ranks")
        named = [m._names for m in meshes if m._names is not None]
        names = tuple(n for part in named for n in part) if len(named) == len(meshes) else None
        joined = root._derive(layout, read_names(names, layout.ndim), tuple(c for m in meshes for c in m._choices), {})
        comms = [comm for mesh in meshes for comm in (mesh._comms.get((a,)) for a in range(mesh.ndim))]
        joined._comms.update(
            {(a,): c for a, c in enumerate(comms) if c is not None and c.axes == (joined.axis_names[a],)}
        )
        return joined

    def get_all_submeshes(self, axes: AxisLike | tuple[AxisLike, ...]) -> list[DeviceMesh]:
        """The slice along `axes` at every position of the other axes, in row-major order; this rank's among them."""
        own = self[axes]
        kept = self._axes(axes)
        others = [a for a in range(self.ndim) if a not in kept]
        found = []
        for position in product(*(range(self.shape[a]) for a in others)):
            layout = self._layout.select(kept, dict(zip(others, position, strict=True)))
            mesh = self._derive(layout, own._names, own._choices, {})
            found.append(own if mesh == own else mesh)
        return found

    # torch's spellings of the same.

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: object = None) -> DeviceMesh:
        return self.flatten(mesh_dim_name, backend_override)

    def _unflatten(
        self,
        dim: AxisLike,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
    ) -> DeviceMesh:
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override)

    _concatenate = concatenate
    _get_all_submeshes = get_all_submeshes
    _get_mesh_dim_by_name = RankGrid.axis_index

    def _get_root_mesh_dim(self) -> int | None:
        """The axis of the root mesh that this 1-D slice runs along, None when it is none of them."""
        root = self._get_root_mesh()
        if root is self or self.ndim != 1:
            return None
        return next((a for a, axis in enumerate(root._layout.axes) if axis == self._layout.axes[0]), None)

    def _sym_get_coordinate(self, index: int) -> int:
        return self.get_local_rank(index)

    @property
    def _flatten_mapping(self) -> Mapping[str, DeviceMesh]:
        return self._get_root_mesh()._flattened

    # --- as a value -------------------------------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks, names and choices; groups are found again where the mesh is unpickled."""
        return (rebuild_mesh, (self._parts, self._root, self._coordinate is not None))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __enter__(self) -> DeviceMesh:
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ENTERED.set(_ENTERED.get()[:-1])


def rebuild_mesh(parts: Parts, root: DeviceMesh | None, follows: bool) -> DeviceMesh:
    """The mesh that was pickled; a slice that ran through the rank that pickled it runs through this one now."""
    if root is not None and follows and root._coordinate is not None:
        own = root._layout(root._coordinate)
        start = own - root._layout.offset
        digits = [start // step % size * step for axis in parts.layout.axes for size, step in axis]
        moved = Layout(parts.layout.axes, own - sum(digits))
        if moved.coordinate(own) is not None:
            parts = replace(parts, layout=moved)
    return DeviceMesh._of(parts, root)
