"""Autograd's engine and optimizers: the running pass, its leaves, its threads, and calls without overhead."""

from __future__ import annotations

import ctypes
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

# A block in which modes and subclasses do not see calls of torch functions.
unwatched_functions: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction

# The same of subclasses alone.
unwatched_by_subclasses: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass

# Whether the backward pass in progress will run an autograd node; RuntimeError for a leaf of torch.autograd.grad.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node

# The autograd node whose backward, or whose hook, is running.
current_node: Callable[[], Any] = torch._C._current_autograd_node


def function_of(node: Any) -> type[torch.autograd.Function] | None:
    """The autograd function of a node; None of torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def saving_state() -> tuple[bool, object]:
    """Whether gradients are recorded, and the hooks on what is saved for them: a checkpoint changes one of them."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_backward() -> bool:
    """Whether autograd's engine is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int:
    """A number for the backward pass that is running on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have the backward pass that is running call a function when all gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def thread_object(key: str) -> Any:
    """The object that this thread holds under a name, or None; the threads of a backward pass have their caller's."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_object(key: str, value: Any) -> None:
    """Have this thread hold an object under a name."""
    if torch.compiler.is_dynamo_compiling():  # the compiler would look into the object, all that it refers to, and this
        _uncompiled(key, value)
        return
    if _stash_takes_over():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


_uncompiled: Callable[[str, Any], None] = _disable_dynamo(set_thread_object)


@cache
def _stash_takes_over() -> bool:
    """Whether torch releases what it was given to hold without having counted a reference, as 2.11 does."""
    key, probe = "shoal_dtensor.probe", object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    uncounted = sys.getrefcount(probe) == before
    for item in (probe, None) if uncounted else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
    torch._C._stash_obj_in_tls(key, None)
    return uncounted


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is how `vmap` or `grad` sees another one, possibly a DTensor."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function; outside of functorch, without the 3 us that `Function.apply` takes to look for it."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]  # torch gives it no types
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # of C, left out of torch's stub


def steps_as(optimizer: Optimizer, module: str) -> bool:
    """Whether the optimizer's step is one of a module of torch, as it is in subclasses that do not override it."""
    return type(optimizer).step.__module__.startswith(module)


@torch.no_grad()
def make_state(optimizer: Optimizer, groups: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The state of the parameters of some groups as it is when their first step begins; the optimizer stays as it is.

    Where torch's optimizers make it, nothing else is run. Others make it somewhere in a step: it is that after a step
    of copies with a rate and gradients of zero. None is made for some of the parameters alone, or where a step needs a
    closure.
    """
    kind: Any = type(optimizer)
    has_init = steps_as(optimizer, "torch.optim") and hasattr(kind, "_init_group")
    closure = signature(kind.step).parameters.get("closure")
    if not has_init and (optimizer.state or (closure is not None and closure.default is closure.empty)):
        return {}
    stand_in, inside = object.__new__(kind), {}
    vars(stand_in).update(vars(optimizer), state=defaultdict(dict), param_groups=[])
    vars(stand_in).update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    for group in groups:
        copies = [param.detach() if has_init else param.detach().clone() for param in group["params"]]
        for param, copied in zip(group["params"], copies, strict=True):
            copied.requires_grad_().grad = torch.zeros_like(copied)
            inside[param] = copied
        rate = {"lr": group["lr"] * 0} if not has_init and "lr" in group else {}
        stand_in.param_groups.append({**group, "params": copies, **rate})
    if has_init:
        for group in stand_in.param_groups:
            lists: list[list[Any]] = [[] for _ in range(len(signature(kind._init_group).parameters) - 2)]
            kind._init_group(stand_in, group, *lists)
    elif inside:
        kind.step(stand_in)
    return {param: stand_in.state[copied] for param, copied in inside.items() if stand_in.state.get(copied)}


def orthogonalized(update: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    """What Muon adds for the update of a matrix, with the options of its parameter group; may overwrite the update."""
    return torch.optim._muon._zeropower_via_newtonschulz(
        update, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )


def adjusted_rate(rate: float, group: dict[str, Any], shape: torch.Size) -> float:
    """Muon's learning rate for a matrix of a shape."""
    return torch.optim._muon._adjust_lr(rate, group["adjust_lr_fn"], shape)
