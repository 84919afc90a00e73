"""Hunt: `nox -s hunt -- integration_tests.random_training FIRST COUNT`."""

import sys
import time
from collections import Counter

from integration_tests.case_runner import kind, run_cases, signature
from integration_tests.random_training import compose, verdict


def main() -> None:
    """Print what fails, and the counts."""
    first, count = (*(int(arg) for arg in sys.argv[1:] if arg.isdigit()), 0, 500)[:2]
    known: set[str] = set()
    started, counts = time.perf_counter(), Counter[str]()
    for start in range(first, first + count, 25):
        programs = [compose(seed) for seed in range(start, min(start + 25, first + count))]
        for program, outcome in zip(programs, run_cases(verdict, programs), strict=True):
            counts[kind(outcome) or "right"] += 1
            if kind(outcome) not in ("", "void") and signature(outcome) not in known:
                known.add(signature(outcome))
                print(f"--- {program.seed}: {outcome}\n{program}", flush=True)
        print(
            f"up to {start + 25}: {time.perf_counter() - started:.0f} s {dict(counts)}", flush=True
        )


if __name__ == "__main__":
    main()
