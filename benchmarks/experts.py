"""A layer of experts on four gloo ranks: time of a step and bytes sent.

The rivals are by hand, as torchtitan does it, and by shoal.

    python benchmarks/experts.py [--rounds 9]

Every rank has its own tokens; experts are packed weights, the router's choices are random and the
same for all. By hand: tokens sorted by expert, `all_to_all_single` there and back, the weights of
the choices applied by the sender. torchtitan: `ExpertParallel` of torchtitan 0.2.2, its own code,
where it is installed (`pip install --no-deps`); its index kernel needs a GPU, so the CPU form that
it has beside it runs. The local computation is one loop over the experts for all. A step is forward
and backward. Outputs are compared. In the rows "replicated" and "features" all ranks have all
tokens of the four, and experts or their features are on ranks. The last rows have a shared expert,
behind the dispatch or beside it (`SharedExpertOverlap`).
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
from _timing import Case, keep_cases, report
from torch import Tensor, nn
from torch.nn import functional
from tp_training import in_turns

from shoal_dtensor import Replicate
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import rank_pool
from shoal_tp_styles import (
    ExpertParallel,
    ExpertTensorParallel,
    SharedExpertOverlap,
    parallelize_module,
)

RANKS, EXPERTS, CHOICES, WIDTH, HIDDEN, TOKENS = 4, 16, 2, 256, 512, 512
IN_TURN, BESIDE = "shared expert, in turn", "shared expert, beside"
# time of a step at most, as a multiple of by hand
BAR = 1.1


class Experts(nn.Module):
    """Rows sorted by expert, and how many each expert gets."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / WIDTH**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        groups = torch.split_with_sizes(rows, num_tokens_per_expert.tolist())
        made = [
            functional.silu(x @ a.t()) @ b.t()
            for x, a, b in zip(groups, self.w1, self.w2, strict=True)
        ]
        return torch.cat(made)


