"""Execution of plans on this rank: `run(plan, local)` for one plan, messages for many together.

The first run of a plan resolves every step to one function of the local tensor; later runs only
call them. Plans that travel together advance side by side, from one communicating step to the next.
Plans that do the same kind of step over the same ranks travel as one message, in which the blocks
of all tensors for a member follow one another. The plans alone determine which tensors travel
together, so all ranks send the same messages.

    all-gather of a and b, whose shards have 2 and 3 elements, over 2 ranks:   [a0 a0 b0 b0 b0 | a1 a1 b1 b1 b1]
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
from shoal_mesh.internal import Flat, Pending, is_read_at_start, is_traced, start_packed

from ...layout.placements import norm_order
from ...layout.tensor_meta import memory_order, remembered
from ..steps import Plan, Step
from .kernels import CollectiveCall, Kernel, kernel, received, unchanged

if TYPE_CHECKING:
    from ...layout.spec import Spec


Stage = Callable[[Tensor], Tensor]

# SHOAL_LOG=plans: see shoal_mesh.log_to_stderr
_LOG = logging.getLogger("shoal.plans")
REMEMBERED = 4096  # plans, as many as `plan` remembers


def run(plan: Plan, local: Tensor) -> Tensor:
    """Return the local tensor under `plan.dst`, in memory of its own.

    Return `local` itself if the plan does not have steps or this rank is outside the mesh.
    """
    for stage in _program(plan):
        local = stage(local)
    return local


@remembered(REMEMBERED)
def _program(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages of a plan on this rank."""
    stages = [
        stage_of(work, step.src.mesh)
        for work, step in zip(kernels_of(plan), plan.steps, strict=True)
    ]
    return (*stages, *closing(plan))


@remembered(REMEMBERED)
def kernels_of(plan: Plan) -> tuple[Kernel, ...]:
    """Return the kernel of each step of a plan on this rank; it does nothing outside the mesh."""
    _LOG.debug("%s", plan)
    return tuple(kernel(step, step.src.coordinate) for step in plan.steps)


def closing(plan: Plan) -> tuple[Stage, ...]:
    """Return the stages after the last step.

    A slice becomes a tensor of its own, and the memory order follows the global stride.
    """
    if not plan.steps or plan.dst.coordinate is None:
        return ()
    if plan.slices:  # a slice must not keep the whole alive
        return (
            in_memory_order(plan.dst, partial(torch.clone, memory_format=torch.contiguous_format)),
        )
    return (in_memory_order(plan.dst),) if memory_order(plan.dst.shape, plan.dst.stride) else ()


def stage_of(work: Kernel, mesh: DeviceMesh) -> Stage:
    """Return one step as a function of the local tensor."""
    prepare = work.prepare
    finish = work.finish
    if work.collective is None:
        return lambda local: finish(local, local)
    call = bind(work.collective, mesh)
    if prepare is unchanged and finish is received:
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
    return partial(_UNEVEN[kind], sizes=sizes, **more) if sizes else partial(_EVEN[kind], **more)


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


# --- the order in memory of a local tensor's dims: that of the global stride ----------------------


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

# A partial norm is read several times (is it finite? the divisor, its backward), so it is
# reduced once. The most elements of a cached norm: a total, or one for each row of a small weight
MAX_ELEMENTS = 256


def run_cached(plan: Plan, local: Tensor, owner: Any, *, fresh: bool = False) -> Tensor:
    """Return the result of `run`; the DTensor `owner` caches the result for a small partial norm.

    The cache is dropped at a write to `owner`. With `fresh`, return a copy.
    """
    if (
        not plan.src.partials
        or not _is_norm(plan.src, owner)
        or prod(plan.src.shape) > MAX_ELEMENTS
    ):
        return run(plan, local)
    state = (plan.dst, owner._version, local._version)
    known = owner.__dict__.get("_reduced")
    if known is None or known[0] != state or known[1] is not local:
        known = (state, local, run(plan, local))
        owner._reduced = known
    result: Tensor = known[2]
    return result.clone() if fresh else result


def write_back(plan: Plan, result: Tensor, owner: Any) -> None:
    """Write the result of an operator to the DTensor `owner`.

    The operator computed the result under the layout from which `plan` leads.
    """
    owner._local_tensor.copy_(run(plan, result))
    if _is_norm(plan.dst, owner):
        increment_version(owner)  # `foreach` operators do not


def _is_norm(spec: Spec, owner: Any) -> bool:
    """Tell whether a tensor is a partial norm and counts the writes to it."""
    return (
        bool(spec.partials)
        and norm_order(spec.partials[0][1]) is not None
        and not owner.is_inference()
    )


# --- many plans together --------------------------------------------------------------------------

Places = Callable[[], Sequence[Tensor]]
"""The tensors that the results of all plans are to be written to; none where they get memory of their own."""

