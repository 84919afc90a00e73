"""Seeded bugs in programs of shoal's packages.

Every program takes the mesh, and is right on a mesh of sizes 1.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hand_written import batch, clip, tokens, total_norm
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh

Mesh = dict[str, int]
WIDTH = 8


def _mesh_of(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _rows(tensor: Tensor, mesh: DeviceMesh, axis: str, dim: int = 0) -> Tensor:
    return tensor.tensor_split(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]


def replicated_loss_divided_again(mesh: Mesh) -> None:
    """Divide the loss by the ranks, whose gradients are averaged already."""
    device_mesh = _mesh_of(mesh)
    model = replicate(_model(30), device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), device_mesh, "dp")
        (model(x).square().mean() / mesh["dp"]).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_sum_not_scaled_up(mesh: Mesh) -> None:
    """Divide local sums by the global count, and have the gradients averaged."""
    device_mesh = _mesh_of(mesh)
    model: Any = fully_shard(_model(31), mesh=device_mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), device_mesh, "dp")
        (model(x).square().sum() / (8 * WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_clip_by_local_norm(mesh: Mesh) -> None:
    """Clip by the norm of the local shards."""
    device_mesh = _mesh_of(mesh)
    model: Any = fully_shard(_model(32), mesh=device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), device_mesh, "dp")
        model(x).square().mean().backward()
        square = torch.zeros(())
        for parameter in model.parameters():
            square = square + parameter.grad.to_local().square().sum()
        clip(model.parameters(), 0.01, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


def ignored_parameter_not_reduced(mesh: Mesh) -> None:
    """Leave a parameter out of the sharding, and its gradient to itself."""
    device_mesh = _mesh_of(mesh)
    plain = _model(33)
    ignored = {plain[2].bias}
    model: Any = fully_shard(plain, mesh=device_mesh["dp"], ignored_params=ignored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), device_mesh, "dp")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_mean_of_uneven_tokens(mesh: Mesh) -> None:
    """Average token means of ranks that have other numbers of padded tokens."""
    device_mesh = _mesh_of(mesh)
    torch.manual_seed(34)
    plain = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11))
    model: Any = fully_shard(plain, mesh=device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = tokens(step, 11, 4, 6)
        labels = ids.roll(1, 1)
        labels[0, :5] = -100
        logits = model(_rows(ids, device_mesh, "dp"))
        target = _rows(labels, device_mesh, "dp")
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated_over_one_of_two_axes(mesh: Mesh) -> None:
    """Average over data ranks, and forget the ranks that have other tokens of the sequence."""
    device_mesh = _mesh_of(mesh)
    model = replicate(_model(35), device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = _rows(batch(step, 4, 4, WIDTH), device_mesh, "dp")
        model(_rows(x, device_mesh, "cp", 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Rowwise(nn.Module):
    """A matrix whose columns are sharded, and whose partial output is declared a replica."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        weight = distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(1)])
        self.weight = nn.Parameter(weight)
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's columns."""
        hidden = torch.tanh(self.first(x))
        size = self._mesh.size()
        columns = hidden.tensor_split(size, 1)[self._mesh.get_local_rank()]
        weight: Any = self.weight
        product = columns @ weight.to_local().T
        output = DTensor.from_local(product, self._mesh, [Replicate()], run_check=False)
        return output.to_local()


def partial_output_declared_replica(mesh: Mesh) -> None:
    """Read a sum that was never taken."""
    device_mesh = _mesh_of(mesh)
    torch.manual_seed(36)
    model = Rowwise(device_mesh["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local_loss_logged(mesh: Mesh) -> Any:
    """Return a local loss for the log, where the mean over ranks belongs."""
    device_mesh = _mesh_of(mesh)
    model = replicate(_model(37), device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = _rows(batch(0, 8, WIDTH), device_mesh, "dp")
    loss = model(x).square().mean()
    loss.backward()
    norm = total_norm(model.parameters())
    optimizer.step()
    return {"loss": loss.detach(), "norm": norm}
