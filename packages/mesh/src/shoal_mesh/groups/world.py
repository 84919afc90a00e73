"""The default group: initialised when there is none; and what ranks of a group agree on, or all raise."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import _torch
from .._torch import ProcessGroup, Store
from ..accelerator import module_of, own_device
from ..argument_types import by_ranks, name_ranks, require, require_each
from ..errors import MeshError, MeshMismatchError, NoGroupError, PeerError

R = TypeVar("R")
# bytes of a gathered object that come with its length: most need no second message
_FIRST = 256


def world_place() -> tuple[int, int, str] | None:
    """What meshes know of the default group: number of ranks, this one, and the backend; None when there is none.

    A mesh goes on with another default group in which these are the same.
    """
    world = _torch.default_group()
    return None if world is None else (world.size(), world.rank(), _torch.backend_config(world))


def restart_world(
    ranks: Sequence[int] | None = None, *, timeout: float | None = None
) -> ProcessGroup:
    """The new default group, begun in the same processes after all groups are destroyed; called by all ranks of it.

    Meshes that were made before go on with the new groups, and with them DTensors and modules, as
    long as the world has as many ranks as before and every rank keeps its number. Otherwise make
    new meshes: what a rank holds is still there (`local_shard`). The ranks meet in the store of the
    old group, so the process that holds it has to live: the agent of torchrun, else rank 0.

    Args:
        ranks: the ranks that go on, by their present numbers, in the order of their new ones; all
            by default. Every one of them calls this with the same list, the others do not.
        timeout: seconds after which collectives of the new groups give up; by default as before.

    Raises:
        NoGroupError: there is no default group, or this rank does not go on.
        MeshTypeError: the ranks are no sequence of integers, or the timeout is no number.
        MeshError: ranks are repeated, or not in the world.
        PeerError: not all of the ranks came before the timeout; the old group is still there.

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
    if len(set(ranks)) != len(ranks) or not all(0 <= rank < world.size() for rank in ranks):
        raise MeshError(
            f"restart_world takes distinct ranks from 0 to {world.size() - 1}, got {tuple(ranks)}"
        )
    if world.rank() not in ranks:
        raise NoGroupError(f"rank {world.rank()} is not among {tuple(ranks)}, which go on")
    size = len(ranks)
    own = ranks.index(world.rank())
    backend = _torch.backend_config(world)
    store = _torch.default_store()
    bound = world.bound_device_id
    number = 0
    span = _torch.timeout_of_any(world) if timeout is None else timedelta(seconds=timeout)
    if "fake" not in backend:
        # Counted in the store: processes may have been in other worlds, and have restarted those.
        number = store.add(f"shoal_restarts/{world.rank()}", 1)
        meet(
            _torch.PrefixStore(f"shoal_meet_{number}", store),
            ranks,
            world.rank(),
            span,
            where="restart_world",
        )
    del world
    # below most modules of this layer: read when it is needed
    from ..shared_memory.backend_work import settle

    settle(span.total_seconds() if span is not None else 0.0)
    dist.destroy_process_group()
    store = _torch.PrefixStore(f"shoal_restart_{number}", store)
    dist.init_process_group(
        backend, store=store, rank=own, world_size=size, timeout=span, device_id=bound
    )
    return require_world()


def meet(
    store: Store, ranks: Sequence[int], own: int, timeout: timedelta | None, where: str
) -> None:
    """Until all ranks are here: a group that one rank ends while another still connects to it fails there.

    They meet in a store of their own, in which nobody has met; PeerError if one does not come, in
    half an hour by default, to `where`.
    """
    store.set(str(own), "here")
    try:
        store.wait([str(rank) for rank in ranks], timeout or timedelta(minutes=30))
    except RuntimeError as error:
        missing = tuple(rank for rank in ranks if not store.check([str(rank)]))
        raise PeerError(f"{name_ranks(missing)} did not come to {where}", missing) from error


def require_world() -> ProcessGroup:
    """The default group; NoGroupError if there is none."""
    world = _torch.default_group()
    if world is None:
        raise NoGroupError(
            "this needs a default process group: call init_device_mesh or "
            "torch.distributed.init_process_group first "
            "(or shoal_mesh.testing.fake_world for one process); abstract_mesh needs none"
        )
    return world


def ensure_world(device_type: str) -> ProcessGroup:
    """The default group, initialised from the environment (torchrun) when there is none, and this rank's device set.

    MeshError if the environment does not describe one.
    """
    world = _torch.default_group()
    if world is None:
        missing = [
            name
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
            if name not in os.environ
        ]
        if missing:
            raise MeshError(
                f"no process group and none described by the environment ({', '.join(missing)} not "
                "set): start the "
                "script with torchrun or shoal_mesh.launch, call "
                "torch.distributed.init_process_group, or use "
                "abstract_mesh where no communication is needed"
            )
        dist.init_process_group()
        atexit.register(_end_world)
        world = require_world()
    if device_type not in {"cpu", "meta"}:
        # each rank of a host has its own device, unless the program has chosen one
        module = module_of(device_type)
        if module is not None and module.is_available() and not module.is_initialized():
            module.set_device(
                int(os.environ.get("LOCAL_RANK", world.rank())) % module.device_count()
            )
    return world


def _end_world() -> None:
    """At exit, end the default group that this file began, of which threads of gloo may still need the interpreter.

    They take its lock to drop the tensors of the last collective; where it is ending, that aborts
    the process (seen in one of eight). A group that is destroyed waits for its threads; of one that
    a mesh still holds, they run meanwhile.
    """
    if _torch.default_group() is not None:
        dist.destroy_process_group()
        # seconds; from the end of a collective to the drop are microseconds
        time.sleep(0.01)


