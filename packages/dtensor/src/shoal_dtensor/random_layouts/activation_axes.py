"""`ActivationAxes`: the axes that shard the activations of a watched forward, and layouts on them.

A style declares a placement along its own axis only. Along the other axes, the output of a module
is placed like its input. For example, on a mesh of 2 data ranks and 4 tensor ranks:

    tensor                          shape on a rank   layout         global shape
    x, rows of the batch            (3, 8)            S(0), R        (6, 8)
    h = up(x), declared as S(1)     (3, 4)            S(0), S(1)     (6, 16)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal_mesh import DeviceMesh

from .._torch.tensors import local_of
from ..dispatch.global_call import replicated_spec
from ..layout.placements import Placement, Replicate, Shard
from ..layout.spec import Spec
from .layouts import (
    UNSEEN,
    UNSHARDED,
    AnyShard,
    LocalLayout,
    UnknownLayoutError,
    global_stride,
    known_layout,
    note_layout,
    sized_placement,
)


@dataclass(frozen=True, slots=True)
class ActivationAxes:
    """The axes that shard the activations of a watched forward.

    Attributes:
        mesh: the mesh of all these axes, on which layouts are described.
        index: the index in `mesh` of each axis, and of the first axis of each style on several
            axes. Axes that divide an axis of the batch have no index.
    """

    mesh: DeviceMesh
    index: Mapping[DeviceMesh, int]

    def note_spec(self, tensor: Tensor, spec: Spec, source: Tensor | None = None) -> None:
        """Note that a tensor is a DTensor, or its shard, on one axis.

        Args:
            tensor: the DTensor or the shard.
            spec: the spec of the DTensor.
            source: a tensor like which it is placed along the other axes. None if no other axis
                shards it.
        """
        if spec.mesh not in self.index or spec.partials:
            return
        local = local_of(tensor)
        is_dtensor = local is not tensor
        # On a mesh of one axis, a DTensor draws by itself.
        if self.mesh.ndim > 1 or not is_dtensor:
            axis = self.index[spec.mesh]
            shard = sized_placement(spec, 0)
            note_layout(tensor, self.layout_with_shard(local, axis, shard, source))

    def layout_with_shard(
        self, local: Tensor, axis: int | None, shard: AnyShard | None, source: Tensor | None
    ) -> LocalLayout:
        """Return the layout of a local tensor that is placed as `shard` along one axis.

        Args:
            local: the local tensor.
            axis: the index of the axis; None if the tensor is placed like `source` along all axes.
            shard: the placement along the axis; None if the axis does not shard the tensor.
            source: a tensor like which it is placed along the other axes. None if no other axis
                shards it.
        """
        source_layout = UNSEEN if source is None else known_layout(source)
        if source_layout.unknown_reason and (axis is None or self.mesh.ndim > 1):
            return source_layout
        try:
            placements = self._placements_like(source_layout.spec, local, axis)
            if axis is not None:
                placements[axis] = shard or Replicate()
            if any(isinstance(placement, AnyShard) for placement in placements):
                spec = self._global_spec(local, placements)
                return LocalLayout(spec, has_equal_draws=source_layout.has_equal_draws)
        except UnknownLayoutError as error:
            return LocalLayout(unknown_reason=str(error))
        if source_layout.has_equal_draws:
            return LocalLayout(replicated_spec(self.mesh, local), has_equal_draws=True)
        return UNSHARDED

    def _placements_like(
        self, source: Spec | None, local: Tensor, changed_axis: int | None
    ) -> list[Placement]:
        """Return the placements of a tensor that is sharded like `source`, except on one axis.

        Raises:
            UnknownLayoutError: a dim of the source that is sharded is not a dim of the tensor, or
                several axes shard it unevenly.
        """
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if source is None:
            return placements
        for axis in range(self.mesh.ndim):
            shard = sized_placement(source, axis)
            if axis == changed_axis or shard is None:
                continue
            dim = shard.dim
            has_dim = dim < local.ndim and local.shape[dim] == source.local_shape[dim]
            if not has_dim:
                raise UnknownLayoutError(f"where the sharded dim {dim} of the module's input went")
            sharding = source.dim_shardings[dim]
            if len(sharding.axes) > 1 and not sharding.even:
                raise _several_uneven_axes(dim)
            placements[axis] = shard
        return placements

    def _global_spec(self, local: Tensor, placements: Sequence[Placement]) -> Spec:
        """Return the spec of the global tensor that has a local tensor as its shard on this rank.

        Raises:
            UnknownLayoutError: the placements do not determine it, or it has another shard.
        """
        sharded_dims = [shard.dim for shard in placements if isinstance(shard, AnyShard)]
        shape = [*local.shape]
        # Equal sizes are left out, so that all specs of equal shards are the same.
        final_placements = [*placements]
        for axis, placement in enumerate(placements):
            if not isinstance(placement, AnyShard):
                continue
            dim = placement.dim
            sizes = placement.sizes
            if sizes is None or len({*sizes}) == 1:
                final_placements[axis] = Shard(dim) if isinstance(placement, Shard) else placement
                # Example: 4 rows on each of 2 ranks are 8 rows.
                shape[dim] *= self.mesh.size(axis)
            elif sharded_dims.count(dim) == 1:
                # A strided dim has `split_factor` runs, and each run has shards of these sizes.
                shape[dim] = sum(sizes) * getattr(placement, "split_factor", 1)
            else:
                raise _several_uneven_axes(dim)
        spec = Spec(
            self.mesh, final_placements, shape, global_stride(local, shape), dtype=local.dtype
        )
        if spec.local_shape != local.shape:
            raise UnknownLayoutError(f"a shard of shape {tuple(local.shape)} is none of {spec}")
        return spec


def _several_uneven_axes(dim: int) -> UnknownLayoutError:
    return UnknownLayoutError(f"several axes shard dim {dim}, in shards of different sizes")
