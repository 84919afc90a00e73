"""Checkpointer: the checkpoints of a training run, which survive a kill of any rank.

A step is a folder with the files of torch.distributed.checkpoint and a manifest of their sizes and
digests. It is written under a name that begins with a dot, and renamed when it is complete. A
folder with the final name is therefore complete, or was damaged later. Before a step is removed, it
is renamed to a name with a dot.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shoal_mesh import purpose
from shoal_mesh.internal import agree, require

from .._torch.tensors import pytree
from ..argument_types import suggests_keywords
from ..errors import ArgumentTypeError, CheckpointError
from ..host_memory import arrival_on, start_copy
from ..tensor.dtensor import DTensor
from .components import state_of
from .load_request import LoadRequest
from .numbered_state import Digests, check_digests, digests_by_number
from .saved_names import SavedNames, shorten
from .trusted_reader import TrustedPlanner, TrustedReader

Files = dict[str, tuple[int, str]]  # size and digest by name
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step_(\d+)")


class Checkpointer:
    """Saves and loads the state of a run in one folder, by torch.distributed.checkpoint.

    Every rank writes its own shards of a step under a temporary name and reads them back; one
    rename then gives the step its name. A kill at any moment therefore leaves the older steps, and
    no step that is half written. Old steps are removed after that. Loading takes the newest step
    whose files match their digests, on any number of ranks and in any layout; it does not run code
    that a checkpoint contains. All methods are called by all ranks.

    Args:
        folder: a folder for this run alone, visible to all ranks.
        keep: the number of steps that stay.

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

    @suggests_keywords()
    def __init__(self, folder: str | PathLike[str], *, keep: int = 2) -> None:
        require(folder, (str, PathLike), "Checkpointer: folder is a path", ArgumentTypeError)
        require(keep, int, "Checkpointer: keep is a number of checkpoints", ArgumentTypeError)
        if keep < 1:
            raise CheckpointError(f"keep must be at least 1, got keep={keep}")
        self._folder = Path(folder)
        self._keep = keep
        self._writer: Future[None] | None = None
        self._background: tuple[dist.ProcessGroup, ThreadPoolExecutor] | None = None
        # the parts that a load has left out with a warning
        self._named_parts: set[tuple[str, ...]] = set()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Return the steps that have been completed, newest first; no communication."""
        if not self._folder.is_dir():
            return []
        matches = (_STEP.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    @suggests_keywords()
    def save(self, step: int, state_dict: Mapping[str, Any], *, background: bool = False) -> None:
        """Save a step, which must be newer than all saved steps.

        Args:
            step: its number.
            state_dict: tensors, DTensors and other values by name, and modules, optimizers,
                schedulers and other objects with a `state_dict`; mappings may be nested.
            background: return once the values are copied, and write concurrently with the next
                steps. At most one save is in progress; the next save waits for it. The save takes
                the memory of one copy of this rank's shards, in memory of the host. `wait` raises
                if it failed.

        Raises:
            ArgumentTypeError: an argument of a wrong type.
            CheckpointError: on all ranks, if a rank could not write, if an optimizer's state by
                number differs between ranks, or if the save before in the background failed. In
                this case no older step has been removed.
        """
        require(step, int, "Checkpointer.save: step is an int", ArgumentTypeError)
        require(
            state_dict, Mapping, "Checkpointer.save: state_dict is a mapping", ArgumentTypeError
        )
        self.wait()
        if not background:
            self._write(step, partial(state_of, dict(state_dict)), dist.group.WORLD)
            return
        if self._background is None:
            executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
            self._background = dist.new_group(backend="gloo"), executor
        group, executor = self._background
        try:
            staged = _copy_to_host(state_of(dict(state_dict)))
        except Exception as error:
            # The other ranks have started to write. They receive the error with the first message
            # of this rank.
            self._writer = executor.submit(self._write, step, partial(_raise, error), group)
        else:
            self._writer = executor.submit(self._write, step, lambda: staged, group)

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            CheckpointError: the last save in the background failed.
        """
        writer = self._writer
        self._writer = None
        failure = None if writer is None else writer.exception()
        if failure is not None:
            raise CheckpointError(
                f"a checkpoint was not saved in the background: {failure}"
            ) from failure

    def close(self) -> None:
        """Wait for saves, and release the process group of background saves."""
        try:
            self.wait()
        finally:
            if self._background is not None:
                group, executor = self._background
                executor.shutdown()
                if dist.is_initialized():
                    dist.destroy_process_group(group)
            self._background = None

    @suggests_keywords()
    def load(
        self, state_dict: dict[str, Any], step: int | None = None, *, strict: bool = True
    ) -> int | None:
        """Fill a state dict from the newest step whose files are whole, or from the given one.

        A value with `state_dict` and `load_state_dict` (a module, an optimizer, a scheduler) loads
        its own state. Before its first step, an optimizer can only be loaded this way, because its
        state dict is still empty and has no tensors to load into. Its state is made without a step.

        Args:
            state_dict: the state to fill in place, such as
                `{"model": model, "optimizer": optimizer, "step": 0}`.
            step: the number of a step; None for the newest.
            strict: raise if the checkpoint has entries that the state dict does not take, or lacks
                entries of the state dict. A single part of a checkpoint, such as its model, may be
                loaded alone: a warning names the parts that are left out. False loads the entries
                that both have.

        Returns:
            The step, or None where there is none.

        Raises:
            ArgumentTypeError: an argument of a wrong type.
            CheckpointError: on all ranks: the given step does not exist or is damaged, all steps
                are damaged, the metadata are broken or contain code, or with `strict` the
                checkpoint and the state dict do not have the same entries.
        """
        require(state_dict, dict, "Checkpointer.load: state_dict is a dict", ArgumentTypeError)
        require(strict, bool, "Checkpointer.load: strict is a bool", ArgumentTypeError)
        group = dist.group.WORLD
        self.wait()
        numbers = agree(self.steps, group, CheckpointError)[0]
        for number in numbers if step is None else [step]:
            try:
                agree(partial(self._verify_files, number), group, CheckpointError)
            except CheckpointError as error:
                if step is not None:
                    raise
                warnings.warn(f"step {number} is skipped: {error}", stacklevel=3)
                continue
            self._fill(number, state_dict, group, strict=strict)
            return number
        if numbers:
            raise CheckpointError(f"none of the steps {numbers} in {self._folder} is complete")
        return None

    def _fill(self, step: int, state_dict: dict[str, Any], group: Any, *, strict: bool) -> None:
        """Load a step into the state dict, after all ranks have agreed that it fits."""
        sizes = {name: size for name, (size, _) in self._manifest(step).items()}
        reader = TrustedReader(self._path(step), sizes)
        requests: list[LoadRequest] = []

        def compare() -> list[str]:
            metadata = reader.read_metadata()
            saved = SavedNames(metadata, partial(reader.read_value, metadata))
            requests.append(LoadRequest(state_dict, saved, strict=strict))
            return requests[0].left_over

        try:
            # All ranks refuse the load before any rank loads.
            left_over = agree(compare, group, CheckpointError)
            [request] = requests
            # Stages of a pipeline take different entries, so an entry is left over only if no rank
            # takes it.
            taken_by_no_rank = set(left_over[0]).intersection(*left_over[1:])
            ordered = [name for name in left_over[0] if name in taken_by_no_rank]
            self._warn_of_parts(step, request.check_taken(ordered))
        except CheckpointError as error:
            raise CheckpointError(f"step {step} was not loaded: {error}") from error
        values = dict(request.targets)
        with purpose(f"load step {step}"):
            try:
                dcp.load(
                    values, storage_reader=reader, planner=TrustedPlanner(), process_group=group
                )
            except dist.checkpoint.api.CheckpointException as error:
                raise CheckpointError(f"step {step} was not loaded: {_failures(error)}") from error
            agree(lambda: request.finish(values), group, CheckpointError)

    def _warn_of_parts(self, step: int, parts: list[str]) -> None:
        """Warn once of the parts of a checkpoint that a load of one part leaves out."""
        if not parts or tuple(parts) in self._named_parts:
            return
        self._named_parts.add(tuple(parts))
        warnings.warn(
            f"step {step} also holds {shorten(parts)}, which this load ignores; pass strict=False "
            "to ignore them without a warning",
            stacklevel=5,
        )

    def _write(self, step: int, state_of_step: Callable[[], dict[str, Any]], group: Any) -> None:
        """Save a step.

        The files are written to a partial folder, which gets the name of the step when all of them
        are complete. Then they are verified, and older steps are removed.
        """
        is_first_rank = dist.get_rank() == 0
        folder = self._folder / f".partial_{step}"
        states: list[dict[str, Any]] = []

        def begin() -> Digests:
            states.append(state_of_step())
            newest = max(self.steps(), default=-1)
            if step <= newest:
                raise CheckpointError(
                    f"step {step} is not newer than step {newest}, which is in {self._folder} "
                    "already"
                )
            if is_first_rank:
                self._folder.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
            return digests_by_number(states[0])

        def read_back() -> Files:
            # The names that torch.distributed.checkpoint gives to the files of a rank.
            prefix = f"__{dist.get_rank()}_"
            files_of_rank = [path for path in folder.iterdir() if path.name.startswith(prefix)]
            if is_first_rank:
                files_of_rank.append(folder / ".metadata")
            return {path.name: digest_of(path) for path in files_of_rank}

        def complete() -> None:
            if is_first_rank:
                files = {name: facts for of_rank in written for name, facts in of_rank.items()}
                with open(folder / _MANIFEST, "w") as file:
                    json.dump({"step": step, "files": files}, file)
                    file.flush()
                    os.fsync(file.fileno())
                _sync(folder)
                os.rename(folder, self._path(step))
                _sync(self._folder)

        check_digests(agree(begin, group, CheckpointError))
        try:
            dcp.save(states[0], checkpoint_id=folder, process_group=group)
        except dist.checkpoint.api.CheckpointException as error:
            raise CheckpointError(f"step {step} was not saved: {_failures(error)}") from error
        written = agree(read_back, group, CheckpointError)
        agree(complete, group, CheckpointError)
        agree(partial(self._verify_files, step), group, CheckpointError)
        agree(lambda: self._remove_older() if is_first_rank else None, group, CheckpointError)

    def _remove_older(self) -> None:
        """Remove steps older than the steps to keep, and half-written or half-removed steps."""
        for step in self.steps()[self._keep :]:
            os.rename(self._path(step), self._folder / f".removed_{step}")
        for entry in self._folder.iterdir():
            if entry.name.startswith((".partial_", ".removed_")):
                shutil.rmtree(entry)

    def _path(self, step: int) -> Path:
        return self._folder / f"step_{step}"

    def _manifest(self, step: int) -> Files:
        """Return size and digest of each file of a step."""
        try:
            manifest = json.loads((self._path(step) / _MANIFEST).read_text())
            files = {}
            for name, (size, digest) in manifest["files"].items():
                files[str(name)] = (int(size), str(digest))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the manifest of step {step} cannot be read: {error!r}"
            ) from error
        are_plain_names = all(Path(name).name == name for name in files)
        if manifest["step"] != step or ".metadata" not in files or not are_plain_names:
            raise CheckpointError(
                f"the manifest of step {step} is of another step, or names files elsewhere"
            )
        return files

    def _verify_files(self, step: int) -> None:
        """Verify sizes and digests of this rank's part of a step's files against the manifest."""
        files = sorted(self._manifest(step).items())
        own_files = files[dist.get_rank() :: dist.get_world_size()]
        for name, (size, digest) in own_files:
            path = self._path(step) / name
            try:
                actual = digest_of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if actual != (size, digest):
                raise CheckpointError(
                    f"{path} was changed after it was written: it has {actual[0]} bytes, expected "
                    f"{size} bytes with the recorded checksum"
                )


