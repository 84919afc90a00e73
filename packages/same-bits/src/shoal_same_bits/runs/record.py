"""record_run: a small number of sums for every value of a run, which do not depend on how it is sharded; compare_runs.

The sums of a difference are the difference of the sums, and their norm is about that of the
difference.
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
from shoal_dtensor.internal import TorchDispatchMode, backward_number, check_device_mesh, takes
from shoal_mesh import DeviceMesh, all_reduce
from shoal_mesh.internal import agree
from shoal_tp_styles.internal import COMPLETION, lowered_of

from .fingerprints import GlobalPart, part_of_output, part_of_tensor

# values that mean nothing, or are those of before
_SKIPPED = ("empty", "new_empty", "detach", "alias", "lift_fresh")


class Value(NamedTuple):
    """One value of a run."""

    # `output of up`, `aten.mm.default in up`, `gradient of up.weight`, ...; the n-th of a name has
    # #n
    name: str
    # of the global tensor; of a rank's own where `by_rank`
    shape: tuple[int, ...]
    dtype: str
    # what the ranks computed on plain tensors: compared between runs on the same meshes only
    by_rank: bool
    sums: list[float]  # 64, see fingerprints.py
    norm: float  # of all elements
    # how many elements are infinite or no number
    broken: int
    # of global index and bits; equal where all bits are
    digest: int


@dataclass(slots=True)
class RunRecord:
    """What `record_run` has recorded, in order; complete when the block has ended.

    Attributes:
        ranks: how many there were.
        values: of the run.
        meshes: those of the model and the batch, as text.
    """

    ranks: int = 1
    values: list[Value] = field(default_factory=list)
    meshes: list[str] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, for `load` or `python -m shoal_same_bits compare`."""
        lines = [
            {"ranks": self.ranks, "meshes": self.meshes},
            *(value._asdict() for value in self.values),
        ]
        Path(path).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> RunRecord:
        """What was written to a file.

        Raises:
            StyleError: it is no such file.
        """
        try:
            first, *lines = map(json.loads, Path(path).read_text().splitlines())
            values = [Value(**{**line, "shape": tuple(line["shape"])}) for line in lines]
            return cls(first["ranks"], values, first.get("meshes", []))
        except (ValueError, TypeError, KeyError) as error:
            raise StyleError(f"{path} was not written by RunRecord.save: {error!r}") from error


@takes(model=nn.Module)
@contextmanager
def record_run(model: nn.Module, batch: DeviceMesh | None = None) -> Iterator[RunRecord]:
    """Record the values of a step inside the block; entered and left by all ranks.

    Recorded are the parameters, then as they come: what operators return, on DTensors as global
    values, and what modules return, of those with a style as global values; at the end the
    gradients and parameters. It takes much longer than the step.

    Args:
        model: the module, sharded or not.
        batch: the data axes, over which dim 0 of activations is sharded; None if it is not.
            Gradients of activations are recorded only without.

    Example:
        >>> model, x = nn.Linear(4, 4), torch.ones(2, 4)
        >>> with record_run(model) as run:
        ...     model(x).sum().backward()
        >>> [value.name for value in run.values if "aten" not in value.name][2:4]
        ['output of model', 'gradient at output of model']
    """
    if batch is not None:
        check_device_mesh("record_run", batch)
    record = RunRecord(
        dist.get_world_size() if dist.is_initialized() else 1, meshes=_meshes(model, batch)
    )
    recorder = _Recorder(model, batch, record.ranks)
    for name, param in model.named_parameters():
        recorder.add(f"{name} before", part_of_tensor(param.detach()))
    with ExitStack() as hooks, recorder:
        for hook in recorder.hooks():
            hooks.callback(hook.remove)
        yield record
    for name, param in model.named_parameters():
        if param.grad is not None:
            recorder.add(f"gradient of {name}", part_of_tensor(param.grad))
    for name, param in model.named_parameters():
        recorder.add(f"{name} after", part_of_tensor(param.detach()))
    record.values = recorder.values()


def _meshes(model: nn.Module, batch: DeviceMesh | None) -> list[str]:
    """Axes and sizes of the meshes of styles, parameters and the batch, as ['data=2', 'tensor=2']."""
    styles = (lowered_of(module) for module in model.modules())
    parameters = (param.device_mesh for param in model.parameters() if isinstance(param, DTensor))
    found = {
        *(lowered.mesh for lowered in styles if lowered is not None),
        *parameters,
        *([batch] if batch else []),
    }
    return sorted(
        ",".join(f"{n}={k}" for n, k in zip(mesh.axis_names, mesh.shape, strict=True))
        for mesh in found
    )


