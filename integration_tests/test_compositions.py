"""Compositions of parallelisms train a Llama as one device does.

Losses and gradient norms are compared step by step, in float64.

Covers: shoal_mesh, shoal_dtensor and shoal_tp_styles together, with torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from shoal_data_parallel import FSDPModule, fully_shard, reduce_after_last_microbatch
from shoal_dtensor import Replicate, Shard, clip_grad_norm_, full_tensor
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

CONFIG = LlamaConfig(
    dim=16, layers=4, heads=4, kv_heads=2, hidden=24, vocab=26, max_seq=8, dropout=0.0
)
ROWS, STEPS, TOLERANCE = 8, 3, 1e-9
PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.*_norm": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "blocks.*.attention.w[qkv]": ColwiseParallel(),
    "blocks.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "blocks.*.feed_forward.gate": ColwiseParallel(),
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(
        input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
    ),
}


class Part(nn.Module):
    """A pipeline stage: some blocks, the first with the embedding, the last with the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, whole: Llama, index: int, count: int) -> None:
        super().__init__()
        size = CONFIG.layers // count
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.embedding = whole.embedding
        self.blocks = whole.blocks[index * size : (index + 1) * size]
        if self.last:
            self.norm, self.head = whole.norm, whole.head
        self.register_buffer("cos", whole.cos)
        self.register_buffer("sin", whole.sin)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.first else x
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """This rank's share of the mean over the global batch."""
    total: Tensor = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total / (ROWS * CONFIG.max_seq)


def parallel(part: Any, mesh: DeviceMesh) -> Any:
    """A part with styles along "tensor".

    Its parameters are sharded over "data" and replicated over "replica".
    """
    axes = mesh.axis_names
    if "tensor" in axes:
        held = {path for path, _ in part.named_children()}
        parallelize_module(
            part, mesh["tensor"], {p: s for p, s in PLAN.items() if p.split(".")[0] in held}
        )
    if "data" in axes:
        data = mesh[tuple(axis for axis in axes if axis in ("replica", "data"))]
        for block in part.blocks:
            fully_shard(block, data)
        fully_shard(part, data)
        for unit in part.modules():
            if isinstance(unit, FSDPModule):
                # the loss is divided by the size of the global batch
                unit.set_gradient_divide_factor(1)
    return part


class Trained:
    """A model on a mesh, and what one step of it does."""

    def __init__(self, model: Llama, mesh: DeviceMesh, schedule: str) -> None:
        self.mesh, self.schedule = mesh, None
        piped = "stage" in mesh.axis_names
        self.at = mesh.get_local_rank("stage") if piped else 0
        count = (4 if "Interleaved" in schedule else 2) if piped else 1
        step = 2 if piped else 1
        self.parts = [
            parallel(Part(copy.deepcopy(model), i, count), mesh)
            for i in range(self.at, count, step)
        ]
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in self.parts]
        self.last = self.parts[-1].last
        if not piped:
            return
        group = mesh.get_group("stage")
        stages = [
            PipelineStage(part, self.at + 2 * i, count, torch.device("cpu"), group=group)
            for i, part in enumerate(self.parts)
        ]
        if "data" in mesh.axis_names:
            for stage in stages:
                reduce_after_last_microbatch(stage)
        kind: Any = getattr(pipelining, schedule)
        self.schedule = kind(
            stages if count == 4 else stages[0],
            n_microbatches=4,
            loss_fn=loss_of,
            scale_grads=False,
        )

    def step(self, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
        """The global batch's loss and the norm of gradients before they are clipped and applied."""
        data = [axis for axis in self.mesh.axis_names if axis in ("replica", "data")]
        count = self.mesh[tuple(data)].size() if data else 1
        at = self.mesh[tuple(data)].flatten().get_local_rank() if data else 0
        tokens, targets = tokens.chunk(count)[at], targets.chunk(count)[at]
        with loss_parallel() if "tensor" in self.mesh.axis_names else nullcontext():
            losses = self._backward(tokens, targets)
        values = [full_tensor(one) for one in losses]
        loss = torch.stack(values).sum().detach()
        for axis in data:
            loss = all_reduce(loss, (self.mesh, axis))
        norm = clip_grad_norm_([p for part in self.parts for p in part.parameters()], 1e9)
        if self.schedule is not None:
            loss = all_reduce(loss, (self.mesh, "stage"))
            norm = all_reduce(norm.square(), (self.mesh, "stage")).sqrt()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), norm.item()

    def _backward(self, tokens: Tensor, targets: Tensor) -> list[Any]:
        if self.schedule is None:
            loss = loss_of(self.parts[0](tokens), targets)
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return [loss]
        losses: list[Any] = []
        first = (tokens,) if self.parts[0].first else ()
        self.schedule.step(
            *first, target=targets if self.last else None, losses=losses if self.last else None
        )
        return losses or [torch.zeros((), dtype=torch.float64)]


@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        pytest.param({"data": 2, "tensor": 2}, "", id="FSDP2xTP2"),
        pytest.param({"stage": 2, "data": 2}, "Schedule1F1B", id="PP2xFSDP2"),
        pytest.param({"replica": 2, "data": 2}, "", id="HSDP"),
        pytest.param({"data": 4}, "", id="FSDP4"),
        pytest.param({"stage": 2, "tensor": 2}, "Schedule1F1B", id="PP2xTP2"),
        pytest.param(
            {"stage": 2, "data": 2}, "ScheduleInterleaved1F1B", id="PP2xFSDP2, interleaved"
        ),
        pytest.param(
            {"stage": 2, "tensor": 2}, "ScheduleInterleavedZeroBubble", id="PP2xTP2, no bubble"
        ),
    ],
)
@on_ranks(4, timeout=120)
def test_a_llama_trains_as_on_one_device(axes: dict[str, int], schedule: str) -> None:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    torch.manual_seed(0)
    plain = Llama(CONFIG).double()
    model = Trained(plain, mesh, schedule)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        tokens, targets = torch.randint(
            CONFIG.vocab, (2, ROWS, CONFIG.max_seq), generator=generator
        )
        expected = loss_of(plain(tokens), targets)
        expected.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        got = model.step(tokens, targets)
        assert got == pytest.approx((expected.item(), norm.item()), rel=TOLERANCE)
