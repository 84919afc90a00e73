"""`StyledModule`: one style of a plan on one module.

It has the entry of the plan, the module and its path, and what the style declares for the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from shoal_dtensor import Shard, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import check_device_mesh, shard_sizes
from shoal_mesh import DeviceMesh

from ..apply.apply import check_parameters
from ..sharding.module_sharding import ModuleSharding
from ..styles.style import DeclaredStyle, ParallelStyle


class ShardedAxis(NamedTuple):
    """The sharding of a parameter along one mesh axis.

    Attributes:
        axis: name of the mesh axis.
        dim: the sharded dim, in words.
        size: number of its elements.
        sizes: number of elements of each rank.
    """

    axis: str
    dim: str
    size: int
    sizes: list[int]


class UnequalShards(NamedTuple):
    """A parameter whose ranks hold shards of different sizes along one axis."""

    description: str
    has_empty_shard: bool


class StyledModule(NamedTuple):
    """One style on one module.

    Attributes:
        key: the plan's entry.
        path: path of the module from the root.
        module: the module.
        style: the style.
        sharding: the declaration of the style for the module; None for styles that only have
            `_apply`.
    """

    key: str
    path: str
    module: nn.Module
    style: ParallelStyle
    sharding: ModuleSharding | None

    @property
    def distributes(self) -> bool:
        """True if the style declares that parameters of the module become DTensors."""
        return self.sharding is not None and self.sharding.distributes

    @property
    def style_name(self) -> str:
        """The name of the style, for messages and for the comparison of styles."""
        return type(self.style).__name__ if self.sharding is None else self.sharding.style

    @property
    def entry(self) -> str:
        """The plan's entry in words: its key and its style."""
        return f"{self.key!r} ({self.style})"

    def shard_sizes(self, name: str, mesh: DeviceMesh) -> Iterator[ShardedAxis]:
        """Yield the sharding of a parameter along each axis that shards it."""
        assert self.sharding is not None, "only declared styles are measured"
        fused = self.sharding.fused
        if fused is not None and name in fused.names:
            rows = f"{len(fused.blocks)} blocks of {fused.features} rows"
            axis = mesh.axis_names[0]
            yield ShardedAxis(axis, rows, fused.features, fused.rows(mesh.size()))
            return
        param = self.module.get_parameter(name)
        placements = self.sharding.placements(name, mesh.shape)
        for axis, placement, ranks in zip(mesh.axis_names, placements, mesh.shape, strict=False):
            if isinstance(placement, Shard | StridedShard):
                size = param.shape[placement.dim]
                dim = f"dim {placement.dim} of {size}"
                if isinstance(placement, Shard) and placement.multiple_of > 1:
                    dim = f"{dim} (multiples of {placement.multiple_of})"
                yield ShardedAxis(axis, dim, size, shard_sizes(size, placement, ranks))

    def unequal_shards(self, mesh: DeviceMesh) -> Iterator[UnequalShards]:
        """Yield the parameters whose shards differ in size."""
        if self.sharding is None or not self.distributes:
            return
        for name, _ in self.module.named_parameters():
            if not self.sharding.shards(name):
                continue
            path = f"{self.path}.{name}" if self.path else name
            for axis, dim, _, sizes in self.shard_sizes(name, mesh):
                if len(set(sizes)) > 1:
                    description = f"{path}: {dim} in shards of {sizes} along {axis}"
                    yield UnequalShards(description, has_empty_shard=0 in sizes)


def style_module(key: str, path: str, module: nn.Module, style: ParallelStyle) -> StyledModule:
    """Return the style with its declaration for a module; raise if it cannot shard the module."""
    if not isinstance(style, DeclaredStyle):
        return StyledModule(key, path, module, style, sharding=None)
    sharding = style.sharding(module)
    check_parameters(module, sharding)
    return StyledModule(key, path, module, style, sharding=sharding)


def axis_mesh(mesh: DeviceMesh, style: ParallelStyle) -> DeviceMesh:
    """Return the mesh on which a style acts: one axis, or the axes that it names.

    Raises:
        LayoutError: if the axis is ambiguous, or the mesh does not have it.
    """
    check_device_mesh(type(style).__name__, mesh)
    axes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    axis = style.axis
    if axis is None:
        if mesh.ndim == 1:
            return mesh
        raise LayoutError(
            f"{style}: the mesh has axes {axes}; name the one that the style uses: "
            f"style.on({mesh.axis_names[-1]!r})"
        )
    if isinstance(axis, int) and axis < mesh.ndim:
        axis = mesh.axis_names[axis]
    names = axis if isinstance(axis, tuple) else (axis,)
    if not set(names) <= axes.keys():
        raise LayoutError(f"{style}: the mesh has axes {axes}, but the style names {style.axis!r}")
    return mesh if mesh.ndim == 1 else mesh[axis]
