"""CommDebugMode: the collectives that a program runs, their counts, places and axes.

It counts collectives as the caller requested them, and not the calls of backends: a reduce-scatter
that a backend emulates is one reduce-scatter. Collectives of shoal report themselves (events.py).
The mode sees collectives of other libraries (`torch.distributed`, functional collectives) in
torch's dispatcher.
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

# functional collective -> the operators of c10d that run it
_C10D_NAMES = {
    "all_reduce": "allreduce_",
    "all_reduce_coalesced": "allreduce_coalesced_",
    "all_gather_into_tensor": "allgather_ _allgather_base_ all_gather_single_",
    "all_gather_into_tensor_coalesced": "allgather_coalesced_ allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor": "reduce_scatter_ _reduce_scatter_base_ reduce_scatter_single_",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced_",
    "all_to_all_single": "alltoall_ alltoall_base_ all_to_all_single_",
    "broadcast": "broadcast_",
}
# operator of c10d -> functional collective
_FUNCTIONAL = {
    name: functional_name
    for functional_name, names in _C10D_NAMES.items()
    for name in names.split()
}
_FUNCTIONAL_NAMES = set(_FUNCTIONAL.values())
_IN_PLACE = ("allreduce", "broadcast")
# operators of c10d that take their outputs as first and their inputs as second argument
_OUTPUTS_FIRST = {"gather_", "scatter_"}
_OUTPUTS_FIRST |= {name for name in _FUNCTIONAL if not name.startswith(_IN_PLACE)}
# operators of c10d that send, and have no functional collective
_C10D_ONLY = {"scatter_", "gather_", "reduce_", "send", "recv_", "recv_any_source_"}


def packet_of(op: str) -> Any:
    """Return the op packet that a collective is counted under.

    It is a packet of `_c10d_functional`, or of `c10d` if the former has none.
    """
    packet = getattr(_torch.functional, op, None) or getattr(_torch.c10d_ops, op, None)
    # `scatter` and `gather` of shoal are `scatter_` and `gather_` of c10d
    return packet or getattr(_torch.c10d_ops, f"{op}_")


class CommCounts(Counter[Any]):  # noqa: PLW1641  # like other dictionaries it has no hash
    """Counts of collectives by op packet of `_c10d_functional`; a lookup takes any of its packets.

    Programs look counts up by torch's keys: `torch.ops.c10d_functional.all_reduce` (if torch has
    registered that namespace) or `torch.ops.c10d.allreduce_`. Each of these keys finds the count of
    the collective. Counts are equal to the same counts under other packets.

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
        return _canonical_counts(self) == _canonical_counts(other)


def _canonical_counts(counts: Mapping[Any, int]) -> Counter[Any]:
    """Return counts by the packets under which collectives are counted."""
    return Counter([_canonical(packet) for packet in Counter(counts).elements()])


def _canonical(packet: Any) -> Any:
    """Return the packet under which a collective is counted, given any of its packets."""
    namespace, _, name = str(packet).rpartition(".")
    if namespace == "c10d":
        return packet_of(_FUNCTIONAL.get(name, name))
    return getattr(_torch.functional, name, packet) if namespace == "c10d_functional" else packet


