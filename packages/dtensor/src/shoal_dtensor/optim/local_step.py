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
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import before_optimizer_steps, count_write
from ..dispatch.results import wrap
from ..errors import OptimizerError
from ..tensor.dtensor import DTensor

__all__ = ["ELEMENTWISE", "install_local_step", "local_step"]

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


class _Twin:
    """A DTensor parameter's local shard, and the two faces of its state: of DTensors, and of their local shards.

    Attributes:
        outer: the state that users see; None while there is none.
        inner: the same, local.
        seen: identities of the values of `outer` when `inner` was made of it, or it of `inner`.
        values: likewise those of `inner`.
    """

    __slots__ = ("inner", "local", "outer", "param", "seen", "spec", "values")

    def __init__(self, param: DTensor) -> None:
        if param._spec.partials:
            raise _UnfitError
        self.param, self.local, self.spec = param, param._local_tensor, param._spec
        self.outer: dict[str, Any] | None = None
        self.inner: dict[str, Any] = {}
        self.seen: tuple[int, ...] = ()
        self.values: tuple[int, ...] = ()

    def enter(self, outer: dict[str, Any]) -> None:
        """Take over a state that was loaded, or set by hand."""
        self.inner = {name: self._local(name, value) for name, value in outer.items()}
        moved = any(isinstance(v, DTensor) and not v._spec.same_layout(self.spec) for v in outer.values())
        self.outer, self.seen = outer, tuple(map(id, outer.values()))
        self.values = () if moved else tuple(map(id, self.inner.values()))

    def leave(self, inner: dict[str, Any]) -> dict[str, Any]:
        """The face of DTensors of what a step left."""
        self.inner, self.values = inner, tuple(map(id, inner.values()))
        self.outer = {name: self._global(name, value) for name, value in inner.items()}
        self.seen = tuple(map(id, self.outer.values()))
        return self.outer

    def shard(self, value: Any) -> Tensor:
        """The local shard of a gradient or state, redistributed to the parameter's layout if it is in another."""
        spec = value._spec
        if spec is not self.spec and not spec.same_layout(self.spec):
            value = value.redistribute(self.spec.mesh, self.spec.placements, shard_order=self.spec.shard_order)
        local: Tensor = value._local_tensor
        return local

    def _local(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            return self.shard(value)
        if isinstance(value, Tensor) and value.ndim and name not in _NUMBERS:
            raise _UnfitError
        return value

    def _global(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name in _NUMBERS or value.shape != self.local.shape:
            return value
        return wrap(DTensor, value, self.spec if value.dtype == self.spec.dtype else self.spec.with_(dtype=value.dtype))


class _Twins:
    """The twins of an optimizer's DTensor parameters, and the state that its stand-in has."""

    __slots__ = ("inside", "known")

    def __init__(self) -> None:
        self.known: dict[int, _Twin] = {}  # by id: a twin holds its parameter
        self.inside: Any = defaultdict(dict)

    def groups(self, optimizer: Optimizer, stand_in: Any) -> Iterator[dict[str, Any]]:
        """The parameter groups for a step, of local shards; those of dispatch if there is no shard to step on."""
        lists, state = [group["params"] for group in optimizer.param_groups], optimizer.state
        try:
            shards = [[self.enter(param, state) for param in params] for params in lists]
        except _UnfitError:
            self.known.clear()
            self.inside.clear()
            stand_in.state = state
            yield from optimizer.param_groups
            return
        stand_in.state = self.inside
        try:
            for group, params in zip(optimizer.param_groups, shards, strict=True):
                yield {**group, "params": params}
        finally:
            for group, params in zip(optimizer.param_groups, lists, strict=True):
                for param in params:
                    self.leave(param, state)
                self.count_writes(params, fused=bool(group.get("fused")))
            self.forget_others(lists)

    def of(self, param: DTensor) -> _Twin:
        """The twin of a parameter as it is now."""
        twin = self.known.get(id(param))
        if twin is not None and twin.local is param._local_tensor and twin.spec is param._spec:
            return twin
        if twin is not None:
            self.inside.pop(twin.local, None)
        twin = self.known[id(param)] = _Twin(param)
        return twin

    def enter(self, param: Tensor, state: Any) -> Tensor:
        """What stands for a parameter inside of a step, with its gradient and state."""
        outer = state.get(param)
        if not isinstance(param, DTensor):
            if outer is not self.inside.get(param):
                self._set(param, outer)
            return param
        twin, grad = self.of(param), param.grad
        local = twin.local
        if outer is not twin.outer or (outer is not None and tuple(map(id, outer.values())) != twin.seen):
            twin.outer = None
            if outer is not None:
                twin.enter(outer)
            self._set(local, None if outer is None else twin.inner)
        if grad is not None and not isinstance(grad, DTensor):
            raise _UnfitError
        local.grad = None if grad is None else twin.shard(grad)
        return local

    def leave(self, param: Tensor, state: Any) -> None:
        """Hand the state of a parameter back, as users see it."""
        twin = self.known[id(param)] if isinstance(param, DTensor) else None
        if twin is None:
            if param in self.inside:
                state[param] = self.inside[param]
            return
        twin.local.grad = None  # so that it lives no longer than the parameter's own
        if twin.outer is not None and tuple(map(id, twin.inner.values())) == twin.values:
            return
        inner = self.inside.get(twin.local)
        if inner is not None:
            state[param] = twin.leave(inner)

    def count_writes(self, params: Sequence[Tensor], *, fused: bool) -> None:
        """Tell autograd what was written to: DTensors by their shards; fused kernels do not even say that."""
        stepped = [param for param in params if isinstance(param, DTensor) and param.grad is not None]
        count_write(stepped + [param._local_tensor for param in stepped] if fused else stepped)

    def forget_others(self, lists: Sequence[Sequence[Tensor]]) -> None:
        """Let parameters go that the optimizer no longer has."""
        if len(self.known) > sum(map(len, lists)):
            kept = {id(param) for params in lists for param in params}
            for twin in [self.known.pop(key) for key in self.known.keys() - kept]:
                self.inside.pop(twin.local, None)

    def _set(self, key: Tensor, state: dict[str, Any] | None) -> None:
        if state is None:
            self.inside.pop(key, None)
        else:
            self.inside[key] = state


_twins: WeakKeyDictionary[Optimizer, _Twins] = WeakKeyDictionary()


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
    if not any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        return None
    stand_in = object.__new__(kind)
    vars(stand_in).update(vars(optimizer))
    if kind is torch.optim.Muon:
        make = partial(_groups_of_muon, optimizer)
    elif any(group.get("differentiable") or isinstance(group["lr"], DTensor) for group in optimizer.param_groups):
        return None
    else:
        twins = _twins.get(optimizer) or _twins.setdefault(optimizer, _Twins())
        make = partial(twins.groups, optimizer, stand_in)
    stand_in.param_groups = _Groups(make)
    return (stand_in, *args[1:]), kwargs


def install_local_step() -> None:
    """Have the hook called before every optimizer's step."""
    before_optimizer_steps(_before_step)
