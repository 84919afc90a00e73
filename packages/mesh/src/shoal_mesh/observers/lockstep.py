"""Comparisons between ranks: `lockstep` for their next collectives, `check_replicas` for bits.

In a `lockstep` block every rank sends a description of its next collective, as numbers, in an
all-gather before each collective. A mismatch raises instead of hanging. The error is the same on
all ranks and has for each rank its collective, its purpose (`events.purpose`) and its lines. Only a
rank that has waited for a while reads from the store which ranks have left the block, and which
ranks wait for which collective. Only collectives of shoal are compared; collectives of other
libraries are not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import count
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import _torch
from .._torch import ProcessGroup, Store
from ..argument_types import by_ranks, name_ranks, require, suggests_keywords
from ..collectives import calls, even
from ..collectives.calls import Along
from ..errors import CollectiveTypeError, LockstepError, MeshError, PeerError
from ..events import Event, observe, observers, unobserve
from ..groups.process_groups import Comm
from ..groups.world import all_gather_objects, bytes_of, device_of, require_world
from ..shared_memory.channel import channel_of
from ..transport import Pending
from ..watch.backend_work import lost_ranks
from ..watch.peers import minority, wait_until
from ..watch.recorder import LIBRARIES

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
# the ends of the texts about lost ranks that run nothing any more
_ENDS = ("ended", "returned")


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
        comparison.write_state(reason[:1000])
        if isinstance(error, PeerError):
            comparison.write_error(error)
        raise
    else:
        comparison.write_state("left the lockstep block")
    finally:
        unobserve(comparison)


def in_lockstep() -> bool:
    """Return whether a `lockstep` block is open; if so, layers above may check more than usual.

    Example:
        >>> in_lockstep()
        False
    """
    return bool(observers) and any(isinstance(observer, _Comparison) for observer in observers)


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

    def write_state(self, text: str) -> None:
        """Write the state of this rank to the store."""
        self._write(str(self._rank), text)

    def write_error(self, error: PeerError) -> None:
        """Write the error of this rank to the store, for the ranks that wait."""
        self._write("error", json.dumps([str(error), error.ranks]))

    def _write(self, key: str, text: str) -> None:
        """Write a text under a key to the store, if the store still exists."""
        with suppress(RuntimeError):
            self._store.set(key, text)

    def _read(self, key: str | int) -> str:
        """Return the text that a rank has written, or the text under a key; '' if there is none."""
        with suppress(RuntimeError):
            if self._store.check([str(key)]):
                return self._store.get(str(key)).decode()
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
        along = f"along {'x'.join(comm.axes)}"
        self.write_state(f"waits {along} in {text}")
        states = {rank: self._read(rank) for rank in comm.ranks if rank != self._rank}
        missing = [rank for rank in states if not states[rank].startswith(f"waits {along} ")]
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
        states: the text that each other rank of the communicator wrote to the store last.
        lost: the state of each rank that the watch of the ranks reports as lost.
    """

    ranks: Sequence[int]
    states: Mapping[int, str]
    lost: Mapping[int, str]

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has left the lockstep block."""
        return self.states[rank].startswith("left")

    def absent_ranks(self) -> list[int]:
        """Return the ranks that cannot arrive: they have left the block, or have ended."""
        ended = {rank for rank, state in self.lost.items() if state.endswith(_ENDS)}
        return [rank for rank in self.ranks if self.has_left(rank) or rank in ended]

    def last_seen(self, rank: int) -> str:
        """Return the last known state of a rank in words."""
        if rank in self.lost and not self.has_left(rank):
            return self.lost[rank]
        return self.states[rank] or "outside of collectives that ranks wait in"


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
    dtypes_number = _number_of(",".join(names)) if names else 0
    compared_site = call_site if call_sites else ""
    facts = _number_of(f"{op}|{reduce_op}|{sizes}|{purpose}|{compared_site}")
    return _StatedFacts(facts, dtypes_number, f"{text} ({call_site})")


def agree(rows: Sequence[Numbers]) -> bool:
    """Return whether the statements of all ranks fit together."""
    facts = {numbers.facts for numbers in rows}
    dtypes = {numbers.dtypes for numbers in rows if numbers.dtypes}
    if len(facts) > 1 or len(dtypes) > 1:
        return False
    return sum(numbers.flow for numbers in rows) % _MODULUS == 0


def _number_of(text: str) -> int:
    """Return a number that is the same for equal texts, in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    # never 0, which stands for no text
    return int.from_bytes(digest, "little") + 1


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


# --- replicas -------------------------------------------------------------------------------------


