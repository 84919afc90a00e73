"""Comparisons of the next collectives of all ranks: `lockstep`.

In a `lockstep` block every rank sends a description of its next collective, as numbers, in an
all-gather before each collective. A mismatch raises instead of hanging. The error is the same on
all ranks and has for each rank its collective, its purpose (`events.purpose`) and its lines. Only a
rank that has waited for a while reads from the store which ranks have left the block, and which
ranks wait for which collective. Only collectives of shoal are compared; collectives of other
libraries are not.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import lru_cache
from itertools import count
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from .. import _torch
from .._torch import ProcessGroup, Store
from ..argument_types import by_ranks, name_ranks, require, suggests_keywords
from ..collectives import calls
from ..errors import LockstepError, MeshError, PeerError
from ..events import Event, observe, observers, unobserve
from ..groups.process_groups import Comm
from ..groups.world import all_gather_objects, device_of, require_world
from ..shared_memory.channel import channel_of
from ..transport import Pending
from ..watch.backend_work import LostRank, lost_ranks
from ..watch.peers import minority, wait_until
from ..watch.processes import ProcessState
from ..watch.recorder import LIBRARIES, number_of_text

# Flows (`statement`) are computed modulo this prime, so that any backend can send them as signed
# 64-bit integers.
_MODULUS = (1 << 61) - 1
# The weights of pairs of ranks are powers of this irregular number, so that they all differ.
_FACTOR = 0x9E3779B97F4A7C15
# file and line of eight frames: enough to tell two calls of one function apart
_STACK = 16
_LIBRARY = re.compile(rf"(^|\.){LIBRARIES}(\.|$)")
# World -> the number of its next block, so that no two blocks use the same keys in the store. An
# entry is dropped with its group.
_BLOCKS: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()
# seconds that a rank waits before it looks at the states of the other ranks, and between two looks
_PATIENCE = 0.5


@contextmanager
@suggests_keywords()
def lockstep(*, timeout: float = 30.0, every: int = 1, call_sites: bool = True) -> Iterator[None]:
    """Compare the next collectives of all ranks, before every collective inside the block.

    All ranks enter it. They compare the collective, its reduction, dtype, shapes, dims, sizes and
    root, how many elements each rank sends to each other rank, the lines of the program that it
    comes from, and the `purpose`, which must therefore be the same text on all ranks. The purpose
    of a collective of a DTensor names the operator, and the placements before and after.

    After an error a communicator is broken, as after any `PeerError`: `restart_world` begins
    another one.

    Args:
        timeout: seconds to wait for the slowest rank. A rank that has left the block is named at
            once.
        every: compare at each n-th collective of a communicator only, which is cheaper.
        call_sites: False where ranks reach one collective by different lines of the program on
            purpose.

    Raises:
        LockstepError: ranks were about to run different collectives, or one did not come in time;
            on all ranks.
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
        raise MeshError(
            f"lockstep takes a positive timeout and every >= 1, got {timeout} and {every}"
        )
    world = require_world()
    if "fake" in _torch.backend_config(world):
        # a fake world has one process, so there is no other rank to compare with
        yield
        return
    block = next(_BLOCKS.setdefault(world, count()))
    store = _torch.PrefixStore(f"shoal_lockstep/{block}", _torch.default_store())
    comparison = _Comparison(
        store, world.rank(), timeout=timeout, every=every, call_sites=call_sites
    )
    observe(comparison)
    try:
        yield
    except BaseException as error:
        reason = f"left the lockstep block by {type(error).__name__}: {error}"
        comparison.write_state(_RankState(_Activity.LEFT, reason[:1000]))
        if isinstance(error, PeerError):
            comparison.write_error(error)
        raise
    else:
        comparison.write_state(_RankState(_Activity.LEFT, "left the lockstep block"))
    finally:
        unobserve(comparison)


def in_lockstep() -> bool:
    """Return whether a `lockstep` block is open; if so, layers above may check more than usual.

    Example:
        >>> in_lockstep()
        False
    """
    return bool(observers) and any(isinstance(observer, _Comparison) for observer in observers)