_SENT = torch.empty(0, device="cpu")


class Leg(NamedTuple):
    """The local steps of a plan up to and including its next collective."""

    # of the plan among the plans that advance together
    position: int
    before: tuple[Stage, ...]  # the local steps
    # the step that communicates; `kernel` and `call` are this rank's part of it
    step: Step
    kernel: Kernel
    call: CollectiveCall
    # whether the collective gives the result of the plan as it is
    gives_result: bool


def rounds_of(plans: tuple[Plan, ...], devices: tuple[torch.device, ...], packs: bool) -> Rounds:
    """Return the messages that plans, one for each tensor, send together, and the steps after them.

    With `packs`, a tensor that is sent alone is packed too.
    """
    symbolic = any(plan.src.example is not None for plan in plans)
    return (_rounds_of.__wrapped__ if symbolic else _rounds_of)(plans, devices, packs)


# parameters and gradients, again and again the same ones
@lru_cache(maxsize=256)
def _rounds_of(plans: tuple[Plan, ...], devices: tuple[torch.device, ...], packs: bool) -> Rounds:
    planned = [_legs(i, plan) for i, plan in enumerate(plans)]
    rounds = []
    for legs in zip_longest(*[legs for legs, _ in planned]):
        together: dict[object, list[Leg]] = {}
        for leg in legs:
            if leg is not None:
                together.setdefault(_key(leg, devices[leg.position]), []).append(leg)
        rounds.append(tuple([Message(each, packs) for each in together.values()]))
    return tuple(filter(None, rounds)), tuple(after for _, after in planned)


def _legs(index: int, plan: Plan) -> tuple[list[Leg | None], tuple[Stage, ...]]:
    """Return the legs of a plan, and the stages after its last leg.

    A leg is None for a step in which this rank's group has nothing to exchange.
    """
    legs: list[Leg | None] = []
    before: list[Stage] = []
    for step, work in zip(plan.steps, kernels_of(plan), strict=True):
        if work.collective is not None:
            gives_result = step is plan.steps[-1] and work.finish is received and not closing(plan)
            legs.append(
                Leg(
                    index,
                    tuple(before),
                    step,
                    work,
                    call=work.collective,
                    gives_result=gives_result,
                )
            )
            before = []
            continue
        before.append(stage_of(work, step.src.mesh))
        if step.communicates:
            legs.append(None)
    return legs, (*before, *closing(plan))


def _key(leg: Leg, device: torch.device) -> object:
    """Return the key that steps of one message share.

    Meshes of other shapes may have the same communicator.
    """
    step = leg.step
    name = "Exchange" if step.name in ("AllToAll", "Transfer") else step.name
    ops = step.op, leg.call.op
    return comm_of(leg.call, step.src.mesh).ranks, name, ops, step.src.dtype, device


