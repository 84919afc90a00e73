"""The forward of a unit: its parameters are gathered before it and freed after it, and backward is prepared.

Hooks of autograd's nodes do the same in backward.

May import: _torch, policies, unit, unit_backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal_dtensor.internal import FakeTensor, eager_only, in_backward, is_compiling, local_of, pytree, unwatched

from ._torch import outer_saved_tensors_hooks, run_when_ready
from .policies import MixedPrecisionPolicy
from .unit import Forward, Unit
from .unit_backward import running_backward

STATE = "_shoal_fully_sharded"
"""The attribute of a module that is a unit, or one of a unit's modules."""


class Schedule:
    """The units below one outermost module, and the order in which their forwards run.

    Attributes:
        states: of all of them, the outermost first.
        order: in which units began in the forward that is running, or was last; `ended` in which they ended.
        running: whether the outermost module's forward is running.
    """

    def __init__(self, outermost: UnitState) -> None:
        self.states: list[UnitState] = [outermost]
        self.order: list[Unit] = []
        self.ended: list[Unit] = []
        self._previous: list[Unit] = []
        self.running: bool = False

    @property
    def units(self) -> list[Unit]:
        """Those of all states, in one order on all ranks."""
        return [state.unit for state in self.states]

    def enter(self, unit: Unit) -> Forward:
        """A unit's forward begins: it is gathered, and the one that followed it the last time starts to be."""
        recomputes, is_outermost = in_backward(), unit is self.states[0].unit
        if not recomputes and (is_outermost or not self.running):
            self._previous, self.order, self.ended, self.running = self.order, [], [], is_outermost
        at = len(self.order)
        forward = unit.enter()
        forward.units = self.units
        if recomputes:
            return forward
        if forward.nodes and unit.kept:
            _show_arriving(forward)
        self.order.append(unit)
        follows = self._previous[at + 1 : at + 2] if self._previous[at : at + 1] == [unit] else ()
        for ahead in follows if unit.next_forward is None else unit.next_forward:
            ahead.start()
        return forward

    def leave(self, forward: Forward) -> None:
        """A unit's forward ends: units begin their backward in the opposite order, the outermost first."""
        unit, recomputes = forward.unit, in_backward()
        at = len(self.ended) if not recomputes else self.ended.index(unit) if unit in self.ended else 0
        forward.before = self.ended[max(at - 1, 0) : at]
        if not recomputes:
            self.ended.append(unit)


