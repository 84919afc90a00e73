"""CommDebugMode: which collectives a program runs, how often, where and over which axes.

It counts collectives as the caller asked for them, not the backend calls: a reduce-scatter that a backend emulates is
one reduce-scatter. Collectives of shoal report themselves (events.py); those of others (`torch.distributed`, functional
collectives) are seen on their way through the dispatcher. Tables and files are written by comm_report.py.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from .. import _torch
from ..events import Event, in_observed, observe, unobserve
from .comm_report import ModuleRecord, Record, as_json, table, write

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
_OUTPUTS_FIRST = {name for name in _FUNCTIONAL if not name.startswith(("allreduce", "broadcast"))} | {
    "gather_",
    "scatter_",
}
_WITHOUT_FUNCTIONAL = {"scatter": "scatter_", "gather": "gather_"}
_POINT_TO_POINT = {"scatter_", "gather_", "reduce_", "send", "recv_", "recv_any_source_"}  # c10d only


def packet_of(op: str) -> Any:
    """The op packet that a collective is counted under: of `_c10d_functional`, of `c10d` where that has none."""
    name = _WITHOUT_FUNCTIONAL.get(op, op)
    return getattr(_torch.functional, name, None) or getattr(_torch.c10d_ops, name)


class CommCounts(Counter[Any]):  # noqa: PLW1641  # like other dictionaries it has no hash
    """How often each collective ran, by op packet of `_c10d_functional`; found by all its packets.

    Programs look counts up by torch's keys, `torch.ops.c10d_functional.all_reduce` (where torch has registered that
    namespace) or `torch.ops.c10d.allreduce_`: none of them may read as "never", and counts under other names of the
    same collectives are equal.

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
        ours, theirs = ([_canonical(packet) for packet in Counter(each).elements()] for each in (self, other))
        return Counter(ours) == Counter(theirs)


def _canonical(packet: Any) -> Any:
    """The packet under which a collective is counted that is asked for by any of its names."""
    namespace, _, name = str(packet).rpartition(".")
    if namespace == "c10d":
        return packet_of(_FUNCTIONAL.get(name, name))
    return getattr(_torch.functional, name, packet) if namespace == "c10d_functional" else packet


