"""Programs of the layers above.

They are losses, attention of a sharded sequence, mixtures of experts, and checkpoints.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .libraries import Library
from .programs import Part, Program, assert_same, device


def loss_parallel(lib: Library) -> Generator[Part, Any, None]:
    """Cross-entropy of logits whose classes are sharded, unevenly."""
    mesh = lib.init_device_mesh(device().type, (4,))
    torch.manual_seed(0)
    logits, target = torch.randn(6, 11), torch.randint(11, (6,))
    plain = logits.clone().requires_grad_()
    expected = F.cross_entropy(plain, target)
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    there = target.to(device())
    x = lib.tensor.distribute_tensor(
        logits.to(device()), mesh, [lib.tensor.Shard(1)]
    ).requires_grad_()
    for _ in range(2):
        x.grad = None
        with lib.styles.loss_parallel():
            loss = yield "forward", partial(F.cross_entropy, x, there)
            yield "backward", lambda: loss.backward()  # noqa: B023  # run before the next round
    if lib.ours:
        assert_same(loss, expected)
        assert_same(x.grad, plain.grad)


def linear_cross_entropy(lib: Library) -> Generator[Part, Any, None]:
    """The loss of hidden states through a head whose classes are sharded, unevenly."""
    from shoal_tp_styles import losses

    mesh = lib.init_device_mesh(device().type, (4,))
    torch.manual_seed(0)
    x, weight, target = torch.randn(6, 8), torch.randn(11, 8), torch.randint(11, (6,))
    plain = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = F.cross_entropy(F.linear(*plain), target)
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    hidden, there = x.to(device()).requires_grad_(), target.to(device())
    head = lib.tensor.distribute_tensor(
        weight.to(device()), mesh, [lib.tensor.Shard(0)]
    ).requires_grad_()
    for _ in range(2):
        hidden.grad = head.grad = None
        loss = yield "forward", partial(losses.linear_cross_entropy, hidden, head, there)
        yield "backward", lambda: loss.backward()  # noqa: B023  # it is run before the next round
    for got, wanted in ((loss, expected), (hidden.grad, plain[0].grad), (head.grad, plain[1].grad)):
        assert_same(got, wanted)


def _attention(method: Any, lib: Library) -> Generator[Part, Any, None]:
    """Causal attention of a sequence of 16 over four ranks, and its parts put together."""
    from shoal_context_parallel import (
        SequenceLayout,
        context_parallel_attention,
        context_parallel_unshard,
    )

    mesh = lib.init_device_mesh(device().type, (4,))
    layout, rank = SequenceLayout.head_tail(16, 4), dist.get_rank()
    torch.manual_seed(0)
    plain = [torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3)]
    expected = F.scaled_dot_product_attention(plain[0], plain[1], plain[2], is_causal=True)
    seed = torch.randn(expected.shape)
    gradients = torch.autograd.grad(expected, plain, seed)
    q, k, v = (layout.shard(x.detach(), 2, rank).to(device()).requires_grad_() for x in plain)
    own_seed = layout.shard(seed, 2, rank).to(device())
    attend = partial(
        context_parallel_attention, q, k, v, mesh, is_causal=True, layout=layout, method=method
    )
    for _ in range(2):
        out = yield "forward", attend
        got = yield "backward", partial(torch.autograd.grad, out, (q, k, v), own_seed)
        (whole,) = yield "unshard", partial(context_parallel_unshard, mesh, [out], [2], layout)
    assert_same(whole, expected)
    for each, wanted in zip(got, gradients, strict=True):
        assert_same(each, layout.shard(wanted, 2, rank))


class Experts(nn.Module):
    """Feed-forward networks, each for the tokens that choose it."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts, self.is_concatenated = experts, True
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.randn(experts, width, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            share = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            gate, up = F.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, -1)
            out = out + share * F.linear(F.silu(gate) * up, self.down_proj[expert])
        return out


