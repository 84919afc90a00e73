"""Checkpoints of state dicts with ShardedTensors, for any number of ranks and any sharding.

The functions of torch.distributed.checkpoint accept ShardedTensors too. ``load`` here changes
nothing unless every rank can read everything, sizes may differ on request (a padded vocabulary),
and errors are typed. torch.distributed.checkpoint is imported inside of the functions.

May import: errors, ranks, tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor.internal import local_of
from shoal_mesh.internal import agree, require, require_each

from .errors import ArgumentTypeError, CheckpointError
from .ranks.process_groups import agree_on, resolve
from .tensor.sharded_tensor_base import ShardedTensorBase

__all__ = ["load", "save"]


def save(
    state_dict: Mapping[str, Any],
    checkpoint_id: str | PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a state dict into a folder, every rank its own shards; all ranks call it.

    Args:
        state_dict: Tensors and other values by name; nested mappings are flattened.
        checkpoint_id: The folder.
        process_group: The ranks that save; None is the default group.

    Raises:
        ArgumentTypeError: The state dict is not a mapping, the folder not a path, or the group not
            a process group.
        ProcessGroupError: There is no default group, or this rank is not in the group.

    Example:
        >>> import tempfile, warnings
        >>> warnings.simplefilter("ignore")
        >>> folder = [tempfile.mkdtemp()]
        >>> torch.distributed.broadcast_object_list(folder)
        >>> rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> columns = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])
        >>> save({"weight": ones(rows, 4, 2)}, folder[0])
        >>> tensor = zeros(columns, 4, 2)
        >>> _ = load({"weight": tensor}, folder[0])
        >>> tensor.sum()
        tensor(8.)
    """
    require(state_dict, Mapping, "save: state_dict is a mapping", ArgumentTypeError)
    require(
        checkpoint_id, str | PathLike, "save: checkpoint_id is a str or a path", ArgumentTypeError
    )
    resolve(process_group)
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
    """Fill the tensors of a state dict from a checkpoint of any layout; all ranks call it.

    Args:
        state_dict: Tensors to fill in place, such as ``model.state_dict()``; mappings may be
            nested.
        checkpoint_id: The folder that ``save`` or torch.distributed.checkpoint wrote.
        allow_shape_mismatch: Names, or patterns with wildcards, of tensors whose size may differ
            from the saved one: the elements in both sizes are read.
        padding: Value of the elements beyond the saved size; None leaves them unchanged.
        process_group: The ranks that load; None is the default group.

    Returns:
        The state dict, with the saved values of entries that are not tensors.

    Raises:
        ArgumentTypeError: The state dict is not a mapping, the folder not a path, or the group not
            a process group.
        CheckpointError: The folder has no checkpoint, a file is truncated, a name is unknown, or a
            size differs. It is raised on every rank, and the state dict is unchanged then.
        ProcessGroupError: There is no default group, or this rank is not in the group.
        RankMismatchError: The ranks have different names in their state dicts.
    """
    group = resolve(process_group)

    def check_types() -> None:
        require(state_dict, Mapping, "load: state_dict is a mapping", ArgumentTypeError)
        require(
            checkpoint_id,
            str | PathLike,
            "load: checkpoint_id is a str or a path",
            ArgumentTypeError,
        )
        require_each(
            allow_shape_mismatch,
            str,
            "load: allow_shape_mismatch is a sequence of strings",
            ArgumentTypeError,
        )
        require(
            padding,
            int | float | None,
            "load: padding is a number or None",
            ArgumentTypeError,
            without=bool,
        )

    agree(check_types, group)
    flat: dict[str, Any] = {}
    _map_leaves(state_dict, flat.__setitem__)

    def facts() -> dict[str, Any]:
        _check_fit(flat, allow_shape_mismatch, checkpoint_id)
        return {"state dict": sorted(flat)}

    agree_on(group, facts)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    # The checkpoint is read into copies, so that a failure leaves the given tensors unchanged.
    with torch.no_grad():
        copies = {name: value.detach().clone() for name, value in tensors.items()}
        if padding is not None:
            for copied in copies.values():
                for local in _local_tensors(copied):
                    local.fill_(padding)
    staged: dict[str, Any] = flat | copies
    agree(lambda: _read(staged, checkpoint_id, process_group), group)
    with torch.no_grad():
        for name, value in tensors.items():
            pairs = zip(_local_tensors(value), _local_tensors(staged[name]), strict=True)
            for local, new in pairs:
                local.copy_(new)

    def loaded_value(name: str, value: Any) -> Any:
        return value if isinstance(value, torch.Tensor) else staged[name]

    return _map_leaves(state_dict, loaded_value)


