"""Preview of a plan's cost: bytes per rank, collectives of a step, expected time.

The cost is known before anything is changed.

The model runs once on the meta device to record the shapes that enter and leave its modules. Each
module's lowering declares the collectives of its calls; the preview adds them up.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_dtensor.internal import check_types, current_arithmetic, format_bytes
from shoal_mesh import DeviceMesh, Link, topology_of
from shoal_mesh.internal import html_table

from ..lowering.lowered import Lowered, nbytes as bytes_of
from ..lowering.ports import DTensorForward
from ..sharding.module_sharding import Collective, ModuleCall, ModuleSharding
from .resolve import Plan, resolve
from .styled_module import StyledModule, axis_mesh
from .verify import map_tensors


class CollectiveCost(NamedTuple):
    """One collective of a step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        nbytes: bytes of the global tensor.
        seconds: expected time by the mesh's topology.
    """

    op: str
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.op} {format_bytes(self.nbytes)}"


@dataclass(slots=True)
class PreviewRow:
    """The cost of one style on one module.

    Attributes:
        path: the module's path.
        style: the style.
        parameter_bytes: bytes of the module's parameters on the rank that holds most.
        forward: collectives of the forward, in order of use.
        backward: collectives of the backward.
        by_dispatch: whether the module's own forward runs on DTensors; the collectives of its
            operators are then not listed.
    """

    path: str
    style: str
    parameter_bytes: int
    forward: list[CollectiveCost] = field(default_factory=list)
    backward: list[CollectiveCost] = field(default_factory=list)
    by_dispatch: bool = False


class _Cells(NamedTuple):
    """The cells of one row of the printed table."""

    module: str
    parameters: str
    collectives: str
    style: str


@dataclass(frozen=True, slots=True, repr=False)
class Preview:
    """The rows of all styles, and the bytes of parameters without a style.

    Attributes:
        rows: one per style and module.
        replicated_bytes: parameters that no style of the plan distributes, on every rank.
    """

    rows: tuple[PreviewRow, ...]
    replicated_bytes: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters on the rank that holds most."""
        return self.replicated_bytes + sum(row.parameter_bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Expected time of all collectives of one forward and backward, without overlap."""
        return sum(cost.seconds for row in self.rows for cost in (*row.forward, *row.backward))

    def count(self, op: str) -> tuple[int, int]:
        """Return the number of collectives of one kind in the forward and in the backward."""
        forward = sum(cost.op == op for row in self.rows for cost in row.forward)
        backward = sum(cost.op == op for row in self.rows for cost in row.backward)
        return forward, backward

    def _table(self) -> list[_Cells]:
        table = [_Cells("module", "params/rank", "forward / backward", "style")]
        for row in self.rows:
            forward = ", ".join(map(str, row.forward)) or "-"
            backward = ", ".join(map(str, row.backward)) or "-"
            style = f"{row.style}, operators by dispatch" if row.by_dispatch else row.style
            parameters = format_bytes(row.parameter_bytes)
            table.append(_Cells(row.path or "(root)", parameters, f"{forward} / {backward}", style))
        replicated = format_bytes(self.replicated_bytes)
        table.append(_Cells("(not in the plan)", replicated, "", "replicated on every rank"))
        total = format_bytes(self.parameter_bytes)
        duration = f"{self.seconds * 1e3:.2f} ms of communication"
        table.append(_Cells("total", total, duration, ""))
        return table

    def __repr__(self) -> str:
        table = self._table()
        module_width = max(len(cells.module) for cells in table)
        parameters_width = max(len(cells.parameters) for cells in table)
        collectives_width = max(len(cells.collectives) for cells in table)
        lines = []
        for cells in table:
            module = cells.module.ljust(module_width)
            parameters = cells.parameters.rjust(parameters_width)
            collectives = cells.collectives.ljust(collectives_width)
            lines.append(f"{module}  {parameters}  {collectives}  {cells.style}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        header, *rows = self._table()
        return html_table(rows, header=header)


@check_types(model=nn.Module)
def preview(model: nn.Module, plan: Plan, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Preview:
    """Return the cost of a plan per rank and step.

    Args:
        model: a model that is not parallel, on any device; it is not changed.
        plan: the plan, as for `parallelize_module`.
        mesh: the mesh; its topology gives the times.
        args: example inputs of global shape; only shapes and dtypes matter.
        kwargs: keyword arguments among the example inputs.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles import ColwiseParallel, RowwiseParallel
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> costs = preview(mlp, plan, abstract_mesh((4,)), torch.zeros(8, 10))
        >>> costs.count("all_reduce"), costs.parameter_bytes
        ((1, 0), 376)
    """
    resolved = resolve(model, plan)
    calls = _record_calls(model, {use.path for use in resolved.uses}, args, kwargs)
    ran_once: set[Hashable] = set()
    listed: set[int] = set()
    rows = []
    for use in resolved.uses:
        axis = axis_mesh(mesh, use.style)
        row = PreviewRow(use.path, repr(use.style), 0, by_dispatch=use.sharding is None)
        rows.append(row)
        if use.sharding is None:
            continue
        lowering = _lowering_of(use, use.sharding)
        if use.distributes:
            row.by_dispatch = lowering is DTensorForward
            row.parameter_bytes = _largest_shards_bytes(use, axis, listed)
        for recorded in calls.get(use.path, []):
            call = ModuleCall(
                module=use.module,
                sharding=use.sharding,
                args=recorded.args,
                kwargs=recorded.kwargs,
                outputs=recorded.outputs,
                ranks=axis.size(),
                axis_sizes=axis.shape,
            )
            for collective in lowering.collectives(call):
                if not _runs_here(collective, ran_once):
                    continue
                costs = row.backward if collective.backward else row.forward
                costs += _costs_of(collective, topology_of(axis)[0], axis.size())
    rest = bytes_of(*(param for param in model.parameters() if id(param) not in listed))
    return Preview(tuple(rows), rest)


def _lowering_of(use: StyledModule, sharding: ModuleSharding) -> type[Lowered]:
    """Return the lowering of a module, in the arithmetic that is entered if one is."""
    lowering = sharding.lowering or DTensorForward
    arithmetic = current_arithmetic()
    if arithmetic is not None:
        lowering = arithmetic.form_of(lowering, sharding, use.module)
    return lowering


def _largest_shards_bytes(use: StyledModule, axis: DeviceMesh, listed: set[int]) -> int:
    """Return the bytes of a module's parameters on the rank that holds most.

    Parameters in `listed` are left out; the others are added to it.
    """
    total = 0
    for name, param in use.module.named_parameters():
        if id(param) in listed:
            continue
        listed.add(id(param))
        nbytes = bytes_of(param)
        for sharded in use.shard_sizes(name, axis):
            # Example: 10 rows with 40 bytes in all, in shards of 3 3 3 1 rows -> 12 bytes.
            nbytes = nbytes * max(sharded.sizes) // max(sharded.size, 1)
        total += nbytes
    return total


def _runs_here(collective: Collective, ran_once: set[Hashable]) -> bool:
    """Tell whether a collective that may be shared by several modules runs for this one."""
    if collective.once_for is None:
        return True
    key = (collective.once_for, collective.op, collective.backward)
    is_first = key not in ran_once
    ran_once.add(key)
    return is_first


def _costs_of(collective: Collective, link: Link, axis_size: int) -> list[CollectiveCost]:
    """Return the cost of each message of a collective; none if nothing is sent."""
    ranks = collective.ranks or axis_size
    if ranks == 1 or not collective.nbytes:
        return []
    # On a ring each rank sends (n - 1) / n of the tensor; an all-reduce is a reduce-scatter and an
    # all-gather.
    passes = 2 if collective.op == "all_reduce" else 1
    nbytes = collective.nbytes // collective.chunks
    sent_bytes = nbytes * passes * (ranks - 1) / ranks
    message = CollectiveCost(collective.op, nbytes, link.seconds(sent_bytes))
    return [message] * collective.chunks


class _RecordedCall(NamedTuple):
    """Arguments and outputs of one call of a module, as meta tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Any, ...]


def _record_calls(
    model: nn.Module, paths: set[str], args: Any, kwargs: Any
) -> dict[str, list[_RecordedCall]]:
    """Run a forward on the meta device; record arguments and outputs of the plan's modules."""
    calls: dict[str, list[_RecordedCall]] = {}
    handles = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path not in paths:
            continue

        def record(_: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
            outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
            calls.setdefault(path, []).append(_RecordedCall(args, kwargs, outputs))

        handles.append(module.register_forward_hook(record, with_kwargs=True))
    state = to_meta({**dict(model.named_parameters()), **dict(model.named_buffers())})
    try:
        with torch.enable_grad():
            torch.func.functional_call(model, state, to_meta(args), to_meta(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def to_meta(value: Any) -> Any:
    """Move arguments to the meta device."""

    def tensor_to_meta(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)

    return map_tensors(tensor_to_meta, value)
