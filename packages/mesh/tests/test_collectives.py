"""Covers: collectives.py, kernels.py, carriers.py on real gloo ranks."""

from __future__ import annotations

import torch

from shoal_mesh import all_gather, all_reduce, all_reduce_, all_to_all, init_device_mesh, reduce_scatter
from shoal_mesh.testing import on_ranks


@on_ranks(4)
def test_blocks_are_in_the_order_of_the_axes_asked_for() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = torch.full((2, 3), float(mesh.get_rank()))
    row = mesh.get_rank() // 2
    assert all_reduce(own, (mesh, "tp")).eq(4 * row + 1).all()
    assert all_gather(own, (mesh, ("dp", "tp"))).view(4, 2, 3)[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert all_gather(own, (mesh, ("tp", "dp"))).view(4, 2, 3)[:, 0, 0].tolist() == [0, 2, 1, 3]
    assert all_gather(own, (mesh, "tp"), 1).shape == (2, 6)
    assert reduce_scatter(torch.ones(3, 4), (mesh, "tp"), 1).shape == (3, 2)
    assert all_to_all(own.repeat(2, 2), (mesh, "tp"), 0, 1).shape == (2, 12)


@on_ranks(4)
def test_an_in_place_reduction_may_run_beside_other_work() -> None:
    mesh = init_device_mesh("cpu", (4,))
    for dtype in (torch.float32, torch.bfloat16):
        for own in (torch.full((2, 3), 1.0 + mesh.get_rank(), dtype=dtype), torch.ones(3, 2, dtype=dtype).t()):
            expected = all_reduce(own, (mesh, 0))
            pending = all_reduce_(own, (mesh, 0), async_op=True)
            assert pending.wait() is own
            assert torch.equal(own, expected)


@on_ranks(4)
def test_axes_find_their_groups_beside_groups_that_leave_this_rank_out() -> None:
    import torch.distributed as dist

    for ranks in ([0, 1], [2, 3]):
        dist.new_group(ranks)
    mesh = init_device_mesh("cpu", (2, 2))
    assert len(dist.get_process_group_ranks(mesh.get_group(1))) == 2
    assert all_reduce(torch.ones(()), (mesh, 0)).item() == 2
