"""Lowered modules under torch.compile, full graphs on real ranks.

Covers: lowering/parameters.py, lowering/ports.py.

A traced model gives the outputs and gradients of the eager one; its graphs hold functional
collectives and no others.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import shoal_mesh
from compile_marks import COMPILED
from shoal_dtensor import DTensor, Replicate, Shard, full_tensor
from shoal_mesh import init_device_mesh, sums_in_tree
from shoal_mesh.testing import fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from small_models import MLP, ModelArgs, Transformer, transformer_plan

pytestmark = COMPILED


def compiled(module: Any, graphs: list[Any]) -> Any:
    """The module in one graph, the graphs of forward and backward kept."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]  # torch

    # not while this file is collected: it takes seconds
    from torch._dynamo.backends.common import aot_autograd

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(
        module, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True
    )


def collectives(graph: Any) -> list[str]:
    """Short names of a graph's collectives; `other` waits for nothing that the compiler sees."""
    names = [
        str(node.target)
        for node in graph.graph.nodes
        if "c10d" in str(node.target) or "shoal" in str(node.target)
    ]
    # with the name of a host that vendors it
    of_mesh = shoal_mesh.__name__.replace(".", "_")
    assert all(name.startswith(("_c10d_functional.", f"{of_mesh}.")) for name in names), names
    return [name.split(".")[1] for name in names if "wait_tensor" not in name]


def assert_same(start: nn.Module, plan: dict[str, Any], x: torch.Tensor) -> list[list[str]]:
    """Outputs and gradients of the traced model are the eager one's.

    Return the collectives of each graph.
    """
    axis = init_device_mesh("cpu", (2,))
    eager: Any = parallelize_module(copy.deepcopy(start), axis, plan, on_unmatched="error")
    with torch.no_grad():
        for name, param in eager.named_parameters():
            if name.endswith("lora_B"):
                param.add_(0.3)
    module = copy.deepcopy(eager)
    graphs: list[Any] = []
    expected, got = eager(x), compiled(module, graphs)(x)
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    reference = dict(eager.named_parameters())
    for name, param in module.named_parameters():
        other = reference[name].grad
        assert type(param.grad) is type(other), name
        if isinstance(other, DTensor):
            assert param.grad.placements == other.placements, name
            torch.testing.assert_close(param.grad.full_tensor(), other.full_tensor())
        else:
            torch.testing.assert_close(param.grad, other)
    return [collectives(graph) for graph in graphs]


def test_a_small_model_is_one_graph_with_one_collective_each_way() -> None:
    with fake_world(4):
        module: Any = parallelize_module(MLP(), init_device_mesh("cpu", (4,)), dict(MLP.plan))
        graphs: list[Any] = []
        x = torch.randn(3, 10, requires_grad=True)
        compiled(module, graphs)(x).sum().backward()
        assert [collectives(graph) for graph in graphs] == [["all_reduce"], ["all_reduce"]]
        assert module.net1.weight.grad.placements == (Shard(0),)
        assert x.grad is not None


