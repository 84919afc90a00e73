"""The hot path: every operator on DTensors passes through `dispatch`.

Unwrap the arguments into a key of specs and static values, look the decision up, call the local
function, wrap its result. `propagate` makes every decision that is made once per key; no operator
is named here. docs/concepts/dispatch.md follows a call through the package.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any
from warnings import warn

import torch

from shoal_mesh import purpose

from .._torch.compiling import never_compiled, raised_as_it_is, recorder
from .._torch.operators import OpOverload, is_collective
from .._torch.tensors import around, disabled_torch_function, dispatch_modes
from ..argument_types import CONVERT, is_torch_dtensor
from ..errors import MixedTensorError, OperatorArgumentError
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten, has_symbols, mapped
from ..redistribute.execution.execute import run_cached, write_back
from ..scopes import Scope, blocks, current, entered, own_scope, watched
from .composites import BY_STRIDES, check_strided, groups_by_mesh, run_in_groups
from .global_call import mesh_of, replicated_spec, run_on_few, specs_of
from .plain_tensors import (
    OF_SHAPES,
    Plain,
    check_recorded,
    is_candidate,
    keep_gradient_plain,
    mark_outermost,
    verify_plain,
)
from .propagate import decide, rule_of
from .results import Decision, ResultKind, as_seen, count_writes, follow, within

# SHOAL_LOG=decisions: see shoal_mesh.log_to_stderr
_LOG = logging.getLogger("shoal.decisions")

# Decisions kept per operator and scope; when full, the oldest goes.  A training step needs a
# handful per operator.
MAX_DECISIONS = 4096

_ONE = ResultKind.ONE
_FIRST = ResultKind.FIRST
_LIST = ResultKind.LIST
_NONE = ResultKind.NONE


class _OpCache:
    """The cache of a scope for one operator: the readers of its arguments, and decisions by key."""

    __slots__ = ("decisions", "foreach", "keywords", "op", "positional", "scope", "tail_is_static")

    def __init__(self, op: OpOverload, scope: Scope, readers: Readers, foreach: bool) -> None:
        self.op = op
        self.scope = scope
        self.keywords = readers
        self.foreach = foreach
        self.positional = tuple([readers[a.name] for a in op._schema.arguments if not a.kwarg_only])
        # Whether all arguments but the first are part of the key as they are.
        self.tail_is_static = len(self.positional) > 1 and not any(self.positional[1:])
        self.decisions: dict[Any, Decision] = {}

    def remember(self, key: Any, decision: Decision) -> None:
        """Keep a decision; drop the oldest decision if there are too many."""
        if has_symbols(key):
            # decisions for symbols hold for one graph
            return
        if len(self.decisions) >= MAX_DECISIONS:
            del self.decisions[next(iter(self.decisions))]
        self.decisions[key] = decision


class MarkWhileWatched:
    """`__torch_function__` of a DTensor: marks the outermost torch function while a mode is active.

    A mode holds references to the tensors that torch makes, and its frames separate these tensors
    from the functions that made them. Without modes no function is marked, because marking takes
    1.8 us a call, also for attributes.
    """

    def __get__(self, tensor: object, cls: type | None = None) -> Any:
        return mark_outermost if dispatch_modes() else disabled_torch_function


# A call outside of the fast path: class, operator, its arguments, and the arguments of the local
# call.
_Call = tuple[Any, OpOverload, tuple[Any, ...], Mapping[str, Any], Sequence[Any], Mapping[str, Any]]


# `types` has the type of every tensor among the arguments that has a `__torch_dispatch__`, each
# once. One function on purpose: a call takes 60 ns of the microsecond there is; a loop over one or
# two tensors takes 100.
def dispatch(  # noqa: C901, PLR0912  # see above
    cls: Any,
    op: OpOverload,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run an operator on DTensors; bound to the class, it is `__torch_dispatch__`."""
    # an overload's own hash is a Python function
    try:
        cache = (current() if blocks else own_scope()).decisions[id(op)]
    except KeyError:
        cache = None
    # not in the handler: errors are raised without a miss before them
    if cache is None:
        cache = _new_op_cache(cls, op)
    named = {} if kwargs is None else kwargs
    kwargs = named
    count = 3 if kwargs else len(args)
    if count == 1 and type(args[0]) is cls:
        (one,) = args
        key: Any = (one._spec,)
        local: Any = (one._local_tensor,)
    elif count == 2 and type(args[0]) is cls and type(args[1]) is cls:
        one, two = args
        key = (one._spec, two._spec)
        local = (one._local_tensor, two._local_tensor)
    elif cache.tail_is_static and not kwargs and type(args[0]) is cls:
        one = args[0]
        rest = args[1:]
        key = (one._spec, rest)
        local = (one._local_tensor, *rest)
    else:
        key = []
        local = []
        readers = cache.positional
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
            named = _read_keywords(cache.keywords, kwargs, key, types)
        key = tuple(key)
    if recorder():
        check_recorded(
            str(op),
            *[t._local_tensor for t in flatten([*args, *kwargs.values()]) if isinstance(t, cls)],
        )
    try:
        decision = cache.decisions[key]
    except (KeyError, TypeError):
        # symbols among the arguments have no hash
        decision = None
    if decision is None:
        return _on_cache_miss((cls, op, args, kwargs, local, named), cache, key)
    if decision.slow_path:
        call = cls, op, args, kwargs, local, named
        if decision.default_dtype not in (None, torch.get_default_dtype()):
            return _on_cache_miss(call, cache, key)
        if not decision.only_compares_dtype:
            return _run(call, decision)
    result = decision.call(*local, **named) if kwargs else decision.call(*local)
    kind = decision.result_kind
    if kind is _ONE:
        return around(cls, result, decision.outputs[0], False)
    if kind is _FIRST:
        return args[0]
    if kind is _LIST:
        wrapped: list[Any] = []
        for shard in result:
            wrapped.append(around(cls, shard, decision.outputs[len(wrapped)], False))
        return wrapped
    count_writes(decision.unreported_writes, args, kwargs)
    return _wrapped(cls, result, decision, args, kwargs)


