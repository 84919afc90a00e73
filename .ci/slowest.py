"""Seconds of each test file and the slowest tests of a run, from what `nox` leaves in out/times."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

MOST = 12


def main() -> None:
    """Print the sessions, files and tests that take longest."""
    sessions, files, tests = Counter[str](), Counter[str](), Counter[str]()
    for path in Path("out/times").glob("*.xml"):
        for case in ET.parse(path).iter("testcase"):
            seconds, file = (
                float(case.get("time", 0)),
                f"{path.stem.partition('-')[0]} {case.get('classname')}",
            )
            sessions[path.stem] += seconds
            files[file] += seconds
            tests[f"{file}::{case.get('name')}"] += seconds
    for what, times in (("sessions", sessions), ("files", files), ("tests", tests)):
        sys.stdout.write(f"\nslowest {what}, seconds:\n")
        sys.stdout.writelines(
            f"{seconds:8.1f}  {name}\n" for name, seconds in times.most_common(MOST)
        )


if __name__ == "__main__":
    main()
