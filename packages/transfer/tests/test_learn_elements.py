"""Random numberings, and assignments from maps of elements.

Covers: learn/numberings.py, learn/element_maps.py.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from index_tensors import apply_mapping
from shoal_transfer import WeightMapping
from shoal_transfer.learn.element_maps import ElementMap, LabelledTensor, assign_elements
from shoal_transfer.learn.numberings import draw_numbering

SOURCES = {"a": (4, 6), "b": (2, 3, 2), "c": ()}
TENSORS = [
    LabelledTensor("a", (4, 6), 0),
    LabelledTensor("b", (2, 3, 2), 24),
    LabelledTensor("c", (), 36),
    LabelledTensor(None, (100,), 37),
]


@given(seed=st.integers(0, 10**6), sign=st.sampled_from([1, -1]), floating=st.booleans())
def test_labels_are_found_again_and_other_numbers_are_not(
    seed: int, sign: int, floating: bool
) -> None:
    numbering = draw_numbering(seed, sign, 5000)
    positions = torch.arange(5000)
    dtype = torch.float64 if floating else torch.int64
    labels = numbering.label(positions, dtype)
    assert len({*labels.tolist()}) == 5000
    assert torch.equal(numbering.position(labels), positions)
    for other in (labels + 1, -labels, labels * 2, labels // 2, positions.to(dtype)):
        assert (numbering.position(other) == -1).all()


def test_rounded_labels_are_no_labels() -> None:
    numbering = draw_numbering(0, 1, 100)
    labels = numbering.label(torch.arange(100), torch.float64)
    for other in (labels.round(), labels.floor(), labels.float().double()):
        assert (numbering.position(other) == -1).all()


def mapping_of(positions: torch.Tensor, constants: torch.Tensor) -> WeightMapping:
    parts = assign_elements("t", ElementMap(positions, constants), TENSORS)
    mapping = WeightMapping(SOURCES, {"t": tuple(positions.shape)}, tuple(parts))
    mapping.check()
    return mapping


def check(positions: torch.Tensor, constants: torch.Tensor) -> WeightMapping:
    mapping = mapping_of(positions, constants)
    values = {
        tensor.name: torch.arange(torch.Size(tensor.shape).numel()).reshape(tensor.shape)
        + tensor.first_position
        + 1000
        for tensor in TENSORS
        if tensor.name is not None
    }
    expected = torch.where(positions >= 37, -1, positions + 1000)
    expected = torch.where(positions < 0, constants.long(), expected)
    assert torch.equal(apply_mapping(mapping, values)["t"], expected)
    return mapping


@given(data=st.data())
def test_any_map_of_elements_is_expressed_exactly(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    count = torch.Size(shape).numel()
    drawn = data.draw(st.lists(st.integers(-2, 45), min_size=count, max_size=count))
    flat = torch.tensor(drawn)
    positions = flat.clamp(min=-1).reshape(shape)
    constants = torch.where(flat < 0, -flat, 0).double().reshape(shape)
    mapping = check(positions, constants)
    assert len(mapping.assignments) <= count


@pytest.mark.parametrize(
    ("positions", "count"),
    [
        # the whole of a, and its transpose
        (torch.arange(24).reshape(4, 6), 1),
        (torch.arange(24).reshape(4, 6).t(), 1),
        # rows of a in steps, columns of a in steps
        (torch.arange(24).reshape(4, 6)[::2, 1::3], 1),
        # a and b in turns of two columns each
        (torch.tensor([0, 1, 24, 25, 2, 3, 28, 29]), 4),
        # elements of a and b in turns
        (torch.stack([torch.arange(6), torch.arange(6) + 6], dim=1).flatten(), 2),
        # a row of a that is repeated, and constants
        (torch.tensor([[0, 1, -1], [0, 1, -1], [0, 1, -1]]), 2),
        # a flat view of two rows of a
        (torch.arange(12), 2),
        # elements in reverse order do not have an assignment of their own
        (torch.tensor([3, 2, 1]), 3),
        # the diagonal of a
        (torch.arange(4) * 7, 4),
    ],
)
def test_maps_with_structure_are_few_assignments(positions: torch.Tensor, count: int) -> None:
    mapping = check(positions, torch.zeros(positions.shape))
    assert len(mapping.assignments) == count


def test_nan_is_a_constant() -> None:
    constants = torch.tensor([float("nan"), float("nan"), 1.0])
    parts = assign_elements("t", ElementMap(torch.full((3,), -1), constants), TENSORS)
    assert [len(part.region[0]) for part in parts] == [2, 1]
