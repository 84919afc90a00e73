"""Steps of torch's optimizers on the local shards of DTensors, at the speed of plain tensors: a hook before steps.

torch's optimizers reach DTensors operator by operator: ten list operators a step, each of which unwraps every
parameter, gradient and state.  Where an update is element by element, the local shards alone give the same numbers.
So torch's step is given a stand-in for its optimizer, which has them in its parameter groups and its state, plain
parameters beside them in the same lists; the optimizer itself has DTensors all the time.  A step of Muon multiplies
matrices; it is `muon_step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import before_optimizer_steps, count_write, dict_version, unwatched_functions
from ..dispatch.results import wrap
from ..errors import OptimizerError
from ..layout.spec import Spec
from ..tensor.dtensor import DTensor

O = TypeVar("O", bound=Optimizer)  # noqa: E741  # a type variable, no number

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose update of an element depends on that element's parameter, gradient and state alone."""

_KINDS = frozenset({*ELEMENTWISE, torch.optim.Muon})

# State that is one number per parameter, and stays plain.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def local_step(optimizer: O) -> O:
    """The optimizer itself, if its steps work on local shards of DTensors; otherwise an error.

    Nothing else is needed: torch's optimizers do that as they are. A step communicates nothing (Muon's gathers the
    update of each matrix, one collective for many), the numbers and the state dict are those of DTensors, and DTensors
    and plain tensors may share an optimizer. What dispatch alone can do goes through dispatch, operator by operator:
    compiled and differentiable steps, partial parameters, plain gradients or states of DTensors, subclasses.

    Args:
        optimizer: any.

    Raises:
        OptimizerError: if its update is not known to be element by element (`ELEMENTWISE`; subclasses may differ) and
            it is no Muon.

    Example:
        >>> import torch
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     weight = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None))
        ...     optimizer = local_step(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0))
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        ...     weight.to_local(), optimizer.state[weight]["exp_avg"].placements
        (tensor([0.5000, 0.5000], grad_fn=<ToLocalBackward>), (Shard(dim=0),))
    """
    if type(optimizer) not in _KINDS:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise OptimizerError(
            f"local_step: the update of {type(optimizer).__name__} is not known to be element by element; known are "
            f"{names} and Muon, and no subclasses. It works on DTensors through dispatch as it is"
        )
    return optimizer


class _UnfitError(Exception):
    """A parameter, gradient or state that has no local shard of its own to step on."""


