"""Plans that names and shapes cannot judge, run on simulated ranks.  Covers: plan/verify.py."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import Partial, Replicate, Shard
from shoal_mesh import abstract_mesh
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    PackedColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    verify,
)
from shoal_tp_styles.plan.verify import MOST_PARAMETERS
from small_models import MLP, ModelArgs, Transformer, transformer_plan

MESH = abstract_mesh((4,), ("tp",))
HEAD_DIM = 4


class CountsHeads(nn.Module):
    """Grouped-query attention that reads its number of heads off activations, or has its own."""

    def __init__(
        self, heads: int, kv_heads: int, own_count: bool = False, norm: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.own_count = heads, kv_heads, own_count
        dim = heads * HEAD_DIM
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, kv_heads * HEAD_DIM)
        self.v_proj, self.o_proj = nn.Linear(dim, kv_heads * HEAD_DIM), nn.Linear(dim, dim)
        self.q_norm = nn.RMSNorm(HEAD_DIM) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.own_count:
            q = q.view(batch, -1, self.heads, HEAD_DIM)
            k, v = (each.view(batch, -1, self.kv_heads, HEAD_DIM) for each in (k, v))
        else:
            q, k, v = (each.view(batch, length, -1, HEAD_DIM) for each in (q, k, v))
        k, v = (each.repeat_interleave(q.shape[2] // each.shape[2], 2) for each in (k, v))
        by_head = [each.transpose(1, 2) for each in (self.q_norm(q), k, v)]
        out = functional.scaled_dot_product_attention(
            by_head[0], by_head[1], by_head[2], is_causal=True
        )
        out = out.transpose(1, 2).reshape(batch, -1, q.shape[2] * HEAD_DIM)
        if self.own_count and out.shape[1] != length:
            # the positions were taken for heads: values of other tokens
            out = out.reshape(batch, length, -1)
        return self.o_proj(out)  # type: ignore[no-any-return]  # torch


class AddsBias(nn.Module):
    """Two products, and a bias of zeros that every rank adds to its summand of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)) + self.bias  # type: ignore[no-any-return]  # torch


def plan(heads: int = 0, kv_heads: int = 0) -> dict[str, Any]:
    if not heads:
        return {"[qkv]_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    kv = ColwiseParallel().heads(kv_heads, HEAD_DIM)
    return {
        "q_proj": ColwiseParallel().heads(heads, HEAD_DIM),
        "[kv]_proj": kv,
        "o_proj": RowwiseParallel().heads(heads, HEAD_DIM),
    }


PROVEN: dict[str, tuple[nn.Module, Any, Any]] = {
    "MLP": (MLP(), MLP.plan, torch.randn(3, 10)),
    "transformer": (Transformer(ModelArgs()), transformer_plan(), torch.randint(8, (2, 8))),
    "sequence": (Transformer(ModelArgs()), transformer_plan(True), torch.randint(8, (2, 8))),
    "heads": (CountsHeads(8, 4), plan(), torch.randn(2, 3, 32)),
    "replicated heads": (CountsHeads(8, 2), plan(8, 2), torch.randn(2, 3, 32)),
    "sharded output": (nn.Sequential(nn.Linear(4, 8)), {"0": ColwiseParallel()}, torch.randn(3, 4)),
    "uneven": (
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)),
        {"0": "colwise", "1": "rowwise"},
        torch.randn(3, 4),
    ),
}
WRONG: dict[str, tuple[nn.Module, Any, Any, str]] = {
    "own number of heads": (
        CountsHeads(4, 4, own_count=True),
        plan(),
        torch.randn(2, 8, 16),
        "differs|does not run",
    ),
    "norm of sharded queries": (
        CountsHeads(4, 4, norm=True),
        plan(),
        torch.randn(2, 8, 16),
        "gradient of q_norm.weight",
    ),
    "12 query and 6 key heads": (
        CountsHeads(12, 6),
        plan(12, 6),
        torch.randn(2, 3, 48),
        "differs|does not run",
    ),
    "a sum left out": (
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
        {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))},
        torch.randn(3, 4),
        "does not run",
    ),
    "a bias of zeros on every rank": (
        AddsBias(),
        {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Partial()),
            "": PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
        },
        torch.randn(3, 4),
        "output 0 .* differs",
    ),
    "a norm on replicated activations": (
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)),
        {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "1": SequenceParallel(sequence_dim=0, use_local_output=True),
        },
        torch.randn(4, 4),
        "gradient of 1.weight",
    ),
}


@pytest.mark.parametrize("name", PROVEN)
def test_plans_that_compute_the_same_are_proven(name: str) -> None:
    model, styles, inputs = PROVEN[name]
    before = copy.deepcopy(model.state_dict())
    verdict = verify(model, styles, MESH, inputs)
    assert verdict.proven, verdict
    assert type(next(model.parameters())) is nn.Parameter
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", WRONG)
def test_plans_that_compute_something_else_are_wrong(name: str) -> None:
    model, styles, inputs, message = WRONG[name]
    verdict = verify(model, styles, MESH, inputs)
    assert not verdict.ok and not verdict.proven
    assert any(re.search(message, line) for line in verdict.wrong), verdict


def test_what_was_not_run_is_not_proven() -> None:
    assert "give example inputs" in verify(MLP(), MLP.plan, MESH).unproven[0]
    assert "meta device" in verify(MLP("meta"), MLP.plan, MESH, torch.randn(3, 10)).unproven[0]
    assert (
        "the plain model does not run"
        in verify(MLP(), MLP.plan, MESH, torch.randn(3, 9)).unproven[0]
    )
    large = nn.Sequential(nn.Linear(1, MOST_PARAMETERS, bias=False))
    assert "too much" in verify(large, {"0": "colwise"}, MESH, torch.ones(1, 1)).unproven[0]
    assert not verify(MLP(), MLP.plan, MESH).proven


