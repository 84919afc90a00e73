"""The hot path: every operator on DTensors passes through `dispatch`.

Unwrap the arguments into a key of specs and static values, look the decision up, redistribute what it says, run the
local function, wrap what comes out.  All thinking happens once per key, in `propagate`; no operator is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from shoal_mesh import purpose

from ._torch import OpOverload, composed_in, draws, in_backward, is_all_zero, is_nameless
from .errors import MixedTensorError
from .placements import Replicate
from .policy import Scope, current, within
from .propagate import Decision, Form, decide, rule_of
from .redistribute import run_once, write_back
from .rng import check_in_step, generator_of
from .spec import Spec
from .wrapping import replace_tensors, settled, tensors_in, wrap, wrap_all, wrap_dynamic

__all__ = ["cache_info", "clear_cache", "dispatch"]

# Decisions kept per operator and scope; when full, the oldest goes.  A training step needs a handful per operator.
MAX_DECISIONS = 4096

_ONE, _SAME, _LIST, _OTHER = Form.ONE, Form.SAME, Form.LIST, Form.OTHER
_SPEC, _LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")
_INTS = {int}
_NUMBERS = frozenset({int, float, bool, complex})


class _Plain(NamedTuple):
    """A plain tensor among the arguments, as part of a key.

    Attributes:
        own: whether torch itself made it: inside an operator, inside a function that composes operators in Python, or
            in place of a gradient that nobody gave.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    own: bool


class _Decisions(dict[Any, Decision]):
    """The decisions of one operator; `by_value` says whether numbers are part of the key, or only their types."""

    __slots__ = ("by_value",)

    def __init__(self, *, by_value: bool) -> None:
        self.by_value = by_value


