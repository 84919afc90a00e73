"""Redistributions of local shards that run beside computation: started together, waited for later.

`run_all` finishes what it starts.  Here the first round of collectives (for most plans the only one) is under way when
the call returns.  What later rounds need is not there yet, so they run when the results are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shoal_mesh import Comm
from shoal_mesh.internal import (
    PackedPending,
    Pending,
    all_gather_packed,
    all_reduce_packed,
    dataclass,
    reduce_scatter_packed,
    topology_version,
)

from ..layout.spec import Spec
from .even_batches import EvenBatch, even_batches
from .execution.coalesce import Task, assemble, incoming_sizes, key_of, merge, outgoing_blocks, split, taken_apart
from .execution.execute import bind, closing, comm_of, kernels_of
from .execution.kernels import Collective
from .plan import plan
from .steps import AllGather, AllReduce, ReduceScatter

_SENT = torch.empty(0)


class ShardsInFlight:
    """Local tensors under way to other layouts; `wait()` gives them, again and again the same."""

    __slots__ = ("_batches", "_messages", "_results", "_still", "_tasks")

    def __init__(self, shards: Sequence[Tensor], moves: Sequence[tuple[Spec, Spec]]) -> None:
        self._results: list[Tensor] | None = None
        self._tasks: list[Task] = []
        self._messages: list[_Message] = []
        self._batches: list[tuple[EvenBatch, PackedPending]] = []
        self._still: list[Tensor] = []  # shards that stay as they are, at their positions
        batches = even_batches(tuple(moves), topology_version())
        if batches is None:
            ways = [plan(src, dst) for src, dst in moves]
            self._tasks = [Task(way, shard, kernels_of(way)) for way, shard in zip(ways, shards, strict=True)]
            self._messages = _round(self._tasks)
            return
        self._still = list(shards)
        for batch in batches:
            self._batches.append((batch, batch.start(shards)))
            for i in batch.members:
                self._still[i] = _SENT  # gradients are as large as what travels of them

    def poll(self) -> None:
        """Take what has arrived, if that needs no waiting; results are there when `wait` is called."""
        for message in self._messages:
            message.poll()
        for _, pending in self._batches:
            pending.is_completed()

    def wait(self, memory: Callable[[], Sequence[Tensor]] | None = None) -> list[Tensor]:
        """The local tensors in their new layouts, in the order in which they were given.

        Args:
            memory: gives the tensors to write the results to, of their shapes and dtypes, each with memory of its own;
                called when what the collectives have received is here. Fresh tensors when left out.
        """
        if self._results is not None:
            return self._results
        out: list[Tensor] = []

        def places() -> list[Tensor]:
            if memory is not None and not out:
                out.extend(memory())
            return out

        if self._tasks:
            results = self._wait_for_tasks(places)
        else:
            results = self._still
            for batch, pending in self._batches:
                pending.wait(partial(self._take, batch, results, places))
        if memory is not None:
            for tensor, result in zip(places(), results, strict=True):
                if tensor is not result:
                    tensor.copy_(result)
            results = out
        self._results, self._tasks, self._batches, self._still = results, [], [], []
        return results

    @staticmethod
    def _take(
        batch: EvenBatch, results: list[Tensor], places: Callable[[], list[Tensor]], arrived: Sequence[Tensor] | Tensor
    ) -> None:
        batch.take(arrived, results, places())

    def _wait_for_tasks(self, places: Callable[[], list[Tensor]]) -> list[Tensor]:
        while self._messages:
            while self._messages:  # each is dropped with what it received before the next is taken apart
                self._messages.pop(0).deliver(lambda: dict(zip(map(id, self._tasks), places(), strict=False)))
            self._messages = _round(self._tasks)
        return [closing(task.plan)(task.local) for task in self._tasks]


@dataclass(slots=True, eq=False)
class _Message:
    """One collective under way for tasks at steps of one kind.

    Attributes:
        active: the tasks that this rank exchanges something for, `idle` the others.
        calls: the active tasks' collectives, and `shapes` the shapes of their buffers.
        comm: what it runs over; None if this rank takes no part.
        pending: the collective.
    """

    active: list[Task]
    idle: list[Task]
    calls: list[Collective]
    shapes: list[torch.Size]
    comm: Comm | None
    pending: Pending | PackedPending | None

    def poll(self) -> None:
        """Do what can be done without waiting."""
        if self.pending is not None:
            self.pending.is_completed()

    def deliver(self, places: Callable[[], dict[int, Tensor]]) -> None:
        """Give every task its part; where it is the task's result, in its place if it has one."""
        for task in self.idle:
            task.step_alone()
        if isinstance(self.pending, PackedPending):
            self.pending.wait(lambda tensors: self._take(tensors, places()))
        elif self.pending is not None and self.comm is not None:
            got = self.pending.wait()
            parts = (
                split(self.calls, self.shapes, got, self.comm.size, self.comm.rank) if len(self.calls) > 1 else [got]
            )
            for task, part in zip(self.active, parts, strict=True):
                task.finish(part)

    def _take(self, tensors: Sequence[Tensor] | Tensor, places: dict[int, Tensor]) -> None:
        """What a packed collective brings, as the parts of the tasks."""
        assert self.comm is not None, "there is a collective"
        into = [places.get(id(task)) if task.gives_result else None for task in self.active]
        if self.calls[0].kind == "all_reduce":
            parts = [tensor.view(shape) for tensor, shape in zip(tensors, self.shapes, strict=True)]
        else:
            blocks = taken_apart(self.calls, self.shapes, tensors, self.comm.size, self.comm.rank)
            parts = assemble(self.calls, self.shapes, blocks, self.comm.rank, into)
        for task, part in zip(self.active, parts, strict=True):
            task.finish(part)


