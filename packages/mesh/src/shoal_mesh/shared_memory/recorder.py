"""The recorder: the last collectives that this process has started, always on, written to a file when a rank is lost.

An entry takes about a fifth of a microsecond. `python -m shoal_mesh postmortem` reads the files of all ranks.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

# Packages whose frames are no lines of the program, by whole names: a program may be in `shoal_experiments`.
LIBRARIES = r"(shoal_(mesh|dtensor|tp_styles|shard_api)|torch)"
SWITCH = "SHOAL_POSTMORTEM"  # the folder of the files; "0" for none
Text = str | Callable[[], str]
# What a collective is for, as the program says it with `purpose`, innermost last.
PURPOSES: ContextVar[tuple[Text, ...]] = ContextVar("shoal_mesh_purposes", default=())
# Declared mutable state: time, group, what (a request, or a backend's name of it, dtype, elements, reduction and root)
# and purposes. A shorter entry is a note.
ENTRIES: deque[tuple[float, str, Any, tuple[Text, ...]] | tuple[str, int]] = deque(maxlen=512)

_append, _now, _purposes = ENTRIES.append, time.monotonic, PURPOSES.get


def note(said: tuple[str, int]) -> None:
    """Remember what the next collectives of this process are for; cheaper than `purpose`, for the recorder alone.

    Args:
        said: the purpose, and how many collectives it has at least.

    Example:
        >>> note(("redistribute S(0) -> R", 1))
    """
    _append(said)


def record(group: str, what: Any) -> None:
    """Remember that a collective starts."""
    _append((_now(), group, what, _purposes()))


def last_of_backend(group: str) -> str:
    """The last call of the backend of a group, in words; 'nothing' if it is no longer known."""
    last = next((entry for entry in reversed(ENTRIES) if entry[1] == group and isinstance(entry[2], tuple)), None)
    return "nothing" if last is None else _of_backend(*last[2])


def folder() -> str:
    """Where this process leaves its file; '' for nowhere. Ranks of one launcher have one folder."""
    given = os.environ.get(SWITCH, "")
    if given:
        return "" if given == "0" else given
    from tempfile import gettempdir

    return os.path.join(gettempdir(), f"shoal_postmortem_{os.getuid()}_{os.getppid()}")


def dump(facts: dict[str, Any], in_words: Callable[[int], str]) -> str:
    """Write down what this rank did last.

    Args:
        facts: `rank` and `world`; `error`, what has happened as far as this rank knows; `culprits`, the ranks that are
            at fault; `seen`, what this one has last seen of others.
        in_words: what a request says.

    Returns:
        What to add to the error: the command that reads the files; '' where nothing was written.
    """
    path, now = folder(), time.monotonic()
    if not path:
        return ""
    import json
    import socket
    import traceback

    last = [
        (round(now - at, 3), group, in_words(what) if isinstance(what, int) else _of_backend(*what), _joined(texts))
        for at, group, what, texts in _with_notes()
    ]
    written = {
        **facts,
        "process": os.getpid(),
        "host": socket.gethostname(),
        "time": time.time(),
        "collectives": last,
        "stack": [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_stack()],
    }
    with suppress(OSError):
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.stat(path).st_uid != os.getuid():  # a name in a shared folder may be somebody else's
            return ""
        whole, partial = (os.path.join(path, f"rank{facts['rank']}{end}") for end in (".json", ".json.part"))
        with open(partial, "w") as file:
            json.dump(written, file)
        os.replace(partial, whole)
        return f" (what all ranks did last: python -m {__package__.partition('.')[0]} postmortem {path})"
    return ""


def _with_notes() -> Iterator[tuple[float, str, Any, tuple[Text, ...]]]:
    """The collectives, each with the note that it belongs to."""
    said, left = "", 0
    for entry in [*ENTRIES]:
        if len(entry) == 2:
            said, left = entry
            continue
        at, group, what, texts = entry
        yield at, group, what, (*texts, said) if left > 0 else texts
        left -= 1


def _of_backend(kind: str, dtype: object, count: int, op: str, root: int) -> str:
    """A call of a backend, in words."""
    extra = f" {op}" if op else f" from {root}" if kind == "broadcast" else ""
    return f"{kind}{extra} of {count or 'any number'} x {str(dtype).removeprefix('torch.')}"


def _joined(texts: tuple[Text, ...]) -> str:
    """What a collective was for."""
    purposes = []
    for text in reversed(texts):
        with suppress(Exception):  # a text of the program's own, which is asked late
            purposes.append(text if isinstance(text, str) else text())
    return "; ".join(purposes)
