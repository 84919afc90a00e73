"""Hunt: `nox -s hunt -- random_programs [first seed] [count] [--refusals] [--stops]`."""

import sys
import time

from .compose import compose
from .hunt import hunt
from .stops import draw_stop, verdict_of_stop


def main() -> None:
    """Print what fails."""
    numbers = [int(arg) for arg in sys.argv[1:] if arg.isdigit()]
    first, count = (*numbers, 0, 1000)[:2] if len(numbers) != 1 else (numbers[0], 1000)
    if "--stops" in sys.argv:
        hunt_stops(first, count)
        return
    started, failed = time.perf_counter(), 0
    for start in range(first, first + count, 50):
        for finding in hunt(
            range(start, min(start + 50, first + count)), refusals="--refusals" in sys.argv
        ):
            failed += 1
            sys.stdout.write(f"{finding}\n")
        sys.stdout.write(f"up to {start + 50}: {time.perf_counter() - started:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"{failed} of {count} programs from {first} fail, {time.perf_counter() - started:.0f} s\n"
    )


def hunt_stops(first: int, count: int) -> None:
    """Print the programs whose ranks wait for one that stops in the middle."""
    started, failed, slowest = time.perf_counter(), 0, 0.0
    for seed in range(first, first + count):
        program = compose(seed)
        stop = draw_stop(program, seed)
        began = time.perf_counter()
        outcome = verdict_of_stop(program, stop)
        slowest = max(slowest, time.perf_counter() - began)
        if outcome:
            failed += 1
            sys.stdout.write(f"program {seed}, {stop}: {outcome}\n{program.script()}\n")
            sys.stdout.flush()
    seconds = time.perf_counter() - started
    sys.stdout.write(
        f"{failed} of {count} stops from {first} fail, {seconds:.0f} s, the slowest {slowest:.1f} "
        "s\n"
    )


if __name__ == "__main__":
    main()
