"""The axes of data parallelism, and the layouts that they give to parameters and gradients.

A leaf is the parameter that the optimizer gets: a shard of a model's parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import redistribute_shards, shard_sizes, slices_of
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import OldAttribute, with_own_groups

# the name of the process groups for reductions alone
_OWN_GROUPS = "reduce"


@dataclass(frozen=True, slots=True, eq=False)
class DataAxes:
    """The axes of data parallelism."""

    # the mesh of these axes alone
    mesh: DeviceMesh
    # this many of the last axes shard parameters; the other axes hold replicas
    num_sharding_axes: int = 1
    # the names of these axes in `spmd_mesh` (`dp_mesh_dims`)
    names: tuple[str, ...] = ()
    # the mesh on which parameters are DTensors, if these axes are axes of it
    spmd_mesh: DeviceMesh | None = None
    # Whether the axis of replicas shards the leaves too. Example: 2 replicas have a shard of 4 rows
    # each, the same 4 rows. The optimizer of each replica then updates a leaf of 2 of these rows.
    shards_over_replicas: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, DeviceMesh):
            raise LayoutError(
                "expected a shoal_mesh.DeviceMesh of the data axes, got "
                f"{type(self.mesh).__name__}; shoal_dtensor.interop converts torch's"
            )

    @property
    def comm(self) -> Comm:
        return self.mesh.comm(tuple(range(self.mesh.ndim)))

    @property
    def num_shards(self) -> int:
        """The number of shards of a parameter, not counting replicas."""
        return prod(self.mesh.shape[self.mesh.ndim - self.num_sharding_axes :])

    ranks_of_shards = OldAttribute("num_shards")

    @property
    def axes_of_leaves(self) -> tuple[int, ...]:
        """The axes that shard the leaves, outermost first.

        If replicas divide the optimizer's work, the axis of replicas is the innermost one, so that
        the leaf is a part of the shard that all replicas have.
        """
        replicas = self.mesh.ndim - self.num_sharding_axes
        sharding = tuple(range(replicas, self.mesh.ndim))
        return (*sharding, *range(replicas)) if self.shards_over_replicas else sharding

    @property
    def num_leaf_shards(self) -> int:
        """The number of parts into which leaves divide a parameter."""
        return prod(self.mesh.shape[axis] for axis in self.axes_of_leaves)

    @property
    def has_replicas(self) -> bool:
        """True if parameters are replicated over some axes, and sharded over others."""
        return self.num_sharding_axes < self.mesh.ndim

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """The process group of the last axis, for collectives of the user.

        `fully_shard` makes one axis of all axes that shard, so the last axis is the only one.
        """
        return self.mesh.comm((self.mesh.ndim - 1,)).group

    @property
    def coordinates_of_group(self) -> list[int]:
        """The coordinates on the last axis, in the order of the ranks of its group."""
        comm = self.mesh.comm((self.mesh.ndim - 1,))
        if comm.order is None:
            return list(range(comm.size))
        # The inverse permutation. Example: the coordinates 0, 1 and 2 have the ranks 2, 0 and 1 in
        # the group -> the ranks 0, 1 and 2 of the group have the coordinates 1, 2 and 0.
        rank_in_group = comm.order
        return sorted(range(comm.size), key=lambda coordinate: rank_in_group[coordinate])

    def shared_by_replicas(self) -> DataAxes:
        """Return these axes with `shards_over_replicas` set, if there are replicas."""
        return replace(self, shards_over_replicas=self.has_replicas)

    def on_own_groups(self) -> DataAxes:
        """Return these axes on a mesh with separate process groups for reductions."""
        return replace(self, mesh=with_own_groups(self.mesh, _OWN_GROUPS))

    def in_groups_of(self, ranks: int) -> DataAxes:
        """Return axes that shard over groups of this many neighbors, and replicate over the groups.

        With 8 shards and 2 neighbors there are 4 groups of 2 ranks, and each group has all of a
        parameter. The axes are for values that stay after a forward. Leaves need `names` and
        `spmd_mesh`, such values do not, so these are left out.
        """
        axis = self.mesh.ndim - 1
        groups = self.mesh.shape[axis] // ranks
        names = None
        if self.mesh.mesh_dim_names is not None:
            name = self.mesh.mesh_dim_names[axis]
            names = (f"{name}_groups", f"{name}_in_group")
        return DataAxes(self.mesh.unflatten(axis, (groups, ranks), names))

    def placements(self, shard: Placement) -> list[Placement]:
        """Return one placement per data axis of a leaf that `shard` shards."""
        if self.shards_over_replicas and isinstance(shard, Shard):
            return self._placements_over_both(shard)
        return [
            *[Replicate()] * (self.mesh.ndim - self.num_sharding_axes),
            *[shard] * self.num_sharding_axes,
        ]

    def _placements_over_both(self, shard: Shard) -> list[Placement]:
        """Return the placements over the axis of replicas and the axis of shards, in this order.

        The axis of replicas is the innermost one: it divides the shards. Examples with 2 replicas,
        3 shards and 10 rows:

        | sizes            | replicas                      | shards           | leaves             |
        | ---------------- | ----------------------------- | ---------------- | ------------------ |
        | 4 4 2            | Shard(0)                      | sizes 4 4 2      | 2 2, 2 2, 1 1      |
        | 3 1 2 2 1 1      | sizes 3 1 2 2 1 1             | sizes 4 4 2      | 3 1, 2 2, 1 1      |
        | None             | Shard(0)                      | Shard(0)         | 2 2, 2 2, 1 1      |
        """
        _, shards = self.mesh.shape
        if shard.sizes is not None and len(shard.sizes) == shards:
            return [Shard(shard.dim), shard]
        return [shard, self.placement_of_shards(shard)]

    def placement_of_shards(self, shard: Shard) -> Shard:
        """Return the placement over the axis of shards, before replicas divide the shards.

        Example: 2 replicas and 3 shards with sizes 3 1 2 2 1 1 -> sizes 4 4 2.
        """
        replicas, shards = self.mesh.shape
        if shard.sizes is None or len(shard.sizes) == shards:
            return shard
        if len(shard.sizes) != replicas * shards:
            raise LayoutError(
                f"shard_placement_fn: {shard!r} must have a size for each of the {shards} shards, "
                f"or, with shard_optimizer, for each of {replicas * shards} ranks, got "
                f"{len(shard.sizes)} sizes"
            )
        starts = range(0, replicas * shards, replicas)
        # the sizes of one shard's leaves are next to each other
        sums = [sum(shard.sizes[start : start + replicas]) for start in starts]
        return Shard(shard.dim, sizes=sums)


# --- layouts of parameters ------------------------------------------------------------------------


def resting_and_gathered_layouts(
    param: nn.Parameter, axes: DataAxes, inner: Spec | None, chosen: Shard | None
) -> tuple[Spec, Spec]:
    """Return the layout at rest, and the gathered layout.

    At rest, the data axes shard the local tensors that the styles' axes have made.
    """
    if chosen is not None and not isinstance(chosen, Shard):
        raise LayoutError(
            f"shard_placement_fn: expected a Shard or None for each parameter, got {chosen!r}"
        )
    shard = (chosen or Shard(0)) if param.ndim else Replicate()  # a number stays replicated
    placements = axes.placements(shard)
    whole = [Replicate()] * axes.mesh.ndim
    # a plain parameter with types is a shard of the shape of `inner`
    shape = param.shape if inner is None else inner.shape
    meta = shape, None, param.dtype
    if inner is None:
        order_of_axes = None
        if axes.shards_over_replicas and isinstance(shard, Shard):
            order_of_axes = ((shard.dim % param.ndim, axes.axes_of_leaves),)
        return Spec(axes.mesh, placements, *meta, order_of_axes), Spec(axes.mesh, whole, *meta)
    if inner.partials:
        raise LayoutError(
            "a partial parameter cannot be sharded over data axes; redistribute it first: "
            f"{inner!r}"
        )
    shared = set(axes.mesh.axis_names) & set(inner.mesh.axis_names)
    if shared:
        raise LayoutError(
            f"the parameter is placed on axes {inner.mesh.axis_names} already and cannot be "
            f"sharded over the data axes {axes.mesh.axis_names}; use an axis for data or for "
            "styles, not for both"
        )
    mesh = DeviceMesh.concatenate([axes.mesh, inner.mesh])
    order: dict[int, tuple[int, ...]] = {}
    for dim, sharding in inner.shard_order:
        # the axes of the style come after the data axes
        shifted = [axis + axes.mesh.ndim for axis in sharding]
        order[dim] = tuple(shifted)
    gathered = Spec(mesh, [*whole, *inner.placements], *meta, tuple(order.items()))
    if isinstance(shard, Shard):
        dim = shard.dim % len(inner.shape)
        order[dim] = (*order.get(dim, ()), *axes.axes_of_leaves)
        placements = _placements_on_data_axes(inner.placements, shard.on_dim(dim), axes)
    return Spec(
        mesh, [*placements, *inner.placements], *meta, tuple(sorted(order.items()))
    ), gathered


def shared_layout(
    param: nn.Parameter, axes: DataAxes, inner: Spec | None, chosen: Shard | None
) -> Spec | None:
    """Return the layout of the shards that all replicas have; None if these are the leaves."""
    if not axes.shards_over_replicas:
        return None
    if chosen is not None:
        chosen = axes.placement_of_shards(chosen)
    resting, _ = resting_and_gathered_layouts(
        param, replace(axes, shards_over_replicas=False), inner, chosen
    )
    return resting


def without_data_axes(inner: Spec, axes: DataAxes) -> Spec | None:
    """Return the layout on the axes of styles of a DTensor on a mesh that may have data axes.

    Raises:
        LayoutError: if it is not replicated over these data axes.
    """
    if not axes.names or not {*axes.names} <= {*inner.mesh.axis_names}:
        return inner
    placed = dict(zip(inner.mesh.axis_names, inner.placements, strict=True))
    if not all(placed[name].is_replicate() for name in axes.names):
        raise LayoutError(
            f"fully_shard: a parameter on {inner!r} must be replicated over the data axes "
            f"{axes.names} before they shard it"
        )
    kept = [name for name in inner.mesh.axis_names if name not in axes.names]
    if not kept:
        return None
    axis_names = inner.mesh.axis_names
    order = []
    for dim, sharding in inner.shard_order:
        kept_axes = [kept.index(axis_names[axis]) for axis in sharding]
        order.append((dim, tuple(kept_axes)))
    return Spec(
        inner.mesh[tuple(kept)],
        [placed[name] for name in kept],
        inner.shape,
        None,
        dtype=inner.dtype,
        shard_order=tuple(order),
    )


def _placements_on_data_axes(
    inner: Sequence[Placement], shard: Shard, axes: DataAxes
) -> list[Placement]:
    """Return the placements on the data axes of a parameter that styles have placed.

    If styles have placed it in runs, the data axes shard each run. Example: a fused weight has 3
    runs (query, key, value) of 8 rows. A rank of a tensor axis of 2 has 4 rows of each run. Data
    axes shard each 4 rows, so that every rank has rows of all 3 runs.
    """
    strided = [p for p in inner if isinstance(p, StridedShard) and p.dim == shard.dim]
    # a StridedShard without sizes, or with one run, only expresses an order of axes
    runs = next((p for p in strided if p.sizes is not None and p.split_factor > 1), None)
    if runs is None or runs.sizes is None:
        return axes.placements(shard)
    if shard.sizes is not None:
        raise LayoutError(
            f"{shard!r} over data axes cannot have sizes, because styles have placed the "
            f"parameter in runs: {runs!r}"
        )
    placements: list[Placement] = [Replicate()] * axes.mesh.ndim
    sizes = list(runs.sizes)
    for axis in axes.axes_of_leaves:
        ranks = axes.mesh.shape[axis]
        sizes = [
            n
            for size in sizes
            for n in shard_sizes(size, Shard(0, multiple_of=shard.multiple_of), ranks)
        ]
        placements[axis] = StridedShard(shard.dim, split_factor=runs.split_factor, sizes=sizes)
    return placements


def narrow_to_shard(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """Return this rank's shard of a tensor that is replicated over the data axes, as a view."""
    if target.coordinate is None:
        return local.new_empty(target.local_shape)
    if target.is_strided:
        # this sends nothing, because the local tensor contains the shard
        (shard,) = redistribute_shards([local], [(source, target)]).wait()
        return shard
    return local[slices_of(target.box(target.coordinate), source.box(target.coordinate))]


