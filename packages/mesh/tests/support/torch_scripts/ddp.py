"""torch's DistributedDataParallel with small buckets; prints the losses of three steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(rank)
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)]
    model = DistributedDataParallel(nn.Sequential(*layers).double(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    target = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    losses = []
    for _ in range(3):
        loss = nn.functional.mse_loss(model(batch.chunk(size)[rank]), target.chunk(size)[rank])
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / size)
    if rank == 0:
        with open(sys.argv[1], "w") as file:
            print(losses, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
