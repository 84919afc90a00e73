"""The hot path: every operator on DTensors passes through `dispatch`.

Unwrap the arguments into a key of specs and static values, look the decision up, redistribute what it says, run the
local function, wrap what comes out.  All thinking happens once per key, in `propagate`; no operator is named here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from warnings import warn

from shoal_mesh import purpose

from ._torch import OpOverload, around
from .copies import follow
from .policy import current, entered
from .propagate import Decision, Form, decide, rule_of
from .redistribute import run_once, write_back
from .unwrapping import Readers, readers_of, specs_of
from .wrapping import settled, tensors_in, wrap_all, wrap_dynamic
from .writes import count_writes, in_turn, one_by_one

__all__ = ["cache_info", "clear_cache", "dispatch"]

# Decisions kept per operator and scope; when full, the oldest goes.  A training step needs a handful per operator.
MAX_DECISIONS = 4096

_ONE, _SAME, _LIST = Form.ONE, Form.SAME, Form.LIST


class _Known:
    """What a scope knows of one operator: how its arguments are read, and its decisions by key."""

    __slots__ = ("decisions", "op", "readers", "tail")

    def __init__(self, op: OpOverload, readers: Readers) -> None:
        self.op, self.readers = op, readers
        rest = readers.positional[1:]
        self.tail = bool(rest) and not any(rest)  # whether all but the first are keys
        self.decisions: dict[Any, Decision] = {}

    def remember(self, key: Any, decision: Decision) -> None:
        """Keep a decision, in place of the oldest if there are too many."""
        if len(self.decisions) >= MAX_DECISIONS:
            del self.decisions[next(iter(self.decisions))]
        self.decisions[key] = decision


class _Call(NamedTuple):
    """One call that is not run on the fast path: its arguments, and what the local call gets for them."""

    cls: Any
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    local: Sequence[Any]
    named: Mapping[str, Any]


# One function on purpose: a call takes 60 ns of the microsecond there is; a loop over one or two tensors takes 100.
def dispatch(  # noqa: C901, PLR0912, PLR0915  # see above
    cls: Any, op: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run an operator on DTensors; bound to the class, it is `__torch_dispatch__`.

    Args:
        cls: the DTensor class; its attribute `copied_view` is the subclass of views that do not alias their base.
        types: the types of the tensors among the arguments that have a `__torch_dispatch__`, each once.
        op, args, kwargs: the overload and its arguments, DTensors among them.
    """
    try:
        known = current().decisions[id(op)]  # an overload's own hash is a Python function
    except KeyError:
        known = _first_seen(cls, op)
    named = kwargs = {} if kwargs is None else kwargs
    key: Any
    local: Any
    count = 3 if kwargs else len(args)
    if count == 1 and type(args[0]) is cls:
        (one,) = args
        key, local = (one._spec,), (one._local_tensor,)
    elif count == 2 and type(args[0]) is cls and type(args[1]) is cls:
        one, two = args
        key, local = (one._spec, two._spec), (one._local_tensor, two._local_tensor)
    elif known.tail and not kwargs and type(args[0]) is cls:
        one, rest = args[0], args[1:]
        key, local = (one._spec, rest), (one._local_tensor, *rest)
    else:
        key, local, readers = [], [], known.readers.positional
        for arg in args:
            if type(arg) is cls:
                key.append(arg._spec)
                local.append(arg._local_tensor)
            elif arg is None or (read := readers[len(local)]) is None:
                key.append(arg)
                local.append(arg)
            else:
                local.append(read(arg, key, types))
        if kwargs:
            named = known.readers.keywords(kwargs, key, types)
        key = tuple(key)
    try:
        decision = known.decisions[key]
    except KeyError:
        return _decided(_Call(cls, op, args, kwargs, local, named), known, key)
    if decision.special:
        return _general(_Call(cls, op, args, kwargs, local, named), decision)
    result = decision.call(*local, **named) if kwargs else decision.call(*local)
    if decision.form is _ONE:
        return around(cls, result, decision.outputs[0], False)
    if decision.form is _SAME:
        return args[0]
    if decision.form is _LIST:
        made: list[Any] = []
        for part in result:
            made.append(around(cls, part, decision.outputs[len(made)], False))
        return made
    if decision.silent:
        count_writes(decision.silent, args, kwargs)
    return result


