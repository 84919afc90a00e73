"""Covers: fault_words.py: one sentence for each fault, whoever describes it."""

from __future__ import annotations

import pytest

from shoal_mesh.internal import missing_all_reduce, times_too, too_large, too_small


@pytest.mark.parametrize(
    ("loss", "large", "small"),
    [
        ("mean", "mean taken as sum over dp", "averaged twice over dp"),
        ("sum", "reduced twice over dp", "sum taken as mean over dp"),
        ("equal", "reduced twice over dp", "sum taken as mean over dp"),
        (
            "",
            "reduced twice over dp, or mean taken as sum over dp",
            "averaged twice over dp, or sum taken as mean over dp",
        ),
    ],
)
def test_a_wrong_divisor_is_explained_by_the_relation_of_losses(
    loss: str, large: str, small: str
) -> None:
    assert too_large(2, ["dp"], loss) == f"2 times too large: {large}"
    assert too_small(2, ["dp"], loss) == f"2 times too small: {small}"


def test_sentences_name_axes_places_and_signs() -> None:
    text = missing_all_reduce(["dp", "tp"], "mean", where="mlp")
    assert text == (
        "missing all-reduce over dp, tp after mlp, whose output is right after a mean over dp, tp"
    )
    assert times_too(3, "small", "negated") == "3 times too small and negated"
