"""Covers: graph_dependences.py: collectives that a rank does not use, in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import get_current_meta, preserve_node_meta

from shoal_mesh import all_gather, all_to_all_blocks, init_device_mesh
from shoal_mesh.collectives.graph_dependences import distinct, in_its_pass
from shoal_mesh.internal import with_dependence
from shoal_mesh.testing import fake_world

TRACED = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)


def collectives(program: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """How many there are in the compiled program."""
    # not while this file is collected: it takes seconds
    from torch._dynamo.backends.common import aot_autograd

    found: list[torch.fx.Node] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        found.extend(n for n in graph.graph.nodes if "_c10d_functional.all" in str(n.target))
        return lambda *args: graph(*args)

    torch._dynamo.reset()
    torch.compile(program, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x)
    return len(found)


def test_eager_code_has_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert with_dependence(x, x + 1) is x


@TRACED
def test_a_bound_result_keeps_the_collective() -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)
        for shape in ((), (3,), (0, 2)):
            x = torch.ones(shape, requires_grad=True)
            assert (
                collectives(
                    lambda x: with_dependence(x * 2, all_gather(x.detach().reshape(1, -1), comm)), x
                )
                == 1
            )
        x = torch.ones(3, requires_grad=True)
        assert (
            collectives(
                lambda x: with_dependence(x * 2, all_gather((x.detach() * 1j).conj(), comm)), x
            )
            == 1
        )
        assert (
            collectives(lambda x: (all_gather(x.detach().reshape(1, -1), comm), x * 2)[1], x) == 0
        ), "it is dropped"


@TRACED
def test_a_rank_that_gets_no_block_takes_part() -> None:
    with fake_world(2):
        comm = init_device_mesh("cpu", (2,)).comm(0)

        def program(x: Tensor) -> Tensor:
            out, held = x.new_empty(1), x.detach()
            all_to_all_blocks([[held[:1]], [held[1:]]], comm, [[out], []])
            return out * x

        assert collectives(program, torch.ones(3, requires_grad=True)) == 1


@pytest.mark.parametrize(
    ("traced", "place"), [("is_backward", "must_be_in_backward"), ("is_forward", "is_forward")]
)
def test_a_collective_of_a_traced_backward_stays_there(traced: str, place: str) -> None:
    with preserve_node_meta():
        meta = get_current_meta()
        meta["partitioner_tag"] = traced
        seen: list[str] = []

        def collective(x: Tensor, group: str) -> Tensor:
            seen.append(meta["partitioner_tag"])
            return x

        in_its_pass(collective, torch.ones(2), "group")
        assert (seen, meta["partitioner_tag"]) == ([place], traced)


def test_no_two_collectives_have_equal_operands() -> None:
    x = torch.ones(2, 3)
    graph = make_fx(lambda x: (distinct(x), distinct(x)))(x)
    first, second = (node.args[1:] for node in graph.graph.nodes if node.op == "call_function")
    assert first != second and 0 not in (first[1], second[1]), "what inductor takes for nothing"
    assert all(torch.equal(out, x) for out in graph(x))
