"""torch's pipelining with the 1F1B schedule, a stage for each rank; prints the losses."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    rank = dist.get_rank()
    size = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double() for _ in range(size)]
    device = torch.device("cpu")
    stage = PipelineStage(layers[rank], rank, size, device)
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    target = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    results = []
    for _ in range(3):
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        elif rank == size - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        results.append([loss.item() for loss in losses])
    if rank == size - 1:
        with open(sys.argv[1], "w") as file:
            print(results, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
