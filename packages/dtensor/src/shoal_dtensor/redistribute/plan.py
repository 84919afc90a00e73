"""Planning: `plan(src, dst)` returns the cheapest redistribution, `price(src, dst)` its time.

Plans are pure: the same specs and topology give the same plan on every rank, regardless of earlier
calls. The search plans on one mesh, between specs under which every rank holds a box; all other
plans are composed of such plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from operator import attrgetter

from shoal_mesh import DeviceMesh, topology_of
from shoal_mesh.internal import USER_TOPOLOGIES, Topology

from ..errors import RedistributeError
from ..layout.boxes import volume
from ..layout.dim_sharding import AnyDimSharding, DimSharding, StridedDimSharding
from ..layout.placements import Placement, Replicate, Shard
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta, constant, has_symbols
from .blocks import boxes_of_rank, flows
from .search.links import Links, mask_of
from .search.shortest_plan import cheapest_plans
from .steps import Plan, Step

CACHE_SIZE = 4096  # plans; one takes about 2 kB


def plan(
    src: Spec, dst: Spec, *, topology: Topology | None = None, memory_limit: int | None = None
) -> Plan:
    """Return the cheapest plan that turns `src` into `dst`.

    Args:
        src: the present spec of the tensor.
        dst: the wanted spec of the tensor: same shape and dtype; on the same mesh or another.
        topology: latency and bandwidth of every mesh axis; the topology of the mesh when left out.
        memory_limit: bytes that a rank may hold at the worst moment: source shard, destination
            shard and buffers.

    Raises:
        RedistributeError: if the specs describe different tensors, reductions of different kinds
            would have to be reordered, or no plan stays within the limit.
    """
    version = USER_TOPOLOGIES.version
    if src.example is None and dst.example is None:
        return _plan(src, dst, (topology, version), memory_limit)
    has_symbolic_ends = None not in (src.example, dst.example)
    is_strided = src.is_strided or dst.is_strided
    if has_symbolic_ends and not is_strided and src.mesh == dst.mesh:
        # not cached, because symbols would keep their compiler
        chosen = _plan.__wrapped__(src, dst, (topology, version), memory_limit)
        if all(map(_moves_equal_blocks, chosen.steps)):
            return chosen
    return plan(constant(src), constant(dst), topology=topology, memory_limit=memory_limit)


def _moves_equal_blocks(step: Step) -> bool:
    """Tell whether this rank can compute all block sizes from its own shard's symbolic sizes.

    It cannot if blocks differ by rank.
    """
    if step.src.example is None or step.dst.example is None:
        return False
    if step.name == "Exchange":
        moved = []
        sizes = zip(step.src.shape, step.src.dim_shardings, step.dst.dim_shardings, strict=True)
        for size, before, after in sizes:
            if {*before.axes, *after.axes} & {*step.axes}:
                moved.append(size)
        return not has_symbols(moved)
    if step.name not in ("AllGather", "ReduceScatter"):
        return True
    sharded = step.src if step.name == "AllGather" else step.dst
    return len(step.dims) == 1 or sharded.even


@lru_cache(maxsize=CACHE_SIZE)
def _plan(
    src: Spec, dst: Spec, versioned: tuple[Topology | None, int], memory_limit: int | None
) -> Plan:
    """Return the plan for the given topology, or for the topologies of the meshes if it is None.

    The version beside the topology is only a part of the cache's key: it changes when the topology
    of a mesh does. The arguments are positional, because keywords double the time of a look-up.
    """
    topology, version = versioned
    _check_same_tensor(src, dst)

    is_across = src.mesh != dst.mesh
    is_strided = src.is_strided or dst.is_strided

    def plan_within(start: Spec, end: Spec) -> Plan:
        # A given topology describes the axes of one mesh.
        known_topology = None if is_across else topology
        return _plan(start, end, (known_topology, version), memory_limit)

    if is_across and is_strided:
        between = _gather_strided(src if src.is_strided else dst)
        return _concatenate_plans(plan_within(src, between), plan_within(between, dst))
    if is_across:
        return _plan_across(src, dst, plan_within, memory_limit)
    if is_strided:
        return _plan_strided(src, dst, plan_within)
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit)[0]


def price(src: Spec, dst: Spec) -> float:
    """Return the expected seconds of the cheapest plan.

    For symbolic sizes, return the time for the sizes that the compiler traces with.
    """
    if src is dst:
        return 0.0
    return plan(src.example or src, dst.example or dst).seconds


def seconds(mesh: DeviceMesh, axes: tuple[int, ...], received: int) -> float:
    """Return the expected seconds of a collective in which each rank receives `received` bytes."""
    return links_of(mesh).seconds(mask_of(axes), received)


def alternatives(
    src: Spec,
    dst: Spec,
    count: int = 4,
    *,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> list[Plan]:
    """Return the `count` cheapest plans that differ, cheapest first.

    The first is the plan that `plan` chooses, the others are the plans that it rejects.
    """
    _check_same_tensor(src, dst)
    if src.is_strided or dst.is_strided:
        return [plan(src, dst, topology=topology, memory_limit=memory_limit)]
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit, wanted=count)


def cache_clear() -> None:
    """Forget all plans and topologies."""
    for cached in (_links, _plan):
        cached.cache_clear()


def links_of(mesh: DeviceMesh, topology: Topology | None = None) -> Links:
    """Return the given latency and bandwidth of every axis, or the values of the mesh."""
    # A given topology does not depend on the topologies that are set.
    version = USER_TOPOLOGIES.version if topology is None else 0
    return _links(mesh, topology, version)


@lru_cache(maxsize=256)
def _links(mesh: DeviceMesh, topology: Topology | None, version: int) -> Links:
    links = (topology_of(mesh) if topology is None else topology).links
    latency = tuple(link.latency for link in links)
    bandwidth = tuple(link.bandwidth for link in links)
    return Links(tuple(mesh.shape), latency, bandwidth)


def _check_same_tensor(src: Spec, dst: Spec) -> None:
    """Raise an error unless two specs have the same shape and dtype."""
    if src.shape != dst.shape or src.dtype != dst.dtype:
        source = f"{tuple(src.shape)} {src.dtype}"
        target = f"{tuple(dst.shape)} {dst.dtype}"
        raise RedistributeError(
            f"cannot redistribute {src!r} to {dst!r}: shape and dtype must be equal, got {source} "
            f"and {target}"
        )


# --- to and from strided dims ---------------------------------------------------------------------
#
# A reshape that folds several dims into one can make a strided dim. A rank's shard of it is several
# runs of elements, but under the shape before the reshape it is one box:
#
#     (batch 4, sequence 6), with the sequence sharded over 2 ranks, folded into one dim of 24:
#     rank 0 holds elements 0 1 2, 6 7 8, 12 13 14, 18 19 20
#     as (4, 6) these are one box: rows 0 to 3, columns 0 to 2
#
# Therefore the tensor is viewed under that shape, redistributed like any other tensor, and viewed
# under its own shape again. If ranks do not hold boxes of that shape at the other end, the strided
# dims are gathered first.

# for every dim the sizes of the dims that it is viewed as
UnfoldedShape = list[tuple[int, ...]]


def _plan_strided(src: Spec, dst: Spec, plan_inside: Callable[[Spec, Spec], Plan]) -> Plan:
    """Return the plan between two specs on one mesh, at least one of which has a strided dim.

    `plan_inside` plans between any two specs on the mesh.
    """
    for spec in (src, dst):
        if not spec.is_strided:
            continue
        shape = _unfolded_shape(spec)
        viewed_src = _spec_of_view(src, shape)
        viewed_dst = _spec_of_view(dst, shape)
        if viewed_src is None or viewed_dst is None:
            continue
        inner = plan_inside(viewed_src, viewed_dst)
        before = [] if viewed_src is src else [Step("Reshape", src, viewed_src)]
        after = [] if viewed_dst is dst else [Step("Reshape", viewed_dst, dst)]
        return replace(inner, src=src, dst=dst, steps=(*before, *inner.steps, *after))
    between = _gather_strided(src, dst)
    return _concatenate_plans(plan_inside(src, between), plan_inside(between, dst))


def _gather_strided(spec: Spec, *others: Spec) -> Spec:
    """Return `spec` with every dim unsharded that is strided in `spec` or in one of `others`."""
    axes: set[int] = set()
    for dim, sharding in enumerate(spec.dim_shardings):
        shardings = [sharding, *(other.dim_shardings[dim] for other in others)]
        if any(isinstance(dim_sharding, StridedDimSharding) for dim_sharding in shardings):
            axes.update(sharding.axes)
    return _with_replicated(spec, axes)


def _with_replicated(spec: Spec, axes: Collection[int]) -> Spec:
    """Return a spec with these axes replicated; placements determine the order of the others."""
    placements = [Replicate() if axis in axes else p for axis, p in enumerate(spec.placements)]
    return spec.with_(placements=placements)


def unfold_spec(spec: Spec) -> Spec:
    """Return the spec of the same memory with its dims unfolded, so that every rank holds a box."""
    unfolded = _spec_of_view(spec, _unfolded_shape(spec))
    assert unfolded is not None, "a strided dim is sharded like the dims that it was folded from"
    return unfolded


def _concatenate_plans(*plans: Plan) -> Plan:
    """Return one plan that runs `plans` one after another."""
    steps = tuple(step for plan in plans for step in plan.steps)
    seconds = sum(plan.seconds for plan in plans)
    sent = sum(plan.bytes_sent for plan in plans)
    peak = max(plan.peak_bytes for plan in plans)
    first = plans[0]
    last = plans[-1]
    return Plan(first.src, last.dst, steps, seconds, bytes_sent=sent, peak_bytes=peak)


def _unfolded_shape(spec: Spec) -> UnfoldedShape:
    """Return the dims that each dim of a spec was folded from."""
    shape: UnfoldedShape = []
    for sharding, n in zip(spec.dim_shardings, spec.shape, strict=True):
        if isinstance(sharding, StridedDimSharding):
            shape.append(sharding.shape)
        else:
            shape.append((n,))
    return shape


def _spec_of_view(spec: Spec, view: UnfoldedShape) -> Spec | None:
    """Return the spec of the same memory under the shape of `view`.

    Return None if ranks would not hold boxes of that shape.
    """
    by_dim: dict[int, AnyDimSharding] = {}
    stride: list[int] = []
    for sharding, step, sizes in zip(spec.dim_shardings, spec.stride, view, strict=True):
        levels: dict[int, DimSharding] = {}
        if isinstance(sharding, StridedDimSharding):
            levels = dict(sharding.levels)
        elif sharding.axes:
            levels = {1: sharding}
        for i in range(len(sizes)):
            # Example: a shard of the columns of (4, 6) consists of 4 runs.
            runs = prod(sizes[:i])
            inner = prod(sizes[i + 1 :])
            if runs in levels:
                divided = levels.pop(runs).divided(inner)
                if divided is None:
                    return None
                by_dim[len(stride)] = divided
            # Example: 24 contiguous elements as (4, 6) have the strides [6, 1].
            stride.append(step * inner)
        # Example: shards of 3 runs are not shards of a dim of (4, 6).
        if levels:
            return None
    placements: dict[int, Placement] = dict(enumerate(spec.placements))
    for dim, sharding in by_dim.items():
        placements |= sharding.placements(dim)
    shape = tuple(n for sizes in view for n in sizes)
    meta = TensorMeta(shape, tuple(stride), spec.dtype)
    return spec.sharded(spec.mesh, tuple(placements.values()), meta, by_dim)


# --- from one mesh to another ---------------------------------------------------------------------
#
# Partial values are reduced on the source mesh. Then one `Transfer` sends every block from a rank
# that has it to the ranks that need it. Replicas of the destination may each receive a part and
# gather the rest, if this is faster.

# Up to this many ranks, a transfer is priced by its exact blocks. Pricing takes about 2 ms for 32
# ranks.
EXACT_RANKS = 32


def _plan_across(
    src: Spec, dst: Spec, plan_inside: Callable[[Spec, Spec], Plan], memory_limit: int | None
) -> Plan:
    """Return the cheapest plan of the form reduce - transfer - spread between two meshes.

    `plan_inside` plans on one mesh, each within the limit.
    """
    partials_of_src = [axis for axis, _ in src.partials]
    partials_of_dst = [axis for axis, _ in dst.partials]
    copies = []
    for axis, placement in enumerate(dst.placements):
        if not placement.is_shard() and dst.mesh.shape[axis] > 1:
            copies.append(axis)
    # Replicas of the destination are sent as they are, or gathered on the destination mesh.
    targets = dict.fromkeys(
        [*_transfer_layouts(dst, partials_of_dst), *_transfer_layouts(dst, copies)]
    )
    plans = []
    for sent, received in product(_transfer_layouts(src, partials_of_src), targets):
        reduce = plan_inside(src, sent)
        transfer = _transfer(sent, received)
        plans.append(_concatenate_plans(reduce, transfer, plan_inside(received, dst)))
    fitting = [p for p in plans if memory_limit is None or p.peak_bytes <= memory_limit]
    if not fitting:
        leanest = min(p.peak_bytes for p in plans)
        raise RedistributeError(
            f"no transfer from {src!r} to {dst!r} stays within memory_limit={memory_limit} bytes: "
            f"the leanest needs {leanest}"
        )
    return min(fitting, key=attrgetter("seconds"))


def _transfer_layouts(spec: Spec, axes: list[int]) -> Iterator[Spec]:
    """Yield the spec with `axes` and partials replicated, then the spec with `axes` sharding a dim.

    They shard the first dim that they divide evenly; without such a dim there is no second spec.
    """
    whole = _with_replicated(spec.without_partials(), axes)
    yield whole
    if not axes:
        return
    ranks = prod(spec.mesh.shape[axis] for axis in axes)
    order = dict(spec.shard_order)
    for dim in range(spec.ndim):
        sharding = spec.dim_sharding(dim)
        # Example: shards of 4 elements can be divided over 2 more ranks, because 4 % 2 = 0.
        if sharding.even and sharding.step and sharding.step % ranks == 0:
            # Example: rows over axis 0 and then over axis 1 are {0: (0, 1)}.
            order[dim] = (*sharding.axes, *axes)
            placements = [*whole.placements]
            for axis in axes:
                placements[axis] = Shard(dim)
            yield spec.with_(placements=placements, shard_order=tuple(sorted(order.items())))
            return


def _transfer(src: Spec, dst: Spec) -> Plan:
    """Return the plan of one transfer between specs without partials on two meshes."""
    ranks = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
    sent = _largest_box_bytes(src)
    received = _largest_box_bytes(dst)
    if len(ranks) <= EXACT_RANKS:
        moved = _busiest_rank_bytes(src, dst, ranks)
    else:
        # Example: from 16 ranks to 64, each rank sends 4 boxes.
        moved = max(received, received * dst.mesh.size() // src.mesh.size())
    links = [*topology_of(src.mesh).links, *topology_of(dst.mesh).links]
    latency = max(link.latency for link in links)
    seconds = latency + moved / min(link.bandwidth for link in links)
    # both boxes and their packed copies
    peak = 2 * (sent + received)
    step = Step("Transfer", src, dst, seconds=seconds, bytes=moved, peak_bytes=peak, ranks=ranks)
    return Plan(src, dst, (step,), seconds, bytes_sent=moved, peak_bytes=peak)


def _largest_box_bytes(spec: Spec) -> int:
    elements = prod([spec.dim_sharding(dim).step for dim in range(spec.ndim)])
    return spec.dtype.itemsize * elements


def _busiest_rank_bytes(src: Spec, dst: Spec, ranks: Sequence[int]) -> int:
    """Return the bytes that the busiest rank sends, or receives, in a transfer."""
    sources = [boxes_of_rank(src, rank) for rank in ranks]
    targets = [boxes_of_rank(dst, rank) for rank in ranks]
    elements: Counter[tuple[str, int]] = Counter()
    for sender, receiver, box in flows(sources, targets):
        elements["sends", sender] += volume(box)
        elements["receives", receiver] += volume(box)
    return max(elements.values(), default=0) * src.dtype.itemsize
