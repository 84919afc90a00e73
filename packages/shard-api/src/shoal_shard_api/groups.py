"""Process groups: which one is meant, whether its ranks agree, and the mesh over it.

Everything here that talks to other ranks does so before any data move, so that what one rank finds wrong is raised
on all of them and none is left waiting.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from shoal_mesh import Comm, DeviceMesh

from ._torch import default_group
from .errors import LocalShardError, ProcessGroupError, RankMismatchError

_LOADING: ContextVar[dist.ProcessGroup | None] = ContextVar("process group of load_with_process_group", default=None)


def resolve(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None.

    Raises:
        ProcessGroupError: There is no default group, or this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ProcessGroupError("no default process group: call torch.distributed.init_process_group first")
    group = default_group() if process_group is None else process_group
    if dist.get_rank(group) < 0:  # c10d gives those outside an object that is no group
        raise ProcessGroupError(
            f"rank {dist.get_rank()} is not in the given process group ({group}); only its members may make this call"
        )
    return group


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of the group, in the order of their ranks in it."""
    return tuple(dist.get_process_group_ranks(group))


@contextmanager
def load_with_process_group(process_group: dist.ProcessGroup) -> Iterator[None]:
    """Load ShardedTensors onto this process group: the one unpickled tensors get inside the ``with``.

    Raises:
        RuntimeError: Inside another ``load_with_process_group``.

    Example:
        >>> with load_with_process_group(group):  # doctest: +SKIP
        ...     state = torch.load(path, weights_only=False)
    """
    if _LOADING.get() is not None:
        raise ProcessGroupError("load_with_process_group is already active: it cannot be nested")
    token = _LOADING.set(process_group)
    try:
        yield
    finally:
        _LOADING.reset(token)


def _get_current_process_group() -> dist.ProcessGroup:
    """The group of the enclosing ``load_with_process_group``, else the default group."""
    loading = _LOADING.get()
    return resolve(None) if loading is None else loading


@dataclass(frozen=True, slots=True)
class ProcessGroupState:
    """What a pickle remembers of the process group, to refuse another one on load."""

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
        """Check that this rank has the same place in ``group``.

        Raises:
            ProcessGroupError: It has not; says what differs.
        """
        now = ProcessGroupState.of(group)
        for name, what in (
            ("local_rank", "rank in the process group"),
            ("local_world_size", "size of the process group"),
            ("global_rank", "global rank"),
            ("global_world_size", "world size"),
        ):
            if getattr(now, name) != getattr(self, name):
                raise ProcessGroupError(
                    f"a ShardedTensor saved with {what} {getattr(self, name)} cannot be loaded with {what} "
                    f"{getattr(now, name)}; torch.distributed.checkpoint loads onto other ranks"
                )


def gather_error(group: dist.ProcessGroup, size: torch.Size, dst: int, out: torch.Tensor | None) -> Exception | None:
    """What is wrong with the arguments of a gather on this rank, None if nothing is."""
    here, world = dist.get_rank(group), dist.get_world_size(group)
    if not 0 <= dst < world:
        return ProcessGroupError(f"gather: dst={dst} is not a rank of the process group of {world}")
    if here != dst and out is not None:
        return LocalShardError(f"gather: out must be None on every rank but dst={dst}, got one on rank {here}")
    if here == dst and (out is None or out.size() != size):
        got = "None" if out is None else f"a tensor of size {tuple(out.size())}"
        return LocalShardError(f"gather: out must have size {tuple(size)} on dst={dst}, got {got}")
    return None


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank tells the others before data move."""

    error: Exception | None
    facts: dict[str, Any]


def agree(group: dist.ProcessGroup, facts: Mapping[str, Any], error: Exception | None = None) -> list[dict[str, Any]]:
    """Compare arguments over the group; all ranks return, or all raise the same error.

    Args:
        group: The ranks that make the call.
        facts: What must be equal on all of them, by name.  A name that begins with "~" is exchanged, not compared.
        error: What this rank found wrong already; it is raised on every rank.

    Returns:
        The facts of every rank, in group order.

    Raises:
        RankMismatchError: A fact differs; names both values and both ranks (ranks in the group).
        Exception: The error of the lowest rank that had one, saying which ranks if not all had the same.
    """
    report = _Report(_portable(error), dict(facts) if error is None else {})
    reports: list[Any] = [report]
    if dist.get_world_size(group) > 1:
        reports = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, report, group=group)
    failed = [rank for rank, each in enumerate(reports) if each.error is not None]
    if failed:
        raise _shared_error(reports[failed[0]].error, failed, len(reports)) from error
    for rank, each in enumerate(reports):
        for name, value in reports[0].facts.items():
            if not name.startswith("~") and each.facts.get(name) != value:
                raise RankMismatchError(
                    f"{name}={value} on rank: 0 does not match with {name}={each.facts.get(name)} on rank: {rank}"
                )
    return [each.facts for each in reports]


def _portable(error: Exception | None) -> Exception | None:
    """The error if it survives pickling, else a RuntimeError with its text: every rank must be able to raise it."""
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001, RUF100  # pickling runs code of the error's class: anything may come
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _shared_error(error: Exception, failed: list[int], world: int) -> Exception:
    if len(failed) == world:
        return error
    text = f"on rank(s) {', '.join(map(str, failed))} of the {world} in the process group: {error}"
    try:
        return type(error)(text)
    except TypeError:
        return RuntimeError(f"{type(error).__name__} {text}")


def devices_of_all(group: dist.ProcessGroup, device: torch.device) -> dict[int, torch.device]:
    """Global rank -> the device that it passed; all must be of one type."""
    reports = agree(group, {"device type": device.type, "~device": device})
    return {rank: report["~device"] for rank, report in zip(members(group), reports, strict=True)}


def comm_of(group: dist.ProcessGroup, device_type: str) -> Comm:
    """The communicator over all ranks of the group, in group order."""
    return line_mesh(group, device_type).comm(0)


def line_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """The 1-D mesh over the group's ranks, in group order."""
    return _line_mesh(group, device_type)


@lru_cache(maxsize=64)
def _line_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)


def mesh_of(group: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    """The mesh with these global ranks, all of the group, row-major; its axes' groups are made at first use."""
    if shape == (len(ranks),) and ranks == members(group):
        return line_mesh(group, device_type)
    return _grid_mesh(group, device_type, shape, ranks)


@lru_cache(maxsize=256)
def _grid_mesh(
    group: dist.ProcessGroup, device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...]
) -> DeviceMesh:
    line = DeviceMesh.from_group([group], device_type, ranks)
    return line if len(shape) == 1 else line.unflatten(0, shape)
