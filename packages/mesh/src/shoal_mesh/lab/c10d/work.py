"""Works and futures of calls in a lab.

A work or a future has no thread of its own: a rank that waits for it enters the scheduler, which
lets the other ranks continue. C++ code waits for a future without the scheduler.
DistributedDataParallel does so at the end of a backward pass. A future that is made in a backward
pass is therefore completed at the end of this pass, before C++ waits for it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._torch import Work, in_backward, run_at_end_of_backward
from .link import PendingCall, SchedulerLink


class LabFuture(torch.futures.Future[Any]):
    """A future that enters the scheduler when a program waits for it.

    Args:
        complete: completes the call that the future stands for.
    """

    def __init__(self, complete: Callable[[], None]) -> None:
        super().__init__()
        self._complete = complete

    def wait(self) -> Any:
        """Wait for the call, and return the result."""
        if not self.done():
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> LabFuture:
        """Return a future of the result of a callback, which gets this future.

        Args:
            callback: the function.
        """
        child = LabFuture(self._complete)

        def run(parent: Any) -> None:
            try:
                child.set_result(callback(parent))
            except Exception as error:
                child.set_exception(error)

        self.add_done_callback(run)
        return child


class LabWork(Work):
    """The work of one call.

    Args:
        link: the link of the rank.
        pending: the posted call.
        result: the tensors that the call returns.
    """

    def __init__(self, link: SchedulerLink, pending: PendingCall, result: list[Tensor]) -> None:
        super().__init__()
        self._link = link
        self._pending = pending
        self._result = result
        self._future: LabFuture | None = None

    def wait(self, timeout: dt.timedelta = dt.timedelta(0)) -> bool:
        """Wait until the call is done; a deadlock raises at once, whatever the timeout.

        Args:
            timeout: ignored.
        """
        if not self._pending.is_done:
            self._link.wait(self._pending)
        if self._future is not None and not self._future.done():
            self._future.set_result(self._result)
        return True

    def is_completed(self) -> bool:
        """Return whether the call is done; the other ranks run before the answer."""
        if not self._pending.is_done and self._link.poll(self._pending):
            self.wait()
        return self._pending.is_done

    def is_success(self) -> bool:
        """Return whether the call is done."""
        return self._pending.is_done

    def synchronize(self) -> None:
        """Wait until the call is done."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait until the call is done."""
        self.wait()

    def exception(self) -> None:
        """Return None: errors are raised by `wait`."""

    def result(self) -> list[Tensor]:
        """Return the tensors that the call has written."""
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        self.wait()
        assert self._pending.source is not None, "a receive has a source"
        return self._pending.source

    def get_future(self) -> LabFuture:
        """Return a future of the result."""
        if self._future is None:
            self._future = LabFuture(self._complete)
            if self._pending.is_done:
                self._future.set_result(self._result)
            elif in_backward():
                run_at_end_of_backward(self._complete)
        return self._future

    def _complete(self) -> None:
        self.wait()
