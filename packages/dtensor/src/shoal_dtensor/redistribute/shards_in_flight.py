"""Redistributions of local shards that run beside computation: started together, waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal_mesh.internal import PackedPending, Pending

from ..layout.spec import Spec
from .execution.messages import Message, Places, rounds_of
from .plan import plan
from .steps import Plan


class ShardsInFlight:
    """Local tensors under way to other layouts; `wait()` gives them, again and again the same.

    The first round of collectives (for most plans the only one) is under way when the object has been made. What later
    rounds need is not there yet, so they run when the results are asked for.
    """

    __slots__ = ("_after", "_messages", "_results", "_rounds", "_tensors")

    def __init__(self, plans: Sequence[Plan], shards: Sequence[Tensor], *, packs: bool = False) -> None:
        self._rounds, self._after = rounds_of(tuple(plans), tuple([shard.device for shard in shards]), packs)
        self._tensors = list(shards)
        self._messages: list[tuple[Message, Pending | PackedPending]] = []
        self._results: list[Tensor] | None = None
        self._go_on()

    def _go_on(self) -> None:
        """Start the next round of collectives; behind the last one, do the local steps that remain."""
        if self._rounds:
            messages, self._rounds = self._rounds[0], self._rounds[1:]
            self._messages = [(message, message.send(self._tensors)) for message in messages]
            return
        for i, stages in enumerate(self._after):
            for stage in stages:
                self._tensors[i] = stage(self._tensors[i])

    def _finish_round(self, places: Places) -> None:
        while self._messages:  # each is dropped with what it has received before the next is unpacked
            message, pending = self._messages[0]
            message.receive(pending, self._tensors, places)
            del self._messages[0], pending
        self._go_on()

    def reach_last_round(self) -> None:
        """Wait for all rounds but the last: from here on `wait` starts nothing that other ranks wait for."""
        while self._rounds:
            self._finish_round(tuple)

    def poll(self) -> None:
        """Take what has arrived, if that needs no waiting; results are there when `wait` is called."""
        for _, pending in self._messages:
            pending.is_completed()

    def wait(self, memory: Callable[[], Sequence[Tensor]] | None = None) -> list[Tensor]:
        """The local tensors in their new layouts, in the order in which they were given.

        Args:
            memory: gives the tensors to write the results to, of their shapes and dtypes, each with memory of its own;
                called when what the collectives have received is here. Fresh tensors when left out.
        """
        if self._results is None:
            wanted: list[Tensor] = []

            def places() -> Sequence[Tensor]:
                if memory is not None and not wanted:
                    wanted.extend(memory())
                return wanted

            while self._messages:
                self._finish_round(places)
            self._results = self._tensors
            for i, target in enumerate(places()):
                if target is not self._results[i]:
                    self._results[i] = target.copy_(self._results[i])
        return self._results


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
    return ShardsInFlight([plan(src, dst) for src, dst in moves], shards, packs=True)