@dataclass(slots=True)
class Record:
    """One collective of a trace.

    Attributes:
        op: name of the functional collective.
        axes: the mesh axes that it ran along, or the name of the group if the call named no axis.
        size: number of ranks.
        shapes: the shapes of the tensors that this rank put in.
        dtype: the dtype of the first of these tensors.
        nbytes: the bytes of these tensors.
        reduce_op: `sum`, ... or ''.
        module: path of the innermost module, `Global` outside of modules.
        backward: whether it ran in the backward pass.
        started: seconds since the mode was entered.
        seconds: duration on the host.
    """

    op: str
    axes: tuple[str, ...]
    size: int
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    nbytes: int
    reduce_op: str
    module: str
    backward: bool
    started: float
    seconds: float = 0.0


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
        # this import defines the keys `torch.ops.c10d_functional.*`
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
        register_hook = nn.modules.module.register_module_forward_pre_hook
        self._ends.callback(register_hook(self._record_module).remove)
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
        placements = {}
        for path, record in self.modules.items():
            for name, placements_of_parameter in record.placements.items():
                placements[f"{path}.{name}"] = placements_of_parameter
        return placements

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """Return a table by module.

        Args:
            noise_level: 0 counts of collectives; 1 also parameters and placements; 2 also every
                single collective with shape, axes and bytes; 3 also all other ops.

        Raises:
            MeshTypeError, MeshError: another noise level.
        """
        lines = []
        for path, facts in self._tree(noise_level).items():
            lines_of_module = _lines(facts)
            # at level 0 only modules that ran a collective
            if lines_of_module or noise_level > 0:
                indent = "  " * path.count(".")
                lines.append(f"{indent}{path}")
                lines += [f"{indent}  {line}" for line in lines_of_module]
        totals = Counter(record.op for record in self.trace)
        counts = ", ".join(f"{count} {op}" for op, count in sorted(totals.items()))
        lines.append(f"total: {counts or 'no collectives'}")
        return "\n".join(lines) + "\n"

    def generate_json_dump(
        self, file_name: str = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the table as JSON to a file; see `generate_comm_debug_tracing_table`."""
        trace = []
        for record in self.trace:
            call = _call(record)
            call |= {"module": record.module, "backward": record.backward}
            call["started"] = record.started
            trace.append(call)
        content = {"modules": self._tree(noise_level), "trace": trace}
        _write(file_name, json.dumps(content, indent=1))

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
        modules: dict[str, Any] = {}
        # "Global" first: the collectives outside of modules
        for path in sorted(self.modules, key=lambda path: (path != "Global", path)):
            facts: dict[str, Any] = {
                "forward": self._pass(path, False, noise_level),
                "backward": self._pass(path, True, noise_level),
            }
            if noise_level >= 1:
                facts["parameters"] = _parameter_facts(self.modules[path])
            modules[path] = facts
        return modules

    def _pass(self, path: str, backward: bool, noise_level: int) -> dict[str, Any]:
        """Return the collectives of one module in its forward or backward, as for JSON."""
        records = [
            record for record in self.trace if record.module == path and record.backward is backward
        ]
        facts: dict[str, Any] = {"collectives": dict(Counter(record.op for record in records))}
        facts["bytes"] = sum(record.nbytes for record in records)
        if noise_level >= 2:
            facts["calls"] = [_call(record) for record in records]
        if noise_level >= 3:
            counts = sorted(self.modules[path].ops.items())
            facts["ops"] = {op: count for (op, phase), count in counts if phase is backward}
        return facts

    # --- additions to torch's interface -----------------------------------------------------------

    comm_counts = property(get_comm_counts)

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """The counts of collectives, as module path -> `forward` or `backward` -> counts.

        The counts of a module include those of the modules inside.
        """
        counts: dict[str, dict[str, dict[Any, int]]] = {}
        for record in self.trace:
            phase = "backward" if record.backward else "forward"
            packet = packet_of(record.op)
            # `M.layers.0`: Global, M, M.layers, M.layers.0
            parts = record.module.split(".")
            enclosing = {".".join(parts[: depth + 1]) for depth in range(len(parts))}
            for path in {"Global", *enclosing}:
                if path not in counts:
                    counts[path] = {"forward": CommCounts(), "backward": CommCounts()}
                counts[path][phase][packet] += 1
        return counts

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def get_bytes(self) -> dict[tuple[str, ...], int]:
        """Return the bytes that this rank put into collectives, by mesh axes."""
        total: Counter[tuple[str, ...]] = Counter()
        for record in self.trace:
            total[record.axes] += record.nbytes
        return dict(total)

    # --- recording --------------------------------------------------------------------------------

    def before(self, event: Event) -> None:
        """Record a collective of shoal (called by events.py)."""
        self._open[id(event)] = self._record(event)

    def after(self, event: Event) -> None:
        """Record the duration of a collective (called by events.py)."""
        record = self._open.pop(id(event), None)
        if record is not None:
            record.seconds = event.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run every op unchanged; record collectives of other libraries."""
        for cls in types:
            is_plain = cls.__torch_dispatch__ is Tensor.__torch_dispatch__
            if not is_plain and cls is not _torch.FakeTensor:
                return self._run_subclass(func, args, kwargs or {})
        name = func.overloadpacket.__name__
        if in_observed():
            return func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            # a barrier or a wait sends nothing
            sends = name in _FUNCTIONAL or name in _C10D_ONLY
        else:
            is_functional = func.namespace.lstrip("_") == "c10d_functional"
            sends = is_functional and name.removesuffix("_") in _FUNCTIONAL_NAMES
        if sends:
            return self._run_foreign(func, name, args, kwargs or {})
        record = self._record_of(self._places.current())
        record.ops[str(func), _torch.in_backward()] += 1
        return func(*args, **(kwargs or {}))

    def _run_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leave an op to the tensor subclass that handles it.

        This mode then sees the ops that the subclass calls.
        """
        return NotImplemented

    def _run_foreign(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a collective of another library, and record it."""
        label = "?"
        size = 0
        if func.namespace == "c10d":
            op = _FUNCTIONAL.get(name, name)
            group = _torch.group_of_op(args)
            if group is not None:
                label = group.group_name
                size = group.size()
        else:
            op = name.removesuffix("_")
            # the last text is the name of the group
            label = next((arg for arg in reversed(args) if isinstance(arg, str)), "?")
        sent = args[1] if name in _OUTPUTS_FIRST else args[0]
        leaves = _torch.tree_leaves(sent)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        event = Event(op, SimpleNamespace(axes=(label,), size=size), tensors)
        record = self._record(event)
        result = func(*args, **kwargs)
        record.seconds = time.perf_counter() - event.started
        return result

    def _record(self, event: Event) -> Record:
        """Add a collective to the trace."""
        dtype = ""
        if event.tensors:
            dtype = str(event.tensors[0].dtype).removeprefix("torch.")
        record = Record(
            op=event.op,
            axes=event.comm.axes,
            size=event.comm.size,
            shapes=tuple([tuple(tensor.shape) for tensor in event.tensors]),
            dtype=dtype,
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
    """Return one collective of the trace, as for JSON."""
    return {
        "op": record.op,
        "axes": list(record.axes),
        "ranks": record.size,
        "shapes": [[*shape] for shape in record.shapes],
        "dtype": record.dtype,
        "bytes": record.nbytes,
        "reduce": record.reduce_op,
    }


def _parameter_facts(record: ModuleRecord) -> dict[str, Any]:
    """Return shape, dtype and placements of a module's parameters by name, as for JSON."""
    facts = {}
    for name, parameter in record.parameters.items():
        placements = str(record.placements.get(name, ""))
        facts[name] = {
            "shape": [*parameter.shape],
            "dtype": str(parameter.dtype),
            "placements": placements,
        }
    return facts


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return the lines of a module in the table, from the facts of `_tree`."""
    lines = []
    for name, parameter in facts.get("parameters", {}).items():
        shape = tuple(parameter["shape"])
        lines.append(f"*{name}: {shape} {parameter['dtype']} {parameter['placements']}".rstrip())
    for phase in ("forward", "backward"):
        lines += _lines_of_pass(phase.upper(), facts[phase])
    return lines


def _lines_of_pass(title: str, facts: dict[str, Any]) -> list[str]:
    """Return the lines of a module's forward or backward."""
    lines = []
    collectives = facts["collectives"]
    ops = facts.get("ops", {})
    if collectives or ops:
        count = sum(collectives.values())
        lines.append(f"{title}: {facts['bytes']} bytes in {count} collectives")
    lines += [f"  {op}: {count}" for op, count in sorted(collectives.items())]
    for call in facts.get("calls", ()):
        collective = f"{call['op']} {call['reduce']}".rstrip()
        shapes = " ".join(map(str, map(tuple, call["shapes"])))
        axes = "x".join(call["axes"])
        lines.append(f"    {collective} {shapes} {call['dtype']} along {axes}")
    lines += [f"  ** {op}: {count}" for op, count in ops.items()]
    return lines


def _write(file_name: str, text: str) -> None:
    require(file_name, str | PathLike, "a file is named by a string or path")
    Path(file_name).write_text(text)
