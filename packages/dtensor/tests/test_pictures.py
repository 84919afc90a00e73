"""Pictures of layouts show every element once, with the ranks that hold it.

Covers: api/explain.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from shoal_dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    Spec,
    StridedShard,
    distribute_tensor,
    draw_layout,
    draw_layouts,
    draw_plan,
    explain,
)
from shoal_dtensor.errors import PlacementError
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import fake_world

MESH = abstract_mesh((2, 2), ("data", "tensor"))


def covered(spec: Spec) -> int:
    """The area of the rectangles.

    It is the number of elements if none is drawn twice and none is left out.
    """
    return sum(int(patch.get_width() * patch.get_height()) for patch in draw_layout(spec).patches)


@given(st.lists(st.integers(1, 5), max_size=3), st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_every_element_is_drawn_once(shape: Sequence[int], dims: Sequence[int]) -> None:
    placements: list[Placement] = [Shard(dim) if dim < len(shape) else Replicate() for dim in dims]
    assert covered(Spec(MESH, placements, tuple(shape))) == torch.Size(shape).numel()


def test_strided_dims_are_drawn_run_by_run() -> None:
    spec = Spec(abstract_mesh((2,)), (StridedShard(0, split_factor=3, sizes=(2, 2)),), (12, 4))
    assert len(draw_layout(spec).patches) == 6 and covered(spec) == 48


def test_ranks_and_sums_are_named() -> None:
    ax = draw_layout(Spec(MESH, (Partial(), Shard(0)), (4, 2)))
    assert [text.get_text() for text in ax.texts] == ["0, 2\npartial sum", "1, 3\npartial sum"]


def test_a_plan_is_drawn_layout_by_layout() -> None:
    src = Spec(MESH, (Shard(0), Shard(1)), (8, 6))
    plan = explain(src, src.with_(placements=(Replicate(), Shard(0)))).chosen
    figure = draw_plan(plan)
    assert len(figure.axes) == len(plan.steps) + 1
    assert figure.axes[-1].get_xlabel().startswith(f"after {plan.steps[-1].name} over")


def test_equal_layouts_of_a_model_are_drawn_once() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        weights = {
            name: distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)]) for name in ("q", "k", "v")
        }
        figure = draw_layouts({**weights, "scale": torch.ones(3)})
    assert [ax.get_title() for ax in figure.axes] == ["q and 2 with the same layout\n8 x 4  [S(0)]"]
    with pytest.raises(PlacementError, match="got none"):
        draw_layouts({"scale": torch.ones(3)})