class Layer(nn.Module):
    """Tokens to rows by expert, the experts, and back."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        rows = self.experts(
            x.index_select(0, order // CHOICES), torch.bincount(flat, minlength=EXPERTS)
        )
        rows = rows * weights.reshape(-1).index_select(0, order).unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, order // CHOICES, rows)


class Block(Layer):
    """A layer with a shared expert."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__(experts)
        torch.manual_seed(2)
        self.shared = nn.Sequential(
            nn.Linear(WIDTH, 2 * HIDDEN), nn.SiLU(), nn.Linear(2 * HIDDEN, WIDTH)
        )

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        computed: Tensor = super().forward(x, chosen, weights)
        return computed + self.shared(x)


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

    def __init__(self, whole: Experts) -> None:
        super().__init__()
        self.own, size = Experts(EXPERTS // RANKS), EXPERTS // RANKS
        with torch.no_grad():
            for mine, every in zip(self.own.parameters(), whole.parameters(), strict=True):
                mine.copy_(every[dist.get_rank() * size :][:size])

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        by_rank = torch.stack([counts, received]).view(2, RANKS, -1)
        sends, receives = by_rank.sum(2).tolist()
        here = HandExchange.apply(rows, sends, receives)  # type: ignore[no-untyped-call]  # torch
        which = torch.arange(EXPERTS // RANKS).repeat(RANKS).repeat_interleave(received)
        order = torch.argsort(which, stable=True)
        made = self.own(here.index_select(0, order), by_rank[1].sum(0))
        back = made.index_select(0, torch.argsort(order))
        exchange: Any = HandExchange.apply
        returned: Tensor = exchange(back, receives, sends)
        return returned


class PaddedExperts(Experts):
    """Experts as torchtitan's style calls them: DTensor weights, padding rows behind the others."""

    def forward(self, rows: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        sizes: list[int] = num_tokens_per_expert.tolist()
        groups = torch.split_with_sizes(rows[: sum(sizes)], sizes)
        weights: Any = self._parameters.values()
        w1, w2 = (weight.to_local() for weight in weights)
        made = [functional.silu(x @ a.t()) @ b.t() for x, a, b in zip(groups, w1, w2, strict=True)]
        return torch.cat([*made, rows.new_zeros(len(rows) - sum(sizes), rows.shape[1])])


def torchtitan_style() -> Any:
    """The `ExpertParallel` of torchtitan alone: importing the rest of torchtitan needs a GPU."""
    spec = find_spec("torchtitan")
    assert spec is not None, "the caller has asked"
    assert spec.submodule_search_locations is not None, "a package"
    for name in ("", ".distributed", ".models", ".models.moe", ".tools"):
        package: Any = ModuleType(f"torchtitan{name}")
        package.__path__ = [spec.submodule_search_locations[0] + name.replace(".", "/")]
        sys.modules[package.__name__] = package
    with patch.dict(sys.modules, {"triton": MagicMock(), "triton.language": MagicMock()}):
        from torchtitan.distributed.expert_parallel import ExpertParallel as Style
        from torchtitan.models.moe import utils
    utils.generate_permute_indices = partial(utils.generate_permute_indices, use_cpu=True)
    return Style()


def experts(kind: type[Experts] = Experts) -> Experts:
    """The same values on every rank."""
    torch.manual_seed(1)
    return kind(EXPERTS)


def rank_main(rounds: int) -> list[tuple[str, float, int]]:
    """Name, seconds of the best round, and bytes sent by this rank, of each rival."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    every = torch.randn(RANKS * TOKENS, WIDTH)
    choices = torch.rand(RANKS * TOKENS, EXPERTS).topk(CHOICES, -1)
    own = slice(dist.get_rank() * TOKENS, (dist.get_rank() + 1) * TOKENS)
    layers: dict[str, tuple[nn.Module, slice]] = {"by hand": (Layer(Sent(experts())), own)}
    if find_spec("torchtitan"):
        theirs = torch_mesh.init_device_mesh("cpu", (RANKS,))
        layers["torchtitan"] = Layer(torchtitan_style()._apply(experts(PaddedExperts), theirs)), own
    styles = {
        "shoal, tokens sent": (ExpertParallel(), own),
        "shoal, tokens replicated": (ExpertParallel(input_layouts=Replicate()), slice(None)),
        "shoal, features": (ExpertTensorParallel(), slice(None)),
    }
    for name, (style, rows) in styles.items():
        layers[name] = (parallelize_module(Layer(experts()), mesh, {"experts": style}), rows)
    plan = {"experts": ExpertParallel()}
    layers[IN_TURN] = (parallelize_module(Block(experts()), mesh, plan), own)
    layers[BESIDE] = (
        parallelize_module(
            Block(experts()), mesh, {**plan, "": SharedExpertOverlap(shared="shared")}
        ),
        own,
    )

    def step(name: str) -> Tensor:
        layer, rows = layers[name]
        layer.zero_grad()
        x = every[rows].clone().requires_grad_()
        out: Tensor = layer(x, choices.indices[rows], choices.values[rows])
        out.square().mean().backward()
        return out.detach()[own if rows == slice(None) else slice(None)]

    works: dict[str, Any] = {name: {"step": partial(step, name)} for name in layers}
    sent = {}
    for name in layers:
        torch.testing.assert_close(
            step(name), step(IN_TURN if name == BESIDE else name if name == IN_TURN else "by hand")
        )
        with CommDebugMode() as mode:
            step(name)
        sent[name] = bytes_sent(mode)
    times = in_turns(works, 2, rounds)
    return [(name, min(times[name]), sent[name]) for name in layers]


def bytes_sent(mode: CommDebugMode) -> int:
    """Count bytes sent to other ranks.

    An all-to-all sends 3/4 on average, and a reduction on a ring 3/2.
    """
    share = {"all_reduce": 2 * (RANKS - 1) / RANKS, "all_gather_into_tensor": RANKS - 1}
    return round(
        sum(record.nbytes * share.get(record.op, (RANKS - 1) / RANKS) for record in mode.trace)
    )


def main() -> None:
    """Print the table and whether the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    found = rank_pool(RANKS).run(rank_main, parser.parse_args().rounds)[0]
    base = found[0][1]
    rows = [(name, seconds * 1e3, seconds / base, sent / 2**20) for name, seconds, sent in found]
    report("experts", ("layer", "ms a step", "x by hand", "MiB sent a rank"), rows)
    sent = next(ms for name, ms, _, _ in rows if name == "shoal, tokens sent")
    keep_cases(
        "experts",
        [Case("step of a mixture of experts, tokens sent", "ms", sent, by_hand=base * 1e3)],
    )
    ratio = next(each for name, _, each, _ in rows if name == "shoal, tokens sent")
    print(f"tokens sent: {ratio:.2f} x by hand, bar {BAR}: {'met' if ratio <= BAR else 'NOT met'}")
    turn, beside = (
        next(ms for name, ms, _, _ in rows if name == each) for each in (IN_TURN, BESIDE)
    )
    print(f"shared expert beside the dispatch: {beside / turn:.2f} x in turn")


if __name__ == "__main__":
    main()
