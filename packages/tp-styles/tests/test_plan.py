"""Plans without a process group.  Covers: plan.py, names.py, findings.py, auto.py, style.py, linear.py, prepare.py."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh import abstract_mesh
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    ParallelStyle,
    PlanError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    TiedWeightError,
    UnsupportedModuleError,
    auto_plan,
    format_plan,
    parallelize_module,
    verify,
)
from shoal_tp_styles.plan import axis_mesh, resolve
from shoal_tp_styles.testing import MLP, ModelArgs, StackedMLP, Transformer

MESH = abstract_mesh((4,), ("tp",))


def test_styles_are_values() -> None:
    assert ColwiseParallel() == ColwiseParallel()
    assert ColwiseParallel() != ColwiseParallel(use_local_output=False)
    assert ColwiseParallel().on("tp") != ColwiseParallel()
    assert hash(RowwiseParallel()) == hash(RowwiseParallel())
    with pytest.raises(dataclasses.FrozenInstanceError):
        ColwiseParallel().use_local_output = False  # type: ignore[misc]  # that it is refused is the test


def test_every_style_is_refused_where_it_makes_no_sense() -> None:
    with pytest.raises(
        UnsupportedModuleError, match=r"ColwiseParallel has no sharding for LayerNorm; it supports Linear"
    ):
        ColwiseParallel().sharding(nn.LayerNorm(4))
    with pytest.raises(UnsupportedModuleError, match=r"RowwiseParallel"):
        resolve(nn.Sequential(nn.ReLU()), {"0": RowwiseParallel()})


def test_layouts_of_different_lengths_are_refused_at_construction() -> None:
    with pytest.raises(LayoutError, match=r"same length, got 1 .* and 2"):
        PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), Replicate()))
    with pytest.raises(LayoutError, match=r"same length"):
        PrepareModuleOutput(output_layouts=(Shard(0), None), desired_output_layouts=(Replicate(),))
    with pytest.raises(LayoutError, match=r"without desired"):
        PrepareModuleInput(input_layouts=Shard(0))
    with pytest.raises(LayoutError, match=r"input_kwarg_layouts"):
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={})
    with pytest.raises(LayoutError, match=r"same length"):
        PrepareModuleInputOutput(
            input_layouts=(Shard(0), None),
            desired_input_layouts=(Replicate(),),
            output_layouts=Replicate(),
            desired_output_layouts=Shard(0),
        )


def test_entries_that_match_nothing_are_named() -> None:
    resolved = resolve(StackedMLP(), {"layers.*.net1": ColwiseParallel(), "layers.*.net9": RowwiseParallel()})
    assert [use.path for use in resolved.uses] == ["layers.0.net1", "layers.1.net1"]
    (line,) = resolved.unmatched
    assert "'layers.*.net9'" in line and "'net9'" in line and "StackedMLP" in line


def test_a_wrong_plan_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"got int"):
        resolve(MLP(), 3)  # type: ignore[arg-type]  # that it is refused is the test
    with pytest.raises(TypeError, match=r"expected a ParallelStyle or the name of one, got Linear"):
        resolve(MLP(), {"net1": nn.Linear(1, 1)})  # type: ignore[dict-item]  # that it is refused is the test
    with pytest.raises(PlanError, match=r"unknown style 'colwize'; known are .*colwise"):
        resolve(MLP(), {"net1": "colwize"})


def test_no_mesh_is_an_error_and_no_plan_a_warning() -> None:
    with pytest.raises(LayoutError, match=r"no device_mesh"):
        parallelize_module(MLP(), None, {"net1": ColwiseParallel()})
    with pytest.warns(UserWarning, match=r"no plan"):
        parallelize_module(MLP(), MESH)


def test_names_are_styles() -> None:
    uses = resolve(MLP(), {"net1": "colwise", "net2": "rowwise"}).uses
    assert [use.style for use in uses] == [ColwiseParallel(), RowwiseParallel()]


def test_two_entries_for_one_module_are_refused() -> None:
    resolved = resolve(MLP(), {"net1": ColwiseParallel(), "net*": RowwiseParallel()})
    with pytest.raises(PlanError, match=r"'net1' is sharded by two entries: 'net1' .* and 'net\*'"):
        resolved.check()
    both = {
        "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
        "net1": ColwiseParallel(),
    }
    resolve(MLP(), both).check()


def test_tied_weights_must_agree() -> None:
    model = Transformer(ModelArgs(n_layers=1))
    agree = {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel()}
    resolve(model, agree).check()
    with pytest.raises(TiedWeightError, match=r"tok_embeddings.weight: .*output.weight"):
        resolve(model, {"tok_embeddings": ColwiseParallel(), "output": ColwiseParallel()}).check()
    with pytest.raises(TiedWeightError, match=r"output.weight: no style"):
        resolve(model, {"tok_embeddings": RowwiseParallel(input_layouts=Replicate())}).check()


def test_axes_of_a_mesh_with_several() -> None:
    mesh = abstract_mesh((2, 4), ("dp", "tp"))
    assert axis_mesh(mesh, ColwiseParallel().on("tp")).shape == (4,)
    assert axis_mesh(mesh, ColwiseParallel().on(0)).shape == (2,)
    with pytest.raises(LayoutError, match=r"say which one the style uses: style.on\('tp'\)"):
        axis_mesh(mesh, ColwiseParallel())
    with pytest.raises(LayoutError, match=r"names 'pp'"):
        axis_mesh(mesh, ColwiseParallel().on("pp"))


def test_verify_finds_everything_without_a_process_group() -> None:
    model = Transformer(ModelArgs(n_layers=1, vocab_size=10, weight_tying=False))
    before = copy.deepcopy(model.state_dict())
    plan: dict[str, ParallelStyle | str] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention.w[qkv]": ColwiseParallel().aligned(16),
        "layers.*.attention.w0": RowwiseParallel(),
        "norm": SequenceParallel(),
    }
    found = verify(model, plan, MESH)
    assert not found.ok and not found.errors
    assert "'layers.*.attention.w0'" in found.unmatched[0]
    assert any("tok_embeddings.weight: dim 0 of 10 in parts of [3, 3, 3, 1] along tp" in line for line in found.uneven)
    assert any("wq.weight" in line and "[16, 0, 0, 0]" in line for line in found.empty)
    assert any(line.startswith("output.weight (10, 16) stays whole") for line in found.unsharded)
    with pytest.raises(PlanError, match=r"unmatched: plan entry"):
        found.require()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "expected" not in str(verify(model, {"norm": ColwiseParallel()}, MESH))
    assert not verify(model, {"norm": ColwiseParallel()}, MESH).ok


def test_auto_plan_of_known_shapes() -> None:
    plan = auto_plan(Transformer(ModelArgs()))
    assert plan["layers.*.attention.wq"] == ColwiseParallel()
    assert plan["layers.*.attention.wo"] == plan["layers.*.feed_forward.w2"] == RowwiseParallel()
    assert plan["tok_embeddings"] == RowwiseParallel(input_layouts=Replicate())
    assert "norm" not in plan
    unnamed = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    assert auto_plan(unnamed) == {"*.*": ColwiseParallel()} or set(auto_plan(unnamed)) == {"0.0", "0.2"}
    assert (
        eval(
            format_plan(plan),
            {"ColwiseParallel": ColwiseParallel, "RowwiseParallel": RowwiseParallel, "Replicate": Replicate},
        )
        == plan
    )


class Fused(nn.Module):
    """GPT-2's names: a fused projection that no name tells how to cut, then rows."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp.c_fc, self.mlp.c_proj = nn.Linear(8, 32), nn.Linear(32, 8)


class Bert(nn.Module):
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


def test_rows_that_no_columns_feed_read_whole_activations() -> None:
    plan = auto_plan(Fused())
    assert "attn.c_attn" not in plan
    assert plan["attn.c_proj"] == RowwiseParallel(input_layouts=Replicate())
    assert plan["mlp.c_fc"] == ColwiseParallel() and plan["mlp.c_proj"] == RowwiseParallel()
    plan = auto_plan(Bert())
    assert plan["attention.self.query"] == plan["intermediate.dense"] == ColwiseParallel()
    assert plan["attention.output.dense"] == plan["output.dense"] == RowwiseParallel()
