"""The default group, which is initialized if there is none; and agreement between ranks."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .. import _torch
from .._torch import ProcessGroup, Store
from ..accelerator import module_of, own_device
from ..argument_types import by_ranks, name_ranks, require, require_each, suggests_keywords
from ..errors import MeshError, MeshMismatchError, NoGroupError, PeerError

R = TypeVar("R")
# Bytes of the first message of a gathered object: 8 for its length, and the beginning of the
# object. Most objects need no second message.
_FIRST = 256
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorldPlace(NamedTuple):
    """The place of this process in the default group, and the group's backend.

    A mesh continues with another default group in which these are the same.
    """

    size: int
    rank: int
    backend: str


def world_place() -> WorldPlace | None:
    """Return the place of this process in the default group; None if there is no such group."""
    world = _torch.default_group()
    if world is None:
        return None
    return WorldPlace(world.size(), world.rank(), _torch.backend_config(world))


@suggests_keywords()
def restart_world(
    ranks: Sequence[int] | None = None, *, timeout: float | None = None
) -> ProcessGroup:
    """Destroy all groups and begin a new default group in the same processes; its ranks call this.

    Meshes that were made before continue with the new groups, and so do their DTensors and modules,
    if the world has as many ranks as before and every rank keeps its number. Otherwise make new
    meshes; every rank still has its shards (`local_shard`). The ranks meet in the store of the old
    group, so the process that has the store must be alive: the agent of torchrun, or else rank 0.

    Args:
        ranks: the ranks that continue, by their present numbers, in the order of their new numbers;
            by default all ranks. Each of them calls this with the same list; the others do not.
        timeout: seconds after which collectives of the new groups fail; by default as before.

    Returns:
        The new default group.

    Raises:
        NoGroupError: if there is no default group, or this rank does not continue.
        MeshTypeError: if `ranks` is not a sequence of integers, or `timeout` not a number.
        MeshError: if ranks are repeated, or not in the world.
        PeerError: if a rank did not arrive before the timeout; the old group still exists then.

    Example:
        >>> def example() -> float:
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     restart_world()
        ...     return all_reduce(torch.tensor(1.0), (mesh, 0)).item()
        >>> launch(example, 2)
        [2.0, 2.0]
    """
    world = require_world()
    ranks = range(world.size()) if ranks is None else ranks
    require_each(ranks, int, "restart_world takes a sequence of global ranks")
    require(timeout, int | float | None, "the timeout of a process group is a number of seconds")
    last = world.size() - 1
    is_repeated = len(set(ranks)) != len(ranks)
    if is_repeated or not all(0 <= rank <= last for rank in ranks):
        raise MeshError(f"restart_world takes distinct ranks from 0 to {last}, got {tuple(ranks)}")
    old_rank = world.rank()
    if old_rank not in ranks:
        raise NoGroupError(f"rank {old_rank} is not among {tuple(ranks)}, which continue")
    size = len(ranks)
    new_rank = ranks.index(old_rank)
    backend = _torch.backend_config(world)
    store = _torch.default_store()
    bound = world.bound_device_id
    number = 0
    span = _torch.timeout_of_any(world) if timeout is None else timedelta(seconds=timeout)
    if "fake" not in backend:
        # The number of restarts comes from the store, and not from this process, because processes
        # may have restarted different numbers of worlds.
        number = store.add(f"shoal_restarts/{old_rank}", 1)
        meeting = _torch.PrefixStore(f"shoal_meet_{number}", store)
        meet(meeting, ranks, old_rank, span, where="restart_world")
    del world
    # imported here, so that an import of this low-level module does not load `watch`
    from ..watch.backend_work import drain

    drain(span.total_seconds() if span is not None else 0.0)
    dist.destroy_process_group()
    store = _torch.PrefixStore(f"shoal_restart_{number}", store)
    dist.init_process_group(
        backend, store=store, rank=new_rank, world_size=size, timeout=span, device_id=bound
    )
    return require_world()


def meet(
    store: Store, ranks: Sequence[int], own_rank: int, timeout: timedelta | None, where: str
) -> None:
    """Wait until all ranks have arrived.

    Ranks use it before a group is destroyed: a rank that still connects to the group would fail.

    Args:
        store: a store that is used for this meeting only.
        ranks: the ranks that meet.
        own_rank: this rank.
        timeout: the longest wait; None for half an hour.
        where: the name of the meeting, for the error.

    Raises:
        PeerError: if a rank did not arrive in time.
    """
    store.set(str(own_rank), "here")
    try:
        store.wait([str(rank) for rank in ranks], timeout or timedelta(minutes=30))
    except RuntimeError as error:
        missing = tuple(rank for rank in ranks if not store.check([str(rank)]))
        raise PeerError(f"{name_ranks(missing)} did not reach {where}", missing) from error


def require_world() -> ProcessGroup:
    """Return the default group; NoGroupError if there is none."""
    world = _torch.default_group()
    if world is None:
        raise NoGroupError(
            "this needs a default process group: call init_device_mesh or "
            "torch.distributed.init_process_group first (or shoal_mesh.testing.fake_world for "
            "one process); abstract_mesh does not need a process group"
        )
    return world


def ensure_world(device_type: str) -> ProcessGroup:
    """Return the default group, and choose this rank's device.

    If there is no group, it is initialized from the environment, as torchrun sets it.

    Raises:
        MeshError: if there is no group and the environment does not describe one.
    """
    world = _torch.default_group()
    if world is None:
        missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
        if missing:
            names = ", ".join(missing)
            raise MeshError(
                f"no process group exists, and the environment does not describe one ({names} not "
                "set): start the script with torchrun or shoal_mesh.launch, call "
                "torch.distributed.init_process_group, or use abstract_mesh where no communication "
                "is needed"
            )
        dist.init_process_group()
        atexit.register(_end_world)
        world = require_world()
    if device_type not in {"cpu", "meta"}:
        module = module_of(device_type)
        has_devices = module is not None and module.is_available()
        # Each rank of a host has a device of its own, unless the program has chosen one.
        if has_devices and not module.is_initialized():
            local_rank = int(os.environ.get("LOCAL_RANK", world.rank()))
            module.set_device(local_rank % module.device_count())
        # One process plans for devices of other machines in a world of the backend "fake".
        if not has_devices and dist.get_backend(world) != "fake":
            _warn_of_no_device(device_type)
    return world


def _warn_of_no_device(device_type: str) -> None:
    warnings.warn(
        f"a mesh of {device_type!r} devices on a machine without one (torch {torch.__version__}): "
        "tensors that are on the CPU stay there, and no tensor can be created on the mesh; use "
        "'cpu', or shoal_mesh.testing.fake_world or abstract_mesh for planning",
        stacklevel=5,
    )


def _end_world() -> None:
    """Destroy, at exit, the default group that `ensure_world` initialized.

    Threads of gloo take the interpreter's lock to free the tensors of the last collective. If the
    interpreter is ending, this aborts the process (in one of eight runs). A group waits for its
    threads when it is destroyed. A group that a mesh still references is not destroyed, so its
    threads need the short sleep.
    """
    if _torch.default_group() is not None:
        dist.destroy_process_group()
        # the tensors are freed within microseconds after the end of a collective
        time.sleep(0.01)


def device_of(group: ProcessGroup) -> torch.device:
    """Return a device whose tensors the group can send: the CPU if it can."""
    # "cpu:gloo,cuda:nccl": cpu and cuda
    parts = _torch.backend_config(group).split(",")
    kinds = {part.partition(":")[0] for part in parts}
    return own_device("cpu" if "cpu" in kinds else min(kinds))


def agree(
    step: Callable[[], R],
    group: ProcessGroup | None = None,
    error_type: type[Exception] | None = None,
    prefix: str = "",
) -> list[R]:
    """Run a step on every rank; if it raises on some ranks, all of them raise.

    Args:
        step: the check or the work of this rank. Its result is pickled, so ranks must trust each
            other.
        group: the ranks that make the call; by default the world, or this process alone if there is
            no world.
        error_type: the class of the error; by default the class of the lowest rank's error.
        prefix: the beginning of the error's text.

    Returns:
        The result of every rank, by rank in the group.

    Raises:
        Exception: names the ranks that raised, unless all ranks raised the same error.

    Example:
        >>> def example() -> list[int]:
        ...     return agree(lambda: 10 * dist.get_rank())
        >>> launch(example, 2)[0]
        [0, 10]
    """
    group = _torch.default_group() if group is None else group
    own_error: Exception | None = None
    try:
        report = _sendable((step(), None))
    except Exception as error:
        # Any error is reported: the other ranks wait for a report.
        own_error = error
        if error_type is not None and not isinstance(error, error_type):
            own_error = error_type(f"{type(error).__name__}: {error}")
        try:
            report = _sendable((None, own_error))
        except Exception:
            # the class of the error cannot be pickled, or takes other arguments than one text
            report = pickle.dumps((None, RuntimeError(f"{type(own_error).__name__}: {own_error}")))
    pickled = [report]
    ranks = [0]
    if group is not None:
        pickled = all_gather_objects(group, report)
        ranks = dist.get_process_group_ranks(group)
    reports = [pickle.loads(data) for data in pickled]
    errors = {}
    for rank, (_, raised) in zip(ranks, reports, strict=True):
        if raised is not None:
            errors[rank] = raised
    if errors:
        raise _error_of_all(errors, len(ranks), prefix) from own_error
    return [value for value, _ in reports]


def _sendable(report: Any) -> bytes:
    """Pickle a report; raise if it cannot be pickled or unpickled."""
    data = pickle.dumps(report)
    # An object that can be pickled may still fail to be unpickled.
    pickle.loads(data)
    return data


def _error_of_all(errors: Mapping[int, Exception], size: int, prefix: str) -> Exception:
    """Return one error for all ranks, such as `rank 1: OSError: disk full`.

    It has the class of the lowest rank's error.
    """
    first = errors[min(errors)]
    cls = type(first)
    text_of_rank = {}
    for rank, error in errors.items():
        is_same_kind = type(error) is cls
        text_of_rank[rank] = str(error) if is_same_kind else f"{type(error).__name__}: {error}"
    texts = list(text_of_rank.values())
    are_equal = len(texts) == size and len(set(texts)) == 1
    if are_equal and not prefix:
        return first
    text = texts[0]
    if not are_equal:
        text = "; ".join(f"rank {rank}: {text}" for rank, text in text_of_rank.items())
    if prefix:
        text = f"{prefix}: {text}"
    try:
        return cls(text)
    except TypeError:
        # the class of the error takes other arguments than one text
        return RuntimeError(f"{cls.__name__}: {text}")


def check_agreement(description: str) -> None:
    """Raise MeshMismatchError on all ranks unless all ranks of the world pass the same text.

    It takes one all-gather of 16 bytes. Only if that shows a difference, another all-gather sends
    the texts.
    """
    world = require_world()
    if world.size() == 1 or "fake" in _torch.backend_config(world):
        return
    digest = hashlib.blake2b(description.encode(), digest_size=16).digest()
    digests = _all_gather_bytes(world, digest)
    if len(set(digests)) == 1:
        return
    descriptions = all_gather_objects(world, description)
    ranks_by_text = by_ranks(dict(enumerate(descriptions)))
    lines = ["ranks passed different arguments to one mesh:"]
    lines += [f"  {ranks}: {text}" for ranks, text in ranks_by_text.items()]
    lines.append("pass the same on every rank")
    raise MeshMismatchError("\n".join(lines))


def all_gather_objects(group: ProcessGroup, value: object) -> list[Any]:
    """Return the value of every rank of a group, by rank in the group.

    Values are pickled, so ranks must trust each other. The function of c10d needs numpy, which
    torch does not depend on.
    """
    if "fake" in _torch.backend_config(group):
        return [value] * group.size()
    data = pickle.dumps(value)
    data = len(data).to_bytes(8, "little") + data
    rows = _all_gather_bytes(group, data[:_FIRST].ljust(_FIRST, b"\0"))
    longest = 8 + max(int.from_bytes(row[:8], "little") for row in rows)
    if longest > _FIRST:
        padded = data[_FIRST:].ljust(longest - _FIRST, b"\0")
        rest = _all_gather_bytes(group, padded)
        rows = [row + more for row, more in zip(rows, rest, strict=True)]
    # A pickle marks its own end, so the padding does no harm.
    return [pickle.loads(row[8:]) for row in rows]


def _all_gather_bytes(group: ProcessGroup, data: bytes) -> list[bytes]:
    """Return the bytes of every rank of a group, which must be equally many on all ranks.

    Dispatch modes neither see the tensors nor replace them by fake ones.
    """
    # imported here for the same reason as `drain` in `restart_world`
    from ..watch.backend_work import wait_for_members

    cls: Any = type(group)
    size = len(data)
    with _torch.unseen():
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
        received = torch.empty(size * group.size(), dtype=torch.uint8, device=sent.device)
        all_gather = _torch.call_of(cls, "all_gather")
        work = all_gather(group, received, sent, _torch.AllgatherOptions())
        wait_for_members(work, group, "a comparison of the ranks' arguments or memory")
        gathered = bytes_of(received.cpu())
    return [gathered[start : start + size] for start in range(0, len(gathered), size)]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
