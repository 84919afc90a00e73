"""Which part of a global tensor a rank has, and fingerprints of a run, step by step, made of the digests of parts.

A fingerprint is the sum over elements of a hash of global index and bits, modulo 2 ** 64, so it does not depend on the
number of ranks. Every rank adds up its own shard, and one all-reduce of integers the ranks; nothing is gathered.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Replicate, Shard
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import local_shard
from shoal_mesh import Comm, DeviceMesh, all_reduce
from shoal_tp_styles import Lowered
from shoal_tp_styles.internal import COMPLETION, lowered_of

from ..invariant.block_sums import entered

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # of splitmix64, as signed numbers
_OFFSET = 0x9E3779B97F4A7C15 - (1 << 64)


@dataclass(frozen=True, slots=True, eq=False)
class GlobalPart:
    """What one rank adds to something that is summed over the elements of a global tensor."""

    local: Tensor  # this rank's values
    indices: tuple[Tensor, ...]  # for each dim the global indices of the local ones
    sizes: tuple[int, ...]  # of the global tensor
    counted: bool  # False if another rank counts the same values
    meshes: tuple[DeviceMesh, ...]  # over whose ranks parts are added, one after the other

    def hashes(self) -> Tensor:
        """A number for each element, of its global index; as many as there are bits of the value."""
        place = torch.zeros((1,) * self.local.ndim, dtype=torch.int64, device=self.local.device)
        for dim, (index, size) in enumerate(zip(self.indices, self.sizes, strict=True)):
            place = place * size + index.view(-1, *(1,) * (self.local.ndim - dim - 1))  # (1, 2) of (4, 6): 6 + 2 = 8
        if self.local.is_complex():
            place = torch.stack([2 * place, 2 * place + 1], -1)  # element 8: 16 real, 17 imaginary
        return _mixed(place + _OFFSET)

    def digest(self) -> Tensor:
        """The sum of the hashes of elements: of global index and bits."""
        local = torch.view_as_real(self.local.resolve_conj()) if self.local.is_complex() else self.local
        bits = local.contiguous().view(_BITS[local.element_size()]).long()
        return _mixed(bits + self.hashes()).sum() * self.counted


def part_of_tensor(tensor: Tensor) -> GlobalPart:
    """This rank's part of a DTensor, or a tensor that every rank has; what is partial is reduced."""
    if not isinstance(tensor, DTensor):
        ranges = tuple(torch.arange(n, device=tensor.device) for n in tensor.shape)
        return GlobalPart(tensor, ranges, tuple(tensor.shape), True, ())
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        placements = [Replicate() if isinstance(p, Partial) else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=placements)
    spec, local = tensor.spec, local_shard(tensor)
    at = spec.coordinate
    if at is None or any(i and p.is_replicate() for i, p in zip(at, spec.placements, strict=True)):
        none = tuple(torch.arange(0) for _ in spec.shape)
        return GlobalPart(local.new_empty([0] * len(spec.shape)), none, tuple(spec.shape), False, (spec.mesh,))
    indices = tuple(torch.tensor(s.indices(at), dtype=torch.int64, device=local.device) for s in spec.dim_shardings)
    return GlobalPart(local, indices, tuple(spec.shape), True, (spec.mesh,))


def part_of_output(
    output: Tensor, lowered: Lowered | None, batch: DeviceMesh | None, *, grad: bool = False
) -> GlobalPart:
    """This rank's part of what a module returns, or of the gradient there: a DTensor, or the shard that a style says.

    The data axes `batch`, if there are any, shard dim 0 too, where the mesh of the tensor does not have them.
    """
    if not isinstance(output, DTensor):
        assert lowered is not None, "only styles say what a plain tensor is a shard of"
        layout = lowered.port_out.desired
        if isinstance(layout, Shard):
            dim = layout.dim % output.ndim
            sizes = layout.sizes or lowered.output_sizes(0, output.shape[dim])
            layout = Shard(dim, sizes=None if sizes is None else tuple(sizes))
        elif grad:
            layout = Replicate()
        output = DTensor.from_local(output, lowered.mesh, [layout], run_check=False)
    part = part_of_tensor(output)
    if batch is None or {*_comm(batch).ranks} <= {*_comm(output.device_mesh).ranks}:
        return part
    rows, *others = part.indices
    rows = rows + _comm(batch).rank * part.sizes[0]  # rows 0 to 2 of 3 on data rank 2: 6, 7, 8
    sizes = (part.sizes[0] * batch.size(), *part.sizes[1:])
    return replace(part, indices=(rows, *others), sizes=sizes, meshes=(*part.meshes, batch))


def _comm(mesh: DeviceMesh) -> Comm:
    return mesh.comm(tuple(range(mesh.ndim)))


def _mixed(number: Tensor) -> Tensor:
    """The finalizer of splitmix64, element by element."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        number = (number ^ (number >> shift & (1 << 64 - shift) - 1)) * factor
    return number ^ (number >> 31 & (1 << 33) - 1)


def styled(module: nn.Module) -> Lowered | None:
    """The lowering of a module whose style says how its outputs are sharded, None of another module."""
    lowered = lowered_of(module)
    is_styled = lowered is not None and lowered.sharding.style != COMPLETION and lowered.sharding.outputs
    return lowered if is_styled else None


def numbered(name: str, times: Counter[str]) -> str:
    """The name, with #n where it comes for the n-th time."""
    times[name] += 1
    return name if times[name] == 1 else f"{name} #{times[name]}"


