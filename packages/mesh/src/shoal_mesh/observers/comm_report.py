"""What CommDebugMode recorded, as a table and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from ..argument_types import require
from ..errors import MeshError


@dataclass(slots=True)
class Record:
    """One collective of a trace."""

    op: str  # name of the functional collective
    axes: tuple[str, ...]  # mesh axes it ran along; the name of the group when it was not asked for by axis
    size: int  # number of ranks
    shapes: tuple[tuple[int, ...], ...]  # shapes that this rank put in
    dtype: str  # of the first of them
    nbytes: int  # bytes that this rank put in
    reduce_op: str  # `sum`, ... or ''.
    module: str  # path of the innermost module, `Global` outside of modules
    backward: bool  # whether it ran in the backward pass
    started: float  # seconds since the mode was entered
    seconds: float = 0.0  # duration on the host


@dataclass(slots=True)
class ModuleRecord:
    """One module that ran: its parameters, their placements, and the ops that ran in it."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Any] = field(default_factory=dict)
    ops: Counter[tuple[str, bool]] = field(default_factory=Counter)


def tree(trace: Sequence[Record], modules: Mapping[str, ModuleRecord], noise_level: int) -> dict[str, Any]:
    """Modules by path, each with its collectives and more by noise level (`generate_comm_debug_tracing_table`)."""
    require(noise_level, int, "noise_level is an int from 0 to 3")
    if not 0 <= noise_level <= 3:
        raise MeshError(f"noise_level is 0 to 3, got {noise_level}")
    paths: dict[str, Any] = {}
    for path, record in sorted(modules.items(), key=lambda item: (item[0] != "Global", item[0])):
        own: dict[str, Any] = {}
        for phase, backward in (("forward", False), ("backward", True)):
            records = [r for r in trace if r.module == path and r.backward is backward]
            run: dict[str, Any] = {"collectives": dict(Counter(r.op for r in records))}
            run["bytes"] = sum(r.nbytes for r in records)
            if noise_level >= 2:
                run["calls"] = [_call(r) for r in records]
            if noise_level >= 3:
                run["ops"] = {op: n for (op, when), n in sorted(record.ops.items()) if when is backward}
            own[phase] = run
        if noise_level >= 1:
            own["parameters"] = {
                name: {"shape": [*p.shape], "dtype": str(p.dtype), "placements": str(record.placements.get(name, ""))}
                for name, p in record.parameters.items()
            }
        paths[path] = own
    return paths


def _call(record: Record) -> dict[str, Any]:
    return {
        "op": record.op,
        "axes": list(record.axes),
        "ranks": record.size,
        "shapes": [[*shape] for shape in record.shapes],
        "dtype": record.dtype,
        "bytes": record.nbytes,
        "reduce": record.reduce_op,
    }


def table(trace: Sequence[Record], modules: Mapping[str, ModuleRecord], noise_level: int) -> str:
    """The tree as indented text; at level 0 without modules that ran no collective."""
    lines = []
    for path, own in tree(trace, modules, noise_level).items():
        body = _lines(own)
        if body or noise_level > 0:
            indent = "  " * path.count(".")
            lines += [indent + path, *(f"{indent}  {line}" for line in body)]
    total = Counter(r.op for r in trace)
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


def as_json(trace: Sequence[Record], modules: Mapping[str, ModuleRecord], noise_level: int) -> str:
    """The tree, and the collectives in order."""
    calls = [{**_call(r), "module": r.module, "backward": r.backward, "started": r.started} for r in trace]
    return json.dumps({"modules": tree(trace, modules, noise_level), "trace": calls}, indent=1)


def write(file_name: str, text: str) -> None:
    """Write a report to a file."""
    require(file_name, str | PathLike, "a file is named by a string or path")
    Path(file_name).write_text(text)