class Message:
    """One collective for a leg of each of several plans, prepared before there are tensors."""

    __slots__ = (
        "_arrivals",
        "_blocks",
        "_comm",
        "_in_rows",
        "_is_call",
        "_kind",
        "_legs",
        "_received",
        "_sent",
    )

    def __init__(self, legs: Sequence[Leg], packs: bool) -> None:
        calls = [leg.call for leg in legs]
        self._legs = legs
        self._comm = comm_of(calls[0], legs[0].step.src.mesh)
        self._kind: str = calls[0].kind
        # equal blocks are the rows of a matrix
        self._in_rows: bool = not any(call.sizes for call in calls)
        self._is_call: bool = len(legs) == 1 and (self._kind == "all_to_all" or not packs)
        # For each leg the elements sent to each member (in a gather, of each) and received from it;
        # and the totals of all legs.
        self._blocks = [_block_sizes(leg, self._comm.size) for leg in legs]
        self._arrivals = [
            call.receives or sizes for call, sizes in zip(calls, self._blocks, strict=True)
        ]
        self._sent: list[int] = [*map(sum, zip(*self._blocks, strict=True))]
        self._received: list[int] = [*map(sum, zip(*self._arrivals, strict=True))]

    def send(self, tensors: list[Tensor], *, copies: bool = False) -> Pending[Flat] | Pending:
        """Start the collective with the local tensors of all plans.

        Tensors that are gathered or reduced are removed from the list.

        With `copies` the tensors may be written to as soon as this returns.
        """
        buffers = []
        for leg in self._legs:
            local = tensors[leg.position]
            for stage in leg.before:
                local = stage(local)
            if copies and not self._is_read_at_start(local):
                local = local.clone()
            tensors[leg.position] = local if self._kind == "all_to_all" else _SENT
            buffers.append(leg.kernel.prepare(local))
        if self._is_call:
            leg = self._legs[0]
            return bind(leg.call, leg.step.src.mesh, async_op=True)(buffers[0])  # type: ignore[no-any-return]  # of any function
        comm = self._comm
        op = self._legs[0].call.op
        if self._kind in ("all_reduce", "all_gather"):
            parts = [buffer.reshape(-1) for buffer in buffers]
        elif self._kind == "reduce_scatter" and self._in_rows:
            parts = [buffer.reshape(comm.size, -1) for buffer in buffers]
        else:
            sizes = zip(buffers, self._blocks, strict=True)
            blocks = [
                buffer.reshape(-1).split_with_sizes(list(of_members))
                for buffer, of_members in sizes
            ]
            # all for the first member, then for the second
            parts = [*chain.from_iterable(zip(*blocks, strict=True))]
        buffers.clear()
        if self._kind == "all_to_all":
            return all_to_all_v(torch.cat(parts), comm, self._sent, self._received, async_op=True)
        return start_packed(self._kind, parts, comm, self._sent, op=op)

    def _is_read_at_start(self, local: Tensor) -> bool:
        """Tell whether a local tensor is not read after `send` has returned."""
        if self._kind == "all_reduce" or is_traced(local):
            # it reduces a copy; a compiler orders reads and writes
            return True
        # In an exchange the blocks that stay are read together with the blocks that arrive.
        is_kept = self._kind == "all_to_all"
        op = "" if self._kind == "all_gather" else self._legs[0].call.op
        return self._is_call and not is_kept and is_read_at_start(local, self._comm, op)

    def receive(
        self, pending: Pending[Flat] | Pending, tensors: list[Tensor], places: Places
    ) -> None:
        """Wait, and store each leg's result in `tensors`, in place of its plan's local tensor."""

        def unpack(arrived: Sequence[Tensor] | Tensor) -> None:
            for leg, got in zip(self._legs, self._parts(arrived, places), strict=True):
                tensors[leg.position] = leg.kernel.finish(got, tensors[leg.position])

        pending.then(unpack).wait()

    def _parts(self, arrived: Sequence[Tensor] | Tensor, places: Places) -> Sequence[Tensor]:
        """Return for each leg the result that its own collective would return."""
        if self._is_call:
            assert isinstance(arrived, Tensor), "a call gives one tensor"
            return [arrived]
        if self._kind in ("all_gather", "all_to_all"):
            return self._joined(arrived, places())
        # one flat tensor in all; of an all-reduce one for each leg
        if self._kind == "reduce_scatter":
            arrived = torch.split(arrived[0], [sizes[self._comm.rank] for sizes in self._arrivals])
        return [part.view(leg.call.shape) for part, leg in zip(arrived, self._legs, strict=True)]

    def _joined(self, arrived: Sequence[Tensor] | Tensor, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks from all members for each leg, joined.

        If they are the result of the plan, they are joined in the wanted tensor.
        """
        shapes = [leg.call.shape for leg in self._legs]
        size = self._comm.size
        fits = [
            bool(wanted) and leg.gives_result and wanted[leg.position].is_contiguous()
            for leg in self._legs
        ]
        into = [
            wanted[leg.position] if fit else None for leg, fit in zip(self._legs, fits, strict=True)
        ]
        # a row for each member
        if self._kind == "all_gather" and self._in_rows and isinstance(arrived, Tensor):
            lengths = [sizes[0] for sizes in self._arrivals]
            results = [
                arrived.new_empty(size * length).view(shape) if out is None else out
                for length, shape, out in zip(lengths, shapes, into, strict=True)
            ]
            torch._foreach_copy_(
                [each.view(size, -1) for each in results], list(torch.split(arrived, lengths, 1))
            )
            return results
        if self._kind == "all_to_all":
            assert isinstance(arrived, Tensor), "an all-to-all brings one tensor"
            arrived = torch.split(arrived, self._received)
        of_members = zip(*self._arrivals, strict=True)
        rows = [
            torch.split(row, list(sizes)) for row, sizes in zip(arrived, of_members, strict=True)
        ]
        results = []
        for blocks, shape, out in zip(zip(*rows, strict=True), shapes, into, strict=True):
            flat = torch.cat(blocks, out=None if out is None else out.view(-1))
            results.append(flat.view(shape) if out is None else out)
        return results


Rounds = tuple[tuple[tuple[Message, ...], ...], tuple[tuple[Stage, ...], ...]]
"""Messages that are under way at the same time, round by round; and for each plan the local steps that remain then."""


def _block_sizes(leg: Leg, size: int) -> Sequence[int]:
    """Return the number of elements of each member's block in the buffer that a leg sends."""
    if leg.call.sizes:
        row = prod(leg.call.shape[1:])
        return [length * row for length in leg.call.sizes]
    sent = leg.step.src.local_shape.numel()
    return [sent if leg.call.kind == "all_gather" else sent // size] * size
