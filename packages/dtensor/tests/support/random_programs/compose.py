"""Writing a program: lines from the vocabulary, as many as fit."""

from __future__ import annotations

from random import Random

import torch

from .draft import Draft, Skip
from .edges import EDGES
from .program import Machine, Program
from .shapes import SHAPES
from .values import VALUES
from .writes import WRITES

__all__ = ["compose", "holds"]

MESHES = ((4,), (2, 2))


def compose(seed: int, steps: int | None = None) -> Program:
    """The program of a number: the same everywhere.

    Args:
        seed: the number.
        steps: how many random lines; 3 to 8 when left out. Lines that make their operands come on
            top.
    """
    d = Draft(Random(seed), MESHES[seed % 2])
    torch.manual_seed(7)
    for _ in range(d.integer(1, 2)):
        d.made("leaf" if d.chance(0.6) else "real", d.shape())
    wanted = steps or d.integer(3, 8)
    for _ in range(wanted):
        for _ in range(12):
            if _step(d):
                break
    return d.program


def _step(d: Draft) -> bool:
    """Write one more line; whether that went well."""
    before = len(d.lines)
    writing = d.chance(0.35)
    try:
        if d.chance(0.25):
            d.add(d.pick(EDGES)(d))
        elif writing:
            d.add(d.pick(WRITES)(d))
        else:
            made = d.pick(VALUES if d.chance(0.5) else SHAPES)(d)
            d.add(f"{d.name()} = {made}")
    except (Skip, RuntimeError, IndexError, ValueError):
        if len(d.lines) > before:
            d.forget(before)
        return False
    if (writing or len(d.lines) > before + 1) and not holds(d.program) and not d.chance(0.03):
        d.forget(before)
        return False
    return True


def holds(program: Program) -> bool:
    """Whether the program runs on one device, forward and backward, without surprises of values."""
    machine = Machine()
    torch.manual_seed(7)
    try:
        machine.run(program.lines)
        if machine.backward():
            return False
    except Exception:
        # any error of a program that was shrunk means the same
        return False
    grads = [x.grad for x in machine.leaves.values() if x.grad is not None]
    return all(
        bool(torch.isfinite(g).all()) and (not g.numel() or float(g.abs().max()) < 1e8)
        for g in grads
    )