@pytest.mark.parametrize(
    ("styles", "problem"),
    [
        ({"net1": 3}, "expected a ParallelStyle"),
        ({"net1": ColwiseParallel().heads(3, 5)}, "need 15 features"),
        ({"net1": ColwiseParallel().on("pp")}, "names 'pp'"),
        ({"net2": RowwiseParallel().heads(2, 8)}, "2 heads cannot be sharded"),
        ({"relu": ColwiseParallel()}, "does not support ReLU"),
    ],
)
def test_verify_reports_and_never_raises(styles: Any, problem: str) -> None:
    verdict = verify(MLP(), styles, MESH, torch.randn(3, 10))
    assert problem in verdict.errors[0] and not verdict.proven
    assert "errors: " in repr(verdict) and "<td>errors</td>" in verdict._repr_html_()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.inner(x) + self.own
        return total


def test_a_plan_that_does_not_run_is_told_with_the_line_of_the_model() -> None:
    found = verify(
        nn.Sequential(Residual()), {"0.inner": ColwiseParallel()}, MESH, torch.randn(3, 8)
    ).wrong[0]
    line = Residual.forward.__code__.co_firstlineno + 1
    assert found.endswith(f" (test_trial.py:{line}, in Residual.forward)")


def test_random_numbers_are_those_of_one_device_in_training_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = {"self_attn": HeadParallel(), "linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    layer, x = (
        nn.TransformerEncoderLayer(8, 4, 16, dropout=0.3, batch_first=True),
        torch.randn(3, 5, 8),
    )
    before = torch.get_rng_state()
    found = verify(layer, plan, MESH, x)
    assert found.proven and layer.training
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(
        "shoal_tp_styles.lowering.collective_functions.with_memory_order_of",
        lambda like, tensor: tensor,
    )
    # what is drawn fills memory in another order
    found = verify(layer, plan, MESH, x)
    assert found.wrong and all(
        line.endswith("in training mode, with random numbers") for line in found.wrong
    )
    assert not verify(nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0), plan, MESH, x).wrong


class DrawsByPython(nn.Module):
    """Draws by Python between two layers, in training mode as models of speech draw their masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(self.first(x))
        return self.second(hidden * random.random() if self.training else hidden)


def test_draws_by_python_are_seeded_on_each_simulated_rank() -> None:
    # Ranks that take turns shared the state of Python's generator, and a right plan was refuted.
    gathered = ColwiseParallel(output_layouts=Replicate())
    state = random.getstate()
    found = verify(
        DrawsByPython(), {"first": gathered, "second": gathered}, MESH, torch.randn(3, 8)
    )
    assert found.proven, found
    assert random.getstate() == state


class ChangesItsInput(nn.Linear):
    """Sets `requires_grad` of a view of its input in training mode, as Wav2Vec2 does."""

    def forward(self, x: Tensor) -> Tensor:
        view = x[:, None]
        view.requires_grad = True
        return functional.dropout(super().forward(view), 0.3, self.training)


def test_a_model_that_takes_no_inputs_with_gradients_is_proven() -> None:
    # The trial gave every floating-point input a gradient, so that the plain model did not run.
    found = verify(
        ChangesItsInput(8, 8), ColwiseParallel(output_layouts=Replicate()), MESH, torch.randn(3, 8)
    )
    assert found.proven, found


class TwoTowers(nn.Module):
    """A second tower that runs only where it gets an input."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.vision = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, text: Tensor, vision: Tensor | None = None) -> Tensor:
        out: Tensor = self.text(text)
        return out if vision is None else out + self.vision(vision)


def test_an_entry_that_the_inputs_do_not_reach_is_not_proven() -> None:
    # A tower that did not run had no gradients in either model, and its plan was called right.
    gathered, x = ColwiseParallel(output_layouts=Replicate()), torch.randn(3, 8)
    plan = {"text": gathered, "vision": ColwiseParallel()}
    found = verify(TwoTowers(), plan, MESH, x)
    assert found.ok and found.unproven == (
        "'vision' was not run, because these inputs do not reach its parameters",
    )
    assert verify(TwoTowers(), plan, MESH, x, x).wrong


def test_random_numbers_of_other_libraries_and_refusals_leave_a_plan_unproven() -> None:
    system = random.SystemRandom()

    class DrawsFromTheSystem(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            rows = super().forward(x)  # type: ignore[no-untyped-call]  # of torch
            out = functional.dropout(rows, 0.3, self.training)
            return out * system.random() if self.training else out

    class ProductOfThreeBlocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.drop, self.out = nn.Linear(8, 24), nn.Dropout(0.3), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            q, k, v = self.drop(self.qkv(x)).chunk(3, -1)
            return self.out(q * k * v)

    x = torch.randn(3, 8)
    found = verify(
        DrawsFromTheSystem(nn.Linear(8, 8)),
        {"0": ColwiseParallel(output_layouts=Replicate())},
        MESH,
        x,
    )
    assert found.ok and re.search(
        "the plain model computes different results with the same seed in training mode",
        found.unproven[0],
    )
    found = verify(
        ProductOfThreeBlocks(),
        {"qkv": PackedColwiseParallel(blocks=3), "out": RowwiseParallel()},
        MESH,
        x,
    )
    assert found.ok and re.search("does not run in training mode.*LayoutError", found.unproven[0])
