"""The hot path: every operator on DTensors passes through `dispatch`.

It makes a key of the specs and static values of the arguments, looks up the decision for the key,
calls the local function on local tensors, and wraps its result. `propagate` makes the decision for
a new key. No operator is named here. docs/concepts/dispatch.md follows a call through the package.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from threading import current_thread, main_thread
from typing import Any
from warnings import warn

import torch

from shoal_mesh import purpose

from .._torch.compiling import never_compiled, raised_as_it_is, recorder
from .._torch.operators import OpOverload, signature_of
from .._torch.tensors import (
    bump_version,
    disabled_torch_function,
    dispatch_modes,
    in_inference_mode,
    increment_versions,
    mode_flags,
    wrap_local,
)
from ..errors import InPlaceError, OperatorArgumentError
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten, has_symbols, map_instances
from ..redistribute.execution.execute import run_cached, write_back
from ..scopes import Scope, context_scope, current, entered, open_blocks, watch_operation
from .argument_readers import Readers, read_keywords, readers_of
from .composites import BY_STRIDES, check_strided, groups_by_mesh, run_in_groups
from .global_call import mesh_of, replicated_spec, run_probe, specs_of
from .plain_tensors import (
    OF_SHAPES,
    Plain,
    check_recorded,
    mark_outermost,
    verify_plain,
)
from .propagate import decide, rule_of
from .results import (
    Decision,
    ResultKind,
    container_of,
    track_base,
    with_observed_outputs,
)

# SHOAL_LOG=decisions: see shoal_mesh.log_to_stderr
_LOG = logging.getLogger("shoal.decisions")

# Decisions kept per operator and scope; when full, the oldest goes. A training step needs a
# handful per operator.
MAX_DECISIONS = 4096

_ONE = ResultKind.ONE
_FIRST = ResultKind.FIRST
_LIST = ResultKind.LIST
_NONE = ResultKind.NONE
_VIEW = ResultKind.VIEW
_VIEWS = ResultKind.VIEWS
# A block without effect; it can be entered many times.
_NO_BLOCK = nullcontext()
# the last argument of `wrap_local` for each tensor of a list
_WITHOUT_GRADIENT = repeat(False)


class _OpCache:
    """The cache of a scope for one operator: the readers of its arguments, and decisions by key."""

    __slots__ = ("decisions", "foreach", "keywords", "op", "positional", "scope", "tail_is_static")

    def __init__(self, op: OpOverload, scope: Scope, readers: Readers, foreach: bool) -> None:
        self.op = op
        self.scope = scope
        self.keywords = readers
        self.foreach = foreach
        self.positional = tuple(
            [readers[a.name] for a in signature_of(op).arguments if not a.kwarg_only]
        )
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


# Whether a thread other than the main one has used DTensors inside of a mode. It is no entry of an
# object, because `torch_function_of` is called for each read of an attribute.
_threads_use_modes = False


def torch_function_of(tensor: object) -> Any:
    """Return what torch calls in the place of a torch function: it marks the function, or not.

    The answer depends on the modes of this thread, not on the tensor.
    """
    # Counting the modes takes 20 ns more than reading torch's flag. But all threads share the flag:
    # when a thread leaves its mode, the flag says False to a thread that is still in a mode. So the
    # flag is enough only as long as the main thread alone enters modes.
    global _threads_use_modes  # noqa: PLW0603  # the comment at its definition says why
    if not (mode_flags._is_in_torch_dispatch_mode or _threads_use_modes):
        return disabled_torch_function
    if not dispatch_modes():
        return disabled_torch_function
    if current_thread() is not main_thread():
        _threads_use_modes = True
    return mark_outermost


class MarkWhileWatched(property):
    """`__torch_function__` of a DTensor: marks the outermost torch function inside of a mode.

    A mode holds references to the tensors that torch makes, and its frames separate these tensors
    from the functions that made them. Without modes no function is marked, because marking takes
    1.8 us a call, also for attributes.

    Torch reads this attribute of every tensor about three times a call. It is a property, because
    a property is read in 35 ns, and an object with a `__get__` in Python in 50 ns. Read from the
    class, as by `super()`, it is the property itself, which can be called like the function.
    """

    def __init__(self) -> None:
        super().__init__(torch_function_of)

    def __call__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, as `__torch_function__` does."""
        return torch_function_of(None)(function, types, args, kwargs or {})


@dataclass(slots=True)
class _Call:
    """A call outside of the fast path: an operator with its arguments and their local tensors.

    `_move_inputs` replaces the local tensors; a class whose values are constant would take 0.6 us
    more a call.
    """

    cls: Any
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    local_args: Sequence[Any]
    local_kwargs: Mapping[str, Any]


