"""Many redistributions of one moment in few collectives.

The plans advance side by side, from one communicating step to the next.  Those that do the same
kind of step over the same axes travel as one buffer, in which the blocks of all tensors for a member
of the group follow one another.  What is merged follows from the plans alone, never from what
this rank holds, so all ranks merge alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from math import prod

import torch
from torch import Tensor

from shoal_mesh import purpose
from shoal_mesh.internal import dataclass

from ...errors import RedistributeError
from ..steps import AllToAll, Exchange, Plan, Reduction, Step, Transfer
from .execute import bind, closing, comm_of, identity, kernels_of, run
from .kernels import Collective, Kernel

# What the members' blocks travel as when several tensors share one call.
_MERGED = {
    "all_gather": "all_gather_v",
    "all_gather_v": "all_gather_v",
    "reduce_scatter": "reduce_scatter_v",
    "reduce_scatter_v": "reduce_scatter_v",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_v",
    "all_to_all_v": "all_to_all_v",
}


class QueuedPlan:
    """A redistribution that is done together with the others of its batch; `wait()` gives the new local tensor."""

    __slots__ = ("_result", "_source", "_version", "batch", "local", "plan")

    def __init__(self, batch: CoalescedBatch, plan: Plan, local: Tensor, source: Tensor) -> None:
        self.batch: CoalescedBatch = batch
        self.plan: Plan = plan
        self.local: Tensor = local
        self._source, self._version = source, source._version
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """The result; the first of a batch to be asked runs them all."""
        if self._result is None:
            self.batch.flush()
        assert self._result is not None, "a flush serves every member of the batch"
        return self._result

    def arrive(self, result: Tensor) -> None:
        """Take the result; the source is needed no more."""
        self._result = result
        del self.local, self._source

    @property
    def stale(self) -> bool:
        """Whether the source has been written to meanwhile."""
        return self._source._version != self._version


class CoalescedBatch:
    """Redistributions that have been asked for and not run yet."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: list[QueuedPlan] = []

    def add(self, plan: Plan, local: Tensor, source: Tensor) -> QueuedPlan:
        """Ask for one more; `source` is the tensor whose version shows writes to `local` (a DTensor, or itself)."""
        self._queue.append(QueuedPlan(self, plan, local, source))
        return self._queue[-1]

    def flush(self) -> None:
        """Run all that have been asked for.

        Raises:
            RedistributeError: if a source has been written to since it was asked for.
        """
        queue, self._queue = self._queue, []
        for i, queued in enumerate(queue):
            if queued.stale:
                raise RedistributeError(
                    f"the source of redistribution {i} ({queued.plan.src!r} to {queued.plan.dst!r}) of several that "
                    "travel together was written to before it was sent; use the result first, or leave the coalesce() "
                    "block before writing; gradients of leaves travel at the end of a backward pass"
                )
        results = run_all([queued.plan for queued in queue], [queued.local for queued in queue])
        for queued, result in zip(queue, results, strict=True):
            queued.arrive(result)


_CURRENT: ContextVar[CoalescedBatch | None] = ContextVar("shoal_dtensor_batch", default=None)


def current_batch() -> CoalescedBatch | None:
    """The batch of the innermost `coalesce()`, None outside."""
    return _CURRENT.get()


@contextmanager
def coalesce() -> Iterator[CoalescedBatch]:
    """Have the redistributions of a block travel together, in as few collectives as possible.

    They run when the block ends, or as soon as a result is used.  Like everything collective, all ranks must do the
    same in the same order.  Sources must not be written to meanwhile.

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
    token = _CURRENT.set(batch)
    try:
        yield batch
    finally:
        _CURRENT.reset(token)
    batch.flush()


@dataclass(slots=True, eq=False)
class Task:
    """One redistribution on its way."""

    plan: Plan
    local: Tensor
    kernels: tuple[Kernel, ...]
    at: int = 0

    @property
    def gives_result(self) -> bool:
        """Whether the next collective gives the result of the plan as it is."""
        last = self.at == len(self.plan.steps) - 1
        return last and self.kernels[self.at].finish is None and closing(self.plan) is identity

    def advance(self) -> Step | None:
        """Run local steps up to the next one that communicates; None at the end."""
        while self.at < len(self.plan.steps):
            step = self.plan.steps[self.at]
            if step.communicates:
                return step
            self.step_alone()
        return None

    def step_alone(self) -> None:
        """A step that needs no communication on this rank."""
        finish = self.kernels[self.at].finish
        if finish is not None:
            self.local = finish(self.local, self.local)
        self.at += 1

    @property
    def call(self) -> Collective | None:
        """This rank's part of the next step; None if its group has nothing to exchange."""
        return self.kernels[self.at].collective

    def buffer(self) -> Tensor:
        """What the next collective takes."""
        prepare = self.kernels[self.at].prepare
        return self.local if prepare is None else prepare(self.local)

    def finish(self, got: Tensor) -> None:
        """Take what the collective gave."""
        finish = self.kernels[self.at].finish
        self.local = got if finish is None else finish(got, self.local)
        self.at += 1


