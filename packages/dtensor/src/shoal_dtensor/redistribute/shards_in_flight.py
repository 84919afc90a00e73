"""Redistributions of many tensors together, in as few collectives as possible.

`ShardsInFlight` redistributes local shards asynchronously. `CoalescedBatch` collects the
redistributions of DTensors in a `coalesce()` block and runs them as one `ShardsInFlight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from shoal_mesh import purpose
from shoal_mesh.internal import USER_TOPOLOGIES, Flat, Pending, ScopedValue

from ..errors import RedistributeError
from ..layout.spec import Spec
from .execution.execute import Destinations, PackedCollective, schedule_of
from .plan import plan
from .steps import Plan


class ShardsInFlight:
    """Redistributions of local tensors that are in flight; `wait()` returns the new local tensors.

    With `copies` the shards may be written to in the meantime: a shard that a collective would read
    later is copied first. The constructor starts the first round of collectives (the only one for
    most plans). Later rounds need its results, so they run in `wait()`.
    """

    __slots__ = ("_copies", "_messages", "_remaining", "_results", "_rounds", "_tensors")

    def __init__(
        self,
        plans: Sequence[Plan],
        shards: Iterable[Tensor],
        *,
        packs: bool = False,
        copies: bool = False,
    ) -> None:
        self._copies = copies
        self._tensors = list(shards)
        devices = tuple([shard.device for shard in self._tensors])
        self._rounds, self._remaining = schedule_of(tuple(plans), devices, packs)
        self._messages: list[tuple[PackedCollective, Pending[Flat] | Pending]] = []
        self._results: list[Tensor] | None = None
        self._start_round()

    def _start_round(self) -> None:
        """Start the next round of collectives; after the last one, do the remaining local steps."""
        if self._rounds:
            messages = self._rounds[0]
            self._rounds = self._rounds[1:]
            # Only the first round sends shards of the caller.
            copies = self._copies
            self._copies = False
            self._messages = [
                (message, message.send(self._tensors, copies=copies)) for message in messages
            ]
            return
        for i, stages in enumerate(self._remaining):
            for stage in stages:
                self._tensors[i] = stage(self._tensors[i])

    def _finish_round(self, destinations: Destinations) -> None:
        # Each message is freed together with its received data before the next one is unpacked.
        while self._messages:
            message, pending = self._messages[0]
            message.receive(pending, self._tensors, destinations)
            del self._messages[0], pending
        self._start_round()

    def reach_last_round(self) -> bool:
        """Wait for all rounds but the last; return whether there were rounds to wait for.

        After that, `wait` does not start a collective that other ranks wait for.
        """
        had_later_rounds = bool(self._rounds)
        while self._rounds:
            self._finish_round(tuple)
        return had_later_rounds

    def poll(self) -> None:
        """Process arrived data if that needs no waiting; `wait` returns the results."""
        for _, pending in self._messages:
            pending.is_completed()

    def wait(self, memory: Callable[[], Sequence[Tensor]] | None = None) -> list[Tensor]:
        """Return the local tensors in their new layouts, in the order in which they were given.

        Args:
            memory: returns one tensor to write each result to, with the shape and dtype of the
                result, none of which share memory. It is called when all data has arrived. New
                tensors when left out.
        """
        if self._results is None:
            destinations: Destinations = tuple if memory is None else cache(memory)
            while self._messages:
                self._finish_round(destinations)
            self._results = self._tensors
            for i, target in enumerate(destinations()):
                if target is not self._results[i]:
                    self._results[i] = target.copy_(self._results[i])
        return self._results


def redistribute_shards(
    shards: Iterable[Tensor], moves: Sequence[tuple[Spec, Spec]]
) -> ShardsInFlight:
    """`src -> dst`: redistribute many local shards together, in as few collectives as possible.

    The collectives overlap with the computation that follows.

    For modules that hold local tensors themselves; DTensors have `redistribute`, and `coalesce()`
    for many. It is not differentiable. All ranks pass the same moves in the same order.

    Args:
        shards: this rank's local tensors, each of its source's local shape. They must not be
            written to before the results have arrived. Shards of an iterator are released when they
            have been sent.
        moves: for each shard, its present spec and its wanted spec, which have the same global
            shape and dtype.

    Raises:
        RedistributeError: if a move is impossible.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Replicate, Shard, Spec
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     moves = [
        ...         (Spec(mesh, [Shard(0)], (n,)), Spec(mesh, [Replicate()], (n,))) for n in (2, 4)
        ...     ]
        ...     shards = [torch.zeros(1), torch.zeros(2)]
        ...     in_flight = redistribute_shards(shards, moves)  # one all-gather
        ...     [tuple(tensor.shape) for tensor in in_flight.wait()]
        [(2,), (4,)]
    """
    return ShardsInFlight(_plans_of(tuple(moves)), shards, packs=True)


def _plans_of(moves: tuple[tuple[Spec, Spec], ...]) -> Sequence[Plan]:
    symbolic = [src for src, _ in moves if src.example is not None]
    if symbolic:
        # Plans for symbolic sizes are not cached, because symbols would keep their compiler.
        return [plan(src, dst) for src, dst in moves]
    return _cached_plans_of(moves, USER_TOPOLOGIES.version)


# Cached, because a training step makes the same moves each time: one look-up finds all plans.
@lru_cache(maxsize=256)
def _cached_plans_of(moves: tuple[tuple[Spec, Spec], ...], topology: int) -> Sequence[Plan]:
    """Return the plans; `topology` is the version of the topologies that they are made for."""
    return [plan(src, dst) for src, dst in moves]


def drained(shards: list[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of a list and remove them from it, so that they can be freed once sent."""
    while shards:
        yield shards.pop(0)


