"""DeviceMesh: the creation of a mesh, and of the meshes that are derived from it.

Derived meshes are slices, and meshes with flattened, split and joined axes. The base class
`RankGrid` has the ranks, the coordinates and the communicators of a mesh.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from .. import _torch
from .._torch import ProcessGroup, constant_when_compiled, refuse_torch_as_caller
from ..argument_types import require, require_each, suggests_keywords
from ..errors import AxisError, MeshError
from ..groups.process_groups import BackendChoice, Comm, end_groups
from ..groups.world import check_agreement, ensure_world
from ..shared_memory.channel import give_up
from .rank_grid import AxisLike, RankGrid
from .rank_layout import (
    BackendOverride,
    Layout,
    MeshFields,
    read_backends,
    read_device,
    read_names,
    read_ranks,
    read_sizes,
)

# the meshes of the enclosing `with mesh:` blocks, innermost last
_ENTERED: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("shoal_mesh_entered", default=())


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost enclosing `with mesh:`, or None.

    Example:
        >>> with abstract_mesh((2,)) as mesh:
        ...     current_mesh() is mesh
        True
    """
    entered = _ENTERED.get()
    return entered[-1] if entered else None


@constant_when_compiled
class DeviceMesh(RankGrid):
    """Ranks in a grid with named axes and a process group along each of them.

    Create one with `init_device_mesh`, `DeviceMesh(device_type, ranks)`, `DeviceMesh.from_group` or
    `abstract_mesh`. Two meshes are equal if they have the same ranks at the same coordinates, the
    same names and backend choices, in the same lifetime of the default process group. Equal meshes
    may still run over different groups that a program passed to `from_group`: each mesh sends on
    its own groups, and caches distinguish such meshes by their `identity`. Guards of compiled code
    compare meshes for equality, as torch's guards do. A DTensor brings its groups into compiled
    code. A mesh that is itself an argument of compiled code stands for all meshes that are equal to
    it.

    Args:
        device_type: `cpu`, `cuda`, ...: without an index.
        mesh: global ranks as a tensor or nested list; all ranks of the world by default. Every rank
            of the world must construct the mesh with equal arguments, also ranks that are not in
            it.
        mesh_dim_names: one name per axis.
        backend_override: per axis (name or index) a backend, its options, or both as a pair.
        preserve_rank_order: make process groups whose ranks count in the order of the mesh, also
            for an axis with all ranks of the world. By default the ranks of a group count by
            number, and only the collectives of shoal follow the order of the mesh.
        _init_backend: False creates the groups at first use instead of now (then nothing is
            validated either).
        _rank: with `_init_backend=False`: a mesh as this rank sees it, without process groups
            (`abstract_mesh`).
        validate: compare the arguments of all ranks in one all-gather of 16 bytes before groups are
            created.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: ranks, names or device type describe no mesh, or do not fit the world.
        MeshMismatchError: ranks passed different arguments; raised on all of them.

    Example:
        >>> mesh = abstract_mesh((2, 4), ("dp", "tp"), rank=5)
        >>> mesh["tp"]
        DeviceMesh((tp=4), 'cpu', ranks 4-7, abstract)
    """

    __slots__ = ()
    _derived: dict[Any, DeviceMesh]
    _flattened: dict[str, DeviceMesh]
    _unflattened: set[DeviceMesh]
    _root: DeviceMesh | None

    @suggests_keywords()
    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
        preserve_rank_order: bool = False,
        _init_backend: bool = True,
        _rank: int | None = None,
        validate: bool = True,
    ) -> None:
        require_each((validate, _init_backend), bool, "validate and _init_backend are bool")
        require(preserve_rank_order, bool, "preserve_rank_order is a bool")
        device_type = read_device(device_type)
        abstract_rank = None if _init_backend else _rank
        world_size = None if abstract_rank is not None else ensure_world(device_type).size()
        layout = read_ranks(mesh, world_size)
        names = read_names(mesh_dim_names, layout.ndim)
        choices = read_backends(
            backend_override, names, layout.ndim, keeps_rank_order=preserve_rank_order
        )
        if _init_backend and validate:
            kinds = [choice.key for choice in choices]
            check_agreement(
                f"{device_type} mesh of shape {layout.shape}, names {names}, ranks {layout.ranks}, "
                f"backends {kinds}"
            )
        fields = MeshFields(device_type, layout, names, choices, abstract_rank=abstract_rank)
        self._set(fields, None)
        if _init_backend:
            self._create_groups()

    @classmethod
    @suggests_keywords()
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Create a mesh over existing groups, one per axis; nothing is sent.

        Args:
            group: the group of the only axis, or a list with this rank's group along every axis.
            device_type: `cpu`, `cuda`, ...: without an index.
            mesh: global ranks as a tensor or nested list with one dim per axis; it may be None for
                one group.
            mesh_dim_names: one name per axis.

        Raises:
            MeshTypeError: an argument of a wrong type.
            MeshError: `mesh` is missing or its axes are not the ranks of the groups.

        Example:
            >>> def example() -> DeviceMesh:
            ...     return DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("dp",))
            >>> launch(example, 2)[0]
            DeviceMesh((dp=2), 'cpu', ranks 0-1)
        """
        groups = [group] if isinstance(group, ProcessGroup) else group
        device_type = read_device(device_type)
        require_each(
            groups, ProcessGroup, "from_group takes one process group, or a list with one per axis"
        )
        if not groups:
            raise MeshError("from_group needs at least one process group")
        if mesh is None:
            if len(groups) != 1 or isinstance(group, Sequence):
                raise MeshError(
                    f"from_group of {len(groups)} groups needs mesh=, the table of ranks by "
                    "coordinate"
                )
            mesh = list(_torch.group_ranks(groups[0]))
        layout = read_ranks(mesh, ensure_world(device_type).size())
        if layout.ndim != len(groups):
            raise MeshError(
                f"from_group got {len(groups)} groups for a mesh of shape {layout.shape}: one per "
                "axis"
            )
        names = read_names(mesh_dim_names, layout.ndim)
        created = cls._of(MeshFields(device_type, layout, names, (BackendChoice(),) * layout.ndim))
        comms: list[Comm] = []
        coordinate = created._coordinate
        for axis, (name, group_of_axis) in enumerate(zip(created.axis_names, groups, strict=True)):
            members = tuple(_torch.group_ranks(group_of_axis))
            ranks: Sequence[int] = ()
            if coordinate is not None:
                ranks = layout.select((axis,), coordinate).ranks
            elif all(created.coordinate_of(rank) is None for rank in members):
                # neither this rank nor its group is in the mesh
                continue
            if set(ranks) != set(members):
                raise MeshError(
                    f"axis {name} of {created!r} has the ranks {tuple(ranks)}, but its group has "
                    f"{members}"
                )
            comms.append(Comm.over(group_of_axis, (name,), ranks))
        created._use_given(comms)
        return created

    def abort(self) -> None:
        """Abort the process groups of this mesh, and of the meshes that were derived from it.

        A rank calls it when another rank is lost, or before it leaves. Ranks that wait for this
        rank in a collective of these groups raise an error instead of waiting for the timeout: NCCL
        ends its collectives, ranks of one host are notified, and gloo closes its connections.
        Afterwards collectives of this mesh raise NoGroupError, until another default process group
        begins (`restart_world`). If an axis has all ranks of the world, its group is the default
        process group, and all groups end.

        Raises:
            MeshError: this mesh was derived from another one.

        Example:
            >>> def example() -> bool:
            ...     mesh = init_device_mesh("cpu", (2,))
            ...     mesh.abort()
            ...     return dist.is_initialized()
            >>> launch(example, 2)
            [False, False]
        """
        if self._root is not None:
            raise MeshError(
                f"{self!r} was derived from {self._root!r}, with which it shares groups: abort "
                "that mesh"
            )
        comms = [comm for comm in self._shared.values() if not comm.is_ended]
        groups = [*dict.fromkeys(comm.group for comm in comms)]
        if not groups:
            return
        give_up("has aborted its mesh", groups)
        end_groups(groups)
        # gloo closes its connections when the groups are freed
        del groups
        gc.collect()

    # --- derived meshes ---------------------------------------------------------------------------

    def _derive(
        self, layout: Layout, names: tuple[str, ...] | None, choices: tuple[BackendChoice, ...]
    ) -> DeviceMesh:
        """Create a mesh over ranks of this one."""
        fields = replace(self._fields, layout=layout, names=names, choices=choices)
        return self._of(fields, self._get_root_mesh())

    def _get_root_mesh(self) -> DeviceMesh:
        """Return the mesh that this one was derived from; itself if it was constructed."""
        return self if self._root is None else self._root

    def __getitem__(self, axes: AxisLike | Sequence[AxisLike]) -> DeviceMesh:
        """Return the mesh of some axes, in the given order, through this rank.

        Flattened axes are selected by the name that they were given.

        Args:
            axes: a name or index, or several.

        Raises:
            MeshTypeError: neither names nor indices.
            AxisError: unknown or repeated axis.
        """
        given_axes = self._as_tuple(axes)
        mesh = self._derived.get(given_axes)
        if mesh is None:
            mesh = self._slice(given_axes)
            self._derived[given_axes] = mesh
        return mesh

    def _slice(self, given_axes: tuple[AxisLike, ...]) -> DeviceMesh:
        """Make the mesh of some axes; an axis may be the name of a flattened mesh."""
        flattened = self._flattened_of(given_axes)
        if flattened:
            slices = [
                flattened[axis] if axis in flattened else self._slice((axis,))
                for axis in given_axes
            ]
            return slices[0] if len(slices) == 1 else self.concatenate(slices)
        axes = self._axes(given_axes)
        if axes == tuple(range(self.ndim)):
            return self
        # a rank outside of the mesh gets the slice through the first rank
        layout = self._layout.select(axes, self._coordinate or (0,) * self.ndim)
        names = self.mesh_dim_names
        if names is not None:
            names = tuple([names[axis] for axis in axes])
        choices = tuple([self._choices[axis] for axis in axes])
        return self._derive(layout, names, choices)

    def _flattened_of(self, given_axes: tuple[AxisLike, ...]) -> dict[AxisLike, DeviceMesh]:
        """Return the flattened meshes among some axes, by their names."""
        known = self._get_root_mesh()._flattened
        flattened: dict[AxisLike, DeviceMesh] = {}
        for axis in given_axes:
            if isinstance(axis, str) and axis not in self.axis_names and axis in known:
                flattened[axis] = known[axis]
        return flattened

    def flatten(
        self, name: str | None = None, backend_override: object | None = None
    ) -> DeviceMesh:
        """Return the 1-D mesh over all ranks of this one in row-major order.

        Its group is created at first use, or is the default group if the mesh has all ranks. The
        name also works as an axis of the mesh that this one was sliced from: `mesh["a_b"]`.

        Args:
            name: by default `a_b` for axes a and b.
            backend_override: a backend, its options, or both as a pair.

        Raises:
            MeshTypeError: the name is not a text.
            AxisError: another axis has the name.

        Example:
            >>> abstract_mesh((2, 2), ("dp", "tp")).flatten()
            DeviceMesh((dp_tp=4), 'cpu', ranks 0-3, abstract)
        """
        require(name, str | None, "the name of a flattened mesh is a string")
        root = self._get_root_mesh()
        name = name or "_".join(self.axis_names)
        if self.axis_names == (name,) and backend_override is None:
            return self
        is_named_root_of_one_axis = root is self and root.ndim == 1
        is_taken = self.mesh_dim_names is not None and name in root.axis_names
        if is_taken and not is_named_root_of_one_axis:
            raise AxisError(
                f"cannot name a flattened mesh {name!r}: {root!r} already has an axis of that name"
            )
        default = self._default_choice()
        if backend_override is not None:
            keeps_order = default.keeps_rank_order
            choices = read_backends({0: backend_override}, None, 1, keeps_rank_order=keeps_order)
        elif len(set(self._choices)) == 1:
            choices = self._choices[:1]
        else:
            # the axes have different backends, so the new axis has the default one
            choices = (default,)
        mesh = self._derive(self._layout.flatten(), (name,), choices)
        if self._coordinate is None and root._coordinate is not None:
            # The slice does not contain this rank. The name is reserved for the slice through this
            # rank.
            return mesh
        before = root._flattened.setdefault(name, mesh)
        if before != mesh:
            raise AxisError(
                f"{name!r} is already the name of {before!r}, flattened from the same mesh"
            )
        return before

    def unflatten(
        self,
        dim: AxisLike,
        sizes: Sequence[int],
        names: Sequence[str] | None = None,
        backend_override: BackendOverride | None = None,
    ) -> DeviceMesh:
        """Return the mesh with one axis split row-major into several.

        Args:
            dim: the axis to split.
            sizes: number of ranks along each of the new axes.
            names: one per size; None on an unnamed mesh.
            backend_override: per new axis (name or index) a backend, its options, or both as a
                pair.

        Raises:
            MeshTypeError: an argument of a wrong type.
            AxisError: the mesh has no such axis, or would have two of one name.
            MeshError: the sizes do not multiply to that axis, or names are missing on a named mesh.

        Example:
            >>> abstract_mesh((2, 4), ("dp", "tp")).unflatten("tp", (2, 2), ("cp", "tp"))
            DeviceMesh((dp=2, cp=2, tp=2), 'cpu', ranks 0-7, abstract)
        """
        axis = self.axis_index(dim)
        sizes = read_sizes(sizes, "sizes")
        names = read_names(names, len(sizes))
        if (names is None) != (self.mesh_dim_names is None):
            raise MeshError(
                f"unflatten of axis {dim!r} of {self!r} into {sizes} needs one name per size, got "
                f"{names}"
            )
        layout = self._layout.unflatten(axis, sizes)
        every_name = None
        if names is not None:
            old_names = self.mesh_dim_names or ()
            every_name = (*old_names[:axis], *names, *old_names[axis + 1 :])
        every_name = read_names(every_name, layout.ndim)
        keeps_order = self._default_choice().keeps_rank_order
        new_choices = read_backends(
            backend_override, names, len(sizes), keeps_rank_order=keeps_order
        )
        if backend_override is None:
            new_choices = (self._choices[axis],) * len(sizes)
        choices = (*self._choices[:axis], *new_choices, *self._choices[axis + 1 :])
        root = self._get_root_mesh()
        if root._layout.is_crossed_by_axes(layout):
            derived = self._derive(layout, every_name, choices)
            root._unflattened.add(derived)
            return derived
        # The root cannot derive this mesh from slices of the root, so this mesh is its own root.
        # It shares the communicators of the old root.
        fields = replace(self._fields, layout=layout, names=every_name, choices=choices)
        mesh = self._of(fields)
        mesh._shared = self._shared
        mesh._groups_of_program = self._groups_of_program
        mesh._identify()
        return mesh

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh with the axes of several slices of one mesh, in the order given.

        Raises:
            MeshTypeError: not a sequence of meshes.
            MeshError: the slices come from different meshes, or do not cross at one rank.
        """
        require_each(meshes, DeviceMesh, "concatenate takes a sequence of DeviceMesh")
        if not meshes:
            raise AxisError("concatenate needs at least one mesh")
        root = meshes[0]._get_root_mesh()
        if not all(mesh._is_slice_of(root) for mesh in meshes):
            texts = ", ".join(map(repr, meshes))
            raise MeshError(f"concatenate takes meshes sliced from one mesh, got {texts}")
        layout = root._layout.cross_parts([mesh._layout for mesh in meshes])
        if layout is None:
            texts = ", ".join(map(repr, meshes))
            raise MeshError(f"{texts} join the same ranks, or do not have ranks in common")
        names = None
        if all(mesh.mesh_dim_names is not None for mesh in meshes):
            names = [name for mesh in meshes for name in mesh.axis_names]
        choices = tuple([choice for mesh in meshes for choice in mesh._choices])
        return root._derive(layout, read_names(names, layout.ndim), choices)

    def _is_slice_of(self, root: DeviceMesh) -> bool:
        """Return whether this mesh is a slice of a root mesh, or equal to a slice of it.

        Caches share entries between equal meshes, so a mesh may come back as an equal slice of
        another root.
        """
        if self._get_root_mesh() == root:
            return True
        return any(mesh._has_equal_slice(self) for mesh in (root, *root._unflattened))

    def _has_equal_slice(self, other: DeviceMesh) -> bool:
        """Return whether this mesh has the axes of another mesh, and their slice is equal to it."""
        known = {*self.axis_names, *self._get_root_mesh()._flattened}
        return known.issuperset(other.axis_names) and self[other.axis_names] == other

    def get_all_submeshes(self, axes: AxisLike | tuple[AxisLike, ...]) -> list[DeviceMesh]:
        """Return the slice along `axes` at every position of the other axes, in row-major order.

        The slice of this rank is among them.

        Raises:
            MeshTypeError: neither names nor indices.
            AxisError: unknown or repeated axis.

        Example:
            >>> [mesh.ranks for mesh in abstract_mesh((2, 2), ("dp", "tp")).get_all_submeshes("dp")]
            [(0, 2), (1, 3)]
        """
        own_slice = self[axes]
        along = self._axes(axes)
        # all positions of the other axes; slices along an axis begin at its position 0
        counts = [1 if axis in along else size for axis, size in enumerate(self.shape)]
        submeshes = []
        for coordinate in product(*map(range, counts)):
            layout = self._layout.select(along, coordinate)
            mesh = self._derive(layout, own_slice.mesh_dim_names, own_slice._choices)
            submeshes.append(own_slice if mesh == own_slice else mesh)
        return submeshes

    # names of torch for these methods

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: object = None
    ) -> DeviceMesh:
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

    def _get_mesh_dim_by_name(self, mesh_dim_name: str) -> int:
        return self.axis_index(mesh_dim_name)

    def _sym_get_coordinate(self, index: int) -> int:
        return self.get_local_rank(index)

    def _get_root_mesh_dim(self) -> int | None:
        """Return the axis of the root mesh that this 1-D slice runs along, or None."""
        root = self._get_root_mesh()
        if root is self or self.ndim != 1:
            return None
        coordinate = root.coordinate_of(self.ranks[0])
        for axis in range(root.ndim):
            if root.ranks_along(axis, coordinate) == self.ranks:
                return axis
        return None

    @property
    def _flatten_mapping(self) -> Mapping[str, DeviceMesh]:
        return self._get_root_mesh()._flattened

    # --- as a value -------------------------------------------------------------------------------

    def __format__(self, spec: str) -> str:
        # torch's functional collectives format a group of an unknown type into their error
        refuse_torch_as_caller(self)
        return super().__format__(spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the mesh from its fields, its root, and whether it has this rank.

        Groups are not pickled: an unpickled mesh finds or creates them at first use.
        """
        return (rebuild_mesh, (self._fields, self._root, self._coordinate is not None))

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __enter__(self) -> DeviceMesh:
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        entered = [*_ENTERED.get()]
        # Blocks may end in any order: remove the innermost entry of this mesh.
        for position in reversed(range(len(entered))):
            if entered[position] is self:
                del entered[position]
                break
        _ENTERED.set(tuple(entered))


def rebuild_mesh(fields: MeshFields, root: DeviceMesh | None, follows: bool) -> DeviceMesh:
    """Rebuild a pickled mesh.

    Args:
        fields: the fields of the mesh.
        root: the mesh that it was derived from, or None.
        follows: whether the rank that pickled the mesh was in it. Such a slice is moved: the result
            is the parallel slice that contains this rank.
    """
    if root is not None and follows and root._coordinate is not None:
        fields = replace(fields, layout=root._layout.parallel(fields.layout, root.get_rank()))
    return DeviceMesh._of(fields, root)


def with_own_groups(mesh: DeviceMesh, tag: str) -> DeviceMesh:
    """Return the mesh over the same ranks with process groups of its own.

    The groups are shared with meshes of the same tag alone. Collectives over the groups of the
    result and of `mesh` do not wait for one another.

    Args:
        mesh: a mesh.
        tag: the purpose of the groups.
    """
    choices = tuple(replace(choice, tag=tag) for choice in mesh._choices)
    return mesh._derive(mesh._layout, mesh.mesh_dim_names, choices)
