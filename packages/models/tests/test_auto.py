"""Covers: planning/auto.py, planning/recipes.py."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import Replicate
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import auto_plan, format_plan
from shoal_tp_styles import (
    ColwiseParallel,
    OwnParameters,
    PackedColwiseParallel,
    PlanError,
    RowwiseParallel,
    SequenceParallel,
    UnmatchedPlanWarning,
    parallelize_module,
)
from small_gpt import Gpt


def two_mlps() -> nn.Sequential:
    """`(..., 10)` in and out."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10)) for _ in range(2))
    )


def test_auto_plan_of_known_shapes() -> None:
    plan = auto_plan(Gpt())
    assert plan["layers.*.attention.wq"] == ColwiseParallel()
    assert plan["layers.*.attention.wo"] == plan["layers.*.feed_forward.w2"] == RowwiseParallel()
    assert plan["tok_embeddings"] == RowwiseParallel(input_layouts=Replicate())
    assert "norm" not in plan
    unnamed = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    assert auto_plan(unnamed) == {"*.*": ColwiseParallel()} or set(auto_plan(unnamed)) == {
        "0.0",
        "0.2",
    }
    assert (
        eval(
            format_plan(plan),
            {
                "ColwiseParallel": ColwiseParallel,
                "RowwiseParallel": RowwiseParallel,
                "Replicate": Replicate,
            },
        )
        == plan
    )


class NamesOfGpt2(nn.Module):
    """GPT-2's names: a fused projection, whose blocks no name says, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(8, 32), nn.Linear(32, 8)


class NamesOfBert(nn.Module):
    """BERT's names: `dense` in a module of its own, beside the one that holds the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.intermediate, self.output = nn.Module(), nn.Module(), nn.Module()
        inner = nn.Module()
        inner.query, inner.key, inner.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        out = nn.Module()
        out.dense = nn.Linear(8, 8)
        self.attention.self, self.attention.output = inner, out
        self.intermediate.dense, self.output.dense = nn.Linear(8, 32), nn.Linear(32, 8)


def test_roles_by_the_usual_names() -> None:
    plan = auto_plan(NamesOfGpt2())
    assert (
        plan["attn.c_attn"] == PackedColwiseParallel(blocks=3)
        and plan["attn.c_proj"] == RowwiseParallel()
    )
    assert plan["mlp.c_fc"] == ColwiseParallel() and plan["mlp.c_proj"] == RowwiseParallel()
    plan = auto_plan(NamesOfBert())
    assert plan["attention.self.query"] == plan["intermediate.dense"] == ColwiseParallel()
    assert plan["attention.output.dense"] == plan["output.dense"] == RowwiseParallel()


class BlockOfFourHeads(nn.Module):
    """Attention with its own number of heads, or a norm of sharded queries, and a feed-forward."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = (
            nn.Module(),
            nn.Module(),
            nn.RMSNorm(4) if norm else None,
        )
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self.attention, name, nn.Linear(16, 16))
        self.mlp.up_proj, self.mlp.down_proj = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        own: Any = self.attention
        mlp: Any = self.mlp
        heads = 4 if self.norm is None else -1
        q, k, v = (
            each(x).view(*x.shape[:2], heads, 4).transpose(1, 2)
            for each in (own.q_proj, own.k_proj, own.v_proj)
        )
        out = functional.scaled_dot_product_attention(
            q if self.norm is None else self.norm(q), k, v
        )
        x = x.add(own.o_proj(out.transpose(1, 2).flatten(2)))
        return x.add(mlp.down_proj(mlp.up_proj(x).relu()))


@pytest.mark.parametrize("norm", [False, True])
def test_blocks_that_compute_something_else_are_gathered(norm: bool) -> None:
    mesh, x = abstract_mesh((4,)), torch.randn(2, 8, 16)
    plan = auto_plan(BlockOfFourHeads(norm), mesh, x)
    gathered = {
        f"attention.{name}_proj": ColwiseParallel(output_layouts=Replicate()) for name in "qkvo"
    }
    assert plan == {
        **gathered,
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    assert set(plan.dropped) == set(gathered)
    assert ("norm.weight" if norm else "does not run") in plan.dropped["attention.q_proj"]
    assert plan.proven_for == (4,) and not plan.whole


class Counted(BlockOfFourHeads):
    """Attention that reshapes by its own attribute, a number of heads, and a learned activation."""

    def __init__(self) -> None:
        super().__init__(norm=False)
        self.attention = Attention()
        self.mlp.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        mlp: Any = self.mlp
        x = x.add(self.attention(x))
        return x.add(mlp.down_proj(mlp.act(mlp.up_proj(x))))


class Attention(nn.Module):
    """Four heads with a sink each, by its own counts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.all_head_size, self.layer = 4, 16, nn.Parameter(torch.randn(9, 9))
        self.sinks = nn.Parameter(torch.randn(4))
        self.qkv, self.o_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
            for t in self.qkv(x).split(self.all_head_size, -1)
        )
        out = functional.scaled_dot_product_attention(q, k, v) * self.sinks[:, None, None]
        return cast(
            Tensor,
            self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size))
            + self.layer.sum(),
        )


