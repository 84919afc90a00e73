"""Plans against a brute-force optimum.

Covers: redistribute/search/{shortest_plan,bound,space,edges}.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from heapq import heappop, heappush
from itertools import combinations, count, pairwise, permutations, product
from random import Random

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from shoal_dtensor import Partial, Placement, Replicate, Shard, Spec
from shoal_dtensor.internal import Plan
from shoal_dtensor.redistribute.plan import alternatives, links_of, plan
from shoal_dtensor.redistribute.search import shortest_plan
from shoal_dtensor.redistribute.search.bound import Bound
from shoal_dtensor.redistribute.search.edges import (
    Edge,
    all_reduce,
    convert_partials,
    join_pending,
    reduce_scatter,
    reshard,
)
from shoal_dtensor.redistribute.search.links import axes_of, mask_of
from shoal_dtensor.redistribute.search.shortest_plan import MOST_PRICED, cheapest_plans
from shoal_dtensor.redistribute.search.space import Candidates, Dims, ShardedDim, Space, State
from shoal_mesh import Link, abstract_mesh
from shoal_mesh.internal import Topology


def random_links(rng: Random, axes: int) -> Topology:
    """Axes that are equally fast, ten times as fast each as the one before, or anything."""
    match rng.randrange(3):
        case 0:
            return Topology((Link(12e-6, 180e9),) * axes)
        case 1:
            links = [Link(1e-5, 1e11 / 10**axis) for axis in range(axes)]
            rng.shuffle(links)
            return Topology(tuple(links))
    return Topology(
        tuple(
            Link(rng.choice((1e-6, 1e-5, 1e-4)), rng.choice((1e9, 1e10, 4e11))) for _ in range(axes)
        )
    )


def random_pair(
    rng: Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Spec, Spec]:
    mesh = abstract_mesh(mesh_shape)
    options: list[Placement] = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    src, dst = (Spec(mesh, rng.choices(options, k=len(mesh_shape)), shape) for _ in range(2))
    return src, dst


def arrangements(space: Space, outer: Dims, axes: Sequence[int]) -> Iterator[Dims]:
    """All ways to shard dims further by subsets of the axes, in every order.

    They are permutations of axes and bars.
    """
    for chosen in (some for n in range(len(axes) + 1) for some in permutations(axes, n)):
        for bars in combinations(range(len(chosen) + len(outer) - 1), len(outer) - 1):
            ends = [bar - i for i, bar in enumerate(bars)]
            of_dims = (chosen[i:j] for i, j in zip((0, *ends), (*ends, len(chosen)), strict=True))
            yield tuple(chunked(space, *each) for each in zip(outer, of_dims, strict=True))


def chunked(space: Space, dim: ShardedDim, axes: Sequence[int]) -> ShardedDim:
    for axis in axes:
        dim = space.finer[dim, axis][0]
    return dim


def hops(space: Space, here: State) -> Iterator[list[Edge]]:
    """All hops from a state, as the search knows them but without leaving any out."""
    rest = here.to_reduce, here.to_make_partial, here.to_rescale
    for dims in arrangements(
        space, space.whole, axes_of(space.movable_axes(here) & ~here.to_reduce)
    ):
        yield reshard(space, here, space.state(dims, *rest))
    yield convert_partials(space, here)
    if here.partials_done and not here.to_reduce:
        yield reshard(space, here, space.goal)
    if here.to_reduce:
        yield from ([edge] for edge in join_pending(space, here))
        yield [all_reduce(space, here)]
        for dims in arrangements(space, here.dims, axes_of(here.to_reduce)):
            if dims != here.dims:
                yield [reduce_scatter(space, here, space.after_reduce_scatter(here, dims))]


def optimum(space: Space) -> tuple[float, dict[State, float]]:
    """Seconds of the cheapest of all plans, and from every state to the goal: no bound used."""
    starts = [space.start]
    if space.start is not space.goal:
        for axes in (
            mask_of(some)
            for n in range(1, 4)
            for some in combinations(axes_of(space.partial_at_both_ends), n)
        ):
            pending, becoming = space.start.to_reduce | axes, space.start.to_make_partial | axes
            starts.append(
                space.state(space.start.dims, pending, becoming, space.start.to_rescale & ~axes)
            )
    found: dict[State, list[tuple[State, float]]] = {}
    reached = dict.fromkeys(starts, 0.0)
    ticket = count()
    heap = [(0.0, next(ticket), start) for start in starts]
    while heap:
        seconds, _, here = heappop(heap)
        if here not in found:
            reached[here] = seconds
            found[here] = [
                (hop[-1].after, sum(e.seconds for e in hop)) for hop in hops(space, here) if hop
            ]
            for after, took in found[here]:
                heappush(heap, (seconds + took, next(ticket), after))
    ahead = dict.fromkeys(found, float("inf")) | {space.goal: 0.0}
    for _ in range(8):
        for here, ways in found.items():
            ahead[here] = min([ahead[here], *(took + ahead[after] for after, took in ways)])
    return reached[space.goal], ahead


CASES = [((4, 4), (8192, 8192)), ((2, 4), (64, 64)), ((2, 2, 2), (1024, 1024)), ((3, 2), (12, 7))]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(CASES))
def test_no_plan_is_cheaper(seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """The search returns the optimum over all states, and its floor is never above it."""
    rng = Random(seed)
    src, dst = random_pair(rng, *case)
    links = links_of(src.mesh, random_links(rng, len(case[0])))
    best, _ = optimum(Space(src, dst, links))
    found = cheapest_plans(src, dst, links)[0]
    assert found.floor <= best * (1 + 1e-9)
    proven = found.floor >= found.seconds * (1 - 1e-9)
    assert proven or len(case[0]) > 2, "on two axes the search always ends"
    assert not proven or found.seconds <= best * (1 + 1e-9), f"{src} {dst} {links} {found}"


@settings(max_examples=40)
# an axis that was reduced could become partial again
@example(217250, ((2, 2, 2), (1024, 1024)))
@given(st.integers(0, 2**32), st.sampled_from(CASES))
def test_bounds_never_overestimate(
    seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    rng = Random(seed)
    src, dst = random_pair(rng, *case)
    space = Space(src, dst, links_of(src.mesh, random_links(rng, len(case[0]))))
    bound = Bound(space)
    for state, seconds in optimum(space)[1].items():
        assert bound.seconds(state) <= seconds * (1 + 1e-9), (
            f"{src} {dst} {space.links} {state.dims} {state.to_reduce}"
        )


@pytest.mark.parametrize(
    ("axes", "ndim", "expected"), [(1, 1, 2), (2, 2, 11), (3, 2, 49), (3, 3, 106), (2, 0, 1)]
)
def test_all_layouts_of_few_axes_are_looked_at(axes: int, ndim: int, expected: int) -> None:
    spec = Spec(abstract_mesh((2,) * axes), (Replicate(),) * axes, (8,) * ndim)
    space = Space(spec, spec, links_of(spec.mesh))
    candidates = Candidates(space, space.start)
    found = candidates.inside(space.whole, space.multi_rank_axes)
    assert candidates.complete and len(found) == len(set(found)) == expected
    assert found[0] == space.whole
    assert not ndim or set(found) == set(arrangements(space, space.whole, range(axes)))


def test_a_layout_on_the_way_keeps_explicit_sizes_where_what_is_outside_of_them_is_the_same() -> (
    None
):
    mesh = abstract_mesh((2, 2))
    src = Spec(mesh, (Shard(0, sizes=(5, 3)), Shard(1)), (8, 8))
    dst = Spec(mesh, (Shard(0, sizes=(1, 7)), Shard(0)), (8, 8))
    space = Space(src, dst, links_of(mesh))
    found = Candidates(space, space.start).inside(space.whole, 3)
    # like torch.chunk, as in the source, as in the destination
    by_axis_0 = [(4, 4), (5, 3), (1, 7)]
    inside = [(2, 2, 2, 2), (3, 2, 2, 1), (1, 0, 4, 3)]
    assert {dims[0].sharding.sizes for dims in found} == {(8,), *by_axis_0, *inside}
    # by axis 1 alone, and by 1 and 0, in equal sizes
    assert len({dims[0] for dims in found}) == 9


def stepwise_seconds(src: Spec, dst: Spec, topology: Topology, order: list[int]) -> float:
    """One axis after the other, each by one collective."""
    seconds, here, links = 0.0, src, links_of(src.mesh, topology)
    for axis in order:
        placements = list(here.placements)
        placements[axis] = dst.placements[axis]
        after = here.with_(placements=placements)
        space = Space(here, after, links)
        seconds += sum(edge.seconds for edge in reshard(space, space.start, space.goal))
        here = after
    return seconds


@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([((2, 2, 2, 2), (64,) * 4), ((2, 4, 2), (512, 512, 512))]),
)
def test_no_worse_than_one_axis_after_the_other(
    seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """However early the search stops."""
    rng = Random(seed)
    topology = random_links(rng, len(case[0]))
    mesh = abstract_mesh(case[0])
    options = [Replicate(), *map(Shard, range(len(case[1])))]
    src, dst = (Spec(mesh, rng.choices(options, k=len(case[0])), case[1]) for _ in range(2))
    found = plan(src, dst, topology=topology)
    for order in (range(len(case[0])), reversed(range(len(case[0])))):
        steps = stepwise_seconds(src, dst, topology, list(order))
        assert found.seconds <= steps * (1 + 1e-9), f"{src} {dst} {topology}\n{found}"


def layouts(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> list[Spec]:
    """All placements by R, P and S of every dim, in every order of axes."""
    mesh = abstract_mesh(mesh_shape)
    options: list[Placement] = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    specs = []
    for placements in product(options, repeat=len(mesh_shape)):
        axes_of: dict[int, list[int]] = {}
        for axis, placement in enumerate(placements):
            if isinstance(placement, Shard):
                axes_of.setdefault(placement.dim, []).append(axis)
        for orders in product(*(permutations(axes) for axes in axes_of.values())):
            order = tuple(zip(axes_of, orders, strict=True))
            specs.append(Spec(mesh, placements, shape, None, torch.float64, order))
    return specs


SLOW, FAST = Link(25e-6, 18e9), Link(12e-6, 180e9)


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "links", "pairs"),
    [
        ((4,), (512, 1024), None, 12),
        ((2, 2), (8, 512, 1024), None, 756),
        ((2, 2), (64, 64), (SLOW, FAST), 306),
        ((2, 4), (8192, 8192), (FAST, SLOW), 306),
        ((3, 2), (5, 7), None, 306),
        ((3, 2), (3, 1000, 1000), (FAST, SLOW), 100),
        ((2, 2, 2), (1024, 1024), None, 5),
        ((2, 2, 2), (64, 64), (SLOW, FAST, FAST), 5),
    ],
)
def test_two_redistributions_never_beat_one(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], links: tuple[Link, ...] | None, pairs: int
) -> None:
    """Through any layout that is partial only over axes over which an end is.

    Plans without reductions run none.
    """
    specs = layouts(mesh_shape, shape)
    ordered = list(permutations(specs, 2))
    assert_direct(Random(14).sample(ordered, min(pairs, len(ordered))), specs, links)


def assert_direct(
    pairs: Iterable[tuple[Spec, Spec]], specs: Sequence[Spec], links: tuple[Link, ...] | None
) -> None:
    """One plan takes no longer than two through any of these specs."""
    topology = None if links is None else Topology(links)

    @cache
    def seconds(src: Spec, dst: Spec) -> float:
        return plan(src, dst, topology=topology).seconds

    for src, dst in pairs:
        ends = {*src.partials, *dst.partials}
        for between in specs:
            if ends.issuperset(between.partials):
                twice = seconds(src, between) + seconds(between, dst)
                assert seconds(src, dst) <= twice * (1 + 1e-9), f"{src} -> {between} -> {dst}"


def test_a_long_search_on_three_axes_ends_by_itself() -> None:
    """After 500 prices the best known way is slower than two redistributions."""
    specs, links = layouts((2, 2, 2), (8, 512, 1024)), (SLOW, Link(20e-6, 60e9), FAST)
    start, goal = (Shard(1), Shard(0), Shard(1)), (Shard(0), Partial(), Replicate())
    src, dst = (
        next(spec for spec in specs if spec.placements == placements)
        for placements in (start, goal)
    )
    direct = plan(src, dst, topology=Topology(links))
    assert direct.floor >= direct.seconds * (1 - 1e-9)
    assert_direct([(src, dst)], specs, links)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of edges that searches price from now on."""
    kinds: list[str] = []

    def counted(space: Space, before: State, after: State) -> list[Edge]:
        kinds.append("reshard")
        return reshard(space, before, after)

    monkeypatch.setattr(shortest_plan, "reshard", counted)
    return kinds


