"""Random specs: any mesh, nested, uneven and ragged shardings, any order, partials of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.layout.dim_sharding import shard_dim
from shoal_mesh import DeviceMesh, abstract_mesh

__all__ = ["draw_spec", "spec_pairs"]


def draw_spec(
    rng: Random,
    mesh: DeviceMesh,
    shape: Sequence[int],
    *,
    dtype: torch.dtype = torch.float64,
    ops: Sequence[str] = ("sum",),
    ragged: float = 0.3,
) -> Spec:
    """A random spec.

    Args:
        rng: source of randomness.
        mesh: any mesh.
        shape: global shape.
        dtype: element type.
        ops: reductions to choose from; empty for none.
        ragged: how often an axis divides at random places instead of like torch.chunk.

    Example:
        >>> draw_spec(Random(0), abstract_mesh((2, 2)), (4, 6), ragged=0.0).placements
        (Shard(dim=1), Shard(dim=1, multiple_of=2))
    """
    kinds = ["replicate"] + ["shard"] * (3 if shape else 0) + ["partial"] * bool(ops)
    placements: list[Placement] = []
    for _ in range(mesh.ndim):
        kind = rng.choice(kinds)
        if kind == "shard":
            placements.append(
                Shard(rng.randrange(len(shape)), multiple_of=rng.choice((1, 1, 1, 2)))
            )
        else:
            placements.append(Partial(rng.choice(list(ops))) if kind == "partial" else Replicate())
    order: list[tuple[int, tuple[int, ...]]] = []
    for dim, length in enumerate(shape):
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(dim)]
        if axes:
            rng.shuffle(axes)
            order.append((dim, tuple(axes)))
            for depth, axis in enumerate(axes):
                if rng.random() < ragged:
                    pieces = shard_dim(length, axes[:depth], placements, mesh.shape).sizes
                    placements[axis] = Shard(
                        dim, sizes=_random_sizes(rng, pieces, mesh.shape[axis])
                    )
    return Spec(mesh, placements, shape, dtype=dtype, shard_order=tuple(order))


def _random_sizes(rng: Random, pieces: Sequence[int], ways: int) -> list[int]:
    """Every shard divided at random places, empty shards included."""
    sizes: list[int] = []
    for whole in pieces:
        stops = sorted(rng.randint(0, whole) for _ in range(ways - 1))
        sizes += [b - a for a, b in zip([0, *stops], [*stops, whole], strict=True)]
    return sizes


def spec_pairs(
    seed: int,
    count: int,
    *,
    mesh_shapes: Sequence[tuple[int, ...]],
    ops: Sequence[str] = ("sum",),
    ragged: float = 0.3,
) -> Iterator[tuple[Spec, Spec]]:
    """`count` random pairs of specs of the same tensor, each on a random one of the meshes.

    Example:
        >>> [str(src.mesh.shape) for src, _ in spec_pairs(0, 2, mesh_shapes=[(4,), (2, 2)])]
        ['(2, 2)', '(2, 2)']
    """
    rng = Random(seed)
    for _ in range(count):
        mesh = abstract_mesh(rng.choice(list(mesh_shapes)))
        shape = [rng.choice((0, 1, 2, 3, 4, 5, 7, 8, 12)) for _ in range(rng.randint(1, 3))]
        yield (
            draw_spec(rng, mesh, shape, ops=ops, ragged=ragged),
            draw_spec(rng, mesh, shape, ops=ops, ragged=ragged),
        )
