"""Checkpointer: the checkpoints of a training run, which survive a kill of any rank at any moment."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shoal_mesh import purpose
from shoal_mesh.internal import agree

from ..argument_types import check_type
from ..errors import CheckpointError
from ..host_memory import arrival_on, start_copy
from ..tensor.dtensor import DTensor
from .stored_steps import Files, StoredSteps, digest_of
from .trusted_reader import TrustedPlanner, TrustedReader


class Checkpointer:
    """Saves and loads the state of a run in one folder, by way of torch.distributed.checkpoint.

    A step is written beside, every rank its own shards, read back, and given its name in one rename, so a kill at any
    moment leaves the steps that were there and none that is half written. Older ones are removed after that. Loading
    takes the newest step whose files are what was written, on any number of ranks and in any layout; it runs no code
    that a checkpoint holds. All methods are called by all ranks.

    Args:
        folder: of this run alone, seen by all ranks.
        keep: how many steps stay.

    Raises:
        ArgumentTypeError: an argument of a wrong type.
        CheckpointError: `keep` is not positive.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> from shoal_dtensor.checkpoint import Checkpointer
        >>> from shoal_mesh import init_device_mesh, launch
        >>> def resumed(folder: str) -> tuple[int | None, float]:
        ...     weight = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     with Checkpointer(folder) as checkpoints:
        ...         checkpoints.save(7, {"weight": weight * 3})
        ...         return checkpoints.load({"weight": weight}), weight.full_tensor().sum().item()
        >>> launch(resumed, 2, tempfile.mkdtemp())
        [(7, 12.0), (7, 12.0)]
    """

    def __init__(self, folder: str | PathLike[str], *, keep: int = 2) -> None:
        check_type("Checkpointer", "folder", folder, (str, PathLike), "a path")
        check_type("Checkpointer", "keep", keep, int, "a number of checkpoints")
        if keep < 1:
            raise CheckpointError(f"at least one checkpoint is kept, got keep={keep}")
        self._steps, self._keep = StoredSteps(Path(folder)), keep
        self._writer: Future[None] | None = None
        self._background: tuple[dist.ProcessGroup, ThreadPoolExecutor] | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The steps that are there, newest first; no communication."""
        return self._steps.numbers()

    def save(self, step: int, state_dict: Mapping[str, Any], *, background: bool = False) -> None:
        """Save a step, newer than all that are there.

        Args:
            step: its number.
            state_dict: tensors, DTensors and other values by name; mappings may be nested.
            background: return once the values are copied, and write beside the next steps. One save is under way at
                most, the next one waits for it: one copy of this rank's shards, in memory of the host, is all the
                memory that it takes.
                `wait` says how it went.

        Raises:
            ArgumentTypeError: an argument of a wrong type.
            CheckpointError: on all ranks, if one could not write, or the one before in the background failed. No older
                step has been removed then.
        """
        check_type("Checkpointer.save", "step", step, int, "an int")
        check_type("Checkpointer.save", "state_dict", state_dict, Mapping, "a mapping")
        self.wait()
        if not background:
            self._write(step, dict(state_dict), dist.group.WORLD)
            return
        if self._background is None:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._background = dist.new_group(backend="gloo"), executor
        group, executor = self._background
        self._writer = executor.submit(self._write, step, _copied(dict(state_dict)), group)

    def wait(self) -> None:
        """Until no save is under way.

        Raises:
            CheckpointError: the last one in the background failed.
        """
        writer, self._writer = self._writer, None
        failure = None if writer is None else writer.exception()
        if failure is not None:
            raise CheckpointError(f"a checkpoint was not saved in the background: {failure}") from failure

    def close(self) -> None:
        """Wait, and let go of the process group of background saves."""
        try:
            self.wait()
        finally:
            if self._background is not None:
                group, executor = self._background
                executor.shutdown()
                if dist.is_initialized():
                    dist.destroy_process_group(group)
            self._background = None

    def load(self, state_dict: dict[str, Any], step: int | None = None) -> int | None:
        """Fill a state dict from the newest step whose files are whole, or from the given one.

        Args:
            state_dict: what to fill in place, such as `{"model": model.state_dict(), "step": 0}`.
            step: the number of a step; None for the newest.

        Returns:
            The step, or None where there is none.

        Raises:
            CheckpointError: on all ranks: the given step is not there or not whole, no step is although there are some,
                or its metadata are broken or hold code.
        """
        group = dist.group.WORLD
        self.wait()
        numbers = agree(self._steps.numbers, group, CheckpointError)[0]
        for number in numbers if step is None else [step]:
            try:
                agree(partial(self._check, number), group, CheckpointError)
            except CheckpointError as error:
                if step is not None:
                    raise
                warnings.warn(f"step {number} is passed over: {error}", stacklevel=2)
                continue
            self._fill(number, state_dict, group)
            return number
        if numbers:
            raise CheckpointError(f"none of the steps {numbers} in {self._steps.folder} is whole")
        return None

    def _check(self, step: int) -> None:
        """See that this rank's part of the files of a step is what was written."""
        self._steps.check(step, dist.get_rank(), dist.get_world_size())

    def _fill(self, step: int, state_dict: dict[str, Any], group: Any) -> None:
        sizes = {name: size for name, (size, _) in self._steps.manifest(step).items()}
        reader = TrustedReader(self._steps.path(step), sizes)

        def readable() -> None:
            reader.read_metadata()

        agree(readable, group, CheckpointError)  # refused on all ranks before the first of them loads
        with purpose(f"load step {step}"):
            try:
                dcp.load(state_dict, storage_reader=reader, planner=TrustedPlanner(), process_group=group)
            except dist.checkpoint.api.CheckpointException as error:
                raise CheckpointError(f"step {step} was not loaded: {_said(error)}") from error

    def _write(self, step: int, state_dict: dict[str, Any], group: Any) -> None:
        first, steps = dist.get_rank() == 0, self._steps

        def begin() -> None:
            newest = max(steps.numbers(), default=-1)
            if step <= newest:
                raise CheckpointError(f"step {step} is not newer than {newest}, which is in {steps.folder} already")
            if first:
                steps.begin(step)

        def read_back() -> Files:
            own = [path for path in steps.partial(step).iterdir() if path.name.startswith(f"__{dist.get_rank()}_")]
            return {path.name: digest_of(path) for path in [*own, *([steps.partial(step) / ".metadata"] * first)]}

        def complete() -> None:
            if first:
                steps.complete(step, {name: fact for files in written for name, fact in files.items()})

        agree(begin, group, CheckpointError)
        try:
            dcp.save(state_dict, checkpoint_id=steps.partial(step), process_group=group)
        except dist.checkpoint.api.CheckpointException as error:
            raise CheckpointError(f"step {step} was not saved: {_said(error)}") from error
        written = agree(read_back, group, CheckpointError)
        agree(complete, group, CheckpointError)
        agree(partial(self._check, step), group, CheckpointError)
        agree(lambda: steps.remove_all_but(self._keep) if first else None, group, CheckpointError)


def _said(error: dist.checkpoint.api.CheckpointException) -> str:
    """What went wrong, by rank."""
    failures = sorted(error.failures.items())
    return "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, (failure, _) in failures)


def _copied(state: Any) -> Any:
    """The values, in memory of the host that the program does not change; of DTensors this rank's shards."""
    devices: set[torch.device] = set()

    def copied(value: Any) -> Any:
        if isinstance(value, DTensor):
            return DTensor(copied(value._local_tensor.detach()), value.spec)
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
                return value.detach().clone()
            devices.add(value.device)
            return start_copy(value.detach())
        if isinstance(value, Mapping):
            return {key: copied(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copied(each) for each in value)
        return copy.deepcopy(value)

    staged = copied(state)
    for arrival in filter(None, map(arrival_on, devices)):
        arrival.synchronize()
    return staged