def _first_seen(cls: Any, op: OpOverload) -> _Known:
    """Start to know an operator in the current scope."""
    scope = current()
    rule = rule_of(op, scope)
    known = _Known(op, readers_of(op, cls, by_value=rule is None or rule.by_value))
    return scope.decisions.setdefault(id(op), known)  # type: ignore[no-any-return]  # policy knows no decisions


def _decided(call: _Call, known: _Known, key: tuple[Any, ...]) -> Any:
    """Decide a call that was not seen before, remember how, lest a failing local call is decided anew, and run it."""
    scope = current()
    tensors = enumerate(tensors_in([*call.args, *call.kwargs.values()]))
    copies = frozenset(i for i, item in tensors if isinstance(item, call.cls.copied_view))
    args, kwargs = specs_of(call.cls, call.op, call.args, call.kwargs, replicated=scope.plain_is_replicated, key=key)
    decision = decide(call.op, args, kwargs, scope, copies)
    known.remember(key, decision)
    return _general(call, decision, first=(known, key))


def _general(call: _Call, decision: Decision, first: tuple[_Known, tuple[Any, ...]] | None = None) -> Any:
    """Run any decision; `first` is where it is kept, so that what its first result shows can be remembered."""
    cls, op, args, kwargs, local, named = call
    if decision.composite:
        with entered(current().changed(plain_is_replicated=True)):
            return decision.call(*args, **kwargs)
    if decision.plans:
        if decision.each and in_turn([move.within(args, kwargs) for move in decision.plans], decision.silent, args):
            return one_by_one(op, args, kwargs)
        local, named = _moved(call, decision)
    result = decision.call(*local, **named)
    for move in decision.back:
        (results, at), (owners, _) = move.within(local, named), move.within(args, kwargs)
        write_back(move.plan, results[at], owners[at])
    count_writes(decision.silent, args, kwargs)
    made = cls.copied_view if decision.copied else cls
    if decision.form is _ONE and first is None and not decision.dynamic and not decision.copied:
        return around(made, result, decision.outputs[0], False)
    originals = [*tensors_in([*args, *kwargs.values()])]
    if decision.dynamic:
        return wrap_dynamic(cls, result, originals)
    specs = decision.outputs
    if first:
        specs = settled(op, specs, decision.aliased, [*tensors_in([result])])
        if specs != decision.outputs:
            first[0].decisions[first[1]] = replace(decision, outputs=specs)
    made = wrap_all(made, result, iter(zip(specs, decision.aliased, strict=True)), originals)
    return follow(op, args, kwargs, made) if decision.copied else made


def _moved(call: _Call, decision: Decision) -> tuple[list[Any], dict[str, Any]]:
    """The local arguments after the redistributions that a decision says."""
    if decision.notice:
        warn(decision.notice, stacklevel=2)
    local, named = [*call.local], {**call.named}
    with purpose(decision.reason) if decision.reason else nullcontext():
        for move in decision.plans:
            (parts, at), (owners, _) = move.within(local, named), move.within(call.args, call.kwargs)
            parts[at] = run_once(move.plan, parts[at], owners[at], fresh=bool(decision.back))
    return local, named


def cache_info() -> dict[str, int]:
    """Number of remembered decisions per operator, over all policies."""
    counts: Counter[str] = Counter()
    for scope in current().alike.values():
        counts.update({str(known.op): len(known.decisions) for known in scope.decisions.values()})
    return dict(counts)


def clear_cache() -> None:
    """Forget all decisions, whatever the policy."""
    for scope in current().alike.values():
        scope.decisions.clear()
