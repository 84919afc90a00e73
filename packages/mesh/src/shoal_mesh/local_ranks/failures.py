"""Failures of ranks: the data that a rank sends, and the report that the parent shows.

The text of the error has up to ten lines for each traceback. Ranks with equal tracebacks share one.
The text ends with the reason: ranks that failed by themselves come after the ranks that waited for
them. Whole tracebacks, variables and output are in a file.
"""

from __future__ import annotations

import os
import pickle
import re
import reprlib
import sysconfig
import tempfile
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType, TracebackType
from typing import NamedTuple

from ..argument_types import by_ranks, name_ranks
from ..errors import PeerError
from ..watch.recorder import LIBRARIES, SWITCH
from .pickle_functions import dump

# the most lines of the text about one traceback, with its heading
MOST_LINES = 10
# the most characters of a line of an error's message
_MOST_CHARACTERS = 400
# the lines that are shown from the end of a rank's output
_PRINTED_LINES = MOST_LINES - 1
_LIBRARY_MODULE = re.compile(rf"(^|\.){LIBRARIES}(\.|$)")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED_PATH = re.compile(
    rf'site-packages|/{LIBRARIES}/|"{re.escape(_STANDARD_LIBRARY)}|"<frozen'
)
# A rank puts this before the reason of another rank, which may itself have it from a third rank.
_REPEATED = re.compile(r"rank \d+ \(process \d+\) has given up a collective in shared memory: ")
# Declared mutable state: the file of this process's last failure.
_WRITTEN: list[str] = []


class Failure(NamedTuple):
    """An exception on one rank.

    Attributes:
        kind: name of the exception's type.
        message: its text.
        trace: the formatted traceback, with the locals of the failing function.
        skip: whether the exception requests to skip the test.
        error: the pickled exception, None when it cannot be pickled.
        summary: the innermost lines of the program, and the error; if it is '', the report has the
            end of the traceback instead.
        is_victim: whether the rank failed because another rank did.
    """

    kind: str
    message: str
    trace: str
    skip: bool = False
    error: bytes | None = None
    summary: str = ""
    is_victim: bool = False


class Outcome(NamedTuple):
    """The results and failures of the ranks of one call, for its report.

    Attributes:
        name: name of the function.
        size: number of ranks.
        failures: the failures, by rank.
        stacks: the stacks of the ranks that had not returned, by rank.
        printed: the output of ranks that do not print to the output of the parent, by rank.
        limit: the time limit of the ranks in words, such as `in 60 s`.
    """

    name: str
    size: int
    failures: Mapping[int, Failure]
    stacks: Mapping[int, str]
    printed: Mapping[int, str]
    limit: str


# --- on a rank ------------------------------------------------------------------------------------


def failure_of(error: BaseException) -> Failure:
    """Describe an exception for the parent."""
    kind = type(error).__name__
    try:
        pickled = dump(error)
        pickle.loads(pickled)
    except Exception:
        # pickling an exception of the program may raise any error
        pickled = None
    trace = "".join(traceback.format_exception(error))
    return Failure(
        kind,
        message=str(error),
        trace=trace + _locals(error.__traceback__),
        skip=kind in {"SkipTest", "Skipped"},
        error=pickled,
        summary=_summary(error),
        is_victim=isinstance(error, PeerError),
    )


def _summary(error: BaseException) -> str:
    """Return a summary of a traceback in nine lines.

    It has the two innermost frames of the program, the innermost frame of all, and the message.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = traceback.extract_tb(error.__traceback__)
    innermost = len(steps) - 1
    # without the frames of the worker, which called the function of the program
    of_program = [i for i, frame in enumerate(frames) if _is_of_program(frame)]
    message = _message_lines(error)
    # a message of three lines or more leaves room for one frame of the program
    most_frames = 1 if len(message) > 2 else 2
    shown = of_program[-most_frames:] or [innermost]
    lines: list[str] = []
    for i in shown:
        lines += _frame_lines(steps[i])
    hidden = innermost - shown[-1]
    if hidden > 1:
        lines.append(f"  ... {hidden - 1} more calls")
    if hidden:
        lines += _frame_lines(steps[innermost])
    room = MOST_LINES - 1 - len(lines)
    if len(message) > room:
        left_out = len(message) - (room - 1)
        message = [*message[: room - 1], f"... {left_out} more lines"]
    return "\n".join([*lines, *message])


def _is_of_program(frame: FrameType) -> bool:
    """Return whether a frame is outside of packages, the standard library, torch and shoal."""
    path = frame.f_code.co_filename
    if "site-packages" in path or path.startswith(_STANDARD_LIBRARY):
        return False
    return _LIBRARY_MODULE.search(frame.f_globals.get("__name__", "")) is None


def _frame_lines(step: traceback.FrameSummary) -> list[str]:
    """Return the lines of one frame in a traceback."""
    heading = f'  File "{step.filename}", line {step.lineno}, in {step.name}'
    return [heading, f"    {step.line}"] if step.line else [heading]


def _message_lines(error: BaseException) -> list[str]:
    """Return the class, text and notes of an error."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    return [line[:_MOST_CHARACTERS] for line in text.splitlines()]


