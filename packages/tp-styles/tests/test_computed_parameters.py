"""Parameters that are computed from others since their plan was applied.

Covers: lowering/lowered.py.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from shoal_dtensor import Replicate, Shard, full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
    "pruned weight": partial(prune.l1_unstructured, name="weight", amount=0.3),
    "pruned bias": partial(prune.identity, name="bias"),
}
PLANS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "column and row": ({"0": ColwiseParallel(), "2": RowwiseParallel()}, [0, 2]),
    "row of a replicated input": ({"0": RowwiseParallel(input_layouts=Replicate())}, [0]),
    "norm": (
        {
            "2": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "3": SequenceParallel(),
        },
        [3],
    ),
}


def single_and_parallel(plan: str, kind: str) -> tuple[nn.Module, nn.Module]:
    """A plain model and a parallel one, some of whose parameters are computed since."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5), nn.LayerNorm(5)).double()
    styles, where = PLANS[plan]
    parallel = parallelize_module(copy.deepcopy(plain), all_ranks(), styles)
    with warnings.catch_warnings():
        # the older utilities are deprecated, and in use
        warnings.simplefilter("ignore", FutureWarning)
        for model in (plain, parallel):
            torch.manual_seed(1)
            for i in where:
                COMPUTED[kind](model[i])
    return plain, parallel


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", COMPUTED)
@on_ranks(3)
def test_values_and_gradients_are_those_of_one_device(kind: str, plan: str) -> None:
    plain, parallel = single_and_parallel(plan, kind)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    expected, got = plain(x), full_tensor(parallel(x))
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    grads = {name: full_tensor(param.grad) for name, param in parallel.named_parameters()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)


class DoubledWeight(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


@pytest.mark.parametrize(
    "style",
    [ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate())],
)
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
@on_ranks(2)
def test_convolutions_read_a_parametrized_weight(kind: Any, style: Any) -> None:
    plain = kind(4, 6, 3).double()
    parallel = parallelize_module(copy.deepcopy(plain), all_ranks(), style)
    for model in (plain, parallel):
        nn.utils.parametrize.register_parametrization(model, "weight", DoubledWeight())
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(parallel(x), plain(x))


@fake_world(2)
def test_a_result_with_other_placements_is_refused() -> None:
    layer: Any = parallelize_module(
        nn.Linear(8, 8), init_device_mesh("cpu", (2,)), ColwiseParallel()
    )
    gathered = layer.weight.redistribute(placements=[Replicate()])
    for wrong in (gathered, torch.ones(8, 8)):
        layer._parameters.pop("weight", None)
        layer.weight = wrong
        with pytest.raises(
            LayoutError, match=r"weight of Linear has been computed.*remove_parametrizations"
        ):
            layer(torch.randn(2, 8))
