"""torch's own FSDP2 and tensor parallelism on a 2-D mesh; prints the losses of three steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def main() -> None:
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(16, 8, generator=generator, dtype=torch.float64)
    target = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    rows = mesh["dp"].get_local_rank()
    losses = []
    for _ in range(3):
        output = model(batch.chunk(size // 2)[rows])
        loss = nn.functional.mse_loss(output, target.chunk(size // 2)[rows])
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        whole_norm = norm.full_tensor().item()  # type: ignore[attr-defined]  # a DTensor
        losses.append([total.item() / (size // 2), whole_norm])
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            print(losses, file=file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
