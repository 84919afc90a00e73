"""Emitted programs of architectures of transformers on real ranks, compared with dispatch."""

from __future__ import annotations

import warnings

import pytest

pytest.importorskip("transformers")

from integration_tests.emitted import compared

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks


# norms of some architectures compute in float32, whatever the parameters are
def check(name: str) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    comparison = compared(name, mesh)
    assert comparison.same_bits
    assert comparison.gradient_error < 1e-6


@on_ranks(2, timeout=300)
def test_a_program_has_the_bits_of_dispatch() -> None:
    check("llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "qwen3",
        "mistral",
        "gemma2",
        "gpt_neox",
        "phi",
        "olmo",
        "granite",
        "starcoder2",
        "cohere",
        "minicpm3",
    ],
)
@on_ranks(2, timeout=300)
def test_programs_have_the_bits_of_dispatch(name: str) -> None:
    check(name)
