"""Who stopped where: reads the files that ranks have left in a folder when one of them was lost."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..shared_memory.recorder import LIBRARIES, folder

Dumps = Mapping[int, Mapping[str, Any]]
_LIBRARY = re.compile(f"/{LIBRARIES}/")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The folder, and how much of each rank."""
    parser.add_argument("folder", nargs="?", default=folder(), help="the errors name it (default: %(default)s)")
    parser.add_argument("--last", type=int, default=3, help="collectives of each rank (default: %(default)s)")


def run(asked: argparse.Namespace) -> int:
    """Print the report; the status is 1 where there is nothing to read."""
    dumps, unreadable = {}, []
    for path in sorted(Path(asked.folder).glob("rank*.json")):
        try:
            dump = json.loads(path.read_text())
            dumps[int(dump["rank"])] = dump
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{path.name} cannot be read: {error!r}")
    sys.stdout.writelines(f"{line}\n" for line in unreadable)
    if not dumps:
        sys.stdout.write(f"no files of ranks in {asked.folder or 'no folder'}\n")
        return 1
    sys.stdout.writelines(f"{line}\n" for line in report(dumps, asked.last))
    return 0


def report(dumps: Dumps, last: int = 3) -> list[str]:
    """The lines: who is at fault by the word of the others, who is silent, and where each rank stood.

    Args:
        dumps: rank -> what it has written.
        last: how many collectives of each rank are listed.
    """
    world = max(dump["world"] for dump in dumps.values())
    silent = [rank for rank in range(world) if rank not in dumps]
    votes = Counter(rank for dump in dumps.values() for rank in dump["culprits"])
    lines = [f"{len(dumps)} of {world} ranks have written"]
    for rank, count in votes.most_common(5):
        lines.append(f"rank {rank} is named by {count}{'; it has written nothing' if rank in silent else ''}")
    for rank in silent:
        seen = {dump["seen"][str(rank)] for dump in dumps.values() if str(rank) in dump["seen"]}
        lines.append(f"rank {rank} has written nothing; last seen: {'; '.join(sorted(seen)) or 'by nobody'}")
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} (process {dump['process']} on {dump['host']}): {dump['error']}")
        for seconds, group, what, purpose in dump["collectives"][-last:]:
            lines.append(f"  {seconds:8.3f} s before, group {group}: {what}{f', for {purpose}' if purpose else ''}")
        own = [frame for frame in dump["stack"] if not _LIBRARY.search(frame)]
        lines.append(f"  at {own[-1] if own else 'no line of the program'}")
    return lines
