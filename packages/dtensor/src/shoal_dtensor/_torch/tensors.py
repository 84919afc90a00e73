"""Tensor wrappers, storages and versions; autograd's engine, passes and threads; optimizers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.optim import Optimizer
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from shoal_mesh.internal import forward_levels as forward_levels, has_tangent

from ..errors import TransformError
from .compiling import dispatch_modes as dispatch_modes, is_tracing, recorder

pytree = _pytree
# The module with the flag `_is_in_torch_dispatch_mode`, which is set while a mode is entered.
mode_flags = _python_dispatch
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
# (class, local tensor, spec, requires_grad)
wrap_local: Callable[..., Any] = torch.Tensor._dtensor__new__
in_inference_mode: Callable[[], bool] = torch.is_inference_mode_enabled
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# The hooks of a tensor by their number, or None: on the gradient, and after it is accumulated.
gradient_hooks: Callable[[Any], Any] = attrgetter("_backward_hooks")
accumulation_hooks: Callable[[Any], Any] = attrgetter("_post_accumulate_grad_hooks")
# whether a tensor is a zero without memory, as autograd makes for tangents
is_zero_without_memory: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
# torch's own attributes, which a subclass may override
BASE: Any = torch._C.TensorBase
# bypasses `Tensor.split`, a Python method that costs 2 us
split: Callable[..., Any] = BASE.split
# the classes of tensors while a compiler traces; a FunctionalTensor wraps a FakeTensor
TRACED = (FakeTensor, FunctionalTensor)


class TensorNote:
    """An attribute of a tensor object that no copy and no file contains."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[torch.Size], tuple[()]]:
        # `torch.Size()` is falsy and, unlike None, allowed by weights_only loading
        return torch.Size, ()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are views of one storage; empty tensors have storages too."""
    if is_tracing():
        return False
    storage = local_of(one).untyped_storage()
    return bool(storage._cdata == local_of(other).untyped_storage()._cdata)


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return the location of a tensor's elements, for comparison with their location later.

    An empty tensor has a location of its own too.
    """
    # Addresses are not unique: all empty tensors have the address zero, and freed memory is reused.
    return ref(tensor.untyped_storage()), tensor.storage_offset()


# Counts a write to each tensor of a list; RuntimeError for tensors of inference mode.
increment_versions: Callable[[list[torch.Tensor]], None] = torch._C._increment_version


def bump_version(tensors: Any) -> None:
    """Count a write to one or several tensors for autograd.

    Tensors of inference mode do not have a count.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    try:
        increment_versions(tensors)
    except RuntimeError:
        increment_versions([tensor for tensor in tensors if not tensor.is_inference()])


def with_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to resolve the lazy conjugations and negations of its intermediate results.

    It is for use below a tensor subclass, where torch ignores these marks.
    """
    # Kernels made of other operators may use such marks for intermediate results.
    exclude = torch._C._SetExcludeDispatchKeyGuard
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude(keys[0], False), exclude(keys[1], False):
            result = function(*args, **kwargs)
            return pytree.tree_map_only(
                torch.Tensor, lambda t: t.resolve_conj().resolve_neg(), result
            )

    return run


# --- autograd's engine ----------------------------------------------------------------------------

# Blocks in which modes and subclasses, or subclasses alone, do not observe torch functions.
unwatched_functions: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
unwatched_by_subclasses: Callable[[], AbstractContextManager[object]] = (
    torch._C.DisableTorchFunctionSubclass
)

# The number of the backward pass that runs on this thread; -1 if none does.
backward_number: Callable[[], int] = torch._C._current_graph_task_id
# Tells whether this pass will run a node; RuntimeError for a leaf of torch.autograd.grad.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The node that is running, or whose hook is running.
current_node: Callable[[], Any] = torch._C._current_autograd_node
# Registers a callback for the end of this pass.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def selectively_checkpointed() -> bool:
    """Tell whether selective activation checkpointing is active.

    The tensors that it saves must not be written to afterwards.
    """
    selective = _CachingTorchDispatchMode | _CachedTorchDispatchMode
    return dispatch_modes() > 0 and any(
        isinstance(mode, selective) for mode in _get_current_dispatch_mode_stack()
    )


def unwatched() -> AbstractContextManager[object]:
    """Return a block in which selective activation checkpointing does not save results.

    It is for collectives, which run again in recomputations.
    """
    return _disable_current_modes() if selectively_checkpointed() else nullcontext()


def saving_state() -> tuple[bool, object]:
    """Return whether gradients are recorded, and the innermost saved-tensor hooks.

    Inside an activation checkpoint, one of these differs from outside.
    """
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """Tell whether autograd's engine is running a backward pass on this thread."""
    return backward_number() != -1


def is_transformed(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of `vmap` or `grad` on another tensor, possibly a DTensor."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(
        tensor
    )