def _locals(trace: TracebackType | None) -> str:
    """Return short values of the variables in the innermost frame outside of installed packages."""
    innermost: FrameType | None = None
    for frame, _ in traceback.walk_tb(trace):
        is_installed = "site-packages" in frame.f_code.co_filename
        if not is_installed and __package__ not in frame.f_globals.get("__name__", ""):
            innermost = frame
    if innermost is None:
        return ""
    short = reprlib.Repr()
    short.maxother = 160
    short.maxstring = 160
    lines = []
    for name, value in list(innermost.f_locals.items())[:20]:
        try:
            text = " ".join(short.repr(value).split())
        except Exception:
            # a broken __repr__ must not hide the failure
            text = f"<{type(value).__name__}>"
        lines.append(f"    {name} = {text}\n")
    if not lines:
        return ""
    return f"  variables of {innermost.f_code.co_name}:\n{''.join(lines)}"


# --- in the parent --------------------------------------------------------------------------------


def report(outcome: Outcome) -> str:
    """Return the text about ranks that failed or hang; whole tracebacks are in a file."""
    heading = _heading(outcome)
    path = _write(_full_report(outcome, heading))
    if path:
        heading += f" (whole tracebacks, variables and output: {path})"
    paragraphs = [heading]
    for rank, text in outcome.printed.items():
        paragraphs += _paragraph(f"rank {rank} printed", _last_lines(text, _PRINTED_LINES))
    for rank, stack in outcome.stacks.items():
        paragraphs += _paragraph(f"rank {rank} stood at", _innermost_calls(stack))
    # first the ranks that failed because of others, then the ranks that failed by themselves
    for are_victims in (True, False):
        failures = {
            rank: failure
            for rank, failure in outcome.failures.items()
            if failure.is_victim is are_victims
        }
        for ranks, text in _group_by_summary(failures):
            paragraphs += _paragraph(name_ranks(ranks), text)
    return "\n".join(paragraphs)


def _heading(outcome: Outcome) -> str:
    """Return the line that says which ranks failed, had not returned, and had returned."""
    failures = outcome.failures
    hung = outcome.stacks
    parts = []
    if failures:
        parts.append(f"{outcome.name} failed on {name_ranks(failures)} of {outcome.size}")
    if hung:
        parts.append(f"{name_ranks(hung)} had not returned {outcome.limit}")
    ranks = range(outcome.size)
    returned = [rank for rank in ranks if rank not in failures and rank not in hung]
    if returned:
        parts.append(f"{name_ranks(returned)} had returned")
    return "; ".join(parts)


def _group_by_summary(failures: Mapping[int, Failure]) -> list[tuple[list[int], str]]:
    """Return the ranks that have equal summaries, with the summary of the first of them.

    Summaries also count as equal if they repeat one reason, and differ only in the rank that gave
    up before (`_REPEATED`).
    """
    groups: dict[str, tuple[list[int], str]] = {}
    for rank, failure in sorted(failures.items()):
        summary = failure.summary or _last_lines(failure.trace, MOST_LINES - 1)
        ranks, _ = groups.setdefault(_REPEATED.sub("", summary), ([], summary))
        ranks.append(rank)
    return list(groups.values())


def _paragraph(title: str, text: str) -> list[str]:
    """Return a text under a title; no paragraph if the text is empty."""
    return [f"--- {title} ---\n{text}"] if text.strip() else []


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def _innermost_calls(stack: str) -> str:
    """Return the two innermost calls of the main thread, and calls of the program around them.

    `stack` is a dump of faulthandler, which has the most recent call first.
    """
    main = stack.rpartition("Current thread")[2] or stack.rpartition("Thread ")[2]
    calls = [line for line in main.splitlines() if line.lstrip().startswith("File ")]
    of_program = [line for line in calls[2:] if not _INSTALLED_PATH.search(line)]
    shown = [*calls[:2], *of_program]
    return "\n".join(shown[: MOST_LINES - 1]) or "unknown"


def _full_report(outcome: Outcome, heading: str) -> str:
    """Return all that is known: tracebacks with variables, stacks and output."""
    paragraphs = [heading]
    for rank, text in outcome.printed.items():
        paragraphs += _paragraph(f"rank {rank} printed", text.rstrip())
    for rank, stack in outcome.stacks.items():
        paragraphs += _paragraph(f"rank {rank} stood at", stack.rstrip() or "unknown")
    traces = by_ranks({rank: failure.trace for rank, failure in outcome.failures.items()})
    for ranks, trace in traces.items():
        paragraphs += _paragraph(ranks, trace.rstrip())
    return "\n".join(paragraphs) + "\n"


def _write(text: str) -> str:
    """Write the report of the last failure of this process; return its path, or ''."""
    if os.environ.get(SWITCH) == "0":
        return ""
    with suppress(OSError):
        file, path = tempfile.mkstemp(prefix="shoal_failure_", suffix=".txt")
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        _remove(_WRITTEN)
        _WRITTEN[:] = [path]
        return path
    return ""


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
