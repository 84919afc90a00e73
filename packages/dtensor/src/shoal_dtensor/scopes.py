"""Context-local values, and the immutable `Scope` of settings that dispatch follows.

Decisions depend on the scope, so each scope has a cache of its own. Two blocks with the same
settings and the same rule tables have the same scope, so the second block reuses the decisions of
the first.

May import: errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args
from warnings import warn
from weakref import WeakSet

from shoal_mesh.internal import Event, ScopedValue, in_lockstep, observing

from .errors import ArgumentValueError, CommunicationForbiddenError

Unknown = Literal["replicate", "error", "local"]
Communication = Literal["allow", "warn", "forbid"]


@dataclass(frozen=True, eq=False)
class Scope:
    """The settings inside a block; equal settings under the same rule tables are one object."""

    # the policy for an operator without a rule
    unknown: Unknown = "replicate"
    # whether operators may redistribute their inputs
    communication: Communication = "allow"
    # whether plain tensors among DTensors count as replicated
    plain_is_replicated: bool = False
    # whether gradients that count as replicated are compared over their ranks
    replicas_checked: bool = False
    # rule tables that come before the table of the process, innermost first
    overlays: tuple[Mapping[Any, Any], ...] = ()
    # the scopes under the same rule tables by their settings, at most 3 * 3 * 2 * 2 = 36; all of
    # them share one dict
    siblings: dict[tuple[Any, ...], Scope] = field(default_factory=dict, repr=False)
    # caches of decisions by the operator's id; only the dispatcher uses them
    decisions: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The key of a scope among the scopes under the same rules."""
        return self.unknown, self.communication, self.plain_is_replicated, self.replicas_checked

    def with_settings(self, **settings: Any) -> Scope:
        """Return the scope with these settings and the other settings of this scope."""
        return _register(replace(self, **settings, decisions={}))

    def under(self, overlay: Mapping[Any, Any]) -> Scope:
        """Return a new scope with these settings and a rule table before the other tables."""
        overlays = (overlay, *self.overlays)
        return _register(replace(self, overlays=overlays, siblings={}, decisions={}))


def _register(scope: Scope) -> Scope:
    """Return the one scope with these settings under these rules; it is `scope` the first time."""
    known = scope.siblings.setdefault(scope.settings, scope)
    if known is scope:
        SCOPES.add(scope)
    return known


# all scopes; their decisions change when a rule is registered
SCOPES: WeakSet[Scope] = WeakSet()
DEFAULT = _register(Scope())
_current = ScopedValue("shoal_dtensor_scope", DEFAULT)
current: Callable[[], Scope] = _current.get
entered: Callable[[Scope], AbstractContextManager[None]] = _current.entered
# a block that changes the scope by a function; it may end after the block around it
changed_by: Callable[[Callable[[Scope], Scope]], AbstractContextManager[None]] = _current.change
# for dispatch, because it needs no Python call
context_scope: Callable[[], Scope] = _current.context_value
open_blocks: list[None] = _current.blocks


def change_settings(**settings: Any) -> AbstractContextManager[None]:
    """Return a block with these settings and the other settings of the enclosing scope."""
    return changed_by(lambda scope: scope.with_settings(**settings))


@contextmanager
def unknown_ops(policy: Unknown) -> Iterator[None]:
    """Set how an operator without a rule or a decomposition is run.

    Args:
        policy: "replicate" gathers the operator's inputs, with one warning per operator (the
            default); "error" raises `NoRuleError`; "local" runs the operator on the local tensors
            as they are, which is right only if it treats every element independently.

    Raises:
        ArgumentValueError: if the policy is unknown.

    Example:
        >>> with unknown_ops("error"):
        ...     pass
    """
    _check_policy("unknown_ops", policy, get_args(Unknown))
    with change_settings(unknown=policy):
        yield


