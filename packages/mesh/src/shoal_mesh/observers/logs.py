"""Decisions and collectives as records of `logging` under `shoal`, or as ranges of a profile.

Switch topics on by `SHOAL_LOG=plans,collectives python train.py`, or by `log_to_stderr("plans")` in
the program. Topics are loggers: `shoal.collectives` (each collective with its mesh axes, bytes and
time), `shoal.plans` (each redistribution, before it first runs) and `shoal.decisions` (each
operator, when its result placements are decided). Programs that configure `logging` themselves use
these names.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

from torch.profiler import record_function

from ..errors import MeshError
from ..events import Event, observe, observing

TOPICS = ("collectives", "plans", "decisions")
_collectives = logging.getLogger("shoal.collectives")


def _log(event: Event) -> None:
    """Log a collective that has returned."""
    collective = f"{event.op} {event.reduce_op}".rstrip()
    shapes = " ".join(str(tuple(tensor.shape)) for tensor in event.tensors)
    axes = "x".join(event.comm.axes)
    purpose = f": {event.purpose}" if event.purpose else ""
    microseconds = event.seconds * 1e6
    _collectives.debug(
        "%s [%s] %s %d B in %.0f us%s",
        collective,
        axes,
        shapes,
        event.nbytes,
        microseconds,
        purpose,
    )


def log_to_stderr(*topics: str) -> None:
    """Log topics to stderr from now on.

    This is the same as starting the program with `SHOAL_LOG=topic,topic`.

    Args:
        topics: some of `collectives`, `plans` and `decisions`; all of them if left out.

    Raises:
        MeshError: if a topic is unknown.

    Example:
        >>> log_to_stderr("sums")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        shoal_mesh.errors.MeshError: unknown log topic 'sums': expected collectives, plans, ...
    """
    for topic in topics:
        if topic not in TOPICS:
            raise MeshError(f"unknown log topic {topic!r}: expected {', '.join(TOPICS)}, or all")
    root = logging.getLogger("shoal")
    if not any(handler.name == "shoal" for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        # a later call finds the handler by this name
        handler.name = "shoal"
        rank = os.environ.get("RANK", "-")
        handler.setFormatter(logging.Formatter(f"[rank {rank}] %(name)s: %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    for topic in topics or TOPICS:
        logger = logging.getLogger(f"shoal.{topic}")
        if topic == "collectives" and not logger.isEnabledFor(logging.DEBUG):
            observe(SimpleNamespace(before=lambda event: None, after=_log))
        logger.setLevel(logging.DEBUG)


def log_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Log the topics that `SHOAL_LOG` names, if it is set."""
    names = environment.get("SHOAL_LOG", "")
    if not names:
        return
    topics = TOPICS if names == "all" else names.split(",")
    log_to_stderr(*topics)


@contextmanager
def annotate_collectives() -> Iterator[None]:
    """Add a range for every collective to the traces of torch.profiler.

    Example:
        >>> def example() -> list[str]:
        ...     with torch.profiler.profile(acc_events=True) as profile, annotate_collectives():
        ...         all_reduce(torch.ones(8), comm_over((0, 1)))
        ...     keys = [event.key for event in profile.key_averages()]
        ...     return [key for key in keys if key.startswith("shoal::")]
        >>> launch(example, 2)[0]
        ['shoal::all_reduce[ranks] 32 B']
    """
    ranges: dict[int, record_function] = {}

    def begin(event: Event) -> None:
        axes = "x".join(event.comm.axes)
        profiled = record_function(f"shoal::{event.op}[{axes}] {event.nbytes} B")
        profiled.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        ranges[id(event)] = profiled

    def end(event: Event) -> None:
        ranges.pop(id(event)).__exit__(None, None, None)

    with observing(begin, end):
        yield
