"""The end of a program of a hunt after its first forward, which runs under the checker of types."""

from __future__ import annotations

from collections.abc import Callable

from shoal_dtensor.errors import SpmdTypeError

__all__ = ["EndOfForward", "type_error_of"]


class EndOfForward(Exception):
    """The first forward and its loss have passed."""


def type_error_of(train: Callable[[], object]) -> str | None:
    """Return the checker's error about the first forward of a training; empty if it passes.

    None if the program ends before for another reason, as programs that are refused do.

    Args:
        train: raises `EndOfForward` after the first loss.
    """
    try:
        train()
    except EndOfForward:
        return ""
    except SpmdTypeError as error:
        return str(error)
    except Exception:
        return None
    raise AssertionError("a training has a forward")