class _LocalStep:
    """What stands for the parameters and the state of an optimizer in its steps.

    It is made of these, and a step finds them as the last one left them, as a rule.  To see that, every step compares
    the parameters, and the versions of the dicts that hold their state.

    Attributes:
        groups: what stands for the parameters of each group: the shard of a DTensor, a plain one itself.
        spread: the DTensors of each group, with that shard and its spec.
        state: the state of what stands for parameters; that of plain ones is their own.
        params: the parameters of all groups, when the last step was over.
        versions: of the parameters' state and of `state`, then.
        gradients: in a step, by the identity of a list of `groups`: its entry of `spread`, the shards of its gradients.
        given: in a step, the entries of `spread` whose shards have them as `.grad`.
        collected: by the same identity, the options of a group, and what torch collected of it in the last step.
    """

    __slots__ = ("collected", "given", "gradients", "groups", "params", "spread", "state", "versions")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing."""
        self.groups: list[list[Tensor]] = []
        self.spread: list[list[tuple[DTensor, Tensor, Spec]]] = []
        self.state: Any = defaultdict(dict)
        self.params: list[Any] = []
        self.versions: tuple[list[Any], list[Any]] = [], []
        self.gradients: dict[int, tuple[list[tuple[DTensor, Tensor, Spec]], list[Tensor | None]]] = {}
        self.given: list[list[tuple[DTensor, Tensor, Spec]]] = []
        self.collected: dict[int, tuple[dict[str, Any], Any, list[Any], list[list[Any]]]] = {}

    def run(self, optimizer: Optimizer, stand_in: Any) -> Iterator[dict[str, Any]]:
        """The parameter groups for a step, of local shards; those of dispatch if there is no shard to step on."""
        groups, state = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        try:
            known = self.is_made_of(lists, state) and self.take_gradients(groups)
            if not known:
                self.make(lists, state)
                self.take_gradients(groups)
        except _UnfitError:
            self.drop_gradients()
            self.forget()
            stand_in.state = state
            yield from groups
            return
        stand_in.state = self.state
        try:
            for group, params in zip(groups, self.groups, strict=True):
                yield {**group, "params": params}
        finally:
            self.drop_gradients()
            if not (known and _versions((), self.state) == self.versions[1]):
                self.hand_back(lists, state)

    def is_made_of(self, lists: Sequence[Sequence[Tensor]], state: Any) -> bool:
        """Whether parameters and their state are what they were when the last step was over."""
        return bool(self.params) and (
            _versions(lists, state) == self.versions[0] and all(map(is_, chain.from_iterable(lists), self.params))
        )

    def make(self, lists: Sequence[Sequence[Tensor]], state: Any) -> None:
        """Take over parameters and a state that are new, or were loaded or set by hand."""
        self.drop_gradients()
        self.forget()
        for params in lists:
            spread = [(param, param._local_tensor, param._spec) for param in params if isinstance(param, DTensor)]
            if any(spec.partials for _, _, spec in spread):
                raise _UnfitError
            self.spread.append(spread)
            self.groups.append([param._local_tensor if isinstance(param, DTensor) else param for param in params])
        for param, inside in self.pairs(lists):
            outer = state.get(param, {})
            if not isinstance(outer, dict):
                raise _UnfitError
            if outer:
                self.state[inside] = outer if inside is param else _converted(outer, _inner, param._spec)

    def pairs(self, lists: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Tensor]]:
        """Each parameter, and what stands for it."""
        return zip(chain.from_iterable(lists), chain.from_iterable(self.groups), strict=True)

    def take_gradients(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Take the gradients of DTensors; False if a shard is not that of its parameter any more.

        Autograd gets to know what will be written to: DTensors by their shards; fused kernels do not even say that.
        """
        for group, params, spread in zip(groups, self.groups, self.spread, strict=True):
            fused = group.get("fused")
            with unwatched_functions():  # reading an attribute of a subclass takes 100 ns longer outside
                grads: list[Any] = [param.grad for param, _, _ in spread]
            taken: list[Tensor | None] = []
            written: list[Tensor] = []
            for (param, shard, spec), grad in zip(spread, grads, strict=True):
                if param._local_tensor is not shard or param._spec is not spec:
                    return False
                if grad is None:
                    taken.append(None)
                    continue
                taken.append(grad._local_tensor if type(grad) is DTensor and grad._spec is spec else _shard(grad, spec))
                written.append(param)
                if fused:
                    written.append(shard)
            count_write(written)
            self.gradients[id(params)] = spread, taken
            if not fused:
                self.give_gradients(params)
        return True

    def give_gradients(self, params: list[Tensor]) -> None:
        """Give the shards of a group their gradients, for torch to find them there."""
        spread, grads = self.gradients[id(params)]
        self.given.append(spread)
        for (_, shard, _), grad in zip(spread, grads, strict=True):
            shard.grad = grad

    def drop_gradients(self) -> None:
        """Let the shards of gradients live no longer than these."""
        self.gradients.clear()
        for spread in self.given:
            for _, shard, _ in spread:
                shard.grad = None
        self.given.clear()

    def collect(self, of_torch: Callable[..., Any], group: dict[str, Any], *lists: list[Any]) -> Any:
        """`_init_group` of a fused step: fills lists with parameters, their gradients, and what belongs to their state.

        torch's asks each parameter for all of it, as long as the kernel takes for small ones.  While nothing but the
        gradients has changed since the last step, they are put between what it found then.
        """
        params = group["params"]
        if id(params) not in self.gradients or not group.get("fused"):  # dispatch; gradients that shards have already
            return of_torch(group, *lists)
        _, grads = self.gradients[id(params)]
        options = {**group, "params": None, "lr": None}
        last = self.collected.get(id(params))
        if last is not None and last[0] == options and [*map(type, grads)] == [Tensor] * len(params):
            for into, values in zip(lists, (last[2], grads, *last[3]), strict=True):
                into.extend(values)
            return last[1]
        self.give_gradients(params)
        result = of_torch(group, *lists)
        if len(lists[1]) == len(params):
            self.collected[id(params)] = options, result, [*lists[0]], [*map(list, lists[2:])]
        return result

    def hand_back(self, lists: Sequence[Sequence[Tensor]], state: Any) -> None:
        """Give parameters the state that a step left, as users see it."""
        for param, inside in self.pairs(lists):
            if inside in self.state:
                inner = self.state[inside]
                state[param] = inner if inside is param else _converted(inner, _outer, param._spec)
        self.collected.clear()
        self.params = [*chain.from_iterable(lists)]
        self.versions = _versions(lists, state), _versions((), self.state)


