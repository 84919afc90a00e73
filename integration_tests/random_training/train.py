"""Training a program: on one device, and on a mesh by the same lines."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from integration_tests.random_training.compose import Program
from integration_tests.random_training.model import batch_of, model_of
from torch import Tensor, nn

from shoal_data_parallel import FSDPModule, MixedPrecisionPolicy, fully_shard, replicate
from shoal_dtensor import (
    DTensor,
    Replicate,
    Shard,
    ShoalTensorError,
    clip_grad_norm_,
    distribute_tensor,
    full_tensor,
    get_model_state_dict,
    implicit_replication,
    set_model_state_dict,
)
from shoal_dtensor.checkpoint import Checkpointer
from shoal_dtensor.errors import StyleError
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.errors import MeshError
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

TYPED = (ShoalTensorError, StyleError, MeshError)
STYLES = {
    "up": ColwiseParallel,
    "down": RowwiseParallel,
}


class Fault(Exception):
    """What a program raises in a backward."""


def verdict(program: Program) -> str:
    """One rank's part: "" if right.

    Else it is `refused: Type: ...`, `wrong: ...`, `error: ...`, or `void: ...`.
    """
    expected = Training(program, None)
    try:
        expected.run()
    except Exception as failed:
        return f"void: {type(failed).__name__}: {str(failed)[:200]}"
    got = Training(program, mesh_of(program))
    try:
        got.run()
        return difference(expected.seen, got.seen)
    except Exception as failed:
        return text_of(failed, got.stage)


def mesh_of(program: Program) -> DeviceMesh:
    """The mesh of a program, on all ranks."""
    names = ("replica", "data") if program.parallel == "hybrid" else ("data", "tensor")
    return init_device_mesh("cpu", program.mesh, mesh_dim_names=names)


def text_of(failed: Exception, stage: str) -> str:
    """An error as an outcome."""
    kind = "refused" if isinstance(failed, TYPED) else "error"
    return f"{kind}: {type(failed).__name__}: {stage}: {str(failed)[:600]}"


def difference(expected: Sequence[tuple[str, Any]], got: Sequence[tuple[str, Any]]) -> str:
    for (name, one), (other_name, other) in zip(expected, got, strict=True):
        if name != other_name or (one is None) is not (other is None):
            return f"wrong: {name}: {'no' if other is None else 'a'} value of {other_name}"
        if one is not None and not torch.allclose(one, other, rtol=1e-7, atol=1e-9):
            gap = (one - other).abs().max().item()
            return f"wrong: {name}: up to {gap:.3g} of {one.abs().max().item():.3g}"
    return ""


class Training:
    """One training.

    Attributes:
        seen: what is compared, in order.
        stage: what is being done, for messages.
    """

    def __init__(self, program: Program, mesh: DeviceMesh | None) -> None:
        self.program, self.mesh = program, mesh
        self.seen: list[tuple[str, Any]] = []
        self.stage = "build"
        self.model: Any = None

    @property
    def parts(self) -> int:
        """Into how many parts a batch is split."""
        rows, columns = self.program.mesh
        return rows * columns if self.program.parallel == "hybrid" else rows

    def run(self) -> None:
        """Build and train."""
        self.train(self.build(), 0, len(self.program.steps))

    def train(self, optimizer: Any, first: int, end: int) -> Any:
        """Train from a step up to another one.

        Args:
            optimizer: the optimizer of the model.
            first: the first step.
            end: the step after the last one.

        Returns:
            The optimizer afterwards.
        """
        kind: Any = type(optimizer)
        for step in range(first, end):
            if step == self.program.resume:
                optimizer = self._resume(step, optimizer)
            for event in self.program.events[step]:
                optimizer = self._before(event, optimizer, kind)
            self._step(step, optimizer)
        return optimizer

    def _step(self, step: int, optimizer: Any) -> None:
        """One step: backward passes of all microbatches, and the optimizer's step."""
        events, syncs = self.program.events[step], self.program.steps[step]
        first = sum(map(len, self.program.steps[:step]))
        for i, sync in enumerate(syncs):
            number = first + i
            self.stage = f"step {step}, microbatch {i}"
            if self.mesh is not None:
                self.model.set_requires_gradient_sync(sync)
            if "fault" in events and i == 0:
                self._fault(number)
            self.backward(number, events)
            if sync:
                grads = [(n, p.grad) for n, p in self.model.named_parameters()]
                self._see(f"step {step}.{i} grad", grads)
        self.stage = f"step {step}"
        if self.program.clip:
            clip: Callable[..., Any] = (
                clip_grad_norm_ if self.mesh is not None else nn.utils.clip_grad_norm_
            )
            norm = clip(self.model.parameters(), self.program.clip)
            self._see(f"step {step}", [("norm", norm)])
        optimizer.step()
        self._see(f"step {step}", list(self.model.named_parameters()))
        if "keep zeros" in events:
            self.model.zero_grad(set_to_none=False)
        else:
            self.model.zero_grad()

    def _see(self, where: str, values: Sequence[tuple[str, Any]]) -> None:
        for name, value in values:
            whole = full_tensor(value)
            self.seen.append((f"{where} {name}", None if whole is None else whole.detach().clone()))

    # --- a resume ---------------------------------------------------------------------------------

    def build(self) -> Any:
        """The model, wrapped; and its optimizer."""
        self.model = model_of(self.program)
        if self.mesh is not None:
            self._wrap(self.mesh)
        name, *flags = self.program.optimizer.split()
        kind: Any = getattr(torch.optim, name)
        return kind(self.model.parameters(), lr=0.05, **dict.fromkeys(flags, True))

    def save(self, folder: str, step: int, optimizer: Any) -> None:
        """Save all."""
        self.stage = "save"
        with Checkpointer(folder) as checkpoints:
            checkpoints.save(step, {"model": self.model, "optimizer": optimizer})

    def load(self, folder: str, trained: Sequence[bool]) -> Any:
        """Load all into a new model and a new optimizer.

        Args:
            folder: where they were saved.
            trained: which parameters are trained, in their order.

        Returns:
            The optimizer.
        """
        self.stage = "load"
        optimizer = self.build()
        for param, is_trained in zip(self.model.parameters(), trained, strict=True):
            param.requires_grad_(is_trained)
        with Checkpointer(folder) as checkpoints:
            checkpoints.load({"model": self.model, "optimizer": optimizer})
        return optimizer

    def _resume(self, step: int, optimizer: Any) -> Any:
        """Save all, and load it into a new model and a new optimizer on another mesh."""
        self.program = replace(self.program, mesh=self.program.resume_mesh)
        if self.mesh is None:
            # a new process does not have gradients yet
            self.model.zero_grad()
            return optimizer
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folders)
        folder = str(folders[0])
        self.save(folder, step, optimizer)
        trained = [p.requires_grad for p in self.model.parameters()]
        names = self.mesh.mesh_dim_names
        self.mesh = init_device_mesh("cpu", self.program.mesh, mesh_dim_names=names)
        resumed = self.load(folder, trained)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        return resumed

    # --- wrapping ---------------------------------------------------------------------------------

    def _wrap(self, mesh: DeviceMesh) -> None:
        program = self.program
        data = mesh if program.parallel == "hybrid" else mesh["data"]
        wraps: list[Callable[[], None]] = [lambda: self._place(mesh), lambda: self._wrap_data(data)]
        for wrap in wraps if program.styles_first or program.placed == "tensors" else wraps[::-1]:
            wrap()

    def _place(self, mesh: DeviceMesh) -> None:
        """Styles, or DTensor parameters, along the second axis."""
        if self.program.placed == "styles":
            plan: dict[str, Any] = {f"blocks.*.{name}": style() for name, style in STYLES.items()}
            parallelize_module(self.model, mesh["tensor"], plan)
        elif self.program.placed == "tensors":
            moved: dict[int, nn.Parameter] = {}
            for module in self.model.modules():
                for name, param in module._parameters.items():
                    if param is not None and id(param) not in moved:
                        dim = self.program.dims[len(moved) % len(self.program.dims)]
                        placement = Replicate() if dim is None or dim >= param.ndim else Shard(dim)
                        value = distribute_tensor(param.detach(), mesh["tensor"], [placement])
                        moved[id(param)] = nn.Parameter(value)
                        moved[id(moved[id(param)])] = moved[id(param)]
                    if param is not None:
                        module._parameters[name] = moved[id(param)]

    def _wrap_data(self, data: DeviceMesh) -> None:
        program = self.program
        options: dict[str, Any] = dict(program.options)
        wide = torch.float64 if options.pop("wide", False) else None
        if program.parallel in ("fully_shard", "hybrid"):
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=wide)
            if options.pop("columns", False):
                options["shard_placement_fn"] = lambda p: Shard(1) if p.ndim == 2 else None
            for i in program.units:
                fully_shard(self.model.blocks[i], mesh=data, **options)
            fully_shard(self.model, mesh=data, **options)
        else:
            sharded = program.parallel == "optimizer shards"
            for i in program.units[:1]:
                replicate(
                    self.model.blocks[i],
                    data,
                    reduce_dtype=wide,
                    shard_optimizer=sharded,
                    **options,
                )
            replicate(self.model, data, reduce_dtype=wide, shard_optimizer=sharded, **options)

    # --- steps ------------------------------------------------------------------------------------

    def _before(self, event: str, optimizer: Any, kind: Any) -> Any:
        """What happens before a step; the optimizer afterwards."""
        self.stage = event
        if event == "evaluate":
            with torch.no_grad():
                self._losses(900, "evaluation")
        elif event == "unshard" and isinstance(self.model, FSDPModule):
            self.model.unshard()
            self.model.reshard()
        elif event == "copy":
            self.model = copy.deepcopy(self.model)
            return kind(self.model.parameters(), lr=0.03)
        elif event == "state" and self.mesh is not None:
            state = get_model_state_dict(self.model)
            set_model_state_dict(self.model, {name: value.clone() for name, value in state.items()})
        elif event == "freeze":
            for module in self.model.modules():
                if isinstance(module, nn.LayerNorm):
                    module.bias.requires_grad_(not module.bias.requires_grad)
        return optimizer

    def _losses(self, number: int, where: str = "") -> list[Tensor]:
        """The losses of the batch's parts computed here: one on a mesh, all on one device."""
        tokens, targets = self._batch(number)
        uses = self.program.uses[number % len(self.program.uses)]
        parts = [*zip(tokens.chunk(self.parts), targets.chunk(self.parts), uses, strict=False)]
        if self.mesh is None:
            losses = [self._loss(self.model(x, use), y) for x, y, use in parts]
        else:
            rank = (
                self.mesh.get_rank()
                if self.program.parallel == "hybrid"
                else self.mesh.get_local_rank("data")
            )
            x, y, use = parts[rank]
            losses = [self._loss(*self._call(x, y, use, number))]
        if where:
            mean = torch.stack([loss.detach() for loss in losses]).mean()
            if self.mesh is not None:
                whole = self.mesh if self.program.parallel == "hybrid" else self.mesh["data"]
                axes = tuple(range(whole.ndim))
                local = mean.to_local() if isinstance(mean, DTensor) else mean
                mean = all_reduce(local, (whole, axes), "avg")
            self._see(where, [("loss", mean)])
        return losses

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of all ranks."""
        return batch_of(self.program, number)

    def _call(self, x: Tensor, y: Tensor, use: bool, number: int) -> tuple[Any, Any]:
        """Logits and targets of this rank's rows."""
        if self.program.placed != "tensors":
            return self.model(x, use), y
        assert self.mesh is not None
        dim = self.program.entering[number % len(self.program.entering)]
        placement = Replicate() if dim is None or dim >= x.ndim else Shard(dim)
        logits: Any = self.model(distribute_tensor(x, self.mesh["tensor"], [placement]), use)
        return logits.redistribute(placements=[Replicate()]).to_local(), y

    @staticmethod
    def _loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def backward(self, number: int, events: Sequence[str]) -> None:
        """Gradients of a microbatch, in the way of the events."""
        share = 1.0 if self.mesh is not None else 1 / self.parts
        scope = implicit_replication() if self.program.placed == "tensors" else nullcontext()
        with scope:
            losses = self._losses(number, f"batch {number}")
            loss: Any = torch.stack(losses).sum() * share
            trained = [p for p in self.model.parameters() if p.requires_grad]
            if "double" in events:
                loss.backward(retain_graph=True)
            if "twice" in events:
                (loss * 0.25).backward(retain_graph=True)
                (loss * 0.75).backward()
            elif "parameters" in events:
                loss.backward(inputs=trained[:1], retain_graph=True)
                loss.backward(inputs=trained[1:])
            else:
                loss.backward()

    def _fault(self, number: int) -> None:
        """A backward that raises on all ranks, after which the step begins again."""

        def fail(*_: object) -> None:
            raise Fault

        handle = self.model.blocks[0].norm.register_full_backward_pre_hook(fail)
        try:
            self.backward(number, ())
        except Fault:
            pass
        finally:
            handle.remove()
        self.model.zero_grad()