class _Activity(StrEnum):
    """Activity of a rank in a lockstep block, as far as ranks that wait for it need to know."""

    RUNS = "runs"
    WAITS = "waits"
    LEFT = "left"


class _RankState(NamedTuple):
    """The state that a rank writes to the store, for the ranks that wait for it.

    Attributes:
        activity: whether it waits in a collective, has left the block, or runs the program.
        text: the state in words.
        axes: the axes along which it waits; "" if it does not wait.
    """

    activity: str = _Activity.RUNS
    text: str = "outside of collectives that ranks wait in"
    axes: str = ""

    @property
    def has_left(self) -> bool:
        """True for a rank that has left the lockstep block."""
        return self.activity == _Activity.LEFT

    def waits_along(self, axes: str) -> bool:
        """Return whether the rank waits in a collective along these axes."""
        return self.activity == _Activity.WAITS and self.axes == axes


class _Comparison:
    """The observer of one block on one rank.

    Before a collective every rank gathers three numbers from each rank (`statement`), and compares
    them:

        rank 0   all_reduce   [1234, 77, 0]    if they are equal, the collective runs;
        rank 1   all_reduce   [1234, 77, 0]    here all ranks gather their texts, and raise
        rank 2   broadcast    [9876, 77, 0]

    Ranks that wait, or have left, exchange messages through the store.
    """

    def __init__(
        self, store: Store, rank: int, *, timeout: float, every: int, call_sites: bool
    ) -> None:
        self._store = store
        self._rank = rank
        self._timeout = timeout
        self._every = every
        self._call_sites = call_sites
        self._steps: defaultdict[str, Iterator[int]] = defaultdict(count)
        # name of a communicator -> the last collective that all its ranks have reached
        self._last: dict[str, str] = {}

    def write_state(self, state: _RankState) -> None:
        """Write the state of this rank to the store."""
        self._write(str(self._rank), json.dumps(state))

    def write_error(self, error: PeerError) -> None:
        """Write the error of this rank to the store, for the ranks that wait."""
        self._write("error", json.dumps([str(error), error.ranks]))

    def _write(self, key: str, text: str) -> None:
        """Write a text under a key to the store, if the store still exists."""
        with suppress(RuntimeError):
            self._store.set(key, text)

    def _read_state(self, rank: int) -> _RankState:
        """Return the state that a rank has written last."""
        written = self._read(str(rank))
        return _RankState(*json.loads(written)) if written else _RankState()

    def _read(self, key: str) -> str:
        """Return the text under a key of the store; '' if there is none."""
        with suppress(RuntimeError):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def before(self, event: Event) -> None:
        """Send this rank's next collective, and compare it with those of the other ranks."""
        comm = event.comm
        step = next(self._steps[comm.name])
        if step % self._every:
            return
        numbers, text = statement(event, call_sites=self._call_sites)
        try:
            with _torch.unseen():
                own_numbers = torch.tensor(numbers, device=device_of(comm.group))
                work = calls.all_gather(own_numbers, comm)
                self._wait(work, comm, text)
                rows = [Numbers(*row) for row in work.wait().view(comm.size, -1).tolist()]
        except LockstepError as error:
            raise self._break_off(comm, error) from error
        except PeerError as error:
            stopped = LockstepError(f"{error}\n  before {text}", error.ranks)
            raise self._break_off(comm, stopped) from error
        if agree(rows):
            self._last[comm.name] = text
            return
        mismatch = self._mismatch(comm, step, rows, text)
        raise self._break_off(comm, mismatch)

    def _mismatch(self, comm: Comm, step: int, rows: Sequence[Numbers], text: str) -> LockstepError:
        """Gather the collectives of all ranks as text, and return the error that names them."""
        ranks_of_group = _torch.ranks_in_order(comm.group)
        texts = dict(zip(ranks_of_group, all_gather_objects(comm.group, text), strict=True))
        axes = "x".join(comm.axes)
        lines = [f"ranks are about to run different collectives at step {step} along {axes}:"]
        lines += [f"  {ranks}: {collective}" for ranks, collective in by_ranks(texts).items()]
        # without the flows, which also differ between ranks that agree
        statements = {}
        for rank, numbers in zip(comm.ranks, rows, strict=True):
            statements[rank] = (numbers.facts, numbers.dtypes)
        return LockstepError("\n".join(lines), minority(statements))

    def after(self, event: Event) -> None:
        """Do nothing."""

    def _break_off(self, comm: Comm, error: LockstepError) -> PeerError:
        """Have ranks that wait for this rank, now or later, raise an error; return the error."""
        self.write_error(error)
        channel = channel_of(comm.group) if comm.on_gloo else None
        if channel is None:
            return error
        return channel.peers.fail(str(error), error.ranks, kind=LockstepError)

    def _wait(self, work: Pending, comm: Comm, text: str) -> None:
        """Wait until all ranks have arrived.

        An error of other ranks is raised, unless they arrive a moment later.
        """

        def look(waited: float) -> None:
            error = self._look(comm, text, waited)
            if error is None:
                return
            time.sleep(0.1)
            if not work.is_completed():
                raise error

        wait_until(work.is_completed, look, min(_PATIENCE, self._timeout / 2))

    def _look(self, comm: Comm, text: str, waited: float) -> LockstepError | None:
        """Write that this rank waits; return an error if one has left, raised or is late."""
        axes = "x".join(comm.axes)
        along = f"along {axes}"
        self.write_state(_RankState(_Activity.WAITS, f"waits {along} in {text}", axes))
        states = {rank: self._read_state(rank) for rank in comm.ranks if rank != self._rank}
        missing = [rank for rank, state in states.items() if not state.waits_along(axes)]
        if not missing:
            return None
        lost = lost_ranks(comm.group, _torch.ranks_in_order(comm.group))
        absent = _AbsentRanks(missing, states, lost)
        error_text, ranks = json.loads(self._read("error") or '["", []]')
        if error_text:
            return LockstepError(error_text, tuple(ranks))
        gone = absent.absent_ranks()
        if not gone and waited <= self._timeout:
            return None
        arrived = [rank for rank in comm.ranks if rank not in missing]
        lines = [f"after {waited:.1f} s not all ranks have come {along}:"]
        lines.append(f"  {name_ranks(arrived)} waits: {text}")
        before = self._last.get(comm.name)
        for rank in missing:
            lines.append(f"  rank {rank} has not arrived; last seen: {absent.last_seen(rank)}")
            if before:
                lines.append(f"    before that along this axis: {before}")
        return LockstepError("\n".join(lines), tuple(gone or missing))


