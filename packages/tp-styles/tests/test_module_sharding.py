"""Covers: sharding/module_sharding.py, sharding/module_kinds.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.nn.utils import prune

from shoal_dtensor import Replicate, Shard
from shoal_dtensor.internal import shard_sizes
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    LoRA,
    ModuleSharding,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    parallelize_module,
    verify,
)
from shoal_tp_styles.internal import ColumnLinear
from shoal_tp_styles.sharding.module_kinds import TransposedLinear, keeps_forward, kinds_of
from shoal_tp_styles.sharding.module_sharding import HeadShard


def test_plain_features_are_divided_as_by_chunk() -> None:
    # as heads, 5 units are divided as equally as possible
    assert HeadShard(0, Heads(5, 2)).on(4) == Shard(0, sizes=(4, 2, 2, 2))
    features = Heads(5, 2, chunked=True)
    assert HeadShard(0, features).on(4) == Shard(0, multiple_of=2)
    assert Heads(2, 1).replicated(4)
    assert not Heads(2, 1, chunked=True).replicated(4)


class Subclass(nn.Linear):
    """A Linear with torch's forward."""


class Scaled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, input):  # type: ignore[no-untyped-def]  # as users write it
        return 2 * super().forward(input)


@pytest.mark.parametrize(
    ("placement", "sizes"), [(Shard(0), [3, 3, 3, 1]), (Shard(0, multiple_of=4), [4, 4, 2, 0])]
)
def test_sizes_of_shards(placement: Shard, sizes: list[int]) -> None:
    assert shard_sizes(10, placement, 4) == sizes


def test_ports_and_placements_that_are_not_declared_are_replicated() -> None:
    sharding = ModuleSharding("Mine")
    assert sharding.placements("weight", (4,)) == (Replicate(),) and not sharding.shards("weight")
    assert sharding.input_port().desired == sharding.output_port(3).layout == Replicate()


def test_a_subclass_with_a_forward_of_its_own_is_not_lowered() -> None:
    assert ColwiseParallel().sharding(Subclass(2, 2)).lowering is ColumnLinear
    assert ColwiseParallel().sharding(Scaled(2, 2)).lowering is None
    assert not keeps_forward(Scaled(2, 2), nn.Linear)


def test_a_fused_style_refuses_a_forward_that_it_would_not_call() -> None:
    with pytest.raises(UnsupportedModuleError, match="overrides forward"):
        ColwiseParallel().heads(1, 2).sharding(Scaled(2, 2))


def test_a_transposed_linear_is_recognised_by_its_structure() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(nn.Linear(3, 5).weight.detach().t().contiguous())
    module.nf = 5  # type: ignore[assignment]  # a number, as Conv1D has
    assert kinds_of(module)[0] is TransposedLinear
    assert RowwiseParallel().sharding(module).parameters == {"weight": Shard(0)}


COMPUTED: dict[str, Any] = {
    "weight_norm": (nn.utils.parametrizations.weight_norm, nn.Linear(8, 8), ColwiseParallel()),
    "spectral_norm": (nn.utils.parametrizations.spectral_norm, nn.Linear(8, 8), RowwiseParallel()),
    "orthogonal": (
        nn.utils.parametrizations.orthogonal,
        nn.Linear(8, 8),
        PackedColwiseParallel(blocks=2),
    ),
    "an embedding": (nn.utils.parametrizations.weight_norm, nn.Embedding(8, 8), ColwiseParallel()),
    "a convolution": (nn.utils.parametrizations.weight_norm, nn.Conv1d(8, 8, 1), RowwiseParallel()),
    "a norm": (
        partial(prune.l1_unstructured, name="weight", amount=2),
        nn.LayerNorm(8),
        SequenceParallel(),
    ),
    "pruning": (
        partial(prune.l1_unstructured, name="weight", amount=2),
        nn.Linear(8, 8),
        ColwiseParallel(),
    ),
    "the older spectral_norm": (nn.utils.spectral_norm, nn.Linear(8, 8), ColwiseParallel()),
    "adapters": (
        nn.utils.parametrizations.weight_norm,
        nn.Linear(8, 8),
        LoRA(base=ColwiseParallel()),
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_computed_parameters_are_refused_before_anything_changes(name: str) -> None:
    compute, module, style = COMPUTED[name]
    compute(module)
    params = dict(module.named_parameters())
    assert (
        "is computed from other parameters" in verify(module, style, abstract_mesh((4,))).errors[0]
    )
    with (
        fake_world(4),
        pytest.raises(
            UnsupportedModuleError, match=r"weight of .* is computed from other parameters"
        ),
    ):
        parallelize_module(
            nn.Sequential(nn.Linear(8, 8), module), init_device_mesh("cpu", (4,)), {"*": style}
        )
    assert dict(module.named_parameters()) == params


def test_a_parametrized_module_under_dispatch_is_not_refused() -> None:
    class ParametrizedInside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

        def forward(self, x):  # type: ignore[no-untyped-def]  # as users write it
            return self.inner(x)

    assert verify(ParametrizedInside(), SequenceParallel(), abstract_mesh((2,))).ok
