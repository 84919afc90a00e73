"""`record_run` keeps a few sums of every value of a run; `compare_runs` finds where runs differ.

The sums do not depend on how a value is sharded. The sums of a difference are the difference of the
sums, and the norm of these sums is about the norm of the difference.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import (
    TorchDispatchMode,
    backward_number,
    check_device_mesh,
    check_types,
)
from shoal_mesh import DeviceMesh, all_reduce
from shoal_mesh.internal import agree, html_table, html_text
from shoal_tp_styles import Lowered
from shoal_tp_styles.internal import StyleOrigin, lowered_of

from .fingerprints import GlobalPart, part_of_output, part_of_tensor

# The largest number of values that the table of a notebook shows.
_MOST_ROWS = 50
# Beginnings of the names of operators whose results are uninitialized, or are their input's values.
_SKIPPED = ("empty", "new_empty", "detach", "alias", "lift_fresh")


class Value(NamedTuple):
    """One value of a run.

    Attributes:
        name: a name such as `output of up`, `aten.mm.default in up` or `gradient of up.weight`. The
            second value of a name ends in #2, the third in #3, and so on.
        shape: the shape of the global tensor, or of the rank's own tensor if `by_rank` is true.
        dtype: the dtype, without `torch.`.
        by_rank: True if it is unknown how the tensors of the ranks form a global tensor. Such a
            value is only compared between runs with the same ranks and meshes.
        sums: 64 sums, see fingerprints.py.
        norm: the norm of all finite elements.
        broken: the number of elements that are infinite or nan.
        digest: a hash of the global indices and bits of all elements; equal bits have equal
            digests.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    by_rank: bool
    sums: list[float]
    norm: float
    broken: int
    digest: int


