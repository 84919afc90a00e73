"""Covers: __main__.py: preview and verify from a command line, without ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch import Tensor, nn

from shoal_models.__main__ import _mesh, main
from shoal_tp_styles import ColwiseParallel, RowwiseParallel


class Mlp(nn.Module):
    """`(..., 10)` in and out."""

    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(10, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.net1(x).relu())
        return out


MLP, PLAN = f"{__name__}:Mlp", f"{__name__}:Mlp.plan"


def test_preview_prints_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", MLP, PLAN, "4", "--input", "8x10"]) == 0
    assert "all_reduce 320 B" in capsys.readouterr().out
    assert main(["preview", MLP, PLAN, "4"]) == 2
    assert "--input" in capsys.readouterr().err


def test_verify_runs_a_plan_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "verify",
                MLP,
                '{"net1": "colwise", "net2": "rowwise"}',
                "data=2,tensor=2",
                "--input",
                "8x10",
            ]
        )
        == 0
    )
    assert "the plan fits" in capsys.readouterr().out
    assert main(["verify", MLP, '{"net9": "colwise"}', "2"]) == 1
    assert "unmatched: plan entry 'net9'" in capsys.readouterr().out
    assert main(["verify", MLP, "auto", "2", "--input", "8x10"]) == 0


def test_models_of_hugging_face_are_made_from_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    config.save_pretrained(tmp_path)
    assert main(["preview", str(tmp_path), "own", "2", "--input", "2x8:64"]) == 0
    assert "self_attn.q_proj" in capsys.readouterr().out


def test_what_cannot_be_read_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "nothing", "auto", "2"]) == 2
    assert "expected a folder or package.module:name, got 'nothing'" in capsys.readouterr().err
    assert main(["verify", "math:pi.is_integer", "auto", "2"]) == 2
    assert "must be an nn.Module or return one, got bool" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError, match="data=2,tensor=4"):
        _mesh("two")
