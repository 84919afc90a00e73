"""Covers: debug_mode.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from shoal_dtensor import (
    CommunicationForbiddenError,
    DebugMode,
    DTensor,
    ExplicitRedistributionContext,
    Replicate,
    Shard,
    distribute_tensor,
)
from shoal_dtensor.errors import ArgumentValueError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


@pytest.fixture
def sharded() -> Iterator[tuple[DTensor, DTensor]]:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        rows, columns = (
            distribute_tensor(torch.ones(8, 8), mesh, [Shard(dim)], src_data_rank=None)
            for dim in (0, 1)
        )
        yield rows, columns


def test_implicit_redistribution_is_refused_and_explicit_is_not(
    sharded: tuple[DTensor, DTensor],
) -> None:
    rows, columns = sharded
    explicit = ExplicitRedistributionContext()
    for _ in range(2):  # an object may be entered again
        with explicit:
            rows + columns.redistribute(placements=[Shard(0)])
            with pytest.raises(CommunicationForbiddenError, match="needs implicit communication"):
                rows + columns
            with ExplicitRedistributionContext(enable=False):
                rows + columns
            with suppress(RuntimeError), explicit:
                rows + columns
            with pytest.raises(RuntimeError, match="needs implicit communication"):
                rows + columns
    rows + columns


def test_it_may_warn(sharded: tuple[DTensor, DTensor]) -> None:
    rows, columns = sharded
    with (
        ExplicitRedistributionContext(mode="warn"),
        pytest.warns(UserWarning, match="implicit communication"),
    ):
        rows + columns


@pytest.mark.parametrize("wrong", [{"mode": "ask"}, {"strict": True}], ids=str)
def test_what_it_does_not_do_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(RuntimeError, match="ExplicitRedistributionContext"):
        ExplicitRedistributionContext(**wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_operators_and_their_collectives_are_recorded_in_order(
    sharded: tuple[DTensor, DTensor],
) -> None:
    rows, columns = sharded
    with DebugMode() as debug:
        rows.redistribute(placements=[Replicate()])
        rows + columns
    assert debug.operators == [
        "all_gather_into_tensor of 64 bytes along 0",
        "aten.add.Tensor(f32[8@(0), 8], f32[8, 8@(0)])",
        "  all_to_all_single of 64 bytes along 0",
    ]
    assert debug.debug_string().count("\n") == 2 and debug.get_total_counts() == 2


@pytest.mark.parametrize(
    "option",
    [
        "record_torchfunction",
        "record_faketensor",
        "record_tensor_attributes",
        "record_nn_module",
        "store_original_args",
        "record_stack_trace",
        "record_ids",
        "run_compile_with_interpreter",
    ],
)
def test_options_that_record_something_else_are_refused(option: str) -> None:
    with pytest.raises(
        ArgumentValueError, match=f"DebugMode: {option} is not supported: this mode records"
    ):
        DebugMode(**{option: True})


def test_options_of_how_a_line_is_printed_change_nothing() -> None:
    options = (
        "record_realtensor",
        "record_localtensor",
        "record_output",
        "record_profiler_context",
    )
    assert DebugMode(**dict.fromkeys(options, False)).operators == []