def device_of(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group can send: the CPU where it can."""
    kinds = {part.partition(":")[0] for part in _torch.backend_config(group).split(",")}
    return own_device("cpu" if "cpu" in kinds else min(kinds))


def agree(
    step: Callable[[], R],
    group: ProcessGroup | None = None,
    error_type: type[Exception] | None = None,
    what: str = "",
) -> list[R]:
    """What a step returns on every rank, by rank in the group; if it raises on some ranks, all of them raise.

    Args:
        step: what this rank checks or does. What it returns is pickled, so only for ranks that
            trust each other.
        group: the ranks that make the call; by default the world, or this process alone where there
            is none.
        error_type: the class of what is raised; by default that of the error of the lowest rank.
        what: how the text of the error begins.

    Raises:
        Exception: names the ranks that raised, unless all of them raised the same.

    Example:
        >>> def example() -> list[int]:
        ...     return agree(lambda: 10 * dist.get_rank())
        >>> launch(example, 2)[0]
        [0, 10]
    """
    group = _torch.default_group() if group is None else group
    own: Exception | None = None
    try:
        report = _sendable((step(), None))
    except Exception as error:
        # whatever it is, the other ranks wait for a report
        own = error
        if error_type is not None and not isinstance(error, error_type):
            own = error_type(f"{type(error).__name__}: {error}")
        try:
            report = _sendable((None, own))
        except Exception:
            # its class cannot be pickled, or takes other arguments than its text
            report = pickle.dumps((None, RuntimeError(f"{type(own).__name__}: {own}")))
    reports = [
        pickle.loads(each)
        for each in ([report] if group is None else all_gather_objects(group, report))
    ]
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    errors = {
        rank: error for rank, (_, error) in zip(ranks, reports, strict=True) if error is not None
    }
    if errors:
        raise _error_of_all(errors, len(ranks), what) from own
    return [value for value, _ in reports]


def _sendable(report: Any) -> bytes:
    data = pickle.dumps(report)
    # what can be sent may still not come back
    pickle.loads(data)
    return data


def _error_of_all(errors: Mapping[int, Exception], size: int, what: str) -> Exception:
    """One error for all ranks, of the class of the lowest one's: `rank 1: OSError: disk full`."""
    first = errors[min(errors)]
    kind = type(first)
    texts = [
        str(error) if type(error) is kind else f"{type(error).__name__}: {error}"
        for error in errors.values()
    ]
    alike = len(texts) == size and len(set(texts)) == 1
    if alike and not what:
        return first
    by_rank = [f"rank {rank}: {text}" for rank, text in zip(errors, texts, strict=True)]
    text = ": ".join([*([what] if what else []), texts[0] if alike else "; ".join(by_rank)])
    try:
        return kind(text)
    except TypeError:
        # its class takes other arguments than one text
        return RuntimeError(f"{kind.__name__}: {text}")


def check_agreement(description: str) -> None:
    """Raise MeshMismatchError on all ranks unless all ranks of the world pass the same text.

    One all-gather of 16 bytes; only where it shows a difference, another one sends the texts.
    """
    world = require_world()
    if world.size() == 1 or "fake" in _torch.backend_config(world):
        return
    digest = hashlib.blake2b(description.encode(), digest_size=16).digest()
    if len(set(_all_gather_bytes(world, digest))) > 1:
        texts = by_ranks(dict(enumerate(all_gather_objects(world, description))))
        lines = [f"  {ranks}: {text}" for ranks, text in texts.items()]
        raise MeshMismatchError(
            "\n".join(
                [
                    "ranks passed different arguments to one mesh:",
                    *lines,
                    "pass the same on every rank",
                ]
            )
        )


def all_gather_objects(group: ProcessGroup, value: object) -> list[Any]:
    """What every rank of a group passes, by rank in the group; pickled, so only for ranks that trust each other.

    c10d's own needs numpy, which is no dependency of torch.
    """
    if "fake" in _torch.backend_config(group):
        return [value] * group.size()
    data = pickle.dumps(value)
    data = len(data).to_bytes(8, "little") + data
    rows = _all_gather_bytes(group, data[:_FIRST].ljust(_FIRST, b"\0"))
    longest = 8 + max(int.from_bytes(row[:8], "little") for row in rows)
    if longest > _FIRST:
        rest = _all_gather_bytes(group, data[_FIRST:].ljust(longest - _FIRST, b"\0"))
        rows = [row + more for row, more in zip(rows, rest, strict=True)]
    return [pickle.loads(row[8:]) for row in rows]  # a pickle says where it ends


def _all_gather_bytes(group: ProcessGroup, data: bytes) -> list[bytes]:
    """The bytes of every rank of a group, equally many on all of them; no mode makes them fake, or records them."""
    from ..shared_memory.backend_work import BackendWork  # as above

    kind: Any = type(group)
    with _torch.unseen():
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device_of(group))
        every = torch.empty(len(data) * group.size(), dtype=torch.uint8, device=own.device)
        work = _torch.call_of(kind, "all_gather")(group, every, own, _torch.AllgatherOptions())
        BackendWork(work, group, None).wait()
        gathered = bytes_of(every.cpu())
    return [gathered[i : i + len(data)] for i in range(0, len(gathered), len(data))]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The memory of a contiguous CPU tensor."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
