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
from torch import nn

from shoal_dtensor.internal import current_arithmetic, format_bytes, takes
from shoal_mesh import DeviceMesh, Link, topology_of

from ..lowering.lowered import nbytes as bytes_of
from ..lowering.ports import Boundary
from ..sharding.module_sharding import Collective, ModuleCall
from .resolve import Plan, axis_mesh, resolve
from .verify import map_tensors


class CollectiveCost(NamedTuple):
    """One collective of a step."""

    # all_reduce, all_gather, reduce_scatter or all_to_all
    op: str
    nbytes: int  # bytes of the global tensor
    seconds: float  # expected time by the mesh's topology

    def __str__(self) -> str:
        return f"{self.op} {format_bytes(self.nbytes)}"


@dataclass(slots=True)
class PreviewRow:
    """The cost of one style on one module."""

    path: str  # the module's path
    style: str  # the style
    parameter_bytes: int  # of the rank that holds most
    forward: list[CollectiveCost] = field(default_factory=list)  # collectives, in order of use
    backward: list[CollectiveCost] = field(default_factory=list)  # collectives of the backward
    # the module's own forward runs on DTensors; the collectives of its operators are not listed
    by_dispatch: bool = False


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
        return forward, sum(cost.op == op for row in self.rows for cost in row.backward)

    def _cells(self) -> list[tuple[str, str, str, str]]:
        cells = [("module", "params/rank", "forward / backward", "style")]
        for row in self.rows:
            costs = " / ".join(
                ", ".join(map(str, each)) or "-" for each in (row.forward, row.backward)
            )
            style = f"{row.style}, operators by dispatch" if row.by_dispatch else row.style
            cells.append((row.path or "(root)", format_bytes(row.parameter_bytes), costs, style))
        cells.append(
            (
                "(not in the plan)",
                format_bytes(self.replicated_bytes),
                "",
                "replicated on every rank",
            )
        )
        cells.append(
            (
                "total",
                format_bytes(self.parameter_bytes),
                f"{self.seconds * 1e3:.2f} ms of communication",
                "",
            )
        )
        return cells

    def __repr__(self) -> str:
        cells = self._cells()
        wide = [max(len(cell[column]) for cell in cells) for column in range(3)]
        lines = (f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:{wide[2]}}  {d}" for a, b, c, d in cells)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        from html import escape  # 2 ms, for notebooks only

        rows = ("".join(f"<td>{escape(text)}</td>" for text in cell) for cell in self._cells())
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


@takes(model=nn.Module)
def preview(model: nn.Module, plan: Plan, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Preview:
    """Return the cost of a plan per rank and step.

    Args:
        model: before `parallelize_module`, on any device; it stays as it is.
        plan: as for `parallelize_module`.
        mesh: the mesh; its topology gives the times.
        args: an example of the inputs, of global shape; only shapes and dtypes matter.
        kwargs: likewise.

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
    arithmetic = current_arithmetic()
    calls = _record_calls(model, {use.path for use in resolved.uses}, args, kwargs)
    seen: set[Hashable] = set()
    rows = []
    listed: set[int] = set()
    for use in resolved.uses:
        axis = axis_mesh(mesh, use.style)
        row = PreviewRow(use.path, repr(use.style), 0, by_dispatch=use.sharding is None)
        rows.append(row)
        if use.sharding is None:
            continue
        lowering = use.sharding.lowering or Boundary
        if arithmetic is not None:
            lowering = arithmetic.form_of(lowering, use.sharding, use.module)
        if use.sharding.distributes:
            row.by_dispatch = lowering is Boundary
            for name, param in use.module.named_parameters():
                if id(param) not in listed:
                    listed.add(id(param))
                    nbytes = bytes_of(param)
                    for _, _, size, sizes in use.shard_sizes(name, axis):
                        nbytes = nbytes * max(sizes) // max(size, 1)
                    row.parameter_bytes += nbytes
        for recorded in calls.get(use.path, []):
            call = ModuleCall(use.module, use.sharding, *recorded, axis.size(), axis.shape)
            for collective in lowering.collectives(call):
                key = collective.once_for, collective.op, collective.backward
                # some run once for several modules
                if collective.once_for is None or key not in seen:
                    seen.add(key)
                    costs = row.backward if collective.backward else row.forward
                    costs += _cost(collective, topology_of(axis)[0], axis.size())
    rest = bytes_of(*(param for param in model.parameters() if id(param) not in listed))
    return Preview(tuple(rows), rest)


def _cost(collective: Collective, link: Link, axis_size: int) -> list[CollectiveCost]:
    ranks = collective.ranks or axis_size
    if ranks == 1 or not collective.nbytes:
        return []
    # On a ring each rank sends (n - 1) / n of the tensor; an all-reduce is a reduce-scatter and an
    # all-gather.
    factor = (2 if collective.op == "all_reduce" else 1) * (ranks - 1) / ranks
    nbytes = collective.nbytes // collective.chunks
    return [
        CollectiveCost(collective.op, nbytes, link.seconds(nbytes * factor))
    ] * collective.chunks


_Recorded = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]


def _record_calls(
    model: nn.Module, paths: set[str], args: Any, kwargs: Any
) -> dict[str, list[_Recorded]]:
    """Run a forward on the meta device; record arguments and outputs of the plan's modules."""
    calls: dict[str, list[_Recorded]] = {}
    handles = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path in paths:

            def record(_: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
                outputs = tuple(out) if isinstance(out, tuple | list) else (out,)
                calls.setdefault(path, []).append((args, kwargs, outputs))

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
    return map_tensors(
        lambda tensor: tensor.detach().to("meta").requires_grad_(tensor.requires_grad), value
    )