# --- redistributions of DTensors, requested one by one --------------------------------------------


# a DTensor, with its version and the version of its local tensor; None if a copy is sent
_Source = tuple[Tensor, tuple[int, int]] | None


class CoalescedBatch:
    """Requested redistributions, and the DTensors that wait for them."""

    __slots__ = ("_in_flight", "_requests", "_waiting")

    def __init__(self) -> None:
        # The plan, the local tensor, and the source of each request.
        self._requests: list[tuple[Plan, Tensor, _Source]] = []
        # For each waiting DTensor: a reference to it (it may have been freed), the position of the
        # request that it waits for, and the local tensor to which the result is added in place
        # (None if the result itself becomes the local tensor).
        self._waiting: list[tuple[ReferenceType[Any], int, Tensor | None]] = []
        self._in_flight: ShardsInFlight | None = None

    def add(self, plan: Plan, local: Tensor, source: Tensor, result: Any) -> None:
        """Add a redistribution, for which the DTensor `result` waits.

        `local` is the local tensor of `source`.
        """
        self.wait_for(len(self._requests), result)
        if source.is_inference() or local.is_inference():
            # An inference tensor has no version, so a write to it could not be detected.
            self._requests.append((plan, local.clone(), None))
        else:
            versions = (source._version, local._version)
            self._requests.append((plan, local, (source, versions)))

    def wait_for(self, at: int, result: Any, addend: Tensor | None = None) -> None:
        """Let the DTensor `result` wait for request `at`, or for its sum with `addend`."""
        self._waiting.append((ref(result), at, addend))

    def position_of(self, tensor: Any) -> int | None:
        """Return the position of the request whose result a DTensor waits for.

        Return None if it does not wait, or waits for a sum.
        """
        position: int
        for reference, position, addend in reversed(self._waiting):
            if reference() is tensor and addend is None:
                return position
        return None

    def start(self, *, copies: bool = False) -> None:
        """Start all requested redistributions; with `copies` sources may be written to from now on.

        Raises:
            RedistributeError: a source has been written to since its redistribution was requested.
        """
        for i, (requested, local, source) in enumerate(self._requests):
            if source is not None and (source[0]._version, local._version) != source[1]:
                raise RedistributeError(
                    f"the source of redistribution {i} ({requested.src!r} to {requested.dst!r}) in "
                    "a batch was written to before it was sent; use the result first, or leave the "
                    "coalesce() block before writing; gradients of leaves are sent at the end of "
                    "a backward pass"
                )
        plans = [plan for plan, *_ in self._requests]
        shards = [local for _, local, _ in self._requests]
        self._requests = []
        self._in_flight = ShardsInFlight(plans, shards, copies=copies)
        self._in_flight.reach_last_round()

    def flush(self) -> None:
        """Run all requested redistributions and set the local tensors of the waiting DTensors.

        It raises the same errors as `start`.
        """
        if self._requests:
            with purpose("; ".join([plan.purpose for plan, *_ in self._requests])):
                self.start()
        if self._in_flight is None:
            assert not self._waiting, "the redistributions that these tensors wait for have failed"
            return
        arrived = self._in_flight.wait()
        waiting = self._waiting
        self._waiting = []
        self._in_flight = None
        for reference, at, addend in waiting:
            local = arrived[at]
            tensor = reference()
            if addend is not None:
                local = addend.add_(local)
            if tensor is not None:
                tensor.arrive(local)


# The batch of the innermost `coalesce()` block, None outside.
ENCLOSING_BATCH: ScopedValue[CoalescedBatch | None] = ScopedValue(
    "shoal_dtensor_batch", None, in_backward=False
)


@contextmanager
def coalesce() -> Iterator[CoalescedBatch]:
    """Run the redistributions of a block together, in as few collectives as possible.

    They run when the block ends, or as soon as a result is used. All ranks must request the same
    redistributions in the same order.

    Raises:
        RedistributeError: a source was written to before it was sent.

    Example:
        >>> import torch
        >>> from shoal_dtensor import DTensor, Replicate, Shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     parts = [DTensor.from_local(torch.zeros(n), mesh, [Shard(0)]) for n in (1, 2, 3)]
        ...     with coalesce():  # one all-gather
        ...         whole = [part.redistribute(placements=[Replicate()]) for part in parts]
        ...     [tuple(tensor.to_local().shape) for tensor in whole]
        [(2,), (4,), (6,)]
    """
    batch = CoalescedBatch()
    with ENCLOSING_BATCH.change(lambda _: batch):
        yield batch
    batch.flush()
