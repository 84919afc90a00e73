"""Execution of plans on this rank: `run(plan, local)` for one plan, messages for many together.

The first run of a plan resolves every step to one function of the local tensor; later runs only
call them. Plans that travel together advance side by side, from one communicating step to the next.
Plans that do the same kind of step over the same ranks travel as one message, in which the blocks
of all tensors for a member follow one another. The plans alone determine which tensors travel
together, so all ranks send the same messages.

    all-gather over 2 ranks of a, with shards of 2 elements, and b, with shards of 3 elements:
    [a0 a0 b0 b0 b0 | a1 a1 b1 b1 b1]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain, zip_longest
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal_mesh import (
    Comm,
    DeviceMesh,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    comm_over,
    reduce_scatter,
    reduce_scatter_v,
)
from shoal_mesh.internal import (
    Flat,
    Pending,
    copy_each,
    is_read_at_start,
    is_traced,
    start_packed,
)

from ...layout.memory_order import memory_order
from ...layout.tensor_meta import cache_last
from ..steps import Plan, Step, is_norm
from .rank_steps import CollectiveCall, RankStep, keep_local, rank_step, take_received

if TYPE_CHECKING:
    from ...layout.spec import Spec


Stage = Callable[[Tensor], Tensor]

# SHOAL_LOG=plans: see shoal_mesh.log_to_stderr
_LOG = logging.getLogger("shoal.plans")
REMEMBERED = 4096  # plans, as many as `plan` remembers


def run_plan(plan: Plan, local: Tensor) -> Tensor:
    """Return the local tensor under `plan.dst`, in memory of its own.

    Return `local` itself if the plan does not have steps or this rank is outside the mesh.
    """
    for stage in _program(plan):
        local = stage(local)
    return local


@cache_last(REMEMBERED)
def _program(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a plan on this rank."""
    pairs = zip(rank_steps_of(plan), plan.steps, strict=True)
    stages = [stage_of(one_step, step.src.mesh) for one_step, step in pairs]
    return (*stages, *closing_stages(plan))


@cache_last(REMEMBERED)
def rank_steps_of(plan: Plan) -> tuple[RankStep, ...]:
    """Return this rank's part of each step of a plan; outside the mesh the parts do nothing."""
    _LOG.debug("%s", plan)
    return tuple(rank_step(step, step.src.coordinate) for step in plan.steps)


