"""lockstep: ranks compare what they are about to do before every collective, so that a mismatch raises and not hangs.

Inside the block every rank says before each collective what it is about to do, as numbers and as a line for people. On
one host it says so in shared memory, and nobody waits: of ranks that differ the last one sees it before it starts, and
the others hear of it where they wait for that one. Between hosts the numbers travel in an all-gather. The error is the
same everywhere and names the ranks, what each was about to do, for what purpose (`events.purpose`) and at which lines.
The store is asked only by a rank that has waited for a while: who has left the block, and who waits where. Collectives
of shoal are compared, not those of others.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .. import _torch
from .._torch import ProcessGroup, Store
from ..argument_types import require
from ..collectives import backend_calls
from ..errors import LockstepError, MeshError, PeerError
from ..events import Event, observe, observers, unobserve
from ..groups.process_groups import Comm
from ..groups.world import all_gather_objects, device_of, require_world
from ..shared_memory.backend_work import lost_ranks
from ..shared_memory.channel import Channel, channel_of
from ..shared_memory.peers import minority
from .fingerprints import Numbers, agree, as_lines, statement

# How many blocks each world has had, so that no two blocks use the same keys; an entry goes with its group.
_BLOCKS: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_YIELDS, _POLL = 1000, 0.02  # offers of the core before a rank sleeps, and seconds that it sleeps then
_PATIENCE = 0.5  # seconds between two looks at where the others are, the first of them too
_GRACE = 1.0  # seconds in which the others may come, once some differ, to say who is alone


@contextmanager
def lockstep(*, timeout: float = 30.0, every: int = 1, call_sites: bool = True) -> Iterator[None]:
    """Compare what the ranks are about to do, before every collective inside the block; entered by all ranks.

    Compared are the collective, its reduction, dtype, shapes, dims, sizes and root, how many elements each rank sends
    to each other rank, the lines of the program that it comes from, and the `purpose`, which must therefore be the same
    text on all ranks. DTensors say there which operator moves what from which placements to which.

    After an error a communicator is broken, as after any `PeerError`: `restart_world` begins another.

    Args:
        timeout: seconds to wait for the slowest rank. One that has left the block is named at once.
        every: compare at each n-th collective of a communicator only, which is cheaper.
        call_sites: False where ranks reach one collective by different lines of the program on purpose.

    Raises:
        LockstepError: ranks were about to run different collectives, or one did not come in time; on all ranks.
        NoGroupError: there is no default process group.
        MeshTypeError: an argument of a wrong type.
        MeshError: the timeout, or the number of collectives, is not positive.

    Example:
        >>> def example() -> float:
        ...     with lockstep(), purpose("sum of losses"):
        ...         return all_reduce(torch.tensor(1.5), comm_over((0, 1))).item()
        >>> launch(example, 2)
        [3.0, 3.0]
    """
    require(timeout, int | float, "the timeout of lockstep is a number of seconds")
    require(every, int, "lockstep compares at every n-th collective, n being an int")
    require(call_sites, bool, "lockstep(call_sites=...) is True or False")
    if not (timeout > 0 and every > 0):
        raise MeshError(f"lockstep takes a positive timeout and every >= 1, got {timeout} and {every}")
    world = require_world()
    if "fake" in _torch.backend_config(world):
        yield  # one process: nobody to compare with
        return
    block = next(_BLOCKS.setdefault(world, count()))
    board = _Board(_torch.default_store(), f"shoal_lockstep/{block}", world.rank())
    comparison = _Comparison(board, timeout, every, call_sites)
    observe(comparison)
    try:
        yield
    except BaseException as error:
        board.say(f"left the lockstep block by {type(error).__name__}: {error}"[:1000])
        if isinstance(error, PeerError):
            board.alarm(error)
        raise
    else:
        board.say("left the lockstep block")
    finally:
        comparison.stop()
        unobserve(comparison)


def in_lockstep() -> bool:
    """Whether a `lockstep` block is open, so that layers above may check more than they usually would.

    Example:
        >>> in_lockstep()
        False
    """
    return bool(observers) and any(isinstance(observer, _Comparison) for observer in observers)


class _Board:
    """What ranks that wait, or have left, say in the store. Where the store is gone nobody says anything."""

    def __init__(self, store: Store, prefix: str, rank: int) -> None:
        self._store, self._prefix, self.rank = store, prefix, rank

    def say(self, text: str) -> None:
        """Say where this rank is."""
        self._set(str(self.rank), text)

    def read(self, rank: int) -> str:
        """What a rank has said; '' for nothing."""
        return self._get(str(rank))

    def alarm(self, error: PeerError) -> None:
        """Say what this rank has raised, for those that wait for somebody who has heard of it."""
        self._set("alarm", json.dumps([str(error), error.ranks]))

    def alarmed(self) -> LockstepError | None:
        """What another rank has raised."""
        said = self._get("alarm")
        if not said:
            return None
        text, ranks = json.loads(said)
        return LockstepError(text, tuple(ranks))

    def _set(self, key: str, text: str) -> None:
        with suppress(RuntimeError):
            self._store.set(f"{self._prefix}/{key}", text)

    def _get(self, key: str) -> str:
        with suppress(RuntimeError):
            if self._store.check([f"{self._prefix}/{key}"]):
                return self._store.get(f"{self._prefix}/{key}").decode()
        return ""


class _Comparison:
    """The observer of one block on one rank."""

    def __init__(self, board: _Board, timeout: float, every: int, call_sites: bool) -> None:
        self._board, self._timeout, self._every, self._call_sites = board, timeout, every, call_sites
        self._steps: dict[str, int] = {}
        self._watched: dict[str, Channel] = {}
        self._open: dict[str, int] = {}  # the last notice that not all ranks had come to

    def before(self, event: Event) -> None:
        """Say what this rank is about to do, and compare it with what the others say."""
        comm = event.comm
        step = self._steps.get(comm.name, 0)
        self._steps[comm.name] = step + 1
        if step % self._every:
            return
        numbers, text = statement(event, call_sites=self._call_sites)
        channel = channel_of(comm.group) if comm.on_gloo else None
        if channel is None:
            self._exchange(comm, numbers, text.decode(), step)
        else:
            self._post(comm, channel, numbers, text, step)

    def after(self, event: Event) -> None:
        """Nothing to do."""

    def stop(self) -> None:
        """The block is over."""
        for channel in self._watched.values():
            channel.peers.meanwhile = None

    def _post(self, comm: Comm, channel: Channel, numbers: Numbers, text: bytes, step: int) -> None:
        """Compare in shared memory."""
        channel.peers.check()
        name, notices = comm.name, channel.notices
        if self._watched.get(name) is not channel:
            self._watched[name] = channel
            channel.peers.meanwhile = _Watch(self._board, comm, self._timeout, channel)
        notices.post(numbers, text)
        before, index = self._open.pop(name, 0), notices.count
        if before and notices.same(before) is False:  # of two that come at one moment neither may see the other
            self._compare(comm, channel, before, step - self._every)
        same = notices.same(index)
        if same is None:
            self._open[name] = index
        elif not same:
            self._compare(comm, channel, index, step)

    def _compare(self, comm: Comm, channel: Channel, index: int, step: int) -> None:
        if not agree(channel.notices.numbers(index)):
            self._refuse(comm, channel, index, step)

    def _refuse(self, comm: Comm, channel: Channel, index: int, step: int) -> None:
        deadline = time.monotonic() + _GRACE
        while None in (rows := channel.notices.numbers(index)) and time.monotonic() < deadline:
            time.sleep(0.005)
        ranks = channel.peers.ranks
        said = {i: row for i, row in enumerate(rows) if row is not None}
        alone = minority({i: row[:2] for i, row in said.items()})
        text = _different(comm, step, {ranks[i]: channel.notices.text(i, index) for i in said})
        error = channel.peers.fail(text, alone, text, LockstepError)
        self._board.alarm(error)
        raise error

    def _exchange(self, comm: Comm, numbers: Numbers, text: str, step: int) -> None:
        """Compare by an all-gather."""
        watch = _Watch(self._board, comm, self._timeout, None)
        watch.text = text
        every = backend_calls.all_gather(torch.tensor(numbers, device=device_of(comm.group)), comm)
        try:
            _wait(every, watch)
        except PeerError as error:
            raised = (
                error if isinstance(error, LockstepError) else LockstepError(f"{error}\n  before {text}", error.ranks)
            )
            self._board.alarm(raised)
            raise raised from error
        rows: list[Any] = every.wait().view(comm.size, -1).tolist()
        if agree(rows):
            return
        texts = dict(zip(_in_group(comm), all_gather_objects(comm.group, text), strict=True))
        alone = minority({rank: tuple(row[:2]) for rank, row in zip(comm.ranks, rows, strict=True)})
        raise LockstepError(_different(comm, step, texts), alone)


def _different(comm: Comm, step: int, texts: dict[int, str]) -> str:
    return (
        f"ranks are about to run different collectives at step {step} along {'x'.join(comm.axes)}:\n{as_lines(texts)}"
    )


class _Watch:
    """What a rank does while it waits for the others: it says so, and looks who has left, raised, or not come in time.

    Attributes:
        text: what this rank is about to do, where it is not in shared memory.
    """

    def __init__(self, board: _Board, comm: Comm, timeout: float, channel: Channel | None) -> None:
        self._board, self._comm, self._timeout, self._channel = board, comm, timeout, channel
        self._looked, self.text = 0.0, ""

    def __call__(self, waited: float) -> LockstepError | None:
        """The error to raise, if there is one."""
        now, patience = time.monotonic(), min(_PATIENCE, self._timeout / 2)
        if waited < patience or now - self._looked < patience:
            return None
        self._looked = now
        along = f"along {'x'.join(self._comm.axes)}"
        if self._channel is not None:
            self.text = self._channel.notices.text(self._channel.peers.rank)
        self._board.say(f"waits {along} in {self.text}")
        said = {rank: self._board.read(rank) for rank in self._comm.ranks if rank != self._board.rank}
        missing = self._missing(said, along)
        if not missing:
            return None
        lost = lost_ranks(self._comm.group, _in_group(self._comm))
        gone = [r for r in missing if said[r].startswith("left") or lost.get(r, "").endswith("ended")]
        error = self._board.alarmed()
        if error is None and (gone or waited > self._timeout):
            error = self._report({rank: lost.get(rank) or said[rank] for rank in missing}, gone or missing, waited)
            self._board.alarm(error)
        return error

    def _missing(self, said: dict[int, str], along: str) -> list[int]:
        """The ranks that have not come to what this one waits in."""
        if self._channel is None:
            return [rank for rank, text in said.items() if not text.startswith(f"waits {along} ")]
        rows, ranks = self._channel.notices.numbers(self._channel.notices.count), self._channel.peers.ranks
        return [rank for rank, row in zip(ranks, rows, strict=True) if row is None]

    def _report(self, missing: dict[int, str], culprits: list[int], waited: float) -> LockstepError:
        here = [rank for rank in self._comm.ranks if rank not in missing]
        lines = [f"after {waited:.1f} s not all ranks have come along {'x'.join(self._comm.axes)}:"]
        lines += [f"  {'ranks' if len(here) > 1 else 'rank'} {', '.join(map(str, here))} waits: {self.text}"]
        for rank, said in missing.items():
            before = self._channel and self._channel.notices.text(self._channel.peers.ranks.index(rank))
            lines.append(f"  rank {rank} has not come; last seen: {said or 'in no collective that ranks wait in'}")
            if before:
                lines.append(f"    before that along this axis: {before}")
        return LockstepError("\n".join(lines), tuple(culprits))


def _in_group(comm: Comm) -> list[int]:
    """The global ranks of a communicator, in the order of its group."""
    positions = _torch.group_ranks(comm.group)
    return sorted(positions, key=positions.__getitem__)


def _wait(work: Any, watch: Callable[[float], LockstepError | None]) -> None:
    """Until the work of a backend is complete; an error of the watch holds unless it completes a moment later."""
    for _ in range(_YIELDS):
        if work.is_completed():
            break
        os.sched_yield()
    start = time.monotonic()
    while not work.is_completed():
        waited = time.monotonic() - start
        time.sleep(min(_POLL, 5e-5 + waited / 16))
        error = watch(waited)
        if error is not None:
            time.sleep(0.1)
            if not work.is_completed():
                raise error
    work.wait()