def _experts(kind: str, lib: Library) -> Generator[Part, Any, None]:
    """Eight experts, of which each token chooses two: over the ranks whole, or their features."""
    tensor, styles = lib.tensor, lib.styles
    style = {
        "own tokens": styles.ExpertParallel(),
        "replicated tokens": styles.ExpertParallel(input_layouts=tensor.Replicate()),
        "features": styles.ExpertTensorParallel(),
    }[kind]
    mesh = lib.init_device_mesh(device().type, (4,))
    torch.manual_seed(0)
    plain = Experts(8, width=8, hidden=12)
    model = copy.deepcopy(plain).to(device())
    styles.parallelize_module(model, mesh, style)
    x = torch.randn(12, 8)
    weights, chosen = torch.randn(12, 8).softmax(-1).topk(2, -1)
    expected = plain(x, chosen, weights)
    expected.square().sum().backward()
    mine = (
        slice(3 * dist.get_rank(), 3 * dist.get_rank() + 3) if kind == "own tokens" else slice(None)
    )
    arguments = [each[mine].to(device()) for each in (x, chosen, weights)]
    for _ in range(2):
        model.zero_grad()
        out = yield "forward", partial(model, *arguments)
        loss = out.square().sum()
        yield "backward", loss.backward
    assert_same(out, expected[mine], 1e-4)
    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(got.grad, wanted.grad, 1e-3)


def checkpoint(lib: Library) -> Generator[Part, Any, None]:
    """Shards and a plain tensor, written, changed and read again.

    This is done by torch's functions and by our `Checkpointer`.
    """
    from torch.distributed import checkpoint as dcp

    from shoal_dtensor.checkpoint import Checkpointer

    mesh = lib.init_device_mesh(device().type, (4,))
    torch.manual_seed(0)
    weight, step = torch.randn(7, 5), torch.tensor(3.0)
    folders: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])
    state = {
        "weight": lib.tensor.distribute_tensor(weight.to(device()), mesh, [lib.tensor.Shard(0)]),
        "step": step.to(device()),
    }

    def read_by(load: Any) -> None:
        for value in state.values():
            value.zero_()
        load()
        assert_same(state["weight"], weight)
        assert_same(state["step"], step)

    yield "DCP save", partial(dcp.save, state, checkpoint_id=folder / "dcp")
    yield "DCP load", partial(read_by, partial(dcp.load, state, checkpoint_id=folder / "dcp"))
    if lib.ours:
        with Checkpointer(folder / "ours") as checkpoints:
            yield "save", partial(checkpoints.save, 1, state)
            yield "load", partial(read_by, partial(checkpoints.load, state))
            yield "save in the background", partial(checkpoints.save, 2, state, background=True)
            state["weight"].zero_()  # the next step goes on beside
            checkpoints.wait()
            read_by(partial(checkpoints.load, state))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
}


def optimizers(lib: Library) -> Generator[Part, Any, None]:
    """Three steps of each on shards of one axis and of another, after a clip by their norm."""
    mesh = lib.init_device_mesh(device().type, (2, 2), mesh_dim_names=("data", "tensor"))

    def sharded(value: Tensor) -> Any:
        placements = [lib.tensor.Shard(0), lib.tensor.Replicate()]
        return lib.tensor.distribute_tensor(value.to(device()), mesh, placements)

    torch.manual_seed(0)
    values = [torch.randn(7, 5), torch.randn(5)]
    gradients = [torch.randn(7, 5), torch.randn(5)]
    for name, make in OPTIMIZERS.items():
        plain = [value.clone().requires_grad_() for value in values]
        ours = [sharded(value).requires_grad_() for value in values]
        reference, optimizer = make(plain), make(ours)
        for _ in range(3):
            for param, mine, gradient in zip(plain, ours, gradients, strict=True):
                param.grad = gradient.clone()
                mine.grad = sharded(gradient)
            nn.utils.clip_grad_norm_(plain, 1.0)
            yield "clip", partial(lib.clip_grad_norm_, ours, 1.0)
            yield name, optimizer.step
            reference.step()
        if lib.ours:
            for got, expected in zip(ours, plain, strict=True):
                assert_same(got, expected)


LAYERS: dict[str, Program] = {
    "optimizers": optimizers,
    "loss_parallel": loss_parallel,
    "linear_cross_entropy": linear_cross_entropy,
    **{
        f"context parallel, {method}": partial(_attention, method)
        for method in ("allgather", "ring", "ulysses")
    },
    **{
        f"experts, {kind}": partial(_experts, kind)
        for kind in ("own tokens", "replicated tokens", "features")
    },
    "checkpoint": checkpoint,
}
