"""Checkpoints of state dicts that hold ShardedTensors, through torch.distributed.checkpoint.

Its own ``save`` and ``load`` work on ShardedTensors as they are.  ``load`` here adds three things: nothing is changed
unless all of it can be read on every rank; sizes may differ where that is asked for (a padded vocabulary); and errors
say what is wrong.  torch.distributed.checkpoint is imported when one of these runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from .base import ShardedTensorBase
from .errors import CheckpointError
from .groups import agree, resolve


def save(
    state_dict: Mapping[str, Any], checkpoint_id: str | PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Write a state dict, every rank its own shards, into the folder ``checkpoint_id``; all ranks call it."""
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(state_dict), checkpoint_id=checkpoint_id, process_group=process_group)


def load(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | PathLike[str],
    *,
    allow_shape_mismatch: Sequence[str] = (),
    padding: float | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the tensors of a state dict from a checkpoint of any number of ranks and any layout; all ranks call it.

    Args:
        state_dict: Tensors to fill in place, such as ``model.state_dict()``; nested dicts are fine.
        checkpoint_id: The folder that ``save`` or torch.distributed.checkpoint wrote.
        allow_shape_mismatch: Names, or patterns with wildcards, of tensors whose size may differ from the saved one:
            what both sizes have in common is read.
        padding: Value for the elements beyond the saved size; None leaves them as they are.
        process_group: The ranks that load; None is the default group.

    Returns:
        The state dict with what is no tensor replaced by what was saved.

    Raises:
        CheckpointError: On every rank, with nothing changed: no checkpoint there, a file cut short, a name it does not
            have, a size that differs.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

    group = resolve(process_group)
    flat = dict(_flat(state_dict))
    reader = dcp.FileSystemReader(checkpoint_id)
    agree(group, {"state dict": sorted(flat)}, _misfit(reader, flat, allow_shape_mismatch, checkpoint_id))
    staged = {name: _staging(value, padding) for name, value in flat.items()}
    error: Exception | None = None
    try:
        dcp.load(staged, storage_reader=reader, planner=_planner(), process_group=process_group)
    except (Exception, CheckpointException) as found:  # noqa: BLE001, RUF100  # a broken file can raise anything while it is read
        error = CheckpointError(f"checkpoint {checkpoint_id} cannot be read; nothing was changed: {_root(found)}")
    agree(group, {}, error)
    with torch.no_grad():
        for name, value in flat.items():
            if isinstance(value, torch.Tensor):
                for part, new in zip(_parts(value), _parts(staged[name]), strict=True):
                    part.copy_(new)
    return _nested(state_dict, staged)


def _flat(state: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves with the names that torch.distributed.checkpoint gives them: keys joined by dots."""
    found: list[tuple[str, Any]] = []
    for key, value in state.items():
        nested = isinstance(value, Mapping) and bool(value)
        found += _flat(value, f"{prefix}{key}.") if nested else [(f"{prefix}{key}", value)]
    return found


def _nested(state: Mapping[str, Any], staged: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        key: _nested(value, staged, f"{prefix}{key}.")
        if isinstance(value, Mapping) and value
        else (value if isinstance(value, torch.Tensor) else staged[f"{prefix}{key}"])
        for key, value in state.items()
    }


def _misfit(reader: Any, flat: Mapping[str, Any], allowed: Sequence[str], where: Any) -> Exception | None:
    """What in the checkpoint's index does not fit the state dict, None if all does."""
    try:
        saved = reader.read_metadata().state_dict_metadata
    except Exception as error:  # noqa: BLE001, RUF100  # no folder, no index, or an index cut short: pickle raises anything
        return CheckpointError(f"there is no readable checkpoint at {where}: {type(error).__name__}: {error}")
    missing = sorted(flat.keys() - saved.keys())
    if missing:
        return CheckpointError(f"checkpoint {where} has no {missing}; it has {sorted(saved)}")
    for name, value in flat.items():
        if isinstance(value, torch.Tensor) is not hasattr(saved[name], "size"):
            return CheckpointError(f"checkpoint {where}: {name} is a tensor here or there, but not both")
        if not isinstance(value, torch.Tensor) or tuple(saved[name].size) == tuple(value.size()):
            continue
        sizes = f"size {tuple(saved[name].size)}, here it has {tuple(value.size())}"
        if len(saved[name].size) != value.dim():
            return CheckpointError(f"checkpoint {where}: {name} has {sizes}: the number of dims must be the same")
        if not any(fnmatchcase(name, pattern) for pattern in allowed):
            return CheckpointError(f"checkpoint {where}: {name} has {sizes}; allow_shape_mismatch reads what both have")
    return None


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensorBase):
        return value._parts
    local = getattr(value, "_local_tensor", value)  # a DTensor's
    return [local]


def _staging(value: Any, padding: float | None) -> Any:
    """A tensor of the same layout to read into, so that a failure half-way leaves the real one alone."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        copied: Any = value.detach().clone()
        if padding is not None:
            for part in _parts(copied):
                part.fill_(padding)
    return copied


def _root(error: BaseException) -> str:
    """The first line that says something, out of a CheckpointException's many tracebacks."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, wrapped = min(failures.items(), key=lambda item: item[0])
        cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"


def _planner() -> Any:
    """A load planner that reads what saved and wanted boxes have in common, whatever the sizes of the wholes."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    class CommonPart(DefaultLoadPlanner):
        """Sizes have been checked before, by ``_misfit``."""

        def create_local_plan(self) -> Any:
            metadata = self.metadata
            assert metadata is not None, "torch.distributed.checkpoint sets the planner up first"
            sizes = {}
            for name, value in self.state_dict.items():
                saved = metadata.state_dict_metadata[name]
                if isinstance(saved, TensorStorageMetadata) and isinstance(value, torch.Tensor):
                    sizes[name], saved.size = saved.size, value.size()
            try:
                return super().create_local_plan()
            finally:
                for name, size in sizes.items():
                    saved = metadata.state_dict_metadata[name]
                    assert isinstance(saved, TensorStorageMetadata), "only tensors were entered"
                    saved.size = size

    return CommonPart(flatten_state_dict=False, flatten_sharded_tensors=False)
