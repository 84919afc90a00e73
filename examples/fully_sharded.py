"""Train with parameters, gradients and optimizer state sharded over the ranks (FSDP2).

python examples/fully_sharded.py
"""

import copy

import torch
from torch import nn

from shoal_data_parallel import fully_shard
from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh, launch


def main() -> str:
    """Train on two rows of the batch in each rank; compare with one process on all eight rows."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    single = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    sharded = copy.deepcopy(single)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)

    batch = torch.randn(8, 64)
    rows = batch.chunk(4)[mesh.get_local_rank("data")]
    for model, own_rows in ((single, batch), (sharded, rows)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            # Gradients of the ranks are averaged, as the mean over all rows asks for.
            (model(own_rows) - own_rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    held = 0
    total = 0
    for trained, expected in zip(sharded.parameters(), single.parameters(), strict=True):
        assert isinstance(trained, DTensor)
        torch.testing.assert_close(trained.full_tensor(), expected.data)
        held += trained.to_local().numel()
        total += expected.numel()
    return f"holds {held:,} of {total:,} parameters, equal to those of one process"


if __name__ == "__main__":
    for rank, line in enumerate(launch(main, 4)):
        print(f"rank {rank}: {line}")
