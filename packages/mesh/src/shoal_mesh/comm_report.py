"""What CommDebugMode saw, as a table, as JSON and as a trace over time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

__all__ = ["table", "tree", "write_chrome_trace", "write_json", "write_table"]


class Seen(Protocol):
    """What a report needs of a mode."""

    trace: list[Any]
    modules: dict[str, Any]


def _phase(records: Iterable[Any], backward: bool) -> list[Any]:
    return [r for r in records if r.backward is backward]


def tree(mode: Seen, noise_level: int = 3) -> dict[str, Any]:
    """Modules by path, each with its collectives and, by noise level, more.

    Args:
        mode: a CommDebugMode.
        noise_level: 0 counts of collectives; 1 also parameters and placements; 2 also every single collective with
            shape, axes and bytes; 3 also all other ops.
    """
    found: dict[str, Any] = {}
    for path in sorted({*mode.modules, *(r.module for r in mode.trace)}, key=_order):
        seen = mode.modules.get(path)
        own: dict[str, Any] = {}
        for phase, backward in (("forward", False), ("backward", True)):
            records = _phase((r for r in mode.trace if r.module == path), backward)
            part: dict[str, Any] = {"collectives": dict(Counter(r.op for r in records))}
            part["bytes"] = sum(r.nbytes for r in records)
            if noise_level >= 2:
                part["calls"] = [_call(r) for r in records]
            if noise_level >= 3 and seen is not None:
                part["ops"] = {op: n for (op, when), n in sorted(seen.ops.items()) if when is backward}
            own[phase] = part
        if noise_level >= 1 and seen is not None:
            own["parameters"] = {
                name: {"shape": list(p.shape), "dtype": str(p.dtype), "placements": str(seen.placements.get(name, ""))}
                for name, p in seen.parameters.items()
            }
        found[path] = own
    return found


def _order(path: str) -> tuple[bool, str]:
    return path != "Global", path


def _call(record: Any) -> dict[str, Any]:
    return {
        "op": record.op,
        "axes": list(record.axes),
        "ranks": record.size,
        "shapes": [list(s) for s in record.shapes],
        "dtype": record.dtype,
        "bytes": record.nbytes,
        "reduce": record.reduce_op,
    }


def table(mode: Seen, noise_level: int = 3) -> str:
    """The tree as indented text, modules without anything to say left out at level 0."""
    lines = []
    for path, own in tree(mode, noise_level).items():
        body = _lines(own)
        if body or noise_level > 0:
            indent = "  " * path.count(".")
            lines += [indent + path, *(f"{indent}  {line}" for line in body)]
    total = Counter(r.op for r in mode.trace)
    lines.append("total: " + (", ".join(f"{n} {op}" for op, n in sorted(total.items())) or "no collectives"))
    return "\n".join(lines) + "\n"


def _lines(own: dict[str, Any]) -> list[str]:
    lines = []
    for name, what in own.get("parameters", {}).items():
        lines.append(f"*{name}: {tuple(what['shape'])} {what['dtype']} {what['placements']}".rstrip())
    for phase in ("forward", "backward"):
        part = own[phase]
        if part["collectives"] or part.get("ops"):
            lines.append(f"{phase.upper()}: {part['bytes']} bytes in {sum(part['collectives'].values())} collectives")
        lines += [f"  {op}: {n}" for op, n in sorted(part["collectives"].items())]
        for call in part.get("calls", ()):
            reduce = f" {call['reduce']}" if call["reduce"] else ""
            shapes = " ".join(map(str, map(tuple, call["shapes"])))
            lines.append(f"    {call['op']}{reduce} {shapes} {call['dtype']} along {'x'.join(call['axes'])}")
        lines += [f"  ** {op}: {n}" for op, n in part.get("ops", {}).items()]
    return lines


def write_table(mode: Seen, file_name: str, noise_level: int) -> None:
    """Write the table to a file."""
    Path(file_name).write_text(table(mode, noise_level))


def write_json(mode: Seen, file_name: str, noise_level: int) -> None:
    """Write the tree, and the collectives in order, to a file."""
    trace = [{**_call(r), "module": r.module, "backward": r.backward, "started": r.started} for r in mode.trace]
    Path(file_name).write_text(json.dumps({"modules": tree(mode, noise_level), "trace": trace}, indent=1))


def write_chrome_trace(mode: Seen, file_name: str) -> None:
    """Write the collectives over time, one row per mesh axes, for Perfetto or chrome://tracing."""
    events = [
        {
            "name": f"{r.op} {r.reduce_op}".rstrip(),
            "cat": "backward" if r.backward else "forward",
            "ph": "X",
            "ts": r.started * 1e6,
            "dur": max(r.seconds * 1e6, 0.1),
            "pid": "collectives",
            "tid": "x".join(r.axes),
            "args": {**_call(r), "module": r.module},
        }
        for r in mode.trace
    ]
    Path(file_name).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
