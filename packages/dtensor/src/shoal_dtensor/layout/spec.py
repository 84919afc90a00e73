"""`Spec`: all properties of a DTensor except its values.

Specs are immutable and interned: equal specs are the same object. Therefore a cache keyed by specs
hashes by identity, and everything that a spec determines (shardings of dims, local shape, ...) is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from shoal_mesh import DeviceMesh
from shoal_mesh.internal import constant_when_compiled, require

from .._torch.compiling import recorder_of_sizes, sizes_in_recorder
from ..argument_types import check_mesh
from ..errors import ArgumentTypeError, PlacementError
from .boxes import Box, spans
from .dim_sharding import AnyDimSharding, DimSharding, ShardOrder, StridedDimSharding
from .memory_order import contiguous_stride, dense_stride, dims_by_stride, is_expanded
from .partition_spec import normalize_placements, resolved_layout
from .placements import Interned, Partial, Placement, Replicate, Shard
from .spec_text import describe, spec_html
from .tensor_meta import (
    ShardOrderEntry,
    TensorMeta,
    has_symbols,
    hashable,
    settle_sizes,
    traced_with,
)

_REPLICATE = Replicate()


@constant_when_compiled
class Spec(Interned):
    """Mesh, placements, shard order, global shape, stride and dtype of a DTensor.

    Args:
        mesh: the mesh.
        placements: one per mesh axis; negative dims are resolved.
        shape: global shape.
        stride: global stride in elements; contiguous when left out.
        dtype: element type.
        shard_order: pairs (tensor dim, mesh axes outermost first). When left out, the placements
            determine the order: ascending, except where one is a `StridedShard`.

    Attributes:
        placements: one per mesh axis, in a normal form that is unique for each layout. They
            determine the whole layout: an axis that shards a dim after axes to its right has a
            `StridedShard`.
        shard_order: for every sharded dim, the mesh axes that shard it, outermost first.
        dim_shardings: for each tensor dim, how the mesh shards it.
        is_strided: whether some dim is a `StridedDimSharding`, so that ranks do not hold boxes. A
            reshape makes such a dim when it folds a sharded dim into the dim before it.
        partials: pairs (mesh axis, reduce op) of the axes over which values are still to be
            reduced.
        coordinate: the coordinate of this rank in the mesh; None if it is outside.
        local_shape: the shape of this rank's part; `(0,)` outside the mesh.
        replicated: whether every rank of the mesh holds all of the tensor.
        even: whether every rank's part has the same shape.
        example: if torch.compile keeps sizes as symbols, the spec with the sizes that it traces
            with; None otherwise.
        tensor_meta: global shape, stride and dtype.
        device_mesh: the mesh, under torch's name.

    Raises:
        PlacementError: if the placements do not fit the mesh or the tensor.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> spec = Spec(abstract_mesh((2, 2), rank=3), (Shard(0), Replicate()), (5, 4))
        >>> spec.local_shape, spec.local_offset, spec
        (torch.Size([2, 4]), (3, 0), Spec(f32[5@(0)=[3, 2], 4] on (0=2, 1=2)))
    """

    __slots__ = (
        "__weakref__", "_boxes", "coordinate", "device_mesh", "dim_shardings", "dtype", "even",
        "example", "is_strided", "local_shape", "mesh", "ndim", "partials", "placements",
        "replicated", "shape", "shard_order", "stride", "tensor_meta",
    )  # fmt: skip
    _CHANGED_BY: ClassVar[str] = "; use with_()"
    # called before the first spec is made: setup that an import must not do
    on_first_use: ClassVar[list[Callable[[], object]]] = []
    # all specs by their canonical layout, and by the arguments that users gave for them
    _by_layout: ClassVar[WeakValueDictionary[tuple[Any, ...], Spec]] = WeakValueDictionary()
    _by_arguments: ClassVar[WeakValueDictionary[tuple[Any, ...], Spec]] = WeakValueDictionary()

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    shard_order: ShardOrder
    dim_shardings: tuple[AnyDimSharding, ...]
    is_strided: bool
    partials: tuple[tuple[int, str], ...]
    coordinate: tuple[int, ...] | None
    local_shape: torch.Size
    ndim: int
    replicated: bool
    even: bool
    example: Spec | None
    tensor_meta: TensorMeta
    device_mesh: DeviceMesh

    def __new__(
        cls,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        shard_order: ShardOrder | None = None,
    ) -> Spec:
        try:
            shape = torch.Size(shape)
            stride = contiguous_stride(shape) if stride is None else tuple(stride)
            # an argument that is not a mesh is refused below
            identity = getattr(mesh, "identity", None)
            key = (identity, tuple(placements), shape, stride, dtype, shard_order)
            spec = cls._by_arguments.get(key)
        except TypeError as error:
            # symbols have no hash
            if has_symbols((*shape, *(stride or ()))):
                meta = TensorMeta(tuple(shape), tuple(stride or contiguous_stride(shape)), dtype)
                return cls._symbolic(mesh, placements, meta, shard_order)
            raise ArgumentTypeError(
                f"Spec: expected placements and a shape of integers, got {placements!r} and "
                f"{shape!r} ({error})"
            ) from error
        if spec is not None:
            return spec
        while cls.on_first_use:
            prepare = cls.on_first_use.pop()
            prepare()
        check_mesh("Spec", mesh)
        require(dtype, torch.dtype, "Spec: dtype is a torch.dtype", ArgumentTypeError)
        require(
            shard_order,
            (tuple, list, type(None)),
            "Spec: shard_order lists pairs (tensor dim, mesh axes)",
            ArgumentTypeError,
        )
        if min(shape, default=0) < 0:
            raise PlacementError(
                f"Spec: expected a shape without negative sizes, got {tuple(shape)}"
            )
        canonical, _, dim_shardings = resolved_layout(placements, mesh.shape, shape, shard_order)
        by_dim = dict(enumerate(dim_shardings))
        spec = cls.sharded(mesh, canonical, TensorMeta(shape, stride, dtype), by_dim)
        cls._by_arguments[key] = spec
        return spec

    @classmethod
    def sharded(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        meta: TensorMeta,
        by_dim: Mapping[int, AnyDimSharding],
    ) -> Spec:
        """Return the spec with these shardings of dims, without normalizing its placements.

        Args:
            mesh: the mesh.
            placements: the placements that belong to the shardings, in normal form.
            meta: global shape, stride and dtype.
            by_dim: the shardings; dims that are not listed are unsharded.
        """
        shape = torch.Size(meta.shape)
        stride = meta.stride
        dtype = meta.dtype
        # Example: ((0, (0, 1)),) if axes 0 and 1 shard dim 0.
        order = tuple([(dim, by_dim[dim].axes) for dim in sorted(by_dim) if by_dim[dim].axes])
        key = (mesh.identity, placements, shape, stride, dtype, order)
        try:
            spec = cls._by_layout.get(key)
        except TypeError:
            # symbols have no hash
            return cls._symbolic(mesh, placements, TensorMeta(shape, stride, dtype), order)
        if spec is None:
            shardings = [by_dim.get(dim) or DimSharding.whole(n) for dim, n in enumerate(shape)]
            meta = TensorMeta(shape, stride, dtype)
            spec = cls._make(mesh, placements, meta, order, dim_shardings=tuple(shardings))
            cls._by_layout[key] = spec
        return spec

    @classmethod
    def _symbolic(
        cls, mesh: DeviceMesh, placements: Sequence[Placement], meta: TensorMeta, order: Any
    ) -> Spec:
        """Return the spec of symbolic sizes; symbols in unevenly sharded dims become constants."""
        meta = TensorMeta(sizes_in_recorder(meta.shape), sizes_in_recorder(meta.stride), meta.dtype)
        normal, order, dims = resolved_layout(placements, mesh.shape, meta.shape, order)
        shape = settle_sizes(meta.shape)
        stride = settle_sizes(meta.stride)
        dtype = meta.dtype
        if not has_symbols((shape, stride)):
            return cls(mesh, normal, shape, stride, dtype=dtype, shard_order=order)
        # Each recorder has its own spec: expressions that a spec computes from symbols belong to
        # the recorder that was active.
        key = hashable((mesh.identity, normal, shape, stride, dtype, order, recorder_of_sizes()))
        spec = cls._by_layout.get(key)
        if spec is None:
            meta = TensorMeta(torch.Size(shape), stride, dtype)
            traced_shape = traced_with(shape)
            traced_stride = traced_with(stride)
            example = cls(mesh, normal, traced_shape, traced_stride, dtype=dtype, shard_order=order)
            spec = cls._make(mesh, normal, meta, order, dim_shardings=dims, example=example)
            cls._by_layout[key] = spec
        return spec

    @classmethod
    def _make(
        cls,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
        meta: TensorMeta,
        order: ShardOrder,
        dim_shardings: tuple[AnyDimSharding, ...],
        example: Spec | None = None,
    ) -> Spec:
        """Make a spec of normalized parts, with the attributes that follow from them."""
        shape, stride, dtype = meta
        spec = object.__new__(cls)
        put = object.__setattr__
        put(spec, "mesh", mesh)
        put(spec, "placements", placements)
        put(spec, "shape", shape)
        put(spec, "stride", stride)
        put(spec, "dtype", dtype)
        put(spec, "shard_order", tuple([ShardOrderEntry(*entry) for entry in order]))
        put(spec, "dim_shardings", dim_shardings)
        put(spec, "is_strided", StridedDimSharding in map(type, dim_shardings))
        put(spec, "ndim", len(shape))
        put(spec, "replicated", all(type(placement) is Replicate for placement in placements))
        put(spec, "even", False not in [sharding.even for sharding in dim_shardings])
        put(spec, "tensor_meta", meta)
        put(spec, "device_mesh", mesh)
        partials = [
            (axis, p.reduce_op) for axis, p in enumerate(placements) if isinstance(p, Partial)
        ]
        put(spec, "partials", tuple(partials))
        put(spec, "example", example)
        put(spec, "_boxes", {})
        coordinate = mesh.get_coordinate()
        put(spec, "coordinate", coordinate)
        local_shape = torch.Size((0,)) if coordinate is None else spec.local_shape_at(coordinate)
        put(spec, "local_shape", local_shape)
        return spec

    def box(self, coordinate: Sequence[int]) -> Box:
        """Return the global `(start, stop)` per tensor dim of the rank at a mesh coordinate.

        Raises:
            PlacementError: if the spec is strided.
        """
        boxes: dict[tuple[int, ...], Box] = object.__getattribute__(self, "_boxes")
        key = tuple(coordinate)
        box = boxes.get(key)
        if box is None:
            box = tuple(self.dim_sharding(dim).interval(key) for dim in range(self.ndim))
            boxes[key] = box
        return box

    def boxes(self, coordinate: Sequence[int]) -> list[tuple[Box, Box]]:
        """Return the global boxes of the rank at a coordinate, each with its local box.

        There is one box, unless the spec is strided. Then there is one box for each run, without
        empty boxes.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> from shoal_dtensor import StridedShard
            >>> qkv = StridedShard(0, split_factor=3, sizes=(2, 2))
            >>> Spec(abstract_mesh((2,)), (qkv,), (12,)).boxes((1,))
            [(((2, 4),), ((0, 2),)), (((6, 8),), ((2, 4),)), (((10, 12),), ((4, 6),))]
        """
        by_dim = [sharding.intervals(coordinate) for sharding in self.dim_shardings]
        places = []
        for intervals in by_dim:
            lengths = [stop - start for start, stop in intervals]
            places.append(spans(lengths))
        return list(zip(product(*by_dim), product(*places), strict=True))

    def dim_sharding(self, dim: int) -> DimSharding:
        """Return the sharding of a tensor dim that is not strided.

        Raises:
            PlacementError: if the dim is strided.
        """
        sharding = self.dim_shardings[dim]
        if isinstance(sharding, DimSharding):
            return sharding
        raise PlacementError(
            f"the dim of {sharding.length} elements was flattened from dims {sharding.shape} with "
            "sharded inner dims, so ranks do not hold one interval of it; redistribute it first"
        )

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Return the sizes of all shards of a tensor dim; see `dim_sharding`."""
        return self.dim_sharding(dim).sizes

    def offset(self, dim: int) -> int:
        """Return the global index of this rank's first element along a tensor dim.

        See `dim_sharding`.
        """
        if self.coordinate is None:
            return 0
        start, _ = self.dim_sharding(dim).interval(self.coordinate)
        return start

    @property
    def local_offset(self) -> tuple[int, ...]:
        """The global index of the first element of this rank's box; zeros outside the mesh."""
        if self.coordinate is None:
            return (0,)
        return tuple(start for start, _ in self.box(self.coordinate))

    @property
    def local_stride(self) -> tuple[int, ...]:
        """The stride in elements of this rank's shard, in the memory order of the global tensor.

        Placeholders on ranks that do not compute a shard have this stride, so that views of them
        succeed as on other ranks.
        """
        if is_expanded(self.shape, self.stride):
            # Shards of an expanded tensor are row-major.
            return contiguous_stride(self.local_shape)
        # Example: (1, 0) for the global stride (1, 4).
        order = dims_by_stride(self.stride)
        # In the example, a shard of (2, 3) has the stride (1, 2).
        return dense_stride(self.local_shape, order)

    @property
    def local_bytes(self) -> int:
        """The size of this rank's part in bytes."""
        return self.dtype.itemsize * self.local_shape.numel()

    def local_shape_at(self, coordinate: Sequence[int]) -> torch.Size:
        """Return the local shape on the rank at a mesh coordinate."""
        return torch.Size([s.size(coordinate) if s.axes else s.length for s in self.dim_shardings])

    def same_layout(self, other: Spec) -> bool:
        """Tell whether every rank holds the same box and partial values under both specs."""
        if self is other:
            return True
        have_same_shards = self.mesh == other.mesh and self.dim_shardings == other.dim_shardings
        return have_same_shards and self.partials == other.partials

    def with_(
        self,
        *,
        placements: Sequence[Placement] | None = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        shard_order: ShardOrder | None = None,
    ) -> Spec:
        """Return a spec that differs in the given arguments.

        Given placements determine their own order of axes, and a given shape is contiguous.
        """
        if placements is None:
            placements = self.placements
            shard_order = shard_order or self.shard_order
        if shape is None:
            shape = self.shape
            stride = self.stride if stride is None else stride
        return Spec(
            self.mesh, placements, shape, stride, dtype=dtype or self.dtype, shard_order=shard_order
        )

    def in_layout_of(self, other: Spec) -> Spec:
        """Return the spec with the placements and the order of axes of another spec.

        Args:
            other: a spec on the same mesh of a tensor with as many dims.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> mesh = abstract_mesh((2,))
            >>> Spec(mesh, (Replicate(),), (4, 6)).in_layout_of(Spec(mesh, (Shard(1),), (8, 2)))
            Spec(f32[4, 6@(0)] on (0=2))
        """
        return self.with_(placements=other.placements, shard_order=other.shard_order)

    def all_replicated(self) -> Spec:
        """Return the spec in which every rank holds all of the tensor.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> Spec(abstract_mesh((2, 2)), (Shard(0), Partial()), (4,)).all_replicated()
            Spec(f32[4] on (0=2, 1=2))
        """
        return self.with_(placements=(_REPLICATE,) * self.mesh.ndim)

    def without_partials(self) -> Spec:
        """Return the spec in which the axes with pending reductions replicate.

        The order of the axes that shard a dim is the order that their placements imply.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> Spec(abstract_mesh((2, 2)), (Shard(0), Partial()), (4,)).without_partials()
            Spec(f32[4@(0)] on (0=2, 1=2))
        """
        placements = [
            _REPLICATE if placement.is_partial() else placement for placement in self.placements
        ]
        return self.with_(placements=placements)

    def without_axes(self, axes: Collection[int]) -> Spec:
        """Return the spec in which these mesh axes replicate; the others stay as before.

        Args:
            axes: indices of mesh axes. An axis with explicit sizes that shards a dim after one of
                them becomes a plain `Shard(dim)`.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> from shoal_dtensor import StridedShard
            >>> spec = Spec(abstract_mesh((2, 2)), (StridedShard(0, sf=2), Shard(0)), (8,))
            >>> spec.without_axes({1}).placements
            (Shard(dim=0), Replicate())
        """
        placements, whole_order = normalize_placements(
            self.placements, self.mesh.shape, self.ndim, self.shard_order, shape=self.shape
        )
        kept: list[Placement] = [*placements]
        for axis in axes:
            kept[axis] = Replicate()
        kept_order: list[tuple[int, tuple[int, ...]]] = []
        for dim, axes_of_dim in whole_order:
            stays = [axis for axis in axes_of_dim if axis not in axes]
            kept_order.append((dim, tuple(stays)))
            removed = [axes_of_dim.index(axis) for axis in axes if axis in axes_of_dim]
            if not removed:
                continue
            # Explicit sizes list the shards of all outer axes, so they do not fit any more.
            for axis in axes_of_dim[min(removed) :]:
                if axis not in axes and isinstance(kept[axis], Shard):
                    kept[axis] = Shard(dim)
        order = tuple(kept_order)
        return Spec(self.mesh, kept, self.shape, self.stride, dtype=self.dtype, shard_order=order)

    def __reduce__(self) -> tuple[type[Spec], tuple[Any, ...]]:
        meta = ((*self.shape,), self.stride, self.dtype)
        order = tuple(map(tuple, self.shard_order))
        return Spec, (self.mesh, self.placements, *meta, order)

    def __repr__(self) -> str:
        return describe(self)

    def _repr_html_(self) -> str:
        return spec_html(self)

    # The attributes of torch's `DTensorSpec` that downstream code reads.

    @property
    def dim_map(self) -> list[int]:
        """The mesh axis that shards each tensor dim first, -1 for a dim that is not sharded."""
        return [sharding.axes[0] if sharding.axes else -1 for sharding in self.dim_shardings]

    @property
    def num_shards_map(self) -> list[int]:
        """The number of parts that each tensor dim is divided into."""
        counts = []
        for sharding in self.dim_shardings:
            shards_by_axis = [self.mesh.shape[axis] for axis in sharding.axes]
            counts.append(prod(shards_by_axis))
        return counts

    @property
    def num_shards(self) -> int:
        """The number of different parts of the tensor."""
        return prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        """The mesh axes over which the values are still to be reduced."""
        return [axis for axis, _ in self.partials]

    def is_replicated(self) -> bool:
        """Tell whether every rank of the mesh holds all of the tensor."""
        return self.replicated

    def is_sharded(self) -> bool:
        """Tell whether some mesh axis shards the tensor."""
        return any(sharding.axes for sharding in self.dim_shardings)

    def shallow_copy_with_tensor_meta(self, tensor_meta: Any) -> Spec:
        """Return the same layout of a tensor of another shape, stride and dtype."""
        shape, stride, dtype = tensor_meta
        return self.with_(shape=shape, stride=stride, dtype=dtype)

    @classmethod
    def from_dim_map(
        cls, mesh: DeviceMesh, dim_map: Sequence[int], sums: Sequence[int], tensor_meta: Any
    ) -> Spec:
        """Return the spec of dims sharded by these axes (-1: by none), partial sums over `sums`."""
        placements: list[Placement] = [
            Partial() if axis in sums else Replicate() for axis in range(mesh.ndim)
        ]
        for dim, axis in enumerate(dim_map):
            if axis >= 0 and axis not in sums:
                placements[axis] = Shard(dim)
        shape, stride, dtype = tensor_meta
        return cls(mesh, placements, shape, stride, dtype)
