"""A grid of ranks with a communicator along any of its axes, created when it is first asked for."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from .. import _torch
from .._torch import ProcessGroup, is_compiling, refuse_its_own_mesh
from ..errors import MeshError, NoGroupError
from ..groups.process_groups import GROUPS_IN_GRAPHS, BackendChoice, Comm, find_or_create, note_group
from ..groups.world import world_place
from .rank_grid import AxisLike, RankGrid


class CommunicatorGrid(RankGrid):
    """A RankGrid whose ranks can communicate along its axes."""

    __slots__ = ()
    _TRACED = ("get_group",)

    def _create_groups(self) -> None:
        """Have the group of every axis ready; runs on the ranks of the mesh."""
        if self._coordinate is not None:
            for axis in range(self.ndim):
                self.comm(axis)

    def _adopt(self, groups: Sequence[ProcessGroup]) -> None:
        """Use groups that exist, one per axis.

        Raises:
            MeshError: a group has other ranks than its axis; also on ranks outside of the mesh that are in it.
        """
        for axis, group in enumerate(groups):
            members = tuple(_torch.group_ranks(group))
            if self._coordinate is not None:
                ranks = self.ranks_along(axis)
            elif all(self.coordinate_of(rank) is None for rank in members):
                continue
            else:
                ranks = ()  # none through this rank
            if set(ranks) != set(members):
                raise MeshError(
                    f"axis {self.axis_names[axis]} of {self!r} has the ranks {ranks}, but its group has {members}"
                )
            self._comms[axis,] = Comm.over(group, (self.axis_names[axis],), ranks)

    def comm(self, axes: AxisLike | tuple[AxisLike, ...]) -> Comm:
        """The communicator of this rank along one or several axes; created at first use, by its members only.

        Args:
            axes: one axis, or several: then the ranks count row-major over them in the order given.

        Raises:
            MeshTypeError: neither names nor indices.
            AxisError: unknown or repeated axis.
            NoGroupError: the mesh is abstract, this rank is not in it, or its default group was destroyed.
        """
        try:
            comm = self._comms.get(axes)
        except TypeError:  # a list, or what is no axis at all
            comm = None
        if comm is None:
            indices = self._axes(axes)
            comm = self._comms.get(indices)
            if comm is None:
                comm = self._comms.setdefault(indices, self._create_comm(indices))  # one for all threads
            if isinstance(axes, Hashable):  # a list may have come
                self._comms[axes] = comm
        return comm

    def _create_comm(self, axes: tuple[int, ...]) -> Comm:
        if self._abstract_rank is not None and self._fields.connect is None:
            raise NoGroupError(f"{self!r} is abstract: it has no process groups, so nothing can be sent along {axes}")
        if self._coordinate is None:
            raise NoGroupError(f"rank {self._own_rank()} is not in {self!r}, so it has no group along its axes")
        if self._fields.connect is not None:
            return self._fields.connect(self.ranks_along(axes))
        if self._world != world_place():
            raise NoGroupError(f"the default process group that {self!r} was created under has been destroyed")
        names = tuple(self.axis_names[a] for a in axes)
        ranks = self._along(axes, self._coordinate)
        choices = {self._choices[a] for a in axes}
        choice = choices.pop() if len(choices) == 1 else BackendChoice()
        return Comm.over(find_or_create(ranks, choice, f"mesh_{'_'.join(names)}"), names, ranks, choice)

    def get_group(self, mesh_dim: AxisLike | tuple[AxisLike, ...] | None = None) -> ProcessGroup:
        """The process group along one or several axes; one of a 1-D mesh if none is given. Raises as `comm` does."""
        if is_compiling():
            group: ProcessGroup = getattr(GROUPS_IN_GRAPHS, self._noted_group(mesh_dim))
            return group
        refuse_its_own_mesh(self)
        return self.comm(self._only_axis() if mesh_dim is None else mesh_dim).group

    def _noted_group(self, mesh_dim: AxisLike | tuple[AxisLike, ...] | None) -> str:
        """The name under which traced code finds a group; called while it is traced."""
        return note_group(self.comm(self._only_axis() if mesh_dim is None else mesh_dim))

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process group of every axis, in their order."""
        return [self.comm(axis).group for axis in range(self.ndim)]

    @property
    def _dim_group_names(self) -> list[str]:
        return [self.comm(axis).name for axis in range(self.ndim)]


def common_root(meshes: Sequence[Any]) -> Any:
    """The mesh that several meshes were sliced from.

    What is kept for a mesh is kept for its equals, so a mesh may come back as an equal slice of another root: it counts
    as the slice of this root that it equals.

    Raises:
        MeshError: there is none.
    """
    root = meshes[0]._get_root_mesh()
    for mesh in meshes:
        same = mesh._get_root_mesh() == root or (
            {*mesh.axis_names} <= {*root.axis_names} and root[mesh.axis_names] == mesh
        )
        if not same or mesh._rank_map != meshes[0]._rank_map:
            raise MeshError(f"only meshes sliced from one mesh can be concatenated, got {', '.join(map(repr, meshes))}")
    return root
