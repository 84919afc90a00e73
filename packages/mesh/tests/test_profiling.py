"""Covers: profiling.py."""

from __future__ import annotations

import torch

from shoal_mesh import (
    all_reduce,
    annotate_collectives,
    init_device_mesh,
)
from shoal_mesh.testing import fake_world


def test_profiles_show_axes_and_bytes() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile,
            annotate_collectives(),
        ):
            all_reduce(torch.ones(8), (mesh, "tp"))
        assert "shoal::all_reduce[tp] 32 B" in {event.key for event in profile.key_averages()}
