"""Conversion of ShardedTensor to DTensor and back, and functions of ShardedTensors by way of DTensors.

Both describe a ``Grid``: a mesh of ranks, and for every mesh axis the tensor dim that it shards and
the shard sizes.

    one sharded dim           1-D mesh, ranks in the order of their shards; ranks without a shard have size 0
    n-D grid of shards        n-D mesh of the same shape
    bricks, several per rank  no placements: NotExpressibleError

The arguments of a function are converted to the mesh of the first tensor whose layout has
placements. Pointwise functions, detected by a run on meta tensors, need no placements: they are
computed on each shard alone, in any layout. The class ShardedTensor is an argument here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch

from shoal_dtensor import DTensor, Replicate, Shard, Spec, implicit_replication
from shoal_dtensor.internal import (
    Box,
    TorchDispatchMode,
    format_box,
    grid,
    pytree,
    spans,
    volume,
)
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import ScopedValue

from .._torch import RemoteDevice
from ..arguments import expect
from ..errors import NotExpressibleError, UnsupportedOpError
from ..ranks.process_groups import members, mesh_of, one_dim_mesh
from ..ranks.reshard import move
from ..spec.metadata import Layout, TensorProperties
from ..spec.specs import spec_of

_MAY_RESHARD = ScopedValue("shoal_implicit_reshard", False)
_ALSO_POINTWISE = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten._to_copy.default,
}


class Grid(NamedTuple):
    """Shards that are the cells of a grid, on a mesh of the same shape.

    Attributes:
        mesh_shape: The number of shards along every mesh axis.
        ranks: The global rank at every mesh coordinate, row-major.
        placements: For every mesh axis, the tensor dim that it shards and the shard sizes.
    """

    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Shard, ...]


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """Return the grid of a layout, whose mesh has every member of the process group.

    Ranks without elements hold empty shards at the end of one axis, if they fill whole rows of the
    mesh: 2 x 2 shards on 6 ranks have a (3, 2) mesh whose last row is empty; on 5 ranks they have
    no mesh.

    Raises:
        NotExpressibleError: The shards are not a grid, or a rank has several of them.

    Example:
        >>> from shoal_shard_api.ops.via_dtensor import grid_of
        >>> grid_of(((1, ((0, 2),)), (0, ((2, 3),))), (3,), (0, 1)).placements
        (Shard(dim=0, sizes=(2, 1)),)
    """
    if not shape:
        raise NotExpressibleError("a tensor of 0 dims cannot have a Shard placement")
    holders = _holders(layout)
    cells = grid(list(holders), shape)  # 0:2 and 2:3 of (3,): ((2, 1),)
    if cells is None:
        held = ", ".join(f"{format_box(box)} on rank {rank}" for box, rank in holders.items())
        raise NotExpressibleError(
            f"the shards are not all cells of a grid over size {shape}: {held}"
        )
    dims = [dim for dim, sizes in enumerate(cells) if len(sizes) > 1]
    if not dims:
        dims = [_dim_of_empty_shards(layout, shape)]
    # Shard sizes along every mesh axis.
    axes = [list(cells[dim]) if holders else [] for dim in dims]
    candidates = dict.fromkeys([*(rank for rank, _ in layout), *members])
    idle = [rank for rank in candidates if rank not in holders.values()]
    if idle:
        _add_empty_shards(axes, idle, len(holders), len(members))

    spans_by_dim = [spans(sizes) for sizes in cells]
    idle_ranks = iter(idle)
    ranks = []
    for coordinate in product(*(range(len(sizes)) for sizes in axes)):
        index_by_dim = dict(zip(dims, coordinate, strict=True))
        # In a mesh of (3, 2) over 2 x 2 cells, the coordinates (2, 0) and (2, 1) have no cell.
        has_cell = bool(holders) and all(index_by_dim[dim] < len(cells[dim]) for dim in dims)
        if has_cell:
            box = tuple(s[index_by_dim.get(dim, 0)] for dim, s in enumerate(spans_by_dim))
            ranks.append(holders[box])
        else:
            ranks.append(next(idle_ranks))
    pairs = zip(dims, axes, strict=True)
    placements = tuple(Shard(dim, sizes=tuple(sizes)) for dim, sizes in pairs)
    return Grid(tuple(len(sizes) for sizes in axes), tuple(ranks), placements)


def _holders(layout: Layout) -> dict[Box, int]:
    """Return the rank that holds each box with elements; a NotExpressibleError for several on a rank."""
    filled = [(rank, box) for rank, box in layout if volume(box) > 0]
    ranks = [rank for rank, _ in filled]
    several = list(dict.fromkeys(rank for rank in ranks if ranks.count(rank) > 1))
    if several:
        raise NotExpressibleError(
            f"ranks {several} hold several shards each; a DTensor has one shard on each rank"
        )
    return {box: rank for rank, box in sorted(filled)}


def _dim_of_empty_shards(layout: Layout, shape: tuple[int, ...]) -> int:
    """Return the dim to shard if one rank holds every element, or if there is no element.

    It is a dim along which the other shards are empty.
    """
    if 0 in shape:
        return shape.index(0)
    for _, box in layout:
        for dim, (start, stop) in enumerate(box):
            if start == stop:
                return dim
    return 0


def _add_empty_shards(axes: list[list[int]], idle: list[int], filled: int, members: int) -> None:
    """Add shards of size 0 to the first axis whose rows the idle ranks fill.

    Args:
        axes: Shard sizes along every mesh axis; one of them is extended in place.
        idle: The ranks without elements.
        filled: The number of ranks with elements.
        members: The number of all ranks.

    Raises:
        NotExpressibleError: The idle ranks fill the rows of no axis.
    """
    for sizes in axes:
        # The ranks that share one index on the axis: in a 2 x 2 grid, 2 idle ranks are one row.
        row = max(filled, 1) // max(len(sizes), 1)
        if len(idle) % row == 0:
            sizes += [0] * (len(idle) // row)
            return
    counts = " x ".join(str(len(sizes)) for sizes in axes)
    raise NotExpressibleError(
        f"a grid of {counts} shards on {members} ranks leaves the ranks {idle} idle, which do not "
        "fill a row of a mesh of all ranks"
    )


def spec_for(tensor: Any) -> Spec:
    """Return the spec of the DTensor of the same shards; a NotExpressibleError if there is none."""
    group = tensor.process_group
    device_type = tensor._local_tensors[0].device.type
    grid = grid_of(tensor._layout, tuple(tensor.size()), members(group))
    mesh = mesh_of(group, device_type, grid.mesh_shape, grid.ranks)
    return Spec(mesh, grid.placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)


def to_dtensor(tensor: Any) -> DTensor:
    """Wrap the shards of a ShardedTensor in a DTensor."""
    local_tensors = tensor._local_tensors
    filled = [local for local in local_tensors if local.numel() > 0]
    local = filled[0] if filled else local_tensors[0]
    return _from_local(local, spec_for(tensor))


def _from_local(local: torch.Tensor, spec: Spec) -> DTensor:
    # The empty tensor of a rank without shards is 1-D.
    if local.shape != spec.local_shape:
        local = local.reshape(spec.local_shape)
    shape = torch.Size(spec.shape)
    stride = tuple(spec.stride)
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
    )


def layout_of(spec: Spec) -> Layout:
    """Return the global rank and box of every shard of a DTensor, in the order of its mesh."""
    mesh = spec.mesh
    coordinates = product(*(range(n) for n in mesh.shape))
    return tuple((mesh.rank_at(coord), spec.box(coord)) for coord in coordinates)


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """Wrap the shards of a DTensor in a ShardedTensor.

    Args:
        cls: The class of the result.
        dtensor: A DTensor that every mesh axis of more than one rank shards.
        like: A ShardedTensor on the same ranks, whose process group and devices the result has.

    Raises:
        NotExpressibleError: The DTensor is replicated or partial along an axis, or has no dims.
    """
    spec = dtensor.spec
    _check_sharded(spec)
    layout = layout_of(spec)
    local = dtensor.to_local()
    placements = _placements_of_ranks(spec.mesh.device_type, [rank for rank, _ in layout])
    if like is None:
        group = spec.mesh.comm(tuple(range(spec.mesh.ndim))).group
    else:
        group = like.process_group
        # Ranks without a shard in `like` keep the placement above.
        for shard in like._metadata.shards_metadata:
            if shard.placement is not None:
                placements[shard.rank] = shard.placement
    sharding_spec = spec_of(layout, placements)
    properties = TensorProperties(dtype=spec.dtype, requires_grad=local.requires_grad)
    metadata = sharding_spec.build_metadata(torch.Size(spec.shape), properties)
    return cls._wrap(sharding_spec, metadata, [local], group, stride=spec.stride)


def _check_sharded(spec: Spec) -> None:
    """Raise NotExpressibleError unless every mesh axis of more than one rank shards a dim."""
    mesh = spec.mesh
    unsharded = []
    for placement, name, size in zip(spec.placements, mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and not placement.is_shard():
            unsharded.append(f"{placement!r} on axis {name!r}")
    if unsharded or spec.ndim == 0:
        raise NotExpressibleError(
            f"a DTensor of shape {tuple(spec.shape)} with {', '.join(unsharded) or 'no dims'} has "
            f"no sharding spec: redistribute it to Shard on every mesh axis {mesh.axis_names}, or "
            "take full_tensor()"
        )


def _placements_of_ranks(device_type: str, ranks: Sequence[int]) -> dict[int, RemoteDevice]:
    """Return the placement of every rank: the device with the rank's index among those of its host."""
    count = max(torch.get_device_module(device_type).device_count(), 1)
    placements = {}
    for rank in ranks:
        device = device_type if device_type == "cpu" else f"{device_type}:{rank % count}"
        placements[rank] = RemoteDevice(f"rank:{rank}/{device}")
    return placements


