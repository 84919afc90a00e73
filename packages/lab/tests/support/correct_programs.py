"""Correct parallel programs, written by hand: no report may find anything in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hand_written_bugs as hand
from hand_written import (
    Axis,
    Block,
    average,
    batch,
    clip,
    make_axes,
    rows,
    tokens,
    total_norm,
)
from shoal_data_parallel import fully_shard
from shoal_mesh import init_device_mesh

Mesh = dict[str, int]
WIDTH = 8


def tensor_parallel(mesh: Mesh) -> None:
    """Train blocks whose hidden features and rows may be uneven."""
    axes = make_axes(mesh)
    torch.manual_seed(60)
    model = nn.Sequential(Block(WIDTH, axes["tp"]), Block(WIDTH, axes["tp"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        whole = batch(step, 7, WIDTH)
        x = rows(whole, axes["dp"])
        (model(x).square().sum() / whole.numel()).backward()
        average(model.parameters(), axes["dp"], 1)
        optimizer.step()
        optimizer.zero_grad()


def clipped(mesh: Mesh) -> Any:
    """Clip by the whole norm, replicated gradients counted once; return the norm."""
    axes = make_axes(mesh)
    torch.manual_seed(61)
    model: Any = nn.Sequential(Block(WIDTH, axes["tp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norm = torch.zeros(())
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().mean().backward()
        average(model.parameters(), axes["dp"])
        sharded = [model[0].up.weight, model[0].up.bias, model[0].down.weight]
        block = model[0]
        kept = [block.norm.weight, block.norm.bias, block.bias]
        square = total_norm(sharded).square()
        dist.all_reduce(square, group=axes["tp"].group)
        norm = (square + total_norm(kept).square()).sqrt()
        clip(model.parameters(), 0.1, norm)
        optimizer.step()
        optimizer.zero_grad()
    return {"norm": norm}


def sequence_parallel(mesh: Mesh) -> None:
    """Reduce the norm's gradients once."""
    hand._train_sequence_parallel(mesh, 1)


def context_parallel(mesh: Mesh) -> None:
    """Attend over a sharded sequence."""
    hand._train_sequence(mesh, "")


def experts(mesh: Mesh) -> None:
    """Route tokens to the experts of other ranks."""
    hand._train_experts(mesh, "")


def accumulation(mesh: Mesh) -> None:
    """Add three microbatches."""
    hand._accumulate(mesh, "")


