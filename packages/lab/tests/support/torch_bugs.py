"""Seeded bugs in programs of torch's DDP, FSDP2 and DTensor; only tests marked parity run them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hand_written import batch, clip, tokens

Mesh = dict[str, int]
WIDTH = 8


def _mesh_of(mesh: Mesh) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _model(seed: int) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _rows(tensor: Tensor, mesh: DeviceMesh, axis: str, dim: int = 0) -> Tensor:
    return tensor.tensor_split(mesh[axis].size(), dim)[mesh.get_local_rank(axis)]


def _train(model: Any, mesh: DeviceMesh, factor: float = 1.0) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), mesh, "dp")
        (model(x).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp_loss_divided(mesh: Mesh) -> None:
    """Divide the loss by the ranks, whose gradients DDP averages."""
    _train(DistributedDataParallel(_model(40)), _mesh_of(mesh), 1 / mesh["dp"])


def ddp_last_microbatch_not_synchronized(mesh: Mesh) -> None:
    """Leave the last microbatch inside of no_sync."""
    device_mesh = _mesh_of(mesh)
    model = DistributedDataParallel(_model(41))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = _rows(batch(step, 8, WIDTH), device_mesh, "dp")
        with model.no_sync():
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp_loss_not_scaled_up(mesh: Mesh) -> None:
    """Divide local sums by the global count, and have FSDP average."""
    device_mesh = _mesh_of(mesh)
    _train(fully_shard(_model(42), mesh=device_mesh["dp"]), device_mesh, 1 / mesh["dp"])


def fsdp_clip_by_local_norm(mesh: Mesh) -> None:
    """Clip by the norm of local shards."""
    device_mesh = _mesh_of(mesh)
    model: Any = fully_shard(_model(43), mesh=device_mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(_rows(batch(step, 8, WIDTH), device_mesh, "dp")).square().mean().backward()
        square = torch.zeros(())
        for parameter in model.parameters():
            square = square + parameter.grad.to_local().square().sum()
        clip(model.parameters(), 0.01, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()


def fsdp_ignored_parameter_not_reduced(mesh: Mesh) -> None:
    """Leave a parameter out of FSDP, and its gradient to itself."""
    device_mesh = _mesh_of(mesh)
    plain = _model(44)
    model = fully_shard(plain, mesh=device_mesh["dp"], ignored_params={plain[0].weight})
    _train(model, device_mesh)


def fsdp_divide_factor(mesh: Mesh) -> None:
    """Set a divide factor of 1 for means."""
    device_mesh = _mesh_of(mesh)
    model: Any = fully_shard(_model(45), mesh=device_mesh["dp"])
    model.set_gradient_divide_factor(1.0)
    _train(model, device_mesh)


def fsdp_mean_of_uneven_tokens(mesh: Mesh) -> None:
    """Average token means of ranks that have other numbers of padded tokens."""
    device_mesh = _mesh_of(mesh)
    torch.manual_seed(46)
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


class Gathered(nn.Module):
    """Experts that gather their inputs by `full_tensor`, whose backward only slices."""

    def __init__(self, mesh: DeviceMesh, gradient: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(8, WIDTH), mesh, [Shard(0)]))
        self._mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's outputs of all rows."""
        hidden = torch.tanh(self.first(x))
        whole = DTensor.from_local(hidden, self._mesh, [Shard(0)], run_check=False).full_tensor()
        weight: Any = self.weight
        return whole @ weight.to_local().T


def gathered_without_reduction(mesh: Mesh) -> None:
    """Lose the gradient of the other ranks' experts."""
    device_mesh = _mesh_of(mesh)["ep"]
    torch.manual_seed(47)
    model = Gathered(device_mesh, False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = batch(step, 8, WIDTH).tensor_split(mesh["ep"])[device_mesh.get_local_rank()]
        model(x).square().sum().backward()
        for parameter in model.first.parameters():
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad, group=device_mesh.get_group())
        optimizer.step()
        optimizer.zero_grad()


def rowwise_output_left_partial(mesh: Mesh) -> None:
    """Take the local tensor of a partial output."""
    device_mesh = _mesh_of(mesh)["tp"]
    model = _model(48)
    plan: Any = {
        "0": ColwiseParallel(use_local_output=False),
        "2": RowwiseParallel(use_local_output=False),
    }
    parallel: Any = parallelize_module(model, device_mesh, plan)
    parallel[2].register_forward_hook(_keep_partial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(batch(step, 4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _keep_partial(module: nn.Module, args: Any, output: Any) -> Tensor:
    """Return each rank's half of the sum, as a partial tensor has."""
    mesh = output.device_mesh
    return output.to_local() / mesh.size() * (mesh.get_local_rank() + 1 if mesh.size() > 1 else 1)


def norm_replica_not_reduced(mesh: Mesh) -> None:
    """Apply a plain norm to rows of the sequence, and leave its gradient to each rank."""
    device_mesh = _mesh_of(mesh)["tp"]
    torch.manual_seed(49)
    norm = nn.LayerNorm(WIDTH)
    head = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleDict({"norm": norm, "head": head})
    parallelize_module(head, device_mesh, ColwiseParallel(input_layouts=Shard(1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = batch(step, 4, 4, WIDTH).tensor_split(mesh["tp"], 1)[device_mesh.get_local_rank()]
        (head(norm(x)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def replicated_sum_taken_as_replica(mesh: Mesh) -> None:
    """Declare rows of a batch a replica, so that gradients of replicas are not reduced."""
    device_mesh = _mesh_of(mesh)["dp"]
    model = _model(50)
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            value = distribute_tensor(parameter.detach(), device_mesh, [Replicate()])
            module.register_parameter(name, nn.Parameter(value))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = batch(step, 8, WIDTH).tensor_split(mesh["dp"])[device_mesh.get_local_rank()]
        whole = DTensor.from_local(x, device_mesh, [Replicate()], run_check=False)
        model(whole).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
