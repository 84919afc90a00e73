"""Process groups: the default group, members, agreement between members, and meshes over them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import ScopedValue, agree, kind_of, require

from ..errors import ArgumentTypeError, NotInGroupError, ProcessGroupError, RankMismatchError

_LOADING = ScopedValue[dist.ProcessGroup | None]("shoal_load_with_process_group", None)


def resolve(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group itself, or the default group for None.

    Raises:
        ArgumentTypeError: ``process_group`` is not a process group.
        ProcessGroupError: There is no default group, or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(
            "no default process group exists: call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if process_group is None else process_group
    # c10d represents a group without this rank by an integer.
    if not isinstance(group, dist.ProcessGroup | int):
        raise ArgumentTypeError(
            f"process_group must be a torch.distributed.ProcessGroup, got {kind_of(group)}"
        )
    if isinstance(group, int) or dist.get_rank(group) < 0:
        raise NotInGroupError(
            f"rank {dist.get_rank()} is not in the given process group {group}; call this on its "
            "members only"
        )
    return group


def check_rank(call: str, name: str, rank: object, group: dist.ProcessGroup) -> None:
    """Raise unless ``rank`` is a rank of a process group.

    Raises:
        ArgumentTypeError: ``rank`` is not an integer.
        ProcessGroupError: The group does not have the rank.
    """
    require(rank, int, f"{call}: {name} is an int", ArgumentTypeError, without=bool)
    size = dist.get_world_size(group)
    if rank not in range(size):
        raise ProcessGroupError(
            f"{call}: {name}={rank} is not a rank of the process group of {size} ranks"
        )


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return the global ranks of the group, in group order."""
    return tuple(dist.get_process_group_ranks(group))


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that ranks exchange in `agree_on`, and how the values of ranks are compared.

    Args:
        value: The value, which can be pickled.
        compare: Whether the value must be equal on all ranks that have it.
        required: Whether all ranks must have a compared value.
    """

    value: Any
    compare: bool = True
    required: bool = True


def agree_on(
    group: dist.ProcessGroup, check: Callable[[], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Exchange and compare the arguments of all ranks; all return, or all raise the same error.

    Args:
        group: The ranks that make the call.
        check: Raises an error if this rank's arguments are wrong; else it returns values by name,
            which must be equal on all ranks. A value for which this does not hold is a `Fact`.

    Returns:
        The values of every rank, in group order.

    Raises:
        RankMismatchError: A value differs between two ranks.
        ArgumentTypeError: A value cannot be sent.
    """

    def sendable() -> dict[str, Fact]:
        facts = {}
        for name, value in check().items():
            facts[name] = value if isinstance(value, Fact) else Fact(value)
        try:
            pickle.loads(pickle.dumps(facts))
        except Exception as cause:  # noqa: BLE001, RUF100
            # pickling runs code of the values' classes, which may raise any error
            raise ArgumentTypeError(
                f"{', '.join(facts)}: a value cannot be sent to other ranks ({cause})"
            ) from cause
        return facts

    reports = agree(sendable, group)
    names = dict.fromkeys(name for facts in reports for name in facts)
    values_of_ranks = list(map(_values_of, reports))
    for name in names:
        fact = next(facts[name] for facts in reports if name in facts)
        if fact.compare:
            _compare(name, values_of_ranks, is_required=fact.required)
    return values_of_ranks


def _values_of(facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {name: fact.value for name, fact in facts.items()}


def _compare(name: str, values_of_ranks: list[dict[str, Any]], *, is_required: bool) -> None:
    """Raise RankMismatchError unless a value is the same on all ranks, or on those that have it."""
    values = {}
    for rank, values_by_name in enumerate(values_of_ranks):
        if name in values_by_name or is_required:
            values[rank] = values_by_name.get(name)
    first_rank, first_value = next(iter(values.items()))
    for rank, value in values.items():
        if value != first_value:
            raise RankMismatchError(
                f"{name} must be equal on all ranks: {first_value} on rank {first_rank}, {value} "
                f"on rank {rank}; pass the same value on all ranks"
            )


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Set the process group of the ShardedTensors that are unpickled inside the ``with``.

    Args:
        process_group: The group; its ranks must be those that saved the tensors, in the same order.

    Raises:
        ArgumentTypeError: ``process_group`` is not a process group.
        ProcessGroupError: Inside another ``load_with_process_group``, or this rank is not in the
            group.

    Example:
        >>> import io
        >>> tensor = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4)
        >>> file = io.BytesIO()
        >>> torch.save(tensor, file)
        >>> _ = file.seek(0)
        >>> with load_with_process_group(torch.distributed.group.WORLD):
        ...     torch.load(file, weights_only=False).full_tensor()
        tensor([1., 1., 1., 1.])
    """
    if _LOADING.context_value() is not None:
        raise ProcessGroupError("load_with_process_group is already active: it cannot be nested")
    with _LOADING.change(lambda _: resolve(process_group)):
        yield


def _get_current_process_group() -> dist.ProcessGroup:
    """Return the group of the enclosing ``load_with_process_group``, else the default group."""
    loading = _LOADING.context_value()
    return resolve(None) if loading is None else loading


# Fields of `ProcessGroupState` in words.
_MEANINGS = {
    "local_rank": "rank in the process group",
    "local_world_size": "size of the process group",
    "global_rank": "global rank",
    "global_world_size": "world size",
}


@dataclass(frozen=True, slots=True)
class ProcessGroupState:
    """This rank's place in a process group and in the world, which a pickle checks on load."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> ProcessGroupState:
        """Return this rank's place in the group and in the world."""
        return ProcessGroupState(
            local_rank=dist.get_rank(group),
            global_rank=dist.get_rank(),
            local_world_size=dist.get_world_size(group),
            global_world_size=dist.get_world_size(),
        )

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise ProcessGroupError unless this rank has the same place in ``group``."""
        current = ProcessGroupState.of(group)
        for name, meaning in _MEANINGS.items():
            saved_value = getattr(self, name)
            value = getattr(current, name)
            if value != saved_value:
                raise ProcessGroupError(
                    f"a ShardedTensor of {meaning} {saved_value} cannot be loaded with {meaning} "
                    f"{value}; torch.distributed.checkpoint loads onto other ranks"
                )


@lru_cache(maxsize=256)
def mesh_of(
    group: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> DeviceMesh:
    """Return the mesh of this shape over the ranks of a group, which are given row-major."""
    if len(shape) == 1:
        return DeviceMesh.from_group([group], device_type, ranks)
    line = mesh_of(group, device_type, (len(ranks),), ranks)
    return line.unflatten(0, shape)


def one_dim_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the 1-D mesh over the group's ranks, in group order."""
    ranks = members(group)
    return mesh_of(group, device_type, (len(ranks),), ranks)


def comm_of(group: dist.ProcessGroup, device_type: str) -> Comm:
    """Return the communicator over all ranks of the group, in group order."""
    return one_dim_mesh(group, device_type).comm(0)
