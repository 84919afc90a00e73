"""What a plan will cost, before anything is changed: bytes per rank, collectives of a step, expected time.

The model runs once on the meta device to see the shapes that cross its modules; neither data nor process
groups are needed, and the mesh may be an `abstract_mesh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import Placement, Replicate, Shard
from shoal_mesh import DeviceMesh, Link, topology_of

from .findings import part_sizes
from .lora import LoRA
from .plan import Plan, Use, axis_mesh, resolve
from .sharding import Heads, Port

__all__ = ["Move", "Preview", "PreviewRow", "preview"]

_COLUMNS = {"ColwiseParallel", "PackedColwiseParallel", "LoRA ColwiseParallel", "HeadParallel"}
_ROWS = {"RowwiseParallel", "LoRA RowwiseParallel", "HeadParallel"}


@dataclass(frozen=True, slots=True)
class Move:
    """One collective of a step.

    Attributes:
        op: all_reduce, all_gather, reduce_scatter or all_to_all.
        nbytes: bytes of the whole tensor.
        seconds: expected time by the mesh's topology.
    """

    op: str
    nbytes: int
    seconds: float


@dataclass(slots=True)
class PreviewRow:
    """One style on one module.

    Attributes:
        path, style: where, and which.
        parameter_bytes: of the fullest rank.
        forward, backward: collectives, in order of use.
    """

    path: str
    style: str
    parameter_bytes: int
    forward: list[Move] = field(default_factory=list)
    backward: list[Move] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Preview:
    """The rows of all styles, and what stays whole on every rank."""

    rows: tuple[PreviewRow, ...]
    whole_bytes: int

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters on the fullest rank."""
        return self.whole_bytes + sum(row.parameter_bytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Expected time of all collectives of one forward and backward, without overlap."""
        return sum(move.seconds for row in self.rows for move in (*row.forward, *row.backward))

    def count(self, op: str) -> tuple[int, int]:
        """How often a collective runs in the forward and in the backward."""
        forward = sum(move.op == op for row in self.rows for move in row.forward)
        return forward, sum(move.op == op for row in self.rows for move in row.backward)

    def __str__(self) -> str:
        cells = [("module", "params/rank", "forward / backward", "style")]
        for row in self.rows:
            moves = f"{_told(row.forward)} / {_told(row.backward)}"
            cells.append((row.path or "(root)", _size(row.parameter_bytes), moves, row.style))
        cells.append(("(not in the plan)", _size(self.whole_bytes), "", "whole on every rank"))
        cells.append(("total", _size(self.parameter_bytes), f"{self.seconds * 1e3:.2f} ms of communication", ""))
        wide = [max(len(cell[column]) for cell in cells) for column in range(3)]
        lines = (f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:{wide[2]}}  {d}" for a, b, c, d in cells)
        return "\n".join(line.rstrip() for line in lines)


def preview(model: nn.Module, plan: Plan, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Preview:
    """What a plan costs per rank and step.

    Args:
        model: before `parallelize_module`, on any device; it stays as it is.
        plan: as for `parallelize_module`.
        mesh: the mesh; its topology gives the times.
        args: an example of the whole (global) inputs; only shapes and dtypes matter.
        kwargs: likewise.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles.testing import MLP
        >>> seen = preview(MLP(), MLP.plan, abstract_mesh((4,)), torch.zeros(8, 10))
        >>> seen.count("all_reduce"), seen.parameter_bytes
        ((1, 0), 376)
    """
    resolved = resolve(model, plan)
    crossings = _trace(model, {use.path for use in resolved.uses}, args, kwargs)
    read: set[tuple[int, Placement]] = set()
    rows = []
    listed: set[int] = set()
    for use in resolved.uses:
        its_mesh = axis_mesh(mesh, use.style)
        row = PreviewRow(use.path, repr(use.style), 0)
        rows.append(row)
        if use.sharding is None:
            continue
        if use.sharding.distributes:
            row.parameter_bytes = sum(
                _local_bytes(use, name, param, its_mesh.size())
                for name, param in use.module.named_parameters()
                if id(param) not in listed
            )
            listed.update(id(param) for param in use.module.parameters())
        for crossing in crossings.get(use.path, []):
            _add_moves(use, crossing, _Ledger(row, topology_of(its_mesh)[0], its_mesh.size(), read))
    rest = sum(_nbytes(param) for param in model.parameters() if id(param) not in listed)
    return Preview(tuple(rows), rest)


@dataclass(frozen=True, slots=True)
class _Crossing:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def _trace(model: nn.Module, paths: set[str], args: Any, kwargs: Any) -> dict[str, list[_Crossing]]:
    """The meta tensors that enter and leave each module of the plan in one forward."""
    seen: dict[str, list[_Crossing]] = {}
    handles = []
    for path, module in model.named_modules(remove_duplicate=False):
        if path in paths:

            def record(_: nn.Module, inputs: Any, given: Any, out: Any, path: str = path) -> None:
                crossing = _Crossing(tuple(_tensors([*inputs, *given.values()])), tuple(_tensors([out])))
                seen.setdefault(path, []).append(crossing)

            handles.append(module.register_forward_hook(record, with_kwargs=True))
    state = {
        name: nn.Parameter(value.detach().to("meta"), value.requires_grad)
        if isinstance(value, nn.Parameter)
        else value.to("meta")
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    try:
        with torch.enable_grad():
            torch.func.functional_call(model, state, _to_meta(args), _to_meta(kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return type(value)(_to_meta(item) for item in value) if type(value) in (list, tuple) else value


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _local_bytes(use: Use, name: str, param: Tensor, ways: int) -> int:
    """Bytes of a parameter on the rank that holds most of it."""
    assert use.sharding is not None, "only declared styles are measured"
    named: Any = use.sharding.options.get("blocks", {})
    blocks: dict[str, Heads] = named
    if blocks and "." not in name:
        rows = sum(_rows(heads, ways) for heads in blocks.values())
        return _nbytes(param) * rows // sum(heads.features for heads in blocks.values())
    placement = use.sharding.placement(name, ways)
    if not isinstance(placement, Shard):
        return _nbytes(param)
    size = param.shape[placement.dim]
    return _nbytes(param) * max(part_sizes(size, placement, ways)) // max(size, 1)


def _rows(heads: Heads, ways: int) -> int:
    return heads.size if heads.shared(ways) else -(-heads.count // ways) * heads.size


@dataclass(frozen=True, slots=True)
class _Ledger:
    """Collects the moves of one row; knows the axis and which activations were read before."""

    row: PreviewRow
    link: Link
    ways: int
    read: set[tuple[int, Placement]]

    def forward(self, op: str, tensor: Tensor) -> None:
        self.row.forward += self._move(op, _nbytes(tensor))

    def backward(self, op: str, nbytes: int) -> None:
        self.row.backward += self._move(op, nbytes)

    def _move(self, op: str, nbytes: int) -> list[Move]:
        if self.ways == 1 or not nbytes:
            return []
        factor = (2 if op == "all_reduce" else 1) * (self.ways - 1) / self.ways
        return [Move(op, nbytes, self.link.seconds(nbytes * factor))]


def _add_moves(use: Use, crossing: _Crossing, ledger: _Ledger) -> None:
    """Add the collectives of one call of a module."""
    sharding = use.sharding
    assert sharding is not None, "only declared styles are measured"
    for tensor, port in zip(crossing.inputs, sharding.inputs or (), strict=False):
        if port is not None and sharding.kind in _COLUMNS and tensor.is_floating_point():
            _read(tensor, port.layout, ledger)
        elif port is not None:
            _between(port, tensor, ledger)
    if sharding.kind == "SequenceParallel":
        ledger.backward("all_reduce", sum(_nbytes(p) for p in use.module.parameters() if p.requires_grad))
        return
    for tensor, port in zip(crossing.outputs, sharding.outputs or (), strict=False):
        if port is not None and sharding.kind in _ROWS:
            ledger.forward("all_reduce" if port.desired == Replicate() else "reduce_scatter", tensor)
            if isinstance(port.desired, Shard):
                ledger.backward("all_gather", _nbytes(tensor))
                ledger.backward("all_reduce", _bias_bytes(use))
        elif port is not None:
            _between(port, tensor, ledger)


def _bias_bytes(use: Use) -> int:
    """Bytes of a bias whose gradients are summed by themselves; a Linear's kernel sees the whole gradient anyway."""
    assert use.sharding is not None, "only declared styles are measured"
    bias = dict(use.module.named_parameters()).get("out_proj.bias" if use.sharding.kind == "HeadParallel" else "bias")
    alone = use.sharding.kind != "RowwiseParallel" or not isinstance(use.module, nn.Linear)
    trained = bias is not None and (bias.requires_grad if not isinstance(use.style, LoRA) else use.style.train_base)
    return _nbytes(bias) if alone and trained and bias is not None else 0


def _read(tensor: Tensor, layout: Placement, ledger: _Ledger) -> None:
    """A column-wise module reads an activation; those that read the same one share the collectives."""
    if (id(tensor), layout) in ledger.read:
        return
    ledger.read.add((id(tensor), layout))
    if isinstance(layout, Shard):
        ledger.forward("all_gather", tensor)
    if tensor.requires_grad:
        ledger.backward("all_reduce" if layout == Replicate() else "reduce_scatter", _nbytes(tensor))


def _between(port: Port, tensor: Tensor, ledger: _Ledger) -> None:
    """Moves of a tensor whose gradient is complete where the tensor is."""
    if port.layout == port.desired:
        return
    back = _nbytes(tensor) if tensor.requires_grad else 0
    if isinstance(port.layout, Shard) and isinstance(port.desired, Shard):
        ledger.forward("all_to_all", tensor)
        ledger.backward("all_to_all", back)
    elif isinstance(port.layout, Shard):
        ledger.forward("all_gather", tensor)
    elif isinstance(port.desired, Shard):
        ledger.backward("all_gather", back)


def _told(moves: list[Move]) -> str:
    return ", ".join(f"{move.op} {_size(move.nbytes)}" for move in moves) or "-"


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")
