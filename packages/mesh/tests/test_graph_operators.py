"""Compiled code calls collectives of eager code, exported programs do not.

Covers: collectives/graph_operators.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rank_values import ORDERS, comm_of, values_of
from shoal_mesh import (
    Comm,
    all_gather,
    all_gather_v,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_v,
    broadcast,
    comm_over,
    reduce_scatter,
    reduce_scatter_v,
)
from shoal_mesh.collectives.graph_dependences import NAMESPACE
from shoal_mesh.internal import Event, contribution, observe, unobserve
from shoal_mesh.testing import on_ranks

# The warning is torch's: it traces through any cached function.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


def gather_blocks_of_all_sizes(x: Tensor, comm: Comm) -> Any:
    return all_gather_v(x[: comm.rank + 1], comm, [*range(1, comm.size + 1)])


def reduce_scatter_to_the_first(x: Tensor, comm: Comm) -> Any:
    return reduce_scatter_v(x, comm, [4, *(0,) * (comm.size - 1)])


def exchange_as_many_as_the_rank(x: Tensor, comm: Comm) -> Any:
    sent = [comm.rank + 1] * comm.size
    received = [*range(1, comm.size + 1)]
    return all_to_all_v(x.flatten()[: sum(sent)], comm, sent, received)


def exchange_nothing_of_the_first(x: Tensor, comm: Comm) -> Any:
    sent = [comm.rank] * comm.size
    received = [*range(comm.size)]
    return all_to_all_v(x.flatten()[: sum(sent)], comm, sent, received)


PROGRAMS: dict[str, Callable[[Tensor, Comm], Any]] = {
    "all_reduce": all_reduce,
    "an average of halves": lambda x, comm: all_reduce(x.to(torch.bfloat16), comm, "avg"),
    "a maximum of integers": lambda x, comm: all_reduce(x.to(torch.int16), comm, "max"),
    "a sum of complex numbers": lambda x, comm: all_reduce(torch.complex(x, -x), comm),
    "a scalar": lambda x, comm: all_reduce(x.sum(), comm),
    "an operand with other strides": lambda x, comm: all_gather(x.t(), comm, 1),
    "all_gather": lambda x, comm: all_gather(x, comm, 1),
    "all_gather_v": gather_blocks_of_all_sizes,
    "reduce_scatter": lambda x, comm: reduce_scatter(x, comm, 0, "min"),
    "reduce_scatter_v": reduce_scatter_to_the_first,
    "all_to_all": lambda x, comm: all_to_all(x, comm, 0, 1),
    "all_to_all_v": exchange_as_many_as_the_rank,
    "all_to_all_v of a rank that sends nothing": exchange_nothing_of_the_first,
    "broadcast": lambda x, comm: broadcast(x, comm, comm.size - 1),
    "several at once": lambda x, comm: all_reduce_coalesced([x, x[0] * 2], comm),
}


TRACED = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)


def compiled(program: Callable[..., Any], graphs: list[Any]) -> Any:
    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # not while this file is collected: it takes seconds
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(program, backend=keep, fullgraph=True)


def operators(graph: Any) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes]
    return [
        name for name in names if ("c10d" in name and "wait_tensor" not in name) or "shoal" in name
    ]


def all_of(
    programs: dict[str, Callable[[Tensor, Comm], Any]], comm: Comm
) -> Callable[[Tensor], list[Any]]:
    """One function of several programs: it compiles into one graph."""
    return lambda x: [program(x, comm) for program in programs.values()]


def assert_same_bits(programs: dict[str, Any], found: list[Any], expected: list[Any]) -> None:
    for name, one, other in zip(programs, found, expected, strict=True):
        message: Any = lambda s, n=name: f"{n}: {s}"  # noqa: E731  # called at once
        torch.testing.assert_close(one, other, rtol=0, atol=0, msg=message)


@TRACED
@pytest.mark.parametrize("order", ORDERS)
@on_ranks(4, timeout=200)
def test_compiled_collectives_have_the_bits_of_eager_ones(order: str) -> None:
    comm = comm_of(order)
    graphs: list[Any] = []
    eager = all_of(PROGRAMS, comm)
    fast = compiled(eager, graphs)
    for columns in (4, 8, 12):
        x = values_of(comm.ranks[comm.rank], (4, columns), torch.float64)
        assert_same_bits(PROGRAMS, fast(x), eager(x))
    assert len(graphs) <= 2, "one of the first shape, one of all others"
    called = operators(graphs[-1])
    assert len(called) >= len(PROGRAMS) and all("shoal_mesh" in op for op in called), called


class Heard:
    """An observer that notes what runs."""

    def __init__(self) -> None:
        self.ops: list[str] = []

    def before(self, event: Event) -> None:
        self.ops.append(event.op)

    def after(self, event: Event) -> None: ...


def dropped(x: Tensor, comm: Comm) -> Tensor:
    """Rank 0 alone uses the sum."""
    total = all_reduce(x, comm)
    return total if comm.rank == 0 else x * 2


def replaced(x: Tensor, comm: Comm) -> Tensor:
    """Rank 1 adds zeros in place of the sum."""
    return all_reduce(contribution(all_reduce(x, comm), comm.rank == 0, 0.0), comm)


@TRACED
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(2, timeout=100)
def test_a_rank_without_use_for_a_result_takes_part(backend: str) -> None:
    comm = comm_over((0, 1))
    torch._dynamo.reset()
    fast = torch.compile(
        all_of({"dropped": dropped, "replaced": replaced}, comm), backend=backend, fullgraph=True
    )
    for result in fast(torch.ones(4)):
        assert torch.equal(result, torch.full((4,), 2.0))


@TRACED
@on_ranks(2, timeout=100)
def test_ranks_that_contribute_a_constant_have_the_graph_of_the_others() -> None:
    comm = comm_over((0, 1))
    graphs: list[Any] = []
    compiled(lambda x: replaced(x, comm), graphs)(torch.ones(4))
    called = [name.rpartition("shoal_mesh.")[2].partition(".")[0] for name in operators(graphs[0])]
    assert called == ["all_reduce", "contribution", "all_reduce"]


@TRACED
@on_ranks(2, timeout=100)
def test_observers_hear_of_compiled_collectives() -> None:
    comm, heard = comm_over((0, 1)), Heard()
    fast, x = compiled(lambda x: all_gather(all_reduce(x, comm), comm), []), torch.ones(4)
    fast(x)
    observe(heard)
    fast(x)
    unobserve(heard)
    fast(x)
    assert heard.ops == ["all_reduce", "all_gather_into_tensor"]


@on_ranks(2, timeout=100)
def test_an_exported_program_has_functional_collectives() -> None:
    comm = comm_over((0, 1))

    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """`(4,)`."""
            return all_reduce(x, comm)

    program = torch.export.export(Sum(), (torch.ones(4),), strict=False).run_decompositions()
    assert {name.split(".")[0] for name in operators(program)} == {"_c10d_functional"}
    assert torch.equal(program.module()(torch.ones(4)), torch.full((4,), 2.0))


@TRACED
@on_ranks(2, timeout=200)
def test_code_of_inductor_calls_collectives_directly_with_the_bits_of_eager_ones() -> None:
    # not while this file is collected: it takes seconds
    from torch._inductor.utils import run_and_get_code

    comm = comm_over((0, 1))
    # inductor warns of these
    named = {name: program for name, program in PROGRAMS.items() if "complex" not in name}
    eager = all_of(named, comm)
    torch._dynamo.reset()
    fast = torch.compile(eager, backend="inductor", fullgraph=True)
    x = values_of(comm.rank, (4, 8), torch.float64)
    before = x.clone()
    found, (code, *_) = run_and_get_code(fast, x)
    assert_same_bits(named, found, eager(x))
    assert torch.equal(x, before), "an operand was written to"
    statements = [line.strip().rpartition("= ")[2] for line in code.splitlines()]
    calls = [
        statement for statement in statements if statement.startswith(f"torch.ops.{NAMESPACE}.")
    ]
    assert calls and all(".run(" in call for call in calls), calls

    heard = Heard()
    observe(heard)
    fast(x)
    unobserve(heard)
    assert len(heard.ops) == len(calls), "observers hear of each"