def run_all(plans: Sequence[Plan], locals_: Sequence[Tensor]) -> list[Tensor]:
    """What `run` would give for each plan, with as few collectives as possible.

    All ranks must pass the same plans in the same order.

    Args:
        plans: one for each tensor; their meshes may differ.
        locals_: the local tensors.
    """
    if len(plans) == 1:
        with _announced(plans):
            return [run(plans[0], locals_[0])]
    tasks = [Task(plan, local, kernels_of(plan)) for plan, local in zip(plans, locals_, strict=True)]
    while True:
        waiting: dict[object, list[Task]] = {}
        for task in tasks:
            step = task.advance()
            if step is not None:
                waiting.setdefault(key_of(task, step), []).append(task)
        if not waiting:
            return [closing(task.plan)(task.local) for task in tasks]
        for together in waiting.values():
            with _announced([task.plan for task in together]):
                _call(together)


def _announced(plans: Sequence[Plan]) -> AbstractContextManager[None]:
    """Inside the block, observers of collectives see what they are for."""
    return purpose("; ".join([plan.purpose for plan in plans]))


def key_of(task: Task, step: Step) -> object:
    """What steps that travel together have in common; equal on all ranks that exchange something in them.

    Meshes of other shapes may have the same communicator: a parameter of a data x tensor mesh and one of its data axis
    travel in one message over that axis.
    """
    mesh = step.src.mesh
    ranks = (
        step.ranks
        if isinstance(step, Transfer)
        else ()
        if mesh.get_coordinate() is None
        else mesh.comm(step.axes).ranks
    )
    op = step.op if isinstance(step, Reduction) else ""
    kind = Exchange if isinstance(step, AllToAll | Transfer) else type(step)
    return mesh if not ranks else None, ranks, kind, op, step.src.dtype, task.local.device


def _call(tasks: list[Task]) -> None:
    """One collective for all tasks."""
    mesh = tasks[0].plan.steps[tasks[0].at].src.mesh
    active: list[Task] = []
    calls: list[Collective] = []
    for task in tasks:
        call = task.call
        if call is None:
            task.step_alone()
        else:
            active.append(task)
            calls.append(call)
    buffers = [task.buffer() for task in active]
    if len(active) == 1:
        active[0].finish(bind(calls[0], mesh)(buffers[0]))
    if len(active) < 2:
        return
    comm = comm_of(calls[0], mesh)
    merged, flat = merge(calls, buffers, comm.size)
    parts = split(calls, [buffer.shape for buffer in buffers], bind(merged, mesh)(flat), comm.size, comm.rank)
    for task, part in zip(active, parts, strict=True):
        task.finish(part)


def merge(calls: Sequence[Collective], buffers: Sequence[Tensor], size: int) -> tuple[Collective, Tensor]:
    """One call and one flat buffer for several calls of one kind over a group of `size` ranks."""
    outgoing = outgoing_blocks(calls, buffers, size)
    flat = torch.cat([blocks[m] for m in range(len(outgoing[0])) for blocks in outgoing])
    kind, first = _MERGED[calls[0].kind], calls[0]
    sizes: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    if kind in ("reduce_scatter_v", "all_to_all_v"):
        sizes = tuple(sum(blocks[m].numel() for blocks in outgoing) for m in range(size))
    if kind in ("all_gather_v", "all_to_all_v"):
        incoming = incoming_sizes(calls, [buffer.shape for buffer in buffers], size, 0)
        receives = tuple(sum(counts[m] for counts in incoming) for m in range(size))
        sizes = sizes or receives
    return Collective(kind, first.axes, op=first.op, sizes=sizes, receives=receives, ranks=first.ranks), flat


def split(calls: Sequence[Collective], shapes: Sequence[torch.Size], got: Tensor, size: int, me: int) -> list[Tensor]:
    """What each of several merged calls would have given to member `me`, of buffers of some shapes."""
    incoming = incoming_sizes(calls, shapes, size, me)
    of_members = torch.split(got, [sum(counts) for counts in zip(*incoming, strict=True)])
    return assemble(calls, shapes, taken_apart(calls, shapes, of_members, size, me), me)


