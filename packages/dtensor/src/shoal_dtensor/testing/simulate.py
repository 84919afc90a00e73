"""Plans executed on plain tensors: all ranks of the mesh in one process, no process group.

The kernels are the kernels that `run` executes; only the collective between `prepare` and `finish`
is computed here from the list of all ranks' buffers. A plan that is right here is therefore right
on real ranks, provided that the collectives are. For a partial value, the ranks' tensors are terms
whose reduction is the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from math import inf

import torch
from torch import Generator, Tensor

from ..layout.placements import Partial, norm_order
from ..layout.spec import Spec
from ..redistribute.execution.rank_steps import (
    CollectiveCall,
    members,
    rank_step,
    transfer_rank_step,
)
from ..redistribute.execution.reduced_values import identity_of, powers, root
from ..redistribute.steps import Plan, Step

Coordinate = tuple[int, ...]
Terms = dict[Coordinate, Tensor]
# (reduction, value, n): n terms that reduce to the value
Split = Callable[[str, Tensor, int], list[Tensor]]


def coordinates(spec: Spec) -> list[Coordinate]:
    """Return all mesh coordinates, row-major.

    Args:
        spec: a spec on the mesh.
    """
    return list(product(*map(range, spec.mesh.shape)))


def simulate(plan: Plan, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the local tensors of all ranks after a plan.

    Args:
        plan: a plan of `redistribute.plan`.
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
    src, dst = ([spec.mesh.rank_at(c) for c in coordinates(spec)] for spec in (plan.src, plan.dst))
    tensors = dict(zip(src, shards, strict=True))
    for step in plan.steps:
        tensors |= _run(step, tensors)
    if plan.steps and plan.slices:
        tensors = {rank: tensor.clone() for rank, tensor in tensors.items()}
    return [tensors[rank] for rank in dst]


def _run(step: Step, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Run one step on all ranks of its mesh (of both meshes, for a transfer)."""
    mesh = step.src.mesh
    if step.name == "Transfer":
        kernels = {rank: transfer_rank_step(step, rank) for rank in step.ranks}
        tensors = {
            rank: torch.empty(0, dtype=step.src.dtype, device="cpu") for rank in step.ranks
        } | tensors
    else:
        kernels = {mesh.rank_at(c): rank_step(step, c) for c in coordinates(step.src)}
    buffers = {rank: work.prepare(tensors[rank]) for rank, work in kernels.items()}
    after: dict[int, Tensor] = {}
    for rank, work in kernels.items():
        got = buffers[rank]
        call = work.collective
        if call is not None:
            coordinate = mesh.coordinate_of(rank) or ()
            group = list(call.ranks) or [
                mesh.rank_at(c) for c in members(step.src, call.axes, coordinate)
            ]
            calls = [other for m in group if (other := kernels[m].collective) is not None]
            got = _received([buffers[m] for m in group], group.index(rank), calls)
        after[rank] = work.finish(got, tensors[rank])
    return after


def _received(buffers: list[Tensor], me: int, calls: list[CollectiveCall]) -> Tensor:
    """Return a collective's result for one member of a group, from the buffers of all members."""
    call = calls[me]
    match call.kind:
        case "all_reduce":
            return reduce_all(buffers, call.op)
        case "all_gather":
            assert not call.sizes or [len(b) for b in buffers] == list(call.sizes), (
                "sizes must hold"
            )
            return torch.cat(buffers)
        case "reduce_scatter":
            return _block(reduce_all(buffers, call.op), me, call, len(buffers)).clone()
    assert call.kind == "all_to_all", f"no collective {call.kind}"
    sent = [_block(b, me, other, len(buffers)) for b, other in zip(buffers, calls, strict=True)]
    assert not call.sizes or [t.numel() for t in sent] == list(call.receives), (
        "what is sent must be what is expected"
    )
    return torch.cat(sent)


