"""One table of common tasks of training and serving: by hand, torch, JAX and shoal.

It has the results of the last run of each script.

    python benchmarks/_table.py

It is also the last thing that `nox -s bench` does; the table is kept as out/bench/table.md.
"""

from __future__ import annotations

import json

from _timing import CASES, Case, table

MOST_ROWS = 40  # more of them nobody reads


def rows() -> list[list[object]]:
    """Every case that the scripts have kept, by script."""
    found: list[list[object]] = []
    for path in sorted(CASES.glob("*.json")):
        for case in (Case(**kept) for kept in json.loads(path.read_text())["cases"]):
            rivals = [case.by_hand, case.torch, case.jax]
            ratios = [f"{case.shoal / rival:.2f}" if rival else "-" for rival in rivals]
            figures = [f"{each:.3g}" if each else "-" for each in (*rivals, case.shoal)]
            found.append([path.stem, case.what, case.unit, *figures, *ratios])
    return found


def main() -> None:
    """Print the table, and keep it."""
    found = rows()
    header = [
        "script",
        "what",
        "unit",
        "by hand",
        "torch",
        "JAX",
        "shoal",
        "x by hand",
        "x torch",
        "x JAX",
    ]
    text = table(header, found)
    print(
        "\nLess is better. Rivals of a row ran in turns in one process; rows of two scripts do not "
        "compare.\n"
    )
    print(text)
    (CASES.parent / "table.md").write_text(text + "\n")
    assert len(found) <= MOST_ROWS, f"{len(found)} rows: a person reads {MOST_ROWS}"


if __name__ == "__main__":
    main()
