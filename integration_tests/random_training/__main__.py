"""Hunt: `nox -s hunt -- integration_tests.random_training FIRST COUNT [FORM]`.

With the form `--fresh`, each training goes on in new processes; with `--stops`, one rank stops in
the middle; with `--edges`, a step has edges (`integration_tests.random_training.edges`).
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from integration_tests.case_runner import kind, run_cases, signature
from integration_tests.random_training import compose, verdict
from integration_tests.random_training.edges import draw_edges, verdict_with_edges
from integration_tests.random_training.fresh import draw_fresh_resume, verdicts_of_fresh_resumes
from integration_tests.random_training.stops import draw_stop, verdict_of_stop


def outcomes_of(seeds: Sequence[int]) -> list[tuple[Any, str]]:
    """The programs of some seeds in the form that is asked for, with what became of them."""
    if "--fresh" in sys.argv:
        resumes = [draw_fresh_resume(seed) for seed in seeds]
        return list(zip(resumes, verdicts_of_fresh_resumes(resumes), strict=True))
    programs = [compose(seed) for seed in seeds]
    if "--edges" in sys.argv:
        edges = [draw_edges(program) for program in programs]
        return list(zip(edges, run_cases(verdict_with_edges, edges), strict=True))
    if "--stops" in sys.argv:
        stops = [draw_stop(program) for program in programs]
        pairs = list(zip(programs, stops, strict=True))
        return [((program, stop), verdict_of_stop(program, stop)) for program, stop in pairs]
    return list(zip(programs, run_cases(verdict, programs), strict=True))


def main() -> None:
    """Print what fails, and the counts."""
    first, count = (*(int(arg) for arg in sys.argv[1:] if arg.isdigit()), 0, 500)[:2]
    known: set[str] = set()
    started, counts = time.perf_counter(), Counter[str]()
    for start in range(first, first + count, 25):
        seeds = range(start, min(start + 25, first + count))
        for seed, (program, outcome) in zip(seeds, outcomes_of(seeds), strict=True):
            counts[kind(outcome) or "right"] += 1
            if kind(outcome) not in ("", "void") and signature(outcome) not in known:
                known.add(signature(outcome))
                print(f"--- {seed}: {outcome}\n{program}", flush=True)
        print(
            f"up to {start + 25}: {time.perf_counter() - started:.0f} s {dict(counts)}", flush=True
        )


if __name__ == "__main__":
    main()
