"""Random programs on random shardings equal one device.

Covers: the layer as a whole, and support/random_programs.

Values, gradients and the generator are compared. A program is plain data (hypothesis shrinks it):
integers that the interpreter reduces modulo whatever is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import shoal_dtensor as sd
from random_programs import (
    Program as Lines,
    Stop,
    compose,
    hunt,
    on_one,
    on_ranks,
    shrink,
    verdict_of_stop,
)
from settings_and_refusals import unless_refused
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.errors import PeerError
from shoal_mesh.testing import rank_pool

Step = tuple[str, int, int, int]
Program = tuple[tuple[int, ...], tuple[int, int], tuple[Step, ...]]


@dataclass
class Machine:
    """Runs a program on plain tensors (no mesh) or on DTensors.

    Every leaf that it makes gets a gradient.
    """

    mesh: Any = None
    leaves: list[Tensor] = field(default_factory=list)

    def leaf(self, shape: Any, cut: int) -> Tensor:
        """A leaf whose values follow from its shape and number; `cut` picks its placements."""
        numel = torch.Size(shape).numel()
        values = (
            (torch.arange(numel, dtype=torch.float64) * (0.37 + len(self.leaves)))
            .sin()
            .reshape(shape)
        )
        if self.mesh is not None:
            values = sd.distribute_tensor(values, self.mesh, self.placements(tuple(shape), cut))
        made = values.requires_grad_()
        self.leaves.append(made)
        return made

    def placements(self, shape: tuple[int, ...], cut: int) -> list[Any]:
        """Replicate or plain or ragged sharding for every mesh axis, as digits of `cut` say."""
        found: list[Any] = []
        taken: set[int] = set()
        for axis in range(self.mesh.ndim):
            cut, digit = divmod(cut, 2 * len(shape) + 1)
            if digit == 0 or not shape:
                found.append(Replicate())
                continue
            dim, ragged = divmod(digit - 1, 2)
            ways = self.mesh.size(axis)
            if ragged and dim not in taken and not any(p == Shard(dim) for p in found):
                first = (cut + 1) % (shape[dim] + 1)
                found.append(Shard(dim, sizes=[first, *[0] * (ways - 2), shape[dim] - first]))
                taken.add(dim)
            elif dim in taken:
                found.append(Replicate())
            else:
                found.append(Shard(dim))
        return found

    def redistribute(self, x: Tensor, cut: int) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        return x.redistribute(placements=self.placements(tuple(x.shape), cut))

    def run(self, program: Program) -> Tensor:
        _, shape, steps = program
        x = self.leaf(shape, steps[0][1])
        for name, a, b, c in steps:
            x = STEPS[name](self, x, a, b, c)
            if x.numel() > 4000:
                x = x.narrow(0, 0, 1)
        return x


def dim_of(x: Tensor, a: int) -> int:
    return a % x.ndim


def narrowed(m: Machine, x: Tensor, a: int, b: int, c: int) -> Tensor:
    dim = dim_of(x, a)
    start = b % x.shape[dim]
    return x.narrow(dim, start, c % (x.shape[dim] - start) + 1)


def matmul(m: Machine, x: Tensor, a: int, b: int, c: int) -> Tensor:
    return x @ m.leaf((x.shape[-1], a % 6 + 1), b) / x.shape[-1]


def linear(m: Machine, x: Tensor, a: int, b: int, c: int) -> Tensor:
    width = a % 5 + 1
    return F.linear(x, m.leaf((width, x.shape[-1]), b), m.leaf((width,), c)) / x.shape[-1]


def reshaped(m: Machine, x: Any, a: int, b: int, c: int) -> Any:
    """Dims joined, or one split by a divisor."""
    if a % 2 == 0 and x.ndim > 1:
        dim = b % (x.ndim - 1)
        return x.flatten(dim, dim + 1)
    dim = dim_of(x, b)
    divisors = [k for k in range(1, x.shape[dim] + 1) if x.shape[dim] % k == 0]
    return x.unflatten(dim, (divisors[c % len(divisors)], -1)) if x.ndim < 4 else x


def written(m: Machine, x: Tensor, a: int, b: int, c: int) -> Tensor:
    """A copy, part of it written through a view.

    A folded dim has none, and a write to it would raise.
    """
    made: Any = x * 1.0
    if isinstance(made, DTensor) and made._spec.is_strided:
        made = made.redistribute(placements=[Replicate()] * made.device_mesh.ndim)
    dim = dim_of(x, a)
    made.narrow(dim, b % x.shape[dim], 1).mul_(2.0).add_(0.5)
    result: Tensor = made
    return result


def indexed(m: Machine, x: Tensor, a: int, b: int, c: int) -> Tensor:
    dim = dim_of(x, a)
    picks = torch.tensor([b, c, b + c, c]) % x.shape[dim]
    if isinstance(x, DTensor):
        picks = sd.distribute_tensor(picks, m.mesh, [Replicate()] * m.mesh.ndim)
    return x.index_select(dim, picks)


STEPS: dict[str, Callable[[Machine, Tensor, int, int, int], Tensor]] = {
    "gelu": lambda m, x, a, b, c: F.gelu(x),
    "square": lambda m, x, a, b, c: x * x + 0.25,
    "add row": lambda m, x, a, b, c: x + m.leaf(x.shape[-1:], a),
    "multiply": lambda m, x, a, b, c: x * m.leaf(x.shape, a),
    "matmul": matmul,
    "linear": linear,
    "softmax": lambda m, x, a, b, c: x.softmax(dim_of(x, a)),
    "sum": lambda m, x, a, b, c: x.sum(dim_of(x, a), keepdim=True),
    "mean": lambda m, x, a, b, c: x.mean(dim_of(x, a), keepdim=x.ndim == 1),
    "var": lambda m, x, a, b, c: x.var(dim_of(x, a), correction=0, keepdim=True),
    "maximum": lambda m, x, a, b, c: x.amax(dim_of(x, a), keepdim=True) + x,
    "layer_norm": lambda m, x, a, b, c: F.layer_norm(x, x.shape[-1:], m.leaf(x.shape[-1:], a)),
    "transpose": lambda m, x, a, b, c: x.transpose(dim_of(x, a), dim_of(x, b)),
    "reshape": reshaped,
    "narrow": narrowed,
    "flip": lambda m, x, a, b, c: x.flip(dim_of(x, a)),
    "roll": lambda m, x, a, b, c: x.roll(b, dim_of(x, a)),
    "cumsum": lambda m, x, a, b, c: x.cumsum(dim_of(x, a)) / 4,
    "cat": lambda m, x, a, b, c: torch.cat([x, x * 2], dim_of(x, a)),
    "pad": lambda m, x, a, b, c: F.pad(x, (a % 2, b % 3)),
    "sort": lambda m, x, a, b, c: x.sort(dim_of(x, a)).values,
    "index": indexed,
    "write": written,
    "dropout": lambda m, x, a, b, c: F.dropout(x, 0.3),
    "noise": lambda m, x, a, b, c: x + torch.randn_like(x),
    "redistribute": lambda m, x, a, b, c: m.redistribute(x, a * 13 + b),
}
NUMBER = st.integers(0, 200)
STEP = st.tuples(st.sampled_from(sorted(STEPS)), NUMBER, NUMBER, NUMBER)
PROGRAM = st.tuples(
    st.sampled_from([(4,), (2, 2)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.lists(STEP, min_size=3, max_size=8).map(tuple),
)


def compare(program: Program) -> None:
    """One rank's part of a test: the program on one device, and on the mesh."""
    plain, mesh = Machine(), init_device_mesh("cpu", program[0])
    sharded = Machine(mesh)
    outputs = []
    states = []
    for machine in (plain, sharded):
        torch.manual_seed(7)
        x: Any = machine.run(program)
        outputs.append(x)
        states.append(torch.get_rng_state())
        (x * x).sum().backward()
    expected, got = outputs
    assert isinstance(got, DTensor)
    assert torch.equal(states[0], states[1]), "generator"
    detached: Any = got.detach()
    torch.testing.assert_close(detached.full_tensor(), expected.detach(), rtol=1e-8, atol=1e-9)
    for one, other in zip(plain.leaves, sharded.leaves, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None and other.grad is not None:
            assert isinstance(other.grad, DTensor)
            placed: Any = other
            assert other.grad.placements == placed.placements, (
                "a leaf's gradient has the leaf's layout"
            )
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, rtol=1e-7, atol=1e-8)


