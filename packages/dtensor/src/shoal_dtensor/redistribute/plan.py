"""Planning: `plan(src, dst)` returns the cheapest redistribution, `price(src, dst)` its time.

Plans are pure: the same specs and topology give the same plan on every rank, regardless of earlier
calls. The search plans on one mesh, between specs under which every rank holds a box; all other
plans are composed of such plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import prod
from operator import attrgetter

from shoal_mesh import DeviceMesh, topology_of
from shoal_mesh.internal import Topology, topology_version

from ..errors import RedistributeError
from ..layout.boxes import volume
from ..layout.dim_sharding import AnyDimSharding, DimSharding, StridedDimSharding
from ..layout.placements import Partial, Placement, Replicate, Shard
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
    version = topology_version()
    if src.example is None and dst.example is None:
        return _plan(src, dst, topology, memory_limit, version)
    if None not in (src.example, dst.example) and not (
        src.is_strided or dst.is_strided or src.mesh != dst.mesh
    ):
        # kept, symbols would keep their compiler
        chosen = _plan.__wrapped__(src, dst, topology, memory_limit, version)
        if all(map(_moves_equal_blocks, chosen.steps)):
            return chosen
    return plan(constant(src), constant(dst), topology=topology, memory_limit=memory_limit)


def _moves_equal_blocks(step: Step) -> bool:
    """Tell whether a step depends only on the symbolic size of a rank's shard.

    It does not if blocks differ by rank.
    """
    if step.src.example is None or step.dst.example is None:
        return False
    if step.name == "Exchange":
        sizes = zip(step.src.shape, step.src.dim_shardings, step.dst.dim_shardings, strict=True)
        return not has_symbols([n for n, a, b in sizes if {*a.axes, *b.axes} & {*step.axes}])
    sharded = step.src if step.name == "AllGather" else step.dst
    return step.name not in ("AllGather", "ReduceScatter") or len(step.dims) == 1 or sharded.even


@lru_cache(maxsize=CACHE_SIZE)
def _plan(
    src: Spec, dst: Spec, topology: Topology | None, memory_limit: int | None, version: int
) -> Plan:
    """Return the plan over the given links, else over the links of the meshes.

    `version` stands for the links of the meshes in the cache's key.
    """
    _check(src, dst)

    def within(one: Spec, other: Spec) -> Plan:
        return _plan(one, other, None if across else topology, memory_limit, version)

    across = src.mesh != dst.mesh
    strided = src.is_strided or dst.is_strided
    if across and strided:
        between = _gather_strided(src if src.is_strided else dst)
        return _concatenated(within(src, between), within(between, dst))
    if across:
        return _plan_across(src, dst, within, memory_limit)
    if strided:
        return _plan_strided(src, dst, within)
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit)[0]


def price(src: Spec, dst: Spec) -> float:
    """Return the expected seconds of the cheapest plan.

    For symbolic sizes, return the time for the sizes that the compiler traces with.
    """
    return 0.0 if src is dst else plan(src.example or src, dst.example or dst).seconds


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
    _check(src, dst)
    if src.is_strided or dst.is_strided:
        return [plan(src, dst, topology=topology, memory_limit=memory_limit)]
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit, wanted=count)


def cache_clear() -> None:
    """Forget all plans and topologies."""
    for cached in (_links, _plan):
        cached.cache_clear()


def links_of(mesh: DeviceMesh, topology: Topology | None = None) -> Links:
    """Return the given latency and bandwidth of every axis, or the values of the mesh."""
    return _links(mesh, topology, 0 if topology is not None else topology_version())


@lru_cache(maxsize=256)
def _links(mesh: DeviceMesh, topology: Topology | None, version: int) -> Links:
    links = (topology_of(mesh) if topology is None else topology).links
    return Links(
        tuple(mesh.shape),
        tuple(link.latency for link in links),
        tuple(link.bandwidth for link in links),
    )


def _check(src: Spec, dst: Spec) -> None:
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise RedistributeError(
            f"cannot redistribute {src!r} to {dst!r}: shape and dtype must be equal, got "
            f"{tuple(src.shape)} {src.dtype} and {tuple(dst.shape)} {dst.dtype}"
        )


# --- to and from strided dims ---------------------------------------------------------------------
#
# Under the shape before the reshape that made them, every rank holds a box:
#
#     (batch 4, sequence 6), the sequence over 2 ranks, as one dim of 24:
# rank 0 holds elements 0 1 2, 6 7 8, 12 13 14, 18 19 20; as (4, 6) one box: rows 0 to 3, columns 0
# to 2
#
# So such a tensor gets that shape, is redistributed as any other, and gets its own shape again.
# Where the other end has no boxes under that shape, the strided dims are gathered on the way.

# for every dim the sizes of the dims that it is viewed as
UnfoldedShape = list[tuple[int, ...]]


def _plan_strided(src: Spec, dst: Spec, within: Callable[[Spec, Spec], Plan]) -> Plan:
    """Return the plan between two specs on one mesh of which one at least is folded.

    `within` plans between any two specs.
    """
    for spec in (src, dst):
        one = _viewed(src, _unfolded_shape(spec))
        two = _viewed(dst, _unfolded_shape(spec))
        if spec.is_strided and one is not None and two is not None:
            inner = within(one, two)
            before: tuple[Step, ...] = () if one is src else (Step("Reshape", src, one),)
            after: tuple[Step, ...] = () if two is dst else (Step("Reshape", two, dst),)
            return replace(inner, src=src, dst=dst, steps=(*before, *inner.steps, *after))
    between = _gather_strided(src, dst)
    return _concatenated(within(src, between), within(between, dst))


def _gather_strided(spec: Spec, *others: Spec) -> Spec:
    """Return `spec` with dims that are folded, in it or in `others`, held whole by every rank."""
    shardings = zip(*[each.dim_shardings for each in (spec, *others)], strict=True)
    axes = {
        axis
        for own, *rest in shardings
        if StridedDimSharding in map(type, (own, *rest))
        for axis in own.axes
    }
    return spec.with_(
        placements=[Replicate() if a in axes else p for a, p in enumerate(spec.placements)]
    )


def unfold_spec(spec: Spec) -> Spec:
    """Return the spec of the same memory with its dims unfolded, so that every rank holds a box."""
    unfolded = _viewed(spec, _unfolded_shape(spec))
    assert unfolded is not None, "a strided dim is sharded as the dims that it was folded of"
    return unfolded


def _concatenated(*plans: Plan) -> Plan:
    """Return one plan that runs `plans` one after another."""
    steps = tuple(step for plan in plans for step in plan.steps)
    seconds = sum(plan.seconds for plan in plans)
    sent = sum(plan.bytes_sent for plan in plans)
    return Plan(
        plans[0].src,
        plans[-1].dst,
        steps,
        seconds,
        bytes_sent=sent,
        peak_bytes=max(plan.peak_bytes for plan in plans),
    )


def _unfolded_shape(spec: Spec) -> UnfoldedShape:
    """Return the dims that each dim of a spec was folded from."""
    return [
        sharding.shape if isinstance(sharding, StridedDimSharding) else (n,)
        for sharding, n in zip(spec.dim_shardings, spec.shape, strict=True)
    ]


def _viewed(spec: Spec, view: UnfoldedShape) -> Spec | None:
    """Return the same placement of the same elements under the view's shape.

    None if ranks would not hold boxes there.
    """
    by_dim: dict[int, AnyDimSharding] = {}
    stride: list[int] = []
    for sharding, step, sizes in zip(spec.dim_shardings, spec.stride, view, strict=True):
        plain = {1: sharding} if isinstance(sharding, DimSharding) and sharding.axes else {}
        levels = dict(sharding.levels) if isinstance(sharding, StridedDimSharding) else plain
        for i in range(len(sizes)):
            # columns of (4, 6) are sharded in 4 runs
            runs = prod(sizes[:i])
            inner = prod(sizes[i + 1 :])
            if runs in levels:
                divided = levels.pop(runs).divided(inner)
                if divided is None:
                    return None
                by_dim[len(stride)] = divided
            stride.append(step * inner)  # 24 elements as (4, 6): [6, 1]
        if levels:
            return None  # 3 runs are not a dim of (4, 6)
    placements: dict[int, Placement] = dict(enumerate(spec.placements))
    for dim, sharding in by_dim.items():
        placements |= sharding.placements(dim)
    shape = tuple(n for sizes in view for n in sizes)
    return spec.sharded(
        spec.mesh, tuple(placements.values()), TensorMeta(shape, tuple(stride), spec.dtype), by_dim
    )


# --- from one mesh to another ---------------------------------------------------------------------
#
# Partial values are reduced on the source mesh; then one `Transfer` carries every block from a rank
# that has it to ranks that need it; replicas may each receive a part and gather the rest, if links
# are better used so.

# up to so many ranks a transfer is priced by its exact blocks (32 ranks: about 2 ms)
EXACT_RANKS = 32


def _plan_across(
    src: Spec, dst: Spec, within: Callable[[Spec, Spec], Plan], memory_limit: int | None
) -> Plan:
    """Return the cheapest plan of the form reduce - transfer - spread between two meshes.

    `within` plans on one mesh, each within the limit.
    """
    of_src, of_dst = ([axis for axis, _ in spec.partials] for spec in (src, dst))
    copies = [
        axis
        for axis, p in enumerate(dst.placements)
        if not p.is_shard() and dst.mesh.shape[axis] > 1
    ]
    # Replicas of the destination are made there, or sent ready.
    targets = dict.fromkeys([*_reduced(dst, of_dst), *_reduced(dst, copies)])
    plans = [
        _concatenated(within(src, sent), _transfer(sent, received), within(received, dst))
        for sent, received in product(_reduced(src, of_src), targets)
    ]
    fitting = [each for each in plans if memory_limit is None or each.peak_bytes <= memory_limit]
    if not fitting:
        raise RedistributeError(
            f"no transfer from {src!r} to {dst!r} stays within memory_limit={memory_limit} bytes: "
            f"the leanest needs {min(each.peak_bytes for each in plans)}"
        )
    return min(fitting, key=attrgetter("seconds"))


def _reduced(spec: Spec, axes: list[int]) -> Iterator[Spec]:
    """Yield the spec with `axes` and partials replicated, then the spec with `axes` sharding a dim.

    It is the first dim that the axes shard evenly.
    """
    placements = [
        Replicate() if a in axes or isinstance(p, Partial) else p
        for a, p in enumerate(spec.placements)
    ]
    yield spec.with_(placements=placements)
    ways = prod(spec.mesh.shape[axis] for axis in axes)
    order = dict(spec.shard_order)
    for dim, sharding in enumerate(map(spec.dim_sharding, range(spec.ndim if axes else 0))):
        # steps of 4 over 2 ranks more: 4 % 2 = 0
        if sharding.even and sharding.step and sharding.step % ways == 0:
            order[dim] = (*sharding.axes, *axes)  # rows over axis 0, then 1: {0: (0, 1)}
            inner = [Shard(dim) if axis in axes else p for axis, p in enumerate(placements)]
            yield spec.with_(placements=inner, shard_order=tuple(sorted(order.items())))
            return


def _transfer(src: Spec, dst: Spec) -> Plan:
    ranks = tuple(sorted({*src.mesh.ranks, *dst.mesh.ranks}))
    biggest = [
        src.dtype.itemsize * prod(spec.dim_sharding(d).step for d in range(spec.ndim))
        for spec in (src, dst)
    ]
    if len(ranks) <= EXACT_RANKS:
        # elements that each rank sends and receives
        loads: Counter[tuple[str, int]] = Counter()
        for sender, receiver, box in flows(
            *([boxes_of_rank(spec, rank) for rank in ranks] for spec in (src, dst))
        ):
            loads["sends", sender] += volume(box)
            loads["receives", receiver] += volume(box)
        moved = max(loads.values(), default=0) * src.dtype.itemsize
    else:
        # 16 ranks to 64: each sends 4
        moved = max(biggest[1], biggest[1] * dst.mesh.size() // src.mesh.size())
    links = [link for mesh in (src.mesh, dst.mesh) for link in topology_of(mesh).links]
    seconds = max(link.latency for link in links) + moved / min(link.bandwidth for link in links)
    peak = 2 * sum(biggest)  # both boxes and their packed copies
    step = Step("Transfer", src, dst, seconds=seconds, bytes=moved, peak_bytes=peak, ranks=ranks)
    return Plan(src, dst, (step,), seconds, bytes_sent=moved, peak_bytes=peak)
