"""Waits of the host in the main programs, for shoal and for torch's own stack.

It writes docs/device_stalls.md.

`nox -s device -- --table` runs it, in a process that has the simulated accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from .every_program import OURS_ALONE, PROGRAMS, measures
from .layers import LAYERS
from .operators import OPERATORS
from .programs import Measure
from .training import TRAININGS

PAGE = Path(__file__).parents[2] / "docs" / "device_stalls.md"
HOST = ("H2D", "D2H", "SYNC")
KINDS = (*HOST, "RACE", "COLLECTIVE")
HEAD = f"""# Waits of the host for the device

Written by `nox -s device -- --table` with torch {torch.__version__}; do not edit. The table is
about the main programs on the [simulated accelerator](accelerators.md), on rank 0 of four ranks,
after warm-up. It has the copies to the device (H2D) and from it (D2H) for which the host waited,
other synchronizations, races and collectives. A race is a mistake around a collective or copy: its
memory was read, written or freed while it ran, or the program never waited for it. Copies for which
the host does not wait are in brackets. The columns of torch are for the same program on torch's own
DTensor, styles, `fully_shard` and `replicate`: "raises" means that torch does not run it, "-" that
torch does not have the feature.
"""
MEMORY = """
## Memory of the device

KiB that the program has allocated after the forward of the last microbatch (live), and at the peak
of the backward of that microbatch, which adds to the gradients of an earlier one. Up to half a KiB
of each peak of `fully_shard` are the flags of the gradients that a rank has. `replicate` does not
keep buckets between backwards; DDP always does.

| training | shoal live | peak | torch live | peak |
|---|---|---|---|---|
"""
GRAPHS = """
## CUDA graphs

A step may be captured where, after warm-up, the host neither waits nor asks whether work is done.
Which parts of the programs above do, and where; nothing of the kind was seen in: {quiet}. Not seen
here, but not captured either: sharded random operators on CUDA, which move the offset of their
generator (all modes but "local"); a part whose tensors are new in each step, unless the allocator
of the graph holds them; a backward in which this rank has no gradient for a trained parameter, for
it then reads whether others have one; `torch.autograd.grad` of parameters of `replicate`, for which
the ranks agree; and the first attention of a `context_parallel` block, where they compare
arguments.

Whether work is done is asked on CPU ranks only, by `lockstep()`, and where a program calls
`is_completed()` of a `Pending`; none of them belongs into a capture.

| part | kind of wait | line |
|---|---|---|
"""
_TITLES = ("H2D", "D2H", "synchronisations", "races", "collectives")


def cells(measure: Measure | None) -> list[str]:
    """The counts of a part, as text."""
    if measure is None:
        return ["-"] * len(KINDS)
    if measure.error:
        return [f"raises {measure.error}", *[""] * (len(KINDS) - 1)]
    found = []
    for kind in KINDS:
        count = measure.count(kind) + (measure.count("DROPPED") if kind == "RACE" else 0)
        later = measure.count(f"{kind} later")
        found.append(f"{count} ({later})" if later else str(count))
    return found


def total(measures: Iterable[Measure]) -> Measure:
    """Several parts as one."""
    return Measure(tuple(event for measure in measures for event in measure.events))


def rows(name: str) -> list[tuple[str, Measure | None, Measure | None]]:
    """Of a program: title, what shoal did, what torch did."""
    ours = measures(name)[0]
    theirs = {} if name in OURS_ALONE else measures(name, "torch")[0]
    if name == "operators":
        ran = [part for part, measure in theirs.items() if not measure.error]
        title = f"{len(OPERATORS)} operators with a known decision, of which torch runs {len(ran)}"
        return [(title, total(ours.values()), total(theirs[part] for part in ran))]
    return [(f"{name}: {part}", ours.get(part), theirs.get(part)) for part in {**ours, **theirs}]


def page() -> str:
    """docs/device_stalls.md."""
    lines = [
        HEAD,
        f"| path | {' | '.join(_TITLES)} | torch: {' | '.join(_TITLES)} |",
        f"|---|{'---|' * 2 * len(KINDS)}",
    ]
    for name in PROGRAMS:
        for title, ours, theirs in rows(name):
            lines.append(f"| {' | '.join([title, *cells(ours), *cells(theirs)])} |")
    lines.append(MEMORY.rstrip("\n"))
    for name in TRAININGS:
        numbers = []
        for library in ("shoal", "torch"):
            parts = measures(name, library)[0]
            numbers += [
                f"{parts['forward'].live / 1024:.0f}",
                f"{parts['backward'].peak / 1024:.0f}",
            ]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines) + "\n" + graphs()


def graphs() -> str:
    """Which parts of steps the host takes part in."""
    quiet, lines = [], []
    for name in (name for name in (*TRAININGS, *LAYERS) if name != "checkpoint"):
        seen = {
            part: sorted(
                {
                    (event.kind, event.line)
                    for event in measure.events
                    if event.kind in (*HOST, "POLL")
                }
            )
            for part, measure in measures(name)[0].items()
        }
        if not any(seen.values()):
            quiet.append(name)
        for part, found in seen.items():
            if found:
                kinds, places = ({each[at] for each in found} for at in (0, 1))
                lines.append(
                    f"| {name}: {part} | {', '.join(sorted(kinds))} | {', '.join(sorted(places))} "
                    "|\n"
                )
    return GRAPHS.format(quiet="; ".join(quiet)) + "".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