# Found by the tests below, each once wrong.
FOUND: list[Program] = [
    (
        (2, 2),
        (8, 8),
        (("layer_norm", 39, 36, 125), ("index", 39, 62, 48), ("maximum", 144, 141, 54)),
    ),
    (
        (2, 2),
        (1, 2),
        (
            ("mean", 150, 71, 67),
            ("multiply", 183, 155, 36),
            ("matmul", 12, 110, 16),
            ("var", 106, 106, 192),
        ),
    ),
]


@pytest.mark.parametrize(
    "program", FOUND, ids=lambda program: "-".join(step[0] for step in program[2])
)
def test_programs_that_were_wrong(program: Program) -> None:
    rank_pool(4).run(compare, program)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(PROGRAM)
def test_random_programs_equal_one_device(program: Program) -> None:
    rank_pool(4).run(compare, program)


@pytest.mark.slow
@settings(max_examples=600, suppress_health_check=list(HealthCheck))
@given(PROGRAM)
def test_many_random_programs_equal_one_device(program: Program) -> None:
    rank_pool(4).run(compare, program)


# --- programs of lines: a larger vocabulary, writes among it --------------------------------------

# Found by hunting, each once wrong.
HUNTED: dict[str, Lines] = {
    "a placement that shards as another does": Lines(
        (4,),
        (
            "x = leaf(0, (3,), [Shard(0, multiple_of=2)])",
            "y = x * leaf(1, (3,), [Shard(0, sizes=(2, 1, 0, 0))])",
        ),
    ),
    "elements assigned to themselves": Lines(
        (4,),
        (
            "x = real(0, (2, 6), [Replicate()])",
            "y = leaf(1, (1,), [Shard(0)])",
            "x[None, -2, 5:] += y",
        ),
    ),
    "two operands of cat, sharded by two axes": Lines(
        (2, 2),
        (
            "x = leaf(3, (4,), [Shard(0, sizes=(1, 3)), Replicate()])",
            "y = leaf(4, (3,), [Replicate(), Shard(0, sizes=(3, 0))])",
            "z = torch.cat([x, y], -1)",
        ),
    ),
    "two operands of cat, one of them empty": Lines(
        (2, 2),
        (
            "x = leaf(3, (4,), [Shard(0, sizes=(1, 3)), Replicate()])",
            "y = leaf(4, (0,), [Shard(0), Shard(0)], order=((0, (1, 0)),))",
            "z = torch.cat([x, y], -1)",
        ),
    ),
    "the gradient of a norm of one dim": Lines(
        (4,),
        (
            "x = leaf(0, (5,), [Shard(0)])",
            "y = F.layer_norm(x, (5,), leaf(1, (5,), [Shard(0)]), eps=0.1)",
        ),
    ),
    "a copied view of what is written later": Lines(
        (2, 2),
        (
            "x = real(0, (4, 6), [Shard(0), Shard(1)])",
            "y = x.view(24)[3:20]",
            "x.mul_(2)",
            "z = y * leaf(1, (17,), [Shard(0), Replicate()])",
        ),
    ),
}