# --- functions by way of DTensors -----------------------------------------------------------------


@contextmanager
def implicit_reshard(allow: bool = True) -> Iterator[None]:
    """Move, inside the ``with``, tensors without placements to Shard(0) for ops that need placements.

    Args:
        allow: False refuses such ops again, which is the default outside.

    Example:
        >>> first = ShardMetadata([0], [2], "rank:0/cpu")
        >>> second = ShardMetadata([2], [2], "rank:0/cpu")
        >>> both_on_one = EnumerableShardingSpec([first, second])
        >>> with implicit_reshard():
        ...     ones(both_on_one, 4).cumsum(0).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    expect("implicit_reshard", "allow", allow, bool)
    with _MAY_RESHARD.changed(lambda _: allow):
        yield


class DTensorCall:
    """A function call by way of DTensors.

    Attributes:
        tensors: The ShardedTensors among the arguments.
        initializer: The function is one of torch.nn.init.
        in_place: The function writes to its first argument.
        specs: By the id of a tensor: the spec of its DTensor; None if its layout has no placements.
        problem: The reason why a tensor has no placements; "" if all have.
    """

    def __init__(self, cls: Any, func: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.cls = cls
        self.func = func
        self.tensors = tensors
        self.name: str = str(getattr(func, "__name__", func))
        self.initializer: bool = getattr(func, "__module__", "") == "torch.nn.init"
        has_trailing_underscore = self.name.endswith("_") and not self.name.endswith("__")
        self.in_place: bool = has_trailing_underscore or self.name == "__setitem__"
        self.specs: dict[int, Any] = dict.fromkeys(map(id, tensors))
        self.problem = ""
        for tensor in tensors:
            try:
                self.specs[id(tensor)] = spec_for(tensor)
            except NotExpressibleError as error:
                self.problem = self.problem or str(error)

    @cached_property
    def home(self) -> DeviceMesh:
        """The mesh of the first tensor that has placements, else the 1-D mesh of all ranks."""
        for spec in self.specs.values():
            if spec is not None:
                return spec.mesh  # type: ignore[no-any-return]  # specs of Any
        first = self.tensors[0]
        return one_dim_mesh(first.process_group, first._local_tensors[0].device.type)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plain: Callable[[DTensor], Any] | None = None,
    ) -> Any:
        """Compute the call shard by shard or by way of DTensors, or refuse it.

        Args:
            args, kwargs: The arguments of the function.
            plain: Turns a result with dims into a plain tensor; by default it becomes a
                ShardedTensor.
        """
        self._refuse_leaf(args, kwargs)
        if self.problem:
            if is_pointwise(self.func, args, kwargs, self.tensors):
                return run_shardwise(self.func, args, kwargs, self.tensors)
            self.check_layouts()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.initializer):
            return self._run_at_home(args, kwargs, plain)

    def _run_at_home(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], plain: Callable[[DTensor], Any] | None
    ) -> Any:
        dtensors = {id(tensor): self._to_home(tensor) for tensor in self.tensors}
        nodes_before = {key: dtensor.grad_fn for key, dtensor in dtensors.items()}
        tensor_of_dtensor = {id(dtensors[id(tensor)]): tensor for tensor in self.tensors}
        replicated = [Replicate()] * self.home.ndim

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, self.cls):
                return dtensors[id(leaf)]
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dim() > 0:
                return DTensor.from_local(leaf, self.home, replicated, run_check=False)
            return leaf

        def convert_back(leaf: Any) -> Any:
            """Turn a result into a plain tensor or a ShardedTensor."""
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) in tensor_of_dtensor:
                return tensor_of_dtensor[id(leaf)]
            if leaf.dim() == 0:
                return leaf.full_tensor()
            if plain is not None:
                return plain(leaf)
            if not all(placement.is_shard() for placement in leaf.placements):
                placements = self._placements_at_home(leaf.shape) or _shard_further(leaf)
                leaf = leaf.redistribute(placements=placements)
            return from_dtensor(self.cls, leaf, like=self.tensors[0])

        home_args = pytree.tree_map(convert, args)
        home_kwargs = pytree.tree_map(convert, kwargs)
        # Plain tensors that the function itself creates are replicated.
        with implicit_replication():
            result = self.func(*home_args, **home_kwargs)
        for tensor in self.tensors:
            key = id(tensor)
            self._write_back(tensor, dtensors[key], nodes_before[key])
        return pytree.tree_map(convert_back, result)

    def _refuse_leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write to a leaf that requires grad; torch would allow it on a view of the shard."""
        if self.initializer or not torch.is_grad_enabled():
            return
        written = [args[0]] if self.in_place and args else []
        written += pytree.tree_leaves(kwargs.get("out"))
        for tensor in written:
            if isinstance(tensor, self.cls) and tensor.requires_grad and tensor.is_leaf:
                raise UnsupportedOpError(
                    f"{self.name}: a leaf ShardedTensor that requires grad cannot be written in "
                    "place; use torch.no_grad()"
                )

    def check_layouts(self) -> None:
        """Raise NotExpressibleError for a layout without placements, unless it may be moved."""
        if self.problem and not _MAY_RESHARD.own():
            raise NotExpressibleError(
                f"{self.name}: {self.problem}. reshard() to a ChunkShardingSpec first, or use "
                "implicit_reshard()"
            )

    def _is_at_home(self, tensor: Any) -> bool:
        spec = self.specs[id(tensor)]
        return spec is not None and spec.mesh == self.home

    def _to_home(self, tensor: Any) -> DTensor:
        """Return a tensor as a DTensor on the home mesh.

        A tensor of another layout gets the placements of an argument of its shape, or else shards
        of the dim that its first axis shards.
        """
        if self._is_at_home(tensor):
            return to_dtensor(tensor)
        placements = self._placements_at_home(tensor.shape)
        if placements is None:
            spec = self.specs[id(tensor)]
            dim = 0 if spec is None else spec.placements[0].dim
            placements = (Shard(dim),) * self.home.ndim
        target = Spec(self.home, placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)
        (local,) = move(tensor._local_tensors, tensor._layout, layout_of(target), tensor._comm)
        return _from_local(local, target)

    def _placements_at_home(self, shape: torch.Size) -> tuple[Shard, ...] | None:
        """Return the placements of an argument of this shape on the home mesh; None if there is none."""
        for tensor in self.tensors:
            if tensor.shape == shape and self._is_at_home(tensor):
                return self.specs[id(tensor)].placements  # type: ignore[no-any-return]  # specs of Any
        return None

    def _write_back(self, tensor: Any, dtensor: DTensor, node_before: Any) -> None:
        """Write the effect of an op on a DTensor back to its tensor.

        A tensor at home shares the memory of the DTensor and needs its autograd history. A tensor
        that was moved needs the values.
        """
        if self._is_at_home(tensor):
            if dtensor.grad_fn is not node_before:
                tensor._set_local_tensors([dtensor.to_local()])
        elif self.in_place and tensor is self.tensors[0]:
            moved = from_dtensor(self.cls, dtensor, like=tensor).resharded(tensor.sharding_spec())
            for local, new in zip(tensor._local_tensors, moved._local_tensors, strict=True):
                local.copy_(new)


