"""The scoped settings that dispatch obeys: one immutable `Scope` per context.

A scope is a value in a context variable: blocks nest, an inner block's end restores the outer one, and threads do
not see each other's.  Decisions depend on the scope, so each scope identity has its own decision cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

__all__ = [
    "DEFAULT",
    "Scope",
    "checked_replicas",
    "communication",
    "current",
    "implicit_replication",
    "unknown_ops",
    "within",
]

Unknown = Literal["replicate", "error", "local"]
Communication = Literal["allow", "warn", "forbid"]


@dataclass(frozen=True, eq=False)
class Scope:
    """What holds inside a block; compared by identity.

    Attributes:
        unknown: what happens to an operator without a rule.
        communication: whether operators may redistribute their inputs.
        plain_is_replicated: whether plain tensors among DTensors count as replicated.
        replicas_checked: whether gradients that count as replicated are compared over their ranks.
        overlays: rule tables that come before the standing one, innermost first.
        decisions: the cache of this scope by the operator's id, owned by the dispatcher.
        composite_decisions: the cache of operators inside decompositions, where plain tensors count as replicated.
    """

    unknown: Unknown = "replicate"
    communication: Communication = "allow"
    plain_is_replicated: bool = False
    replicas_checked: bool = False
    overlays: tuple[Mapping[Any, Any], ...] = ()
    decisions: dict[Any, Any] = field(default_factory=dict, repr=False)
    composite_decisions: dict[Any, Any] = field(default_factory=dict, repr=False)


DEFAULT = Scope()
_current: ContextVar[Scope] = ContextVar("shoal_dtensor_scope", default=DEFAULT)
current = _current.get


@contextmanager
def within(**changes: Any) -> Iterator[Scope]:
    """Inside the block, the current scope with some fields changed and a cache of its own."""
    scope = replace(_current.get(), **{"decisions": {}, "composite_decisions": {}, **changes})
    token = _current.set(scope)
    try:
        yield scope
    finally:
        _current.reset(token)


@contextmanager
def unknown_ops(policy: Unknown) -> Iterator[None]:
    """Set what happens to an operator that has no rule and no decomposition.

    Args:
        policy: "replicate" gathers its inputs, with one warning per operator (the default); "error" raises
            `NoRuleError`; "local" runs it on the local tensors as they are, which is right only if the operator treats
            every element for itself.

    Raises:
        ValueError: if the policy is unknown.

    Example:
        >>> with unknown_ops("error"):
        ...     pass
    """
    _check("unknown_ops", policy, get_args(Unknown))
    with within(unknown=policy):
        yield


@contextmanager
def communication(policy: Communication) -> Iterator[None]:
    """Set whether operators may redistribute their inputs on their own; explicit `redistribute` calls always may.

    Args:
        policy: "allow" (the default), "warn", or "forbid", which raises `CommunicationForbiddenError`
            naming the operator, the inputs and the plan that it would have needed.

    Raises:
        ValueError: if the policy is unknown.

    Example:
        >>> with communication("forbid"):
        ...     pass
    """
    _check("communication", policy, get_args(Communication))
    with within(communication=policy):
        yield


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Inside the block, plain tensors that meet DTensors in an operator count as replicated on their mesh.

    Example:
        >>> with implicit_replication():
        ...     pass
    """
    with within(plain_is_replicated=True):
        yield


@contextmanager
def checked_replicas() -> Iterator[None]:
    """For debugging: inside the block, a gradient that counts as replicated is compared over its ranks in backward.

    `to_local()` of a replicated tensor gives each rank the same values; where ranks then compute different things with
    them, each has a different part of the gradient, and `to_local(grad_placements=[Partial()])` is what says so.
    No local information tells the two cases apart, so this costs one small collective for each such gradient; on a
    difference every rank raises `shoal_mesh.LockstepError`.

    Example:
        >>> with checked_replicas():
        ...     pass
    """
    with within(replicas_checked=True):
        yield


def _check(what: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ValueError(f"{what}: expected one of {', '.join(allowed)}, got {got!r}")