def closing_stages(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages after the last step.

    They copy a slice to memory of its own, and give the result the memory order of the global
    stride.
    """
    if not plan.steps or plan.dst.coordinate is None:
        return ()
    # A slice would keep the memory of the whole tensor alive.
    if plan.slices:
        copy = partial(torch.clone, memory_format=torch.contiguous_format)
        return (in_memory_order(plan.dst, copy),)
    if memory_order(plan.dst.shape, plan.dst.stride):
        return (in_memory_order(plan.dst),)
    return ()


def stage_of(one_step: RankStep, mesh: DeviceMesh) -> Stage:
    """Return one step as a function of the local tensor."""
    prepare = one_step.prepare
    finish = one_step.finish
    if one_step.collective is None:
        return lambda local: finish(local, local)
    call = bind(one_step.collective, mesh)
    if prepare is keep_local and finish is take_received:
        return call
    return lambda local: finish(call(prepare(local)), local)


def bind(collective: CollectiveCall, mesh: DeviceMesh, **more: Any) -> Callable[[Tensor], Any]:
    """Return a collective as a function of the buffer; `more` is passed on (`async_op`)."""
    more["comm"] = comm_of(collective, mesh)
    kind = collective.kind
    sizes = collective.sizes
    if kind == "all_to_all" and sizes:
        return partial(all_to_all_v, send_sizes=sizes, recv_sizes=collective.receives, **more)
    if kind == "all_to_all":
        return partial(all_to_all, split_dim=0, concat_dim=0, **more)
    if kind != "all_gather":
        more["op"] = collective.op
    if sizes:
        return partial(_UNEVEN[kind], sizes=sizes, **more)
    return partial(_EVEN[kind], **more)


_Function = Callable[..., Any]
_EVEN: dict[str, _Function] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
}
_UNEVEN: dict[str, _Function] = {"all_gather": all_gather_v, "reduce_scatter": reduce_scatter_v}


def comm_of(collective: CollectiveCall, mesh: DeviceMesh) -> Comm:
    """Return the communicator that a collective runs over."""
    return comm_over(collective.ranks) if collective.ranks else mesh.comm(collective.axes)


# --- local tensors in the memory order of the global stride ---------------------------------------


def in_memory_order(spec: Spec, row_major: Stage = torch.Tensor.contiguous) -> Stage:
    """Return a function that gives a local tensor the memory order of the global stride.

    It calls `row_major`, which makes a tensor row-major.
    """
    order = memory_order(spec.shape, spec.stride)
    if not order:
        return row_major
    back = sorted(range(spec.ndim), key=order.__getitem__)
    return lambda local: row_major(local.permute(order)).permute(back)


# --- partial norms --------------------------------------------------------------------------------

# A partial norm is read several times (to test whether it is finite, as a divisor, in its
# backward), so its reduced value is cached. A cached norm has at most this many elements:
# a total norm, or one norm for each row of a small weight.
MAX_ELEMENTS = 256


def run_cached(plan: Plan, local: Tensor, owner: Any, *, fresh: bool = False) -> Tensor:
    """Return the result of `run_plan`; a small partial norm is cached on the DTensor `owner`.

    A write to `owner` invalidates the cache. With `fresh`, return a copy of the cached value.
    """
    # An inference tensor does not count the writes to it.
    counts_writes = plan.starts_at_norm and not owner.is_inference()
    if not counts_writes or prod(plan.src.shape) > MAX_ELEMENTS:
        return run_plan(plan, local)
    state = (plan.dst, owner._version, local._version)
    known = owner.__dict__.get("_reduced")
    if known is None or known[0] != state or known[1] is not local:
        known = (state, local, run_plan(plan, local))
        owner._reduced = known
    result: Tensor = known[2]
    return result.clone() if fresh else result


def write_back(plan: Plan, result: Tensor, owner: Any) -> None:
    """Write the result of an operator to the DTensor `owner`.

    The operator computed the result under the layout from which `plan` leads.
    """
    owner._local_tensor.copy_(run_plan(plan, result))
    if is_norm(plan.dst) and not owner.is_inference():
        # `foreach` operators do not increment it.
        increment_version(owner)


# --- many plans together --------------------------------------------------------------------------

Destinations = Callable[[], Sequence[Tensor]]
"""The tensors that the results of all plans are written to; none if results get new memory."""

# stands for a local tensor that has been sent and is not needed to conclude the step
_RELEASED = torch.empty(0, device="cpu")


class CollectiveLeg(NamedTuple):
    """The local steps of a plan up to and including its next collective."""

    # position of the plan among the plans that run together
    position: int
    # the local steps
    before: tuple[Stage, ...]
    # the step that communicates; `rank_step` and `call` are this rank's part of it
    step: Step
    rank_step: RankStep
    call: CollectiveCall
    # whether the collective sends the local tensor as it is, so that `prepare` has nothing to do
    sends_local: bool
    # whether the collective gives the new local tensor, so that `finish` has nothing to do
    gives_local: bool
    # whether the new local tensor is the result of the plan
    gives_result: bool


class PackedSchedule(NamedTuple):
    """The collectives that plans start together, and the local steps after them.

    Attributes:
        rounds: for each round the collectives that are in flight at the same time.
        remaining: for each plan the local steps that remain after the last round.
    """

    rounds: tuple[tuple[PackedCollective, ...], ...]
    remaining: tuple[tuple[Stage, ...], ...]


def schedule_of(
    plans: tuple[Plan, ...], devices: tuple[torch.device, ...], packs: bool
) -> PackedSchedule:
    """Return the messages that plans, one for each tensor, send together, and the steps after them.

    With `packs`, a tensor that is sent alone is packed too.
    """
    symbolic = [plan for plan in plans if plan.src.example is not None]
    if symbolic:
        # A schedule for symbolic sizes is not cached, because symbols would keep their compiler.
        return _schedule_of.__wrapped__(plans, devices, packs)
    return _schedule_of(plans, devices, packs)


# Cached, because a training step redistributes the same parameters and gradients each time.
@lru_cache(maxsize=256)
def _schedule_of(
    plans: tuple[Plan, ...], devices: tuple[torch.device, ...], packs: bool
) -> PackedSchedule:
    """Return the schedule: round k has the k-th collective of each plan.

    Collectives of one round whose keys are equal are one message.
    """
    legs_of_plans = []
    remaining = []
    for position, plan in enumerate(plans):
        legs, after = _legs(position, plan)
        legs_of_plans.append(legs)
        remaining.append(after)
    rounds = []
    for legs_of_round in zip_longest(*legs_of_plans):
        together: dict[object, list[CollectiveLeg]] = {}
        for leg in legs_of_round:
            if leg is not None:
                key = _key(leg, devices[leg.position])
                together.setdefault(key, []).append(leg)
        if together:
            rounds.append(tuple([PackedCollective(group, packs) for group in together.values()]))
    return PackedSchedule(tuple(rounds), tuple(remaining))


def _legs(position: int, plan: Plan) -> tuple[list[CollectiveLeg | None], tuple[Stage, ...]]:
    """Return the legs of a plan, and the stages after its last leg.

    A leg is None for a step in which this rank's group has nothing to exchange.
    """
    legs: list[CollectiveLeg | None] = []
    before: list[Stage] = []
    for step, one_step in zip(plan.steps, rank_steps_of(plan), strict=True):
        if one_step.collective is None:
            before.append(stage_of(one_step, step.src.mesh))
            if step.communicates:
                legs.append(None)
            continue
        ends_plan = step is plan.steps[-1] and not closing_stages(plan)
        gives_local = one_step.finish is take_received
        leg = CollectiveLeg(
            position,
            tuple(before),
            step,
            one_step,
            call=one_step.collective,
            sends_local=one_step.prepare is keep_local,
            gives_local=gives_local,
            gives_result=ends_plan and gives_local,
        )
        legs.append(leg)
        before = []
    return legs, (*before, *closing_stages(plan))


def _key(leg: CollectiveLeg, device: torch.device) -> object:
    """Return the key that is equal for legs of one message.

    It contains ranks instead of a mesh, because meshes of different shapes may have the same
    communicator.
    """
    step = leg.step
    name = "Exchange" if step.name in ("AllToAll", "Transfer") else step.name
    ops = step.op, leg.call.op
    return comm_of(leg.call, step.src.mesh).ranks, name, ops, step.src.dtype, device


class PackedCollective:
    """One collective for a leg of each of several plans, prepared before there are tensors."""

    __slots__ = (
        "_arrivals",
        "_blocks",
        "_comm",
        "_in_rows",
        "_is_unpacked",
        "_kind",
        "_legs",
        "_received",
        "_sent",
    )

    def __init__(self, legs: Sequence[CollectiveLeg], packs: bool) -> None:
        calls = [leg.call for leg in legs]
        self._legs = legs
        self._comm = comm_of(calls[0], legs[0].step.src.mesh)
        self._kind: str = calls[0].kind
        # equal blocks are the rows of a matrix
        self._in_rows: bool = not any(call.sizes for call in calls)
        # whether the leg's own collective is called, with its buffer as it is
        self._is_unpacked: bool = len(legs) == 1 and (self._kind == "all_to_all" or not packs)
        # For each leg and each member, the number of elements sent to the member (for an
        # all-gather, the number that the member sends) and received from it. Then the totals over
        # all legs.
        self._blocks = [_block_sizes(leg, self._comm.size) for leg in legs]
        self._arrivals = []
        for call, sizes in zip(calls, self._blocks, strict=True):
            self._arrivals.append(call.receives or sizes)
        self._sent: list[int] = [*map(sum, zip(*self._blocks, strict=True))]
        self._received: list[int] = [*map(sum, zip(*self._arrivals, strict=True))]

    def send(self, tensors: list[Tensor], *, copies: bool = False) -> Pending[Flat] | Pending:
        """Start the collective with the local tensors of all plans.

        Tensors that are gathered or reduced are removed from the list, so that they can be freed.

        With `copies` the tensors may be written to as soon as `send` returns.
        """
        buffers = []
        for leg in self._legs:
            local = tensors[leg.position]
            for stage in leg.before:
                local = stage(local)
            if copies and not self._is_read_at_start(local):
                local = local.clone()
            tensors[leg.position] = local if self._kind == "all_to_all" else _RELEASED
            buffers.append(local if leg.sends_local else leg.rank_step.prepare(local))
        if self._is_unpacked:
            leg = self._legs[0]
            start = bind(leg.call, leg.step.src.mesh, async_op=True)
            return start(buffers[0])  # type: ignore[no-any-return]  # `bind` returns any collective
        blocks = self._blocks_to_send(buffers)
        buffers.clear()
        comm = self._comm
        if self._kind == "all_to_all":
            return all_to_all_v(torch.cat(blocks), comm, self._sent, self._received, async_op=True)
        return start_packed(self._kind, blocks, comm, self._sent, op=self._legs[0].call.op)

    def _blocks_to_send(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks of all legs in the order in which they are sent."""
        if self._kind in ("all_reduce", "all_gather"):
            return [buffer.reshape(-1) for buffer in buffers]
        if self._kind == "reduce_scatter" and self._in_rows:
            return [buffer.reshape(self._comm.size, -1) for buffer in buffers]
        by_leg = []
        for buffer, sizes in zip(buffers, self._blocks, strict=True):
            by_leg.append(buffer.reshape(-1).split_with_sizes(list(sizes)))
        # all blocks for the first member, then all blocks for the second
        return [*chain.from_iterable(zip(*by_leg, strict=True))]

    def _is_read_at_start(self, local: Tensor) -> bool:
        """Tell whether a local tensor is not read after `send` has returned."""
        if self._kind == "all_reduce" or is_traced(local):
            # An all-reduce reduces a copy. A compiler keeps reads before later writes.
            return True
        # The blocks that a rank keeps in an exchange are read when the other blocks have arrived.
        is_read_later = self._kind == "all_to_all"
        op = "" if self._kind == "all_gather" else self._legs[0].call.op
        return self._is_unpacked and not is_read_later and is_read_at_start(local, self._comm, op)

    def receive(
        self, pending: Pending[Flat] | Pending, tensors: list[Tensor], destinations: Destinations
    ) -> None:
        """Wait, then replace the local tensor of each leg in `tensors` by the leg's result."""

        def unpack(arrived: Sequence[Tensor] | Tensor) -> None:
            results = self._results(arrived, destinations)
            for leg, result in zip(self._legs, results, strict=True):
                if not leg.gives_local:
                    result = leg.rank_step.finish(result, tensors[leg.position])
                tensors[leg.position] = result

        pending.then(unpack).wait()

    def _results(
        self, arrived: Sequence[Tensor] | Tensor, destinations: Destinations
    ) -> Sequence[Tensor]:
        """Return for each leg the result that its own collective would return."""
        if self._is_unpacked:
            assert isinstance(arrived, Tensor), "a call gives one tensor"
            return [arrived]
        if self._kind in ("all_gather", "all_to_all"):
            return self._join(arrived, destinations())
        # A reduce-scatter brings one flat tensor for all legs, an all-reduce one for each leg.
        if self._kind == "reduce_scatter":
            sizes_of_legs = [sizes[self._comm.rank] for sizes in self._arrivals]
            arrived = arrived[0].split_with_sizes(sizes_of_legs)
        return [flat.view(leg.call.shape) for flat, leg in zip(arrived, self._legs, strict=True)]

    def _join(self, arrived: Sequence[Tensor] | Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return for each leg the joined blocks of all members.

        If they are the result of the leg's plan, they are written to the wanted tensor.
        """
        outs: list[Tensor | None] = []
        for leg in self._legs:
            fits = bool(wanted) and leg.gives_result and wanted[leg.position].is_contiguous()
            outs.append(wanted[leg.position] if fits else None)
        if self._kind == "all_gather" and self._in_rows and isinstance(arrived, Tensor):
            return self._join_rows(arrived, outs)
        if self._kind == "all_to_all":
            assert isinstance(arrived, Tensor), "an all-to-all brings one tensor"
            arrived = torch.split(arrived, self._received)
        sizes_of_members = zip(*self._arrivals, strict=True)
        by_member = []
        for row, sizes in zip(arrived, sizes_of_members, strict=True):
            by_member.append(torch.split(row, list(sizes)))
        by_leg = zip(*by_member, strict=True)
        results = []
        for leg, blocks, out in zip(self._legs, by_leg, outs, strict=True):
            if out is None:
                results.append(torch.cat(blocks).view(leg.call.shape))
            else:
                torch.cat(blocks, out=out.view(-1))
                results.append(out)
        return results

    def _join_rows(self, arrived: Tensor, outs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the blocks for each leg from a matrix with a row for each member."""
        size = self._comm.size
        lengths = [sizes[0] for sizes in self._arrivals]
        results = []
        for leg, length, out in zip(self._legs, lengths, outs, strict=True):
            if out is None:
                out = arrived.new_empty(size * length).view(leg.call.shape)
            results.append(out)
        rows = [result.view(size, -1) for result in results]
        copy_each(rows, arrived.split_with_sizes(lengths, 1))
        return results


def _block_sizes(leg: CollectiveLeg, size: int) -> Sequence[int]:
    """Return the number of elements of each member's block in the buffer that a leg sends."""
    if leg.call.sizes:
        elements_of_row = prod(leg.call.shape[1:])
        return [rows * elements_of_row for rows in leg.call.sizes]
    sent = leg.step.src.local_shape.numel()
    is_gathered = leg.call.kind == "all_gather"
    return [sent if is_gathered else sent // size] * size
