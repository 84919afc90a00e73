"""Covers: plan/resolve.py, plan/styled_module.py, plan/tied_parameters.py."""

from __future__ import annotations

import pytest
from torch import nn

from shoal_dtensor import Replicate, Shard
from shoal_mesh import abstract_mesh
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PlanError,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    TiedWeightError,
    parallelize_module,
)
from shoal_tp_styles.plan.resolve import AutoPlan, resolve
from shoal_tp_styles.plan.styled_module import axis_mesh
from small_models import MLP, ModelArgs, StackedMLP, Transformer


def test_entries_that_match_nothing_are_named() -> None:
    resolved = resolve(
        StackedMLP(), {"layers.*.net1": ColwiseParallel(), "layers.*.net9": RowwiseParallel()}
    )
    assert [use.path for use in resolved.uses] == ["layers.0.net1", "layers.1.net1"]
    (line,) = resolved.unmatched
    assert "'layers.*.net9'" in line and "'net9'" in line and "StackedMLP" in line


def test_a_wrong_plan_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"got int"):
        resolve(MLP(), 3)  # type: ignore[arg-type]  # that it is refused is the test
    with pytest.raises(
        TypeError, match=r"expected a ParallelStyle or the name of a style, got Linear"
    ):
        resolve(MLP(), {"net1": nn.Linear(1, 1)})  # type: ignore[dict-item]  # refused
    with pytest.raises(
        PlanError, match=r"unknown style 'colwize'; did you mean 'colwise'\?; known are"
    ):
        resolve(MLP(), {"net1": "colwize"})
    # as of torch, which knows no names
    with pytest.raises(TypeError, match="unknown style 'colwize'"):
        resolve(MLP(), {"net1": "colwize"})


class StyleOfTorch:
    """A class that says that it is one of torch's styles."""

    __module__ = "torch.distributed.tensor.parallel.style"


def test_what_is_no_style_is_named_with_what_to_write() -> None:
    """A class was "got ABCMeta"; torch's style had the name of the one that was expected."""
    for plan in (ColwiseParallel, {"net1": ColwiseParallel}):
        with pytest.raises(
            TypeError, match=r"the class ColwiseParallel itself; write ColwisePar.*\(\)"
        ):
            resolve(MLP(), plan)  # type: ignore[arg-type]  # that it is refused is the test
    for style in (StyleOfTorch(), StyleOfTorch):
        with pytest.raises(TypeError, match="import StyleOfTorch from shoal_tp_styles"):
            resolve(MLP(), {"net1": style})  # type: ignore[dict-item]  # refused


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("layers.*.net_1", "layers.*.net1"),
        ("layer.0.net1", "layers.0.net1"),
        ("model.layers.0.net1", "layers.0.net1"),
        ("0.net1", "layers.0.net1"),
    ],
)
def test_a_similar_key_is_suggested(key: str, suggestion: str) -> None:
    (line,) = resolve(StackedMLP(), {key: ColwiseParallel()}).unmatched
    assert line.endswith(f"; did you mean {suggestion!r}?")


def test_no_key_is_suggested_where_none_is_similar() -> None:
    (line,) = resolve(StackedMLP(), {"layers.0.attention": ColwiseParallel()}).unmatched
    assert "did you mean" not in line


def test_a_similar_argument_is_suggested() -> None:
    with pytest.raises(TypeError, match="'input_layout'; did you mean 'input_layouts'"):
        ColwiseParallel(input_layout=Replicate())  # type: ignore[call-arg]  # refused
    with pytest.raises(TypeError, match="'parallelise_plan'; did you mean 'parallelize_plan'"):
        parallelize_module(MLP(), parallelise_plan={})  # type: ignore[call-arg]  # as above


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
    agree = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": ColwiseParallel(),
    }
    resolve(model, agree).check()
    with pytest.raises(TiedWeightError, match=r"tok_embeddings.weight: .*output.weight"):
        resolve(model, {"tok_embeddings": ColwiseParallel(), "output": ColwiseParallel()}).check()


def test_a_module_that_holds_a_sharded_weight_gets_a_style_with_replicated_inputs_and_outputs() -> (
    None
):
    model = Transformer(ModelArgs(n_layers=1))
    for named, other in (("tok_embeddings", "output"), ("output", "tok_embeddings")):
        style = (
            RowwiseParallel(input_layouts=Replicate())
            if named == "tok_embeddings"
            else ColwiseParallel()
        )
        resolved = resolve(model, {named: style})
        resolved.check()
        (_, implied) = resolved.uses
        assert (
            implied.path == other
            and implied.sharding is not None
            and implied.sharding.parameters["weight"] == Shard(0)
        )
        assert implied.sharding.output_port().desired == Replicate()


def test_axes_of_a_mesh_with_several() -> None:
    mesh = abstract_mesh((2, 4), ("dp", "tp"))
    assert axis_mesh(mesh, ColwiseParallel().on("tp")).shape == (4,)
    assert axis_mesh(mesh, ColwiseParallel().on(0)).shape == (2,)
    with pytest.raises(LayoutError, match=r"name the one that the style uses: style.on\('tp'\)"):
        axis_mesh(mesh, ColwiseParallel())
    with pytest.raises(LayoutError, match=r"names 'pp'"):
        axis_mesh(mesh, ColwiseParallel().on("pp"))


def test_a_child_of_a_sharded_module_is_not_sharded_again() -> None:
    resolved = resolve(StackedMLP(), {"layers.0": SequenceParallel(), "**.net1": ColwiseParallel()})
    with pytest.raises(
        PlanError, match=r"'layers.0.net1' is sharded by two entries: 'layers.0' .* and '\*\*.net1'"
    ):
        resolved.check()


def test_one_kind_of_boundary_style_wraps_a_module_once() -> None:
    gathered = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    with pytest.raises(PlanError, match="sharded by two entries"):
        resolve(MLP(), {"net1": gathered, "net*": gathered}).check()


class LinearUnderTwoNames(nn.Module):
    """One Linear under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.bias = self.first.bias


def test_a_shared_module_needs_a_style_under_one_of_its_names() -> None:
    plan = {"second": ColwiseParallel(), "other": ColwiseParallel()}
    resolve(LinearUnderTwoNames(), plan).check()
    with pytest.raises(TiedWeightError, match=r"first.bias: .*other.bias: no style"):
        resolve(LinearUnderTwoNames(), {"second": ColwiseParallel()}).check()


def test_an_empty_plan_names_the_attribute_with_its_reasons() -> None:
    reasons = {f"layers.{number}.weight": f"reason {number}" for number in range(8)}
    plan = AutoPlan()
    plan.whole = reasons
    assert plan.why_empty.startswith(
        "the plan is empty; parameters are not sharded: layers.0.weight: reason 0; "
    )
    assert plan.why_empty.endswith("layers.5.weight: reason 5; and 2 more reasons in `whole`")
    plan.dropped = {"layers.*": "wrong", "head": "wrong"}
    assert plan.why_empty == ("the plan is empty; modules were left out: layers.*, head: wrong")
    plan.dropped = reasons
    assert plan.why_empty.endswith("reason 5; and 2 more reasons in `dropped`")
