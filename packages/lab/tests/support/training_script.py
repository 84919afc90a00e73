"""A script for torchrun: data parallelism by hand, data from a DataLoader.

`--wrong` forgets the division.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--wrong", action="store_true")
parser.add_argument("--wrong-above", type=int, default=1 << 10, help="forget it on more ranks")
options = parser.parse_args()

dist.init_process_group("gloo")
is_wrong = options.wrong or dist.get_world_size() > options.wrong_above
torch.manual_seed(0)
features = torch.randn(16, 8)
labels = torch.randint(4, (16,))
data = TensorDataset(features, labels)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        if not is_wrong:
            parameter.grad /= dist.get_world_size()
    optimizer.step()
print(f"rank {dist.get_rank()} of {dist.get_world_size()} is done")
dist.destroy_process_group()