def latent_projection(mesh: Mesh) -> None:
    """Reduce the rows that need it."""
    axes = make_axes(mesh)
    torch.manual_seed(62)
    model = hand.Latent(axes["tp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), axes["dp"])).square().mean().backward()
        gradient = model.down.weight.grad
        assert gradient is not None
        dist.all_reduce(gradient[6:], group=axes["tp"].group)
        average(model.parameters(), axes["dp"])
        optimizer.step()
        optimizer.zero_grad()


def pipeline(mesh: Mesh) -> None:
    """Add the gradients of a tied embedding on two stages."""
    axes = make_axes(mesh)
    pp = axes["pp"]
    torch.manual_seed(63)
    model = hand.TiedStages(pp)
    table = model.embedding.weight if pp.position == 0 else model.head.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        hand._run_stage(model, pp, tokens(step, 11, 6))
        average([table], pp, 1)
        optimizer.step()
        optimizer.zero_grad()


def dropout_by_rows(mesh: Mesh) -> None:
    """Draw other masks for other rows, and equal masks for replicas."""
    axes = make_axes(mesh)
    torch.manual_seed(64)
    model = nn.Sequential(Block(WIDTH, axes["tp"]), nn.Dropout(0.3), Block(WIDTH, axes["tp"]))
    torch.manual_seed(70 + axes["dp"].position)
    hand._train(model, axes["dp"])


def uneven_tokens(mesh: Mesh) -> None:
    """Divide by the number of tokens of all ranks."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(65)
    model = nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = tokens(step, 11, 4, 6)
        labels = ids.roll(1, 1)
        labels[0, :4] = -100
        logits = model(rows(ids, dp))
        target = rows(labels, dp).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), target, reduction="sum")
        (loss / (labels != -100).sum()).backward()
        average(model.parameters(), dp, 1)
        optimizer.step()
        optimizer.zero_grad()


class ZeroOne:
    """A flat optimizer of this rank's share of all parameters, as in ZeRO-1."""

    def __init__(self, model: nn.Module, dp: Axis) -> None:
        self._parameters = list(model.parameters())
        self._dp = dp
        flat = torch.cat([p.detach().flatten() for p in self._parameters])
        self._size = -(-flat.numel() // dp.size)
        padded = F.pad(flat, (0, self._size * dp.size - flat.numel()))
        self._shard = nn.Parameter(padded.chunk(dp.size)[dp.position].clone())
        self._optimizer = torch.optim.AdamW([self._shard], lr=0.01)

    def step(self) -> None:
        """Average the shard's gradient, update the shard, and gather all parameters."""
        flat = torch.cat([_gradient(p).flatten() for p in self._parameters])
        padded = F.pad(flat, (0, self._size * self._dp.size - flat.numel()))
        dist.all_reduce(padded, group=self._dp.group)
        self._shard.grad = padded.chunk(self._dp.size)[self._dp.position] / self._dp.size
        self._optimizer.step()
        parts = [torch.empty_like(self._shard.data) for _ in range(self._dp.size)]
        dist.all_gather(parts, self._shard.data, group=self._dp.group)
        sizes = [p.numel() for p in self._parameters]
        whole = torch.cat(parts)[: sum(sizes)].split(sizes)
        for parameter, values in zip(self._parameters, whole, strict=True):
            parameter.data.copy_(values.view_as(parameter))
            parameter.grad = None


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def flat_optimizer_shards(mesh: Mesh) -> None:
    """Leave local gradients in the parameters, and update a flat shard of all of them."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(66)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
    optimizer = ZeroOne(model, dp)
    for step in range(2):
        model(rows(batch(step, 8, WIDTH), dp)).square().mean().backward()
        optimizer.step()


def empty_shards(mesh: Mesh) -> None:
    """Shard three rows over four ranks."""
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    torch.manual_seed(67)
    model: Any = fully_shard(nn.Linear(WIDTH, 3), mesh=device_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = batch(step, 8, WIDTH).chunk(device_mesh.size())[device_mesh.get_rank()]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped_by_ddp(mesh: Mesh) -> None:
    """Leave the average to torch's DDP."""
    torch.manual_seed(68)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        x = batch(step, 8, WIDTH).chunk(mesh["dp"])[dist.get_rank()]
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def without_optimizer(mesh: Mesh) -> None:
    """Update parameters by hand."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(69)
    model = nn.Linear(WIDTH, WIDTH)
    for step in range(2):
        model.zero_grad()
        model(rows(batch(step, 8, WIDTH), dp)).square().mean().backward()
        average(model.parameters(), dp)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * _gradient(parameter))


def in_bfloat16(mesh: Mesh) -> None:
    """Compute in bfloat16 on purpose."""
    dp = make_axes(mesh)["dp"]
    torch.manual_seed(70)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = rows(batch(step, 8, WIDTH), dp).bfloat16()
        model(x).square().mean().backward()
        average(model.parameters(), dp)
        optimizer.step()
        optimizer.zero_grad()


PROGRAMS = (
    (tensor_parallel, {"dp": 2, "tp": 3}),
    (tensor_parallel, {"dp": 4, "tp": 1}),
    (clipped, {"dp": 2, "tp": 2}),
    (sequence_parallel, {"dp": 2, "tp": 2}),
    (context_parallel, {"dp": 2, "cp": 3}),
    (experts, {"dp": 2, "ep": 2}),
    (accumulation, {"dp": 2}),
    (latent_projection, {"dp": 1, "tp": 2}),
    (pipeline, {"pp": 2}),
    (dropout_by_rows, {"dp": 2, "tp": 2}),
    (uneven_tokens, {"dp": 2}),
    (flat_optimizer_shards, {"dp": 4}),
    (empty_shards, {"dp": 4}),
    (wrapped_by_ddp, {"dp": 2}),
    (without_optimizer, {"dp": 2}),
    (in_bfloat16, {"dp": 2}),
)
