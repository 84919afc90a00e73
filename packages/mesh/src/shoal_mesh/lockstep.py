"""lockstep: find the rank that left the dance, before the hang.

Inside the block every rank of a communicator writes what it is about to do into the store and reads what the others
wrote, before the collective starts. A difference, or a rank that never comes, raises LockstepError on every live rank:
it names the ranks, what each was about to do and what it said it was doing (`observe.purpose`). For debugging: a
collective costs a round trip to the store per rank. Collectives of shoal are checked, not those of others.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from . import _torch
from ._torch import ProcessGroup, Store
from .collectives import Along, all_gather, resolve
from .errors import LockstepError
from .groups import require_world
from .observe import Event, observe, observers, unobserve

__all__ = ["check_replicas", "in_lockstep", "lockstep"]

# How often each world was watched, so that no two blocks share keys; an entry goes with its group.
_TIMES: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_POLL = 0.01  # seconds


@contextmanager
def lockstep(*, timeout: float = 30.0) -> Iterator[None]:
    """Compare what the ranks are about to do, before every collective inside the block; entered by all ranks.

    Args:
        timeout: seconds to wait for the slowest rank.

    Raises:
        LockstepError: ranks were about to run different collectives, or one did not come in time.
    """
    world = require_world()
    if "fake" in _torch.backend_config(world):
        yield  # one process: nobody to compare with
        return
    store = _torch.default_store()
    watch = _Watch(store, f"shoal_lockstep/{next(_TIMES.setdefault(world, count()))}", world.rank(), timeout)
    observe(watch)
    try:
        yield
    finally:
        watch.leave()
        unobserve(watch)


def in_lockstep() -> bool:
    """Whether a `lockstep` block is open, so that layers above may check more than they usually would."""
    return any(isinstance(observer, _Watch) for observer in observers)


class _Watch:
    """The observer of one block on one rank."""

    def __init__(self, store: Store, prefix: str, rank: int, timeout: float) -> None:
        self._store, self._prefix, self._rank, self._timeout = store, prefix, rank, timeout
        self._steps: Counter[str] = Counter()

    def before(self, event: Event) -> None:
        """Post this rank's intention and compare it with the others'."""
        comm = event.comm
        step = self._steps[comm.name]
        self._steps[comm.name] += 1
        text = describe(event)
        where = f"{self._prefix}/{comm.name}/{step}"
        self._store.set(f"{self._prefix}/last/{self._rank}", f"step {step} along {'x'.join(comm.axes)}: {text}")
        self._store.set(f"{where}/{self._rank}", text)
        found = {self._rank: text}
        deadline = time.monotonic() + self._timeout
        while len(found) < comm.size:
            for rank in comm.ranks:
                if rank not in found and self._store.check([f"{where}/{rank}"]):
                    found[rank] = self._store.get(f"{where}/{rank}").decode()
            self._heed_alarm()
            if len(found) < comm.size:
                if time.monotonic() > deadline:
                    self._alarm(self._late(comm.ranks, found, step, comm.axes))
                time.sleep(_POLL)
        if len({_comparable(t) for t in found.values()}) > 1:
            self._alarm(_difference(found, step, comm.axes))

    def after(self, event: Event) -> None:
        """Nothing to do."""

    def leave(self) -> None:
        """Say that this rank has left the block, for those that wait for it."""
        self._store.set(f"{self._prefix}/last/{self._rank}", "left the lockstep block")

    def _late(self, ranks: tuple[int, ...], found: dict[int, str], step: int, axes: tuple[str, ...]) -> str:
        lines = [f"after {self._timeout:g} s not all ranks have come to step {step} along {'x'.join(axes)}:"]
        lines += [f"  rank {rank} waits in {found[rank]}" for rank in ranks if rank in found]
        for rank in ranks:
            if rank not in found:
                key = f"{self._prefix}/last/{rank}"
                last = self._store.get(key).decode() if self._store.check([key]) else "no collective yet"
                lines.append(f"  rank {rank} has not come; last seen: {last}")
        return "\n".join(lines)

    def _alarm(self, text: str) -> None:
        self._store.set(f"{self._prefix}/alarm", text)
        raise LockstepError(text)

    def _heed_alarm(self) -> None:
        if self._store.check([f"{self._prefix}/alarm"]):
            raise LockstepError(self._store.get(f"{self._prefix}/alarm").decode())


def describe(event: Event) -> str:
    """What a rank is about to do, as JSON text: op, reduction, shapes, dtype and purpose."""
    return json.dumps(
        {
            "op": event.op,
            "reduce": event.reduce_op,
            "shapes": [list(t.shape) for t in event.tensors],
            "dtype": [str(t.dtype) for t in event.tensors],
            "for": event.purpose,
            "dims": [t.ndim for t in event.tensors],
        }
    )


def _comparable(text: str) -> str:
    """What must be equal on all ranks: shapes may differ where blocks may."""
    told = json.loads(text)
    if told["op"] == "scatter":
        return json.dumps([told["op"], told["for"]])
    exact = told["op"] in {"all_reduce", "broadcast", "reduce_scatter_tensor"}
    return json.dumps(
        [told["op"], told["reduce"], told["dtype"], told["for"], told["shapes"] if exact else told["dims"]]
    )


def _difference(found: dict[int, str], step: int, axes: tuple[str, ...]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank in sorted(found):
        by_text.setdefault(found[rank], []).append(rank)
    lines = [f"ranks are about to run different collectives at step {step} along {'x'.join(axes)}:"]
    lines += [f"  rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {text}" for text, r in by_text.items()]
    return "\n".join(lines)


def check_replicas(tensor: Tensor, comm: Along, what: str = "tensor") -> None:
    """Raise LockstepError on every rank unless the ranks' tensors are equal, bit for bit.

    Args:
        tensor: this rank's replica.
        comm: a communicator, or (mesh, axes).
        what: what to call it in the error.
    """
    comm = resolve(comm)
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(plain.shape)}{plain.dtype}".encode(), digest_size=16)
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(tensor.device)
    every = [row.tobytes() for row in all_gather(own, comm).view(comm.size, -1).cpu().numpy()]
    counts = Counter(every)
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    wrong = [rank for rank, row in zip(comm.ranks, every, strict=True) if row != usual]
    raise LockstepError(
        f"replicas of {what} {tuple(tensor.shape)} differ along {'x'.join(comm.axes)}: ranks {wrong} have other bits "
        f"than {[rank for rank in comm.ranks if rank not in wrong]}"
    )
