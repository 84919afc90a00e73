"""Train a network whose weights are split over four ranks, and compare it with one process.

python examples/tensor_parallel.py
torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

import copy

import torch
from torch import nn

from shoal_dtensor import DTensor
from shoal_mesh import init_device_mesh, launch
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module


def train(model: nn.Module, batch: torch.Tensor) -> list[float]:
    """Take five steps that teach the model to return its input; return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> str:
    """Train the same network twice: on this process alone, and split over the ranks."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    single = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    split = copy.deepcopy(single)
    # The first layer is split by columns and the second one by rows, so that one all-reduce
    # in each direction is all that the ranks send.
    parallelize_module(split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    batch = torch.randn(8, 64)
    expected = train(single, batch)
    losses = train(split, batch)
    torch.testing.assert_close(losses, expected)
    weight = split[0].weight
    assert isinstance(weight, DTensor)
    share = weight.to_local().numel() / weight.numel()
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, as on one process; {share:.0%} of a weight"


if __name__ == "__main__":
    for rank, line in enumerate(launch(main, 4)):
        print(f"rank {rank}: {line}")