class TwoReaders(nn.Module):
    """Two readers of one activation, which is written to between them if `write` is set."""

    def __init__(self, write: bool) -> None:
        super().__init__()
        self.write, self.q, self.k = write, nn.Linear(4, 4), nn.Linear(4, 4)
        # what a trained Linear has read must stay as it is
        self.q.requires_grad_(not write)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(batch, 2)`."""
        h = x * 2
        q = self.q(h)
        if self.write:
            h = h.mul_(3)
        out: torch.Tensor = q + self.k(h)
        return out


@pytest.mark.parametrize("write", [False, True])
@on_ranks(2, timeout=100)
def test_readers_of_an_activation_share_one_reduction(write: bool) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    plan = {"q": ColwiseParallel(), "k": ColwiseParallel()}
    plain = TwoReaders(write).double()
    module: Any = parallelize_module(copy.deepcopy(plain), mesh, plan)
    graphs: list[Any] = []
    x = torch.linspace(-1, 1, 12, dtype=torch.double).view(3, 4)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, got = plain(one), compiled(module, graphs)(other)
    torch.testing.assert_close(got, expected.chunk(2, -1)[mesh.get_rank()])
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(other.grad, one.grad)
    assert [collectives(graph) for graph in graphs] == [[], ["all_reduce"] * (1 + write)]


def test_the_order_of_sums_is_a_guard() -> None:
    with fake_world(4):
        module: Any = parallelize_module(MLP(), init_device_mesh("cpu", (4,)), dict(MLP.plan))
        graphs: list[Any] = []
        fast, x = compiled(module, graphs), torch.randn(3, 10)
        with torch.no_grad():
            fast(x)
            with sums_in_tree():
                fast(x)
            fast(x)
        assert [collectives(graph) for graph in graphs] == [
            ["all_reduce"],
            ["all_gather_into_tensor"],
        ]


def test_a_model_with_dropout_is_one_graph_while_it_does_not_draw() -> None:
    with fake_world(2):
        start = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        mesh, plan = init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        module = copy.deepcopy(parallelize_module(start, mesh, plan)).eval()
        graphs: list[Any] = []
        compiled(module, graphs)(torch.ones(3, 4)).sum().backward()
        assert [collectives(graph) for graph in graphs] == [["all_reduce"], []]


@pytest.mark.slow
@on_ranks(2, timeout=250)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_transformer_is_one_graph(sequence: bool) -> None:
    model = Transformer(ModelArgs(n_layers=1, dropout_p=0.0, vocab_size=11)).double()
    forward, backward = assert_same(
        model, dict(transformer_plan(sequence)), torch.randint(11, (3, 8))
    )
    kinds = {"all_reduce", "all_gather_into_tensor"} | (
        {"reduce_scatter_tensor"} if sequence else set()
    )
    assert {*forward, *backward} == kinds
    if not sequence:
        # Two embeddings, the rows of attention and of the feed-forward; the logits.
        assert forward == ["all_reduce"] * 4 + ["all_gather_into_tensor"]


class EightLowerings(nn.Module):
    """Modules with eight lowerings; `test_compile_sizes` traces each lowering alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.features = nn.Embedding(9, 8, padding_idx=1), nn.Embedding(9, 8)
        self.norm, self.packed, self.rows = nn.RMSNorm(8), nn.Linear(8, 24), nn.Linear(12, 8)
        self.wide, self.narrow = nn.Conv1d(8, 6, 3, padding=1), nn.Conv1d(6, 8, 1)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`(batch, length, 8)`."""
        h = self.norm(self.words(tokens) + self.features(tokens))
        gate, up = self.packed(h).chunk(2, -1)
        h = h + self.rows(torch.sigmoid(gate) * up)
        h = h + self.narrow(torch.relu(self.wide(h.transpose(1, 2)))).transpose(1, 2)
        out: torch.Tensor = h + self.down(torch.relu(self.up(h)))
        return out


@pytest.mark.slow
@on_ranks(2, timeout=250)
def test_eight_lowerings_in_one_graph_are_as_in_eager_code() -> None:
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "features": ColwiseParallel(output_layouts=Replicate()),
        "packed": PackedColwiseParallel(blocks={"gate": Heads(3, 4), "up": Heads(3, 4)}),
        "rows": RowwiseParallel().heads(3, 4),
        "wide": ColwiseParallel(),
        "narrow": RowwiseParallel(),
        "up": LoRA(base=ColwiseParallel(), rank=2, train_base=True),
        "down": LoRA(base=RowwiseParallel(), rank=2, train_base=True),
    }
    torch.manual_seed(1)
    assert_same(EightLowerings().double(), plan, torch.randint(9, (3, 4)))


@pytest.mark.slow
@on_ranks(2, timeout=250)
def test_overlap_and_sequence_layouts_are_traced() -> None:
    start = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)).double()
    plan: dict[str, Any] = {
        "0": SequenceParallel(sequence_dim=0, use_local_output=True),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "3": RowwiseParallel(output_layouts=Shard(0)).overlapped(2),
    }
    forward, backward = assert_same(start, plan, torch.randn(4, 3, 6, dtype=torch.double))
    assert forward == ["all_gather_into_tensor", "reduce_scatter_tensor"]
    assert sorted(set(backward)) == [
        "all_gather_into_tensor",
        "all_reduce",
        "reduce_scatter_tensor",
    ]


@on_ranks(2, timeout=100)
def test_checkpoints_run_their_collectives_again() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
    parallelize_module(
        module, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    x = torch.randn(4, 8, dtype=torch.double, requires_grad=True)

    def gradients(compiles: bool) -> list[Any]:
        def loss(x: torch.Tensor) -> Any:
            return checkpoint(module, x, use_reentrant=False).square().sum()

        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiles else loss
        return [*torch.autograd.grad(run(x), (x, *module.parameters()))]

    for found, expected in zip(gradients(compiles=True), gradients(compiles=False), strict=True):
        torch.testing.assert_close(
            getattr(found, "_local_tensor", found), getattr(expected, "_local_tensor", expected)
        )


@on_ranks(2, timeout=250)
def test_lengths_of_dtensors_between_modules() -> None:
    """A sequence-parallel model whose modules pass DTensors, and the loss of logits by class.

    There are two graphs.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    single = nn.Sequential(
        nn.Embedding(32, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)
    ).double()
    single.append(nn.Linear(8, 32, dtype=torch.float64))
    model = copy.deepcopy(single)
    by_sequence: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False}
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), **by_sequence),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(**by_sequence),
        "4": SequenceParallel(use_local_output=False),
        "5": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)

    def loss_of(model: nn.Module, tokens: Tensor, target: Tensor) -> Any:
        with loss_parallel():
            return nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten())

    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for batch, length in ((4, 8), (6, 12), (2, 10), (8, 6)):
        tokens, target = (
            torch.arange(2 * batch * length).mul(7).remainder(32).view(2, batch, length)
        )
        model.zero_grad()
        single.zero_grad()
        with loss_parallel():
            loss = step(model, tokens, target)
            loss.backward()
        expected = loss_of(single, tokens, target)
        expected.backward()
        torch.testing.assert_close(full_tensor(loss), expected)
        for mine, its in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(mine.grad), its.grad)
    assert counters["stats"]["unique_graphs"] == 2
