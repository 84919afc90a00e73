"""The default group: brought up when absent, and asked once whether all ranks mean the same mesh."""

from __future__ import annotations

import hashlib
import os
from itertools import count
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from . import _torch
from ._torch import ProcessGroup
from .errors import MeshError, MeshMismatchError
from .groups import require_world

__all__ = ["check_agreement", "device_of", "ensure_world", "world_id"]

# The one mutable state of this file: a number per lifetime of the default group, so that a mesh of a destroyed world
# is not equal to its successor. An entry goes with its group.
_IDS: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_NEXT = count(1)


def world_id() -> int:
    """A number that is new for every default group of this process; 0 when there is none."""
    world = _torch.default_group()
    if world is None:
        return 0
    found = _IDS.get(world)
    if found is None:
        found = _IDS[world] = next(_NEXT)
    return found


def ensure_world(device_type: str) -> ProcessGroup:
    """The default group, initialised from the environment (torchrun) when there is none, and this rank's device set.

    Raises:
        MeshError: there is no default group and the environment does not describe one.
    """
    world = _torch.default_group()
    if world is None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise MeshError(
                f"no process group and none described by the environment ({', '.join(missing)} not set): start the "
                "script with torchrun or shoal_mesh.launch, call torch.distributed.init_process_group, or use "
                "abstract_mesh where no communication is needed"
            )
        dist.init_process_group()
        world = require_world()
    if device_type not in {"cpu", "meta"}:
        _set_device(device_type, world.rank())
    return world


def _set_device(device_type: str, rank: int) -> None:
    """Give each rank of a host its own device, unless the program has chosen one."""
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return
    if not module.is_initialized():
        module.set_device(int(os.environ.get("LOCAL_RANK", rank)) % module.device_count())


def device_of(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group can send: the CPU where it can."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    kind = next(iter(sorted(kinds)))
    return torch.device(kind, getattr(torch, kind).current_device())


def check_agreement(description: str) -> None:
    """Raise MeshMismatchError on every rank unless all ranks of the world pass the same text.

    One all-gather of 16 bytes; only when it finds a difference, a second one carries the texts.
    """
    world = require_world()
    if world.size() == 1 or "fake" in _torch.backend_config(world):
        return
    digest = hashlib.blake2b(description.encode(), digest_size=16).digest()
    device = device_of(world)
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    every = torch.empty(16 * world.size(), dtype=torch.uint8, device=device)
    world._allgather_base(every, own).wait()
    rows = every.view(-1, 16)
    if bool((rows == rows[0]).all()):
        return
    texts: list[str] = [""] * world.size()
    dist.all_gather_object(texts, description)
    raise MeshMismatchError(_difference(texts))


def _difference(texts: list[str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    lines = [f"  rank{'s' if len(r) > 1 else ''} {_ranges(r)}: {text}" for text, r in by_text.items()]
    return "\n".join(["ranks passed different arguments to one mesh:", *lines, "pass the same on every rank"])


def _ranges(ranks: list[int]) -> str:
    """Sorted ranks as text: `0-3, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
