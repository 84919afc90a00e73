"""Covers: redistribute/search/{shortest_plan,bounds}.py: plans against a brute-force optimum, and against detours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import combinations, count, pairwise, permutations, product
from random import Random

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from shoal_dtensor import Partial, Replicate, Shard, Spec
from shoal_dtensor.layout.placements import Placement
from shoal_dtensor.redistribute.plan import alternatives, links_of, plan
from shoal_dtensor.redistribute.search.bounds import Bounds
from shoal_dtensor.redistribute.search.costs import Costs, Reshard, State
from shoal_dtensor.redistribute.search.edges import edges_between
from shoal_dtensor.redistribute.search.shortest_plan import routes
from shoal_dtensor.redistribute.search.space import Space, spaces
from shoal_dtensor.redistribute.search.states import States, arrangements
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
    return Topology(tuple(Link(rng.choice((1e-6, 1e-5, 1e-4)), rng.choice((1e9, 1e10, 4e11))) for _ in range(axes)))


def random_pair(rng: Random, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> tuple[Spec, Spec]:
    mesh = abstract_mesh(mesh_shape)
    options: list[Placement] = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    src, dst = (Spec(mesh, rng.choices(options, k=len(mesh_shape)), shape) for _ in range(2))
    return src, dst


def optimum(search: SearchGraph) -> tuple[float, dict[State, float], dict[State, float]]:
    """Seconds of the cheapest of all plans; from the start to every state and from there to the goal: no bound used."""
    edges: dict[State, list[tuple[State, float]]] = {}
    reached: dict[State, float] = {}
    heap: list[tuple[float, int, State]] = [(0.0, 0, search.start)]
    ticket = count(1)
    while heap:
        seconds, _, state = heappop(heap)
        if state not in edges:
            reached[state] = seconds
            edges[state] = search.edges(state)
            for after, took in edges[state]:
                heappush(heap, (seconds + took, next(ticket), after))
    ahead = dict.fromkeys(edges, float("inf")) | {search.goal: 0.0}
    for _ in range(8):
        for state, ways in edges.items():
            ahead[state] = min([ahead[state], *(took + ahead[after] for after, took in ways)])
    return reached[search.goal], reached, ahead


class SearchGraph:
    """All states and edges of one space, as the search knows them but without leaving any out."""

    def __init__(self, space: Space) -> None:
        self.space, self.costs, self.states = space, Costs(space), States(space)
        self.start = self.costs.state(space.start, space.pending, not space.conversions)
        self.goal = self.costs.state(space.goal, (), True)

    def edges(self, here: State) -> list[tuple[State, float]]:
        costs, busy = self.costs, (*here.pending, *(self.space.becoming if here.converted else ()))
        free = tuple(a for a in self.space.moving if a not in busy)
        others = [costs.state(dims, here.pending, here.converted) for dims in arrangements(free, len(here.dims))]
        others += [self.goal] if here.converted and not here.pending else []
        found = [(after, costs.reshard(here, after).seconds) for after in others if after is not here]
        after = None if here.converted else costs.conversion(here)
        if after is not None:
            found.append((after, costs.convert(after)))
        if not here.pending:
            return found
        found += [(after, costs.join(after)) for after in costs.joined(here)]
        found.append((costs.state(here.dims, (), here.converted), costs.all_reduce(here)[0]))
        for n in range(1, len(here.pending) + 1):
            for axes in combinations(here.pending, n):
                left = tuple(a for a in here.pending if a not in axes)
                for inner in arrangements(axes, len(here.dims)):
                    if sum(map(len, inner)) == len(axes):
                        dims = tuple(old + new for old, new in zip(here.dims, inner, strict=True))
                        after = costs.state(dims, left, here.converted)
                        found.append((after, costs.reduce_scatter(here, after)[0]))
        return found


CASES = [((4, 4), (8192, 8192)), ((2, 4), (64, 64)), ((2, 2, 2), (1024, 1024)), ((3, 2), (12, 7))]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(CASES))
def test_no_plan_is_cheaper(seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """The search returns the optimum over all states, and its floor is never above it."""
    rng = Random(seed)
    src, dst = random_pair(rng, *case)
    links = links_of(src.mesh, random_links(rng, len(case[0])))
    best = min(optimum(SearchGraph(space))[0] for space in spaces(src, dst, links))
    route = routes(src, dst, links)[0]
    assert route.floor <= best * (1 + 1e-9)
    proven = route.floor >= route.seconds * (1 - 1e-9)
    assert proven or len(case[0]) > 2, "on two axes the search always ends"
    assert not proven or route.seconds <= best * (1 + 1e-9), f"{src} {dst} {links} {route}"


@settings(max_examples=40)
@example(217250, ((2, 2, 2), (1024, 1024)))  # an axis that was reduced could become partial again
@given(st.integers(0, 2**32), st.sampled_from(CASES))
def test_bounds_never_overestimate(seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rng = Random(seed)
    src, dst = random_pair(rng, *case)
    for space in spaces(src, dst, links_of(src.mesh, random_links(rng, len(case[0])))):
        graph = SearchGraph(space)
        bounds = {flag: Bounds(graph.costs, flag) for flag in (not space.conversions, True)}
        _, reached, ahead = optimum(graph)
        for state, seconds in ahead.items():
            bounds[state.converted].ahead(state)
            assert state.least <= seconds * (1 + 1e-9), f"{src} {dst} {space.links} {state.dims} {state.pending}"
            if state.converted is graph.start.converted:
                bounds[state.converted].through(state)
                assert state.through <= (reached[state] + seconds) * (1 + 1e-9)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_edges_cost_what_the_search_took_them_for(seed: int) -> None:
    rng = Random(seed)
    mesh_shape = rng.choice([(4, 4), (2, 3, 2)])
    shape = tuple(rng.choice((4, 7, 12)) for _ in range(rng.randint(1, 3)))
    src, dst = random_pair(rng, mesh_shape, shape)
    costs = Costs(Space(src, dst, links_of(src.mesh, random_links(rng, len(mesh_shape)))))
    known = arrangements(tuple(range(len(mesh_shape))), len(shape))
    states = [costs.state(dims, (), True) for dims in rng.choices(known, k=60)]
    for before, after in pairwise(states):
        edges = edges_between(costs, before, after)
        assert sum(e.seconds for e in edges) == pytest.approx(costs.reshard(before, after).seconds, rel=1e-12)
        assert not edges or edges[-1].dims == after.dims


def test_arrangements_are_all_there_and_differ() -> None:
    assert arrangements((), 2) == (((), ()),)
    assert arrangements((1,), 0) == ((),)
    assert set(arrangements((0, 1), 1)) == {((),), ((0,),), ((3,),), ((0, 3),), ((3, 0),)}
    for axes, ndim, expected in ((2, 2, 11), (3, 2, 49), (3, 3, 106)):
        found = arrangements(tuple(range(axes)), ndim)
        assert len(found) == len(set(found)) == expected


def stepwise_seconds(src: Spec, dst: Spec, topology: Topology, order: list[int]) -> float:
    """One axis after the other, each by one collective."""
    seconds, here, links = 0.0, src, links_of(src.mesh, topology)
    for axis in order:
        placements = list(here.placements)
        placements[axis] = dst.placements[axis]
        after = here.with_(placements=placements)
        costs = Costs(Space(here, after, links))
        start, goal = costs.state(costs.space.start, (), True), costs.state(costs.space.goal, (), True)
        seconds += costs.reshard(start, goal).seconds
        here = after
    return seconds


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([((2, 2, 2, 2), (64,) * 4), ((2, 4, 2), (512, 512, 512))]))
def test_no_worse_than_one_axis_after_the_other(seed: int, case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
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
    """Through any layout that is partial only over axes over which an end is: plans without reductions run none."""
    specs = layouts(mesh_shape, shape)
    ordered = list(permutations(specs, 2))
    assert_direct(Random(14).sample(ordered, min(pairs, len(ordered))), specs, links)


def assert_direct(pairs: Iterable[tuple[Spec, Spec]], specs: Sequence[Spec], links: tuple[Link, ...] | None) -> None:
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
    src, dst = (next(spec for spec in specs if spec.placements == placements) for placements in (start, goal))
    direct = plan(src, dst, topology=Topology(links))
    assert direct.floor >= direct.seconds * (1 - 1e-9)
    assert_direct([(src, dst)], specs, links)


@pytest.mark.parametrize(("outer", "most"), [(FAST, 1_000), (SLOW, 6_000)])
def test_hops_that_lead_nowhere_are_not_priced(monkeypatch: pytest.MonkeyPatch, outer: Link, most: int) -> None:
    """A hop starts no sooner than the axes that it gathers, and mostly another one follows.

    So 639 prices do for these pairs instead of 10,902, and 4,056 instead of 16,546 where the outer axis is slow.
    """
    prices, rng, mesh = 0, Random(1), abstract_mesh((4, 8, 8))
    options: list[Placement] = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]
    specs = [Spec(mesh, rng.choices(options, k=3), (257, 257, 257)) for _ in range(30)]
    original = Costs.reshard

    def counted(self: Costs, before: State, after: State) -> Reshard:
        nonlocal prices
        prices += 1
        return original(self, before, after)

    monkeypatch.setattr(Costs, "reshard", counted)
    links = links_of(mesh, Topology((outer, FAST, FAST)))
    for src, dst in pairwise(specs):
        routes(src, dst, links)
    assert prices < most, prices


@pytest.mark.parametrize(("src", "dst"), [(Partial(), Replicate()), (Shard(0), Replicate()), (Replicate(), Shard(1))])
def test_one_hop_that_nothing_beats_is_taken_without_a_search(
    monkeypatch: pytest.MonkeyPatch, src: Placement, dst: Placement
) -> None:
    spec = Spec(abstract_mesh((64,)), (src,), (128, 64))
    links = links_of(spec.mesh)
    searched = routes(spec, spec.with_(placements=(dst,)), links, wanted=2)[0]
    monkeypatch.delattr(States, "without")  # what is a hop away
    monkeypatch.delattr(States, "scattered")
    (direct,) = routes(spec, spec.with_(placements=(dst,)), links)
    assert direct == searched


@pytest.mark.parametrize("seed", range(40))
def test_one_hop_is_taken_only_where_a_search_takes_it(seed: int) -> None:
    rng = Random(seed)
    mesh_shape, shape = rng.choice([((4,), (8, 12)), ((3,), (5, 7)), ((2, 4), (16, 6)), ((2, 2), (4096, 1024))])
    src, dst = random_pair(rng, mesh_shape, shape)
    links = links_of(src.mesh, random_links(rng, len(mesh_shape)))
    one, several = routes(src, dst, links)[0], routes(src, dst, links, wanted=3)[0]
    assert (one.edges, one.seconds) == (several.edges, several.seconds)


def test_what_was_rejected_is_slower_and_different() -> None:
    mesh = abstract_mesh((2, 2))
    src, dst = Spec(mesh, (Shard(0), Shard(0)), (64, 64)), Spec(mesh, (Replicate(), Shard(1)), (64, 64))
    found = alternatives(src, dst, 3)
    assert len(found) == 3
    assert len({str(p) for p in found}) == 3
    assert found[0].floor <= found[0].seconds <= found[1].seconds


def test_a_slice_before_the_values_become_partial_saves_the_gather() -> None:
    """Replicated axes that become partial need only a part each, so nothing is gathered that they would zero."""
    mesh = abstract_mesh((4, 4))
    src, dst = Spec(mesh, (Shard(1), Replicate()), (1024, 1024)), Spec(mesh, (Replicate(), Partial()), (1024, 1024))
    assert [step.name for step in plan(src, dst).steps] == ["Slice", "AllGather", "MakePartial"]