class _Recorder(TorchDispatchMode):
    """Hears of operators and modules."""

    def __init__(self, model: nn.Module, batch: DeviceMesh | None, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._model = model
        self._batch = batch
        self._ranks = ranks
        self._is_sharded = any(
            lowered_of(module) is not None
            or any(isinstance(p, DTensor) for p in module.parameters(recurse=False))
            for module in model.modules()
        )
        self._path: list[str] = []
        # whether operators are those of this class
        self._is_recording = False
        self._times: Counter[str] = Counter()
        self._seen: dict[str, tuple[GlobalPart, bool, tuple[Tensor, Tensor]]] = {}

    def hooks(self) -> Iterator[Any]:
        """Around every module: where operators are, and what it returns."""
        for name, module in self._model.named_modules():
            path = name or "model"
            yield module.register_forward_pre_hook(lambda _, __, path=path: self._path.append(path))
            yield module.register_forward_hook(
                lambda module, _, output, path=path: self._after(path, module, output)
            )

    def _after(self, path: str, module: nn.Module, output: Any) -> None:
        self._path.pop()
        name = f"output of {path}"
        if isinstance(output, Tensor):
            self._add_of(name, module, output)
        if isinstance(output, Tensor) and output.requires_grad and self._batch is None:
            hook = partial(self._add_of, f"gradient at {name}", module, grad=True)
            output.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no types here

    def _add_of(self, name: str, module: nn.Module, value: Tensor, *, grad: bool = False) -> None:
        """Keep a module's output, or the gradient at it, if its layout is known."""
        self._is_recording, lowered = True, lowered_of(module)
        if lowered is not None and (
            lowered.sharding.style == COMPLETION or not lowered.sharding.outputs
        ):
            # nothing says how its outputs are sharded
            lowered = None
        try:
            if value.ndim and (lowered is not None or isinstance(value, DTensor)):
                self.add(name, part_of_output(value.detach(), lowered, self._batch, grad=grad))
            elif isinstance(value, DTensor) or not self._is_sharded:
                self.add(name, part_of_tensor(value.detach()))
        finally:
            self._is_recording = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record what it returns."""
        result = func(*args, **(kwargs or {}))
        if self._is_recording:
            return result
        if func.namespace == "aten" and not func._overloadpacket.__name__.startswith(_SKIPPED):
            for output in result if isinstance(result, tuple | list) else (result,):
                if isinstance(output, Tensor) and output.device.type != "meta":
                    # Whether the data axes shard what is a DTensor on other axes alone, nothing
                    # says here.
                    is_global = (
                        isinstance(output, DTensor) and self._batch is None
                    ) or not self._is_sharded
                    where = (
                        self._path[-1]
                        if self._path
                        else "backward"
                        if backward_number() >= 0
                        else "the program"
                    )
                    self.add(
                        f"{func} in {where}", part_of_tensor(output.detach()), by_rank=not is_global
                    )
        return result

    def add(self, name: str, part: GlobalPart, *, by_rank: bool = False) -> None:
        """Keep the sums of a value."""
        salt = dist.get_rank() if by_rank and self._ranks > 1 else 0
        self._times[name] += 1
        numbered = name if self._times[name] == 1 else f"{name} #{self._times[name]}"
        with torch.no_grad():
            self._seen[numbered] = part, by_rank, part.sums(salt)

    def values(self) -> list[Value]:
        """The values, added up over ranks."""
        total = self._of_ranks() if self._ranks > 1 else {}
        values = list[Value]()
        over = {name: part.meshes for name, (part, *_) in self._seen.items() if name not in total}
        for meshes in dict.fromkeys(over.values()):  # one collective for each of the meshes
            names = [name for name, others in over.items() if others == meshes]
            columns = [
                torch.stack(each)
                for each in zip(*(self._seen[name][2] for name in names), strict=True)
            ]
            for mesh in meshes:
                columns = [all_reduce(column, (mesh, mesh.axis_names)) for column in columns]
            total |= zip(
                names, zip(*(column.tolist() for column in columns), strict=True), strict=True
            )
        for name, (part, by_rank, _) in self._seen.items():
            (*columns, squares, broken), digest = total[name]
            dtype = str(part.local.dtype).removeprefix("torch.")
            values.append(
                Value(
                    name,
                    part.sizes,
                    dtype,
                    by_rank,
                    sums=columns,
                    norm=squares**0.5,
                    broken=int(broken),
                    digest=digest,
                )
            )
        return values

    def _of_ranks(self) -> dict[str, Sequence[Any]]:
        """The sums of what ranks computed on plain tensors; an operator may run on some ranks only."""
        by_rank = {name: sums for name, (_, by_rank, sums) in self._seen.items() if by_rank}
        own = {name: (floats.tolist(), int(digest)) for name, (floats, digest) in by_rank.items()}
        every = agree(lambda: own)
        total = dict[str, Sequence[Any]]()
        for name in own:
            floats, digests = zip(*(rows[name] for rows in every if name in rows), strict=True)
            total[name] = [sum(column) for column in zip(*floats, strict=True)], hash(digests)
        return total


# --- comparison -----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """What `compare_runs` has found.

    Attributes:
        differing: the values that differ, in the order of the first run, each with how much: the
            norm of the difference relative to that of the value, infinite where shapes differ or
            one has elements that are broken.
        before: the last value before the first of them that both runs have and that agrees; '' if
            there is none.
        compared: how many values both runs have.
        alone: how many values only one run has.
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
        """Lines to read."""
        counted = f"{self.compared} values compared, {self.alone} in one run only"
        if not self.differing:
            return f"no value differs: {counted}"
        lines = [f"{len(self.differing)} values differ: {counted}"]
        lines.append(f"the last value that agrees: {self.before or 'none'}")
        lines += [f"  {name}: by {difference:.1e}" for name, difference in self.differing[:10]]
        return "\n".join([*lines, "  ..."] if len(self.differing) > 10 else lines)


@takes(one=RunRecord, other=RunRecord, tolerance=(int, float, type(None)))
def compare_runs(one: RunRecord, other: RunRecord, tolerance: float | None = None) -> Comparison:
    """Where two runs differ first: of two programs, on as many ranks or others, or sharded and on a single device.

    Values are found by their names. A name that only one run has is counted, not compared: a module
    with a style runs other operators than the plain one. What ranks computed on plain tensors is
    compared between runs on as many ranks and the same meshes.

    Args:
        one, other: from `record_run`, or `RunRecord.load`.
        tolerance: how much values may differ, relative to their norms; by default the square root
            of the precision of the coarser dtype. 0 asks for equal bits.

    Raises:
        StyleError: the runs have no value in common, or the tolerance is negative.

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
        raise StyleError(f"a tolerance is at least 0, got {tolerance}")
    others = {value.name: value for value in other.values}
    same_ranks = (one.ranks, one.meshes) == (other.ranks, other.meshes)
    differing = list[tuple[str, float]]()
    before = ""
    compared = 0
    for value in one.values:
        match = others.get(value.name)
        if match is None or match.by_rank != value.by_rank or (value.by_rank and not same_ranks):
            continue
        compared += 1
        difference = _difference(value, match)
        allowed = _allowed(value, match) if tolerance is None else tolerance
        if (value.digest != match.digest or difference) and not 0 < allowed >= difference:
            differing.append((value.name, difference))
        elif not differing:
            before = value.name
    if not compared:
        raise StyleError(
            "the runs have no value in common: record the same model, by the same names"
        )
    return Comparison(
        differing, before, compared, len(one.values) + len(other.values) - 2 * compared
    )


def _difference(one: Value, other: Value) -> float:
    """The norm of the difference relative to the larger norm, about."""
    if one.shape != other.shape or one.broken != other.broken:
        return float("inf")
    norm = max(one.norm, other.norm)
    squares = sum((a - b) ** 2 for a, b in zip(one.sums, other.sums, strict=True))
    return float(squares**0.5 / norm) if norm else 0.0


def _allowed(one: Value, other: Value) -> float:
    """The square root of the precision of the coarser dtype; that of whole numbers is 0."""
    dtypes = [getattr(torch, value.dtype) for value in (one, other)]
    return max(
        torch.finfo(d).eps ** 0.5 if d.is_floating_point or d.is_complex else 0.0 for d in dtypes
    )
