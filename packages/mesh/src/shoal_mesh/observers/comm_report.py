"""What CommDebugMode recorded, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from ..argument_types import require
from ..errors import MeshError


class Recorded(Protocol):
    """What a report reads of a mode."""

    trace: list[Any]
    modules: dict[str, Any]


def _phase(records: Iterable[Any], backward: bool) -> list[Any]:
    return [r for r in records if r.backward is backward]


def tree(mode: Recorded, noise_level: int = 3) -> dict[str, Any]:
    """Modules by path, each with its collectives and, by noise level, more.

    Args:
        mode: a CommDebugMode.
        noise_level: 0 counts of collectives; 1 also parameters and placements; 2 also every single collective with
            shape, axes and bytes; 3 also all other ops.

    Raises:
        MeshTypeError, MeshError: another noise level.
    """
    _check_level(noise_level)
    paths: dict[str, Any] = {}
    for path in sorted({*mode.modules, *(r.module for r in mode.trace)}, key=_order):
        record = mode.modules.get(path)
        own: dict[str, Any] = {}
        for phase, backward in (("forward", False), ("backward", True)):
            records = _phase((r for r in mode.trace if r.module == path), backward)
            run: dict[str, Any] = {"collectives": dict(Counter(r.op for r in records))}
            run["bytes"] = sum(r.nbytes for r in records)
            if noise_level >= 2:
                run["calls"] = [_call(r) for r in records]
            if noise_level >= 3 and record is not None:
                run["ops"] = {op: n for (op, when), n in sorted(record.ops.items()) if when is backward}
            own[phase] = run
        if noise_level >= 1 and record is not None:
            own["parameters"] = {
                name: {
                    "shape": list(p.shape),
                    "dtype": str(p.dtype),
                    "placements": str(record.placements.get(name, "")),
                }
                for name, p in record.parameters.items()
            }
        paths[path] = own
    return paths


def _check_level(noise_level: int) -> None:
    require(noise_level, int, "noise_level is an int from 0 to 3")
    if not 0 <= noise_level <= 3:
        raise MeshError(f"noise_level is 0 to 3, got {noise_level}")


def _check_path(file_name: str) -> None:
    require(file_name, str | PathLike, "a file is named by a string or path")


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


def table(mode: Recorded, noise_level: int = 3) -> str:
    """The tree as indented text; at level 0 without modules that ran no collective."""
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
        run = own[phase]
        if run["collectives"] or run.get("ops"):
            lines.append(f"{phase.upper()}: {run['bytes']} bytes in {sum(run['collectives'].values())} collectives")
        lines += [f"  {op}: {n}" for op, n in sorted(run["collectives"].items())]
        for call in run.get("calls", ()):
            reduce = f" {call['reduce']}" if call["reduce"] else ""
            shapes = " ".join(map(str, map(tuple, call["shapes"])))
            lines.append(f"    {call['op']}{reduce} {shapes} {call['dtype']} along {'x'.join(call['axes'])}")
        lines += [f"  ** {op}: {n}" for op, n in run.get("ops", {}).items()]
    return lines


def write_table(mode: Recorded, file_name: str, noise_level: int) -> None:
    """Write the table to a file."""
    _check_path(file_name)
    Path(file_name).write_text(table(mode, noise_level))


def write_json(mode: Recorded, file_name: str, noise_level: int) -> None:
    """Write the tree, and the collectives in order, to a file."""
    _check_path(file_name)
    trace = [{**_call(r), "module": r.module, "backward": r.backward, "started": r.started} for r in mode.trace]
    Path(file_name).write_text(json.dumps({"modules": tree(mode, noise_level), "trace": trace}, indent=1))