# The count of arguments for a call with keywords. The fast paths are for counts of 1 and 2.
_MANY = 3


# `types` has the type of every tensor among the arguments that has a `__torch_dispatch__`, each
# once. This is one function on purpose: an operator takes about 1 us, one more Python call would
# add 60 ns, and a loop over one or two tensors 100 ns.
def dispatch(  # noqa: C901, PLR0912  # see above
    cls: Any,
    op: OpOverload,
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run an operator on DTensors; bound to the class, it is `__torch_dispatch__`."""
    # The key is `id(op)`, because the hash of an overload is a Python function.
    try:
        cache = (current() if open_blocks else context_scope()).decisions[id(op)]
    except KeyError:
        cache = None
    # outside the handler, so that an error raised here is not chained to the KeyError
    if cache is None:
        cache = _new_op_cache(cls, op)
    kwargs = {} if kwargs is None else kwargs
    local_kwargs = kwargs
    count = _MANY if kwargs else len(args)
    if count == 1 and type(args[0]) is cls:
        (one,) = args
        key: Any = (one._spec,)
        local_args: Any = (one._local_tensor,)
    elif count == 2 and type(args[0]) is cls and type(args[1]) is cls:
        one, two = args
        key = (one._spec, two._spec)
        local_args = (one._local_tensor, two._local_tensor)
    elif cache.tail_is_static and not kwargs and type(args[0]) is cls:
        one = args[0]
        rest = args[1:]
        key = (one._spec, rest)
        local_args = (one._local_tensor, *rest)
    else:
        key = []
        local_args = []
        readers = cache.positional
        for arg in args:
            if type(arg) is cls:
                key.append(arg._spec)
                local_args.append(arg._local_tensor)
            elif arg is None or (read := readers[len(local_args)]) is None:
                key.append(arg)
                local_args.append(arg)
            else:
                local_args.append(read(arg, key, types))
        if kwargs:
            local_kwargs = read_keywords(cache.keywords, kwargs, key, types)
        key = tuple(key)
    # Counting the modes takes a third of the time of looking for a recorder among them.
    if dispatch_modes() and recorder():
        tensors = flatten([*args, *kwargs.values()])
        shards = [tensor._local_tensor for tensor in tensors if isinstance(tensor, cls)]
        check_recorded(str(op), *shards)
    try:
        decision = cache.decisions[key]
    except (KeyError, TypeError):
        # symbols among the arguments have no hash
        decision = None
    if decision is None:
        call = _Call(cls, op, args, kwargs, local_args=local_args, local_kwargs=local_kwargs)
        return _on_cache_miss(call, cache, key)
    if decision.slow_path:
        call = _Call(cls, op, args, kwargs, local_args=local_args, local_kwargs=local_kwargs)
        default = decision.default_dtype
        if default is not None and default is not torch.get_default_dtype():
            return _on_cache_miss(call, cache, key)
        if not decision.only_compares_dtype:
            return _run_decision(call, decision)
    result = decision.call(*local_args, **local_kwargs) if kwargs else decision.call(*local_args)
    kind = decision.result_kind
    if kind is _ONE or (kind is _VIEW and not in_inference_mode()):
        return wrap_local(cls, result, decision.outputs[0], False)
    if kind is _FIRST:
        _count_for_shards(args[0])
        return args[0]
    if kind is _LIST or (kind is _VIEWS and not in_inference_mode()):
        return [*map(wrap_local, repeat(cls), result, decision.outputs, _WITHOUT_GRADIENT)]
    _bump_versions(decision.unreported_writes, args, kwargs)
    return _wrap(cls, result, decision, args, kwargs=kwargs)


never_compiled(dispatch)


def _new_op_cache(cls: Any, op: Any) -> _OpCache:
    """Return a cache of an operator's decisions; raise an error if it does not support DTensors."""
    if not isinstance(op, OpOverload):
        raise raised_as_it_is(
            OperatorArgumentError(
                f"{op} does not support DTensors: call it on local tensors in local_map, in "
                "layouts in which no shard needs values of another shard"
            )
        ) from None
    if signature_of(op).name.startswith("aten::_nested_"):
        raise OperatorArgumentError(
            f"{op} does not support DTensors, because a nested tensor is local to a rank. Make a "
            "nested tensor from to_local() in local_map, or pad the sequences and use a mask"
        )
    scope = current()
    rule = rule_of(op, scope)
    readers = readers_of(op, cls, by_value=rule is None or rule.by_value)
    cache = _OpCache(op, scope, readers, foreach=rule is not None and rule.kind == "each")
    # These results depend on the base of a view, which is not part of a key, so they are decided
    # in every call.
    if op in BY_STRIDES:
        return cache
    return scope.decisions.setdefault(id(op), cache)  # type: ignore[no-any-return]  # untyped


def _on_cache_miss(call: _Call, cache: _OpCache, key: tuple[Any, ...]) -> Any:
    """Decide a call, remember the decision (also if the local call then raises), and run it."""
    cls = call.cls
    op = call.op
    args = call.args
    kwargs = call.kwargs
    scope = cache.scope
    if op in OF_SHAPES:
        return OF_SHAPES[op](*args)
    if op in BY_STRIDES:
        check_strided(op, args[0])
    mixed = [entry for entry in key if type(entry) is Plain]
    groups = groups_by_mesh(cls, args, kwargs) if mixed and cache.foreach else None
    if groups is not None:
        run = partial(run_in_groups, op, groups)
        cache.remember(key, Decision.in_groups(run))
        return run(*args, **kwargs)
    are_candidates = [entry.candidate for entry in mixed if entry.shape]
    checks_plain = scope.replicas_checked or not scope.plain_is_replicated
    is_verified = bool(are_candidates) and checks_plain
    if is_verified:
        all_are_candidates = scope.plain_is_replicated or all(are_candidates)
        verify_plain(cls, op, args, kwargs, candidates=all_are_candidates)
    tensors = flatten([*args, *kwargs.values()])
    copies = [i for i, tensor in enumerate(tensors) if isinstance(tensor, cls.copied_view)]
    specs, named_specs = specs_of(cls, args, kwargs)
    decision = decide(op, specs, named_specs, scope, copies=frozenset(copies))
    if is_verified:
        decision = replace(decision, slow_path=True, only_compares_dtype=False, verifies_plain=True)
    if _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s", decision.describe(op, (*specs, *named_specs.values())))
    cache.remember(key, decision)
    return _run_decision(call, decision, first=(cache, key))


def _run_decision(
    call: _Call, decision: Decision, first: tuple[_OpCache, tuple[Any, ...]] | None = None
) -> Any:
    """Run a decision outside of the fast path.

    `first` is the cache that keeps the decision, if its first result has not been checked yet.
    """
    cls = call.cls
    op = call.op
    args = call.args
    kwargs = call.kwargs
    # The list of `torch._foreach_pow(2.0, exponents)` comes after a number.
    lists = [arg for arg in args if isinstance(arg, list | tuple)] if decision.foreach else []
    if decision.foreach and decision.moves and len(lists[0]) > 1:
        single = [[i] for i in range(len(lists[0]))]
        results = run_in_groups(op, single, *args, **kwargs)
        # the list call refuses some writes that single elements do not reveal
        _bump_versions(decision.unreported_writes, args, kwargs)
        return results
    if decision.verifies_plain and first is None:
        verify_plain(cls, op, args, kwargs, candidates=True)
    if decision.result_kind is ResultKind.GROUPS:
        return decision.call(*args, **kwargs)
    if decision.result_kind is ResultKind.COMPOSITE:
        with entered(current().with_settings(plain_is_replicated=True)):
            return decision.call(*args, **kwargs)
    if decision.notice:
        warn(decision.notice, stacklevel=2)
    if decision.moves:
        _move_inputs(call, decision)
    with watch_operation(decision.watched) if decision.watched else _NO_BLOCK:
        result = decision.call(*call.local_args, **call.local_kwargs)
    for place, plan in decision.write_backs.items():
        written, at = container_of(place, call.local_args, call.local_kwargs)
        owners, _ = container_of(place, args, kwargs)
        write_back(plan, written[at], owners[at])
    _bump_versions(decision.unreported_writes, args, kwargs)
    if first is not None and decision.result_kind is not ResultKind.DYNAMIC:
        observed, result = with_observed_outputs(op, decision, result)
        if observed is not decision:
            cache, key = first
            cache.remember(key, observed)
            decision = observed
    if decision.view_copied:
        views = _wrap(cls.copied_view, result, decision, args, kwargs=kwargs)
        return track_base(op, args, kwargs, views)
    return _wrap(cls, result, decision, args, kwargs=kwargs)


def _count_for_shards(*written: Any) -> None:
    """Count a write to DTensors for their local tensors too; plain tensors are counted twice.

    Torch counts it for the DTensors only. A module that computes on local tensors has saved the
    shard for its backward. A view of a DTensor writes to the shard of its base, which has a count
    of its own. Tensors of inference mode do not have a count.
    """
    shards = []
    for tensor in written:
        shards.append(getattr(tensor, "_local_tensor", tensor))
        base = tensor._base
        if base is not None:
            shards.append(getattr(base, "_local_tensor", base))
    try:
        increment_versions(shards)
    except RuntimeError:
        bump_version(shards)


def _bump_versions(
    places: Sequence[int | str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Count writes to these arguments, so that autograd finds saved values out of date."""
    for place in places:
        written = args[place] if isinstance(place, int) else kwargs[place]
        bump_version(written)
        if not isinstance(written, list | tuple):
            _count_for_shards(written)
            continue
        _count_for_shards(*written)
        if not torch.is_grad_enabled():
            continue
        # If a list contains a tensor twice, or a tensor and a view of it, autograd would record one
        # write where there are two.
        ids = {*map(id, written)}
        has_doubles = len(ids) < len(written)
        twice = has_doubles or any(id(tensor._base) in ids for tensor in written)
        if twice and any(tensor.requires_grad for tensor in written):
            raise InPlaceError(
                "an in-place operator on a list wrote to a tensor twice, directly and through a "
                "view, while autograd records: the gradients would be wrong. Write to the tensor "
                "and the view one after the other, or under torch.no_grad()"
            )


def _move_inputs(call: _Call, decision: Decision) -> None:
    """Check and redistribute the inputs of a call; put their new local tensors into the call."""
    local_args = [*call.local_args]
    local_kwargs = {**call.local_kwargs}
    for place, check in decision.checks.items():
        tensors, at = container_of(place, local_args, local_kwargs)
        check(tensors[at])
    with purpose(decision.reason) if decision.reason else _NO_BLOCK:
        for place, plan in decision.moves.items():
            tensors, at = container_of(place, local_args, local_kwargs)
            owners, _ = container_of(place, call.args, call.kwargs)
            tensors[at] = run_cached(
                plan, tensors[at], owners[at], fresh=bool(decision.write_backs)
            )
    call.local_args = local_args
    call.local_kwargs = local_kwargs


def _wrap(
    cls: Any, result: Any, decision: Decision, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Make DTensors of the tensors that a local call returned."""
    is_view = decision.result_kind in (_VIEW, _VIEWS)
    if is_view and in_inference_mode() and not _base(args, kwargs).is_inference():
        # A view made in inference mode shares the count of writes with a base that has one. Torch
        # refuses to give this count to a tensor of inference mode.
        with torch.inference_mode(False):
            return decision.with_outputs(result, partial(_wrap_view, cls))
    if decision.result_kind is _NONE:
        return result
    if decision.result_kind is _ONE:
        return wrap_local(cls, result, decision.outputs[0], False)
    if decision.result_kind is ResultKind.DYNAMIC:
        mesh = mesh_of(cls, args, kwargs)

        # Every rank has computed the same results. Sparse tensors stay plain.
        def wrap_replicated(local: torch.Tensor) -> Any:
            if local.layout is not torch.strided:
                return local
            return wrap_local(cls, local, replicated_spec(mesh, local), False)

        return map_instances(result, torch.Tensor, wrap_replicated)
    originals = [*flatten([*args, *kwargs.values()])]

    # return the input itself if the operator wrote to it
    def wrap_new(local: torch.Tensor, spec: Spec, index: int | None) -> Any:
        if index is None:
            return wrap_local(cls, local, spec, False)
        _count_for_shards(originals[index])
        return originals[index]

    return decision.with_outputs(result, wrap_new)


def _base(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor of which a view operator takes a view."""
    base: torch.Tensor = next(flatten([*args, *kwargs.values()]))
    return base


def _wrap_view(cls: Any, local: torch.Tensor, spec: Spec, _: int | None) -> Any:
    return wrap_local(cls, local, spec, False)


def cache_info() -> dict[str, int]:
    """Return the number of cached decisions per operator, over all policies.

    Example:
        >>> clear_cache()
        >>> cache_info()
        {}
    """
    counts: Counter[str] = Counter()
    for scope in current().siblings.values():
        for cache in scope.decisions.values():
            counts[str(cache.op)] += len(cache.decisions)
    return dict(counts)


def clear_cache() -> None:
    """Forget all decisions of every policy, and the results of runs on few elements.

    Example:
        >>> clear_cache()
    """
    run_probe.cache_clear()
    for scope in current().siblings.values():
        scope.decisions.clear()
