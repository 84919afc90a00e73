"""The program of one rank: what it sends, receives, copies and fills in each round of a plan.

`compile_program` makes the steps of a plan once, with views of this rank's memory. A `Runner` runs
the steps any number of times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TransferError
from ..manifest.records import dtype_of
from ..planning.copies import Copy, MemoryBlock
from ..planning.routes import Route
from ..planning.transfer_plan import TransferPlan
from .memories import Place
from .messages import Incoming, Outgoing
from .wires import Roster

Memories = Mapping[str, Tensor]


class Seat(NamedTuple):
    """This process in a transfer.

    Attributes:
        source_rank: its rank in the source; None if it holds nothing of the source.
        target_rank: its rank in the target; None if it holds nothing of the target.
    """

    source_rank: int | None
    target_rank: int | None


@dataclass(slots=True)
class Exchange:
    """Messages of one stage of a round."""

    outgoing: list[Outgoing] = field(default_factory=list)
    incoming: list[Incoming] = field(default_factory=list)


@dataclass(slots=True)
class ProgramStep:
    """One round on this rank.

    Attributes:
        dtype: dtype of the elements on the wire.
        names: names of the target tensors.
        fills: pairs (view, value): views that are filled with a value.
        copies: pairs (target view, source view) that are copied inside this process, before the
            exchanges.
        exchanges: the exchanges of stage 0 and of stage 1; an exchange in which no rank of the plan
            sends is left out.
        repeats: pairs (target view, source view) that are copied after the exchanges, from elements
            that have arrived.
    """

    dtype: torch.dtype
    names: tuple[str, ...]
    fills: list[tuple[Tensor, float]] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    repeats: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def compile_program(
    plan: TransferPlan, seat: Seat, source: Memories, target: Memories
) -> list[ProgramStep]:
    """Return the steps of one rank: views of its memory, by round.

    Args:
        plan: the plan.
        seat: the ranks of this process.
        source: the local tensors that are read, by the names of the source's manifest.
        target: the local tensors that are written, by the names of the target's manifest.

    Raises:
        TransferError: a local tensor of the manifest is missing.
    """
    roster = Roster.of(plan.source, plan.target)
    compiler = _Compiler(seat, roster, source, target)
    own_routes = dict[int, list[Route]]()
    stages_of = dict[int, set[int]]()
    steps = []
    for batch in plan.batches():
        stages = set[int]()
        for tensor, routes in batch.parts:
            if id(routes) not in own_routes:
                own_routes[id(routes)] = [*_routes_of(seat, routes)]
                moving = (route for route in routes if not route.is_local)
                stages_of[id(routes)] = {route.stage for route in moving}
            stages |= stages_of[id(routes)]
            for route in own_routes[id(routes)]:
                compiler.add(tensor.copy_of(route))
        names = tuple(tensor.target for tensor, _ in batch.parts)
        steps.append(compiler.finish(ProgramStep(dtype_of(batch.dtype), names), sorted(stages)))
    return steps


def _routes_of(seat: Seat, routes: list[Route]) -> Iterator[Route]:
    """Yield the routes that a process may take part in."""
    for route in routes:
        ranks = {holding.rank for holding in route.senders}
        forwards = route.copied is not None and route.copied.receiver.rank == seat.target_rank
        if route.receiver.rank == seat.target_rank or seat.source_rank in ranks or forwards:
            yield route


class _Compiler:
    """Collector of the copies of a round; both members of a message have them in the same order."""

    def __init__(self, seat: Seat, roster: Roster, source: Memories, target: Memories) -> None:
        self._seat = seat
        self._roster = roster
        self._memories = {"source": source, "target": target}
        self._begin()

    def _begin(self) -> None:
        self._step_fills: list[tuple[Tensor, float]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._repeats: list[tuple[Tensor, Tensor]] = []
        self._sends = [defaultdict[int, list[Tensor]](list) for _ in range(2)]
        self._receives = [defaultdict[int, list[Tensor]](list) for _ in range(2)]

    def add(self, copy: Copy) -> None:
        """Add a copy that this process may take part in."""
        receives = copy.receiver.rank == self._seat.target_rank
        if copy.sender is None:
            if receives and copy.fill is not None:
                self._step_fills.append((self._view(copy.receiver, copy.sizes), copy.fill))
            return
        own_rank = (
            self._seat.source_rank if copy.sender.side == "source" else self._seat.target_rank
        )
        sends = copy.sender.rank == own_rank
        sender = self._member(copy.sender)
        receiver = self._member(copy.receiver)
        if sends and sender == receiver:
            pair = (self._view(copy.receiver, copy.sizes), self._view(copy.sender, copy.sizes))
            pairs = self._copies if copy.stage == 0 else self._repeats
            pairs.append(pair)
        elif sends:
            self._sends[copy.stage][receiver].append(self._view(copy.sender, copy.sizes))
        elif receives:
            self._receives[copy.stage][sender].append(self._view(copy.receiver, copy.sizes))

    def finish(self, step: ProgramStep, stages: list[int]) -> ProgramStep:
        """Give the collected copies to a step; return it."""
        step.fills = self._step_fills
        step.copies = self._copies
        step.repeats = self._repeats
        for stage in stages:
            exchange = Exchange()
            step.exchanges.append(exchange)
            for member, blocks in sorted(self._sends[stage].items()):
                exchange.outgoing.append(Outgoing(member, blocks, step.dtype))
            for member, blocks in sorted(self._receives[stage].items()):
                exchange.incoming.append(Incoming(member, blocks, step.dtype))
        self._begin()
        return step

    def _member(self, memory: MemoryBlock) -> int:
        ranks = self._roster.source if memory.side == "source" else self._roster.target
        return ranks[memory.rank]

    def _view(self, memory: MemoryBlock, sizes: tuple[int, ...]) -> Tensor:
        memories = self._memories[memory.side]
        if memory.part not in memories:
            raise TransferError(
                f"the plan reads or writes {memory.part!r} on {memory.side} rank {memory.rank}, "
                "which the model does not have; describe the model again and make a new plan"
            )
        return Place(memory.part, sizes, memory.strides, memory.offset).view(memories)
