"""Covers: analysis/find_index.py, analysis/placing.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shoal_lab.analysis.find_index import find_index
from shoal_lab.analysis.grid import MeshGrid
from shoal_lab.analysis.placing import place_parameters
from shoal_lab.records import LocalValue, RankRecord, StepRecord


def whole(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "part",
    [
        lambda w: w,
        lambda w: w[2:5],
        lambda w: w[:, 1:3],
        lambda w: w[1:4, 2:4],
        lambda w: w[[0, 3, 1]],
        lambda w: w[:, [0, 4, 2]],
        lambda w: w[[5, 0, 2], 3:6],
        lambda w: w.flatten()[7:19],
        lambda w: w[:0],
    ],
    ids=[
        "whole", "rows", "columns", "block", "some rows", "some columns", "rows of a block", "flat",
        "empty",
    ],
)  # fmt: skip
def test_parts_are_found_by_their_values(part: object) -> None:
    tensor = whole(6, 6)
    local = part(tensor)  # type: ignore[operator]  # one of the lambdas above
    index = find_index(local, tensor)
    assert index is not None
    assert torch.equal(tensor.flatten()[index], local)


def test_nothing_is_found_where_a_value_differs() -> None:
    tensor = whole(6, 6)
    local = tensor[2:4].clone()
    local[1, 1] += 1e-6
    assert find_index(local, tensor) is None
    assert find_index(local, tensor, tolerance=1e-5) is not None


def test_a_constant_tensor_fits_everywhere_and_is_not_placed() -> None:
    assert find_index(torch.ones(2), torch.ones(4)) is None
    assert find_index(torch.ones(4), torch.ones(4)) is not None


def test_flattened_rows_are_found() -> None:
    tensor = whole(2, 3, 5)
    local = tensor.view(6, 5)[2:4]
    index = find_index(local, tensor)
    assert index is not None
    assert torch.equal(tensor.flatten()[index], local)


def test_equal_rows_are_used_in_turn() -> None:
    tensor = whole(4, 3)
    tensor[2] = tensor[0]
    index = find_index(tensor[[0, 2, 1]], tensor)
    assert index is not None
    assert sorted(index[:, 0].tolist()) == [0, 3, 6]


def record(**parameters: Tensor) -> RankRecord:
    values = {name.replace("_", "."): LocalValue(tensor) for name, tensor in parameters.items()}
    return RankRecord(steps=[StepRecord(before=values)])


def test_an_expert_is_found_under_its_global_number() -> None:
    first = whole(4, 4)
    second = first + 1
    reference = record(experts_0=first, experts_1=second)
    ranks = [record(experts_0=first), record(experts_0=second)]
    places = place_parameters(ranks, reference, MeshGrid.of({"ep": 2}))
    assert [place["experts.0"].name for place in places.by_rank] == ["experts.0", "experts.1"]


def test_a_constant_bias_has_the_rows_of_its_weight() -> None:
    weight = whole(6, 4)
    zeros = torch.zeros(6, dtype=torch.float64)
    reference = record(up_weight=weight, up_bias=zeros)
    ranks = [
        record(up_weight=weight[:3], up_bias=zeros[:3]),
        record(up_weight=weight[3:], up_bias=zeros[3:]),
    ]
    places = place_parameters(ranks, reference, MeshGrid.of({"tp": 2}))
    assert [place["up.bias"].index.tolist() for place in places.by_rank] == [[0, 1, 2], [3, 4, 5]]


def test_a_constant_vector_alone_is_the_chunk_of_the_only_axis_that_fits() -> None:
    zeros = torch.zeros(6, dtype=torch.float64)
    reference = record(scale=zeros)
    ranks = [record(scale=zeros[:2]) for _ in range(6)]
    places = place_parameters(ranks, reference, MeshGrid.of({"dp": 2, "tp": 3}))
    assert [place["scale"].index.tolist() for place in places.by_rank[:3]] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    square = place_parameters(
        [record(scale=zeros[:3]) for _ in range(4)], reference, MeshGrid.of({"dp": 2, "tp": 2})
    )
    assert square.ambiguous == [(rank, "scale") for rank in range(4)]