# One function with many branches on purpose: a call costs 60 ns in Python, and the whole budget is 1 us.
def dispatch(cls: Any, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: C901, PLR0912  # see above
    """Run an operator on DTensors.

    Args:
        cls: the DTensor class; its attribute `copied_view` is the subclass of views that do not alias their base.
        op: the overload; args, kwargs: its arguments, DTensors among them.
    """
    scope = current()
    decisions = scope.decisions.get(op)
    if decisions is None:
        rule = rule_of(op, scope)
        decisions = scope.decisions[op] = _Decisions(by_value=rule is None or rule.by_value)
    key: list[Any] = []
    local: list[Any] = []
    by_value = decisions.by_value
    for arg in args:
        kind = type(arg)
        if kind is cls:
            key.append(arg._spec)
            local.append(arg._local_tensor)
        elif arg is None or (kind is int and by_value):
            key.append(arg)
            local.append(arg)
        else:
            local.append(_unwrap(cls, arg, key, by_value))
    named: dict[str, Any] = {}
    for name, arg in kwargs.items():
        key.append(name)
        named[name] = _unwrap(cls, arg, key, by_value)
    try:
        decision = decisions[tuple(key)]
    except KeyError:
        decision = _decided(cls, op, args, kwargs, scope, tuple(key))
        return _general(cls, decision, args, kwargs, local, named, first=(op, scope.decisions[op], tuple(key)))
    form = decision.form
    if form is _OTHER:
        return _general(cls, decision, args, kwargs, local, named)
    result = decision.call(*local, **named) if named else decision.call(*local)
    if form is _ONE:
        return wrap(cls, result, decision.outputs[0])
    if form is _SAME:
        return args[0]
    if form is _LIST:
        made = list(map(wrap, repeat(cls), result, decision.outputs))
        return made if type(result) is list else tuple(made)
    return result


def _unwrap(cls: Any, arg: Any, key: list[Any], by_value: bool) -> Any:  # noqa: C901, PLR0912  # hot, as dispatch is
    """The local form of an argument; what decides about its sharding is added to `key`.

    1, 1.0 and True are equal keys but different arguments, so numbers other than plain ints carry their type.
    """
    kind = type(arg)
    if kind in _NUMBERS:
        if not by_value:
            key.append(kind)
        elif kind is int:
            key.append(arg)
        else:
            key += (kind, arg)
        return arg
    if kind is list or kind is tuple:
        kinds = set(map(type, arg))
        if kinds == {cls}:
            key.append(len(arg))
            key += map(_SPEC, arg)
            return list(map(_LOCAL, arg))
        if kinds == _INTS and by_value:
            key.append(tuple(arg))
            return arg
        key.append(len(arg))
        return [_unwrap(cls, item, key, by_value) for item in arg]
    if isinstance(arg, cls):
        local = arg._local_tensor  # before the class is looked at: the first use of a pending tensor changes it
        key.append(arg._spec)
        if type(arg) is not cls:
            key.append(type(arg))
        return local
    if isinstance(arg, torch.Tensor):
        own = arg.ndim > 0 and (is_nameless(arg) or (in_backward() and is_all_zero(arg)) or composed_in(cls, arg) != "")
        key.append(_Plain(arg.shape, arg.stride(), arg.dtype, own))
        return arg.resolve_conj().resolve_neg()
    elif isinstance(arg, torch.Generator):
        key.append(torch.Generator)
    else:
        key.append(arg)
    return arg


def _decided(
    cls: Any, op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: Scope, key: tuple[Any, ...]
) -> Decision:
    """Decide a call that was not seen before, and remember it."""
    found = [item for item in tensors_in([*args, *kwargs.values()]) if isinstance(item, cls)]
    meshes = dict.fromkeys(item._spec.mesh for item in found)
    plain = (entry for entry in key if type(entry) is _Plain)

    def specs(value: Any) -> Any:
        if isinstance(value, cls):
            return value._spec
        if isinstance(value, torch.Tensor):
            if value.dtype.is_floating_point and value.ndim and draws(composed_in(cls, value)):
                check_in_step(next(iter(meshes)), generator_of(value.device))
            return _replicated(op, next(plain), list(meshes), scope)
        return [specs(item) for item in value] if isinstance(value, list | tuple) else value

    arguments = [specs(arg) for arg in args]
    named = {name: specs(arg) for name, arg in kwargs.items()}
    flat = tensors_in([*args, *kwargs.values()])
    copies = frozenset(i for i, item in enumerate(flat) if isinstance(item, cls.copied_view))
    decision = decide(op, arguments, named, scope, copies)
    decisions = scope.decisions[op]
    if len(decisions) >= MAX_DECISIONS:
        del decisions[next(iter(decisions))]
    decisions[key] = decision
    return decision


def _replicated(op: OpOverload, tensor: _Plain, meshes: Sequence[Any], scope: Scope) -> Spec:
    """The spec of a plain tensor among DTensors: replicated if it has no dims, is torch's own, or the scope says so."""
    if tensor.shape and not tensor.own and not scope.plain_is_replicated:
        raise MixedTensorError(
            f"{op} got DTensors together with a plain tensor of shape {tuple(tensor.shape)}; make it a DTensor with "
            f"distribute_tensor or DTensor.from_local, or count plain tensors as replicated in implicit_replication()"
        )
    mesh = meshes[0]
    return Spec(mesh, (Replicate(),) * mesh.ndim, tensor.shape, tensor.stride, tensor.dtype)


def _general(  # noqa: PLR0913  # what dispatch has in hand
    cls: Any,
    decision: Decision,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    local: list[Any],
    named: dict[str, Any],
    first: tuple[OpOverload, _Decisions, tuple[Any, ...]] | None = None,
) -> Any:
    """Run a decision with redistributed inputs, several kinds of outputs, a decomposition, or for the first time.

    `first` names the operator, its decisions and the key, so that what the first call shows can be remembered.
    """
    if decision.composite:
        inner = current().composite_decisions
        with within(plain_is_replicated=True, decisions=inner, composite_decisions=inner):
            return decision.call(*args, **kwargs)
    originals = [*tensors_in([*args, *kwargs.values()])]
    if decision.plans:
        moved = [item._local_tensor if isinstance(item, cls) else item for item in originals]
        with purpose(decision.reason):
            for index, plan in decision.plans:
                moved[index] = run_once(plan, moved[index], originals[index], fresh=bool(decision.back))
        following = iter(moved)
        local = [replace_tensors(value, following) for value in local]
        named = {name: replace_tensors(value, following) for name, value in named.items()}
    result = decision.call(*local, **named)
    for index, plan in decision.back:
        write_back(plan, moved[index], originals[index])
    if decision.dynamic:
        return wrap_dynamic(cls, result, originals)
    specs = decision.outputs
    if first is not None:
        op, decisions, key = first
        specs = settled(op, specs, decision.aliased, [*tensors_in([result])])
        if specs != decision.outputs:
            decisions[key] = replace(decision, outputs=specs)
    outputs = iter(zip(specs, decision.aliased, strict=True))
    made = cls.copied_view if decision.copied else cls
    return wrap_all(made, result, outputs, originals)


def cache_info(scope: Scope | None = None) -> dict[str, int]:
    """Number of remembered decisions per operator."""
    scope = scope or current()
    return {str(op): len(decisions) for op, decisions in scope.decisions.items()}


def clear_cache(scope: Scope | None = None) -> None:
    """Forget all decisions of a scope."""
    (scope or current()).decisions.clear()
