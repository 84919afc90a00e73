"""Steps of a collective in shared memory, as a generator yields them."""

from __future__ import annotations

from collections.abc import Iterator

# Steps yield this instead of a request to wait until their next slot is free; the first slot is
# free when they begin.
WAIT_FOR_SLOT = -1
Steps = Iterator[int]


class ReceiveError(Exception):
    """An error of the receiver of a collective's result.

    The caller that waits gets the original error.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause
