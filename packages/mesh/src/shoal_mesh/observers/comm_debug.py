"""CommDebugMode: the collectives that a program runs, their counts, places and axes.

It counts collectives as the caller requested them, not the backend calls: a reduce-scatter that a
backend emulates is one reduce-scatter. Collectives of shoal report themselves (events.py);
collectives of other libraries (`torch.distributed`, functional collectives) are seen in the
dispatcher.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .. import _torch
from ..argument_types import require
from ..errors import MeshError
from ..events import Event, in_observed, observing
from .module_places import ModulePlaces

_FUNCTIONAL = {
    name: functional_name
    for functional_name, names in {
        "all_reduce": "allreduce_",
        "all_reduce_coalesced": "allreduce_coalesced_",
        "all_gather_into_tensor": "allgather_ _allgather_base_ all_gather_single_",
        "all_gather_into_tensor_coalesced": "allgather_coalesced_ allgather_into_tensor_coalesced_",
        "reduce_scatter_tensor": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_single_",
        "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
        "all_to_all_single": "alltoall_ alltoall_base_ all_to_all_single_",
        "broadcast": "broadcast_",
    }.items()
    for name in names.split()
}
_FUNCTIONAL_NAMES = set(_FUNCTIONAL.values())
_OUTPUTS_FIRST = {
    "gather_",
    "scatter_",
    *(n for n in _FUNCTIONAL if not n.startswith(("allreduce", "broadcast"))),
}
# c10d only
_POINT_TO_POINT = {"scatter_", "gather_", "reduce_", "send", "recv_", "recv_any_source_"}


def packet_of(op: str) -> Any:
    """Return the op packet that a collective is counted under.

    It is a packet of `_c10d_functional`, or of `c10d` if the former has none.
    """
    packet = getattr(_torch.functional, op, None) or getattr(_torch.c10d_ops, op, None)
    return packet or getattr(_torch.c10d_ops, f"{op}_")  # of shoal's scatter and gather


class CommCounts(Counter[Any]):  # noqa: PLW1641  # like other dictionaries it has no hash
    """Counts of collectives by op packet of `_c10d_functional`; each is found by all its packets.

    Programs look counts up by torch's keys, `torch.ops.c10d_functional.all_reduce` (if torch has
    registered that namespace) or `torch.ops.c10d.allreduce_`: none of these keys may read as
    "never", and counts under other names of the same collectives are equal.

    Example:
        >>> counts = CommCounts({torch.ops._c10d_functional.all_reduce: 2})
        >>> counts[torch.ops._c10d_functional.all_reduce], counts[torch.ops.c10d.allreduce_]
        (2, 2)
    """

    def __missing__(self, packet: Any) -> int:
        return dict.get(self, _canonical(packet), 0)

    def get(self, packet: Any, default: Any = None) -> Any:
        return dict.get(self, packet, dict.get(self, _canonical(packet), default))

    def __contains__(self, packet: object) -> bool:
        return dict.__contains__(self, packet) or dict.__contains__(self, _canonical(packet))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        ours, theirs = (
            [_canonical(packet) for packet in Counter(each).elements()] for each in (self, other)
        )
        return Counter(ours) == Counter(theirs)


def _canonical(packet: Any) -> Any:
    """Return the packet under which a collective is counted, given any of its packets."""
    namespace, _, name = str(packet).rpartition(".")
    if namespace == "c10d":
        return packet_of(_FUNCTIONAL.get(name, name))
    return getattr(_torch.functional, name, packet) if namespace == "c10d_functional" else packet


@dataclass(slots=True)
class Record:
    """One collective of a trace."""

    op: str  # name of the functional collective
    # mesh axes it ran along; the name of the group when it was not asked for by axis
    axes: tuple[str, ...]
    size: int  # number of ranks
    shapes: tuple[tuple[int, ...], ...]  # shapes that this rank put in
    dtype: str  # of the first of them
    nbytes: int  # bytes that this rank put in
    reduce_op: str  # `sum`, ... or ''.
    # path of the innermost module, `Global` outside of modules
    module: str
    backward: bool  # whether it ran in the backward pass
    started: float  # seconds since the mode was entered
    seconds: float = 0.0  # duration on the host


@dataclass(slots=True)
class ModuleRecord:
    """A module that ran: its parameters, their placements, and the ops that ran in it."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    placements: dict[str, Any] = field(default_factory=dict)
    ops: Counter[tuple[str, bool]] = field(default_factory=Counter)


