"""Covers: comm_over of groups.py, topology_version of topology.py."""

from __future__ import annotations

import torch

from shoal_mesh import Link, abstract_mesh, all_gather, comm_over, set_topology, topology_version
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_any_ranks_in_any_order() -> None:
    rank = torch.distributed.get_rank()
    if rank in (3, 1):
        comm = comm_over((3, 1))
        assert comm.ranks == (3, 1)
        assert comm.rank == (3, 1).index(rank)
        assert all_gather(torch.tensor([rank]), comm).tolist() == [3, 1]
        assert comm_over((3, 1)).group is comm.group


def test_setting_a_topology_gives_a_new_version() -> None:
    mesh, before = abstract_mesh((2,)), topology_version()
    set_topology(mesh, [Link(1e-6, 1e9)])
    set_topology(mesh, None)
    assert topology_version() == before + 2