@pytest.mark.parametrize("name", HUNTED)
def test_hunted_programs(name: str) -> None:
    assert on_ranks([HUNTED[name]]) == [""]


def test_a_program_is_the_same_everywhere_and_prints_itself() -> None:
    program = compose(3)
    assert program == compose(3) != compose(5)
    found: dict[str, Any] = {}
    exec(program.script(), found)
    assert found["PROGRAM"] == program


def test_a_program_that_differs_is_noticed_and_shrunk() -> None:
    wrong = "z = x * (1 if type(x) is torch.Tensor else 2)"
    program = Lines((4,), ("x = leaf(0, (3,), [Shard(0)])", "y = x + 1", wrong, "y.mul_(2)"))
    (found,) = on_one([program])
    assert "wrong: z" in found
    assert shrink(program, found)[0].lines == (program.lines[0], wrong)


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
    # what torch warns of on one device too
)
def test_lines_at_the_edges_do_not_only_refuse() -> None:
    """Each kind of edge is there among 40 programs, and equals one device."""
    lines = (
        "x = leaf(0, (4, 6), [Shard(0), Shard(1)])",
        "y = real(1, (4, 6), [Replicate(), Shard(0, sizes=(3, 1))])",
        "a = tried(lambda: F.cross_entropy(x, const([1, 6, 0, -1], [Replicate(), Replicate()])))",
        "b = tried(lambda: x.gather(0, const([[-1]], [Replicate(), Replicate()])))",
        "c = rebuilt(y) + spread(x, y) + placed(x, y) + filled(x, y) + mapped(y)",
        "d = watched(lambda: F.one_hot((x > 0).long(), 3))",
        "e = near(0, (4, 6), [Partial('avg'), Shard(0)], scale=4e4, dtype=torch.float16)"
        ".mean() / 1e4",
        "i = ints(0, (4,), [Shard(0), Replicate()])",
        "f = i / 3",
        "default(torch.float64)",
        "g = i / 3",
        "with deterministic(): h = x.cumsum(0)",
    )
    assert on_one([Lines((2, 2), lines)]) == [""]
    written = "\n".join(line for seed in range(40) for line in compose(seed).lines)
    for name in ("tried", "rebuilt", "spread", "placed", "watched", "near", "default"):
        assert f"{name}(" in written, name


