"""Models of transformers by their own plans pass the checker of types: styled, and as plain code."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from integration_tests.typed_architectures import alarm_of_program, alarm_of_styles


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_no_false_alarm(name: str) -> None:
    assert alarm_of_styles(name) == ""
    assert alarm_of_program(name) == ("", "")


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
