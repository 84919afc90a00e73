"""`plan(src, dst)`: the cheapest redistribution, as data; `price(src, dst)`: its expected time.  Executes nothing.

Plans are pure: the same specs and topology give the same plan on every rank, whatever was planned before.  They are
cached, and the cache is bounded.
"""

from __future__ import annotations

from functools import lru_cache

from shoal_mesh import DeviceMesh, topology_of
from shoal_mesh.internal import Topology, topology_version

from ..errors import RedistributeError
from ..layout.spec import Spec
from ..layout.tensor_meta import constant, has_symbols
from .composed_plans import concatenated, gather_strided, plan_across, plan_strided
from .search.shortest_plan import cheapest_plans
from .search.space import Links, mask_of
from .steps import Plan, Step

CACHE_SIZE = 4096  # plans; one takes about 2 kB


def plan(src: Spec, dst: Spec, *, topology: Topology | None = None, memory_limit: int | None = None) -> Plan:
    """The cheapest plan that turns `src` into `dst`.

    Args:
        src: how the tensor is placed now.
        dst: how it shall be placed: same shape and dtype; on the same mesh or another.
        topology: latency and bandwidth of every mesh axis; the mesh's own when left out.
        memory_limit: bytes that a rank may hold at the worst moment: source shard, destination shard and buffers.

    Raises:
        RedistributeError: if the specs describe different tensors, reductions of different kinds would have
            to be reordered, or no plan stays within the limit.
    """
    version = topology_version()
    if src.example is None and dst.example is None:
        return _plan(src, dst, topology, memory_limit, version)
    if None not in (src.example, dst.example) and not (src.is_strided or dst.is_strided or src.mesh != dst.mesh):
        chosen = _plan.__wrapped__(src, dst, topology, memory_limit, version)  # kept, symbols would keep their compiler
        if all(map(_moves_equal_blocks, chosen.steps)):
            return chosen
    return plan(constant(src), constant(dst), topology=topology, memory_limit=memory_limit)


def _moves_equal_blocks(step: Step) -> bool:
    """Whether what a step does on a rank follows from the symbolic size of its own shard, or from constants.

    Blocks that differ between ranks are counted in integers: where a step moves such, sizes become constants.
    """
    if step.src.example is None or step.dst.example is None:
        return False
    if step.name == "Exchange":
        sizes = zip(step.src.shape, step.src.dim_shardings, step.dst.dim_shardings, strict=True)
        return not has_symbols([n for n, a, b in sizes if {*a.axes, *b.axes} & {*step.axes}])
    sharded = step.src if step.name == "AllGather" else step.dst
    return step.name not in ("AllGather", "ReduceScatter") or len(step.dims) == 1 or sharded.even


@lru_cache(maxsize=CACHE_SIZE)
def _plan(src: Spec, dst: Spec, topology: Topology | None, memory_limit: int | None, version: int) -> Plan:
    """The plan over the given links, else those that the meshes have: the version stands for them."""
    _check(src, dst)

    def within(one: Spec, other: Spec) -> Plan:
        return _plan(one, other, None if across else topology, memory_limit, version)

    across, strided = src.mesh != dst.mesh, src.is_strided or dst.is_strided
    if across and strided:
        between = gather_strided(src if src.is_strided else dst)
        return concatenated(within(src, between), within(between, dst))
    if across:
        return plan_across(src, dst, within, (links_of(src.mesh), links_of(dst.mesh)), memory_limit)
    if strided:
        return plan_strided(src, dst, within)
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit)[0]


def price(src: Spec, dst: Spec) -> float:
    """Expected seconds of the cheapest plan; of sizes that are symbols for those that the compiler traces with."""
    return 0.0 if src is dst else plan(src.example or src, dst.example or dst).seconds


def seconds(mesh: DeviceMesh, axes: tuple[int, ...], received: int) -> float:
    """Expected seconds of one collective over mesh axes in which each rank receives so many bytes."""
    return links_of(mesh).seconds(mask_of(axes), received)


def alternatives(
    src: Spec, dst: Spec, count: int = 4, *, topology: Topology | None = None, memory_limit: int | None = None
) -> list[Plan]:
    """The `count` cheapest plans that differ, cheapest first: what `plan` chose and what it rejected."""
    _check(src, dst)
    if src.is_strided or dst.is_strided:
        return [plan(src, dst, topology=topology, memory_limit=memory_limit)]
    return cheapest_plans(src, dst, links_of(src.mesh, topology), memory_limit, count)


def cache_clear() -> None:
    """Forget all plans and topologies."""
    for cached in (_links, _plan):
        cached.cache_clear()


def links_of(mesh: DeviceMesh, topology: Topology | None = None) -> Links:
    """Latency and bandwidth of every axis: the given ones, else the mesh's own."""
    return _links(mesh, topology, 0 if topology is not None else topology_version())


@lru_cache(maxsize=256)
def _links(mesh: DeviceMesh, topology: Topology | None, version: int) -> Links:
    links = (topology_of(mesh) if topology is None else topology).links
    return Links(tuple(mesh.shape), tuple(link.latency for link in links), tuple(link.bandwidth for link in links))


def _check(src: Spec, dst: Spec) -> None:
    if src.shape != dst.shape or src.dtype != dst.dtype:
        raise RedistributeError(
            f"cannot redistribute {src!r} to {dst!r}: shape and dtype must be equal, "
            f"got {tuple(src.shape)} {src.dtype} and {tuple(dst.shape)} {dst.dtype}"
        )
