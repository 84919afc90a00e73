"""Covers: torch's test group: collectives, torch's calls and DTensors.

Its ranks are threads of one process.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading
import torch, torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg
import shoal_mesh as sm
from shoal_dtensor import Replicate, Shard, distribute_tensor

torch._C._distributed_c10d._set_thread_isolation_mode(True)  # as torch's MultiThreadedTestCase does
multi_threaded_pg._install_threaded_pg()
store, done = dist.HashStore(), []

def run(rank):
    dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
    mesh = sm.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = rank - rank % 2
    own = torch.arange(2.0) + 10 * rank
    assert sm.all_reduce(own, (mesh, "tp")).tolist() == [20.0 * first + 10, 20.0 * first + 12]
    assert sm.all_gather(own[:1], (mesh, ("dp", "tp"))).tolist() == [0.0, 10.0, 20.0, 30.0]
    assert sm.reduce_scatter(own, (mesh, "tp")).tolist() == [20.0 * first + 10 + 2 * (rank % 2)]
    exchanged = sm.all_to_all(own, (mesh, "tp"), 0, 0).tolist()
    assert exchanged == [10.0 * first + rank % 2, 10.0 * first + 10 + rank % 2]
    assert sm.broadcast(own, (mesh, "tp"), 1).tolist() == [10.0 * first + 10, 10.0 * first + 11]
    uneven = sm.all_gather_v(own[: 1 + rank % 2], (mesh, "tp"), [1, 2])
    assert uneven.tolist() == [10.0 * first, 10.0 * first + 10, 10.0 * first + 11]
    reduced = sm.all_reduce_coalesced([own, own[0]], (mesh, "dp"))
    assert [t.tolist() for t in reduced][1] == 20.0 * (rank % 2) + 20
    gathered = sm.gather(own, (mesh, "tp"), 1)
    assert rank % 2 == (gathered is not None)
    rows = gathered and [row + 1 for row in gathered]
    assert sm.scatter(rows, (mesh, "tp"), 1, out=torch.empty(2)).tolist() == (own + 1).tolist()
    permuted = sm.permute(own, (mesh, "tp"), [1, 0])
    assert permuted.tolist() == (torch.arange(2.0) + 10 * (rank ^ 1)).tolist()
    dist.barrier(group=mesh.get_group("tp"))
    names = [rank]
    dist.broadcast_object_list(names, src=first, group=mesh.get_group("tp"))
    assert names == [first]
    x = distribute_tensor(torch.arange(24.0).view(4, 6), mesh, [Shard(0), Shard(1)])
    weight = distribute_tensor(torch.ones(6, 5), mesh, [Replicate(), Shard(0)]).requires_grad_()
    loss = (x @ weight).relu().sum()
    loss.backward()
    assert loss.full_tensor() == 1380
    assert (weight.grad.full_tensor() == torch.arange(24.0).view(4, 6).sum(0)[:, None]).all()
    done.append(rank)

threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
print(sorted(done))
"""


def test_a_group_of_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "[0, 1, 2, 3]\n", done.stderr
