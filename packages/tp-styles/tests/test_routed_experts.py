"""Mixtures on ranks against one device, forward and backward, in float64.

Covers: expert_forward.py.
"""

from __future__ import annotations

import copy
import functools
import io
import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from moe_checks import assert_same_on_replicas, assert_same_on_shards
from moe_models import WIDTH, mixture
from shoal_dtensor import Placement, Replicate, Shard
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ExpertParallel,
    LayoutError,
    parallelize_module,
    preview,
    unparallelize_module,
)
from tp_checks import counts

SIZES = (5, 0, 3, 4)  # tokens of each rank


@on_ranks(4)
# even; idle ranks; empty ranks
@pytest.mark.parametrize(("experts", "favourite"), [(8, None), (6, 1), (3, None)])
@pytest.mark.parametrize("kind", ["packed", "transposed", "listed", "sorted"])
def test_tokens_are_sent_to_their_experts_and_back(
    kind: str, experts: int, favourite: int | None
) -> None:
    single = mixture(kind, experts, favourite=favourite)
    module = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), {"experts": ExpertParallel()})
    rank = torch.distributed.get_rank()
    assert_same_on_shards(module, single, SIZES, rank, all_ranks().comm(0))


@on_ranks(4)
# even; idle ranks; empty ranks
@pytest.mark.parametrize(("experts", "favourite"), [(8, None), (6, 1), (3, None)])
@pytest.mark.parametrize("kind", ["packed", "transposed", "listed", "sorted"])
def test_every_rank_computes_its_experts_for_all_tokens(
    kind: str, experts: int, favourite: int | None
) -> None:
    single = mixture(kind, experts, favourite=favourite)
    module = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), {"experts": ExpertParallel(input_layouts=Replicate())})
    assert_same_on_replicas(module, single)


@functools.cache
def grid() -> Any:
    """Two by two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "tensor"))


def two_axes(layout: Placement) -> ExpertParallel:
    """Experts over the first axis of the grid, their features over the second."""
    return ExpertParallel(input_layouts=layout).on(("expert", "tensor"))


@on_ranks(4)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
@pytest.mark.parametrize("kind", ["packed", "transposed", "listed", "sorted"])
def test_experts_on_one_axis_and_their_features_on_the_other(kind: str, layout: Placement) -> None:
    single = mixture(kind, 5)
    module = copy.deepcopy(single)
    parallelize_module(module, grid(), {"experts": two_axes(layout)})
    if layout == Replicate():
        assert_same_on_replicas(module, single)
    else:
        comm = grid().comm(0)
        assert_same_on_shards(module, single, SIZES[1:3], comm.rank, comm)


@on_ranks(4)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_a_capacity_drops_the_last_tokens_of_all_ranks(layout: Placement) -> None:
    comm = all_ranks().comm(0)
    single, module = mixture("packed", 6).experts, mixture("packed", 6).experts
    tokens = sum(SIZES)
    x = torch.randn(tokens, WIDTH, dtype=torch.double)
    chosen = torch.stack([torch.randperm(6)[:2].clamp(max=3) for _ in range(tokens)])
    weights = torch.rand(tokens, 2, dtype=torch.double)
    room, taken, kept = math.ceil(0.75 * chosen.numel() / 6), [0] * 6, weights.clone()
    for token, choice in product(range(tokens), range(2)):
        expert = int(chosen[token, choice])
        taken[expert] += 1
        kept[token, choice] *= taken[expert] <= room
    expected = single(x, chosen, kept)
    parallelize_module(
        module, all_ranks(), ExpertParallel(input_layouts=layout, capacity_factor=0.75)
    )
    mine: Any = (
        slice(None)
        if layout == Replicate()
        else slice(sum(SIZES[: comm.rank]), sum(SIZES[: comm.rank + 1]))
    )
    torch.testing.assert_close(module(x[mine], chosen[mine], weights[mine]), expected[mine])
    assert max(taken) > room


@on_ranks(4)
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
@pytest.mark.parametrize("axes", [1, 2])
def test_previewed_collectives_are_those_that_run(axes: int, layout: Placement) -> None:
    module = mixture("packed", 4)
    mesh, style = (
        (all_ranks(), ExpertParallel(input_layouts=layout))
        if axes == 1
        else (grid(), two_axes(layout))
    )
    x = torch.randn(5, WIDTH, dtype=torch.double, requires_grad=True)
    costs = preview(module, {"experts": style}, mesh, x)
    parallelize_module(module, mesh, {"experts": style})
    with CommDebugMode() as mode:
        out: Any = module(x)
    forward = counts(mode)
    with CommDebugMode() as mode:
        out.sum().backward()
    for op in ("all_reduce", "all_gather", "all_to_all"):
        assert costs.count(op) == (forward.get(op, 0), counts(mode).get(op, 0)), op
    experts: Any = module.experts
    weights = [experts.gate_up_proj, experts.down_proj]
    held = sum(weight.to_local().numel() for weight in weights)
    assert costs.rows[0].parameter_bytes == 8 * held


@on_ranks(2)
def test_experts_are_copied_pickled_and_made_plain_again() -> None:
    single = mixture("listed", 3)
    module: Any = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), {"experts": ExpertParallel(input_layouts=Replicate())})
    x = torch.randn(4, WIDTH, dtype=torch.double)
    buffer = io.BytesIO()
    torch.save(copy.deepcopy(module), buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), single(x))
    unparallelize_module(module)
    torch.testing.assert_close(module(x), single(x))
    assert module.state_dict().keys() == single.state_dict().keys()


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    module: Any = mixture("packed", 4)
    parallelize_module(module, all_ranks(), {"experts": ExpertParallel()})
    x, chosen = torch.randn(3, WIDTH, dtype=torch.double), torch.zeros(3, 2, dtype=torch.long)
    with pytest.raises(LayoutError, match=r"shape \(\*tokens, choices\)"):
        module.experts(x, chosen, torch.ones(2, 2))
    with pytest.raises(LayoutError, match="with positional arguments"):
        module.experts(x, chosen)
    rows: Any = mixture("sorted", 4)
    parallelize_module(rows, all_ranks(), {"experts": ExpertParallel()})
    with pytest.raises(
        LayoutError, match="one number of rows for each of 4 experts, 3 rows in all"
    ):
        rows.experts(x, torch.tensor([1, 1, 1, 1]))


@on_ranks(2)
def test_experts_that_drop_are_refused_while_they_do() -> None:
    module: Any = mixture("listed", 4)
    module.experts[1].w1 = nn.Sequential(module.experts[1].w1, nn.Dropout(0.5))
    parallelize_module(module, all_ranks(), {"experts": ExpertParallel()})
    x = torch.randn(3, WIDTH, dtype=torch.double)
    with pytest.raises(LayoutError, match=r"draw random numbers \(dropout\)"):
        module(x)
    assert module.eval()(x).shape == x.shape
