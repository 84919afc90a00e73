"""Outcome of a program on this rank: right, refused, wrong or an error."""

from __future__ import annotations

from typing import Any

import torch
from integration_tests.random_modules.edges import EdgeRun, without_watcher
from integration_tests.random_modules.program import Program
from integration_tests.random_modules.train import run
from torch import Tensor, nn

from shoal_dtensor import ShoalTensorError, full_tensor
from shoal_dtensor.errors import StyleError
from shoal_mesh import init_device_mesh
from shoal_mesh.errors import MeshError

__all__ = ["verdict"]

TYPED = (ShoalTensorError, StyleError, MeshError)
AXES = {1: ("tp",), 2: ("dp", "tp")}


def verdict(program: Program) -> str:
    """One rank's part: "" if right.

    Else it is `refused: Type: ...`, `wrong: ...`, `error: ...`, or `void: ...`.

    Void is a program that one device does not run either, or whose numbers on one device follow the
    last bit.
    """
    plain, failed = run(program, None, kind=EdgeRun)
    if failed is not None:
        return f"void: {plain.stage}: {type(failed).__name__}: {str(failed)[:200]}"
    if not all(_finite(value) for value in plain.seen.values()):
        return "void: not finite"
    mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=AXES[len(program.mesh)])
    sharded, failed = run(program, mesh, kind=EdgeRun)
    if failed is not None:
        kind = "refused" if isinstance(failed, TYPED) else "error"
        if kind == "refused" and program.has("watched"):
            _, still_failed = run(without_watcher(program), mesh, kind=EdgeRun)
            if still_failed is None:
                kind = "error: refused only where a mode watches"
        return f"{kind}: {type(failed).__name__}: {sharded.stage}: {str(failed)[:600]}"
    different = _difference(plain, sharded)
    if different and _difference(plain, run(program, None, nudged, EdgeRun)[0]):
        return f"void: one device differs as much after a change of the last bit: {different}"
    return different


def nudged(model: nn.Module) -> None:
    """Move every parameter to the next larger number: what this changes, rounding may change."""
    with torch.no_grad():
        for p in model.parameters():
            p.nextafter_(torch.full_like(p, torch.inf))


def _finite(value: Any) -> bool:
    real = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
    return not real or bool(value.isfinite().all() and value.abs().max() < 1e6)


def _difference(plain: EdgeRun, sharded: EdgeRun) -> str:
    """The first thing that differs.

    Everything is gathered first, so that ranks stay in step whatever differs.
    """
    whole = {n: full_tensor(v) for n, v in sharded.seen.items()}
    odd = sorted(set(whole) ^ set(plain.seen))
    if odd:
        return f"wrong: other names: {odd[:8]}"
    for name, one in plain.seen.items():
        if text := _unlike(one, whole[name], plain.tolerances.get(name)):
            return f"wrong: {name}: {text}"
    return ""


def _unlike(one: Any, other: Any, tolerance: float | None) -> str:
    """How two values differ.

    Narrower numbers differ by more than a tolerance beside the largest one.
    """
    one, other = (torch.as_tensor(v) if isinstance(v, int | float) else v for v in (one, other))
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "" if one == other else f"expected {one!s:.200}, got {other!s:.200}"
    rtol, atol = 1e-7, 1e-9
    if tolerance is not None and one.numel():
        rtol, atol = 0.0, tolerance * float(one.abs().max()) + 1e-6
    try:
        torch.testing.assert_close(other, one, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""