class UnitState:
    """What the modules of a unit know: how it runs, and the schedule that it shares with the units around it.

    Attributes:
        unit: its parameters.
        modules: those that were passed together; gathered from the forward of the first to that of the last.
        precision: its dtypes.
        schedule: of the outermost module.
        source: where its parameters are from.
    """

    source: Any  # it stands above, and is kept here

    def __init__(
        self, unit: Unit, modules: Sequence[nn.Module], precision: MixedPrecisionPolicy, frees: bool | None
    ) -> None:
        self.unit = unit
        self.modules: list[nn.Module] = list(modules)
        self.precision = precision
        self._frees = frees
        self.schedule: Schedule = Schedule(self)
        self._forward: Forward | None = None
        self._waiting: set[nn.Module] = set()  # the modules whose forward is still to come in this forward of the unit
        self._guards: list[AbstractContextManager[Any]] = []
        self._called: nn.Module | None = None  # one of the unit's, outside of the unit's forward
        self._handles: list[Any] = []
        unit.receive = _receive

    def lead(self, inner: Sequence[UnitState]) -> None:
        """Become the outermost of these units."""
        self.unit.frees = bool(self._frees)
        for state in inner:
            state.schedule = self.schedule
            state.unit.frees = state._frees is not False
        self.schedule.states += inner
        for handle in (handle for state in inner for handle in state._handles):
            handle.remove()
        for module in {module for parameter in self.unit.parameters for module, _ in parameter.sites}:
            self._handles += [
                module.register_forward_pre_hook(self.before_call, prepend=True),
                module.register_forward_hook(self.after_call, always_call=True),
            ]

    def before_call(self, module: nn.Module, args: Any) -> None:
        """Hook: what stays gathered after the unit's forward is there for its modules, should they be called again."""
        if is_compiling() or self.unit.shows_gathered or self.unit.frees:
            return
        forward, self._called = self.unit.enter_again(), module
        forward.units = self.schedule.units
        self._guards.append(_guard(forward) if torch.is_grad_enabled() else nullcontext())
        self._guards[-1].__enter__()

    def after_call(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook, also of a call that raised."""
        if is_compiling() or self._called is not module:
            return
        self._called = None
        self._guards.pop().__exit__(None, None, None)
        self.unit.show()
        if self._frees is None and not torch.is_grad_enabled():
            self.unit.free()

    def free_after_forward(self, frees: bool) -> None:
        """Free what was gathered after a forward, or keep it, from now on."""
        self._frees = self.unit.frees = frees

    @eager_only
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather before the forward."""
        continues = self._forward is not None and self.unit.shows_gathered and module in self._waiting
        self._guards.append(nullcontext())
        if not continues:
            self._forward, self._waiting = None, set(self.modules)
            with unwatched():  # what was gathered ahead the first time is gathered here when the forward runs again
                self._forward = self.schedule.enter(self.unit)
        if torch.is_grad_enabled() and self._forward is not None:
            self._guards[-1] = _guard(self._forward)
            self._guards[-1].__enter__()
        dtype = self.precision.param_dtype
        if dtype is None or not self.precision.cast_forward_inputs:
            return args, kwargs
        cast: tuple[Any, Any] = pytree.tree_map_only(Tensor, lambda t: _cast(t, dtype), (args, kwargs))
        return cast

    @eager_only
    def after(self, module: nn.Module, output: Any) -> Any:
        """Free after the forward, also after one that raised; prepare the backward."""
        if self._guards:
            self._guards.pop().__exit__(None, None, None)
        forward = self._forward
        if self.precision.output_dtype is not None:
            output = pytree.tree_map_only(Tensor, lambda t: _cast(t, self.precision.output_dtype), output)
        if forward is not None:
            _prepare_backward(output, forward)
        self._waiting.discard(module)
        if not self._waiting and not self._guards:
            if forward is not None:
                self.schedule.leave(forward)
            self.leave()
        if not in_backward() and self.schedule.states[0] is self and not self._guards:
            self.schedule.running = False
            for state in self.schedule.states:
                if state._forward is not None:
                    state.leave()  # not all of its modules have run
        return output

    def leave(self) -> None:
        """The forward of the unit's modules is over."""
        self._forward = None
        if self.unit.open:
            return  # recomputed in a backward that needs the parameters
        if in_backward() and torch.is_grad_enabled():
            running_backward().borrow(self.unit)  # a backward of what was recomputed follows
            return
        self.unit.show()
        if self.unit.frees or (self._frees is None and not torch.is_grad_enabled()):
            self.unit.free()


def as_forward(module: nn.Module, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What a method of a unit's module returns; it counts as the unit's forward."""
    state, output = state_of(module), None
    try:
        args, kwargs = state.before(module, args, kwargs)
        output = method(*args, **kwargs)
    finally:
        output = state.after(module, output)
    return output


def _prepare_backward(output: Any, forward: Forward) -> None:
    """Have the parameters of a forward gathered when its backward begins."""
    for tensor in pytree.tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
            node: Any = tensor.grad_fn
            node.register_prehook(lambda grads: running_backward().open(forward))


def _show_arriving(forward: Forward) -> None:
    """Have the gradients of matrices added to kept ones as soon as they are there, not when all of the unit's are."""
    views = [*forward.gathered.views]
    for i in (i for i in forward.trained if views[i].ndim > 1):  # those of vectors are small
        views[i] = views[i].view_as(views[i])
        node: Any = views[i].grad_fn
        run_when_ready(node)
        node.register_hook(lambda grads, _, i=i: (None,) if running_backward().arrive(forward, i, *grads) else None)
    forward.unit.show(views)


def _receive(forward: Forward, grads: Sequence[Tensor | None]) -> list[Any]:
    return running_backward().receive(forward, grads)


@dataclass(slots=True, eq=False)
class _OfUnit:
    """A saved tensor that may have no memory."""

    tensor: Tensor
    forward: Forward


def _guard(forward: Forward) -> saved_tensors_hooks:
    """A block in which what autograd saves of gathered parameters is gathered again before it is read.

    Usually the unit's outputs have seen to that.  What leaves a unit otherwise (an auxiliary loss kept in an
    attribute) or is differentiated in two passes (first to inputs, then to parameters) must not read memory that was
    given back.  All else goes to the hooks outside, such as those of a checkpoint or an offload around the unit.
    """
    gathered, outside = forward.gathered, outer_saved_tensors_hooks()
    own = {t.untyped_storage().data_ptr() for t in gathered.tensors if not isinstance(t, FakeTensor)}

    def pack(tensor: Tensor) -> Any:
        local = local_of(tensor)
        if type(local) is Tensor and local.untyped_storage().data_ptr() in own:
            return _OfUnit(tensor, forward)
        return tensor if outside is None else outside[0](tensor)

    def unpack(saved: Any) -> Any:
        if not isinstance(saved, _OfUnit) or saved.forward is not forward:
            return saved if outside is None else outside[1](saved)
        if not gathered.filled:
            running_backward().open(forward)
        return saved.tensor

    return saved_tensors_hooks(pack, unpack)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def state_of(module: Any) -> UnitState:
    """The state of a module that is a unit, or one of a unit's."""
    state: UnitState = vars(module)[STATE]
    return state


def states_of(module: nn.Module, recurse: bool = True) -> list[UnitState]:
    """The states of the units in a module, each once, those of outer modules first."""
    owners = module.modules() if recurse else [module]
    return list(dict.fromkeys(vars(owner)[STATE] for owner in owners if STATE in vars(owner)))
