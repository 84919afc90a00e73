"""`local_step`: an optimizer that steps on the local shards of its DTensors, at the speed of plain tensors.

torch's optimizers reach DTensors operator by operator: ten list operators a step, each of which unwraps every
parameter, gradient and state.  Where an update is element by element, the local shards alone give the same numbers.
So for the time of a step the optimizer is given them, plain parameters beside them in the same lists, and afterwards
has DTensors again: in its parameter groups, its state and its state dict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import bare_step, count_write, follows_scheduler, keep_scheduler_mark, mark_stepped, with_step_hooks
from ..dispatch.results import wrap
from ..errors import MixedTensorError, OptimizerError, PlacementError
from ..layout.spec import Spec
from ..tensor.dtensor import DTensor

__all__ = ["ELEMENTWISE", "local_step"]

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

_MARK = "_shoal_local_step"

# State that is one number per parameter, and stays plain.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})


def local_step(optimizer: O) -> O:
    """The same optimizer, whose `step` runs on local shards; the numbers and the state dict are those of before.

    It communicates nothing. A Muon of DTensors stays as it is and needs no `local_step`: it gathers the update of each
    matrix, one collective for many. An LR scheduler may be made before or after.

    It also lets DTensors and plain tensors share an optimizer with `foreach=True` or `fused=True`.  A copy of the
    optimizer (deepcopy, pickle) steps through dispatch again.

    Args:
        optimizer: changed in place.

    Raises:
        OptimizerError: if its update is not known to be element by element (`ELEMENTWISE`; subclasses may differ) and
            it is no Muon, or its step was replaced before.
        PlacementError: (at a step) if a parameter is partial.
        MixedTensorError: (at a step) if a gradient or a loaded state is plain where the parameter is a DTensor.

    Example:
        >>> import torch
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_dtensor import Shard, distribute_tensor
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     weight = torch.nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Shard(0)]))
        ...     optimizer = local_step(torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0))
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        ...     weight.to_local(), optimizer.state[weight]["exp_avg"].placements
        (tensor([0.5000, 0.5000], grad_fn=<ToLocalBackward>), (Shard(dim=0),))
    """
    _check(optimizer)
    if type(optimizer) is torch.optim.Muon:
        return optimizer
    scheduled, run, twins = follows_scheduler(optimizer), bare_step(optimizer), _Twins()

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if scheduled:
            mark_stepped(self)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with twins.in_place_of_dtensors(self):
            run(self)
        return loss

    hooked = with_step_hooks(step)
    setattr(hooked, _MARK, True)
    if scheduled:
        keep_scheduler_mark(hooked)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]  # as LRScheduler does
    return optimizer


def _check(optimizer: Optimizer) -> None:
    """Raise OptimizerError if the optimizer cannot step on local shards."""
    if type(optimizer) not in (*ELEMENTWISE, torch.optim.Muon):
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise OptimizerError(
            f"local_step: the update of {type(optimizer).__name__} is not known to be element by element; it takes "
            f"{names}, Muon, and no subclasses. Without it the optimizer works on DTensors through dispatch"
        )
    if hasattr(optimizer.step, _MARK) or ("step" in vars(optimizer) and not follows_scheduler(optimizer)):
        raise OptimizerError(
            "local_step: this optimizer has a step of its own already (set by hand, or by local_step itself); call "
            "local_step once, on an optimizer as torch makes it"
        )


class _Twin:
    """A DTensor parameter's local shard, and the two faces of its state: of DTensors, and of their local shards.

    Attributes:
        outer: the state that users see; None while there is none.
        inner: the same, local.
        values: identities of the values of `inner` when `outer` was made of it.
    """

    __slots__ = ("inner", "local", "outer", "param", "spec", "values")

    def __init__(self, param: DTensor) -> None:
        if param._spec.partials:
            raise PlacementError(
                f"local_step: a parameter has placements {param.placements}; a partial value has no elements of "
                "its own. Redistribute it to Replicate or Shard"
            )
        self.param, self.local, self.spec = param, param._local_tensor, param._spec
        self.outer: dict[str, Any] | None = None
        self.inner: dict[str, Any] = {}
        self.values: tuple[int, ...] = ()

    def enter(self, outer: dict[str, Any]) -> None:
        """Take over a state that was loaded, or set by hand."""
        self.inner = {name: self._local(name, value) for name, value in outer.items()}
        moved = any(isinstance(v, DTensor) and not v._spec.same_layout(self.spec) for v in outer.values())
        self.outer, self.values = outer, () if moved else tuple(map(id, self.inner.values()))

    def leave(self, inner: dict[str, Any]) -> dict[str, Any]:
        """The face of DTensors of what a step left."""
        self.inner, self.values = inner, tuple(map(id, inner.values()))
        self.outer = {name: self._global(name, value) for name, value in inner.items()}
        return self.outer

    def gradient(self, grad: Any) -> Tensor:
        """The local shard of a gradient that is not in the parameter's layout, redistributed to it."""
        moved = grad.redistribute(self.spec.mesh, self.spec.placements, shard_order=self.spec.shard_order)
        local: Tensor = moved._local_tensor
        return local

    def _local(self, name: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            return value._local_tensor if value._spec.same_layout(self.spec) else self.gradient(value)
        if isinstance(value, Tensor) and value.ndim and name not in _NUMBERS:
            raise MixedTensorError(
                f"local_step: the state {name!r} of a DTensor parameter is a plain tensor of shape "
                f"{tuple(value.shape)}; load it as a DTensor in the parameter's placements, {self.spec.placements}"
            )
        return value

    def _global(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name in _NUMBERS or value.shape != self.local.shape:
            return value
        return wrap(DTensor, value, self.spec if value.dtype == self.spec.dtype else self.spec.with_(dtype=value.dtype))


class _Twins:
    """The twins of an optimizer's DTensor parameters, and the state that it has inside of a step."""

    __slots__ = ("inside", "known")

    def __init__(self) -> None:
        self.known: dict[int, _Twin] = {}  # by id: a twin holds its parameter
        self.inside: Any = defaultdict(dict)

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
        if outer is not twin.outer:
            twin.outer = None
            if outer is not None:
                twin.enter(outer)
            self._set(local, None if outer is None else twin.inner)
        if grad is None:
            local.grad = None
        else:
            shards: Any = grad
            spec: Spec | None = getattr(grad, "_spec", None)
            if spec is None:
                raise MixedTensorError(
                    f"local_step: the gradient of a DTensor parameter is a plain tensor of shape {tuple(grad.shape)}; "
                    f"make it a DTensor: distribute_tensor or DTensor.from_local, placements {twin.spec.placements}"
                )
            same = spec is twin.spec or spec.same_layout(twin.spec)
            local.grad = shards._local_tensor if same else twin.gradient(shards)
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

    def _set(self, key: Tensor, state: dict[str, Any] | None) -> None:
        if state is None:
            self.inside.pop(key, None)
        else:
            self.inside[key] = state

    @contextmanager
    def in_place_of_dtensors(self, optimizer: Optimizer) -> Iterator[None]:
        """For the time of the block, the optimizer has local shards in place of its DTensors."""
        groups, state = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        inside = [[self.enter(param, state) for param in params] for params in lists]
        try:
            for group, params in zip(groups, inside, strict=True):
                group["params"] = params
            optimizer.state = self.inside
            yield
        finally:
            optimizer.state = state
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
                for param in params:
                    self.leave(param, state)
                self.count_writes(params, fused=bool(group.get("fused")))
