"""The link of a rank to its lab: posts calls, waits for them, and reaches the stores.

Each isolation (threads or processes) has a class of links. The thread of a rank holds its link as
an object that torch copies to the threads of backward passes. A hook that autograd calls on another
thread therefore finds the link of its rank.
"""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

from torch import Tensor

from ... import _torch
from ...errors import MeshError
from ...watch.recorder import LIBRARIES
from ..scheduling.posted_calls import Frame, GroupKey, PostedCall
from ..scheduling.store_request import StoreRequest

# the name of the thread's object (`_torch.thread_object`)
_KEY = "shoal_mesh.lab"
# lines of the program in the text of an error, for each call
_MOST_FRAMES = 4
_STANDARD_LIBRARIES = frozenset({"importlib", "runpy", "contextlib", "threading", "concurrent"})
# Declared mutable state: the link of a process that is one rank, for all of its threads.
_OF_PROCESS: list[SchedulerLink] = []


@dataclass(slots=True, eq=False)
class PendingCall:
    """A posted call with its tensors.

    Attributes:
        number: its number, distinct within the rank.
        call: the call.
        inputs: the tensors that this rank brings.
        outputs: the tensors that it receives.
        is_done: whether the outputs are written.
        source: for a message, the global rank that has sent it.
        state: the ticket of the call, if ranks are threads.
    """

    number: int
    call: PostedCall
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    is_done: bool = False
    source: int | None = None
    state: Any = None


@dataclass(slots=True)
class RankFacts:
    """The place of a rank in its lab.

    Attributes:
        rank: the global rank.
        size: number of ranks.
        device: the device type that stands for every accelerator, or None.
        suffix: appended to names of groups in the registry of the process.
        generations: how often each group was created.
    """

    rank: int
    size: int
    device: str | None = None
    suffix: str = ""
    generations: dict[GroupKey, int] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class SchedulerLink(ABC):
    """The connection of one rank to the scheduler.

    Attributes:
        facts: the place of the rank.
        stores: the stores of the rank. C++ has no reference to the Python object of a store, which
            this list keeps alive.
    """

    facts: RankFacts
    stores: list[Any] = field(default_factory=list, init=False)
    # how many collectives the rank has started in each group
    _started: dict[GroupKey, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def post(
        self, call: PostedCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> PendingCall:
        """Enter a call, and return its record; other ranks may not have arrived.

        Args:
            call: the call.
            inputs: the tensors that this rank brings, not written before the call is done.
            outputs: the tensors that it receives.
        """

    @abstractmethod
    def wait(self, pending: PendingCall) -> None:
        """Wait until the outputs of a call are written.

        Args:
            pending: the call.

        Raises:
            LockstepError: ranks differ, or are in a deadlock.
            PeerError: another rank has failed.
        """

    @abstractmethod
    def poll(self, pending: PendingCall) -> bool:
        """Return whether a call is complete; other ranks run first.

        Args:
            pending: the call.
        """

    @abstractmethod
    def ask_store(self, request: StoreRequest) -> Any:
        """Return the answer of the stores to a request, which may have to wait.

        Args:
            request: the request.

        Raises:
            TimeoutError: the request has a time limit, and all ranks wait.
        """

    def count_started(self, key: GroupKey) -> int:
        """Return how many collectives this rank has started in a group.

        Args:
            key: the group.
        """
        return self._started.get(key, 0)

    def count_start(self, key: GroupKey) -> int:
        """Return the number of the collective that this rank starts in a group.

        Args:
            key: the group.
        """
        number = self._started.get(key, 0)
        self._started[key] = number + 1
        return number

    def next_generation(self, key: GroupKey) -> GroupKey:
        """Return the identity of a new group, distinct from earlier groups of its name and ranks.

        Args:
            key: its name and ranks.
        """
        times = self.facts.generations.get(key, 0)
        self.facts.generations[key] = times + 1
        return key._replace(generation=times)


def enter_process(link: SchedulerLink) -> None:
    """Make a link the link of all threads of this process.

    Args:
        link: the link.
    """
    _OF_PROCESS[:] = [link]


def enter_thread(link: SchedulerLink | None) -> None:
    """Make a link the link of this thread, and of the backward passes that it starts.

    Args:
        link: the link; None for a thread that is not a rank any more.
    """
    _torch.set_thread_object(_KEY, link)


def current_link() -> SchedulerLink | None:
    """Return the link of the rank that this thread acts for, or None."""
    if _OF_PROCESS:
        return _OF_PROCESS[0]
    link: SchedulerLink | None = _torch.thread_object(_KEY)
    return link


def require_link() -> SchedulerLink:
    """Return the link of the rank that this thread acts for.

    Raises:
        MeshError: the thread is not a rank of a lab.
    """
    link = current_link()
    if link is None:
        raise MeshError(
            "the backend lab needs ranks of a lab, and this thread is not one: start it by "
            "lab(4).run(function), and use isolation='process' for programs that start threads"
        )
    return link


@lru_cache(maxsize=4096)
def _is_of_library(module: str) -> bool:
    """Return whether a module belongs to torch, to these packages or to machinery of Python."""
    package = module.partition(".")[0]
    return package in _STANDARD_LIBRARIES or re.fullmatch(LIBRARIES, package) is not None


def program_frames() -> tuple[Frame, ...]:
    """Return the innermost lines of the program that calls a collective, innermost first."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _MOST_FRAMES:
        if not _is_of_library(frame.f_globals.get("__name__", "")):
            code = frame.f_code
            frames.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)
