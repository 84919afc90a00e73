"""What a call does once it is decided, as data: one class per kind of call; and what it may communicate on its own.

`communication("warn" | "forbid")` says so for operators, gradients and reads.  Plans and rules say beforehand what they
send, and are refused before anything runs.  Beside that, local functions run under an observer of the mesh layer, so a
collective that no rule declares is refused as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

from shoal_mesh.internal import Event, observing

from ..errors import CommunicationForbiddenError
from ..scopes import Scope, current

if TYPE_CHECKING:
    from ..layout.spec import Spec
    from ..redistribute.steps import Plan


class ResultKind(IntEnum):
    """How the result of a local call becomes DTensors."""

    ONE = 0  # one new tensor
    FIRST = 1  # the first argument, written in place
    LIST = 2  # a list or tuple of new tensors
    NONE = 3  # no tensor at all
    NESTED = 4  # anything else
    DYNAMIC = 5  # replicated tensors whose shapes are known only afterwards
    COMPOSITE = 6  # DTensors already


class InputMove(NamedTuple):
    """An input that must be redistributed before the call, or a written one that is redistributed back after it."""

    place: int | str  # its position, or its name
    item: int | None  # its index if the argument is a list; None if it is the argument itself
    plan: Plan  # how it is redistributed

    def within(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What contains the input among these arguments, and the index or name that it has there."""
        container = args if isinstance(self.place, int) else kwargs
        return (container, self.place) if self.item is None else (container[self.place], self.item)


@dataclass(slots=True, frozen=True, eq=False)
class Decision:
    """What one call does: redistribute inputs, call a function on the local tensors, wrap what it returns."""

    call: Callable[..., Any]  # the function
    result_kind: ResultKind  # what becomes of its result
    outputs: tuple[Spec, ...] = ()  # the spec of every tensor output, flattened
    # for each output the flat index of the input that it is (in-place and `out=` forms), or None
    aliased: tuple[int | None, ...] = ()
    # the arguments that an operator without result writes to, which torch does not count
    unreported_writes: tuple[int | str, ...] = ()
    slow_path: bool = False  # whether there is more to do, which the following say
    moves: tuple[InputMove, ...] = ()  # the inputs that must be redistributed first
    # the written ones among them, from where they were written to their own layout
    write_backs: tuple[InputMove, ...] = ()
    # whether a view operator's output does not alias its input, because that was redistributed
    view_copied: bool = False
    foreach: bool = False  # whether the operator does the same to every element of its lists, one after the other
    verifies_plain: bool = False  # whether the ranks compare the plain tensors among the inputs, in every call
    reason: str = ""  # what the collectives are for, as debug modes and errors of the mesh layer repeat it
    notice: str = ""  # what to warn of when it runs
    # the operator with its inputs, if the communication policy holds for its local function; else empty
    watched: str = ""

    @classmethod
    def composite(cls, function: Callable[..., Any], *, verifies_plain: bool = False) -> Decision:
        """Call a function on the DTensors themselves: it computes the operator by other operators."""
        return cls(function, ResultKind.COMPOSITE, slow_path=True, verifies_plain=verifies_plain)


# --- the communication policy -----------------------------------------------------------------------------------------


def notice_of(what: str, needs: Sequence[str], scope: Scope) -> str:
    """What to warn of whenever `what` runs, with a line for each plan or collective; "" if it needs none, or may.

    Raises:
        CommunicationForbiddenError: if it communicates and must not.
    """
    if not needs or scope.communication == "allow":
        return ""
    message = f"{what} needs implicit communication:\n" + "\n".join(needs)
    if scope.communication == "forbid":
        raise CommunicationForbiddenError(f"{message}\nredistribute explicitly before, or allow communication here")
    return message


def obey(what: str, spec: Spec, plan: Plan) -> None:
    """Apply the policy that holds to a plan that a gradient or a read is about to run: `what` of a tensor, its `spec`.

    Raises:
        CommunicationForbiddenError: if it communicates and must not.
    """
    scope = current()
    if plan.collectives and scope.communication != "allow":
        notice = notice_of(f"{what} {spec!r}", [f"  {plan.src!r} -> {plan.dst!r}\n{plan}"], scope)
        if notice:
            warn(notice, stacklevel=3)


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Inside the block, a collective of this thread is warned of or refused, as the policy that holds says."""
    scope, thread = current(), threading.get_ident()

    def before(event: Event) -> None:
        if threading.get_ident() == thread:
            purpose = f" for {event.purpose}" if event.purpose else ""
            need = f"  {event.op} of {event.nbytes} bytes along {'x'.join(event.comm.axes)}{purpose}"
            notice = notice_of(what, [need], scope)
            if notice:
                warn(notice, stacklevel=2)

    with observing(before):
        yield
