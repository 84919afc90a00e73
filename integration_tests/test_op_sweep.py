"""A sample of `op_sweep.py`, family by family.

It is all operators of common models, and every twelfth other entry.

Which twelfth, is `OP_SWEEP_TURN` (0 to 11); twelve turns try every entry of torch's database.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import groupby

import pytest

pytest.importorskip("expecttest", reason="torch's operator database needs it")

from integration_tests.op_cases import Part, sweep_part
from integration_tests.op_sweep import together
from integration_tests.op_systems import letter

from shoal_mesh.testing import rank_pool

TURN, TURNS = int(os.environ.get("OP_SWEEP_TURN", "0")), 12
MODELS = """
    add sub mul div neg exp where clamp sum mean var amax softmax log_softmax logsumexp mm bmm addmm
    matmul diagonal nn.functional.linear nn.functional.layer_norm nn.functional.rms_norm
    nn.functional.embedding nn.functional.gelu nn.functional.cross_entropy nn.functional.nll_loss
    nn.functional.conv2d nn.functional.batch_norm nn.functional.scaled_dot_product_attention
"""
ALWAYS = frozenset(MODELS.split())
# One sample with every kind of mesh, one of even sizes, one in a small dtype, one in place.
PARTS = (
    Part("main", samples=1, each=3),
    Part("even", samples=1, each=1),
    Part("bfloat16", dtype="bfloat16", samples=1, each=1),
    Part("inplace", samples=1, each=1),
)


def _family(name: str) -> str:
    return name.rpartition(".")[0] or name[:1].lower()


def _sample() -> dict[str, list[tuple[str, str]]]:
    from torch.testing._internal.common_methods_invocations import op_db

    ordered = sorted(
        {(op.name, op.variant_test_name) for op in op_db}, key=lambda key: (_family(key[0]), key)
    )
    chosen = [key for i, key in enumerate(ordered) if i % TURNS == TURN % TURNS or key[0] in ALWAYS]
    return {family: list(keys) for family, keys in groupby(chosen, key=lambda key: _family(key[0]))}


SAMPLE = _sample()


def test_a_reduction_that_scatters_is_a_reduction() -> None:
    assert letter(Counter(["reduce_scatter_tensor", "all_reduce"])) == "r"
    assert letter(Counter(["reduce_scatter_tensor", "scatter"])) == "g"


@pytest.mark.parametrize("family", SAMPLE)
def test_sample_is_right(family: str) -> None:
    for name, variant in SAMPLE[family]:
        for part in PARTS:
            answer = together(rank_pool(4).run(sweep_part, name, variant, part, timeout=180))
            assert not set(answer.letters) & {"w", "f"}, "\n".join(
                [f"{name}.{variant}, {part.name}", *answer.notes]
            )
