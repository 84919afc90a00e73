"""Compiled code follows the sizes of its inputs.

Covers: lowering/parameters.py, lowering/ports.py, losses.

Five batch sizes, then five sequence lengths, one graph each time, forward and backward. What is
dynamic takes two graphs: one of the first size, one of any. What goes by way of DTensor takes one
for each size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_marks import COMPILED
from lowering_cases import CASES, Case
from shoal_dtensor import DTensor, Partial, Replicate, Shard, full
from shoal_mesh import (
    DeviceMesh,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    differentiable,
    init_device_mesh,
    reduce_scatter,
)
from shoal_mesh.testing import fake_world, on_ranks
from shoal_tp_styles import Vocab, choose, loss_parallel, losses, parallelize_module
from toy_modules import BehindOperation

pytestmark = COMPILED
Sweeps = list[list[tuple[Tensor, ...]]]
FACTORS = (2, 3, 4, 5, 7)
RANKS = (2, 3, 4, 8)
BY_DTENSOR = {
    "columns as DTensor", "rows scattered as DTensor", "crossing", "reduced", "scattered",
    "exchanged", "from a shape", "loss_parallel", "prepared input, gathered",
    "prepared input, sharded",
}  # fmt: skip
# by way of DTensor where 8 features do not divide
UNEVEN = {"columns to another dim", "prepared output, resharded"}
# The styles refuse fewer groups or heads than ranks, where none can be replicated.
NOT_ON = {"groups": (3, 8), "fused, replicated heads": (3,), "heads of several ranks": (3,)} | {
    name: (8,) for name in CASES if name.startswith("attention")
}
# Torch traces no RNN (`test_recurrent_modules_run_between_graphs`); see test_compile.py for
# dropout; graphs break where tokens are sent to experts, at context parallelism, and where ranks
# have bags of their own.
TRACED = {
    name: case
    for name, case in CASES.items()
    if name not in {"recurrent", "dropout"}
    and not name.startswith(("experts of", "context", "hidden units", "own bags"))
}
QUICK = {
    "batch norm",
    "columns",
    "columns to another dim",
    "rows scattered",
    "vocabulary",
    "norm",
    "prepared output, resharded",
}


def world() -> DeviceMesh:
    """All ranks on one axis: not cached, since fake worlds come and go."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def parallel(case: Case) -> nn.Module:
    path = f"module.{case.path}".rstrip(".")
    return parallelize_module(BehindOperation(case.make()), world(), {path: case.style})


def inputs(case: Case, ranks: int) -> list[list[Tensor]]:
    """This rank's inputs: of five batch sizes, then of five lengths if there is such a dim."""
    tokens = isinstance(case.input, Tensor)
    base = case.input.shape if tokens else case.input
    free = [dim for dim, n in enumerate(base) if tokens or n != 8]  # all features are 8
    sweeps = []
    for changing in free[:2]:
        shapes = [[2 * ranks if dim in free else n for dim, n in enumerate(base)] for _ in FACTORS]
        for shape, factor in zip(shapes, FACTORS, strict=True):
            shape[changing] = factor * ranks
            if isinstance(case.layout, Shard):
                shape[case.layout.dim] = -(-shape[case.layout.dim] // ranks)
        sweeps.append(
            [torch.randint(7, shape) if tokens else torch.randn(shape) for shape in shapes]
        )
    return sweeps


def differentiated(function: Callable[..., Any], x: Tensor, *rest: Tensor) -> list[Any]:
    """Result and gradient of the input."""
    leaf = x.detach().clone().requires_grad_(x.is_floating_point())
    out = function(leaf, *rest)
    out = out[0] if isinstance(out, tuple) else out
    out = out.to_local() if isinstance(out, DTensor) else out
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), leaf.grad]