@dataclass(slots=True)
class RunRecord:
    """The values of a run in order; complete when the block of `record_run` has ended.

    Attributes:
        ranks: the number of ranks.
        values: the values of the run.
        meshes: the meshes of the model and the batch, as text.
    """

    ranks: int = 1
    values: list[Value] = field(default_factory=list)
    meshes: list[str] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the record to a file, for `load` or `python -m shoal_same_bits compare`."""
        lines = [json.dumps({"ranks": self.ranks, "meshes": self.meshes})]
        lines += [json.dumps(value._asdict()) for value in self.values]
        Path(path).write_text("\n".join(lines) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> RunRecord:
        """Read a record that `save` wrote.

        Raises:
            StyleError: if `save` did not write the file.
        """
        try:
            lines = Path(path).read_text().splitlines()
            head, *entries = map(json.loads, lines)
            for entry in entries:
                entry["shape"] = tuple(entry["shape"])
            values = [Value(**entry) for entry in entries]
            return cls(head["ranks"], values, head.get("meshes", []))
        except (ValueError, TypeError, KeyError) as error:
            raise StyleError(f"{path} was not written by RunRecord.save: {error!r}") from error


@check_types(model=nn.Module)
@contextmanager
def record_run(model: nn.Module, batch: DeviceMesh | None = None) -> Iterator[RunRecord]:
    """Record the values of a step inside the block; all ranks enter and leave it.

    The record begins with the parameters. Then come the results of operators and the outputs of
    modules, in the order in which they are computed. DTensors and the outputs of modules with a
    style are recorded as global values. The record ends with the gradients and the parameters.
    Recording takes much longer than the step.

    Args:
        model: the module, sharded or not.
        batch: the data axes that shard dim 0 of activations; None if no axis does. With data axes
            the gradients of activations are not recorded.

    Yields:
        The record, which is complete when the block has ended.

    Example:
        >>> model, x = nn.Linear(4, 4), torch.ones(2, 4)
        >>> with record_run(model) as run:
        ...     model(x).sum().backward()
        >>> [value.name for value in run.values if "aten" not in value.name][2:4]
        ['output of model', 'gradient at output of model']
    """
    if batch is not None:
        check_device_mesh("record_run", batch)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    record = RunRecord(ranks, meshes=_describe_meshes(model, batch))
    recorder = _Recorder(model, batch, record.ranks)
    for name, param in model.named_parameters():
        part = part_of_tensor(param.detach())
        recorder.add(f"{name} before", part)
    with ExitStack() as hooks, recorder:
        for hook in recorder.hooks():
            hooks.callback(hook.remove)
        yield record
    for name, param in model.named_parameters():
        if param.grad is not None:
            part = part_of_tensor(param.grad)
            recorder.add(f"gradient of {name}", part)
    for name, param in model.named_parameters():
        part = part_of_tensor(param.detach())
        recorder.add(f"{name} after", part)
    record.values = recorder.values()


def _describe_meshes(model: nn.Module, batch: DeviceMesh | None) -> list[str]:
    """Return the meshes of styles, parameters and the batch, as ['data=2', 'tp=2']."""
    meshes = set[DeviceMesh]()
    for module in model.modules():
        lowered = lowered_of(module)
        if lowered is not None:
            meshes.add(lowered.mesh)
    for param in model.parameters():
        if isinstance(param, DTensor):
            meshes.add(param.device_mesh)
    if batch is not None:
        meshes.add(batch)
    return sorted(_describe_mesh(mesh) for mesh in meshes)


def _describe_mesh(mesh: DeviceMesh) -> str:
    axes = zip(mesh.axis_names, mesh.shape, strict=True)
    return ",".join(f"{name}={size}" for name, size in axes)


def _is_sharded(model: nn.Module) -> bool:
    """Tell whether a style or a DTensor parameter is anywhere in the model."""
    has_styles = any(lowered_of(module) is not None for module in model.modules())
    return has_styles or any(isinstance(param, DTensor) for param in model.parameters())


class _Recorded(NamedTuple):
    """A value that was recorded on this rank, before it is added up over ranks.

    Attributes:
        part: this rank's part of the value.
        by_rank: as in `Value`.
        sums: the fingerprint of the part, as `GlobalPart.sums` returns it.
    """

    part: GlobalPart
    by_rank: bool
    sums: tuple[Tensor, Tensor]


# The fingerprint of a global value: a list of the 64 sums, the sum of squares and the number of
# broken elements; and the digest.
_Totals = tuple[Sequence[float], int]


class _Recorder(TorchDispatchMode):
    """An observer that records the results of operators, by dispatch, and of modules, by hooks."""

    def __init__(self, model: nn.Module, batch: DeviceMesh | None, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._model = model
        self._batch = batch
        self._ranks = ranks
        self._is_sharded = _is_sharded(model)
        # Paths of the modules whose forward runs, outermost first.
        self._path: list[str] = []
        # Operators that run while this is set belong to the recorder itself.
        self._is_recording = False
        self._times: Counter[str] = Counter()
        self._seen: dict[str, _Recorded] = {}

    def hooks(self) -> Iterator[Any]:
        """Register two hooks on every module, which track the path and record the output."""
        for name, module in self._model.named_modules():
            path = name or "model"
            yield module.register_forward_pre_hook(partial(self._enter, path))
            yield module.register_forward_hook(partial(self._leave, path))

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self._path.append(path)

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        self._path.pop()
        if not isinstance(output, Tensor):
            return
        name = f"output of {path}"
        self._add_output(name, module, output)
        if output.requires_grad and self._batch is None:
            hook = partial(self._add_output, f"gradient at {name}", module, grad=True)
            output.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no types here

    def _add_output(
        self, name: str, module: nn.Module, value: Tensor, *, grad: bool = False
    ) -> None:
        """Record a module's output, or the gradient at it, if its layout is known."""
        lowered = lowered_of(module)
        if lowered is not None and not _declares_outputs(lowered):
            lowered = None
        has_layout = lowered is not None or isinstance(value, DTensor)
        self._is_recording = True
        try:
            if value.ndim and has_layout:
                part = part_of_output(value.detach(), lowered, self._batch, grad=grad)
                self.add(name, part)
            elif isinstance(value, DTensor) or not self._is_sharded:
                self.add(name, part_of_tensor(value.detach()))
        finally:
            self._is_recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record its results."""
        result = func(*args, **(kwargs or {}))
        is_skipped = func.overloadpacket.__name__.startswith(_SKIPPED)
        if self._is_recording or func.namespace != "aten" or is_skipped:
            return result
        name = f"{func} in {self._current_part()}"
        outputs = result if isinstance(result, tuple | list) else (result,)
        for output in outputs:
            if not isinstance(output, Tensor) or output.device.type == "meta":
                continue
            # If the batch is sharded over data axes, it is unknown whether they shard this DTensor.
            is_global_dtensor = isinstance(output, DTensor) and self._batch is None
            by_rank = self._is_sharded and not is_global_dtensor
            self.add(name, part_of_tensor(output.detach()), by_rank=by_rank)
        return result

    def _current_part(self) -> str:
        """Return the module whose forward runs, or else the part of the program."""
        if self._path:
            return self._path[-1]
        return "backward" if backward_number() >= 0 else "the program"

    def add(self, name: str, part: GlobalPart, *, by_rank: bool = False) -> None:
        """Record the sums of a value."""
        # Values by rank have another salt on each rank, so that differences of elements with the
        # same index on two ranks do not cancel in the sum over ranks.
        salt = dist.get_rank() if by_rank and self._ranks > 1 else 0
        self._times[name] += 1
        times = self._times[name]
        numbered = name if times == 1 else f"{name} #{times}"
        with torch.no_grad():
            self._seen[numbered] = _Recorded(part, by_rank, part.sums(salt))

    def values(self) -> list[Value]:
        """Add up the values over ranks; all ranks call it."""
        totals = self._totals_by_rank() if self._ranks > 1 else {}
        others = [name for name in self._seen if name not in totals]
        totals |= self._totals_over_meshes(others)
        values = list[Value]()
        for name, (part, by_rank, _) in self._seen.items():
            (*sums, squares, broken), digest = totals[name]
            dtype = str(part.local.dtype).removeprefix("torch.")
            value = Value(
                name,
                shape=part.sizes,
                dtype=dtype,
                by_rank=by_rank,
                sums=sums,
                norm=squares**0.5,
                broken=int(broken),
                digest=digest,
            )
            values.append(value)
        return values

    def _totals_over_meshes(self, names: Sequence[str]) -> dict[str, _Totals]:
        """Add up values that all ranks recorded.

        Values with the same meshes are added together, by two collectives per mesh.
        """
        names_by_meshes: dict[tuple[DeviceMesh, ...], list[str]] = {}
        for name in names:
            meshes = self._seen[name].part.meshes
            names_by_meshes.setdefault(meshes, []).append(name)
        totals = dict[str, _Totals]()
        for meshes, group in names_by_meshes.items():
            sums_of_values = []
            digests_of_values = []
            for name in group:
                sums_of_value, digest = self._seen[name].sums
                sums_of_values.append(sums_of_value)
                digests_of_values.append(digest)
            # The stacks have the shapes (values, 66) and (values,).
            sums = torch.stack(sums_of_values)
            digests = torch.stack(digests_of_values)
            for mesh in meshes:
                everyone = (mesh, mesh.axis_names)
                sums = all_reduce(sums, everyone)
                digests = all_reduce(digests, everyone)
            totals_of_values = zip(sums.tolist(), digests.tolist(), strict=True)
            totals |= zip(group, totals_of_values, strict=True)
        return totals

    def _totals_by_rank(self) -> dict[str, _Totals]:
        """Add up the values by rank, which may exist on some ranks only.

        The digests of the ranks are hashed in the order of the ranks, not added.
        """
        local = dict[str, _Totals]()
        for name, (_, by_rank, (sums, digest)) in self._seen.items():
            if by_rank:
                local[name] = sums.tolist(), int(digest)
        tables = agree(lambda: local)
        totals = dict[str, _Totals]()
        for name in local:
            rows = [table[name] for table in tables if name in table]
            sums_of_ranks = [sums for sums, _ in rows]
            digests = tuple([digest for _, digest in rows])
            sums_of_all = [sum(column) for column in zip(*sums_of_ranks, strict=True)]
            totals[name] = (sums_of_all, hash(digests))
        return totals


def _declares_outputs(lowered: Lowered) -> bool:
    """Tell whether a style of the user says how the module's outputs are sharded."""
    is_of_user = lowered.sharding.origin is not StyleOrigin.ARITHMETIC
    return is_of_user and bool(lowered.sharding.outputs)


