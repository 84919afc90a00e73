"""Hunt: `nox -s hunt -- random_programs [first seed] [count] [--refusals]`."""

import sys
import time

from .hunt import hunt


def main() -> None:
    """Print what fails."""
    numbers = [int(arg) for arg in sys.argv[1:] if arg.isdigit()]
    first, count = (*numbers, 0, 1000)[:2] if len(numbers) != 1 else (numbers[0], 1000)
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


if __name__ == "__main__":
    main()
