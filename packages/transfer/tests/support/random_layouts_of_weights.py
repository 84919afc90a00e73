"""Random manifests and mappings between them: layouts of specs on meshes, pipelines, experts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import product

from shoal_dtensor import Replicate, Shard, Spec, StridedShard
from shoal_dtensor.errors import PlacementError
from shoal_dtensor.internal import volume
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_transfer import Assignment, Holding, Manifest, TensorRecord, WeightMapping

MESHES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (3, 2), (2, 4), (2, 2, 2), (4, 2, 2), (16,), (1, 5)]


def draw_manifest(
    drawing: random.Random, shapes: dict[str, tuple[int, ...]], world: str
) -> Manifest:
    """A manifest of tensors, each on a random mesh of all ranks, or of the ranks of a stage."""
    grid = drawing.choice(MESHES)
    ranks = abstract_mesh(grid).size()
    stages = drawing.choice([1, 1, 2]) if ranks % 2 == 0 else 1
    first = drawing.choice([0, 0, 3])
    records = {}
    for name, shape in shapes.items():
        stage = drawing.randrange(stages)
        mesh = grid if stages == 1 else (ranks // stages,)
        offset = first + stage * (ranks // stages)
        holdings = draw_holdings(drawing, shape, mesh, offset)
        records[name] = TensorRecord(name, shape, "int64", holdings, parts=(name,))
    on_host = drawing.choice([1, 2, 3, 64])
    hosts = {first + rank: f"host {rank // on_host}" for rank in range(ranks)}
    return Manifest(records, hosts, world)


def draw_holdings(
    drawing: random.Random, shape: tuple[int, ...], grid: Sequence[int], first: int
) -> tuple[Holding, ...]:
    mesh = abstract_mesh(tuple(grid))
    spec = draw_spec_on(drawing, shape, mesh)
    holdings = []
    for rank, coordinate in enumerate(product(*map(range, grid))):
        boxes = spec.boxes(coordinate)
        sizes = spec.local_shape_at(coordinate)
        # memory in any order of dims, in a larger tensor
        order = drawing.sample(range(len(shape)), len(shape))
        strides = [0] * len(shape)
        step = drawing.choice([1, 1, 2])
        for dim in reversed(order):
            strides[dim] = step
            step *= max(sizes[dim], 1)
        start = drawing.choice([0, 5])
        for box, place in boxes:
            offset = start + sum(s * i for s, (i, _) in zip(strides, place, strict=True))
            if volume(box):
                holdings.append(Holding(first + rank, box, offset, tuple(strides)))
    return tuple(holdings)


def draw_spec_on(drawing: random.Random, shape: tuple[int, ...], mesh: DeviceMesh) -> Spec:
    """A spec; where a strided placement does not fit, another one is drawn."""
    while True:
        placements = tuple(draw_placement(drawing, shape) for _ in mesh.shape)
        with suppress(PlacementError):
            return Spec(mesh, placements, shape)


def draw_placement(
    drawing: random.Random, shape: tuple[int, ...]
) -> Shard | StridedShard | Replicate:
    kind = drawing.choice(["shard", "shard", "strided", "replicate"])
    if kind == "replicate" or not shape:
        return Replicate()
    dim = drawing.randrange(len(shape))
    if kind == "strided":
        return StridedShard(dim, split_factor=2)
    return Shard(dim)


def draw_mapping(drawing: random.Random) -> WeightMapping:
    """A mapping of a small transformer's tensors through edits of every kind."""
    heads = drawing.choice([2, 4])
    size = drawing.choice([1, 2, 3])
    hidden = drawing.choice([3, 4, 6])
    experts = drawing.choice([2, 3])
    shapes = {
        "emb": (drawing.choice([5, 7, 9]), hidden),
        "q": (2 * heads * size, hidden),
        "k": (heads * size, hidden),
        "v": (heads * size, hidden),
        "norm": (hidden,),
        "scale": (),
        "gate_up": (experts, 2 * size, hidden),
        "both": (4, 2 * hidden),
    }
    mapping = WeightMapping.same_names(shapes)
    if drawing.random() < 0.5:
        mapping = mapping.repeat(["k", "v"], times=2, block=size)
    if drawing.random() < 0.7:
        mapping = mapping.fuse({"qkv": ("q", "k", "v")}, groups=drawing.choice([1, heads]))
    if drawing.random() < 0.5:
        mapping = mapping.unstack({"gate_up": "experts.{index}.gate_up"}).split(
            {"experts.{}.gate_up": {"experts.{}.gate": size, "experts.{}.up": size}}
        )
    elif drawing.random() < 0.5:
        mapping = mapping.transpose(["gate_up"])
    if drawing.random() < 0.5:
        mapping = mapping.pad({"emb": 12}, fill=drawing.choice([0.0, None]))
    if drawing.random() < 0.5:
        mapping = mapping.add_copies({"head": "emb"})
    if drawing.random() < 0.5:
        mapping = mapping.then(every_other_column(mapping, hidden))
    if drawing.random() < 0.3:
        mapping = mapping.add_filled({"ones": (3, 2)}, fill=1.0)
    return mapping


def every_other_column(mapping: WeightMapping, hidden: int) -> WeightMapping:
    """Gate and up that are interleaved by column, taken apart and one of them transposed."""
    rest = {name: shape for name, shape in mapping.targets.items() if name != "both"}
    even = range(0, 2 * hidden, 2)
    odd = range(1, 2 * hidden, 2)
    gate = Assignment("even", (range(4), range(hidden)), "both", (range(4), even), dims=(0, 1))
    up = Assignment("odd", (range(hidden), range(4)), "both", (range(4), odd), dims=(1, 0))
    parts = (gate, up, *WeightMapping.same_names(rest).assignments)
    targets = {**rest, "even": (4, hidden), "odd": (hidden, 4)}
    return WeightMapping(mapping.targets, targets, parts)
