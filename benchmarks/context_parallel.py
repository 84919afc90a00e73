"""Attention of long sequences: peak memory per rank and time against length.

One device and four ranks are measured in one run.

    python benchmarks/context_parallel.py [--lengths 1024 2048 4096 8192] [--rounds 3] [--plot
    FILE.png]

Causal attention with grouped heads in float32, forward and backward, by each method over gloo ranks
of one thread each, in the layout of head and tail; beside them the whole sequence on one of the
ranks. Memory is the peak of a step beyond its inputs. torch's `context_parallel` is tried
first; where it does not run, its error is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as torch_mesh
from _timing import report
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel
from torch.nn import functional
from tp_training import in_turns, peak_bytes

from shoal_context_parallel import SequenceLayout, context_parallel_attention
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import rank_pool

RANKS, HEADS, SHARED, WIDTH = 4, 8, 2, 64
METHODS = ("allgather", "ring", "ulysses")


def step(
    tensors: Sequence[Tensor], attend: Callable[..., Tensor]
) -> dict[str, Callable[[], object]]:
    """Forward and backward, in the phases that the other benchmarks measure."""

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(*tensors).sum(), tensors)

    return {"zero_grad": lambda: None, "step": forward_and_backward}


def leaves(length: int) -> list[Tensor]:
    """Queries, keys and values."""
    return [
        torch.randn(1, heads, length, WIDTH, requires_grad=True)
        for heads in (HEADS, SHARED, SHARED)
    ]


def one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole sequence."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def measure(length: int, rounds: int) -> dict[str, tuple[int, float]]:
    """Peak bytes and seconds of a step of each rival, on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,))
    layout = SequenceLayout.head_tail(length, RANKS)
    works: dict[str, Any] = {}
    for method in METHODS:
        options: dict[str, Any] = {
            "method": method,
            "layout": layout,
            "is_causal": True,
            "enable_gqa": True,
        }
        local = leaves(layout.sizes[dist.get_rank()])
        works[method] = step(
            local, lambda q, k, v, o=options: context_parallel_attention(q, k, v, mesh, **o)
        )
    whole = step(leaves(length), one_device)
    idle: dict[str, Callable[[], object]] = {"zero_grad": lambda: None}
    works["one device"] = whole if dist.get_rank() == 0 else idle
    peaks = {name: peak_bytes(work) for name, work in works.items()}
    seconds = in_turns(works, 1, rounds)
    return {name: (peaks[name], min(seconds[name])) for name in works}


def torch_runs(length: int) -> str:
    """Return whether torch's own `context_parallel` runs on this device, or its error."""
    mesh = torch_mesh.init_device_mesh("cpu", (RANKS,))
    buffers = [x.detach() for x in leaves(length)]
    buffers = [buffers[0], *(x.repeat_interleave(HEADS // SHARED, 1) for x in buffers[1:])]
    try:
        with torch_context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
            leaf = [x.detach().requires_grad_() for x in buffers]
            query, key, value = leaf
            out: Any = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            out.sum().backward()
    except Exception as error:  # any error, as a user gets it
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    return "runs"


def plot(rows: Sequence[tuple[int, str, float, float]], path: str) -> None:
    """Draw memory against length, a line per method.

    The picture has no background, and its ink suits light and dark pages.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    # the ink of tools/draw.py
    ink = "#7a7a7a"
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    mpl.rcParams |= dict.fromkeys(inked, ink) | {"svg.hashsalt": "shoal", "legend.framealpha": 0.0}
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(row[1] for row in rows):
        line = [(length, peak) for length, each, peak, _ in rows if each == name]
        axis.plot(*zip(*line, strict=True), marker="o", label=name)
    axis.set(
        xlabel="sequence length",
        ylabel=f"peak MiB per rank, of {RANKS}",
        xlim=(0, None),
        ylim=(0, None),
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Print every length and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", help="an SVG of memory against length")
    options = parser.parse_args()
    pool = rank_pool(RANKS)
    rows = []
    for length in options.lengths:
        ranks = pool.run(measure, length, options.rounds, timeout=900)
        for name in ranks[0]:
            peak = max(found[name][0] for found in ranks)
            rows.append((length, name, peak / 2**20, ranks[0][name][1] * 1e3))
    print(f"torch's context_parallel on CPU: {pool.run(torch_runs, 1024, timeout=120)[0]}")
    report("context_parallel", ("length", "method", "peak MiB per rank", "ms"), rows)
    if options.plot:
        plot(rows, options.plot)
    pool.close()


if __name__ == "__main__":
    main()