# --- comparison -----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """The result of `compare_runs`.

    Attributes:
        differing: names of the values that differ, in the order of the first run. With each name
            comes the norm of the difference, relative to the norm of the value; it is infinite if
            the shapes or the numbers of broken elements differ.
        before: name of the last value that agrees before the first one that differs; '' if there is
            none.
        compared: the number of values that both runs have.
        alone: the number of values that only one run has.
    """

    differing: list[tuple[str, float]]
    before: str
    compared: int
    alone: int

    @property
    def first(self) -> str:
        """The name of the first value that differs; '' if none does."""
        return self.differing[0][0] if self.differing else ""

    def __str__(self) -> str:
        """Return a report of a few lines: the first ten values that differ."""
        counted = f"{self.compared} values compared, {self.alone} values in one run only"
        if not self.differing:
            return f"all values agree: {counted}"
        count = len(self.differing)
        lines = [f"{count} values differ: {counted}"]
        lines.append(f"the last value that agrees before them: {self.before or 'none'}")
        lines += [f"  {name}: by {difference:.1e}" for name, difference in self.differing[:10]]
        if count > 10:
            lines.append("  ...")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the values that differ as a table for notebooks."""
        if not self.differing:
            return html_text(str(self))
        counted = f"{self.compared} values compared, {self.alone} in one run only"
        rows = [(name, f"{difference:.1e}") for name, difference in self.differing[:_MOST_ROWS]]
        left_out = len(self.differing) - len(rows)
        if left_out:
            rows.append((f"and {left_out} more", ""))
        caption = f"{counted}\nthe last value that agrees: {self.before or 'none'}"
        return html_table(rows, header=("value that differs", "by"), caption=caption)


