"""Process groups: the default one, their members, what these agree on, and the meshes over them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch.distributed as dist

from shoal_dtensor.internal import ScopedValue
from shoal_mesh import Comm, DeviceMesh
from shoal_mesh.internal import agree, kind_of

from ..arguments import expect
from ..errors import ArgumentTypeError, NotInGroupError, ProcessGroupError, RankMismatchError

_LOADING = ScopedValue[dist.ProcessGroup | None]("shoal_load_with_process_group", None)


def resolve(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None; a typed error for one that this rank is not in."""
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError(
            "no default process group: call torch.distributed.init_process_group first"
        )
    group = dist.group.WORLD if process_group is None else process_group
    # c10d represents a group without this rank by an integer
    if not isinstance(group, dist.ProcessGroup | int):
        raise ArgumentTypeError(
            f"process_group must be a torch.distributed.ProcessGroup, got {kind_of(group)}"
        )
    if isinstance(group, int) or dist.get_rank(group) < 0:
        raise NotInGroupError(
            f"rank {dist.get_rank()} is not in the given process group {group}; only members call "
            "this"
        )
    return group


def check_rank(call: str, name: str, rank: object, group: dist.ProcessGroup) -> None:
    """Raise ArgumentTypeError for what is no integer, ProcessGroupError for a rank that the group does not have."""
    expect(call, name, rank, int)
    size = dist.get_world_size(group)
    if rank not in range(size):
        raise ProcessGroupError(
            f"{call}: {name}={rank} is not a rank of the process group of {size} ranks"
        )


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the group, in the order of their ranks in it."""
    return tuple(dist.get_process_group_ranks(group))


def agree_on(
    group: dist.ProcessGroup, check: Callable[[], Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The arguments of every rank, in group order; all ranks return, or all raise the same error.

    ``check`` raises what is wrong with this rank's arguments, else returns values by name, equal on
    all ranks. A value whose name begins with "~" is exchanged, not compared, one with "?" compared
    between the ranks that have it.
    """

    def sendable() -> dict[str, Any]:
        facts = dict(check())
        try:
            pickle.loads(pickle.dumps(facts))
        except Exception as cause:  # noqa: BLE001, RUF100
            # pickling runs code of the values' classes, which raises anything
            raise ArgumentTypeError(
                f"{', '.join(facts)}: a value cannot be sent to other ranks ({cause})"
            ) from cause
        return facts

    reports = agree(sendable, group)
    for name in dict.fromkeys(
        name for facts in reports for name in facts if not name.startswith("~")
    ):
        own = [
            (rank, facts.get(name))
            for rank, facts in enumerate(reports)
            if name in facts or name[0] != "?"
        ]
        (first, known) = own[0]
        said = name.removeprefix("?")
        for rank, value in own:
            if value != known:
                raise RankMismatchError(
                    f"{said}={known} on rank: {first} does not match with {said}={value} on rank: "
                    f"{rank}"
                )
    return reports


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Set the process group of the ShardedTensors that are unpickled inside the ``with``.

    Args:
        process_group: The group; its ranks must be those that saved the tensors, in the same order.

    Raises:
        ArgumentTypeError: It is no process group.
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
    if _LOADING.own() is not None:
        raise ProcessGroupError("load_with_process_group is already active: it cannot be nested")
    with _LOADING.entered(resolve(process_group)):
        yield


def _get_current_process_group() -> dist.ProcessGroup:
    """The group of the enclosing ``load_with_process_group``, else the default group."""
    loading = _LOADING.own()
    return resolve(None) if loading is None else loading


@dataclass(frozen=True, slots=True)
class ProcessGroupState:
    """This rank's place in a process group and in the world, saved in pickles so that another place is refused."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> ProcessGroupState:
        """This rank's place in the group and in the world."""
        return ProcessGroupState(
            dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size()
        )

    def check(self, group: dist.ProcessGroup) -> None:
        """Raise ProcessGroupError, which says what differs, unless this rank has the same place in ``group``."""
        now = ProcessGroupState.of(group)
        for name, what in (
            ("local_rank", "rank in the process group"),
            ("local_world_size", "size of the process group"),
            ("global_rank", "global rank"),
            ("global_world_size", "world size"),
        ):
            if getattr(now, name) != getattr(self, name):
                raise ProcessGroupError(
                    f"a ShardedTensor of {what} {getattr(self, name)} cannot be loaded with {what} "
                    f"{getattr(now, name)}; torch.distributed.checkpoint loads onto other ranks"
                )


@lru_cache(maxsize=256)
def mesh_of(
    group: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> DeviceMesh:
    """The mesh of this shape over all ranks of the group, given row-major; subgroups are created at first use."""
    if len(shape) == 1:
        return DeviceMesh.from_group([group], device_type, ranks)
    return mesh_of(group, device_type, (len(ranks),), ranks).unflatten(0, shape)


def one_dim_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The 1-D mesh over the group's ranks, in group order."""
    ranks = members(group)
    return mesh_of(group, device_type, (len(ranks),), ranks)


def comm_of(group: dist.ProcessGroup, device_type: str) -> Comm:
    """The communicator over all ranks of the group, in group order."""
    return one_dim_mesh(group, device_type).comm(0)
