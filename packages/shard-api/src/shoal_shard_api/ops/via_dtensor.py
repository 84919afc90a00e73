"""ShardedTensor <-> DTensor of the same shards, and functions of ShardedTensors by way of DTensors.

Both are a ``Grid``: a mesh of ranks, and for every mesh axis the tensor dim that it shards and the
shard sizes.

    one sharded dim           1-D mesh, ranks in the order of their shards; ranks without a shard have size 0
    n-D grid of shards        n-D mesh of the same shape
    bricks, several per rank  no placements: NotExpressibleError

A function's arguments are converted to one mesh: that of the first tensor whose layout has
placements. Pointwise ones, detected by a run on meta tensors, need no placements: they are computed
on each shard alone, in any layout. The class ShardedTensor is an argument here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from shoal_dtensor import DTensor, Replicate, Shard, Spec, implicit_replication
from shoal_dtensor.internal import (
    Box,
    ScopedValue,
    TorchDispatchMode,
    format_box,
    grid,
    pytree,
    spans,
    volume,
)
from shoal_mesh import DeviceMesh

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
    """Shards that are the cells of a grid, on a mesh of the same shape."""

    mesh_shape: tuple[int, ...]  # number of shards along every mesh axis
    # global rank at every mesh coordinate, row-major
    ranks: tuple[int, ...]
    # for every mesh axis, the tensor dim that it shards and the shard sizes
    placements: tuple[Shard, ...]


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """The grid with this layout that has every member of the process group in its mesh, else a NotExpressibleError.

    Ranks without elements hold empty shards at the end of one axis, if they fill whole rows of the
    mesh: 2 x 2 shards on 6 ranks have a (3, 2) mesh whose last row is empty, on 5 ranks they have
    none.

    Example:
        >>> from shoal_shard_api.ops.via_dtensor import grid_of
        >>> grid_of(((1, ((0, 2),)), (0, ((2, 3),))), (3,), (0, 1)).placements
        (Shard(dim=0, sizes=(2, 1)),)
    """
    if not shape:
        raise NotExpressibleError("a 0-dim tensor has no dim that a Shard placement could shard")
    filled = [(rank, box) for rank, box in layout if volume(box) > 0]
    holders = {box: rank for rank, box in filled}
    ranks = [rank for rank, _ in filled]
    several = list(dict.fromkeys(rank for rank in ranks if ranks.count(rank) > 1))
    if several:
        raise NotExpressibleError(
            f"ranks {several} hold several shards each; a DTensor has one shard on each rank"
        )
    cells = grid(list(holders), shape)  # 0:2 and 2:3 of (3,): ((2, 1),)
    if cells is None:
        held = ", ".join(f"{format_box(box)} on rank {rank}" for rank, box in sorted(filled))
        raise NotExpressibleError(
            f"the shards are not all cells of a grid over size {shape}: {held}"
        )
    dims = [dim for dim, sizes in enumerate(cells) if len(sizes) > 1]
    # one rank holds every element, or there is none: a dim along which the other shards are empty
    if not dims:
        empty = (dim for _, box in layout for dim, (start, stop) in enumerate(box) if start == stop)
        dims = [shape.index(0) if 0 in shape else next(empty, 0)]
    axes = [list(cells[dim]) if filled else [] for dim in dims]  # shard sizes along every mesh axis
    idle = [
        rank
        for rank in dict.fromkeys([*(rank for rank, _ in layout), *members])
        if rank not in ranks
    ]
    if idle:
        # ranks that share one index on the axis
        rows = [max(len(filled), 1) // max(len(sizes), 1) for sizes in axes]
        # 1 idle rank, rows of 2: none
        fits = [axis for axis, row in enumerate(rows) if len(idle) % row == 0]
        if not fits:
            raise NotExpressibleError(
                f"a grid of {' x '.join(str(len(sizes)) for sizes in axes)} shards on "
                f"{len(members)} ranks leaves the "
                f"ranks {idle} idle, and they do not fill a row of a mesh of all ranks"
            )
        # 2 idle, rows of 2: one more index, of size 0
        axes[fits[0]] += [0] * (len(idle) // rows[fits[0]])
    # A cell has a holder; what is beyond the cells is given to the idle ranks.
    spare = iter(idle)
    along = [spans(sizes) for sizes in cells]
    # of axes (2, 2, 0) and (2, 2), the coordinates (2, 0) and (2, 1) go to idle ranks
    order = []
    for coordinate in product(*(range(len(sizes)) for sizes in axes)):
        at = dict(zip(dims, coordinate, strict=True))
        # (2, 0) of 2 x 2 cells is not
        inside = bool(filled) and all(at[dim] < len(cells[dim]) for dim in dims)
        order.append(
            holders[tuple(each[at.get(d, 0)] for d, each in enumerate(along))]
            if inside
            else next(spare)
        )
    placements = tuple(
        Shard(dim, sizes=tuple(sizes)) for dim, sizes in zip(dims, axes, strict=True)
    )
    return Grid(tuple(len(sizes) for sizes in axes), tuple(order), placements)


def spec_for(tensor: Any) -> Spec:
    """The spec of the DTensor of the same shards; NotExpressibleError if there is none."""
    group = tensor.process_group
    device_type = tensor._local_tensors[0].device.type
    grid = grid_of(tensor._layout, tuple(tensor.size()), members(group))
    mesh = mesh_of(group, device_type, grid.mesh_shape, grid.ranks)
    return Spec(mesh, grid.placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)


def to_dtensor(tensor: Any) -> DTensor:
    """The DTensor of the same shards."""
    local = next(
        (each for each in tensor._local_tensors if each.numel() > 0), tensor._local_tensors[0]
    )
    return _from_local(local, spec_for(tensor))


def _from_local(local: torch.Tensor, spec: Spec) -> DTensor:
    # the empty tensor of a rank without shards is 1-D
    if local.shape != spec.local_shape:
        local = local.reshape(spec.local_shape)
    shape = torch.Size(spec.shape)
    stride = tuple(spec.stride)
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
    )


def layout_of(spec: Spec) -> Layout:
    """Global rank and box of every shard of a DTensor, in the order of its mesh."""
    coordinates = product(*(range(n) for n in spec.mesh.shape))
    return tuple(
        (spec.mesh.rank_at(coordinate), spec.box(coordinate)) for coordinate in coordinates
    )


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """The ShardedTensor of a DTensor's shards, with the process group and devices of ``like``, on the same ranks."""
    spec = dtensor.spec
    unsharded = [
        f"{placement!r} on axis {name!r}"
        for placement, name, size in zip(
            spec.placements, spec.mesh.axis_names, spec.mesh.shape, strict=True
        )
        if size > 1 and not placement.is_shard()
    ]
    if unsharded or spec.ndim == 0:
        raise NotExpressibleError(
            f"a DTensor of shape {tuple(spec.shape)} with {', '.join(unsharded) or 'no dims'} has "
            "no sharding spec: "
            f"redistribute it to Shard on every mesh axis {spec.mesh.axis_names}, or take "
            "full_tensor()"
        )
    layout = layout_of(spec)
    local = dtensor.to_local()
    kind = spec.mesh.device_type
    # of the host's devices the rank has that of its index
    count = max(torch.get_device_module(kind).device_count(), 1)
    devices = {
        rank: RemoteDevice(
            f"rank:{rank}/{kind}" if kind == "cpu" else f"rank:{rank}/{kind}:{rank % count}"
        )
        for rank, _ in layout
    }
    if like is None:
        group = spec.mesh.comm(tuple(range(spec.mesh.ndim))).group
    else:
        # a rank without a shard has a device of the same type
        group = like.process_group
        declared = {each.rank: each.placement for each in like._metadata.shards_metadata}
        devices |= {
            rank: placement for rank, placement in declared.items() if placement is not None
        }
    sharding = spec_of(layout, devices)
    properties = TensorProperties(dtype=spec.dtype, requires_grad=local.requires_grad)
    metadata = sharding.build_metadata(torch.Size(spec.shape), properties)
    return cls._wrap(sharding, metadata, [local], group, stride=spec.stride)