def _read(
    staged: dict[str, Any], checkpoint_id: str | PathLike[str], group: dist.ProcessGroup | None
) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

    class AnySizes(dcp.DefaultLoadPlanner):
        """Reads the elements that are in the saved and in the requested shards.

        `_check_fit` has compared the sizes.
        """

        def create_local_plan(self) -> Any:
            metadata: Any = self.metadata
            entries = dict(metadata.state_dict_metadata)
            for name, value in self.state_dict.items():
                if isinstance(value, torch.Tensor):
                    entries[name] = replace(entries[name], size=value.size())
            self.metadata = replace(metadata, state_dict_metadata=entries)
            return super().create_local_plan()

    planner = AnySizes(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.load(
            staged,
            storage_reader=dcp.FileSystemReader(checkpoint_id),
            planner=planner,
            process_group=group,
        )
    except (Exception, CheckpointException) as error:  # noqa: BLE001, RUF100
        # reading a broken file may raise any error
        cause = _first_cause(error)
        raise CheckpointError(
            f"checkpoint {checkpoint_id} cannot be read; nothing was changed: {cause}"
        ) from error


def _first_cause(error: BaseException) -> str:
    """Describe an error; for an error of several ranks, the cause on the first of them."""
    # By rank: the error and its traceback.
    failures = getattr(error, "failures", {})
    if not failures:
        return f"{type(error).__name__}: {error}"
    rank = min(failures)
    cause = failures[rank][0]
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _map_leaves(
    state: Mapping[str, Any], leaf: Callable[[str, Any], Any], prefix: str = ""
) -> dict[str, Any]:
    """Replace every leaf by ``leaf(name, value)``; a name has all keys, joined by dots."""
    mapped = dict[str, Any]()
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            mapped[key] = _map_leaves(value, leaf, f"{prefix}{key}.")
        else:
            mapped[key] = leaf(f"{prefix}{key}", value)
    return mapped


def _check_fit(flat: Mapping[str, Any], allowed: Sequence[str], checkpoint_id: Any) -> None:
    """Raise CheckpointError unless every entry of the state dict fits the checkpoint's index."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        index = FileSystemReader(checkpoint_id).read_metadata()
        saved: Mapping[str, Any] = index.state_dict_metadata
    except Exception as error:  # noqa: BLE001, RUF100
        # if the folder is missing, or the index is truncated, reading may raise any error
        raise CheckpointError(
            f"there is no readable checkpoint at {checkpoint_id}: {type(error).__name__}: {error}"
        ) from error
    missing = sorted(flat.keys() - saved.keys())
    if missing:
        raise CheckpointError(
            f"checkpoint {checkpoint_id} does not contain {missing}; it contains {sorted(saved)}"
        )
    for name, value in flat.items():
        is_tensor = isinstance(value, torch.Tensor)
        was_tensor = hasattr(saved[name], "size")
        if is_tensor is not was_tensor:
            raise CheckpointError(
                f"checkpoint {checkpoint_id}: {name} must be a tensor in both the checkpoint and "
                "the state dict"
            )
        if not is_tensor:
            continue
        saved_size = tuple(saved[name].size)
        size = tuple(value.size())
        if saved_size == size:
            continue
        sizes = f"size {saved_size}, but the state dict has {size}"
        if len(saved_size) != len(size):
            raise CheckpointError(
                f"checkpoint {checkpoint_id}: {name} has {sizes}: the number of dims must be the "
                "same"
            )
        if not any(fnmatchcase(name, pattern) for pattern in allowed):
            raise CheckpointError(
                f"checkpoint {checkpoint_id}: {name} has {sizes}; pass allow_shape_mismatch to "
                "read the elements inside both sizes"
            )


def _local_tensors(value: torch.Tensor) -> list[torch.Tensor]:
    return value._local_tensors if isinstance(value, ShardedTensorBase) else [local_of(value)]