never_compiled(dispatch)


def _new_op_cache(cls: Any, op: Any) -> _OpCache:
    if not isinstance(op, OpOverload):
        raise raised_as_it_is(
            OperatorArgumentError(
                f"{op} takes no DTensors: call it on local tensors in local_map, in layouts in "
                "which shards need nothing of each other"
            )
        ) from None
    if op._schema.name.startswith("aten::_nested_"):
        raise OperatorArgumentError(
            f"{op} takes no DTensors: a nested tensor is local to a rank. Make one of to_local() "
            "in local_map, or pad the sequences and use a mask"
        )
    scope = current()
    rule = rule_of(op, scope)
    readers = _readers_of(op, cls, by_value=rule is None or rule.by_value)
    cache = _OpCache(op, scope, readers, rule is not None and rule.kind == "each")
    # their result depends on the base of a view, which is not part of a key
    if op in BY_STRIDES:
        return cache
    return scope.decisions.setdefault(id(op), cache)  # type: ignore[no-any-return]  # scopes know no decisions


def _on_cache_miss(call: _Call, cache: _OpCache, key: tuple[Any, ...]) -> Any:
    """Decide a call, remember the decision (also if the local call then raises), and run it."""
    cls, op, args, kwargs, _, _ = call
    scope = cache.scope
    if op in OF_SHAPES:
        return OF_SHAPES[op](*args)
    if op in BY_STRIDES:
        check_strided(op, args[0])
    mixed = [entry for entry in key if type(entry) is Plain]
    groups = groups_by_mesh(cls, args, kwargs) if mixed and cache.foreach else None
    if groups is not None:
        cache.remember(key, Decision.composite(partial(run_in_groups, op, groups)))
        return run_in_groups(op, groups, *args, **kwargs)
    plain = [entry.candidate for entry in mixed if entry.shape]
    verified = bool(plain) and (scope.replicas_checked or not scope.plain_is_replicated)
    if verified:
        verify_plain(cls, op, args, kwargs, candidates=scope.plain_is_replicated or all(plain))
    tensors = flatten([*args, *kwargs.values()])
    copies = frozenset(
        [i for i, tensor in enumerate(tensors) if isinstance(tensor, cls.copied_view)]
    )
    specs, named_specs = specs_of(cls, args, kwargs)
    decision = decide(op, specs, named_specs, scope, copies)
    if verified:
        decision = replace(decision, slow_path=True, only_compares_dtype=False, verifies_plain=True)
    # the operator on its specs, the inputs to redistribute, the outputs
    if _LOG.isEnabledFor(logging.DEBUG):
        moves = "".join(
            f"\n  argument {place}: {plan}" for (place, _), plan in decision.moves.items()
        )
        outputs = ", ".join(map(str, decision.outputs)) or decision.result_kind.name.lower()
        _LOG.debug(
            "%s(%s) -> %s%s",
            op,
            ", ".join(map(str, (*specs, *named_specs.values()))),
            outputs,
            moves,
        )
    cache.remember(key, decision)
    return _run(call, decision, first=(cache, key))


