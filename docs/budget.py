"""Checks that no package has more lines of source than `budget.toml` grants it: `python docs/budget.py`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RULE = "A budget only goes down: delete or merge something. Raising it needs an ADR"


def findings(root: Path) -> Iterator[str]:
    """One line for each package above its budget or without one, and for each budget without a package."""
    budget = tomllib.loads((root / "budget.toml").read_text())
    homes = {path.parent.name: path.parent for path in root.glob("packages/*/pyproject.toml")}
    for name in sorted(homes.keys() | budget.keys()):
        if name not in homes:
            yield f"budget.toml: {name}: no such package"
            continue
        lines = sum(path.read_text().count("\n") for path in homes[name].glob("src/**/*.py"))
        if name not in budget:
            yield f"budget.toml: {name}: the package, of {lines} lines, has no budget"
        elif lines > budget[name]:
            yield f"packages/{name}/src has {lines} lines, {lines - budget[name]} above its budget. {RULE}"


def main() -> int:
    """Print what was found; fail if there is any."""
    found = list(findings(ROOT))
    print("\n".join(found) or "every package is within its budget")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