class _AbsentRanks(NamedTuple):
    """The ranks that have not arrived at the collective in which this rank waits.

    Attributes:
        ranks: their numbers.
        states: the state that each other rank of the communicator wrote to the store last.
        lost: the ranks that the watch of the ranks reports as lost.
    """

    ranks: Sequence[int]
    states: Mapping[int, _RankState]
    lost: Mapping[int, LostRank]

    def absent_ranks(self) -> list[int]:
        """Return the ranks that cannot arrive: they have left the block, or have ended."""
        gone = []
        for rank in self.ranks:
            # a rank that is only stopped may go on
            has_ended = rank in self.lost and self.lost[rank].state is not ProcessState.STOPPED
            if self.states[rank].has_left or has_ended:
                gone.append(rank)
        return gone

    def last_seen(self, rank: int) -> str:
        """Return the last known state of a rank in words."""
        if rank in self.lost and not self.states[rank].has_left:
            return str(self.lost[rank])
        return self.states[rank].text


# --- what a rank is about to do -------------------------------------------------------------------


class Numbers(NamedTuple):
    """The next collective of a rank, as numbers that ranks compare.

    Attributes:
        facts: stands for the facts that all ranks share.
        dtypes: stands for the dtypes; 0 for a rank without tensors.
        flow: a weighted sum of the elements that the rank sends and expects.
    """

    facts: int
    dtypes: int
    flow: int


class _StatedFacts(NamedTuple):
    """The facts of a collective without its flow, and the line of text that states them."""

    facts: int
    dtypes: int
    line: str


