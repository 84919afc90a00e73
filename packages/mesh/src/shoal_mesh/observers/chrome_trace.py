"""Spans of time as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import field
from os import PathLike
from pathlib import Path

from ..argument_types import require
from ..values import dataclass

_SHORTEST = 0.1e-6  # seconds; viewers drop spans of no length


@dataclass(frozen=True, slots=True)
class Span:
    """What happened from one moment to another.

    Attributes:
        name: what is written on it.
        kind: spans can be searched by it.
        process, row: where it is drawn: each process has rows.
        started, seconds: in seconds from the beginning.
        facts: what is shown when it is selected.
    """

    name: str
    kind: str
    process: str
    row: str
    started: float
    seconds: float
    facts: Mapping[str, object] = field(default_factory=dict)


def write_spans(path: str | PathLike[str], spans: Iterable[Span]) -> None:
    """Write spans; processes are drawn in the order in which they first appear.

    Raises:
        MeshTypeError: `path` is no string or path.
    """
    require(path, str | PathLike, "a file is named by a string or path")
    events: list[dict[str, object]] = []
    processes: dict[str, int] = {}
    rows: dict[tuple[str, str], int] = {}
    for span in spans:
        process = processes.setdefault(span.process, len(processes))
        row = rows.setdefault((span.process, span.row), len(rows))
        event: dict[str, object] = {"name": span.name, "cat": span.kind, "ph": "X", "pid": process, "tid": row}
        event |= {"ts": span.started * 1e6, "dur": max(span.seconds, _SHORTEST) * 1e6, "args": dict(span.facts)}
        events.append(event)
    names = [_named("process", name, process, 0) for name, process in processes.items()]
    names += [_named("thread", name, processes[process], row) for (process, name), row in rows.items()]
    Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ns"}))


def _named(what: str, name: str, process: int, row: int) -> dict[str, object]:
    """What a viewer writes beside a process or a row; numbers order them."""
    return {"name": f"{what}_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}}