def follow(
    name: str,
    ranks: int,
    function: Any,
    sweeps: list[list[tuple[Tensor, ...]]],
    *,
    values: bool = False,
) -> None:
    """Run compiled code over sweeps of inputs; `values` compares them with those of eager code."""
    for sweep in sweeps:
        graphs: list[object] = []

        def keep(graph: torch.fx.GraphModule, example: Any, graphs: list[object] = graphs) -> Any:
            # not while this file is collected: it takes seconds
            from torch._dynamo.backends.debugging import aot_eager

            graphs.append(graph)
            return aot_eager(graph, example)

        torch._dynamo.reset()
        compiled = torch.compile(function, backend=keep, fullgraph=True)
        for args in sweep:
            got, expected = differentiated(compiled, *args), differentiated(function, *args)
            assert [None if t is None else t.shape for t in got] == [
                None if t is None else t.shape for t in expected
            ]
            if values:
                torch.testing.assert_close(got, expected)
        each = name in BY_DTENSOR or (name in UNEVEN and 8 % ranks)
        # torch picks a kernel by batch size, at 16
        by_kernel = "convolution" in name or name == "depthwise"
        most = len(FACTORS) if each else 2 + by_kernel
        assert len(graphs) <= most, f"{len(graphs)} graphs"


def on_few_ranks(names: Any, quick: Any) -> list[Any]:
    """Pairs of name and ranks; all but the quick names on three ranks are slow."""
    return [
        pytest.param(
            name,
            ranks,
            marks=[] if ranks == 3 and name in quick else [pytest.mark.slow],
            id=f"{name}-{ranks}",
        )
        for name in names
        for ranks in RANKS
        if ranks not in NOT_ON.get(name, ())
    ]


@pytest.mark.parametrize(("name", "ranks"), on_few_ranks(TRACED, QUICK))
def test_lowered_modules_follow_batch_and_length(name: str, ranks: int) -> None:
    case = CASES[name]
    with fake_world(ranks):
        module = parallel(case)
        follow(name, ranks, module, [[(x,) for x in sweep] for sweep in inputs(case, ranks)])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
