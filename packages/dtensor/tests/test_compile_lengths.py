"""Compiled programs on DTensors of changing lengths: one graph for the first, one for all others.

Covers: layout/tensor_meta.py, _torch/compiling.py, dispatch/global_call.py,
tensor/serialization.py. Forward and backward give what they give eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

import shoal_dtensor as sd
from shoal_dtensor import DTensor, Placement, Replicate, Shard, full_tensor
from shoal_dtensor._torch.compiling import sizes_in_recorder
from shoal_dtensor.layout.tensor_meta import has_symbols, hashable, settle_sizes, traced_with
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11 cannot trace through a communicator (docs/differences.md)",
)
R = Replicate()
LENGTHS = (12, 20, 28, 36, 44)
Program = Callable[[Any, Callable[..., Any]], Any]


def attention(x: Any, weight: Callable[..., Any]) -> Any:
    heads = x.redistribute(placements=[R]).view(1, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def feed_forward(x: Any, weight: Callable[..., Any]) -> Any:
    hidden: Any = F.gelu(
        F.linear(x.redistribute(placements=[R]), weight(16, 8, placement=Shard(0)))
    )
    partial: Any = F.linear(hidden, weight(8, 16, placement=Shard(1)))
    return partial.redistribute(placements=x.placements) + x


FEW: dict[str, Program] = {
    "attention": attention,
    "crossings": lambda x, _: DTensor.from_local(x.to_local() * 3, x.device_mesh, x.placements) + x,
    "feed forward": feed_forward,
    "loss": lambda x, _: F.cross_entropy(x, (x.detach() * 7).argmax(-1)),
    # (1, n, n): a square
    "scores": lambda x, _: (x.unsqueeze(0) @ x.unsqueeze(0).transpose(1, 2)).softmax(-1),
    "split": lambda x, _: x.split(2, -1)[1],
    "views": lambda x, _: x.unsqueeze(0).view(-1, 8).view(2, -1, 8)[:, :, 2:6] * 2,
}


def embed(x: Any, weight: Callable[..., Any]) -> Any:
    return F.embedding(x.detach().long().abs() % 7, weight(8, 6, placement=Shard(0))) * x.sum()


def normalize(x: Any, weight: Callable[..., Any]) -> Any:
    return F.layer_norm(x, (8,), weight(8)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


PROGRAMS: dict[str, Program] = FEW | {
    "broadcast": lambda x, _: x.unsqueeze(1).expand(-1, 3, -1) * torch.ones_like(x)[:, None],
    # its gradient has sizes too
    "blocks of four": lambda x, _: x.redistribute(placements=[R]).unflatten(0, (-1, 4)),
    "chunk": lambda x, _: x.chunk(2, -1)[1] + x[..., :4],
    "concatenation": lambda x, _: torch.cat([x, torch.stack([x, x]).sum(0)], -1),
    "dropout": lambda x, _: F.dropout(x, 0.5),
    "embedding": embed,
    "full": lambda x, _: (x * 2).mean(0).full_tensor(),
    "norms": normalize,
    "product": lambda x, weight: (x @ weight(8, 6, placement=Shard(1))).relu() * x.shape[0],
    "softmax of the sharded dim": lambda x, _: x.softmax(0),
    "transposed": lambda x, _: x.t().redistribute(placements=[R]) + x.new_zeros(x.shape).t(),
    "where": lambda x, _: torch.where(x > 0, x, 0.0),
}


def weights_of(mesh: DeviceMesh) -> Callable[..., Any]:
    """A function that gives the same weight for the same shape: compiled programs make none."""
    known: dict[Any, Any] = {}

    def weight(*shape: int, placement: Placement = R) -> Any:
        if (shape, placement) not in known:
            torch.manual_seed(len(known))
            values = torch.randn(*shape, dtype=torch.float64)
            known[shape, placement] = sd.distribute_tensor(values, mesh, [placement])
        return known[shape, placement]

    return weight


def outcome(
    program: Callable[[Any], Any], values: torch.Tensor, mesh: DeviceMesh, placement: Placement
) -> list[Any]:
    """Result and gradient, as global tensors."""
    torch.manual_seed(1)
    x: Any = sd.distribute_tensor(values, mesh, [placement]).requires_grad_()
    result = program(x)
    result.square().mean().backward()
    whole = full_tensor(result)
    return [whole.detach(), x.grad.full_tensor()]


def graphs_for(
    program: Program, mesh: DeviceMesh, placement: Placement, lengths: tuple[int, ...]
) -> int:
    """The number of graphs that a program took for some lengths.

    At each length it did what it does eagerly.
    """
    weight = weights_of(mesh)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda x: program(x, weight), backend="aot_eager", fullgraph=True)
    for length in lengths:
        values = torch.randn(
            length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(length)
        )
        expected = outcome(lambda x: program(x, weight), values, mesh, placement)
        torch.testing.assert_close(outcome(compiled, values, mesh, placement), expected)
    graphs: int = counters["stats"]["unique_graphs"]
    return graphs


@on_ranks(2, timeout=250)
def test_two_graphs_for_all_lengths() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, program in FEW.items():
        assert graphs_for(program, mesh, Shard(0), LENGTHS[:3]) == 2, name


@pytest.mark.slow
@pytest.mark.parametrize("placement", [Shard(0), R])
@on_ranks(2, timeout=600)
def test_two_graphs_for_all_lengths_of_all_programs(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, program in PROGRAMS.items():
        assert graphs_for(program, mesh, placement, LENGTHS) == 2, name


class FusedProjectionBlock(nn.Module):
    """A transformer block whose feed-forward is sharded by its weights' placements alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (part.reshape(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(32, 16),
        FusedProjectionBlock(16, 4),
        FusedProjectionBlock(16, 4),
        nn.LayerNorm(16),
        nn.Linear(16, 32),
    ).double()