def _run(
    call: _Call, decision: Decision, first: tuple[_OpCache, tuple[Any, ...]] | None = None
) -> Any:
    """Run a decision outside of the fast path.

    `first` is the cache that keeps the decision, if its first result has not been checked yet.
    """
    cls, op, args, kwargs, local, named = call
    if decision.foreach and decision.moves and len(args[0]) > 1:
        results = run_in_groups(op, [[i] for i in range(len(args[0]))], *args, **kwargs)
        # the list call refuses some writes that single elements do not reveal
        count_writes(decision.unreported_writes, args, kwargs)
        return results
    if decision.verifies_plain and first is None:
        verify_plain(cls, op, args, kwargs, candidates=True)
    if decision.result_kind is ResultKind.COMPOSITE:
        with entered(current().changed(plain_is_replicated=True)):
            return decision.call(*args, **kwargs)
    if decision.notice:
        warn(decision.notice, stacklevel=2)
    if decision.moves:
        local, named = [*local], {**named}
        for place, check in decision.checks.items():
            tensors, at = within(place, local, named)
            check(tensors[at])
        with purpose(decision.reason) if decision.reason else nullcontext():
            for place, plan in decision.moves.items():
                (tensors, at) = within(place, local, named)
                (owners, _) = within(place, args, kwargs)
                tensors[at] = run_cached(
                    plan, tensors[at], owners[at], fresh=bool(decision.write_backs)
                )
    with watched(decision.watched) if decision.watched else nullcontext():
        result = decision.call(*local, **named)
    for place, plan in decision.write_backs.items():
        (results, at) = within(place, local, named)
        (owners, _) = within(place, args, kwargs)
        write_back(plan, results[at], owners[at])
    count_writes(decision.unreported_writes, args, kwargs)
    if first is not None and decision.result_kind is not ResultKind.DYNAMIC:
        seen, result = as_seen(op, decision, result)
        if seen is not decision:
            cache, key = first
            cache.remember(key, seen)
            decision = seen
    if decision.view_copied:
        return follow(op, args, kwargs, _wrapped(cls.copied_view, result, decision, args, kwargs))
    return _wrapped(cls, result, decision, args, kwargs)


