"""Fingerprints of a run, step by step, that do not depend on the number of ranks, and where those of two runs differ.

A fingerprint is the sum over elements of a hash of global index and bits, modulo 2 ** 64. Every rank adds up its own
shard, and one all-reduce of integers the ranks; nothing is gathered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.errors import StyleError
from shoal_mesh import DeviceMesh, all_reduce
from shoal_tp_styles import Lowered
from shoal_tp_styles.internal import COMPLETION, lowered_of

from ..runs.global_parts import GlobalPart, part_of_output, part_of_tensor
from .block_sums import entered

_Meshes = tuple[DeviceMesh, ...]
"""Over whose ranks parts of a fingerprint are added."""


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
        self._seen: dict[str, tuple[Tensor, _Meshes]] = {}
        if _writes():
            self.path.write_text("")
        for name, module in model.named_modules():
            lowered = lowered_of(module)
            if lowered is not None and lowered.sharding.style != COMPLETION and lowered.sharding.outputs:
                module.register_forward_hook(self._hook(name or "model", lowered))

    def _hook(self, name: str, lowered: Lowered) -> Any:
        def record(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim:
                part = part_of_output(output.detach(), lowered, self.batch)
                self._record(f"output of {name} ({type(module).__name__})", part)

        return record

    def _record(self, name: str, part: GlobalPart) -> None:
        call = sum(seen == name or seen.startswith(f"{name} #") for seen in self._seen) + 1
        self._seen[name if call == 1 else f"{name} #{call}"] = part.digest(), part.meshes

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
        sums = dict(self._summed())
        line = {name: f"{sums[name] % (1 << 64):016x}" for name in self._seen}
        self._seen.clear()
        if _writes():
            with self.path.open("a") as file:
                file.write(json.dumps({"step": step, "fingerprints": line}) + "\n")

    def _summed(self) -> Iterator[tuple[str, int]]:
        """The sums over ranks, one collective for all that have the same."""
        for meshes in dict.fromkeys(meshes for _, meshes in self._seen.values()):
            names = [name for name, (_, others) in self._seen.items() if others == meshes]
            total = torch.stack([self._seen[name][0] for name in names])
            for mesh in meshes:
                total = all_reduce(total, (mesh, mesh.axis_names))
            yield from zip(names, total.tolist(), strict=True)


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