def statement(event: Event, *, call_sites: bool) -> tuple[Numbers, str]:
    """Return the next collective of a rank as numbers for `agree`, and as a line of text.

    The facts include the lines of the program if `call_sites` is true. The text is like
    `all_reduce sum float32 shape (2,), for step 3 (train.py:80)`.
    """
    dtypes = tuple([tensor.dtype for tensor in event.tensors])
    same = tuple(event.same.items())
    place = (_call_stack(), call_sites)
    shared = _state_facts(
        event.op, event.reduce_op, same, dtypes, purpose=event.purpose, place=place
    )
    if event.sends is None or event.receives is None:
        return Numbers(shared.facts, shared.dtypes, flow=0), shared.line
    # Each pair (sender, receiver) has a weight. The sender adds it for each element, and the
    # receiver subtracts it for each element that it expects. If ranks agree, all flows sum to 0.
    rank = event.comm.rank
    size = event.comm.size
    flow = 0
    for other, (sent, expected) in enumerate(zip(event.sends, event.receives, strict=True)):
        flow += _weight(rank * size + other) * sent
        flow -= _weight(other * size + rank) * expected
    line = f"sends {list(event.sends)}, receives {list(event.receives)}: {shared.line}"
    return Numbers(shared.facts, shared.dtypes, flow % _MODULUS), line


@lru_cache(maxsize=4096)
def _state_facts(
    op: str,
    reduce_op: str,
    same: tuple[tuple[str, object], ...],
    dtypes: tuple[object, ...],
    purpose: str,
    place: tuple[tuple[str | int, ...], bool],
) -> _StatedFacts:
    """Return the facts of a collective as numbers and as a line of text.

    Results are cached, because a loop repeats its collectives.
    """
    stack, call_sites = place
    lines = []
    for path, line in zip(stack[::2], stack[1::2], strict=True):
        lines.append(f"{os.path.basename(str(path))}:{line}")
    call_site = " < ".join(lines)
    names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    sizes = ", ".join([f"{name} {value}" for name, value in same])
    words = [op, reduce_op, *sorted(set(names)), sizes]
    text = " ".join(filter(None, words))
    if purpose:
        text += f", for {purpose}"
    # 0 for a rank that neither sends nor receives a block: it may not have the dtype of the others
    dtypes_number = number_of_text(",".join(names)) if names else 0
    compared_site = call_site if call_sites else ""
    facts = number_of_text(f"{op}|{reduce_op}|{sizes}|{purpose}|{compared_site}")
    return _StatedFacts(facts, dtypes_number, f"{text} ({call_site})")


def agree(rows: Sequence[Numbers]) -> bool:
    """Return whether the statements of all ranks fit together."""
    facts = {numbers.facts for numbers in rows}
    dtypes = {numbers.dtypes for numbers in rows if numbers.dtypes}
    if len(facts) > 1 or len(dtypes) > 1:
        return False
    return sum(numbers.flow for numbers in rows) % _MODULUS == 0


@lru_cache(maxsize=4096)
def _weight(pair: int) -> int:
    """Return the weight of a pair (sender, receiver) by its number, sender * size + receiver.

    The weights are powers of `_FACTOR`.
    """
    return pow(_FACTOR, pair + 1, _MODULUS)


def line_of_program() -> str:
    """Return the current line of the program, such as `train.py:80`.

    It is the innermost line that belongs neither to shoal nor to torch; '' if there is none.
    """
    stack = _call_stack(2)
    if not stack:
        return ""
    path, line = stack
    return f"{os.path.basename(str(path))}:{line}"


def _call_stack(length: int = _STACK) -> tuple[str | int, ...]:
    """Return file and line of the innermost frames outside of shoal and torch."""
    frame: FrameType | None = sys._getframe(2)
    stack: list[str | int] = []
    while frame is not None and len(stack) < length:
        if not _is_library(frame.f_globals.get("__name__", "")):
            stack += frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return tuple(stack)


@lru_cache(maxsize=4096)
def _is_library(module: str) -> bool:
    return _LIBRARY.search(module) is not None