def redistribute_shards(shards: Sequence[Tensor], moves: Sequence[tuple[Spec, Spec]]) -> ShardsInFlight:
    """`src -> dst` of many local shards together, in as few collectives as possible, beside what follows.

    For modules that hold local tensors themselves; DTensors have `redistribute`, and `coalesce()` for many. It is not
    differentiable. All ranks pass the same moves in the same order.

    Args:
        shards: this rank's local tensors, each of its source's local shape. They must not be written to before the
            results are there.
        moves: for each, the spec that it has and the spec that it is to have: of one global shape and dtype.

    Raises:
        RedistributeError: if a move is impossible.

    Example:
        >>> import torch
        >>> from shoal_dtensor import Replicate, Shard, Spec
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     moves = [(Spec(mesh, [Shard(0)], (n,)), Spec(mesh, [Replicate()], (n,))) for n in (2, 4)]
        ...     in_flight = redistribute_shards([torch.zeros(1), torch.zeros(2)], moves)  # one all-gather
        ...     [tuple(tensor.shape) for tensor in in_flight.wait()]
        [(2,), (4,)]
    """
    return ShardsInFlight(shards, moves)


def _round(tasks: Sequence[Task]) -> list[_Message]:
    """Start the next collective of every task, those of one kind together."""
    waiting: dict[object, list[Task]] = {}
    for task in tasks:
        step = task.advance()
        if step is not None:
            waiting.setdefault(key_of(task, step), []).append(task)
    return [_start(together) for together in waiting.values()]


def _start(tasks: list[Task]) -> _Message:
    """One collective for tasks at steps of one kind, started."""
    calls = [(task, call) for task in tasks if (call := task.call) is not None]
    idle = [task for task in tasks if task.call is None]  # this rank has nothing to exchange in their step
    step = tasks[0].plan.steps[tasks[0].at]
    active, merged = [task for task, _ in calls], [call for _, call in calls]
    buffers = [task.buffer() for task in active]
    shapes = [buffer.shape for buffer in buffers]
    if not calls:
        return _Message(active, idle, merged, shapes, None, None)
    comm = comm_of(merged[0], step.src.mesh)
    if not isinstance(step, AllGather | ReduceScatter | AllReduce):
        call, flat = (merged[0], buffers[0]) if len(calls) == 1 else merge(merged, buffers, comm.size)
        return _Message(active, idle, merged, shapes, comm, bind(call, step.src.mesh, async_op=True)(flat))
    for task in active:
        # The step needs no more of the local tensors.  Gradients of a unit are as large as what travels of them.
        task.local = task.local.new_empty(0)
    return _Message(active, idle, merged, shapes, comm, _packed(merged, buffers, comm))


def _packed(calls: Sequence[Collective], buffers: list[Tensor], comm: Comm) -> PackedPending:
    """One collective for several calls that gather or reduce, started; the buffers are released."""
    blocks = outgoing_blocks(calls, buffers, comm.size)
    shapes = [buffer.shape for buffer in buffers]
    buffers.clear()
    pieces = [of_call[m] for m in range(len(blocks[0])) for of_call in blocks]
    op = calls[0].op
    match calls[0].kind:
        case "all_gather" | "all_gather_v":
            sizes = [sum(n) for n in zip(*incoming_sizes(calls, shapes, comm.size, 0), strict=True)]
            return all_gather_packed(pieces, comm, sizes)
        case "all_reduce":
            return all_reduce_packed(pieces, comm, op)
    sizes = [sum(of_call[m].numel() for of_call in blocks) for m in range(comm.size)]
    return reduce_scatter_packed(pieces, comm, sizes, op)