@pytest.mark.filterwarnings(
    "ignore::UserWarning"
    # what torch warns of on one device too
)
def test_composed_programs_equal_one_device() -> None:
    programs = [compose(seed) for seed in range(40)]
    for program, found in zip(programs, on_ranks(programs), strict=True):
        assert not found or found.startswith("refused"), f"{found}\n{program.script()}"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings(
    "ignore::UserWarning"
    # what torch warns of on one device too; an error on one rank is a finding
)
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_composed_programs_equal_one_device(first: int) -> None:
    found = [*map(str, hunt(range(first, first + 500)))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_no_rank_waits_for_a_rank_that_stops_in_the_middle(raises: bool) -> None:
    program = Lines((4,), ("x1 = real(0, (8,), [Shard(0)])", "x2 = place(x1, [Replicate()])"))
    assert verdict_of_stop(program, Stop(2, 1, raises)) == ""


def test_a_stop_that_ranks_wait_for_is_a_finding() -> None:
    program = Lines((4,), ("torch.ones(3)", "__import__('time').sleep(60)"))
    found = verdict_of_stop(program, Stop(2, 1, raises=False), timeout=3.0)
    assert found.startswith("hang: ranks (")


def test_ranks_at_work_when_one_raises_are_no_finding() -> None:
    program = Lines((4,), ("torch.ones(3)", "__import__('time').sleep(60)"))
    assert verdict_of_stop(program, Stop(2, 1, raises=True)) == ""


def test_a_stop_leaves_no_failed_group_to_the_next_program() -> None:
    lines = ("x1 = leaf(0, (8,), [Shard(0)])", "x2 = place(x1, [Replicate()])", "x3 = x2 * 2")
    # rank 2 returns before the backward, in which the other ranks wait for it
    assert verdict_of_stop(Lines((4,), lines), Stop(2, 2, raises=False)) == ""
    assert on_ranks([Lines((4,), lines)]) == [""]


def test_an_error_between_ranks_is_no_refusal_of_values() -> None:
    def wait_in_vain() -> None:
        raise PeerError("rank 1 waits in another collective")

    with pytest.raises(PeerError):
        unless_refused(wait_in_vain)