@suggests_keywords()
def check_replicas(
    tensor: Tensor | Mapping[str, Tensor], comm: Along, what: str = "tensor"
) -> None:
    """Raise LockstepError on all ranks unless the ranks' tensors are equal, bit for bit.

    It takes one all-gather of 8 bytes per tensor and rank. Names, shapes and dtypes are compared
    too.

    Args:
        tensor: this rank's replica, of any shape and dtype, or several by name: a `state_dict`
            after a step.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor, or of the object that holds the tensors, in the error.

    Raises:
        LockstepError: tensors differ; the error names the first of them and the ranks that differ
            from most others.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> launch(lambda: check_replicas(torch.ones(3), comm_over((0, 1)), "weight"), 2)
        [None, None]
    """
    comm = calls.resolve(comm)
    replicas = _named_tensors("check_replicas", tensor, what)
    digests = [_digest(name, replica.detach()) for name, replica in replicas.items()]
    device = device_of(comm.group)
    axes = "x".join(comm.axes)
    counts = even.all_gather(torch.tensor([len(digests)], device=device), comm).tolist()
    if len(set(counts)) > 1:
        raise LockstepError(
            f"ranks {list(comm.ranks)} compare {counts} tensors of {what} along {axes}"
        )
    if not digests:
        return
    gathered = even.all_gather(torch.tensor(digests, device=device), comm)
    # a row for each tensor with the digests of all ranks; 2 ranks, 3 tensors: (6,) -> (3, 2)
    digests_by_tensor = gathered.view(comm.size, -1).t().tolist()
    for (name, replica), digests_of_ranks in zip(replicas.items(), digests_by_tensor, strict=True):
        if len(set(digests_of_ranks)) == 1:
            continue
        ((usual, _),) = Counter(digests_of_ranks).most_common(1)
        by_rank = dict(zip(comm.ranks, digests_of_ranks, strict=True))
        wrong = tuple(rank for rank, digest in by_rank.items() if digest != usual)
        others = [rank for rank in comm.ranks if rank not in wrong]
        raise LockstepError(
            f"replicas of {name} {tuple(replica.shape)} differ along {axes}: ranks {list(wrong)} "
            f"differ from {others}",
            wrong,
        )


@suggests_keywords()
def check_distinct(
    tensor: Tensor | Mapping[str, Tensor], comm: Along, what: str = "tensor"
) -> None:
    """Raise LockstepError on all ranks if the tensors of two ranks are equal, bit for bit.

    Ranks along a data axis read different rows. It takes one all-gather of 8 bytes per rank. Ranks
    with several tensors differ if one of the tensors does, and a rank without elements differs from
    all others.

    Args:
        tensor: this rank's tensor, of any shape and dtype, or several by name: a batch.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor, or of the object that holds the tensors, in the error.

    Raises:
        LockstepError: tensors are equal; the error names the ranks.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> def example() -> None:
        ...     rank = torch.distributed.get_rank()
        ...     check_distinct(torch.arange(3) + 3 * rank, comm_over((0, 1)), "rows")
        >>> launch(example, 2)
        [None, None]
    """
    comm = calls.resolve(comm)
    tensors = _named_tensors("check_distinct", tensor, what)
    digests: list[object] = [_digest(name, value.detach()) for name, value in tensors.items()]
    if not any(value.numel() for value in tensors.values()):
        digests.append(f"rank {comm.rank} without elements")
    own_number = torch.tensor([_number_of(str(digests))], device=device_of(comm.group))
    ranks_by_digest = defaultdict(list)
    for rank, digest in zip(comm.ranks, even.all_gather(own_number, comm).tolist(), strict=True):
        ranks_by_digest[digest].append(rank)
    equal = [ranks for ranks in ranks_by_digest.values() if len(ranks) > 1]
    if equal:
        groups = " and on ".join([name_ranks(ranks) for ranks in equal])
        raise LockstepError(
            f"{what} has equal values on {groups} along {'x'.join(comm.axes)}",
            tuple(sorted(itertools.chain.from_iterable(equal))),
        )


def _named_tensors(
    function: str, tensor: Tensor | Mapping[str, Tensor], what: str
) -> dict[str, Tensor]:
    """Return the tensors to compare by name; refuse values of other types."""
    allowed = f"{function} compares a torch.Tensor or a dict of them"
    require(tensor, Tensor | Mapping, allowed, CollectiveTypeError)
    require(what, str, "the name of a tensor is a string", CollectiveTypeError)
    if isinstance(tensor, Tensor):
        named = {what: tensor}
    else:
        named = {f"{what}.{name}": value for name, value in tensor.items()}
    for value in named.values():
        require(value, Tensor, f"{function} compares tensors", CollectiveTypeError)
        calls.check_operand(value.detach())
    return named


def _digest(name: str, tensor: Tensor) -> int:
    """Return a number of the name, shape, dtype and bits of a tensor."""
    replica = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    header = f"{name}{tuple(replica.shape)}{replica.dtype}"
    digest = hashlib.blake2b(header.encode(), digest_size=8)
    digest.update(bytes_of(replica))
    return int.from_bytes(digest.digest(), "little", signed=True)