def check_transformer(mesh: DeviceMesh, backend: str, samples: Placement) -> None:
    """Losses and gradients are those of one device.

    Two graphs serve three batches of other sizes and lengths.
    """
    model, single = transformer(), transformer()
    for name, parameter in [*model.named_parameters()]:
        placement = Shard(0) if ".up." in name else Shard(1) if name.endswith("down.weight") else R
        owner, _, last = name.rpartition(".")
        part = sd.distribute_tensor(parameter.detach(), mesh, [R, placement])
        model.get_submodule(owner).register_parameter(last, nn.Parameter(part))

    def loss_of(model: nn.Module, tokens: Any, target: Any) -> Any:
        return F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())

    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(loss_of, backend=backend, fullgraph=True)
    for batch, length in ((4, 8), (8, 12), (6, 10)):
        both = torch.arange(2 * batch * length).mul(7).remainder(32).view(2, batch, length)
        tokens, target = (
            sd.distribute_tensor(values.contiguous(), mesh, [samples, R]) for values in both
        )
        model.zero_grad()
        single.zero_grad()
        loss, expected = step(model, tokens, target), loss_of(single, *both)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for mine, its in zip(model.parameters(), single.parameters(), strict=True):
            grad: Any = mine.grad
            torch.testing.assert_close(grad.full_tensor(), its.grad)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@on_ranks(4, timeout=280)
def test_a_transformer_over_two_axes() -> None:
    check_transformer(
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "aot_eager", Shard(0)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@on_ranks(2, timeout=850)
def test_ranks_compile_to_the_same_collectives() -> None:
    """Inductor drops what nothing needs.

    A replicated residual beside a partial sum is needed on one rank only.
    """
    check_transformer(init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), "inductor", R)


@on_ranks(3, timeout=250)
def test_uneven_lengths_are_constants() -> None:
    mesh = init_device_mesh("cpu", (3,))
    lengths = (12, 20, 13, 2)
    assert graphs_for(PROGRAMS["product"], mesh, Shard(0), lengths) == len(lengths)
    assert graphs_for(PROGRAMS["product"], mesh, R, lengths) == 2

    def columns(x: Any, _: Any) -> Any:
        """Shard 8 columns as 3, 3 and 2."""
        return x.redistribute(placements=[Shard(1)]) * 2

    assert graphs_for(columns, mesh, Shard(0), (12, 18, 21)) == 3, (
        "blocks of several sizes go to all"
    )


