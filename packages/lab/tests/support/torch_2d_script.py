"""A script for torchrun in the form of torch's tutorial.

Its tensor and sequence parallelism is inside of its FSDP2.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY = 16
WIDTH = 16
LENGTH = 8
ROWS = 8


class Attention(nn.Module):
    """Attention whose number of heads follows from the shards of its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend to the positions before."""
        projected = [layer(x).unflatten(-1, (-1, 4)) for layer in (self.wq, self.wk, self.wv)]
        query, key, value = (tensor.transpose(1, 2) for tensor in projected)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gate."""
        result: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return result


class Layer(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(WIDTH)
        self.feed_forward = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to their input."""
        h = x + self.attention(self.attention_norm(x))
        result: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return result


class Transformer(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        h = self.tok_embeddings(ids)
        for layer in self.layers:
            h = layer(h)
        result: Tensor = self.output(self.norm(h))
        return result


# Inputs that are shards of the sequence, which the modules need whole.
WHOLE_INPUT = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
LAYER_PLAN: dict[str, Any] = {
    "attention_norm": SequenceParallel(),
    "attention": WHOLE_INPUT,
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": WHOLE_INPUT,
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}
MODEL_PLAN: dict[str, Any] = {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main() -> None:
    """Train for two steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--wrong", action="store_true", help="divide the loss by the data ranks")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    data_size = dist.get_world_size() // options.tp
    mesh = init_device_mesh("cpu", (data_size, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Transformer()
    parallelize_module(model, mesh["tp"], MODEL_PLAN)
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], LAYER_PLAN)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        mine = tokens.chunk(data_size)[mesh.get_local_rank("dp")]
        logits = model(mine[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        if options.wrong:
            loss = loss / data_size
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {float(loss.detach()):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
