"""Texts about deadlocks and mismatched collectives, with the place of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...argument_types import by_ranks, name_ranks
from .posted_calls import Frame, PostedCall, describe


class RankReport(NamedTuple):
    """The state of one rank.

    Attributes:
        rank: the global rank.
        state: `waits in`, `polls`, `runs`, `has returned`, ...
        call: the call that it waits in, or its last one.
        missing: the global ranks that it waits for.
        frames: the lines of the program, where there is no call.
    """

    rank: int
    state: str
    call: PostedCall | None = None
    missing: tuple[int, ...] = ()
    frames: tuple[Frame, ...] = ()


def deadlock_text(reports: Sequence[RankReport]) -> tuple[str, tuple[int, ...]]:
    """Return the text about ranks that all wait, and the ranks at fault.

    Ranks at fault have returned although others wait for them. Without such ranks, all are.

    Args:
        reports: the state of each rank.
    """
    gone = {report.rank for report in reports if report.call is None or not report.missing}
    awaited = {rank for report in reports for rank in report.missing}
    at_fault = tuple(sorted(awaited & gone))
    heading = "the ranks are in a deadlock: no rank can continue"
    if at_fault:
        verb = "is awaited and does" if len(at_fault) == 1 else "are awaited and do"
        heading += f"; {name_ranks(at_fault)} {verb} not come"
    return "\n".join([heading, *_lines(reports)]), at_fault


def mismatch_text(
    property_name: str, calls: Sequence[PostedCall], reports: Sequence[RankReport]
) -> tuple[str, tuple[int, ...]]:
    """Return the text about calls that cannot meet, and the ranks of the calls.

    Args:
        property_name: the property in which the calls differ, such as `the root`; or a sentence
            about tensors that do not fit (`misfit`).
        calls: the calls.
        reports: the state of each rank.
    """
    is_property = " " not in property_name or property_name.startswith("the ")
    heading = f"ranks differ in {property_name}" if is_property else property_name
    texts = {call.rank: f"{describe(call)}{_place(call.frames)}" for call in calls}
    lines = [f"  {ranks}: {text}" for ranks, text in by_ranks(texts).items()]
    others = [report for report in reports if report.rank not in texts]
    return "\n".join([heading, *lines, *_lines(others)]), tuple(sorted(texts))


def victim_text(rank: int, reason: str) -> tuple[str, tuple[int, ...]]:
    """Return the text for ranks that end because another rank has failed, and the failed rank.

    Args:
        rank: the rank that failed.
        reason: the reason, in words.
    """
    return f"rank {rank} {reason}, so this rank cannot continue", (rank,)


def _lines(reports: Sequence[RankReport]) -> list[str]:
    texts = {report.rank: _state(report) for report in reports}
    return [f"  {ranks}: {text}" for ranks, text in by_ranks(texts).items()]


def _state(report: RankReport) -> str:
    call = report.call
    if call is None:
        return f"{report.state}{_place(report.frames)}"
    if report.state not in {"waits in", "polls"}:
        return f"{report.state}; its last call was {describe(call)}{_place(call.frames)}"
    missing = f", needs {name_ranks(report.missing)}" if report.missing else ""
    return f"{report.state} {describe(call)}{missing}{_place(call.frames)}"


def _place(frames: Sequence[Frame]) -> str:
    """Return the lines of a program, innermost first, below each other."""
    return "".join(f"\n      {frame}" for frame in frames)