@on_ranks(2, timeout=200)
def test_lowered_modules_have_the_values_of_eager_ones(name: str) -> None:
    torch.manual_seed(0)
    module = parallel(TRACED[name])
    follow(
        name,
        2,
        module,
        [[(x,) for x in sweep[:3]] for sweep in inputs(TRACED[name], 2)],
        values=True,
    )


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("recurrent", "hidden units"))]
)
@on_ranks(2, timeout=200)
def test_recurrent_modules_run_between_graphs(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    module = parallel(case)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    for sweep in inputs(case, 2):
        for x in sweep[:2]:
            torch.testing.assert_close(differentiated(compiled, x), differentiated(module, x))


def crossing(x: Tensor, mesh: DeviceMesh, source: Any, target: Any) -> Tensor:
    return DTensor.from_local(x, mesh, [source]).redistribute(placements=[target]).to_local()


def from_shape(x: Tensor, mesh: DeviceMesh) -> Tensor:
    shape = (x.shape[0] * mesh.size(), x.shape[1])
    y = DTensor.from_local(x, mesh, [Shard(0)], shape=shape, stride=(x.shape[1], 1))
    return y + full(shape, 2.0, device_mesh=mesh, placements=[Shard(0)])


COLLECTIVES: dict[str, Callable[[Tensor, DeviceMesh], Any]] = {
    "all_reduce": lambda x, mesh: all_reduce(x.detach(), mesh.comm(0)),
    "all_gather": lambda x, mesh: all_gather(x.detach(), mesh.comm(0), 1),
    "reduce_scatter": lambda x, mesh: reduce_scatter(x.detach(), mesh.comm(0), 1),
    "all_to_all": lambda x, mesh: all_to_all(x.detach(), mesh.comm(0), 0, 1),
    "broadcast": lambda x, mesh: broadcast(x.detach(), mesh.comm(0), 0),
    "differentiable all_reduce": lambda x, mesh: differentiable.all_reduce(x, mesh.comm(0)),
    "differentiable all_gather": lambda x, mesh: differentiable.all_gather(x, mesh.comm(0), 1),
    "differentiable reduce_scatter": lambda x, mesh: differentiable.reduce_scatter(
        x, mesh.comm(0), 1
    ),
    "differentiable all_to_all": lambda x, mesh: differentiable.all_to_all(x, mesh.comm(0), 0, 1),
    "differentiable broadcast": lambda x, mesh: differentiable.broadcast(x, mesh.comm(0), 0),
    "crossing": lambda x, mesh: crossing(x, mesh, Shard(0), Replicate()) + 1,
    "reduced": lambda x, mesh: crossing(x, mesh, Partial(), Replicate()) + 1,
    "scattered": lambda x, mesh: crossing(x, mesh, Partial(), Shard(0)) + 1,
    "exchanged": lambda x, mesh: crossing(x, mesh, Shard(0), Shard(1)) + 1,
    "from a shape": from_shape,
}


def sweeps_of(make: Callable[[int, int], tuple[Tensor, ...]], ranks: int) -> Sweeps:
    """Five batch sizes, then five lengths."""
    return [
        [make(k * ranks, 2 * ranks) for k in FACTORS],
        [make(2 * ranks, k * ranks) for k in FACTORS],
    ]


@pytest.mark.parametrize(
    ("name", "ranks"), on_few_ranks(COLLECTIVES, {"all_reduce", "crossing", "exchanged"})
)
def test_collectives_and_redistribution_follow_batch_and_length(name: str, ranks: int) -> None:
    with fake_world(ranks):
        mesh = world()
        follow(
            name,
            ranks,
            lambda x: COLLECTIVES[name](x, mesh),
            sweeps_of(lambda b, s: (torch.randn(b, s),), ranks),
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
@on_ranks(2, timeout=200)
def test_collectives_and_redistribution_have_the_values_of_eager_ones(name: str) -> None:
    mesh = world()
    follow(
        name,
        2,
        lambda x: COLLECTIVES[name](x, mesh),
        sweeps_of(lambda b, s: (torch.randn(b, s),), 2),
        values=True,
    )


def in_block(x: Tensor, target: Tensor, vocab: Vocab, mesh: DeviceMesh) -> Tensor:
    logits = DTensor.from_local(x.flatten(0, 1), mesh, [Shard(1)])
    return F.cross_entropy(logits, target.flatten(), label_smoothing=0.1)


Loss = Callable[[Tensor, Tensor, Vocab, DeviceMesh], Tensor]


def flat_cross_entropy(x: Tensor, y: Tensor, v: Vocab, mesh: DeviceMesh) -> Tensor:
    return losses.cross_entropy(x.flatten(0, 1), y.flatten(), vocab=v)


LOSSES: dict[str, Loss] = {
    "cross_entropy": flat_cross_entropy,
    "nll_loss": lambda x, y, v, mesh: losses.nll_loss(x.flatten(0, 1), y.flatten(), vocab=v),
    "log_prob": lambda x, y, v, mesh: losses.log_prob(x, y, vocab=v),
    "log_softmax": lambda x, y, v, mesh: losses.log_softmax(x, vocab=v),
    "kl_div": lambda x, y, v, mesh: losses.kl_div(x, x.detach() * 2, vocab=v),
    "argmax": lambda x, y, v, mesh: choose.argmax(x, vocab=v),
    "sample": lambda x, y, v, mesh: choose.sample(x, vocab=v),
    "loss_parallel": in_block,
}


def follow_loss(name: str, *, values: bool = False) -> None:
    mesh = world()
    ranks, vocab = mesh.size(), Vocab.even(mesh, 5 * mesh.size())

    def make(batch: int, length: int) -> tuple[Tensor, ...]:
        return torch.randn(batch, length, 5), torch.randint(
            5 * ranks, (batch, length), generator=torch.Generator()
        )

    with loss_parallel() if name == "loss_parallel" else nullcontext():
        follow(
            name,
            ranks,
            lambda x, y: LOSSES[name](x, y, vocab, mesh),
            sweeps_of(make, ranks),
            values=values,
        )


@pytest.mark.parametrize(
    ("name", "ranks"), on_few_ranks(LOSSES, {"cross_entropy", "loss_parallel"})
)
def test_losses_follow_batch_and_length(name: str, ranks: int) -> None:
    with fake_world(ranks):
        follow_loss(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sample"])  # which draws
@on_ranks(2, timeout=200)
def test_losses_have_the_values_of_eager_ones(name: str) -> None:
    torch.manual_seed(torch.distributed.get_rank())
    follow_loss(name, values=True)
