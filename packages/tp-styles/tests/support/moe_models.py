"""Mixtures of experts for tests: packed weights of either orientation, lists, and sorted rows.

The rows are sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN = 8, 6


class PackedExperts(nn.Module):
    """Gate and up in one weight, as (experts, out, in).

    Or it is (experts, in, out) with biases and interleaved.
    """

    def __init__(self, experts: int, transposed: bool = False) -> None:
        super().__init__()
        self.num_experts, self.transposed, self.is_concatenated = (
            experts,
            transposed,
            not transposed,
        )
        up, down = (2 * HIDDEN, WIDTH), (WIDTH, HIDDEN)
        if transposed:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * HIDDEN))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, WIDTH))
        self.gate_up_proj = nn.Parameter(torch.randn(experts, *(up[::-1] if transposed else up)))
        self.down_proj = nn.Parameter(torch.randn(experts, *(down[::-1] if transposed else down)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            if self.transposed:
                both = hidden_states @ self.gate_up_proj[expert] + self.gate_up_proj_bias[expert]
                hidden = functional.silu(both[..., ::2]) * both[..., 1::2]
                out = out + weight * (hidden @ self.down_proj[expert] + self.down_proj_bias[expert])
            else:
                gate, up = functional.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, -1)
                out = out + weight * functional.linear(
                    functional.silu(gate) * up, self.down_proj[expert]
                )
        return out


class Expert(nn.Module):
    """One expert of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.gelu(self.w1(x)))
        return out


class ListedExperts(nn.ModuleList):
    """Experts as modules."""

    def __init__(self, experts: int) -> None:
        super().__init__(Expert() for _ in range(experts))
        self.num_experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            made = self[expert](hidden_states[token]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, made)
        return out


class SortedExperts(nn.Module):
    """Rows that are sorted by expert, as torchtitan's experts take them."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, HIDDEN, WIDTH)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        sizes: list[int] = num_tokens_per_expert.tolist()
        groups = torch.split_with_sizes(x[: sum(sizes)], sizes)
        out = torch.cat(
            [
                (functional.silu(g @ a.t()) * (g @ c.t())) @ b.t()
                for g, a, b, c in zip(groups, self.w1, self.w2, self.w3, strict=True)
            ]
        )
        return torch.cat([out, x[len(out) :] * 0])


class Mixture(nn.Module):
    """Router, experts and a shared expert.

    Args:
        experts: the experts.
        count: their number.
        choices: experts of each token.
        favourite: the expert that every token chooses first; None: as the router says.
    """

    def __init__(
        self, experts: nn.Module, count: int, choices: int = 2, favourite: int | None = None
    ) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, count, bias=False), experts
        self.shared = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.choices, self.favourite = choices, favourite

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.favourite is not None:
            scores = scores.index_fill(-1, torch.tensor([self.favourite]), 100.0)
        weights, chosen = scores.softmax(-1).topk(self.choices, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = x.reshape(-1, WIDTH)
        weights, chosen = weights.reshape(-1, self.choices), chosen.reshape(-1, self.choices)
        if isinstance(self.experts, SortedExperts):
            order = torch.argsort(chosen.reshape(-1), stable=True)
            counts = torch.bincount(chosen.reshape(-1), minlength=self.router.out_features)
            rows = (
                self.experts(flat[order // self.choices], counts) * weights.reshape(-1)[order, None]
            )
            out = torch.zeros_like(flat).index_add(0, order // self.choices, rows)
        else:
            out = self.experts(flat, chosen, weights)
        shared: Tensor = self.shared(x)
        return out.view_as(x) + shared


KINDS: dict[str, Any] = {
    "packed": PackedExperts,
    "transposed": lambda experts: PackedExperts(experts, transposed=True),
    "listed": ListedExperts,
    "sorted": SortedExperts,
}


def mixture(kind: str, experts: int, **options: Any) -> Mixture:
    """A mixture of a kind, in float64."""
    torch.manual_seed(3)
    return Mixture(KINDS[kind](experts), experts, **options).double()
