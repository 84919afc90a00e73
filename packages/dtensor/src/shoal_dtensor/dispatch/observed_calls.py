"""Operators on DTensors that an observer runs in the place of `dispatch`.

The decision is the decision of `dispatch`: the same local function on the same shards. The observer
redistributes the inputs and calls the local function itself. In this way it sees everything that a
rank would do, without process groups and with tensors that do not have memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from .._torch.operators import OpOverload
from .._torch.tensors import wrap_local
from ..errors import NoRuleError
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten, map_instances
from ..redistribute.steps import Plan
from ..scopes import current, entered
from .global_call import specs_of
from .propagate import decide
from .results import Decision, ResultKind, container_of


class CallObserver(Protocol):
    """The part of a call that the observer does."""

    def move(self, local: Tensor, plan: Plan) -> Tensor:
        """Return the local tensor in the layout at the end of a plan."""
        ...

    def run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the result of a local function."""
        ...

    def run_composite(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function that runs other operators on DTensors."""
        ...

    def place(self, local: Tensor, spec: Spec) -> None:
        """Note the layout of a result."""
        ...


def dispatch_observed(
    cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], observer: CallObserver
) -> Any:
    """Run an operator on DTensors as `dispatch` decides, with the observer's moves and local calls.

    Raises:
        NoRuleError: if the results have no layout, or the operator writes to a tensor that has to
            be redistributed for it.
    """
    specs, named = specs_of(cls, args, kwargs)
    decision = decide(op, specs, named, current())
    if decision.result_kind is ResultKind.COMPOSITE:
        with entered(current().with_settings(plain_is_replicated=True)):
            return observer.run_composite(partial(decision.call, *args, **kwargs))
    if decision.result_kind is ResultKind.DYNAMIC or decision.write_backs:
        raise NoRuleError(f"{op}: its result depends on values, or its writes move between layouts")
    positional, by_name = map_instances(
        ([*args], {**kwargs}), cls, lambda tensor: tensor._local_tensor
    )
    _move(decision, positional, by_name, observer)
    result = observer.run(decision.call, positional, by_name)
    if decision.result_kind is ResultKind.NONE:
        return result
    originals = [*flatten([*args, *kwargs.values()])]

    def wrap_new(local: Tensor, spec: Spec, index: int | None) -> Any:
        if index is not None:
            return originals[index]
        observer.place(local, spec)
        return wrap_local(cls, local, spec, False)

    return decision.with_outputs(result, wrap_new)


def _move(
    decision: Decision, args: list[Any], kwargs: dict[str, Any], observer: CallObserver
) -> None:
    """Replace the local tensors of a call by the redistributed ones that a decision requires."""
    for place, plan in decision.moves.items():
        tensors, at = container_of(place, args, kwargs)
        tensors[at] = observer.move(tensors[at], plan)
