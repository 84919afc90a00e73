"""Covers: rules/ of views, indices and data movement through DTensor, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from torch import Tensor

from shoal_dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    communication,
    distribute_tensor,
    full_tensor,
)
from shoal_dtensor.errors import CommunicationForbiddenError, InPlaceError, NoRuleError
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks, rank_pool

R, S0, S1 = Replicate(), Shard(0), Shard(1)
RAGGED = Shard(0, sizes=(1, 4, 0, 3))
ON_4: list[list[Placement]] = [[R], [S0], [S1], [RAGGED], [Shard(0, multiple_of=4)]]
ON_2_2: list[list[Placement]] = [list(pair) for pair in product([R, S0, S1], repeat=2)]


@cache
def mesh_of(axes: int) -> DeviceMesh:
    """Four ranks on one axis or two; every call returns the same mesh."""
    return init_device_mesh("cpu", (4,) if axes == 1 else (2, 2))


def sample(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def put(whole: Tensor, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh_of(len(placements)), placements, src_data_rank=None)


def full(x: Any) -> Tensor:
    whole: Tensor = full_tensor(x)
    return whole


# --- writes through views: right, or refused ------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "slice": lambda w: w[:2].zero_(),
    "step": lambda w: w[1::3].mul_(3),
    "row": lambda w: w[0].fill_(5),
    "last row": lambda w: w[-1].copy_(w[2]),
    "column": lambda w: w[:, 1].add_(1),
    "chunk": lambda w: w.chunk(2)[0].mul_(3),
    "split": lambda w: w.split([1, 5], 1)[1].neg_(),
    "unbind": lambda w: w.unbind(0)[5].mul_(2),
    "narrow": lambda w: w.narrow(1, 2, 3).sqrt_(),
    "transposed": lambda w: w.t()[1:3].mul_(2),
    "unsqueezed": lambda w: w.unsqueeze(1)[3:].mul_(2),
    "permuted": lambda w: w.permute(1, 0)[2].zero_(),
    "of a slice": lambda w: w[2:7][1:3][:, :4].zero_(),
    "of a row": lambda w: w[2][1:3].mul_(2),
    "expanded": lambda w: w.unsqueeze(0).expand(1, 8, 6).mul_(2),
    "merged": lambda w: w.view(48)[10:20].zero_(),
    "split view": lambda w: w.view(2, 4, 6)[1].zero_(),
    "regrouped": lambda w: w.view(2, 24).mul_(2),
    "diagonal": lambda w: w.diagonal().zero_(),
    "upper diagonal": lambda w: w.diagonal(1).fill_(7),
    "lower diagonal": lambda w: w.diagonal(-3, 1, 0)[1:].mul_(7),
    "element": lambda w: w[2, 3].mul_(2),
    "fill_diagonal_": lambda w: w.fill_diagonal_(7),
    "squeezed": lambda w: w[3:4].squeeze(0).mul_(2),
}
# Layouts in which a view must be gathered to be taken, so that no write would reach the base.
SHARDED = {"S(0)", "S(1)", "S(0,[1, 4, 0, 3])", "S(0,x4)"}
SHARDED |= {
    "R S(0)",
    "R S(1)",
    "S(0) R",
    "S(0) S(0)",
    "S(0) S(1)",
    "S(1) R",
    "S(1) S(0)",
    "S(1) S(1)",
}
REFUSED = {
    "merged": {"S(1)", "R S(1)", "S(0) S(1)", "S(1) R", "S(1) S(0)", "S(1) S(1)"},
    "split view": {"S(0)", "S(0,[1, 4, 0, 3])", "S(0) S(0)"},  # shards of no multiple of 4 rows
    "regrouped": {"S(0)", "S(0,[1, 4, 0, 3])", "S(0) S(0)"},
    "element": SHARDED,
    "fill_diagonal_": SHARDED,
}


@pytest.mark.parametrize("name", WRITES)
@on_ranks(4)
def test_a_write_through_a_view_reaches_the_base_or_is_refused(name: str) -> None:
    write, refused = WRITES[name], set()
    for placements in (*ON_4, *ON_2_2):
        whole = sample(8, 6).abs()
        expected = whole.clone()
        write(expected)
        w = put(whole, placements)
        try:
            write(w)
        except InPlaceError:
            refused.add(" ".join(map(str, placements)))
            expected = whole
        assert torch.equal(full(w), expected), placements
        assert w.placements == put(whole, placements).placements
    assert refused == REFUSED.get(name, set())


@pytest.mark.parametrize(
    "name", sorted(set(WRITES) - {"chunk", "split", "unbind", "last row", "narrow"})
)
@on_ranks(4)
def test_gradients_flow_through_writes(name: str) -> None:
    for placements in (*ON_4, *ON_2_2):
        grads: list[Any] = []
        for make in (lambda t: t, lambda t: put(t, placements)):  # noqa: B023  called at once
            x = make(sample(8, 6).abs()).requires_grad_()
            y = x * 2
            try:
                WRITES[name](y)
            except InPlaceError:
                break
            (y * make(sample(8, 6, seed=2))).sum().backward()
            grads.append(x.grad)
        if len(grads) == 2:
            assert grads[1]._spec.dim_shardings == put(sample(8, 6), placements)._spec.dim_shardings
            torch.testing.assert_close(full(grads[1]), grads[0])


PICKS: list[Callable[[Any], Any]] = [
    lambda t: t.unbind(0)[3],
    lambda t: t.unbind(1)[0],
    lambda t: t.split(3)[1],
    lambda t: t.chunk(2)[0],
]


@on_ranks(4)
def test_outputs_without_a_gradient_count_as_zero() -> None:
    for placements in (*ON_4, *ON_2_2):
        for pick in PICKS:
            x: Any = put(sample(8, 6), placements).requires_grad_()
            pick(x).sum().backward()
            whole: Any = sample(8, 6).requires_grad_()
            pick(whole).sum().backward()
            assert torch.equal(full(x.grad), whole.grad)


# --- assignment with every kind of index ----------------------------------------------------------

Index = Callable[[Callable[[Tensor], Any]], tuple[Any, Any]]


def assign_by_two_tensors(p: Callable[[Any], Any]) -> tuple[Any, Any]:
    index = p(torch.tensor([7, 0, 3])), p(torch.tensor([1, -1, 2]))
    return index, p(sample(3))


def assign_by_a_grid(p: Callable[[Any], Any]) -> tuple[Any, Any]:
    index = p(torch.tensor([[7], [0]])), p(torch.tensor([1, 2]))
    return index, p(sample(2, 2))


def assign_by_a_mask(p: Callable[[Any], Any]) -> tuple[Any, Any]:
    mask = sample(8, 6) > 0
    return p(mask), p(sample(int(mask.sum())))


def assign_by_a_mask_of_rows(p: Callable[[Any], Any]) -> tuple[Any, Any]:
    mask = sample(8) > 0
    return p(mask), p(sample(int(mask.sum()), 6))


ASSIGNMENTS: dict[str, Index] = {
    "number": lambda p: (0, 1.0),
    "negative number": lambda p: (-2, p(sample(6))),
    "two numbers": lambda p: ((3, 4), 1.0),
    "slice": lambda p: (slice(1, 6, 2), p(sample(3, 6))),
    "slice, broadcast": lambda p: (slice(2, 6), p(sample(6))),
    "slices": lambda p: ((slice(3), slice(2, None)), p(sample(3, 4))),
    "number and slice": lambda p: ((slice(None), -1), p(sample(8))),
    "ellipsis": lambda p: ((..., 2), 3.0),
    "none": lambda p: ((None, slice(2)), p(sample(1, 2, 6))),
    "everything": lambda p: (..., p(sample(8, 6))),
    "tensor": lambda p: (p(torch.tensor([7, 0, 3])), p(sample(3, 6))),
    "tensor of columns": lambda p: ((slice(None), p(torch.tensor([5, 0]))), p(sample(8, 2))),
    "two tensors": assign_by_two_tensors,
    "tensor grid": assign_by_a_grid,
    "number and tensor": lambda p: ((2, p(torch.tensor([1, -1, 2]))), 4.0),
    "slice and tensor": lambda p: ((slice(1, 7), p(torch.tensor([1, 5]))), 4.0),
    "list": lambda p: ([0, 2], 5.0),
    "mask": lambda p: (p(sample(8, 6) > 0), 1.0),
    "mask of rows": lambda p: (p(sample(8) > 0), p(sample(6))),
    "mask with values": assign_by_a_mask,
    "mask of rows with values": assign_by_a_mask_of_rows,
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
@on_ranks(4)
def test_assignment_with_every_kind_of_index(name: str) -> None:
    for placements in (*ON_4, *ON_2_2):
        whole = sample(8, 6, seed=3)
        w = put(whole, placements)
        replicated = [R] * len(placements)
        index, value = ASSIGNMENTS[name](lambda t: put(t, replicated))  # noqa: B023  called at once
        w[index] = value
        index, value = ASSIGNMENTS[name](lambda t: t)
        whole[index] = value
        assert torch.equal(full(w), whole), placements


@pytest.mark.parametrize("name", ASSIGNMENTS)
@on_ranks(4)
def test_reading_with_every_kind_of_index(name: str) -> None:
    for placements in (*ON_4, *ON_2_2):
        grads = []
        values = []
        for make, other in (
            (lambda t: t, lambda t: t),
            (
                lambda t: put(t, placements),  # noqa: B023  # called at once
                lambda t: put(t, [R] * len(placements)),  # noqa: B023  # called at once
            ),
        ):
            x = make(sample(8, 6, seed=3)).requires_grad_()
            found = x[ASSIGNMENTS[name](other)[0]]
            values.append(full(found))
            (found * found).sum().backward()
            grads.append(full(x.grad))
        assert torch.equal(values[0], values[1]), placements
        torch.testing.assert_close(grads[1], grads[0])


# --- what moves -----------------------------------------------------------------------------------

SILENT: dict[str, tuple[list[Placement], Callable[[Any, Any, Any], Any]]] = {
    "slices": ([S0], lambda w, row, index: w[2:7]),
    "steps": ([S0], lambda w, row, index: w[::3]),
    "rows": ([S0], lambda w, row, index: w[5]),
    "a row of two sharded dims": ([S0, S1], lambda w, row, index: w[5]),
    "chunks": ([S0], lambda w, row, index: w.chunk(3)),
    "unbind": ([S0], lambda w, row, index: w.unbind(0)),
    "heads": ([S1], lambda w, row, index: w.unflatten(1, (6, 1))),
    "merged": ([S0], lambda w, row, index: w.flatten()),
    "transposed": ([S0], lambda w, row, index: w.t().contiguous()),
    "rotated halves": ([S0], lambda w, row, index: torch.cat([-w[:, 3:], w[:, :3]], -1)),
    "pad": ([S0], lambda w, row, index: torch.nn.functional.pad(w, (1, 1, 2, 2))),
    "append": ([S0], lambda w, row, index: torch.cat([w, row])),
    "tril": ([S0, S1], lambda w, row, index: w.tril()),
    "lookup": ([S0], lambda w, row, index: w.index_select(0, index)),
}


@pytest.mark.parametrize("name", SILENT)
@on_ranks(4)
def test_these_need_no_communication(name: str) -> None:
    placements, run = SILENT[name]
    w = put(sample(8, 6), placements)
    row, index = (put(t, [R] * len(placements)) for t in (sample(1, 6), torch.tensor([1, 7])))
    with communication("forbid"), CommDebugMode() as comm:
        run(w, row, index)
    assert comm.get_total_counts() == 0


MOVING: dict[str, tuple[Callable[[Any], Any], int]] = {
    "cumsum": (lambda w: w.cumsum(0), 1),
    "cummax": (lambda w: w.cummax(0)[0], 2),
    "roll": (lambda w: w.roll(3, 0), 1),
    "flip": (lambda w: w.flip(0, 1), 1),
    "sort": (lambda w: w.sort(0)[0], 3),
    "topk": (lambda w: w.topk(2, 0)[0], 2),
    "argmax": (lambda w: w.argmax(0), 2),
    "argmax of all": (lambda w: w.argmax(), 2),
    "median": (lambda w: w.median(0)[0], 3),
    "repeat": (lambda w: w.repeat(2, 1), 1),
    "nonzero": (lambda w: (w > 0).nonzero(), 2),
    "masked_select": (lambda w: w.masked_select(w > 0), 3),
    "unique": (lambda w: w.round().unique(), 3),
}


@pytest.mark.parametrize("name", MOVING)
@on_ranks(4)
def test_a_sharded_algorithm_and_no_gather_of_the_tensor(name: str) -> None:
    run, most = MOVING[name]
    for placements in ([S0], [Shard(0, sizes=(10, 0, 30, 8))]):
        whole = sample(48, 5)
        w = put(whole, placements)
        refusal = pytest.raises(CommunicationForbiddenError, match="of its local function")
        with communication("forbid"), refusal as refused:
            run(w)
        assert "input 0" not in str(refused.value)  # no redistribution
        with CommDebugMode() as comm:
            result = run(w)
        assert 0 < comm.get_total_counts() <= most
        torch.testing.assert_close(full(result), run(whole))


# --- random programs ------------------------------------------------------------------------------

Step = tuple[str, tuple[Any, ...]]


def factorizations(n: int) -> st.SearchStrategy[list[int]]:
    return st.sampled_from([[a, b, n // (a * b)] for a in divisors(n) for b in divisors(n // a)])


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def steps(draw: st.DrawFn, shape: list[int]) -> Step:
    """An operator that fits a tensor of that shape."""
    ndim = len(shape)
    dim = draw(st.integers(0, ndim - 1))
    size = shape[dim]
    bounds = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    number = draw(st.integers(0, max(size - 1, 0)))
    choices: list[Step] = [
        ("slice", (dim, *bounds, draw(st.integers(1, 3)))),
        ("permute", (draw(st.permutations(range(ndim))),)),
        ("unsqueeze", (dim,)),
        ("squeeze", ()),
        ("flip", ((dim,),)),
        ("roll", (draw(st.integers(-3, 3)), dim)),
        ("cumsum", (dim,)),
        ("tril", (draw(st.integers(-2, 2)),)) if ndim > 1 else ("neg", ()),
        ("chunk", (draw(st.integers(1, 4)), dim)),
        ("cat_self", (dim,)),
        ("stack_self", (dim,)),
        ("pad", (0, 0) * (ndim - 1 - dim) + (draw(st.integers(0, 2)), draw(st.integers(0, 2)))),
        ("sum", (dim,)) if ndim > 1 else ("neg", ()),
        ("mul", ()),
        ("repeat", tuple(draw(st.lists(st.integers(1, 2), min_size=ndim, max_size=ndim)))),
    ]
    if 0 not in shape:
        choices.append(("reshape", (draw(factorizations(torch.Size(shape).numel())),)))
        choices.append(("flatten", (min(dim, ndim - 1), ndim - 1)))
        choices.append(("index_select", (dim, [number, 0, number])))
        if ndim > 1:
            choices.append(("select", (dim, number)))
            choices.append(("unbind", (dim, number)))
    return draw(st.sampled_from(choices))


def apply(step: Step, x: Any) -> Any:
    """Run one step; the special names make other tensors out of x itself."""
    name, args = step
    if name == "slice":
        dim, start, stop, by = args
        return x[(slice(None),) * dim + (slice(start, stop, by),)]
    if name in ("chunk", "unbind"):
        return (
            getattr(x, name)(*args[:-1], args[-1])[-1]
            if name == "chunk"
            else x.unbind(args[0])[args[1]]
        )
    if name == "cat_self":
        return torch.cat([x, -x], args[0])
    if name == "stack_self":
        return torch.stack([x, x * 2], args[0])
    if name == "pad":
        return torch.nn.functional.pad(x, args)
    if name == "index_select":
        index = torch.tensor(args[1])
        return x.index_select(
            args[0], put(index, [R] * len(x.placements)) if isinstance(x, DTensor) else index
        )
    if name == "mul":
        return x * x
    return getattr(x, name)(*args)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int]], list[Step]]:
    """A shape, a placement for each mesh axis, and steps that fit.

    The placements are sharded, ragged, replicated or partial.
    """
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    axes = draw(st.sampled_from([1, 2]))
    cuts = [
        (draw(st.sampled_from("SSGRP")), draw(st.integers(0, len(shape) - 1))) for _ in range(axes)
    ]
    x = torch.zeros(shape)
    program: list[Step] = []
    for _ in range(draw(st.integers(1, 6))):
        step = draw(steps(list(x.shape)))
        x = apply(step, x)
        program.append(step)
        if not 0 < x.ndim <= 5 or x.numel() > 2000:
            break
    return shape, cuts, program


def placed(whole: Tensor, cuts: list[tuple[str, int]]) -> DTensor:
    """`whole`, placed as a program says.

    Ragged shards are the first axis's alone, partial ones get unequal shares.
    """
    placements: list[Placement] = [
        Shard(dim) if kind in "SG" else Replicate() for kind, dim in cuts
    ]
    kind, dim = cuts[0]
    if kind == "G":
        n, ways = whole.shape[dim], 4 if len(cuts) == 1 else 2
        placements[0] = Shard(dim, sizes=(n // 3, *[0] * (ways - 2), n - n // 3))
    x = put(whole, placements)
    partial = [axis for axis, (kind, _) in enumerate(cuts) if kind == "P"]
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    local = x.to_local()
    for axis in partial:
        ways, place = x.device_mesh.size(axis), coordinate[axis]
        local = local * 2 if place == 0 else -local / (ways - 1)
        placements[axis] = Partial()
    return DTensor.from_local(local, x.device_mesh, placements, shape=whole.shape) if partial else x


def run_program(shape: list[int], cuts: list[tuple[str, int]], program: list[Step]) -> None:
    """On every rank: the program on one device and on DTensors, forward and backward."""
    values: list[Tensor] = []
    grads: list[Any] = []
    for make in (lambda t: t, lambda t: placed(t, cuts)):
        x = make(sample(*shape))
        partial = isinstance(x, DTensor) and any(p.is_partial() for p in x.placements)
        x = x if partial else x.requires_grad_()
        y = x
        for step in program:
            y = apply(step, y)
        values.append(full(y).detach())
        if not partial:
            (y * y).sum().backward()
            grads.append(x.grad)
    torch.testing.assert_close(values[1], values[0])
    if len(grads) == 2:
        torch.testing.assert_close(full(grads[1]), grads[0])
        assert grads[1]._spec.dim_shardings == placed(sample(*shape), cuts)._spec.dim_shardings


# No shrinking: a failing program takes the pool down, and programs are short as they are.
@settings(max_examples=100, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(programs())
def test_random_programs_equal_one_device(
    program: tuple[list[int], list[tuple[str, int]], list[Step]],
) -> None:
    rank_pool(4).run(run_program, *program, timeout=30)


@on_ranks(4)
def test_conjugates_are_never_lost() -> None:
    """Torch marks tensors as conjugated and conjugates later.

    Below a tensor subclass it would forget to conjugate.
    """
    whole, other = (
        torch.view_as_complex(sample(8, 6, 2)),
        torch.view_as_complex(sample(8, 6, 2, seed=2)),
    )
    number = torch.tensor(2.0 - 3.0j, dtype=torch.complex128).conj()
    for placements in (*ON_4, *ON_2_2):
        mesh = mesh_of(len(placements))
        x, y = put(whole, placements), put(other, placements)
        assert torch.equal(full(x.conj()), whole.conj())
        torch.testing.assert_close(full(y * x.conj()), other * whole.conj())
        torch.testing.assert_close(full(x * number), whole * number)
        torch.testing.assert_close(full(x.mH @ y), whole.mH @ other)
        assert torch.equal(full(put(whole.conj(), placements) + y), whole.conj() + other)
        given = DTensor.from_local(x.to_local().conj(), mesh, placements, shape=whole.shape)
        assert torch.equal(full(given + y), whole.conj() + other)
        assert torch.equal(full(x.conj().imag + y.imag), whole.conj().imag + other.imag)
        with pytest.raises(InPlaceError, match="would not reach the base"):
            x.conj().mul_(2)
        a: Any = put(whole, placements).requires_grad_()
        b: Any = whole.clone().requires_grad_()
        (a * y).abs().sum().backward()
        (b * other).abs().sum().backward()
        torch.testing.assert_close(full(a.grad), b.grad)


# --- what a transformer does ----------------------------------------------------------------------


def rotated(x: Any, cos: Any, sin: Any) -> Any:
    """Rotary embedding by halves, `(batch, heads, length, size)`."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rotated_pairs(x: Any, angles: Any) -> Any:
    """Rotary embedding by complex pairs."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2)


def attention(x: Any, w: Any, cos: Any, sin: Any, angles: Any, mask: Any) -> Any:
    """Causal grouped-query attention from a fused projection that is sharded by heads.

    The projection is `(3 * heads * size, width)`.
    """
    b, s, width = x.shape
    q, k, v = torch.einsum("bsd,khed->kbshe", x, w.view(3, 4, 4, width)).unbind(0)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    q, k = rotated(q, cos, sin), rotated_pairs(k, angles)
    k, v = (t[:, :, None].expand(b, 4, 2, s, 4).reshape(b, 8, s, 4)[:, ::2] for t in (k, v))
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(mask, float("-inf")).softmax(-1)
    return (scores @ v).transpose(1, 2).contiguous().view(b, s, 16)


@on_ranks(4)
def test_attention_by_batch_and_heads_needs_no_communication() -> None:
    x, w = sample(2, 6, 8), sample(48, 8)
    cos, sin, angles = (
        sample(6, 4),
        sample(6, 4),
        torch.polar(torch.ones(6, 2, dtype=torch.float64), sample(6, 2)),
    )
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    expected = attention(leaves[0], leaves[1], cos, sin, angles, mask)
    expected.square().sum().backward()
    for placements in ([R], [S0], [R, R], [S0, R]):
        whole = [R] * len(placements)
        dx, dw = put(x, placements).requires_grad_(), put(w, whole).requires_grad_()
        rest = [put(t, whole) for t in (cos, sin, angles, mask)]
        with communication("forbid"), CommDebugMode() as comm:
            made = attention(dx, dw, *rest)
        assert comm.get_total_counts() == 0
        torch.testing.assert_close(full(made), expected.detach())
        made.square().sum().backward()
        for leaf, one in zip((dx, dw), leaves, strict=True):
            torch.testing.assert_close(full(leaf.grad), one.grad)


@on_ranks(4)
def test_heads_stay_sharded_from_projection_to_projection() -> None:
    """Column-parallel q, k and v, each sharded by heads, and a row-parallel output.

    There is one reduction at the end.
    """
    x, weights = sample(2, 6, 8), [sample(16, 8, seed=i) for i in range(3)]
    out, cos, sin = sample(8, 16, seed=4), sample(6, 4), sample(6, 4, seed=2)

    def block(x: Any, weights: Any, out: Any, cos: Any, sin: Any) -> Any:
        q, k, v = (
            torch.nn.functional.linear(x, w).view(2, 6, 4, 4).transpose(1, 2) for w in weights
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.nn.functional.linear(made.transpose(1, 2).flatten(2), out)

    expected = block(x, weights, out, cos, sin)
    for batch, heads in (([], [S0]), ([S0], [S0])):
        other = [R] * len(batch)
        columns = [put(w, [*other, *heads]) for w in weights]
        rest = [put(t, [*other, R]) for t in (cos, sin)]
        rows, dx = put(out, [*other, S1]), put(x, [*batch, R])
        with communication("forbid"), CommDebugMode() as comm:
            made = block(dx, columns, rows, *rest)
        assert comm.get_total_counts() == 0
        assert [p for p in made.placements if p.is_partial()] == [made.placements[-1]]
        torch.testing.assert_close(full(made), expected)


@on_ranks(4)
def test_local_parts_that_are_not_contiguous() -> None:
    whole = sample(6, 16)
    mesh = mesh_of(1)
    rank = mesh.get_rank()
    part = whole.t()[4 * rank : 4 * rank + 4]  # (4, 6), strides (1, 16)
    x = DTensor.from_local(part, mesh, [S0])
    assert torch.equal(full(x.reshape(-1)), whole.t().reshape(-1))
    assert torch.equal(full(x.flatten(0, 1)), whole.t().flatten())
    assert torch.equal(full(x.reshape(4, 4, 6)), whole.t().reshape(4, 4, 6))
    assert torch.equal(full(x.t()[1:3]), whole[1:3])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@on_ranks(4)
def test_strides_in_views_of_parts_are_refused_where_no_rank_has_the_base(mode: Any) -> None:
    """They count elements of the base; a rank does not have all before a shard of the view."""
    whole = sample(4, 6)
    calls: dict[str, Callable[[Any], Any]] = {
        "its own": lambda x: x.as_strided((2,), (1,)),
        "absolute": lambda x: x.as_strided((2, 2), (3, 1), 4),
        "scattered": lambda x: x.as_strided_scatter(x.flatten()[:2], (2,), (1,), 4),
        "of an operator": lambda x: x.fill_diagonal_(2.0),
    }
    views: tuple[Callable[[Any], Any], ...] = (
        lambda x: x[1:],
        lambda x: x[:, 1:],
        lambda x: x.expand(2, 4, 6)[:, 0],
    )
    for placements, view, name in product(([S0], [S1], [R]), views, calls):
        with mode():
            x = put(whole, placements)
            if placements == [R] and name == "absolute":
                assert torch.equal(full(calls[name](view(x))), calls[name](view(whole)))
            elif placements != [R]:
                with pytest.raises(
                    NoRuleError,
                    match=r"of a view of a part, .* but a rank has only a part of that memory",
                ):
                    calls[name](view(x))
    turned = put(whole, [S0]).t()
    assert torch.equal(full(turned.as_strided((3,), (2,), 1)), whole.t().as_strided((3,), (2,), 1))


# Calls of an operator that returns views of a tensor `x` of 4 x 6; each is also written to.
VIEWS_IN_INFERENCE: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(24),
    "t": lambda x: x.t(),
    "select": lambda x: x[1],
    "slice": lambda x: x[1:, ::2],
    "diagonal": lambda x: x.diagonal(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "detach": lambda x: x.detach(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "unbind": lambda x: x.unbind(1)[0],
    "split": lambda x: x.split(3, 1)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "data": lambda x: x.data,
    "reshape": lambda x: x.reshape(3, 8),
    "movedim": lambda x: x.movedim(0, 1),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(4)
def test_views_in_inference_mode_of_tensors_from_outside(requires_grad: bool) -> None:
    """Torch gives such a view the count of writes of its base.

    No tensor of inference mode takes it.
    """
    whole = sample(4, 6)
    for placements, (name, view) in product(([S0], [S1], [R]), VIEWS_IN_INFERENCE.items()):
        single = whole.clone().requires_grad_(requires_grad)
        x = put(whole, placements).requires_grad_(requires_grad)
        with torch.inference_mode():
            expected, got = view(single), view(x)
        assert torch.equal(full(got.detach()), expected), (name, placements)
        assert got.is_inference() == expected.is_inference(), name
        assert got.requires_grad == expected.requires_grad, name


@on_ranks(4)
def test_writes_to_views_in_inference_mode_reach_and_count_for_the_base() -> None:
    x = put(sample(4, 6), [S0])
    before = x._version
    with torch.inference_mode():
        x.view(24).mul_(2)
        x.unbind(1)[0].zero_()
    expected = sample(4, 6) * 2
    expected[:, 0] = 0
    assert torch.equal(full(x), expected)
    assert x._version > before
