"""Plans executed on plain tensors: all ranks of the mesh in one process, no process group.

The rank steps are the steps that `run` executes. Only the collective between `prepare` and `finish`
is computed here, from the buffers of all ranks. A plan that is right here is therefore right on
real ranks, provided that the collectives are right. For a partial value, the ranks' tensors are
terms whose reduction is the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    return _places(spec.mesh.shape)


def _places(shape: Sequence[int]) -> list[Coordinate]:
    """Return all coordinates on axes of these sizes, row-major."""
    indices_of_axes = map(range, shape)
    return list(product(*indices_of_axes))


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
    sources = _ranks(plan.src)
    targets = _ranks(plan.dst)
    tensors = dict(zip(sources, shards, strict=True))
    for step in plan.steps:
        tensors |= _run_step(step, tensors)
    if plan.steps and plan.slices:
        tensors = {rank: tensor.clone() for rank, tensor in tensors.items()}
    return [tensors[rank] for rank in targets]


def _ranks(spec: Spec) -> list[int]:
    """Return the ranks of a spec's mesh, row-major."""
    return [spec.mesh.rank_at(coordinate) for coordinate in coordinates(spec)]


def _run_step(step: Step, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
    """Run one step on all ranks of its mesh (of both meshes, for a transfer)."""
    mesh = step.src.mesh
    if step.name == "Transfer":
        rank_steps = {rank: transfer_rank_step(step, rank) for rank in step.ranks}
        # A rank that only receives does not have elements yet.
        empty = torch.empty(0, dtype=step.src.dtype, device="cpu")
        tensors = dict.fromkeys(step.ranks, empty) | tensors
    else:
        rank_steps = {mesh.rank_at(c): rank_step(step, c) for c in coordinates(step.src)}
    buffers = {rank: one_step.prepare(tensors[rank]) for rank, one_step in rank_steps.items()}
    after: dict[int, Tensor] = {}
    for rank, one_step in rank_steps.items():
        received = buffers[rank]
        if one_step.collective is not None:
            group = _group(step, rank, one_step.collective)
            sent = [buffers[member] for member in group]
            calls = [rank_steps[member].collective for member in group]
            received = _result_of_member(sent, group.index(rank), calls)
        after[rank] = one_step.finish(received, tensors[rank])
    return after


def _group(step: Step, rank: int, call: CollectiveCall) -> list[int]:
    """Return the ranks of a rank's collective."""
    if call.ranks:
        return list(call.ranks)
    mesh = step.src.mesh
    coordinate = mesh.coordinate_of(rank) or ()
    coordinates_of_group = members(step.src, call.axes, coordinate)
    return [mesh.rank_at(member) for member in coordinates_of_group]


def _result_of_member(
    buffers: list[Tensor], me: int, calls: Sequence[CollectiveCall | None]
) -> Tensor:
    """Return a collective's result for one member of a group, from the buffers of all members."""
    calls_of_group = [call for call in calls if call is not None]
    call = calls_of_group[me]
    match call.kind:
        case "all_reduce":
            return reduce_all(buffers, call.op)
        case "all_gather":
            lengths = [len(buffer) for buffer in buffers]
            assert not call.sizes or lengths == list(call.sizes), "sizes must match"
            return torch.cat(buffers)
        case "reduce_scatter":
            reduced = reduce_all(buffers, call.op)
            return _block(reduced, me, call, len(buffers)).clone()
    assert call.kind == "all_to_all", f"no collective {call.kind}"
    sent = []
    for buffer, other in zip(buffers, calls_of_group, strict=True):
        sent.append(_block(buffer, me, other, len(buffers)))
    lengths = [block.numel() for block in sent]
    assert not call.sizes or lengths == list(call.receives), "the expected sizes must be sent"
    return torch.cat(sent)


def _block(buffer: Tensor, member: int, call: CollectiveCall, members: int) -> Tensor:
    """Return a member's block of a buffer; the blocks have equal sizes unless the call has some."""
    sizes = list(call.sizes)
    if not sizes:
        sizes = [len(buffer) // members] * members
    return buffer.split_with_sizes(sizes)[member]


def local_shards(
    full: Tensor, spec: Spec, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Return local tensors of all ranks, row-major, whose global value is `full`.

    Along partial axes the value is split into terms. With a generator the terms are random (coarse
    floating-point numbers, so that sums are exact in any order). Without a generator the first rank
    has the value, and the others have neutral values.

    Args:
        full: the global tensor.
        spec: its layout.
        generator: generator of the terms along partial axes.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> spec = Spec(abstract_mesh((2,)), (Shard(0),), (3,), dtype=torch.int64)
        >>> local_shards(torch.arange(3), spec)
        [tensor([0, 1]), tensor([2])]
    """
    split = first_term if generator is None else partial(random_terms, generator=generator)
    terms = deal(full, spec.placements, spec.mesh.shape, split)
    shards = []
    for coordinate in coordinates(spec):
        part = part_of(terms[coordinate], spec, coordinate)
        shards.append(part.clone(memory_format=torch.contiguous_format))
    return shards


def part_of(full: Tensor, spec: Spec, coordinate: Coordinate) -> Tensor:
    """Return the part of a global tensor that the rank at a mesh coordinate holds.

    Partial axes are ignored.

    Args:
        full: the global tensor.
        spec: its layout.
        coordinate: the coordinate of a rank, one index per mesh axis.
    """
    if spec.is_strided:
        return full[_indices_of_part(spec, coordinate)]
    box = spec.box(coordinate)
    return full[tuple(slice(start, stop) for start, stop in box)]


def _indices_of_part(spec: Spec, coordinate: Coordinate) -> tuple[Tensor, ...]:
    """Return index tensors that select a rank's part of a global tensor."""
    indices_of_dims = []
    for sharding in spec.dim_shardings:
        indices = sharding.indices(coordinate)
        indices_of_dims.append(torch.tensor(indices, dtype=torch.int64, device="cpu"))
    if not indices_of_dims:
        return ()
    return torch.meshgrid(indices_of_dims, indexing="ij")


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
    terms: Terms = {}
    filled: Terms = {}
    for place in _places(sizes):
        terms[place] = torch.zeros(spec.shape, dtype=shards[0].dtype, device="cpu")
        filled[place] = torch.zeros(spec.shape, dtype=torch.bool, device="cpu")
    for c, shard in zip(coordinates(spec), shards, strict=True):
        indices = _indices_of_part(spec, c)
        wanted = tuple(spec.local_shape_at(c))
        assert shard.shape == wanted, (
            f"rank at {c}: the shard has shape {tuple(shard.shape)}, but the spec has {wanted}"
        )
        place = tuple(c[axis] for axis in partials)
        term = terms[place]
        seen = filled[place][indices]
        seen_before = term[indices][seen]
        assert torch.equal(seen_before, shard[seen]), f"the replica at {c} differs"
        term[indices] = shard
        filled[place][indices] = True
    assert all(bool(seen.all()) for seen in filled.values()), (
        "some elements are missing on all ranks"
    )
    reduced = gather(terms, [*partials.values()], sizes)
    first = (0,) * len(partials)
    return reduced[first]


# --- partial values, split into terms and reduced -------------------------------------------------


# The function that reduces two tensors, by the name of the reduction. An average is a sum that is
# divided afterwards.
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
        summed_powers = reduce(torch.add, [powers(tensor, order) for tensor in tensors])
        return root(summed_powers, order, first.dtype)
    if op == "avg":
        # In a half type the sum may overflow although the mean does not.
        is_half = first.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float64 if is_half else first.dtype
        total = reduce(torch.add, [tensor.to(wide) for tensor in tensors])
        return (total / len(tensors)).to(first.dtype)
    return reduce(COMBINE[op], others, first.clone())


def first_term(op: str, value: Tensor, n: int) -> list[Tensor]:
    """Return `n` tensors whose reduction by `op` is `value`: the first one has all of it."""
    neutral = torch.full_like(value, identity_of(op, value.dtype))
    first = value * n if op == "avg" else value
    others = [neutral] * (n - 1)
    return [first, *others]


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
    if order is not None:
        is_refused = not value.is_floating_point()
    else:
        is_refused = refused.get(op, has_fractions)
    if is_refused:
        raise NotImplementedError(f"a partial {op} of {value.dtype} is not supported")
    if n == 1:
        return [value]
    if op == "avg":
        zero = torch.zeros_like(value)
        return [value + term for term in random_terms("sum", zero, n, generator)]
    if order is not None:
        return _terms_of_norm(order, value, n, generator)
    # All terms but the last are random; the last one makes up the difference. Signs and bits are
    # their own inverses.
    if op in ("sum", "product", "bxor"):
        terms = [_noise(value, generator, signs=op == "product") for _ in range(n - 1)]
        combined = reduce(COMBINE[op], terms)
        undo = torch.sub if op == "sum" else COMBINE[op]
        return [*terms, undo(value, combined)]
    # Each element's value is on a random coordinate; the other coordinates have values that the
    # reduction discards.
    other = _discarded_values(op, value, generator)
    owner = torch.randint(0, n, value.shape, generator=generator, device="cpu")
    return [torch.where(owner == i, value, other) for i in range(n)]


def _terms_of_norm(
    order: float, value: Tensor, n: int, generator: Generator | None
) -> list[Tensor]:
    """Return random tensors whose norm is `value`.

    Positive values are split into random shares; one coordinate alone holds each negative value.
    """
    drawn = torch.rand((n, *value.shape), dtype=value.dtype, generator=generator, device="cpu")
    # No weight is 0.
    weights = drawn + 0.1
    shares = value * (weights / weights.sum(0)).pow(1 / order)
    neutral = value.new_tensor(0.0 if order > 0 else inf)
    alone = [value, *[neutral] * (n - 1)]
    is_positive = value >= 0
    pairs = zip(shares, alone, strict=True)
    return [torch.where(is_positive, share, other) for share, other in pairs]


def _discarded_values(op: str, value: Tensor, generator: Generator | None) -> Tensor:
    """Return values that a reduction with `value` discards."""
    if value.dtype == torch.bool or op in ("band", "bor"):
        noise = _noise(value, generator)
        return value | noise if op in ("min", "band") else value & noise
    if op == "min":
        return value + 1
    if value.dtype == torch.uint8:
        return torch.zeros_like(value)
    return value - 1


def _noise(value: Tensor, generator: Generator | None, *, signs: bool = False) -> Tensor:
    """Return random values of the same shape and dtype; with `signs` they are 1 and -1."""
    if signs:
        bits = torch.randint(0, 2, value.shape, generator=generator, device="cpu")
        return 1 - 2 * bits.to(value.dtype)
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator, device="cpu") < 0.5
    if value.is_complex():
        return torch.randn(value.shape, dtype=value.dtype, generator=generator, device="cpu")
    # Multiples of 1/64 add up exactly.
    if value.is_floating_point():
        drawn = torch.randn(value.shape, dtype=value.dtype, generator=generator, device="cpu")
        return drawn.mul_(64).round_().div_(64)
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
    op_of_axis = _partial_axes(entries)
    # terms by the coordinates along partial axes, because replicas have equal terms
    terms: Terms = {(): value}
    for axis, op in op_of_axis.items():
        terms_on_axis: Terms = {}
        for place, whole in terms.items():
            for i, term in enumerate(split(op, whole, shape[axis])):
                terms_on_axis[(*place, i)] = term
        terms = terms_on_axis
    term_at: Terms = {}
    for coordinate in _places(shape):
        place = tuple(coordinate[axis] for axis in op_of_axis)
        term_at[coordinate] = terms[place]
    return term_at


def _partial_axes(entries: Sequence[object]) -> dict[int, str]:
    """Return the reduction of each partial axis."""
    partials = [(axis, entry) for axis, entry in enumerate(entries) if isinstance(entry, Partial)]
    return {axis: entry.reduce_op for axis, entry in partials}


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
    op_of_axis = _partial_axes(entries)
    reduced = dict(terms)
    for op in dict.fromkeys(op_of_axis.values()):
        axes = [axis for axis, op_there in op_of_axis.items() if op_there == op]
        summed: Terms = {}
        for coordinate in reduced:
            line = _line(coordinate, axes, shape)
            summed[coordinate] = reduce_all([reduced[other] for other in line], op)
        reduced = summed
    return reduced


def _line(
    coordinate: Coordinate, axes: Sequence[int], shape: Sequence[int]
) -> Iterator[Coordinate]:
    """Yield the coordinates that differ from one along some axes only, itself among them."""
    indices = [[i] for i in coordinate]
    for axis in axes:
        indices[axis] = [*range(shape[axis])]
    return product(*indices)
