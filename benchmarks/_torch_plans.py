"""The plans of torch's DTensor, priced by shoal's model: the peers in `redistribute.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import Partial, Placement, Shard
from shoal_dtensor.layout.spec import Spec
from shoal_dtensor.redistribute.search.links import Links, mask_of

__all__ = ["price", "to_torch", "torch_meshes", "torch_steps"]


def torch_meshes(shapes: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
    """Torch's meshes, with every flattened sub-mesh made, on a fake process group of 16."""
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=16, store=FakeStore())
    found = {}
    for shape in shapes:
        names = tuple(f"a{i}" for i in range(len(shape)))
        mesh = TorchMesh("cpu", torch.arange(prod(shape)).reshape(shape), mesh_dim_names=names)
        for count in range(2, len(shape) + 1):
            for axes in combinations(names, count):
                (mesh if count == len(names) else mesh[axes])._flatten("_".join(axes) + "_flat")
        found[shape] = mesh
    return found


def to_torch(placement: Placement) -> Any:
    """The same placement as torch's class."""
    from torch.distributed import tensor as theirs

    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    return (
        theirs.Partial(placement.reduce_op)
        if isinstance(placement, Partial)
        else theirs.Replicate()
    )


def torch_steps(mesh: Any, src: Spec, dst: Spec, *, min_cost: bool) -> list[Any]:
    """The transforms that torch would run, fused where it can."""
    from torch.distributed.tensor import _redistribute as theirs
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(src.shape), src.stride, src.dtype)
    specs = [
        DTensorSpec(mesh, tuple(map(to_torch, s.placements)), tensor_meta=meta) for s in (src, dst)
    ]
    infos = theirs._gen_transform_infos_non_cached(*specs, use_graph_based_transform=min_cost)
    return list(
        theirs._optimize_transform_infos(infos, mesh, specs[0].placements, specs[1].placements)
    )


def price(steps: Sequence[Any], src: Spec, links: Links) -> tuple[float, float, int]:
    """Seconds, bytes received by a rank and collectives of torch's steps, for even shapes.

    The seconds follow shoal's model.
    """
    whole = prod(src.shape) * src.dtype.itemsize
    cuts = {axis for cut in src.dim_shardings for axis in cut.axes}
    seconds, received, collectives = 0.0, 0.0, 0
    for info in steps:
        axes = tuple(getattr(info, "original_mesh_dims", (info.mesh_dim,)))
        before = whole / links.ranks(mask_of(cuts))
        old, new = info.src_dst_placements
        cuts = (cuts | set(axes)) if new.is_shard() else (cuts - set(axes))
        after = whole / links.ranks(mask_of(cuts))
        ways = links.ranks(mask_of(axes))
        if old.is_replicate():
            seconds += links.copy(after)
            continue
        collectives += 1
        if old.is_partial():
            moved = (1 if new.is_shard() else 2) * before * (ways - 1) / ways
            copied = before if new.is_shard() and new.dim != 0 else 0.0
        elif new.is_replicate():
            moved, copied = after - before, after if old.dim != 0 else 0.0
        else:
            moved, copied = after * (ways - 1) / ways, before + after
        received += moved
        seconds += links.seconds(mask_of(axes), moved) + links.copy(copied)
    return seconds, received, collectives
