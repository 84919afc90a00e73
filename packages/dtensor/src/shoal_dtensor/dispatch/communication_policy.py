"""`communication("warn" | "forbid")`: what an operator, a gradient or a read may start on its own.

Plans and rules say beforehand what they send, and are refused before anything runs.  Beside that, local functions run
under an observer of the mesh layer, so a collective that no rule declares is refused as well.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from warnings import warn

from shoal_mesh.internal import Event, observe, unobserve

from ..errors import CommunicationForbiddenError
from ..scopes import Scope, current

if TYPE_CHECKING:
    from ..layout.spec import Spec
    from ..redistribute.steps import Plan


def notice_of(what: str, needs: Sequence[str], scope: Scope) -> str:
    """What to warn of whenever a call runs; nothing if it does not communicate, or may.

    Args:
        what: the operator with its inputs.
        needs: a line for each plan or collective that it needs.
        scope: the policies that hold.

    Raises:
        CommunicationForbiddenError: if it communicates and must not.
    """
    if not needs or scope.communication == "allow":
        return ""
    message = f"{what} needs implicit communication:\n" + "\n".join(needs)
    if scope.communication == "forbid":
        raise CommunicationForbiddenError(f"{message}\nredistribute explicitly before, or allow communication here")
    return message


def obey(what: str, spec: Spec, way: Plan) -> None:
    """Apply the policy that holds to a plan that a gradient or a read is about to run.

    Args:
        what: what runs it; spec: that of the tensor it belongs to. Both are for the message: text costs 5 us.
        way: the plan.

    Raises:
        CommunicationForbiddenError: if it communicates and must not.
    """
    scope = current()
    if way.collectives and scope.communication != "allow":
        notice = notice_of(f"{what} {spec!r}", [f"  {way.src!r} -> {way.dst!r}\n{way}"], scope)
        if notice:
            warn(notice, stacklevel=3)


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Inside the block, a collective of this thread is warned of or refused, as the policy that holds says."""
    guard = _Guard(what, current())
    observe(guard)
    try:
        yield
    finally:
        unobserve(guard)


class _Guard:
    """The observer of one local call."""

    def __init__(self, what: str, scope: Scope) -> None:
        self.what, self.scope, self.thread = what, scope, threading.get_ident()

    def before(self, event: Event) -> None:
        """Warn of a collective of the watched thread, or refuse it."""
        if threading.get_ident() == self.thread:
            purpose = f" for {event.purpose}" if event.purpose else ""
            need = f"  {event.op} of {event.nbytes} bytes along {'x'.join(event.comm.axes)}{purpose}"
            notice = notice_of(self.what, [need], self.scope)
            if notice:
                warn(notice, stacklevel=2)

    def after(self, event: Event) -> None:
        """Nothing to do."""
