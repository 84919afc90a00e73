"""Records and ranges of collectives on request, by the environment or a call; nothing without.

Covers: observers/logs.py.
"""

from __future__ import annotations

import os

import pytest
import torch

from forked_programs import Program, outputs_of
from shoal_mesh import all_reduce, annotate_collectives, init_device_mesh
from shoal_mesh.errors import MeshError
from shoal_mesh.observers.logs import log_from_environment
from shoal_mesh.testing import fake_world

PROGRAM = """
import torch
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import fake_world
with fake_world(2):
    all_reduce(torch.ones(8), (init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), "tp"))
"""


@pytest.fixture(scope="module")
def logged() -> dict[str, str]:
    """What is logged, by the topic that the environment asks for."""
    topics = ("collectives", "", "plans")
    programs = [Program(PROGRAM, variables={"SHOAL_LOG": topic, "RANK": "1"}) for topic in topics]
    outputs = outputs_of(programs, "-W", "ignore", environment=os.environ)
    return dict(zip(topics, outputs, strict=True))


def test_collectives_are_logged_where_the_environment_asks(logged: dict[str, str]) -> None:
    (line,) = logged["collectives"].splitlines()
    assert line.startswith("[rank 1] shoal.collectives: all_reduce sum [tp] (8,) 32 B in ")


def test_nothing_is_logged_unasked(logged: dict[str, str]) -> None:
    assert logged[""] == ""
    assert logged["plans"] == ""


def test_an_unknown_topic_is_refused() -> None:
    with pytest.raises(
        MeshError, match="unknown log topic 'plan': expected collectives, plans, decisions, or all"
    ):
        log_from_environment({"SHOAL_LOG": "plan"})


def test_profiles_show_axes_and_bytes() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with (
            torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
            ) as profile,
            annotate_collectives(),
        ):
            all_reduce(torch.ones(8), (mesh, "tp"))
        assert "shoal::all_reduce[tp] 32 B" in {event.key for event in profile.key_averages()}