def _raise(error: Exception) -> NoReturn:
    raise error


def _failures(error: dist.checkpoint.api.CheckpointException) -> str:
    """Return the failures of a checkpoint error, by rank."""
    failures = sorted(error.failures.items())
    texts = []
    for rank, (failure, _) in failures:
        texts.append(f"rank {rank}: {type(failure).__name__}: {failure}")
    return "; ".join(texts)


def _copy_to_host(state: Any) -> Any:
    """Copy a state to memory of the host, so that the program may change it afterwards.

    A DTensor is copied by its local shard.
    """
    devices: set[torch.device] = set()

    def copy_tensor(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return DTensor(copy_tensor(tensor._local_tensor.detach()), tensor.spec)
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return tensor.detach().clone()
        devices.add(tensor.device)
        return start_copy(tensor.detach())

    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    staged = copy.deepcopy(state, {id(tensor): copy_tensor(tensor) for tensor in tensors})
    for arrival in filter(None, map(arrival_on, devices)):
        arrival.synchronize()
    return staged


def digest_of(path: Path) -> tuple[int, str]:
    """Return the size and the digest of a file, by reading it."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, partial(hashlib.blake2b, digest_size=16))
        return file.tell(), digest.hexdigest()


def _sync(folder: Path) -> None:
    """Flush the names in a folder to disk, so that they survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
