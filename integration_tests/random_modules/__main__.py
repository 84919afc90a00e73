"""Hunt: `nox -s hunt -- integration_tests.random_modules FIRST COUNT [--shrink]`.

Outcomes go to out/ as JSON lines.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path

from integration_tests.case_runner import kind, signature
from integration_tests.random_modules import hunt, shrink


def main() -> None:
    """Print what fails, and the counts."""
    first, count = (*(int(arg) for arg in sys.argv[1:] if arg.isdigit()), 0, 2000)[:2]
    known: set[str] = set()
    started, counts = time.perf_counter(), Counter[str]()
    out = Path("out") / f"random_modules.{first}.jsonl"
    out.parent.mkdir(exist_ok=True)
    with out.open("w") as file:
        for start in range(first, first + count, 25):
            for seed, program, outcome in hunt(range(start, min(start + 25, first + count))):
                counts[
                    ": ".join(outcome.split(": ")[: 2 if kind(outcome) == "refused" else 1])
                    or "right"
                ] += 1
                file.write(json.dumps([seed, outcome]) + "\n")
                file.flush()
                if kind(outcome) not in ("", "void", "refused") and signature(outcome) not in known:
                    known.add(signature(outcome))
                    if "--shrink" in sys.argv:
                        program, outcome = shrink(program, outcome)
                    print(f"--- {seed}: {outcome}\n{program.script()}", flush=True)
            print(
                f"up to {start + 25}: {time.perf_counter() - started:.0f} s {dict(counts)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