@contextmanager
def communication(policy: Communication) -> Iterator[None]:
    """Set whether operators, gradients and reads may communicate on their own.

    The policy covers redistributions of an operator's inputs and the collectives of its local
    function, gradients that are reduced for their leaf, and reads (`item`, `tolist`, `bool`).
    Explicit calls may always communicate: `redistribute`, `full_tensor`, the collectives of
    shoal_mesh and of torch.distributed.

    Args:
        policy: "allow" (the default), "warn", or "forbid", which raises
            `CommunicationForbiddenError` naming the operator, the inputs and the plan or collective
            that it would have needed.

    Raises:
        ArgumentValueError: if the policy is unknown.

    Example:
        >>> with communication("forbid"):
        ...     pass
    """
    _check_policy("communication", policy, get_args(Communication))
    with change_settings(communication=policy):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Count plain tensors among an operator's DTensors as replicated on their mesh.

    Example:
        >>> with implicit_replication():
        ...     pass
    """
    with change_settings(plain_is_replicated=True):
        yield


@contextmanager
def checked_replicas() -> Iterator[None]:
    """Compare replicated gradients over their ranks in backward, for debugging.

    `to_local()` of a replicated tensor gives each rank the same values. If all ranks compute the
    same with them, each rank has the whole gradient. If they compute different things, each rank
    has a summand of the gradient, and the program must declare this by
    `to_local(grad_placements=[Partial()])`. A rank cannot distinguish the two cases from its own
    values. Inside the block, the ranks therefore compare each gradient that counts as replicated,
    by one small collective. `local_map` and the styles of shoal_tp_styles also compare their
    replicated inputs.

    Raises:
        LockstepError: (of shoal_mesh, on every rank) if the ranks' gradients or inputs differ.

    Example:
        >>> with checked_replicas():
        ...     pass
    """
    with change_settings(replicas_checked=True):
        yield


def replicas_are_compared() -> bool:
    """Return whether replicas are compared: in `lockstep()` and in `checked_replicas()`."""
    return context_scope().replicas_checked or in_lockstep()


def _check_policy(setting: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ArgumentValueError(f"{setting}: expected one of {', '.join(allowed)}, got {got!r}")


# --- the communication policy ---------------------------------------------------------------------
#
# Plans and rules declare their communication, so a call can be refused before it runs. In addition,
# local functions run under an observer of the mesh layer, which refuses collectives that a rule
# does not declare.


def notice_of(operation: str, needs: Sequence[str], scope: Scope) -> str:
    """Return the warning for a run of `operation`, with a line for each of its needs.

    Return "" if the policy allows communication, and raise if the policy forbids it.
    """
    if not needs or scope.communication == "allow":
        return ""
    message = f"{operation} needs implicit communication:\n" + "\n".join(needs)
    if scope.communication == "forbid":
        raise CommunicationForbiddenError(
            f"{message}\nredistribute explicitly before, or allow communication here"
        )
    return message


def obey(operation: str, spec: object, plan: Any) -> None:
    """Apply the communication policy to a plan that a gradient or a read is about to run.

    `operation` is the operation, and `spec` the spec of the tensor.
    """
    scope = current()
    if not plan.collectives or scope.communication == "allow":
        return
    need = f"  {plan.src!r} -> {plan.dst!r}\n{plan}"
    notice = notice_of(f"{operation} {spec!r}", [need], scope)
    if notice:
        warn(notice, stacklevel=3)


@contextmanager
def watch_operation(operation: str) -> Iterator[None]:
    """Apply the communication policy to the collectives of this thread inside the block."""
    scope = current()
    thread = threading.get_ident()

    def apply_policy(event: Event) -> None:
        if threading.get_ident() != thread:
            return
        axes = "x".join(event.comm.axes)
        purpose = f" for {event.purpose}" if event.purpose else ""
        need = f"  {event.op} of {event.nbytes} bytes along {axes}{purpose}"
        notice = notice_of(operation, [need], scope)
        if notice:
            warn(notice, stacklevel=2)

    with observing(apply_policy):
        yield