def _block(buffer: Tensor, member: int, call: CollectiveCall, members: int) -> Tensor:
    return buffer.split_with_sizes(list(call.sizes) or [len(buffer) // members] * members)[member]


def local_shards(
    full: Tensor, spec: Spec, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Return local tensors of all ranks, row-major, whose global value is `full`.

    Along partial axes the value is split into terms: with a generator randomly (coarse
    floating-point numbers, so that sums are exact in any order); without one, the first rank has
    all of it.

    Args:
        full: the global tensor.
        spec: its layout.
        generator: generator of the terms along partial axes.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> local_shards(torch.arange(3), Spec(abstract_mesh((2,)), (Shard(0),), (3,), dtype=torch.int64))
        [tensor([0, 1]), tensor([2])]
    """
    split = first_term if generator is None else partial(random_terms, generator=generator)
    terms = deal(full, spec.placements, spec.mesh.shape, split)
    return [
        part_of(terms[c], spec, c).clone(memory_format=torch.contiguous_format)
        for c in coordinates(spec)
    ]


def part_of(full: Tensor, spec: Spec, coordinate: Coordinate) -> Tensor:
    """Return the part of a global tensor that the rank at a mesh coordinate holds.

    Partial axes are ignored.

    Args:
        full: the global tensor.
        spec: its layout.
        coordinate: the coordinate of a rank, one index per mesh axis.
    """
    if spec.is_strided:
        return full[_where(spec, coordinate)]
    return full[tuple(slice(start, stop) for start, stop in spec.box(coordinate))]


def _where(spec: Spec, coordinate: Coordinate) -> tuple[Tensor, ...]:
    """Return the global indices that a rank holds along every dim, shaped for indexing its part."""
    indices = [
        torch.tensor(sharding.indices(coordinate), dtype=torch.int64, device="cpu")
        for sharding in spec.dim_shardings
    ]
    return torch.meshgrid(indices, indexing="ij") if indices else ()


def global_value(shards: Sequence[Tensor], spec: Spec) -> Tensor:
    """Return the global tensor that local tensors of all ranks (row-major) represent.

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
    terms = {
        place: torch.zeros(spec.shape, dtype=shards[0].dtype, device="cpu")
        for place in product(*map(range, sizes))
    }
    filled = {place: torch.zeros(spec.shape, dtype=torch.bool, device="cpu") for place in terms}
    for c, shard in zip(coordinates(spec), shards, strict=True):
        where = _where(spec, c)
        wanted = tuple(spec.local_shape_at(c))
        assert shard.shape == wanted, f"rank at {c}: {tuple(shard.shape)}, spec says {wanted}"
        place = tuple(c[axis] for axis in partials)
        seen = filled[place][where]
        assert torch.equal(terms[place][where][seen], shard[seen]), f"the replica at {c} differs"
        terms[place][where] = shard
        filled[place][where] = True
    assert all(bool(seen.all()) for seen in filled.values()), "some elements are on no rank"
    return gather(terms, [*partials.values()], sizes)[(0,) * len(partials)]


# --- partial values, taken apart and put together -------------------------------------------------


# How a reduction takes two tensors, by its name; an average is a sum that is divided afterwards.
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduce_all(tensors: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of equally shaped tensors."""
    first, *others = tensors
    order = norm_order(op)
    if order is not None:
        return root(
            reduce(torch.add, [powers(tensor, order) for tensor in tensors]), order, first.dtype
        )
    if op == "avg":
        # In a half type the sum may leave the range where the mean does not.
        wide = torch.float64 if first.dtype in (torch.float16, torch.bfloat16) else first.dtype
        return (reduce(torch.add, [t.to(wide) for t in tensors]) / len(tensors)).to(first.dtype)
    return reduce(COMBINE[op], others, first.clone())


def first_term(op: str, value: Tensor, n: int) -> list[Tensor]:
    """Return `n` tensors whose reduction by `op` is `value`: the first one has all of it."""
    neutral = torch.full_like(value, identity_of(op, value.dtype))
    return [value * n if op == "avg" else value, *[neutral] * (n - 1)]


def random_terms(
    op: str, value: Tensor, n: int, generator: Generator | None = None
) -> list[Tensor]:
    """Return `n` random tensors whose reduction by `op` is `value`.

    Dtypes without such tensors are refused: bools do not have sums.
    """
    order = norm_order(op)
    is_bool = value.dtype == torch.bool
    is_complex = value.is_complex()
    has_fractions = value.is_floating_point() or is_complex
    refused = {
        "sum": is_bool,
        "product": is_bool,
        "avg": not has_fractions,
        "max": is_complex,
        "min": is_complex,
    }
    if refused.get(op, has_fractions if order is None else not value.is_floating_point()):
        raise NotImplementedError(f"no partial {op} of {value.dtype}")
    if n == 1:
        return [value]
    if op == "avg":
        return [value + term for term in random_terms("sum", torch.zeros_like(value), n, generator)]
    # positive values are split into random shares; one coordinate alone holds each negative value
    if order is not None:
        share = (
            torch.rand((n, *value.shape), dtype=value.dtype, generator=generator, device="cpu")
            + 0.1
        )
        shares = value * (share / share.sum(0)).pow(1 / order)
        alone = [value, *[value.new_tensor(0.0 if order > 0 else inf)] * (n - 1)]
        return [
            torch.where(value >= 0, part, other) for part, other in zip(shares, alone, strict=True)
        ]
    # any terms, and the one that is missing then: signs and bits undo themselves
    if op in ("sum", "product", "bxor"):
        terms = [_noise(value, generator, signs=op == "product") for _ in range(n - 1)]
        rest = torch.sub if op == "sum" else COMBINE[op]
        return [*terms, rest(value, reduce(COMBINE[op], terms))]
    # Each element's value is on a random coordinate; the other coordinates have values that the
    # reduction discards.
    if is_bool or op in ("band", "bor"):
        noise = _noise(value, generator)
        other = value | noise if op in ("min", "band") else value & noise
    else:
        other = (
            value + 1
            if op == "min"
            else torch.zeros_like(value)
            if value.dtype == torch.uint8
            else value - 1
        )
    owner = torch.randint(0, n, value.shape, generator=generator, device="cpu")
    return [torch.where(owner == i, value, other) for i in range(n)]


def _noise(value: Tensor, generator: Generator | None, *, signs: bool = False) -> Tensor:
    """Return random values of the same shape and dtype; with `signs` they are 1 and -1."""
    if signs:
        return 1 - 2 * torch.randint(0, 2, value.shape, generator=generator, device="cpu").to(
            value.dtype
        )
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator, device="cpu") < 0.5
    if value.is_complex():
        return torch.randn(value.shape, dtype=value.dtype, generator=generator, device="cpu")
    # coarse: terms of values as coarse add up to them exactly
    if value.is_floating_point():
        return (
            torch.randn(value.shape, dtype=value.dtype, generator=generator, device="cpu")
            .mul_(64)
            .round_()
            .div_(64)
        )
    high = 3 if value.dtype == torch.uint8 else 50
    return torch.randint(0, high, value.shape, dtype=value.dtype, generator=generator, device="cpu")


def deal(
    value: Tensor, entries: Sequence[object], shape: Sequence[int], split: Split = random_terms
) -> Terms:
    """Return each mesh coordinate's term of `value` along partial axes, before any sharding.

    Args:
        value: a global tensor.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: shape of the mesh.
        split: function that makes the terms.

    Returns:
        Tensors of the shape of `value`, by mesh coordinate.

    Raises:
        NotImplementedError: if the dtype does not have such terms (sums of bool, maxima of complex
            numbers).

    Example:
        >>> from shoal_dtensor import Partial
        >>> terms = deal(torch.ones(3), [Partial("sum")], (2,))
        >>> terms[(0,)] + terms[(1,)]
        tensor([1., 1., 1.])
    """
    ops = {
        axis: entry.reduce_op for axis, entry in enumerate(entries) if isinstance(entry, Partial)
    }
    # by the coordinates along partial axes: replicas have the same
    terms: Terms = {(): value}
    for axis, op in ops.items():
        terms = {
            (*c, i): term
            for c, whole in terms.items()
            for i, term in enumerate(split(op, whole, shape[axis]))
        }
    return {c: terms[tuple(c[axis] for axis in ops)] for c in product(*map(range, shape))}


def gather(
    terms: Mapping[Coordinate, Tensor], entries: Sequence[object], shape: Sequence[int]
) -> Terms:
    """Return, for every mesh coordinate, the reduction of the terms along its partial axes.

    Args:
        terms: tensors of one shape, by mesh coordinate.
        entries: one per mesh axis; `P(op)` makes the axis partial.
        shape: shape of the mesh.

    Example:
        >>> from shoal_dtensor import Partial
        >>> gather({(0,): torch.ones(2), (1,): torch.ones(2)}, [Partial("sum")], (2,))
        {(0,): tensor([2., 2.]), (1,): tensor([2., 2.])}
    """
    ops = {
        axis: entry.reduce_op for axis, entry in enumerate(entries) if isinstance(entry, Partial)
    }
    reduced = dict(terms)
    for op in dict.fromkeys(ops.values()):
        lines = {
            c: product(*([i] if ops.get(a) != op else range(shape[a]) for a, i in enumerate(c)))
            for c in reduced
        }
        reduced = {
            c: reduce_all([reduced[other] for other in line], op) for c, line in lines.items()
        }
    return reduced
