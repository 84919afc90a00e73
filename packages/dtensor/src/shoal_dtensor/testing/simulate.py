"""Plans executed on plain tensors: all ranks of the mesh in one process, no process group.

The kernels are those that `run` executes; only the collective between `prepare` and `finish`
is computed here from the list of all ranks' buffers.  So a plan that is right here is right on
real ranks, provided that the collectives are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ..layout.spec import Spec
from ..redistribute.execution.kernels import CollectiveCall, kernel, members, transfer_kernel
from ..redistribute.steps import Plan, Step, Transfer
from .partials import Coordinate, deal, first_term, gather, random_terms, reduce_all


def coordinates(spec: Spec) -> list[Coordinate]:
    """All mesh coordinates, row-major.

    Args:
        spec: of which the mesh counts.
    """
    return list(product(*map(range, spec.mesh.shape)))


def simulate(plan: Plan, shards: Sequence[Tensor]) -> list[Tensor]:
    """What every rank holds after a plan.

    Args:
        plan: from `redistribute.plan`.
        shards: the local tensors of all ranks of the source mesh, row-major.

    Returns:
        The local tensors of all ranks of the destination mesh, row-major.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Replicate, Shard
        >>> from shoal_dtensor.redistribute.plan import plan
        >>> src = Spec(abstract_mesh((2,)), (Shard(0),), (3,))
        >>> full = torch.arange(3.0)
        >>> simulate(plan(src, src.with_(placements=(Replicate(),))), local_shards(full, src))
        [tensor([0., 1., 2.]), tensor([0., 1., 2.])]
    """
    held = dict(zip(_ranks(plan.src), shards, strict=True))
    for step in plan.steps:
        held |= _run(step, held)
    if plan.steps and plan.slices:
        held = {rank: tensor.clone() for rank, tensor in held.items()}
    return [held[rank] for rank in _ranks(plan.dst)]


def _ranks(spec: Spec) -> list[int]:
    """Global ranks of the mesh, row-major."""
    return [spec.mesh.rank_at(c) for c in coordinates(spec)]


def _run(step: Step, held: dict[int, Tensor]) -> dict[int, Tensor]:
    """One step on all ranks of its mesh (of both meshes, for a transfer)."""
    mesh = step.src.mesh
    if isinstance(step, Transfer):
        kernels = {rank: transfer_kernel(step, rank) for rank in step.ranks}
        held = {rank: torch.empty(0, dtype=step.src.dtype) for rank in step.ranks} | held
    else:
        kernels = {mesh.rank_at(c): kernel(step, c) for c in coordinates(step.src)}
    buffers = {rank: work.prepare(held[rank]) for rank, work in kernels.items()}
    after: dict[int, Tensor] = {}
    for rank, work in kernels.items():
        got, call = buffers[rank], work.collective
        if call is not None:
            group = list(call.ranks)
            if not group:
                coordinate = mesh.coordinate_of(rank)
                assert coordinate is not None, "the rank takes part in a step of its mesh"
                group = [mesh.rank_at(c) for c in members(step.src, call.axes, coordinate)]
            calls = [other for m in group if (other := kernels[m].collective) is not None]
            got = _received([buffers[m] for m in group], group.index(rank), calls)
        after[rank] = work.finish(got, held[rank])
    return after


def _received(buffers: list[Tensor], me: int, calls: list[CollectiveCall]) -> Tensor:
    """What the collective gives to one member of a group, out of all members' buffers."""
    call = calls[me]
    match call.kind:
        case "all_reduce":
            return reduce_all(buffers, call.op)
        case "all_gather" | "all_gather_v":
            assert not call.sizes or [b.shape[call.dim] for b in buffers] == list(call.sizes), "sizes must hold"
            return torch.cat(buffers, call.dim)
        case "reduce_scatter" | "reduce_scatter_v":
            sizes = list(call.sizes) or [buffers[me].shape[call.dim] // len(buffers)] * len(buffers)
            return reduce_all(buffers, call.op).split_with_sizes(sizes, call.dim)[me].clone()
        case "all_to_all":
            return torch.cat([b.chunk(len(buffers), call.dim)[me] for b in buffers], call.receives[0])
    assert call.kind == "all_to_all_v", f"no collective {call.kind}"
    sent = [b.split_with_sizes(list(other.sizes))[me] for b, other in zip(buffers, calls, strict=True)]
    assert [t.numel() for t in sent] == list(call.receives), "what is sent must be what is expected"
    return torch.cat(sent)


def local_shards(full: Tensor, spec: Spec, generator: torch.Generator | None = None) -> list[Tensor]:
    """Local tensors of all ranks, row-major, whose global value is `full`.

    Along partial axes the value is taken apart: with a generator randomly (coarse floating-point numbers, so that sums
    are exact in any order), without one it stays on the first rank.

    Args:
        full: the global tensor.
        spec: its layout.
        generator: of the terms along partial axes.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> local_shards(torch.arange(3), Spec(abstract_mesh((2,)), (Shard(0),), (3,), dtype=torch.int64))
        [tensor([0, 1]), tensor([2])]
    """
    split = first_term if generator is None else partial(random_terms, generator=generator)
    terms = deal(full, spec.placements, spec.mesh.shape, split)
    return [part_of(terms[c], spec, c).clone(memory_format=torch.contiguous_format) for c in coordinates(spec)]


def part_of(full: Tensor, spec: Spec, coordinate: Coordinate) -> Tensor:
    """What the rank at a mesh coordinate holds of a global tensor, partial axes left aside.

    Args:
        full: the global tensor.
        spec: its layout.
        coordinate: of a rank, one index per mesh axis.
    """
    if spec.is_strided:
        return full[_where(spec, coordinate)]
    return full[tuple(slice(start, stop) for start, stop in spec.box(coordinate))]


def _where(spec: Spec, coordinate: Coordinate) -> tuple[Tensor, ...]:
    """Along every dim the global indices of what a rank holds, shaped so that indexing gives its part."""
    held = [torch.tensor(sharding.indices(coordinate), dtype=torch.int64) for sharding in spec.dim_shardings]
    return torch.meshgrid(held, indexing="ij") if held else ()


def global_value(shards: Sequence[Tensor], spec: Spec) -> Tensor:
    """The global tensor that local tensors of all ranks (row-major) stand for.

    Args:
        shards: the local tensor of each rank, row-major over the mesh.
        spec: the layout that they have.

    Raises:
        AssertionError: if replicas differ, or a local tensor has another shape than the spec says.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Partial
        >>> spec = Spec(abstract_mesh((2,)), (Partial("max"),), (2,))
        >>> global_value([torch.tensor([1.0, 5.0]), torch.tensor([4.0, 2.0])], spec)
        tensor([4., 5.])
    """
    partials = {axis: spec.placements[axis] for axis, _ in spec.partials}
    sizes = [spec.mesh.shape[axis] for axis in partials]
    terms = {place: torch.zeros(spec.shape, dtype=shards[0].dtype) for place in product(*map(range, sizes))}
    filled = {place: torch.zeros(spec.shape, dtype=torch.bool) for place in terms}
    for c, shard in zip(coordinates(spec), shards, strict=True):
        where, wanted = _where(spec, c), tuple(spec.local_shape_at(c))
        assert shard.shape == wanted, f"rank at {c}: {tuple(shard.shape)}, spec says {wanted}"
        place = tuple(c[axis] for axis in partials)
        seen = filled[place][where]
        assert torch.equal(terms[place][where][seen], shard[seen]), f"the replica at {c} differs"
        terms[place][where] = shard
        filled[place][where] = True
    assert all(bool(seen.all()) for seen in filled.values()), "some elements are on no rank"
    return gather(terms, [*partials.values()], sizes)[(0,) * len(partials)]