@pytest.mark.parametrize(("outer", "most"), [(FAST, 1_000), (SLOW, 6_000)])
def test_hops_that_lead_nowhere_are_not_priced(priced: list[str], outer: Link, most: int) -> None:
    """A hop starts no sooner than the axes that it gathers, and mostly another one follows."""
    rng, mesh = Random(1), abstract_mesh((4, 8, 8))
    options: list[Placement] = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
    specs = [Spec(mesh, rng.choices(options, k=3), (257, 257, 257)) for _ in range(30)]
    links = links_of(mesh, Topology((outer, FAST, FAST)))
    for src, dst in pairwise(specs):
        cheapest_plans(src, dst, links)
    assert len(priced) < most, len(priced)


def test_a_search_ends_after_so_many_prices(priced: list[str]) -> None:
    """Also where it proves nothing: the 16 layouts settled one axis after the other are added."""
    mesh = abstract_mesh((3, 5, 6, 2))
    src = Spec(mesh, (Shard(0), Partial("max"), Shard(1), Shard(0)), (8192, 8192))
    dst = Spec(mesh, (Partial("max"), Partial("max"), Replicate(), Shard(0)), (8192, 8192))
    found = cheapest_plans(
        src, dst, links_of(mesh, Topology((Link(12e-6, 18e9), FAST, FAST, FAST)))
    )[0]
    assert found.floor < found.seconds
    assert MOST_PRICED / 2 < len(priced) <= MOST_PRICED + 16


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Partial(), Replicate()),
        (Partial(), Shard(0)),
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Shard(0), Shard(1)),
    ],
)
def test_one_hop_that_nothing_beats_is_taken_without_a_search(
    monkeypatch: pytest.MonkeyPatch, src: Placement, dst: Placement
) -> None:
    spec = Spec(abstract_mesh((64,)), (src,), (128, 64))
    links = links_of(spec.mesh)
    searched = cheapest_plans(spec, spec.with_(placements=(dst,)), links, wanted=2)[0]
    monkeypatch.delattr(Candidates, "inside")  # what is a hop away
    (direct,) = cheapest_plans(spec, spec.with_(placements=(dst,)), links)
    assert steps(direct) == steps(searched)