def _versions(lists: Sequence[Sequence[Tensor]], state: Any) -> list[Any]:
    """The lengths of parameter lists, and for a state and each of its entries a number that a change changes."""
    states = [*state.values()]
    if not isinstance(state, dict) or {*map(type, states)} - {dict}:
        return [object()]  # who knows what
    return [*map(len, lists), *map(dict_version, (state, *states))]


def _converted(state: dict[str, Any], convert: Callable[..., Any], spec: Spec) -> dict[str, Any]:
    return {name: convert(value, spec, is_number=name in _NUMBERS) for name, value in state.items()}


def _inner(value: Any, spec: Spec, *, is_number: bool) -> Any:
    """What a step has for a value of a parameter's state."""
    if isinstance(value, Tensor) and (isinstance(value, DTensor) or (value.ndim and not is_number)):
        return _shard(value, spec)
    return value


def _outer(value: Any, spec: Spec, *, is_number: bool) -> Any:
    """What users see of a value of the state of a parameter's shard."""
    if not isinstance(value, Tensor) or is_number or value.shape != spec.local_shape:
        return value
    return wrap(DTensor, value, spec if value.dtype == spec.dtype else spec.with_(dtype=value.dtype))


def _shard(value: Any, spec: Spec) -> Tensor:
    """The local shard of a gradient or state, redistributed to its parameter's layout if it is in another."""
    if not isinstance(value, DTensor):
        raise _UnfitError
    if value._spec is not spec and not value._spec.same_layout(spec):
        value = value.redistribute(spec.mesh, spec.placements, shard_order=spec.shard_order)
    local: Tensor = value._local_tensor
    return local


_steps: WeakKeyDictionary[Optimizer, _LocalStep] = WeakKeyDictionary()


class _Groups:
    """Parameter groups that are made when a step asks for them: after its closure, which may replace gradients."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Iterator[dict[str, Any]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._make()


def _groups_of_muon(optimizer: Any) -> Iterator[dict[str, Any]]:
    """No groups: what there was to do is done."""
    from .muon import muon_step  # here: few optimizers are Muon

    muon_step(optimizer)
    return iter(())


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> Any:
    """The arguments of a step, with a stand-in for an optimizer of DTensors; None leaves them."""
    kind = type(optimizer)
    if kind not in _KINDS or torch.compiler.is_compiling():
        return None
    groups = optimizer.param_groups
    step = _steps.get(optimizer)
    if step is None:
        if not any(isinstance(param, DTensor) for group in groups for param in group["params"]):
            return None
        step = _steps[optimizer] = _LocalStep()
    for group in groups:
        if group.get("differentiable") or isinstance(group["lr"], DTensor):
            return None
    stand_in = object.__new__(kind)
    vars(stand_in).update(vars(optimizer))
    make = partial(_groups_of_muon, optimizer) if kind is torch.optim.Muon else partial(step.run, optimizer, stand_in)
    if any(group.get("fused") for group in groups):
        stand_in._init_group = partial(step.collect, partial(kind._init_group, stand_in))
    stand_in.param_groups = _Groups(make)
    return (stand_in, *args[1:]), kwargs


def install_local_step() -> None:
    """Have the hook called before every optimizer's step."""
    before_optimizer_steps(_before_step)
