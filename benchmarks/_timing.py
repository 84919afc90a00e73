"""Timing that holds on a noisy machine.

Rivals take turns in one run, the best round counts, and results are ratios.

A benchmark is a script: it builds the rivals as zero-argument callables, gives them to `race`,
prints a `table`, and hands the same rows to `report`, which keeps them as JSON under out/bench.
Absolute times are for the reader; bars are set on ratios, because they compare across machines and
loads.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
# long enough for the clock, short enough for many turns
ROUND_SECONDS = 0.02


def fresh_processes(code: str, count: int) -> list[float]:
    """The number that each of several processes of this code prints last.

    They may write bytecode, as pip does when it installs: the first finds none in a checkout.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        for _ in range(count)
    ]
    return [float(text.split()[-1]) for text in said]


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call of one rival over all rounds."""

    best: float
    median: float
    rounds: int

    @property
    def us(self) -> float:
        """Best round, in microseconds per call."""
        return self.best * 1e6


def race(
    rivals: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 9,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time the rivals in turns: round 1 of each, round 2 of each, so that load hits all alike.

    Args:
        rivals: name to a callable without arguments; each call is one unit of work.
        rounds: turns per rival; a turn lasts about 20 ms or one call, whichever is longer.
        warmup: untimed calls of each rival first (caches, plans, threads).
        clock: seconds; `time.process_time` for work of one process that sends nothing, because the
            time of other processes does not count.

    Returns:
        Name to `Timing`, in the order given.
    """
    calls = {name: _calls_per_round(work, warmup, clock) for name, work in rivals.items()}
    spent: dict[str, list[float]] = {name: [] for name in rivals}
    gc_was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, work in rivals.items():
                spent[name].append(_time_calls(work, calls[name], clock))
            gc.collect()
    finally:
        if gc_was_on:
            gc.enable()
    return {
        name: Timing(min(each), statistics.median(each), rounds) for name, each in spent.items()
    }


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The rows as an aligned Markdown table; numbers to three significant digits, right-aligned."""
    cells = [[_show(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = [_line(header, widths, numeric)]
    lines.append(
        "|"
        + "|".join(
            "-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, numeric, strict=True)
        )
        + "|"
    )
    lines += [_line(row, widths, numeric) for row in cells]
    return "\n".join(lines)


def report(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """Print the machine and the rows as a table, and keep both in out/bench/NAME.json."""
    print(f"\n{name}: {machine()}\n\n{table(header, rows)}\n", flush=True)
    path = ROOT / "out" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {"machine": machine(), "header": list(header), "rows": [list(row) for row in rows]}
    path.write_text(json.dumps(kept, indent=1))
    return path


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table of all benchmarks: a task of training or serving at a realistic size.

    Attributes:
        what: the task, with its size.
        unit: the unit of the figures; less is better.
        shoal, by_hand, torch, jax: the figures; None if that rival was not measured.
    """

    what: str
    unit: str
    shoal: float
    by_hand: float | None = None
    torch: float | None = None
    jax: float | None = None


CASES = ROOT / "out" / "bench" / "cases"


def keep_cases(name: str, cases: Sequence[Case]) -> None:
    """Keep a script's rows of the table of all benchmarks, for `_table.py`."""
    CASES.mkdir(parents=True, exist_ok=True)
    kept = {"machine": machine(), "cases": [asdict(case) for case in cases]}
    (CASES / f"{name}.json").write_text(json.dumps(kept, indent=1))


def machine() -> str:
    """One line: versions, threads, cores, device and load, without which figures mean little."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.get_num_threads()} "
        "threads, "
        f"{os.cpu_count()} cores, {device}, {load}"
    )


def _calls_per_round(work: Callable[[], object], warmup: int, clock: Callable[[], float]) -> int:
    for _ in range(warmup):
        work()
    return max(1, int(ROUND_SECONDS / max(_time_calls(work, 1, clock), 1e-9)))


def _time_calls(work: Callable[[], object], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        work()
    return (clock() - start) / calls


def _show(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (
        c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)
    )
    return "| " + " | ".join(padded) + " |"
