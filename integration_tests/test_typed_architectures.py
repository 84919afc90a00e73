"""Models of transformers by their own plans pass the type checker: styled, and as plain code."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from integration_tests.typed_architectures import alarm_of_program, alarm_of_styles


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_no_false_alarm(name: str) -> None:
    assert alarm_of_styles(name) == ""
    assert alarm_of_program(name) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite", "longcat_flash", "minicpm3"])
def test_no_false_alarm_on_a_latent_projection(name: str) -> None:
    # `emit` refuses these models: their attention writes to a tensor in place
    assert alarm_of_styles(name) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gemma",
        "olmo2",
        "qwen3",
        "mistral",
        "phi",
        "granite",
        "starcoder2",
        "glm",
        "cohere",
        "arcee",
    ],
)
def test_no_false_alarm_on_others(name: str) -> None:
    assert alarm_of_styles(name) == ""
    assert alarm_of_program(name) == ("", "")
