"""ShardedTensor <-> DTensor of the same shards, without communication.  The class ShardedTensor is an argument.

Both are a ``Grid``: a mesh of ranks, and for every mesh axis the tensor dim that it shards and the shard sizes.

    one sharded dim           1-D mesh, ranks in the order of their shards; ranks without a shard have size 0
    n-D grid of shards        n-D mesh of the same shape
    bricks, several per rank  no placements: NotExpressibleError
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch

from shoal_dtensor import DTensor, Placement, Shard, Spec
from shoal_dtensor.internal import format_box, grid, spans, volume
from shoal_mesh import DeviceMesh

from .._torch import RemoteDevice
from ..errors import NotExpressibleError
from ..ranks.process_groups import members, mesh_of
from ..ranks.reshard import move
from ..spec.metadata import Layout, TensorProperties
from ..spec.specs import spec_of


class Grid(NamedTuple):
    """Shards that are the cells of a grid, on a mesh of the same shape."""

    mesh_shape: tuple[int, ...]  # number of shards along every mesh axis
    ranks: tuple[int, ...]  # global rank at every mesh coordinate, row-major
    placements: tuple[Shard, ...]  # for every mesh axis, the tensor dim that it shards and the shard sizes


@lru_cache(maxsize=4096)
def grid_of(layout: Layout, shape: tuple[int, ...], members: tuple[int, ...]) -> Grid:
    """The grid with this layout that has every member of the process group in its mesh, else a NotExpressibleError.

    Ranks without elements hold empty shards at the end of one axis, if they fill whole rows of the mesh: 2 x 2 shards
    on 6 ranks have a (3, 2) mesh whose last row is empty, on 5 ranks they have none.

    Example:
        >>> from shoal_shard_api.ops.dtensor_conversion import grid_of
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
        raise NotExpressibleError(f"ranks {several} hold several shards each; a DTensor has one shard on each rank")
    cells = grid(list(holders), shape)  # 0:2 and 2:3 of (3,): ((2, 1),)
    if cells is None:
        held = ", ".join(f"{format_box(box)} on rank {rank}" for rank, box in sorted(filled))
        raise NotExpressibleError(f"the shards are not all cells of a grid over size {shape}: {held}")
    dims = [dim for dim, sizes in enumerate(cells) if len(sizes) > 1]
    if not dims and 0 in shape:  # no elements: the only dim whose shards can all be empty
        dims = [shape.index(0)]
    elif not dims:  # one rank holds every element: the dim along which the other shards are empty
        dims = [next((dim for _, box in layout for dim, (start, stop) in enumerate(box) if start == stop), 0)]
    axes = [list(cells[dim]) if filled else [] for dim in dims]  # shard sizes along every mesh axis
    idle = [rank for rank in dict.fromkeys([*(rank for rank, _ in layout), *members]) if rank not in ranks]
    if idle:
        rows = [max(len(filled), 1) // max(len(sizes), 1) for sizes in axes]  # ranks that share one index on the axis
        fits = [axis for axis, row in enumerate(rows) if len(idle) % row == 0]  # 1 idle rank, rows of 2: none
        if not fits:
            raise NotExpressibleError(
                f"a grid of {' x '.join(str(len(sizes)) for sizes in axes)} shards on {len(members)} ranks leaves the "
                f"ranks {idle} idle, and they do not fill a row of a mesh of all ranks"
            )
        axes[fits[0]] += [0] * (len(idle) // rows[fits[0]])  # 2 idle, rows of 2: one more index, of size 0
    # A cell has a holder; what is beyond the cells is given to the idle ranks.
    spare, along = iter(idle), [spans(sizes) for sizes in cells]
    order = []  # of axes (2, 2, 0) and (2, 2), the coordinates (2, 0) and (2, 1) go to idle ranks
    for coordinate in product(*(range(len(sizes)) for sizes in axes)):
        at = dict(zip(dims, coordinate, strict=True))
        inside = bool(filled) and all(at[dim] < len(cells[dim]) for dim in dims)  # (2, 0) of 2 x 2 cells is not
        order.append(holders[tuple(each[at.get(d, 0)] for d, each in enumerate(along))] if inside else next(spare))
    placements = tuple(Shard(dim, sizes=tuple(sizes)) for dim, sizes in zip(dims, axes, strict=True))
    return Grid(tuple(len(sizes) for sizes in axes), tuple(order), placements)


def spec_for(tensor: Any) -> Spec:
    """The spec of the DTensor of the same shards; NotExpressibleError if there is none."""
    group, device_type = tensor.process_group, tensor._local_tensors[0].device.type
    grid = grid_of(tensor._layout, tuple(tensor.size()), members(group))
    mesh = mesh_of(group, device_type, grid.mesh_shape, grid.ranks)
    return Spec(mesh, grid.placements, tensor.size(), tensor.stride(), tensor.dtype)


def to_dtensor(tensor: Any) -> DTensor:
    """The DTensor of the same shards."""
    local = next((each for each in tensor._local_tensors if each.numel() > 0), tensor._local_tensors[0])
    return _from_local(local, spec_for(tensor))


def to_dtensor_on(tensor: Any, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Layout -> placements: the DTensor of any ShardedTensor on a given mesh; all ranks call it."""
    spec = Spec(mesh, placements, tensor.size(), tensor.stride(), tensor.dtype)
    (local,) = move(tensor._local_tensors, tensor._layout, layout_of(spec), tensor._comm)
    return _from_local(local, spec)


def _from_local(local: torch.Tensor, spec: Spec) -> DTensor:
    if local.shape != spec.local_shape:  # the empty tensor of a rank without shards is 1-D
        local = local.reshape(spec.local_shape)
    shape, stride = torch.Size(spec.shape), tuple(spec.stride)
    return DTensor.from_local(local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride)


def layout_of(spec: Spec) -> Layout:
    """Global rank and box of every shard of a DTensor, in the order of its mesh."""
    coordinates = product(*(range(n) for n in spec.mesh.shape))
    return tuple((spec.mesh.rank_at(coordinate), spec.box(coordinate)) for coordinate in coordinates)


def from_dtensor(cls: Any, dtensor: DTensor, *, like: Any = None) -> Any:
    """The ShardedTensor of a DTensor's shards, with the process group and devices of ``like``, on the same ranks."""
    spec = dtensor.spec
    unsharded = [
        f"{placement!r} on axis {name!r}"
        for placement, name, size in zip(spec.placements, spec.mesh.axis_names, spec.mesh.shape, strict=True)
        if size > 1 and not placement.is_shard()
    ]
    if unsharded or spec.ndim == 0:
        raise NotExpressibleError(
            f"a DTensor of shape {tuple(spec.shape)} with {', '.join(unsharded) or 'no dims'} has no sharding spec: "
            f"redistribute it to Shard on every mesh axis {spec.mesh.axis_names}, or take full_tensor()"
        )
    layout, local = layout_of(spec), dtensor.to_local()
    devices = {rank: _device(rank, spec.mesh.device_type) for rank, _ in layout}
    if like is None:
        group = spec.mesh.comm(tuple(range(spec.mesh.ndim))).group
    else:  # a rank without a shard has a device of the same type
        group = like.process_group
        declared = {each.rank: each.placement for each in like._metadata.shards_metadata}
        devices |= {rank: placement for rank, placement in declared.items() if placement is not None}
    sharding = spec_of(layout, devices)
    properties = TensorProperties(dtype=spec.dtype, requires_grad=local.requires_grad)
    metadata = sharding.build_metadata(torch.Size(spec.shape), properties)
    return cls._wrap(sharding, metadata, [local], group, stride=spec.stride)


def _device(rank: int, device_type: str) -> RemoteDevice:
    """The default placement of a rank: the device whose index is the rank modulo the devices of its host."""
    if device_type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    count = torch.get_device_module(device_type).device_count()
    return RemoteDevice(f"rank:{rank}/{device_type}:{rank % max(count, 1)}")