# --- layouts of gradients -------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def partial_over_data(reduced: Spec, styled: tuple[Placement, ...]) -> Spec:
    """Return the layout of a gradient before its reduction over the data axes.

    Args:
        reduced: the layout after the reduction. The data axes come first in its mesh.
        styled: the gradient's placements on the axes of the styles, which come last.
    """
    data: list[Placement] = [Partial()] * (reduced.mesh.ndim - len(styled))
    return Spec(reduced.mesh, (*data, *styled), reduced.shape, None, dtype=reduced.dtype)


@lru_cache(maxsize=1024)
def partial_over_first(reduced: Spec, count: int) -> Spec:
    """Return the layout of a tensor that is still to be summed over the first axes."""
    return reduced.with_(placements=[*[Partial()] * count, *reduced.placements[count:]])


@lru_cache(maxsize=1024)
def move_of_flags(
    partial: Spec, axes: DataAxes, count: int, dtype: torch.dtype
) -> tuple[Spec, Spec]:
    """Return the layouts of flags that are sent with a gradient.

    They are partial over the data axes, and reduced to one row on every rank.
    """
    data = [Partial()] * axes.mesh.ndim
    inner = [Replicate()] * (partial.mesh.ndim - axes.mesh.ndim)
    flags = Spec(partial.mesh, [*data, *inner], (axes.num_leaf_shards, count), None, dtype=dtype)
    order = ((0, axes.axes_of_leaves),) if axes.axes_of_leaves else ()
    placements = [*axes.placements(Shard(0)), *inner]
    return flags, flags.with_(placements=placements, shard_order=order)


@lru_cache(maxsize=1024)
def scattered_flags(reduced: Spec, axes: DataAxes) -> Spec:
    """Return the layout of flags that are summed over the shards, but not over the replicas."""
    replicas = axes.mesh.ndim - axes.num_sharding_axes
    data = [*[Partial()] * replicas, *[Shard(0)] * axes.num_sharding_axes]
    return reduced.with_(placements=[*data, *reduced.placements[axes.mesh.ndim :]])


@lru_cache(maxsize=1024)
def layout_with_averages(layout: Spec, data_axes: int) -> Spec:
    """Return the layout with averages in place of sums over the data axes, the first axes."""
    placements = [*layout.placements]
    for axis, placement in enumerate(placements[:data_axes]):
        if isinstance(placement, Partial):
            placements[axis] = Partial("avg")
    return layout.with_(placements=placements)


@lru_cache(maxsize=1024)
def on_own_groups(layout: Spec) -> Spec:
    """Return the same layout on a mesh with separate process groups for reductions."""
    mesh = with_own_groups(layout.mesh, _OWN_GROUPS)
    return Spec(
        mesh,
        layout.placements,
        layout.shape,
        layout.stride,
        dtype=layout.dtype,
        shard_order=layout.shard_order,
    )
