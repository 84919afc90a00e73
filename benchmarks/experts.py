"""A layer of experts on four gloo ranks: time of a step and bytes sent, by hand, as torchtitan does it, and by shoal.

    python benchmarks/experts.py [--rounds 9]

Every rank has its own tokens; experts are packed weights, the router's choices are random and the same for all. By
hand: tokens sorted by expert, `all_to_all_single` there and back, the weights of the choices applied by the sender.
torchtitan's way: the same through the functional collective that autograd knows. The local computation is one loop over
the experts for all. A step is forward and backward. In the last rows all ranks have all tokens of the four, and experts
or their features are on ranks.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _timing import report
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional
from tp_training import in_turns

from shoal_dtensor import Replicate
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import ExpertParallel, ExpertTensorParallel, parallelize_module

RANKS, EXPERTS, CHOICES, WIDTH, HIDDEN, TOKENS = 4, 16, 2, 256, 512, 512
BAR = 1.1  # time of a step at most, as a multiple of by hand


class Experts(nn.Module):
    """Rows sorted by expert, and how many each expert gets."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        groups = torch.split_with_sizes(rows, num_tokens_per_expert.tolist())
        made = [functional.silu(x @ a.t()) @ b.t() for x, a, b in zip(groups, self.w1, self.w2, strict=True)]
        return torch.cat(made)


class Layer(nn.Module):
    """Tokens to rows by expert, the experts, and back."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        rows = self.experts(x.index_select(0, order // CHOICES), torch.bincount(flat, minlength=EXPERTS))
        rows = rows * weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


class HandExchange(torch.autograd.Function):
    """Rows to other ranks; their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        ctx.sizes = sends, receives
        out = rows.new_empty(sum(receives), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receives, sends)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sends, receives = ctx.sizes
        out = grad.new_empty(sum(sends), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), sends, receives)
        return out, None, None


class Sent(nn.Module):
    """Experts of this rank, behind an exchange."""

    def __init__(self, titan: bool) -> None:
        super().__init__()
        self.own, self.titan = Experts(EXPERTS // RANKS), titan

    def exchange(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        if self.titan:
            return all_to_all_single_autograd(rows, receives, sends, dist.group.WORLD)
        return HandExchange.apply(rows, sends, receives)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        by_rank = torch.stack([counts, received]).view(2, RANKS, -1)
        sends, receives = by_rank.sum(2).tolist()
        here = self.exchange(rows, sends, receives)
        which = torch.arange(EXPERTS // RANKS).repeat(RANKS).repeat_interleave(received)
        order = torch.argsort(which, stable=True)
        made = self.own(here.index_select(0, order), by_rank[1].sum(0))
        return self.exchange(made.index_select(0, torch.argsort(order)), receives, sends)


def rank_main(rounds: int) -> list[tuple[str, float, int]]:
    """Name, seconds of the best round, and bytes sent by this rank, of each rival."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    every = torch.randn(RANKS * TOKENS, WIDTH)
    choices = torch.rand(RANKS * TOKENS, EXPERTS).topk(CHOICES, -1)
    own = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    layers: dict[str, tuple[nn.Module, slice]] = {
        "by hand": (Layer(Sent(titan=False)), own),
        "torchtitan's way": (Layer(Sent(titan=True)), own),
    }
    styles = {
        "shoal, tokens sent": (ExpertParallel(), own),
        "shoal, tokens replicated": (ExpertParallel(input_layouts=Replicate()), slice(None)),
        "shoal, features": (ExpertTensorParallel(), slice(None)),
    }
    for name, (style, rows) in styles.items():
        layers[name] = (parallelize_module(Layer(Experts(EXPERTS)), mesh, {"experts": style}), rows)

    def step(name: str) -> None:
        layer, rows = layers[name]
        layer.zero_grad()
        x = every[rows].clone().requires_grad_()
        layer(x, choices.indices[rows], choices.values[rows]).square().mean().backward()

    works: dict[str, Any] = {name: {"step": partial(step, name)} for name in layers}
    sent = {}
    for name in layers:
        for _ in range(2):
            step(name)
        with CommDebugMode() as mode:
            step(name)
        sent[name] = bytes_sent(mode)
    times = in_turns(works, 2, rounds)
    return [(name, min(times[name]), sent[name]) for name in layers]


def bytes_sent(mode: CommDebugMode) -> int:
    """Bytes that this rank gave to other ranks: of an all-to-all 3/4 on average, of a reduction on a ring 3/2."""
    share = {"all_reduce": 2 * (RANKS - 1) / RANKS, "all_gather_into_tensor": RANKS - 1}
    return round(sum(record.nbytes * share.get(record.op, (RANKS - 1) / RANKS) for record in mode.trace))


def main() -> None:
    """Print the table and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    found = rank_pool(RANKS).run(rank_main, parser.parse_args().rounds)[0]
    base = found[0][1]
    rows = [(name, seconds * 1e3, seconds / base, sent / 2**20) for name, seconds, sent in found]
    report("experts", ("layer", "ms a step", "x by hand", "MiB sent a rank"), rows)
    ratio = rows[2][2]
    print(f"tokens sent: {ratio:.2f} x by hand, bar {BAR}: {'met' if ratio <= BAR else 'NOT met'}")


if __name__ == "__main__":
    main()
