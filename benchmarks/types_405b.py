"""Seconds and memory to check the types of one step of Llama 405B, written as plain SPMD code.

Run: ``python benchmarks/types_405b.py``. 126 layers of width 16,384 on an abstract mesh of 1,024
data ranks times 8 tensor-parallel ranks, forward and loss, then the backward, on tensors without
memory, in one process with one thread. Global mode checks that every shard stays a shard of a
global tensor; local mode checks R, I, V and P only.
"""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

import torch
from _timing import report
from torch import Tensor
from torch.nn import functional as F

from shoal_mesh import abstract_mesh
from shoal_spmd_types import (
    I,
    P,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    convert,
    set_current_mesh,
    typecheck,
)

LAYERS = 126
DATA_RANKS = 1024
RANKS = 8
WIDTH = 16384
HIDDEN = 53248
HEADS = 128
KEY_HEADS = 8
FEATURES = WIDTH // HEADS
VOCABULARY = 128256
BATCH = 1
POSITIONS = 8192


class Layer(NamedTuple):
    """The local weights of one layer: shards of heads and of hidden features."""

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def weight(rows: int, columns: int | None, kind: object) -> Tensor:
    """Return a local weight with its type; along "dp" it is R, for its gradient is summed there."""
    shape = (rows,) if columns is None else (rows, columns)
    tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return assert_type(tensor, {"dp": R, "tp": kind})


def make_layer() -> Layer:
    return Layer(
        weight(WIDTH, None, I),
        weight(WIDTH // RANKS, WIDTH, S(0)),
        weight(KEY_HEADS * FEATURES // RANKS, WIDTH, S(0)),
        weight(KEY_HEADS * FEATURES // RANKS, WIDTH, S(0)),
        weight(WIDTH, WIDTH // RANKS, S(1)),
        weight(WIDTH, None, I),
        weight(HIDDEN // RANKS, WIDTH, S(0)),
        weight(HIDDEN // RANKS, WIDTH, S(0)),
        weight(WIDTH, HIDDEN // RANKS, S(1)),
    )


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def heads_of(features: Tensor) -> Tensor:
    """Return (batch, heads, positions, features of a head) of (batch, positions, features)."""
    return features.unflatten(-1, (-1, FEATURES)).transpose(1, 2)


def run_layer(x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the activations (batch, positions, width) behind one layer."""
    inside = convert(F.rms_norm(x, (WIDTH,), layer.attention_norm), "tp", src=I, dst=R)
    query = rotated(heads_of(F.linear(inside, layer.query)), cos, sin)
    key = rotated(heads_of(F.linear(inside, layer.key)), cos, sin)
    value = heads_of(F.linear(inside, layer.value))
    repeats = HEADS // KEY_HEADS
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    mixed = mixed.transpose(1, 2).flatten(2)
    x = x + all_reduce(F.linear(mixed, layer.out), "tp", src=P, dst=I)
    inside = convert(F.rms_norm(x, (WIDTH,), layer.mlp_norm), "tp", src=I, dst=R)
    hidden = F.silu(F.linear(inside, layer.gate)) * F.linear(inside, layer.up)
    return x + all_reduce(F.linear(hidden, layer.down), "tp", src=P, dst=I)


def loss_of(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the summed loss of logits (batch, positions, words) over shards of words, S(2)."""
    total = all_reduce(logits.exp().sum(-1), "tp", src=P, dst=I)
    picked = all_reduce((logits * chosen).sum(-1), "tp", src=P, dst=I)
    return (total.log() - picked).sum()


def check(*, local: bool) -> tuple[float, float]:
    """Return the seconds of the forward and of the whole step."""
    mesh = abstract_mesh((DATA_RANKS, RANKS), ("dp", "tp"))
    with set_current_mesh(mesh), typecheck(local=local):
        layers = [make_layer() for _ in range(LAYERS)]
        head = weight(VOCABULARY // RANKS, WIDTH, S(0))
        activations = torch.empty(
            (BATCH, POSITIONS, WIDTH), dtype=torch.bfloat16, device="meta", requires_grad=True
        )
        x = assert_type(activations, {"dp": S(0), "tp": I})
        angles = torch.empty((POSITIONS, FEATURES), dtype=torch.bfloat16, device="meta")
        cos = assert_type(angles, {"dp": R, "tp": R})
        sin = assert_type(angles.clone(), {"dp": R, "tp": R})
        words = (BATCH, POSITIONS, VOCABULARY // RANKS)
        chosen = assert_type(
            torch.empty(words, dtype=torch.bfloat16, device="meta"), {"dp": S(0), "tp": S(2)}
        )
        start = time.perf_counter()
        for layer in layers:
            x = run_layer(x, layer, cos, sin)
        logits = F.linear(convert(x, "tp", src=I, dst=R), head)
        loss = loss_of(logits, chosen)
        forward = time.perf_counter() - start
        # in local mode the sum of a shard is only known to differ between ranks
        addend = V if local else P
        assert_type(loss, {"dp": addend, "tp": I})
        all_reduce(loss, "dp", src=addend, dst=I).backward()
        return forward, time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for local in (False, True):
        forward, step = check(local=local)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rows.append(("local" if local else "global", forward, step, peak))
    report("types_405b", ("mode", "forward s", "step s", "peak memory GB"), rows)


if __name__ == "__main__":
    main()