def steps(found: Plan) -> list[tuple[object, ...]]:
    """What a plan does: its steps are equal where they are the same object."""
    return [tuple(getattr(step, each.name) for each in fields(step)) for step in found.steps]


@pytest.mark.parametrize("seed", range(40))
def test_one_hop_is_taken_only_where_a_search_takes_it(seed: int) -> None:
    rng = Random(seed)
    mesh_shape, shape = rng.choice(
        [((4,), (8, 12)), ((3,), (5, 7)), ((2, 4), (16, 6)), ((2, 2), (4096, 1024))]
    )
    src, dst = random_pair(rng, mesh_shape, shape)
    links = links_of(src.mesh, random_links(rng, len(mesh_shape)))
    one, several = cheapest_plans(src, dst, links)[0], cheapest_plans(src, dst, links, wanted=3)[0]
    assert (steps(one), one.seconds) == (steps(several), several.seconds)


def test_what_was_rejected_is_slower_and_different() -> None:
    mesh = abstract_mesh((2, 2))
    src, dst = (
        Spec(mesh, (Shard(0), Shard(0)), (64, 64)),
        Spec(mesh, (Replicate(), Shard(1)), (64, 64)),
    )
    found = alternatives(src, dst, 3)
    assert len(found) == 3
    assert len({str(p) for p in found}) == 3
    assert found[0].floor <= found[0].seconds <= found[1].seconds


def test_a_slice_before_the_values_become_partial_saves_the_gather() -> None:
    """Replicated axes that become partial need only a part each.

    So nothing is gathered that they would zero.
    """
    mesh = abstract_mesh((4, 4))
    src, dst = (
        Spec(mesh, (Shard(1), Replicate()), (1024, 1024)),
        Spec(mesh, (Replicate(), Partial()), (1024, 1024)),
    )
    assert [step.name for step in plan(src, dst).steps] == ["Slice", "AllGather", "MakePartial"]