# not empty while a block intercepts `Function.apply`
INTERCEPTED: list[object] = []


def types_are_checked() -> bool:
    """Tell whether a thread is in a block that checks the types of plain tensors."""
    return bool(INTERCEPTED)


# Tells whether a transform of torch.func runs.
_transforms_run: Callable[[], bool] = torch._C._are_functorch_transforms_active


def in_transform() -> bool:
    """Tell whether a transform of torch.func runs, or a recorder such as linearize's."""
    return _transforms_run() or recorder() is not None


def is_followed(tensor: torch.Tensor) -> bool:
    """Tell whether a transform of torch.func or forward-mode AD follows a tensor."""
    if forward_levels._current_level < 0 and not _transforms_run():
        return False
    return is_transformed(tensor) or has_tangent(tensor)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function; outside of functorch, save the 3 us that `Function.apply` takes.

    Raises:
        TransformError: a transform of torch.func runs, or an argument has a tangent.
    """
    if INTERCEPTED or _transforms_run():
        return _apply_observed(function, *args)
    try:
        # no stub has the method of the base class, which is written in C
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    except NotImplementedError as error:
        # of torch, which has computed the value, for the tangent
        if type(error) is not NotImplementedError or forward_levels._current_level < 0:
            raise
        raise transform_error(function.__name__) from error


def _apply_observed(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function by torch's `apply`, which transforms and interceptors replace."""
    has_rules = "setup_context" in vars(function)
    if _transforms_run() and not has_rules:
        raise transform_error(function.__name__)
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch gives it no types


def transform_error(step: str) -> TransformError:
    """Return the error of a step that transforms of torch.func and tangents cannot pass."""
    return TransformError(
        f"{step} has no rule for transforms of torch.func (grad, vjp, jvp, vmap, ...) "
        "and for forward-mode AD: from_local, to_local, redistribute and parallel styles are "
        "differentiated by backward() and torch.autograd.grad. Move them out of the transformed "
        "function, or use torch.autograd.functional (jacobian, vjp) without vectorize=True"
    )


# --- optimizers -----------------------------------------------------------------------------------


def steps_as(optimizer: Optimizer, module: str) -> bool:
    """Tell whether an optimizer's step is defined in a module of torch, also if it is inherited."""
    return type(optimizer).step.__module__.startswith(module)


def wrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of wrappers, such as accelerate's, or the optimizer itself.

    A wrapper has the groups and the state of the optimizer inside of it as properties.
    """
    while _delegates(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            break
        optimizer = inner
    return optimizer


def _delegates(optimizer: Optimizer) -> bool:
    """Tell whether the groups of an optimizer are those of another object."""
    return isinstance(getattr(type(optimizer), "param_groups", None), property)


@torch.no_grad()
def make_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the state of some groups' parameters at the beginning of their first step.

    The optimizer stays unchanged. Torch's optimizers have a function that makes the state. Other
    optimizers make it during a step, so their state is taken from a step on copies of the
    parameters, with zero gradients and a learning rate of zero. For these optimizers, the result is
    empty if other parameters already have state, if a step needs a closure, or if the groups of the
    optimizer are those of another object.
    """
    if _delegates(optimizer):
        return {}
    cls: Any = type(optimizer)
    has_init = steps_as(optimizer, "torch.optim") and hasattr(cls, "_init_group")
    closure = signature(cls.step).parameters.get("closure")
    takes_closure = closure is not None and closure.default is closure.empty
    if not has_init and (optimizer.state or takes_closure):
        return {}
    stand_in = object.__new__(cls)
    copy_of = {}
    vars(stand_in).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    vars(stand_in).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    for group in groups:
        copies = [
            param.detach() if has_init else param.detach().clone() for param in group["params"]
        ]
        for param, copied in zip(group["params"], copies, strict=True):
            copied.requires_grad_().grad = torch.zeros_like(copied)
            copy_of[param] = copied
        copied_group = {**group, "params": copies}
        if not has_init and "lr" in group:
            copied_group["lr"] = group["lr"] * 0
        stand_in.param_groups.append(copied_group)
    if has_init:
        for group in stand_in.param_groups:
            lists: list[list[Any]] = [
                [] for _ in range(len(signature(cls._init_group).parameters) - 2)
            ]
            cls._init_group(stand_in, group, *lists)
    elif copy_of:
        cls.step(stand_in)
    return {
        param: stand_in.state[copied]
        for param, copied in copy_of.items()
        if stand_in.state.get(copied)
    }


# Muon's orthogonalization of a matrix's update; it may overwrite the update.
orthogonalized: Callable[..., torch.Tensor] = torch.optim._muon._zeropower_via_newtonschulz

# Muon's learning rate for a matrix of a shape.
adjusted_rate: Callable[..., float] = torch.optim._muon._adjust_lr