@check_types(one=RunRecord, other=RunRecord, tolerance=(int, float, type(None)))
def compare_runs(one: RunRecord, other: RunRecord, tolerance: float | None = None) -> Comparison:
    """Find the first value that differs between two runs.

    The runs may have different programs, numbers of ranks and shardings. Values are matched by
    name. A name that only one run has is counted, but not compared: for instance, a module with a
    style runs other operators than the plain module. Results of operators on plain tensors are
    compared only if both runs have the same number of ranks and the same meshes, or if neither
    model is sharded.

    Args:
        one: the record of the first run, from `record_run` or `RunRecord.load`.
        other: the record of the other run.
        tolerance: the allowed difference relative to the norm of the value; by default the square
            root of the precision of the coarser dtype. With 0, all bits must be equal.

    Returns:
        The values that differ, and the last one that agrees before them.

    Raises:
        StyleError: if the runs have no value in common, or the tolerance is negative.

    Example:
        >>> from shoal_same_bits import record_run
        >>> model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        >>> with record_run(model) as one:
        ...     y = model(x)
        >>> with torch.no_grad():
        ...     model.bias[2] += 0.1
        >>> with record_run(model) as other:
        ...     y = model(x)
        >>> compare_runs(one, other).first
        'bias before'
    """
    if tolerance is not None and not tolerance >= 0:
        raise StyleError(f"compare_runs: tolerance must be at least 0, got {tolerance}")
    others = {value.name: value for value in other.values}
    same_ranks = one.ranks == other.ranks and one.meshes == other.meshes
    differing = list[tuple[str, float]]()
    before = ""
    compared = 0
    for value in one.values:
        match = others.get(value.name)
        if match is None or match.by_rank != value.by_rank:
            continue
        if value.by_rank and not same_ranks:
            continue
        compared += 1
        difference = _relative_difference(value, match)
        allowed = tolerance
        if allowed is None:
            allowed = _default_tolerance(value, match)
        same_bits = value.digest == match.digest and not difference
        is_within = allowed > 0 and difference <= allowed
        if not same_bits and not is_within:
            differing.append((value.name, difference))
        elif not differing:
            before = value.name
    if not compared:
        raise StyleError(
            "compare_runs: the runs do not have values in common; record the same model, with "
            "the same names"
        )
    count = len(one.values) + len(other.values)
    return Comparison(differing, before, compared, alone=count - 2 * compared)


def _relative_difference(one: Value, other: Value) -> float:
    """Estimate the norm of the difference, relative to the larger of the two norms."""
    if one.shape != other.shape or one.broken != other.broken:
        return float("inf")
    norm = max(one.norm, other.norm)
    if not norm:
        return 0.0
    pairs = zip(one.sums, other.sums, strict=True)
    squares = sum([(sum_of_one - sum_of_other) ** 2 for sum_of_one, sum_of_other in pairs])
    return float(squares**0.5 / norm)


def _default_tolerance(one: Value, other: Value) -> float:
    """Return the square root of the precision of the coarser dtype; 0 for integers."""
    tolerances = [0.0]
    for value in (one, other):
        dtype: torch.dtype = getattr(torch, value.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            tolerances.append(torch.finfo(dtype).eps ** 0.5)
    return max(tolerances)