class CommDebugMode(_torch.TorchDispatchMode):
    """Counts and records every collective inside of a `with` block, forward and backward.

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
        import_module("torch.distributed._functional_collectives")  # it makes the keys `torch.ops.c10d_functional.*`
        self.trace: list[Record] = []
        self.modules: dict[str, ModuleRecord] = {}
        self._open: dict[int, Record] = {}
        self._names: dict[nn.Module, str] = {}  # of the modules that ran; empty outside of the block
        self._tracker = ModuleTracker()
        self._began = 0.0
        self._ends = ExitStack()

    def __enter__(self) -> CommDebugMode:
        self.trace, self.modules, self._tracker = [], {}, ModuleTracker()
        self._began = time.perf_counter()
        self._ends.callback(self._names.clear)  # keep no module alive
        self._ends.enter_context(self._tracker)
        self._ends.callback(nn.modules.module.register_module_forward_pre_hook(self._record_module).remove)
        observe(self)
        self._ends.callback(unobserve, self)
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here
        self._ends.close()

    # --- torch's interface ------------------------------------------------------------------------------------------

    def get_comm_counts(self) -> dict[Any, int]:
        """How often each collective ran, by op packet (`torch.ops._c10d_functional.all_reduce`, ...): `CommCounts`."""
        return CommCounts(packet_of(record.op) for record in self.trace)

    def get_total_counts(self) -> int:
        """How many collectives ran."""
        return len(self.trace)

    def get_parameter_info(self) -> dict[str, dict[str, Tensor]]:
        """Module path -> parameter name -> parameter, of every module that ran."""
        return {path: record.parameters for path, record in self.modules.items() if record.parameters}

    def get_sharding_info(self) -> dict[str, Any]:
        """`module.parameter` -> placements, of every distributed parameter of the modules that ran."""
        return {f"{path}.{name}": p for path, record in self.modules.items() for name, p in record.placements.items()}

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """A table by module.

        Args:
            noise_level: 0 counts of collectives; 1 also parameters and placements; 2 also every single collective with
                shape, axes and bytes; 3 also all other ops.

        Raises:
            MeshTypeError, MeshError: another noise level.
        """
        return table(self.trace, self.modules, noise_level)

    def generate_json_dump(self, file_name: str = "comm_mode_log.json", noise_level: int = 3) -> None:
        """The same as JSON in a file; the argument is that of `generate_comm_debug_tracing_table`."""
        write(file_name, as_json(self.trace, self.modules, noise_level))

    def log_comm_debug_tracing_table_to_file(self, file_name: str = "comm_mode_log.txt", noise_level: int = 3) -> None:
        """The table of `generate_comm_debug_tracing_table` in a file."""
        write(file_name, self.generate_comm_debug_tracing_table(noise_level))

    # --- beyond it ----------------------------------------------------------------------------------------------------

    @property
    def comm_counts(self) -> dict[Any, int]:
        """`get_comm_counts()`."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """Module path -> `forward` or `backward` -> how often each collective ran in it and in the modules inside."""
        counts: dict[str, dict[str, dict[Any, int]]] = {}
        for record in self.trace:
            parts = record.module.split(".")
            inside = {"Global", *(".".join(parts[: n + 1]) for n in range(len(parts)))}
            for path in inside:
                passes = counts.setdefault(path, {"forward": CommCounts(), "backward": CommCounts()})
                passes["backward" if record.backward else "forward"][packet_of(record.op)] += 1
        return counts

    def __repr__(self) -> str:
        return f"CommDebugMode(get_total_counts()={self.get_total_counts()})"

    def get_bytes(self) -> dict[tuple[str, ...], int]:
        """Bytes that this rank put into collectives, by mesh axes."""
        total: Counter[tuple[str, ...]] = Counter()
        for record in self.trace:
            total[record.axes] += record.nbytes
        return dict(total)

    # --- how it records -----------------------------------------------------------------------------------------------

    def before(self, event: Event) -> None:
        """Record a collective of shoal (called by events.py)."""
        self._open[id(event)] = self._record(event)

    def after(self, event: Event) -> None:
        """Note how long it took."""
        record = self._open.pop(id(event), None)
        if record is not None:
            record.seconds = event.seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything pass; record collectives of others."""
        if any(t.__torch_dispatch__ is not Tensor.__torch_dispatch__ and t is not _torch.FakeTensor for t in types):
            return self._run_subclass(func, args, kwargs or {})
        name = func._overloadpacket.__name__
        if in_observed():
            return func(*args, **(kwargs or {}))
        if _is_collective(func.namespace, name):
            return self._run_foreign(func, name, args, kwargs or {})
        self._record_of(self._module()).ops[str(func), _torch.in_backward()] += 1
        return func(*args, **(kwargs or {}))

    def _run_subclass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on tensors that handle it themselves: they do, and this mode sees what they call."""
        return NotImplemented

    def _run_foreign(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "c10d":
            group = _torch.group_of_op(args)
            label, size = (_torch.group_name(group), group.size()) if group is not None else ("?", 0)
            op = _FUNCTIONAL.get(name, name)
        else:
            label = next((a for a in reversed(args) if isinstance(a, str)), "?")
            op, size = name.removesuffix("_"), 0
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
            module=self._module(),
            backward=_torch.in_backward(),
            started=event.started - self._began,
        )
        self.trace.append(record)
        self._record_of(record.module)
        return record

    def _module(self) -> str:
        """The path of the innermost module that runs, forward or backward."""
        return max(self._tracker.parents, key=lambda path: (path != "Global", path.count("."), path), default="Global")

    def _record_of(self, module: str) -> ModuleRecord:
        return self.modules.setdefault(module, ModuleRecord())

    def _record_module(self, module: nn.Module, args: Any) -> None:
        if module not in self._names:
            root = type(module).__name__
            for path, inner in module.named_modules():
                self._names.setdefault(inner, f"{root}.{path}" if path else root)
        record = self._record_of(self._names[module])
        for name, parameter in module.named_parameters(recurse=False):
            record.parameters[name] = parameter.detach()
            placements = getattr(parameter, "placements", None)
            if placements is not None:
                record.placements[name] = placements


_torch.without_importing_dynamo(CommDebugMode)


def _is_collective(namespace: str, name: str) -> bool:
    """Whether an op sends data (a barrier or a wait does not)."""
    if namespace == "c10d":
        return name in _FUNCTIONAL or name in _POINT_TO_POINT
    return namespace in {"_c10d_functional", "c10d_functional"} and name.removesuffix("_") in _FUNCTIONAL_NAMES