def _wrapped(
    cls: Any, result: Any, decision: Decision, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    if decision.result_kind is _NONE:
        return result
    if decision.result_kind is _ONE:
        return around(cls, result, decision.outputs[0], False)
    # every rank has computed the same results; sparse ones stay plain
    if decision.result_kind is ResultKind.DYNAMIC:
        mesh = mesh_of(cls, args, kwargs)

        def replicated(local: torch.Tensor) -> Any:
            return (
                around(cls, local, replicated_spec(mesh, local), False)
                if local.layout is torch.strided
                else local
            )

        return mapped(result, torch.Tensor, replicated)
    originals = [*flatten([*args, *kwargs.values()])]

    # one that is a written input is that itself
    def wrapped(local: torch.Tensor, spec: Spec, index: int | None) -> Any:
        return around(cls, local, spec, False) if index is None else originals[index]

    return decision.with_outputs(result, wrapped)


def cache_info() -> dict[str, int]:
    """Return the number of cached decisions per operator, over all policies.

    Example:
        >>> clear_cache()
        >>> cache_info()
        {}
    """
    counts: Counter[str] = Counter()
    for scope in current().alike.values():
        counts.update({str(cache.op): len(cache.decisions) for cache in scope.decisions.values()})
    return dict(counts)


def clear_cache() -> None:
    """Forget all decisions of every policy, and the results of runs on few elements.

    Example:
        >>> clear_cache()
    """
    run_on_few.cache_clear()
    for scope in current().alike.values():
        scope.decisions.clear()


# --- what arguments add to the key, and what the local call gets for them -------------------------
#
# The schema says once per operator how each argument is read, so that a call looks at values only:
# a float is a float, a list of tensors is not searched for numbers.

_SPEC = attrgetter("_spec")
_LOCAL = attrgetter("_local_tensor")
_NUMBERS = frozenset({int, float, bool, complex})
_NUMERIC = frozenset(
    {"IntType", "SymIntType", "FloatType", "BoolType", "ComplexType", "NumberType"}
)
_CONSTANT = _NUMERIC - {"NumberType"} | {"StringType", "DeviceObjType"}

# (argument, the key so far, types of the call's tensors as torch hands them over) -> the local
# argument.
Reader = Callable[[Any, list[Any], Any], Any]
# None where the value itself is the key.
Readers = Mapping[str, Reader | None]


def _readers_of(op: OpOverload, cls: Any, *, by_value: bool) -> Readers:
    """Return the readers of an operator's arguments.

    Numbers are part of the key with their values (`by_value`), or with their types only.
    """
    # one decision for all arguments, among which process groups are new objects in every call
    if is_collective(op):
        return {argument.name: lambda arg, key, types: arg for argument in op._schema.arguments}
    anything = _reader_of_anything(op, cls, by_value=by_value)
    tensors = _reader_of_tensors(cls, anything)

    def reader(kind: Any) -> Reader | None:
        while kind.kind() == "OptionalType":
            kind = kind.getElementType()
        name = kind.kind()
        if name == "ListType":
            element = kind.getElementType().kind()
            if element == "TensorType":
                return tensors
            if element in _NUMERIC and not by_value:
                return _types
            return _values if element in _CONSTANT else anything
        if by_value and name in _CONSTANT:
            return None
        return _number if name in _NUMERIC and not by_value else anything

    return {argument.name: reader(argument.type) for argument in op._schema.arguments}


def _read_keywords(
    readers: Readers, kwargs: Mapping[str, Any], key: list[Any], types: Any
) -> dict[str, Any]:
    """Return the local keyword arguments; add their names and deciding properties to `key`."""
    local: dict[str, Any] = {}
    for name, arg in kwargs.items():
        key.append(name)
        read = readers[name]
        if read is None or arg is None:
            key.append(arg)
            local[name] = arg
        else:
            local[name] = read(arg, key, types)
    return local


def _number(arg: Any, key: list[Any], types: Any) -> Any:
    """Read a number whose value does not matter, or a constant that schemas call a number.

    Such a constant is a dtype, for example.
    """
    kind = type(arg)
    key.append(kind if kind in _NUMBERS else arg)
    return arg


def _types(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(map(type, arg)))
    return arg


def _values(arg: Any, key: list[Any], types: Any) -> Any:
    key.append(tuple(arg))
    return arg


def _reader_of_anything(op: OpOverload, cls: Any, *, by_value: bool) -> Reader:
    # The count of references that `is_candidate` takes depends on this being called with an item of
    # a loop.
    def anything(arg: Any, key: list[Any], types: Any) -> Any:
        kind = type(arg)
        if kind in _NUMBERS:
            # 1, 1.0 and True are equal keys but different arguments
            key.append(kind)
            if by_value:
                key.append(arg)
        elif isinstance(arg, cls):
            # before the class is looked at: the first use of a pending tensor changes it
            local = arg._local_tensor
            key.append(arg._spec)
            if type(arg) is not cls:
                key.append(type(arg))
            return local
        elif isinstance(arg, torch.Tensor):
            if is_torch_dtensor(arg):
                raise MixedTensorError(
                    f"{op} got DTensors together with one of torch.distributed.tensor, of shape "
                    f"{tuple(arg.shape)}; convert it with {CONVERT}"
                )
            key.append(
                Plain(
                    arg.shape, arg.stride(), arg.dtype, arg.numel() == 1 or is_candidate(cls, arg)
                )
            )
            if arg.requires_grad and torch.is_grad_enabled():
                keep_gradient_plain(arg)
            return arg.resolve_conj().resolve_neg()
        elif isinstance(arg, list | tuple):
            key.append(len(arg))
            return [anything(item, key, types) for item in arg]
        else:
            key.append(torch.Generator if kind is torch.Generator else arg)
        return arg

    return anything


def _reader_of_tensors(cls: Any, anything: Reader) -> Reader:
    only = (cls,)

    def tensors(arg: Any, key: list[Any], types: Any) -> Any:
        if types == only:
            try:
                key.append(tuple(map(_SPEC, arg)))
            except AttributeError:
                # a plain tensor among them, which torch does not name in `types`
                # the error refers to it, and is over before references are counted
                pass
            else:
                return list(map(_LOCAL, arg))
        return anything(arg, key, types)

    return tensors
