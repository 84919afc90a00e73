"""A default group and groups of c10d for each rank on a thread.

c10d keeps its groups in one object, `_world`, which other modules have imported. While a lab runs
on threads, the class of this object is replaced by a subclass: its properties return the groups of
a rank to the thread of the rank, and the unchanged groups of the process to all other threads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ... import _torch
from ..c10d.link import current_link
from .threads import ThreadLink


@dataclass(slots=True)
class Groups:
    """The groups of one rank, by the names that `_world` has for them."""

    _default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


def _property(name: str) -> property:
    """Return a property of `_world` that reads and writes the groups of the rank."""
    ordinary = getattr(type(_torch.WORLDS), name, None)

    def read(world: Any) -> Any:
        groups = _groups_of_rank()
        if groups is not None:
            return getattr(groups, name)
        return world.__dict__[name] if ordinary is None else ordinary.fget(world)

    def write(world: Any, value: Any) -> None:
        groups = _groups_of_rank()
        if groups is not None:
            setattr(groups, name, value)
        elif ordinary is None:
            world.__dict__[name] = value
        else:
            ordinary.fset(world, value)

    return property(read, write)


def _groups_of_rank() -> Groups | None:
    link = current_link()
    return link.groups if isinstance(link, RankLink) else None


@dataclass(eq=False, repr=False)
class RankLink(ThreadLink):
    """The link of a rank on a thread that has groups of its own.

    Attributes:
        groups: its groups.
    """

    groups: Groups = field(default_factory=Groups, init=False)


_ORDINARY = type(_torch.WORLDS)
_PROPERTIES = {name: _property(name) for name in Groups.__slots__}
# torch's `default_pg` needs no replacement, because it reads `_default_pg`
_WORLD_OF_THREADS = type("_WorldOfThreads", (_ORDINARY,), _PROPERTIES)
# Declared mutable state: the number of labs that run on threads now.
_OPEN = [0]
_LOCK = threading.Lock()


@contextmanager
def worlds_of_threads() -> Iterator[None]:
    """Open a block in which the threads of ranks have groups of their own."""
    hook = sys.excepthook
    with _LOCK:
        _OPEN[0] += 1
        _torch.WORLDS.__class__ = _WORLD_OF_THREADS
    try:
        yield
    finally:
        with _LOCK:
            _OPEN[0] -= 1
            if not _OPEN[0]:
                _torch.WORLDS.__class__ = _ORDINARY
        # c10d has wrapped the hook once for each rank
        sys.excepthook = hook
