"""Covers: api/custom_ops.py: rules for a user's own operators, on an operator that has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal_dtensor import Replicate, Shard, distribute_tensor, register_rule, register_sharding
from shoal_dtensor.errors import ArgumentValueError, PlacementError
from shoal_dtensor.rules import pointwise
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_world(2):
        yield init_device_mesh("cpu", (2,))


def scaled_sum(name: str, *tags: torch.Tag) -> Any:
    """A new operator: `x + factor * y`."""
    make_library: Any = torch.library.Library
    library = make_library("shoal_custom_rules", "FRAGMENT")
    library.define(f"{name}(Tensor x, Tensor y, float factor) -> Tensor", tags=tags)
    library.impl(name, lambda x, y, factor: x + factor * y, "CompositeExplicitAutograd")
    scaled_sum.libraries.append(library)  # type: ignore[attr-defined]  # kept alive
    return getattr(torch.ops.shoal_custom_rules, name).default


scaled_sum.libraries = []  # type: ignore[attr-defined]  # as above


def run(op: Any, mesh: DeviceMesh) -> Any:
    x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)
    with CommDebugMode() as mode:
        result = op(x, x, 2.0)
    assert mode.get_total_counts() == 0
    return result


def test_a_function_in_torchs_form_becomes_a_rule(mesh: DeviceMesh) -> None:
    op = scaled_sum("by_pairs")

    @register_sharding(op)
    def rows(x: Any, y: Any, factor: float) -> list[Any]:
        assert x.shape == (4, 2) and factor == 2.0
        return [([Shard(0)], [Shard(0), Shard(0), None])]

    result = run(op, mesh)
    assert result.placements == (Shard(0),) and torch.equal(
        result.to_local(), torch.full((2, 2), 3.0)
    )


def test_a_rule_in_our_notation_and_its_replacement(mesh: DeviceMesh) -> None:
    op = scaled_sum("by_rule")
    register_rule(op, pointwise())
    assert run(op, mesh).placements == (Shard(0),)
    with pytest.raises(ArgumentValueError, match="replace=True"):
        register_rule(op, pointwise())
    register_rule([op], pointwise(linear=(0, 1)), replace=True)
    assert run(op, mesh).placements == (Shard(0),)


def test_an_operator_that_says_to_be_pointwise_needs_no_rule(mesh: DeviceMesh) -> None:
    result = run(scaled_sum("by_tag", torch.Tag.pointwise), mesh)
    assert result.placements == (Shard(0),)
    assert torch.equal(result.to_local(), torch.full((2, 2), 3.0))


def test_pairs_that_do_not_fit_the_operator_are_refused_when_it_is_called(mesh: DeviceMesh) -> None:
    op = scaled_sum("misfit")
    register_sharding(op)(
        lambda x, y, factor: [([Shard(0), Replicate()], [Shard(0), Shard(0), None])]
    )
    with pytest.raises(PlacementError, match=r"2 tensor inputs and 1 tensor outputs.* for 2 and 2"):
        run(op, mesh)
