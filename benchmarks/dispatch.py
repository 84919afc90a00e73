"""Host time of an operator on DTensors: plain tensors, torch's DTensor and shoal's in one run.

One thread, tiny tensors, fake process group of 4: the time is that of software. The bars are the
bars of the design.

    python benchmarks/dispatch.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _timing import race, report

import shoal_dtensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

Case = Callable[[Any, Any], Callable[[], object]]


def _chain(lib: Any, mesh: Any) -> Callable[[], object]:
    local = torch.randn(2, 8, requires_grad=True)
    weight = lib.DTensor.from_local(torch.randn(8, 8), mesh, [lib.Replicate()]).requires_grad_()

    def run() -> None:
        x = lib.DTensor.from_local(local, mesh, [lib.Shard(0)])
        y = torch.relu(torch.mm(x, weight)) * 2.0
        y.sum().redistribute(placements=[lib.Replicate()]).to_local().backward()
        local.grad = weight.grad = None

    return run


def _unary(function: Callable[[Any], object]) -> Case:
    def build(lib: Any, mesh: Any) -> Callable[[], object]:
        x = lib.DTensor.from_local(torch.randn(2, 8), mesh, [lib.Shard(0)])
        return lambda: function(x)

    return build


def _binary(function: Callable[[Any, Any], object]) -> Case:
    def build(lib: Any, mesh: Any) -> Callable[[], object]:
        x = lib.DTensor.from_local(torch.randn(2, 8), mesh, [lib.Shard(0)])
        w = lib.DTensor.from_local(torch.randn(8, 8), mesh, [lib.Replicate()])
        return lambda: function(x, w)

    return build


def _redistribute(source: str, target: str) -> Case:
    def build(lib: Any, mesh: Any) -> Callable[[], object]:
        by_name = {"S(0)": lib.Shard(0), "R": lib.Replicate(), "P": lib.Partial()}
        rows = 2 if source == "S(0)" else 8
        x = lib.DTensor.from_local(torch.randn(rows, 8), mesh, [by_name[source]])
        placements = [by_name[target]]
        return lambda: x.redistribute(placements=placements)

    return build


def _from_local(lib: Any, mesh: Any) -> Callable[[], object]:
    local, placements = torch.randn(2, 8), [lib.Shard(0)]
    return lambda: lib.DTensor.from_local(local, mesh, placements)


def _foreach_add(lib: Any, mesh: Any) -> Callable[[], object]:
    xs = [lib.DTensor.from_local(torch.randn(2, 8), mesh, [lib.Shard(0)]) for _ in range(10)]
    return lambda: torch._foreach_add(xs, xs)


CASES: dict[str, tuple[Case, float]] = {
    "add": (_unary(lambda x: x + x), 1.0),
    "relu": (_unary(torch.relu), 1.0),
    "mm": (_binary(torch.mm), 1.0),
    "t": (_unary(lambda x: x.t()), 1.0),
    "detach": (_unary(lambda x: x.detach()), 1.0),
    "x * 2.0": (_unary(lambda x: x * 2.0), 0.6),
    "linear": (_binary(F.linear), 0.6),
    "view": (_unary(lambda x: x.view(8, 2, 4)), 0.6),
    "layer_norm": (_unary(lambda x: F.layer_norm(x, (8,))), 0.6),
    "split": (_unary(lambda x: x.split(4, 1)), 0.6),
    "from_local": (_from_local, 0.3),
    "S(0) -> R": (_redistribute("S(0)", "R"), 0.25),
    "R -> S(0)": (_redistribute("R", "S(0)"), 0.25),
    "P -> R": (_redistribute("P", "R"), 0.25),
    "P -> S(0)": (_redistribute("P", "S(0)"), 0.25),
    "foreach_add of 10": (_foreach_add, 0.6),
    "chain forward + backward": (_chain, 0.5),
}


def cache_after_steps(steps: int = 1000) -> int:
    """Decisions remembered after so many AdamW steps with a changing learning rate."""
    mesh = init_device_mesh("cpu", (4,))
    parameters = [
        torch.nn.Parameter(
            shoal_dtensor.DTensor.from_local(torch.randn(2, 8), mesh, [shoal_dtensor.Shard(0)])
        )
        for _ in range(4)
    ]
    for foreach in (False, True):
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=foreach)
        for step in range(steps):
            for parameter in parameters:
                parameter.grad = parameter.detach()
            optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
            optimizer.step()
    return sum(shoal_dtensor.cache_info().values())


def main() -> None:
    import torch.distributed.tensor as peer
    from torch.distributed.device_mesh import init_device_mesh as peer_mesh

    torch.set_num_threads(1)
    rows: list[list[object]] = []
    with fake_world(4):
        theirs, ours = peer_mesh("cpu", (4,)), init_device_mesh("cpu", (4,))
        for name, (case, bar) in CASES.items():
            timing = race({"torch": case(peer, theirs), "shoal": case(shoal_dtensor, ours)})
            ratio = timing["shoal"].best / timing["torch"].best
            verdict = "ok" if ratio <= bar else "MISSED"
            rows.append([name, timing["torch"].us, timing["shoal"].us, ratio, bar, verdict])
        report("dispatch", ["case", "torch us", "shoal us", "ratio", "bar", ""], rows)
        print(
            f"decisions after 2 x 1000 AdamW steps, learning rate changing: {cache_after_steps()}"
        )


if __name__ == "__main__":
    main()
