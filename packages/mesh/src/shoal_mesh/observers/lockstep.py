"""lockstep: ranks compare what they are about to do before every collective, so that a mismatch raises and not hangs.

Inside the block every rank of a communicator writes a description of its collective into the store and reads those of
the others, before the collective starts. A difference, or a rank that does not come, raises LockstepError on every live
rank. It names the ranks, what each was about to do, for what purpose (`events.purpose`) and at which line. For
debugging: a collective costs a round trip to the store per rank. Collectives of shoal are compared, not those of
others.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from .. import _torch
from .._torch import ProcessGroup, Store
from ..argument_types import require
from ..errors import LockstepError, MeshError
from ..events import Event, observe, observers, unobserve
from ..groups.world import require_world

__all__ = ["describe", "difference", "in_lockstep", "lockstep"]

# How many blocks each world has had, so that no two blocks use the same keys; an entry goes with its group.
_BLOCKS: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_POLL = 0.01  # seconds
_LIBRARY = re.compile(r"(^|\.)(shoal_\w+|torch)(\.|$)")


@contextmanager
def lockstep(*, timeout: float = 30.0) -> Iterator[None]:
    """Compare what the ranks are about to do, before every collective inside the block; entered by all ranks.

    Compared are the collective, its reduction, dtype, shapes, dims, sizes and root, how many elements each rank sends
    to each other rank, and the `purpose`, which must therefore be the same text on all ranks. So two collectives of
    equal shapes that are swapped on one rank raise if their purposes differ.

    Args:
        timeout: seconds to wait for the slowest rank.

    Raises:
        LockstepError: ranks were about to run different collectives, or one did not come in time; on all ranks.
        NoGroupError: there is no default process group.
        MeshTypeError: the timeout is no number.
        MeshError: the timeout is not positive.

    Example:
        >>> def example() -> float:
        ...     with lockstep(), purpose("sum of losses"):
        ...         return all_reduce(torch.tensor(1.5), comm_over((0, 1))).item()
        >>> launch(example, 2)
        [3.0, 3.0]
    """
    require(timeout, int | float, "the timeout of lockstep is a number of seconds")
    if not timeout > 0:
        raise MeshError(f"the timeout of lockstep is a positive number of seconds, got {timeout}")
    world = require_world()
    if "fake" in _torch.backend_config(world):
        yield  # one process: nobody to compare with
        return
    block = next(_BLOCKS.setdefault(world, count()))
    comparison = _Comparison(_torch.default_store(), f"shoal_lockstep/{block}", world.rank(), timeout)
    observe(comparison)
    try:
        yield
    finally:
        comparison.leave()
        unobserve(comparison)


def in_lockstep() -> bool:
    """Whether a `lockstep` block is open, so that layers above may check more than they usually would.

    Example:
        >>> in_lockstep()
        False
    """
    return bool(observers) and any(isinstance(observer, _Comparison) for observer in observers)


class _Comparison:
    """The observer of one block on one rank."""

    def __init__(self, store: Store, prefix: str, rank: int, timeout: float) -> None:
        self._store, self._prefix, self._rank, self._timeout = store, prefix, rank, timeout
        self._steps: Counter[str] = Counter()

    def before(self, event: Event) -> None:
        """Write what this rank is about to do, and compare it with what the others write."""
        comm = event.comm
        step = self._steps[comm.name]
        self._steps[comm.name] += 1
        own = describe(event)
        title = f"at step {step} along {'x'.join(comm.axes)}"
        where = f"{self._prefix}/{comm.name}/{step}"
        self._store.set(f"{self._prefix}/last/{self._rank}", f"{title}: {as_text(own)}")
        self._store.set(f"{where}/{self._rank}", json.dumps(own))
        described = {self._rank: own}
        deadline = time.monotonic() + self._timeout
        while len(described) < comm.size:
            for rank in comm.ranks:
                if rank not in described and self._store.check([f"{where}/{rank}"]):
                    described[rank] = json.loads(self._store.get(f"{where}/{rank}"))
            self._raise_alarm_of_others()
            if len(described) < comm.size:
                if time.monotonic() > deadline:
                    self._alarm(self._late(comm.ranks, described, title))
                time.sleep(_POLL)
        text = difference({rank: described[rank] for rank in comm.ranks})
        if text:
            self._alarm(f"ranks are about to run different collectives {title}:\n{text}")

    def after(self, event: Event) -> None:
        """Nothing to do."""

    def leave(self) -> None:
        """Say that this rank has left the block, for those that wait for it."""
        self._store.set(f"{self._prefix}/last/{self._rank}", "left the lockstep block")

    def _late(self, ranks: tuple[int, ...], described: Mapping[int, Mapping[str, Any]], title: str) -> str:
        lines = [f"after {self._timeout:g} s not all ranks have come {title}:"]
        lines += [f"  rank {rank} waits in {as_text(described[rank])}" for rank in ranks if rank in described]
        for rank in ranks:
            if rank not in described:
                key = f"{self._prefix}/last/{rank}"
                last = self._store.get(key).decode() if self._store.check([key]) else "no collective yet"
                lines.append(f"  rank {rank} has not come; last seen: {last}")
        return "\n".join(lines)

    def _alarm(self, text: str) -> None:
        self._store.set(f"{self._prefix}/alarm", text)
        raise LockstepError(text)

    def _raise_alarm_of_others(self) -> None:
        if self._store.check([f"{self._prefix}/alarm"]):
            raise LockstepError(self._store.get(f"{self._prefix}/alarm").decode())


def describe(event: Event) -> dict[str, Any]:
    """What a rank is about to do, as values that JSON has."""
    return {
        "op": event.op,
        "reduce": event.reduce_op,
        "dtypes": [str(t.dtype).removeprefix("torch.") for t in event.tensors],
        "same": {name: str(value) for name, value in event.same.items()},
        "sends": event.sends,
        "receives": event.receives,
        "purpose": event.purpose,
        "at": _call_site(),
    }


def _call_site() -> str:
    """The innermost line of the program that is neither ours nor torch's."""
    frame = sys._getframe()
    while frame.f_back is not None and _LIBRARY.search(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def as_text(described: Mapping[str, Any]) -> str:
    """A description as a line for people."""
    same = ", ".join(f"{name} {value}" for name, value in described["same"].items())
    words = [described["op"], described["reduce"], *sorted(set(described["dtypes"])), same]
    if described["sends"] is not None:
        words.append(f"sends {list(described['sends'])}, receives {list(described['receives'])}")
    text = " ".join(word for word in words if word)
    return f"{text}{', for ' if described['purpose'] else ''}{described['purpose']} ({described['at']})"


def difference(described: Mapping[int, Mapping[str, Any]]) -> str:
    """The lines of an error for descriptions that do not fit together; '' where they do.

    Args:
        described: rank -> description, in index order of the communicator.
    """
    values = list(described.values())
    # A rank that neither sends nor receives a block does not know the dtype of the others.
    dtypes = {tuple(each["dtypes"]) for each in values if each["dtypes"]}
    same = {json.dumps([each[key] for key in ("op", "reduce", "same", "purpose")]) for each in values}
    if len(same) == 1 and len(dtypes) <= 1 and not _unmatched(values):
        return ""
    by_text: dict[str, list[int]] = {}
    for rank, each in sorted(described.items()):
        by_text.setdefault(as_text(each), []).append(rank)
    return "\n".join(f"  rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}: {t}" for t, r in by_text.items())


def _unmatched(values: list[Mapping[str, Any]]) -> bool:
    """Whether some rank expects another number of elements than its peer sends."""
    if any(each["sends"] is None for each in values):
        return False
    return any(
        sender["sends"][j] != receiver["receives"][i]
        for i, sender in enumerate(values)
        for j, receiver in enumerate(values)
    )