def test_counts_sinks_packed_projections_and_learned_activations_are_known() -> None:
    plan = auto_plan(Counted(), abstract_mesh((4,)), torch.randn(2, 8, 16))
    assert plan["attention"] == OwnParameters(
        dims={"sinks": 0}, counts=("num_heads", "all_head_size")
    )
    assert (
        plan["attention.qkv"] == PackedColwiseParallel(blocks=3)
        and plan["attention.o_proj"] == RowwiseParallel()
    )
    assert plan["mlp.act"] == SequenceParallel(use_local_output=True)
    assert [*plan.whole] == [
        "attention.layer"
    ] and "the forward of Attention reads it" in plan.whole["attention.layer"]
    assert "counts=('num_heads', 'all_head_size')" in format_plan(plan)


class TiedVocabulary(nn.Module):
    """A vocabulary whose weight and bias are shared, one of them with the module above the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.top = nn.Embedding(13, 6), nn.Module()
        self.top.decoder = nn.Linear(6, 13)
        self.top.decoder.weight, self.top.bias = self.tok.weight, self.top.decoder.bias

    def get_input_embeddings(self) -> nn.Module:
        """As transformers' models have it."""
        return self.tok

    def forward(self, tokens: Tensor) -> Tensor:
        top: Any = self.top
        return cast(Tensor, top.decoder(self.tok(tokens)))


def test_a_vocabulary_is_sharded_with_all_that_shares_its_parameters() -> None:
    plan = auto_plan(TiedVocabulary(), abstract_mesh((4,)), torch.randint(13, (2, 5)))
    assert {*plan} == {"tok", "top", "top.decoder"} and not plan.dropped and not plan.whole
    assert plan["top"] == OwnParameters(dims={"bias": 0})


def test_a_models_own_plan_comes_first() -> None:
    model: Any = two_mlps()
    model.tp_plan = {
        "*.0": "colwise_gather_output",
        "*.2": "rowwise_split_input",
        "gone": "colwise",
    }
    plan = auto_plan(model, abstract_mesh((4,)), torch.randn(3, 10))
    assert plan["*.0"] == ColwiseParallel(output_layouts=Replicate()) and len(plan) == 2
    model.tp_plan = {"*.0": "colwise", "*.2": "colwise"}  # wrong
    assert auto_plan(model, abstract_mesh((4,)), torch.randn(3, 10)) == auto_plan(two_mlps())


@on_ranks(4)
def test_only_a_proven_automatic_plan_is_applied() -> None:
    mesh, model, x = init_device_mesh("cpu", (4,)), two_mlps(), torch.randn(3, 10)
    with pytest.raises(PlanError, match=r"proven for None, but the mesh is \(4,\)"):
        parallelize_module(model, mesh, auto_plan(model))
    with pytest.raises(PlanError, match=r"proven for \(2,\)"):
        parallelize_module(model, mesh, auto_plan(model, abstract_mesh((2,)), x))
    expected = model(x)
    torch.testing.assert_close(
        parallelize_module(model, mesh, auto_plan(model, mesh, x))(x), expected
    )
    parallelize_module(two_mlps(), mesh, dict(auto_plan(model)))


class Broken(nn.Sequential):
    """A model that does not run."""

    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("one half of nothing")


@on_ranks(2)
def test_an_empty_plan_says_what_kept_each_module_out() -> None:
    # It was returned without a warning, and `parallelize_module` asked for example inputs.
    model = Broken(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
    mesh = init_device_mesh("cpu", (2,))
    with pytest.warns(UnmatchedPlanWarning, match=r"left out: 0, 2: .*one half of nothing"):
        plan = auto_plan(model, mesh, torch.randn(3, 10))
    assert not plan and "one half of nothing" in plan.why_empty
    with pytest.raises(PlanError, match=r"left out: 0, 2: .*one half of nothing"):
        parallelize_module(model, mesh, plan)


class Decoder(nn.Module):
    """Block that reads its convolution's weight to decode, like transformers' recurrent blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1, groups=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x) if x.shape[-1] > 1 else x * self.conv.weight[:, 0, 1:2]
        return out


def test_parameters_that_a_parent_reads_stay_whole() -> None:
    with pytest.warns(UnmatchedPlanWarning, match="the code of Decoder reads it directly"):
        plan = auto_plan(nn.Sequential(Decoder()), abstract_mesh((2,)), torch.randn(2, 8, 5))
    assert plan == {} and plan.whole == {
        "0.conv.weight": "the code of Decoder reads it directly, so it stays whole"
    }
    alone = auto_plan(
        nn.Sequential(nn.Conv1d(8, 8, 3, groups=8)), abstract_mesh((2,)), torch.randn(2, 8, 5)
    )
    assert [*alone] == ["0"]