@pytest.mark.parametrize("name", ["repeat", "cat", "roll", "sums"])
@on_ranks(3, timeout=250)
def test_uneven_rows_of_any_length_are_exchanged(name: str) -> None:
    """Rows 2, 2, 1 move, some only in backward, too late to make their length constant."""
    programs: dict[str, Callable[[Any], Any]] = {
        "repeat": lambda x: x.repeat(2, 1, 1),
        "cat": lambda x: torch.cat([x, x * 2]),
        "roll": lambda x: x.roll(1, 0) * 2,
        "sums": lambda x: x.repeat(2, 1, 1).sum(0) + x.sum(1, keepdim=True),
    }
    mesh = init_device_mesh("cpu", (3,))
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(programs[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (8, 11):
        whole = torch.arange(20.0 * length, dtype=torch.double).view(5, length, 4).requires_grad_()
        x = sd.distribute_tensor(
            whole.detach(), mesh, [Shard(0)], src_data_rank=None
        ).requires_grad_()
        got, expected = compiled(x), programs[name](whole)
        torch.testing.assert_close(got.full_tensor(), expected)
        (got * got).sum().backward()
        (expected * expected).sum().backward()
        assert x.grad is not None
        grad: Any = x.grad
        torch.testing.assert_close(grad.full_tensor(), whole.grad)
    assert counters["stats"]["unique_graphs"] == 1


def test_what_a_sequence_folds_is_a_constant() -> None:
    """(batch, sequence, 8) -> (batch * sequence, 8), sequence sharded.

    There are `batch` runs, which placements count.
    """

    def program(x: Any) -> Any:
        return x.view(-1, 8) * 2

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        torch._dynamo.reset()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        for batch, length in ((4, 12), (6, 20), (8, 28)):
            x = sd.distribute_tensor(torch.randn(batch, length, 8), mesh, [Shard(1)])
            assert compiled(x)._spec is program(x)._spec


def test_a_stride_of_constant_sizes_may_be_a_symbol() -> None:
    """(2, length, width) summed over the length, one column of it: sizes (2,), stride (width,)."""

    def program(x: Any) -> list[Any]:
        return [x * 1, x.detach().sum(1).select(1, 2)]

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
        for length, width in ((4, 5), (6, 7)):
            x = sd.distribute_tensor(
                torch.randn(2, length, width), mesh, [Shard(0)], src_data_rank=None
            )
            got, expected = compiled(x.requires_grad_())[1], program(x)[1]
            assert (
                torch.equal(got.to_local(), expected.to_local())
                and got.stride() == expected.stride()
            )
    assert counters["stats"]["unique_graphs"] == 1


def test_random_numbers_of_one_device_for_any_length() -> None:
    def program(x: Any) -> Any:
        return torch.nn.init.uniform_(torch.empty_like(x))

    for rank in range(2):
        with fake_world(2, rank=rank):
            mesh = init_device_mesh("cpu", (2,))
            torch._dynamo.reset()
            compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
            for length in LENGTHS:
                x = sd.zeros(length, 3, device_mesh=mesh, placements=[Shard(0)])
                torch.manual_seed(length)
                expected = torch.empty(length, 3).uniform_().chunk(2)[rank]
                torch.manual_seed(length)
                torch.testing.assert_close(compiled(x).to_local(), expected, rtol=0, atol=0)


def test_out_of_range_indices_of_compiled_code_raise_when_it_runs() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        table = sd.zeros(8, 3, device_mesh=mesh, placements=[Shard(0)])
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda index: F.embedding(index, table), backend="aot_eager", fullgraph=True
        )
        for length in LENGTHS[:3]:
            assert compiled(sd.zeros(length, dtype=torch.int64, device_mesh=mesh)).shape == (
                length,
                3,
            )
        with pytest.raises(RuntimeError, match="out of bounds for a dim of 8"):
            compiled(sd.full((20,), 8, device_mesh=mesh))


def test_eager_code_between_graphs_is_not_compiled() -> None:
    def program(x: Any) -> Any:
        torch._dynamo.graph_break()
        return [(x + n).softmax(-1) for n in range(2)]

    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = sd.ones(4, 8, device_mesh=mesh, placements=[Shard(0)])
        torch._dynamo.reset()
        counters.clear()
        torch.compile(lambda x: [part.exp() for part in program(x)], backend="eager")(x)
    assert counters["stats"]["unique_graphs"] <= 2, (
        "the program after its break; not what its operators run"
    )


def test_a_symbol_of_several_factors_is_computed_from_all_of_them() -> None:
    """Torch's own recorder makes `a * b` of `a * b * c`, and knows no powers."""

    def sizes(x: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():  # out of the recorder's sight
            a, b, c = x.shape
            symbolic_max: Any = torch.sym_max
            unseen = [a * b * c, a * a, a + b + c, symbolic_max(a, b) // 2]

        return x.new_zeros(sizes_in_recorder(unseen))

    graph = make_fx(sizes, tracing_mode="symbolic")(torch.ones(2, 3, 5))
    assert graph(torch.ones(3, 4, 5)).shape == (60, 9, 12, 2)
    assert graph(torch.ones(7, 2, 3)).shape == (42, 49, 12, 3)


def test_symbols_are_keys_and_examples() -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        seen.append(
            (
                has_symbols([1, (2, [n])]),
                has_symbols([1, (2, 3)]),
                traced_with((n, 4)),
                bool(n == 6),
                settle_sizes((n,)),
            )
        )
        seen.append({hashable((n, 4)), hashable((x.shape[0] * 1, 4)), hashable((n + 1, 4))})
        return x

    make_fx(look, tracing_mode="symbolic")(torch.ones(6, 1))
    (nested, plain, traced, _, constant), keys = seen
    assert (nested, plain, traced, constant, len(keys)) == (True, False, (6, 4), (6,), 2)
    assert type(constant[0]) is int