# --- functions by way of DTensors -----------------------------------------------------------------


@contextmanager
def implicit_reshard(allow: bool = True) -> Iterator[None]:
    """Inside the ``with``, a tensor whose layout has no placements is moved to Shard(0) for an op that needs them.

    Args:
        allow: False refuses such ops again, which is the default outside.

    Example:
        >>> both_on_one = EnumerableShardingSpec(
        ...     [ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], "rank:0/cpu")])
        >>> with implicit_reshard():
        ...     ones(both_on_one, 4).cumsum(0).full_tensor()
        tensor([1., 2., 3., 4.])
    """
    expect("implicit_reshard", "allow", allow, bool)
    with _MAY_RESHARD.entered(allow):
        yield


class DTensorCall:
    """One function call by way of DTensors: the grids of its tensors, and which of them it writes to."""

    def __init__(self, cls: Any, func: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.cls = cls
        self.func = func
        self.tensors = tensors
        self.name: str = str(getattr(func, "__name__", func))
        self.initializer: bool = getattr(func, "__module__", "") == "torch.nn.init"
        self.in_place: bool = self.name == "__setitem__" or (
            self.name.endswith("_") and not self.name.endswith("__")
        )
        # by id; None where a layout has no placements
        self.specs: dict[int, Any] = dict.fromkeys(map(id, tensors))
        self.problem = ""  # why one of them has none
        for each in tensors:
            try:
                self.specs[id(each)] = spec_for(each)
            except NotExpressibleError as error:
                self.problem = self.problem or str(error)

    @cached_property
    def home(self) -> DeviceMesh:
        """The mesh of the first tensor that has placements, else the 1-D mesh of all ranks."""
        first = self.tensors[0]
        meshes = (spec.mesh for spec in self.specs.values() if spec is not None)
        return next(meshes, None) or one_dim_mesh(
            first.process_group, first._local_tensors[0].device.type
        )

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        plain: Callable[[DTensor], Any] | None = None,
    ) -> Any:
        """The result: refused, computed shard by shard, or by way of DTensors; ``plain`` makes one with dims plain."""
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
        dtensors = {id(each): self._on_mesh(each) for each in self.tensors}
        before = {key: dtensor.grad_fn for key, dtensor in dtensors.items()}
        originals = {id(dtensors[id(each)]): each for each in self.tensors}

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, self.cls):
                return dtensors[id(leaf)]
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.dim() > 0:
                return DTensor.from_local(
                    leaf, self.home, [Replicate()] * self.home.ndim, run_check=False
                )
            return leaf

        def back(leaf: Any) -> Any:
            """A result as the caller gets it: plain or a ShardedTensor."""
            if not isinstance(leaf, DTensor):
                return leaf
            if id(leaf) in originals:
                return originals[id(leaf)]
            if leaf.dim() == 0:
                return leaf.full_tensor()
            if plain is not None:
                return plain(leaf)
            if not all(placement.is_shard() for placement in leaf.placements):
                leaf = leaf.redistribute(
                    placements=self._placements_at_home(leaf.shape) or _shard_further(leaf)
                )
            return from_dtensor(self.cls, leaf, like=self.tensors[0])

        # plain tensors that the function creates
        with implicit_replication():
            result = self.func(*pytree.tree_map(convert, args), **pytree.tree_map(convert, kwargs))
        for each in self.tensors:
            self._write_back(each, dtensors[id(each)], before[id(each)])
        return pytree.tree_map(back, result)

    def _refuse_leaf(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write to a leaf that requires grad.  The op writes to a view of the shard, which torch allows."""
        if self.initializer or not torch.is_grad_enabled():
            return
        written = [args[0]] if self.in_place and args else []
        written += pytree.tree_leaves(kwargs.get("out"))
        if any(
            isinstance(each, self.cls) and each.requires_grad and each.is_leaf for each in written
        ):
            raise UnsupportedOpError(
                f"{self.name}: a leaf ShardedTensor that requires grad cannot be written in place; "
                "use torch.no_grad()"
            )

    def check_layouts(self) -> None:
        """Raise NotExpressibleError for a layout without placements, unless it may be moved."""
        if self.problem and not _MAY_RESHARD.own():
            raise NotExpressibleError(
                f"{self.name}: {self.problem}. reshard() to a ChunkShardingSpec first, or use "
                "implicit_reshard()"
            )

    def _at_home(self, tensor: Any) -> bool:
        spec = self.specs[id(tensor)]
        return spec is not None and spec.mesh == self.home

    def _on_mesh(self, tensor: Any) -> DTensor:
        """The DTensor on the home mesh; a tensor of another layout takes the placements of one of its shape there."""
        if self._at_home(tensor):
            return to_dtensor(tensor)
        spec = self.specs[id(tensor)]
        along = (Shard(0 if spec is None else spec.placements[0].dim),) * self.home.ndim
        placements = self._placements_at_home(tensor.shape) or along
        there = Spec(self.home, placements, tensor.size(), tensor.stride(), dtype=tensor.dtype)
        (local,) = move(tensor._local_tensors, tensor._layout, layout_of(there), tensor._comm)
        return _from_local(local, there)

    def _placements_at_home(self, shape: torch.Size) -> tuple[Shard, ...] | None:
        """The placements of an argument of this shape on the home mesh, None if there is none."""
        fits = (each for each in self.tensors if each.shape == shape and self._at_home(each))
        return next((self.specs[id(each)].placements for each in fits), None)

    def _write_back(self, tensor: Any, dtensor: DTensor, before: Any) -> None:
        """Give the tensor what the op wrote to its DTensor: the values if it was moved, else the autograd history."""
        if self._at_home(tensor):
            if dtensor.grad_fn is not before:
                tensor._set_local_tensors([dtensor.to_local()])
        elif self.in_place and tensor is self.tensors[0]:
            moved = from_dtensor(self.cls, dtensor, like=tensor).resharded(tensor.sharding_spec())
            for local, new in zip(tensor._local_tensors, moved._local_tensors, strict=True):
                local.copy_(new)


def _shard_further(dtensor: DTensor) -> tuple[Any, ...]:
    """Placements with Shard(0) on every axis that shards no dim; on all axes if one of them shards dim 0 already."""
    again = any(placement.is_shard(0) for placement in dtensor.placements)
    return tuple(
        Shard(0) if again or not placement.is_shard() else placement
        for placement in dtensor.placements
    )


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
    """Whether the call can be computed shard by shard; from sizes, dtypes and layouts, so all ranks decide the same."""
    first = tensors[0]
    if any(each._layout != first._layout for each in tensors):
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
    return bool(outputs) and all(each.shape == first.shape for each in outputs)


def run_shardwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Any:
    """Result of a pointwise call, computed on each local shard; no communication."""
    first = tensors[0]
    boxes: list[Box | None] = [shard.metadata.box for shard in first.local_shards()] or [None]
    results = []
    sharded = {id(each) for each in tensors}
    for index, box in enumerate(boxes):

        def local(leaf: Any, index: int = index, box: Box | None = box) -> Any:
            if id(leaf) in sharded:
                return leaf._local_tensors[index]
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                return (
                    leaf.new_empty(0) if box is None else block_for(leaf, box, tuple(first.shape))
                )
            return leaf

        results.append(func(*pytree.tree_map(local, args), **pytree.tree_map(local, kwargs)))

    def joined(*local_tensors: Any) -> Any:
        """The ShardedTensor of the results of all shards; an argument itself if its local tensors are the results."""
        if not isinstance(local_tensors[0], torch.Tensor):
            return local_tensors[0]
        for tensor in tensors:
            if all(
                new is old for new, old in zip(local_tensors, tensor._local_tensors, strict=True)
            ):
                return tensor
        return first._with(local_tensors)

    return pytree.tree_map(joined, *results)


def block_for(plain: torch.Tensor, box: Box, shape: tuple[int, ...]) -> torch.Tensor:
    """The slice of a plain tensor that broadcasts against the shard with this box; dims of size 1 are not sliced."""
    own = box[len(shape) - plain.dim() :]
    return plain[
        tuple(
            slice(None) if n == 1 else slice(*span)
            for n, span in zip(plain.shape, own, strict=True)
        )
    ]
