"""Covers: topology.py."""

from __future__ import annotations

import gc

import pytest
import torch

from shoal_mesh import (
    Link,
    MeshError,
    abstract_mesh,
    init_device_mesh,
    measure_topology,
    set_topology,
    topology_of,
)
from shoal_mesh.groups.world import all_gather_objects, ensure_world
from shoal_mesh.internal import USER_TOPOLOGIES, Topology
from shoal_mesh.testing import on_ranks


def test_links() -> None:
    link = Link(1e-5, 1e9)
    assert link.seconds(1e6) == pytest.approx(1.01e-3)
    both = Topology((link, Link(2e-5, 1e8))).over((0, 1))
    assert both == Link(2e-5, 1e8)
    with pytest.raises(MeshError, match="bandwidth > 0"):
        Link(0, 0)


def test_defaults_know_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = abstract_mesh((4, 8), ("dp", "tp"), device_type="cuda")
    apart, near = topology_of(mesh).links
    assert near.bandwidth > apart.bandwidth
    assert near.latency < apart.latency
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert topology_of(mesh)[1] == apart
    assert topology_of(abstract_mesh((4,)))[0].latency > 0


def test_users_know_better() -> None:
    mesh = abstract_mesh((3, 5), ("a", "b"))
    default = topology_of(mesh)
    chosen = [Link(1.0, 1.0), Link(2.0, 2.0)]
    set_topology(mesh, chosen)
    assert topology_of(abstract_mesh((3, 5), ("a", "b"))).links == tuple(chosen)
    set_topology(mesh, Topology(tuple(chosen)))
    set_topology(mesh, None)
    assert topology_of(mesh) == default
    with pytest.raises(MeshError, match="2 axes, but the topology has 1 links"):
        set_topology(mesh, chosen[:1])
    set_topology(mesh, chosen)
    del mesh
    gc.collect()
    assert topology_of(abstract_mesh((3, 5), ("a", "b"))) == default


@on_ranks(4)
def test_measured_on_the_real_groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1))
    found = measure_topology(mesh, largest=1 << 16, repeats=2)
    assert len(found.links) == 3
    assert found[2] == topology_of(mesh)[2]
    assert 1e-6 < found[0].latency < 1
    assert 1e5 < found[0].bandwidth < 1e13
    assert set(all_gather_objects(ensure_world("cpu"), found)) == {found}
    assert torch.get_num_threads() == 1


def test_setting_a_topology_gives_a_new_version() -> None:
    mesh, before = abstract_mesh((2,)), USER_TOPOLOGIES.version
    set_topology(mesh, [Link(1e-6, 1e9)])
    set_topology(mesh, None)
    assert USER_TOPOLOGIES.version == before + 2