def _shard_further(dtensor: DTensor) -> tuple[Any, ...]:
    """Return placements with Shard(0) on the axes without a shard, or on all if dim 0 is sharded already."""
    placements = dtensor.placements
    if any(placement.is_shard(0) for placement in placements):
        return (Shard(0),) * len(placements)
    return tuple(p if p.is_shard() else Shard(0) for p in placements)


# --- pointwise functions, shard by shard ----------------------------------------------------------


class _NotPointwise(Exception):  # noqa: N818, RUF100  # control flow; no user sees it
    """The function has an operator that is not elementwise."""


class _OnlyPointwise(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base class is untyped
    """Raises at the first operator that is not elementwise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_pointwise = (
            torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        )
        if not is_pointwise and func not in _ALSO_POINTWISE:
            raise _NotPointwise
        return func(*args, **(kwargs or {}))


def is_pointwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> bool:
    """Tell whether a call can be computed shard by shard.

    The answer depends on sizes, dtypes and layouts only, so it is the same on all ranks.
    """
    first = tensors[0]
    if any(tensor._layout != first._layout for tensor in tensors):
        return False

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty(tuple(leaf.shape), dtype=leaf.dtype, device="meta")
        return leaf

    meta_args = pytree.tree_map(to_meta, args)
    meta_kwargs = pytree.tree_map(to_meta, kwargs)
    try:
        with torch.no_grad(), _OnlyPointwise():  # type: ignore[no-untyped-call]  # as above
            result = func(*meta_args, **meta_kwargs)
    except _NotPointwise:
        return False
    outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return bool(outputs) and all(output.shape == first.shape for output in outputs)


def run_shardwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """Compute a pointwise call on each local shard; no communication."""
    first = tensors[0]
    shape = tuple(first.shape)
    sharded = {id(tensor) for tensor in tensors}

    def localize(index: int, box: Box | None, leaf: Any) -> Any:
        """Return the part of an argument for one shard; None is the box of a rank without shards."""
        if id(leaf) in sharded:
            return leaf._local_tensors[index]
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.new_empty(0) if box is None else block_for(leaf, box, shape)
        return leaf

    def join(*local_tensors: Any) -> Any:
        """Wrap the results of all shards; return an argument if its local tensors are the results."""
        if not isinstance(local_tensors[0], torch.Tensor):
            return local_tensors[0]
        for tensor in tensors:
            pairs = zip(local_tensors, tensor._local_tensors, strict=True)
            if all(result is local for result, local in pairs):
                return tensor
        return first._with(local_tensors)

    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()]
    results = []
    for index, box in enumerate(boxes or [None]):
        part = partial(localize, index, box)
        local_args = pytree.tree_map(part, args)
        local_kwargs = pytree.tree_map(part, kwargs)
        results.append(func(*local_args, **local_kwargs))
    return pytree.tree_map(join, *results)


def block_for(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """Slice a plain tensor so that it broadcasts against the shard with this box.

    Dims of size 1 are not sliced: they broadcast as they are.
    """
    spans_of_plain = box[len(shape) - plain.dim() :]
    slices = []
    for size, span in zip(plain.shape, spans_of_plain, strict=True):
        slices.append(slice(None) if size == 1 else slice(*span))
    return plain[tuple(slices)]