@_torch.without_importing_dynamo
class CommDebugMode(_torch.TorchDispatchMode):
    """A mode that counts and records every collective inside of a block, forward and backward.

    Attributes:
        trace: a `Record` per collective, in order.
        modules: by path, every module that ran.

    Example:
        >>> def example() -> tuple[int, dict[tuple[str, ...], int]]:
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     with CommDebugMode() as debug:
        ...         all_reduce(torch.ones(8), (mesh, "tp"))
        ...     return debug.get_total_counts(), debug.get_bytes()
        >>> launch(example, 2)[0]
        (1, {('tp',): 32})
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        # it makes the keys `torch.ops.c10d_functional.*`
        import_module("torch.distributed._functional_collectives")
        self.trace: list[Record] = []
        self.modules: dict[str, ModuleRecord] = {}
        self._open: dict[int, Record] = {}
        self._places = ModulePlaces()
        self._began = 0.0
        self._ends = ExitStack()

    def __enter__(self) -> CommDebugMode:
        self.trace = []
        self.modules = {}
        self._began = time.perf_counter()
        self._places = self._ends.enter_context(ModulePlaces())
        self._ends.callback(
            nn.modules.module.register_module_forward_pre_hook(self._record_module).remove
        )
        self._ends.enter_context(observing(self.before, self.after))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        self._ends.close()

    # --- torch's interface ------------------------------------------------------------------------

    def get_comm_counts(self) -> dict[Any, int]:
        """Return how often each collective ran, by op packet, as `CommCounts`.

        A key is `torch.ops._c10d_functional.all_reduce`, for example.
        """
        return CommCounts(packet_of(record.op) for record in self.trace)

    def get_total_counts(self) -> int:
        """Return how many collectives ran."""
        return len(self.trace)

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """Return module path -> parameter name -> parameter, of every module that ran."""
        return {
            path: record.parameters for path, record in self.modules.items() if record.parameters
        }

    def get_sharding_info(self) -> dict[str, Any]:
        """Return `module.parameter` -> placements.

        It has every distributed parameter of the modules that ran.
        """
        return {
            f"{path}.{name}": p
            for path, record in self.modules.items()
            for name, p in record.placements.items()
        }

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table by module.

        Args:
            noise_level: 0 counts of collectives; 1 also parameters and placements; 2 also every
                single collective with shape, axes and bytes; 3 also all other ops.

        Raises:
            MeshTypeError, MeshError: another noise level.
        """
        lines = []
        for path, own in self._tree(noise_level).items():
            body = _lines(own)
            # at level 0 only modules that ran a collective
            if body or noise_level > 0:
                indent = "  " * path.count(".")
                lines += [indent + path, *(f"{indent}  {line}" for line in body)]
        total = Counter(r.op for r in self.trace)
        lines.append(
            "total: "
            + (", ".join(f"{n} {op}" for op, n in sorted(total.items())) or "no collectives")
        )
        return "\n".join(lines) + "\n"

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the table as JSON to a file; see `generate_comm_debug_tracing_table`."""
        calls = [
            {**_call(r), "module": r.module, "backward": r.backward, "started": r.started}
            for r in self.trace
        ]
        _write(
            file_name, json.dumps({"modules": self._tree(noise_level), "trace": calls}, indent=1)
        )

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write the table of `generate_comm_debug_tracing_table` to a file."""
        _write(file_name, self.generate_comm_debug_tracing_table(noise_level))

    def _tree(self, noise_level: int) -> dict[str, Any]:
        """Return modules by path, each with collectives and more by noise level, as for JSON."""
        require(noise_level, int, "noise_level is an int from 0 to 3")
        if not 0 <= noise_level <= 3:
            raise MeshError(f"noise_level must be 0 to 3, got {noise_level}")
        paths: dict[str, Any] = {}
        for path, record in sorted(
            self.modules.items(), key=lambda item: (item[0] != "Global", item[0])
        ):
            own: dict[str, Any] = {}
            for phase, backward in (("forward", False), ("backward", True)):
                records = [r for r in self.trace if r.module == path and r.backward is backward]
                run: dict[str, Any] = {"collectives": dict(Counter(r.op for r in records))}
                run["bytes"] = sum(r.nbytes for r in records)
                if noise_level >= 2:
                    run["calls"] = [_call(r) for r in records]
                if noise_level >= 3:
                    run["ops"] = {
                        op: n for (op, when), n in sorted(record.ops.items()) if when is backward
                    }
                own[phase] = run
            if noise_level >= 1:
                own["parameters"] = {}
                for name, p in record.parameters.items():
                    placements = str(record.placements.get(name, ""))
                    own["parameters"][name] = {
                        "shape": [*p.shape],
                        "dtype": str(p.dtype),
                        "placements": placements,
                    }
            paths[path] = own
        return paths

    # --- beyond it --------------------------------------------------------------------------------

    comm_counts = property(get_comm_counts)

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """The counts of collectives, as module path -> `forward` or `backward` -> counts.

        The counts of a module include those of the modules inside.
        """
        counts: dict[str, dict[str, dict[Any, int]]] = {}
        for record in self.trace:
            parts = record.module.split(".")
            inside = {"Global", *(".".join(parts[: n + 1]) for n in range(len(parts)))}
            for path in inside:
                passes = counts.setdefault(
                    path, {"forward": CommCounts(), "backward": CommCounts()}
                )
                passes["backward" if record.backward else "forward"][packet_of(record.op)] += 1
        return counts

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def get_bytes(self) -> dict[tuple[str, ...], int]:
        """Return the bytes that this rank put into collectives, by mesh axes."""
        total: Counter[tuple[str, ...]] = Counter()
        for record in self.trace:
            total[record.axes] += record.nbytes
        return dict(total)

    # --- how it records ---------------------------------------------------------------------------

    def before(self, event: Event) -> None:
        """Record a collective of shoal (called by events.py)."""
        self._open[id(event)] = self._record(event)

    def after(self, event: Event) -> None:
        """Note how long it took."""
        record = self._open.pop(id(event), None)
        if record is not None:
            record.seconds = event.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run every op unchanged; record collectives of other libraries."""
        if any(
            t.__torch_dispatch__ is not Tensor.__torch_dispatch__ and t is not _torch.FakeTensor
            for t in types
        ):
            return self._run_subclass(func, args, kwargs or {})
        name = func._overloadpacket.__name__
        if in_observed():
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            sends = name in _FUNCTIONAL or name in _POINT_TO_POINT  # a barrier or a wait does not
        else:
            sends = (
                func.namespace.lstrip("_") == "c10d_functional"
                and name.removesuffix("_") in _FUNCTIONAL_NAMES
            )
        if sends:
            return self._run_foreign(func, name, args, kwargs or {})
        self._record_of(self._places.current()).ops[str(func), _torch.in_backward()] += 1
        return func(*args, **(kwargs or {}))

    def _run_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on tensors of a subclass that handles it itself.

        This mode sees the ops that the subclass calls.
        """
        return NotImplemented

    def _run_foreign(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func.namespace == "c10d":
            group = _torch.group_of_op(args)
            label, size = (group.group_name, group.size()) if group is not None else ("?", 0)
            op = _FUNCTIONAL.get(name, name)
        else:
            label = next((a for a in reversed(args) if isinstance(a, str)), "?")
            op = name.removesuffix("_")
            size = 0
        sent = args[1] if name in _OUTPUTS_FIRST else args[0]
        tensors = tuple(t for t in _torch.tree_leaves(sent) if isinstance(t, Tensor))
        event = Event(op, SimpleNamespace(axes=(label,), size=size), tensors)
        record = self._record(event)
        result = func(*args, **kwargs)
        record.seconds = time.perf_counter() - event.started
        return result

    def _record(self, event: Event) -> Record:
        record = Record(
            op=event.op,
            axes=event.comm.axes,
            size=event.comm.size,
            shapes=tuple(tuple(t.shape) for t in event.tensors),
            dtype=str(event.tensors[0].dtype).removeprefix("torch.") if event.tensors else "",
            nbytes=event.nbytes,
            reduce_op=event.reduce_op,
            module=self._places.current(),
            backward=_torch.in_backward(),
            started=event.started - self._began,
        )
        self.trace.append(record)
        self._record_of(record.module)
        return record

    def _record_of(self, module: str) -> ModuleRecord:
        return self.modules.setdefault(module, ModuleRecord())

    def _record_module(self, module: nn.Module, args: Any) -> None:
        record = self._record_of(self._places.name_of(module))
        for name, parameter in module.named_parameters(recurse=False):
            record.parameters[name] = parameter.detach()
            placements = getattr(parameter, "placements", None)
            if placements is not None:
                record.placements[name] = placements


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


def _lines(own: dict[str, Any]) -> list[str]:
    lines = []
    for name, what in own.get("parameters", {}).items():
        lines.append(
            f"*{name}: {tuple(what['shape'])} {what['dtype']} {what['placements']}".rstrip()
        )
    for phase in ("forward", "backward"):
        run = own[phase]
        if run["collectives"] or run.get("ops"):
            lines.append(
                f"{phase.upper()}: {run['bytes']} bytes in {sum(run['collectives'].values())} "
                "collectives"
            )
        lines += [f"  {op}: {n}" for op, n in sorted(run["collectives"].items())]
        for call in run.get("calls", ()):
            reduce = f" {call['reduce']}" if call["reduce"] else ""
            shapes = " ".join(map(str, map(tuple, call["shapes"])))
            lines.append(
                f"    {call['op']}{reduce} {shapes} {call['dtype']} along {'x'.join(call['axes'])}"
            )
        lines += [f"  ** {op}: {n}" for op, n in run.get("ops", {}).items()]
    return lines


def _write(file_name: str, text: str) -> None:
    require(file_name, str | PathLike, "a file is named by a string or path")
    Path(file_name).write_text(text)
