"""Cost of the recorder, and of lockstep on a small all-reduce, beside neither.

python benchmarks/lockstep.py
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from _timing import report

from shoal_mesh import all_reduce, init_device_mesh, launch, lockstep
from shoal_mesh.watch.recorder import ENTRIES, note, record

CALLS, ROUNDS = 20, 200


def all_reduces() -> dict[str, list[float]]:
    """Microseconds of an all-reduce of 16 numbers on two ranks, the modes interleaved."""
    comm, x = init_device_mesh("cpu", (2,)).comm(0), torch.ones(16)
    modes: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "no lockstep": nullcontext,
        "lockstep": lockstep,
        "lockstep, every 8": lambda: lockstep(every=8),
    }
    spent: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(ROUNDS):
        for name, mode in modes.items():
            with mode():
                timeit.timeit(lambda: all_reduce(x, comm), number=5)
                spent[name].append(
                    timeit.timeit(lambda: all_reduce(x, comm), number=CALLS) / CALLS * 1e6
                )
    return spent


def main() -> None:
    """Print both."""
    rows: list[list[object]] = []
    for name, call in {
        "record": lambda: record("group", 5),
        "note": lambda: note(("purpose", 1)),
    }.items():
        rows.append([name, min(timeit.repeat(call, number=2000, repeat=100)) / 2000 * 1e6, ""])
    ENTRIES.clear()
    rows += [
        [name, min(us), sorted(us)[len(us) // 4]] for name, us in launch(all_reduces, 2)[0].items()
    ]
    report("lockstep", ["what", "best us", "quartile us"], rows)


if __name__ == "__main__":
    main()
