"""A collective that has been started and not yet waited for."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ..transport import Handle


class Pending:
    """A collective under way. `wait()` returns its result; waiting again returns the same tensor.

    Example:
        >>> def example() -> list[float]:
        ...     pending = all_reduce(torch.ones(2), comm_over((0, 1)), async_op=True)
        ...     return pending.then(lambda total: total * 10).wait().tolist()
        >>> launch(example, 2)
        [[20.0, 20.0], [20.0, 20.0]]
    """

    __slots__ = ("_then", "_value", "_work", "waits")

    def __init__(self, value: Tensor, work: Handle | None, then: Callable[[Tensor], Tensor] | None = None) -> None:
        self._value, self._work, self._then = value, work, then
        self.waits: list[tuple[float, float]] | None = None  # where an observer has asked for them

    def wait(self) -> Tensor:
        """The result. On the CPU it has arrived; on CUDA the current stream waits for it, the host does not."""
        if self._work is not None:
            wait_noted(self._work.wait, self.waits)
            self._work = None
        if self._then is not None:
            self._value, self._then = self._then(self._value), None
        return self._value

    def then(self, function: Callable[[Tensor], Tensor]) -> Pending:
        """The same collective, its result passed through `function`; use the returned object from now on."""
        first = self._then
        after = Pending(self._value, self._work, function if first is None else lambda value: function(first(value)))
        after.waits = self.waits
        return after

    def is_completed(self) -> bool:
        """Whether the backend is done, so that `wait()` would not block."""
        return self._work is None or bool(self._work.is_completed())


def wait_noted(wait: Callable[[], object], waits: list[tuple[float, float]] | None) -> None:
    """Wait, and note from when to when if somebody has asked for it."""
    if waits is None:
        wait()
        return
    begin = time.perf_counter()
    wait()
    waits.append((begin, time.perf_counter()))