def taken_apart(
    calls: Sequence[Collective], shapes: Sequence[torch.Size], of_members: Sequence[Tensor] | Tensor, size: int, me: int
) -> list[list[Tensor]]:
    """For each of several merged calls the flat blocks of the members, of what each member has sent to `me`."""
    incoming = incoming_sizes(calls, shapes, size, me)
    rows = [torch.split(row, list(counts)) for row, counts in zip(of_members, zip(*incoming, strict=True), strict=True)]
    return [list(blocks) for blocks in zip(*rows, strict=True)]


def assemble(
    calls: Sequence[Collective],
    shapes: Sequence[torch.Size],
    blocks: Sequence[Sequence[Tensor]],
    me: int,
    into: Sequence[Tensor | None] | None = None,
) -> list[Tensor]:
    """The results of calls on member `me`.

    Args:
        calls: the calls.
        shapes: of their buffers.
        blocks: for each, the flat blocks of the members.
        me: this member.
        into: for each call that gathers, the tensor to write its result to; a fresh one where None.
    """
    results = zip(calls, shapes, blocks, into or [None] * len(calls), strict=True)
    return [_assemble(call, shape, own, me, out) for call, shape, own, out in results]


def outgoing_blocks(calls: Sequence[Collective], buffers: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    """What each call sends to each member, flat; one entry if it is the same for all."""
    return [_outgoing(call, buffer, size) for call, buffer in zip(calls, buffers, strict=True)]


def incoming_sizes(
    calls: Sequence[Collective], shapes: Sequence[torch.Size], size: int, me: int
) -> list[Sequence[int]]:
    """Elements that each call delivers from each member; one entry if they are reduced into one."""
    return [_incoming(call, shape, size, me) for call, shape in zip(calls, shapes, strict=True)]


def _outgoing(call: Collective, buffer: Tensor, size: int) -> list[Tensor]:
    """What a call sends to each member, flat; one entry if it is the same for all."""
    match call.kind:
        case "reduce_scatter" | "reduce_scatter_v":
            lengths = list(call.sizes) or [buffer.shape[call.dim] // size] * size
            return [block.reshape(-1) for block in buffer.split_with_sizes(lengths, call.dim)]
        case "all_to_all":
            return [block.reshape(-1) for block in buffer.chunk(size, call.dim)]
        case "all_to_all_v":
            return list(buffer.split_with_sizes(list(call.sizes)))
    return [buffer.reshape(-1)]


def _incoming(call: Collective, shape: torch.Size, size: int, me: int) -> Sequence[int]:
    """Elements that a call delivers from each member; one entry if they are reduced into one."""
    match call.kind:
        case "all_gather":
            return [shape.numel()] * size
        case "all_gather_v":
            return [n * _across(shape, call.dim) for n in call.sizes]
        case "reduce_scatter":
            return [shape.numel() // size]
        case "reduce_scatter_v":
            return [call.sizes[me] * _across(shape, call.dim)]
        case "all_to_all":
            return [shape.numel() // size] * size
        case "all_to_all_v":
            return call.receives
    return [shape.numel()]


def _across(shape: torch.Size, dim: int) -> int:
    """Elements of one layer across `dim`."""
    return prod(n for d, n in enumerate(shape) if d != dim)


def _assemble(
    call: Collective, shape: torch.Size, blocks: Sequence[Tensor], me: int, out: Tensor | None = None
) -> Tensor:
    """The result of a call from the flat blocks of its members."""
    match call.kind:
        case "all_gather" | "all_gather_v":
            lengths = call.sizes or [shape[call.dim]] * len(blocks)
            blocks = [p.view(_with(shape, call.dim, n)) for p, n in zip(blocks, lengths, strict=True)]
            return torch.cat(blocks, call.dim, out=out)
        case "reduce_scatter" | "reduce_scatter_v":
            whole = prod(shape[: call.dim] + shape[call.dim + 1 :])
            length = call.sizes[me] if call.sizes else blocks[0].numel() // max(1, whole)
            return blocks[0].reshape(_with(shape, call.dim, length))
        case "all_to_all":
            block_shape = _with(shape, call.dim, shape[call.dim] // len(blocks))
            return torch.cat([block.view(block_shape) for block in blocks], call.receives[0])
        case "all_to_all_v":
            return torch.cat(list(blocks))
    return blocks[0].view(shape)


def _with(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]