def totals(terms: Mapping[str, tuple[tuple[DeviceMesh, ...], Sequence[Tensor]]]) -> dict[str, Sequence[Any]]:
    """Each name's tensors, added over the ranks of its meshes, as numbers; one collective for each of the meshes."""
    sums: dict[str, Sequence[Any]] = {}
    for meshes in dict.fromkeys(meshes for meshes, _ in terms.values()):
        names = [name for name, (others, _) in terms.items() if others == meshes]
        columns = [torch.stack(tensors) for tensors in zip(*(terms[name][1] for name in names), strict=True)]
        for mesh in meshes:
            columns = [all_reduce(column, (mesh, mesh.axis_names)) for column in columns]
        sums |= zip(names, zip(*(column.tolist() for column in columns), strict=True), strict=True)
    return sums


class StepFingerprints:
    """Writes a line for every step into a file, which `python -m shoal_same_bits compare A B` reads.

    Outputs of modules with styles are recorded as they are computed, gradients and parameters when `write` is called:
    after the optimizer's step and before gradients are dropped. Rank 0 writes; all ranks call it.

    Args:
        path: of the file, which is replaced.
        model: made parallel inside `invariant_arithmetic`.
        batch: the data axes, over which dim 0 of activations is sharded; None if it is not.

    Raises:
        StyleError: outside `invariant_arithmetic`, where shards need not be equal.

    Example:
        >>> from tempfile import mkdtemp
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_same_bits import invariant_arithmetic
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic():
        ...     model = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (1,)), "colwise")
        ...     path = Path(mkdtemp()) / "run.jsonl"
        ...     seen = StepFingerprints(path, model)
        ...     model(torch.ones(2, 8)).sum().backward()
        ...     seen.write(0)
        ...     [*json.loads(path.read_text())["fingerprints"]]
        ['output of model (Linear)', 'gradient of bias', 'gradient of weight', 'weight', 'bias']
    """

    def __init__(self, path: str | Path, model: nn.Module, batch: DeviceMesh | None = None) -> None:
        entered()
        self.path: Path = Path(path)
        self.model = model
        self.batch = batch
        self._seen: dict[str, tuple[tuple[DeviceMesh, ...], tuple[Tensor]]] = {}
        self._times: Counter[str] = Counter()
        if _writes():
            self.path.write_text("")
        for name, module in model.named_modules():
            lowered = styled(module)
            if lowered is not None:
                module.register_forward_hook(partial(self._record_output, name or "model", lowered))

    def _record_output(self, name: str, lowered: Lowered, module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim:
            part = part_of_output(output.detach(), lowered, self.batch)
            self._record(f"output of {name} ({type(module).__name__})", part)

    def _record(self, name: str, part: GlobalPart) -> None:
        self._seen[numbered(name, self._times)] = part.meshes, (part.digest(),)

    @torch.no_grad()
    def write(self, step: int, **values: Tensor) -> None:
        """Write the line of a step.

        Args:
            step: its number.
            values: what else is recorded, equal on all ranks or a DTensor: the loss, say.
        """
        for name, value in values.items():
            self._record(f"value of {name}", part_of_tensor(value.detach()))
        named = [*self.model.named_parameters()]
        for name, param in reversed(named):  # as backward comes to them
            if param.grad is not None:
                self._record(f"gradient of {name}", part_of_tensor(param.grad))
        for name, param in named:
            self._record(name, part_of_tensor(param.detach()))
        sums = totals(self._seen)
        line = {name: f"{sums[name][0] % (1 << 64):016x}" for name in self._seen}  # -1: ffffffffffffffff
        self._seen.clear()
        self._times.clear()
        if _writes():
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "fingerprints": line}) + "\n")


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def first_difference(one: str | Path, other: str | Path) -> str:
    """Where two files of `StepFingerprints` differ first: the step, and in it the module, gradient and parameter.

    Names that only one run has, as of modules that have a style in one plan only, are not compared.

    Returns:
        Lines to read; empty if nothing differs.

    Raises:
        StyleError: if the files have no step in common.

    Example:
        >>> from tempfile import mkdtemp
        >>> runs = [Path(mkdtemp()) / name for name in "ab"]
        >>> for run, digest in zip(runs, ["00", "01"]):
        ...     size = run.write_text(json.dumps({"step": 4, "fingerprints": {"weight": digest}}))
        >>> print(first_difference(*runs))
        step 4: 1 of 1 fingerprints differ
          parameter: weight
    """
    before, after = _lines(one), _lines(other)
    steps = [step for step in before if step in after]
    if not steps:
        raise StyleError(f"{one} and {other} have no step in common: {[*before][:3]} and {[*after][:3]}, ...")
    for step in steps:
        shared = [name for name in before[step] if name in after[step]]
        differ = [name for name in shared if before[step][name] != after[step][name]]
        if differ:
            first = {_kind(name): name for name in reversed(differ)}
            rows = (f"  {kind}: {first[kind].removeprefix(f'{kind} of ')}" for kind in _KINDS if kind in first)
            return "\n".join([f"step {step}: {len(differ)} of {len(shared)} fingerprints differ", *rows])
    return ""


_KINDS = ("output", "value", "gradient", "parameter")


def _kind(name: str) -> str:
    return next((kind for kind in _KINDS if name.startswith(f"{kind} of ")), "parameter")


def _lines(path: str | Path) -> dict[int, dict[str, str]]:
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {line["step"]: line["fingerprints"] for line in lines}
