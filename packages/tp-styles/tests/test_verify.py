"""Covers: plan/verify.py, plan/explain_difference.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PlanError,
    RowwiseParallel,
    SequenceParallel,
    verify,
)
from small_models import ModelArgs, Transformer

MESH = abstract_mesh((4,), ("tp",))


def test_the_verdict_comes_first() -> None:
    mlp, x = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), torch.randn(2, 4)
    plan = {"0": "colwise", "1": "rowwise"}
    remarks = verify(mlp, plan, MESH, x)
    assert remarks.proven and remarks.empty
    assert (
        str(remarks).startswith("the plan fits\n")
        and ">the plan fits</caption>" in remarks._repr_html_()
    )
    assert str(verify(mlp, plan, MESH)).startswith("no error was found, but the plan was not run\n")
    for wrong in (
        {"0": "colwise", "1": "colwise"},
        {"7": "colwise"},
        {"0": SequenceParallel(sequence_dim=9)},
    ):
        assert str(verify(mlp, wrong, MESH, x)).startswith("the plan does not fit\n")


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
    assert any(
        "tok_embeddings.weight: dim 0 of 10 in shards of [3, 3, 3, 1] along tp" in line
        for line in found.uneven
    )
    assert any("wq.weight" in line and "[16, 0, 0, 0]" in line for line in found.empty)
    assert any(line.startswith("output.weight (10, 16) is replicated") for line in found.unsharded)
    with pytest.raises(PlanError, match=r"unmatched: plan entry"):
        found.require()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert "expected" not in str(verify(model, {"norm": ColwiseParallel()}, MESH))
    assert not verify(model, {"norm": ColwiseParallel()}, MESH).ok


class Undeclared(ParallelStyle):
    """A style that only has `_apply`, which leaves the module as it is or shards its bias."""

    def __init__(self, shards: bool = False) -> None:
        super().__init__()
        self.shards = shards

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.shards:
            bias: Any = module.bias
            module.bias = distribute_tensor(bias, device_mesh, [Shard(0)])
        return module


def test_a_shared_parameter_that_an_undeclared_style_leaves_behind_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(2, 8)
    model[1].bias = model[0].bias
    first: dict[str, ParallelStyle | str] = {"0": ColwiseParallel(output_layouts=Replicate())}
    elsewhere = verify(model, first | {"2": Undeclared()}, MESH, x)
    assert "a parameter that is shared under 2 names must have one layout" in elsewhere.errors[0]
    on_an_owner = verify(model, first | {"1": Undeclared()}, MESH, x)
    assert on_an_owner.errors == () and "left 1.bias unchanged" in on_an_owner.wrong[0]
    assert (
        "left 0.bias unchanged" in verify(model, {"1": Undeclared(shards=True)}, MESH, x).wrong[0]
    )


class ScaledGradient(ParallelStyle):
    """A style that multiplies the weight's gradient by a number for each rank."""

    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.factors = factors

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        factor = self.factors[device_mesh.get_rank()]
        assert isinstance(module.weight, nn.Parameter)
        weight: Any = module.weight
        weight.register_hook(lambda gradient: gradient * factor)
        return module


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([0.1, 0.2, 0.3, 0.4], "missing all-reduce over tp: it is right after a sum over tp"),
        ([0.4, 0.8, 1.2, 1.6], "missing all-reduce over tp: it is right after a mean over tp"),
        ([4.0] * 4, "4 times too large: reduced twice over tp"),
        ([0.25] * 4, "4 times too small: sum taken as mean over tp"),
        ([1.0, 1.0, 1.0, 3.0], "on ranks [3]"),
    ],
)
def test_a_wrong_gradient_is_named_in_the_words_of_certify(
    factors: list[float], words: str
) -> None:
    found = verify(
        nn.Sequential(nn.Linear(4, 4)), {"0": ScaledGradient(factors)}, MESH, torch.randn(2, 4)
    )
    assert len(found.wrong) == 1
    assert found.wrong[0].startswith("the gradient of 0.weight differs from the plain model's on ")
    assert found.wrong[0].endswith(words)


def test_the_axis_of_a_wrong_gradient_is_named() -> None:
    mesh = abstract_mesh((2, 2), ("dp", "tp"))
    # (dp, tp): equal along dp, partial along tp
    style = ScaledGradient([0.25, 0.75, 0.25, 0.75]).on("tp")
    found = verify(nn.Sequential(nn.Linear(4, 4)), {"0": style}, mesh, torch.randn(2, 4))
    assert found.wrong[0].endswith("missing all-reduce over tp: it is right after a sum over tp")
