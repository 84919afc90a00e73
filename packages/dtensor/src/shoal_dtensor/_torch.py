"""The seam to torch: every private or unstable torch name that this package uses."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as pytree
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ._meta import as_kernels_make_it

__all__ = [
    "BASE",
    "Build",
    "DataDependentError",
    "FakeTensor",
    "OpOverload",
    "accumulating_leaf",
    "apply",
    "around",
    "at_end_of_backward",
    "backward_number",
    "bare_step",
    "change_shape",
    "count_write",
    "decomposition_of",
    "direct",
    "disabled_torch_function",
    "in_backward",
    "is_all_zero",
    "is_tracing",
    "is_transformed",
    "is_view",
    "make_wrapper",
    "operator_database",
    "pytree",
    "recording",
    "set_thread_object",
    "shapes_of",
    "shares_memory",
    "split",
    "thread_object",
    "view_of",
    "whole_when_compiled",
    "with_conjugates",
    "with_step_hooks",
]

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def _around(cls: Any, local: torch.Tensor, spec: Any, requires_grad: bool) -> Any:
    """A wrapper of class `cls` with `local` as its `_local_tensor` and `spec` as its `_spec`.

    Size and stride are those of `spec.tensor_meta`, dtype and device those of `local`.
    """
    shape, stride, _dtype = spec.tensor_meta
    made = make_wrapper(
        cls, shape, stride, None, None, local.dtype, torch.strided, local.device, requires_grad=requires_grad
    )
    made._local_tensor, made._spec = local, spec
    return made


# torch has the same in C++, made for its own DTensor: 0.7 us where the above takes 1.1.
around: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", _around)
disabled_torch_function = torch._C._disabled_torch_function_impl
BASE: Any = torch._C.TensorBase  # attributes below what a subclass makes of them

# The binding below the method of the same name, which is in Python and takes 2 us to come to it.
split: Callable[..., Any] = torch._C.TensorBase.split


def in_backward() -> bool:
    """Whether autograd's engine is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def backward_number() -> int:
    """A number for the backward pass that is running on this thread."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have the backward pass that is running call a function when all gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def accumulating_leaf() -> Any:
    """The leaf whose gradient hooks are running; None if its gradient is not accumulated (`torch.autograd.grad`)."""
    node = torch._C._current_autograd_node()
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return None
    return getattr(node, "variable", None)


def thread_object(key: str) -> Any:
    """The object that this thread holds under a name, or None; the threads of a backward pass have their caller's."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def set_thread_object(key: str, value: Any) -> None:
    """Have this thread hold an object under a name."""
    if _stash_takes_over():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@cache
def _stash_takes_over() -> bool:
    """Whether torch releases what it was given to hold without having counted a reference, as 2.11 does."""
    key, probe = "shoal_dtensor.probe", object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(key, probe)
    uncounted = sys.getrefcount(probe) == before
    for held in (probe, None) if uncounted else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
    torch._C._stash_obj_in_tls(key, None)
    return uncounted


def is_all_zero(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has only zeros; while tracing, where values are not known, it is taken to have."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta or not tensor.any()


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is how `vmap` or `grad` sees another one, possibly a DTensor."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


DataDependentError = (DataDependentOutputException, DynamicOutputShapeException)


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Run an autograd function; outside of functorch, without the 3 us that `Function.apply` takes to look for it."""
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)  # type: ignore[no-untyped-call]  # torch gives it no types
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # of C, left out of torch's stub


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class without what torch puts around it: a profiler range and the step hooks."""
    step = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]  # functools.wraps


def with_step_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with a profiler range and the optimizer's step hooks around it, as torch's own steps have."""
    return torch.optim.Optimizer.profile_hook_step(step)


Function = TypeVar("Function", bound=Callable[..., Any])

is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling


_WHOLE: dict[str, Callable[..., Any]] = {}


def whole_when_compiled(function: Function) -> Function:
    """Decorator: torch.compile records a call as one node of its graph, and traces what the call does afterwards.

    So the function may look at meshes, specs and caches as it likes.  Its arguments are tensors and constants.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    _WHOLE[name] = function

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_tracing():
            record_whole(name)
        return function(*args, **kwargs)

    return cast(Function, call)


def record_whole(name: str) -> None:
    """Tell the compiler, which runs this while it traces, about a function that it is about to meet."""
    torch.compiler.allow_in_graph(_WHOLE[name])  # type: ignore[no-untyped-call]  # torch gives it no types


record_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result marks it, which imports the compiler


Build = Callable[[torch.device], tuple[Sequence[Any], Mapping[str, Any]]]

META = torch.device("meta")


@cache
def _fake_mode() -> FakeTensorMode:
    return FakeTensorMode()


def shapes_of(op: OpOverload, build: Build, device_type: str) -> Any:
    """What an operator returns for global tensors, without memory or values, and out of sight of the user's modes.

    Args:
        op: the overload.
        build: given a device, the arguments with tensors on it that have no memory.
        device_type: where the operator will run.

    Raises:
        DataDependentError: if the result's shape depends on values.
    """
    with _disable_current_modes():
        # The meta kernel alone takes 0.1 ms where a fake tensor takes 2; few operators have none, or need the device.
        try:
            args, kwargs = build(META)
            return as_kernels_make_it(op._schema.name, args, op(*args, **kwargs), device_type)
        except (NotImplementedError, RuntimeError):
            pass
        with _fake_mode():
            args, kwargs = build(torch.device("cpu"))
            return op(*args, **kwargs)


def direct(op: OpOverload, build: Build, expected: Sequence[Any]) -> Callable[..., Any]:
    """The cheapest callable for an operator and arguments like `build`'s.

    torch's Python bindings (`torch.mm`, `Tensor.add_`) take 0.5 to 2 us less per call than the overload object, and
    methods without arguments (`Tensor.relu`) 0.1 less than functions.  A binding is used where it takes the same
    arguments and returns the same kind of tensors, or what the operator writes, which one call without memory shows.

    Args:
        op: the overload.
        build: given a device, the arguments with tensors on it that have no memory.
        expected: shape and dtype of what the overload returns.
    """
    plain: Callable[..., Any] = op._op
    for binding in _bindings(op):
        with _disable_current_modes():
            try:
                args, kwargs = build(META)
                result = binding(*args, **kwargs)
            except (TypeError, RuntimeError):
                continue
        if op._schema.is_mutable:
            same = result is (args[0] if op._schema.returns else None)
        else:
            same = _are_like(result, expected)
        if same:
            return binding
    return plain


# Where torch keeps its bindings: each family of names that begin with its prefix in a module of its own.
_FAMILIES = tuple(
    (f"{name}_", getattr(torch._C, f"_{name}", None)) for name in ("linalg", "fft", "special", "sparse", "nested")
)


def _bindings(op: OpOverload) -> list[Callable[..., Any]]:
    """The Python bindings that could run an operator, cheapest first."""
    space, _, name = op._schema.name.partition("::")
    if space != "aten":
        return []
    family = next((module for prefix, module in _FAMILIES if name.startswith(prefix)), torch._C._nn)
    function = getattr(torch._C._VariableFunctions, name, None) or getattr(family, name, None)
    method = getattr(torch._C.TensorBase, name, None)
    short = len(op._schema.arguments) == 1 or op._schema.is_mutable
    return [binding for binding in ((method, function) if short else (function,)) if callable(binding)]


def _are_like(result: Any, expected: Sequence[Any]) -> bool:
    found = result if isinstance(result, list | tuple) else [result]
    return len(found) == len(expected) and all(
        isinstance(a, torch.Tensor) and a.shape == torch.Size(b.shape) and a.dtype == b.dtype
        for a, b in zip(found, expected, strict=True)
    )


def is_view(op: OpOverload) -> bool:
    """Whether the operator's output aliases an input without writing to it."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of one; also when they are empty, so that all ranks say the same."""
    if is_tracing():
        return False
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in (one, other)]
    return bool(storages[0]._cdata == storages[1]._cdata)


def count_write(tensors: Any) -> None:
    """Tell autograd that a tensor, or several, were written to; those of inference mode have no count."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    try:
        torch._C._increment_version(tensors)
    except RuntimeError:
        torch._C._increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """A function that computes the operator by others: its composite kernel or torch's decomposition, if any."""
    from torch._decomp import decomposition_table

    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    return decomposition_table.get(op)


def with_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for use below a tensor subclass, where torch does not look at marks for "conjugate (or negate) later".

    Kernels that are made of other operators may use such marks for their intermediate results.
    """
    exclude = torch._C._SetExcludeDispatchKeyGuard
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude(keys[0], False), exclude(keys[1], False):
            result = function(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: t.resolve_conj().resolve_neg(), result)

    return run


def view_of(op: OpOverload) -> OpOverload | None:
    """The view that an operator takes in place (`squeeze` for `squeeze_`); None for any other operator."""
    name = op._schema.name.partition("::")[2]
    if torch.Tag.inplace_view not in op.tags or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    for overload in (op._overloadname, "int"):
        if packet is not None and overload in packet.overloads():
            found: OpOverload = getattr(packet, overload)
            return found
    return None


def change_shape(op: OpOverload, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Change the shape and stride of a wrapper as a view in place would, without touching any data."""
    with no_dispatch():
        included = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            op(tensor, *args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(included)


@contextmanager
def recording(note: Callable[[OpOverload, Sequence[Any], Mapping[str, Any]], None]) -> Iterator[None]:
    """Inside the block, `note` sees every operator that runs below autograd, before it runs."""

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            note(op, args, kwargs or {})
            return op(*args, **(kwargs or {}))

    with Recorder():  # type: ignore[no-untyped-call]  # torch gives it no types
        yield


def operator_database() -> Sequence[Any]:
    """Torch's own test samples of its public operators (`OpInfo`); importing them takes 2 s."""
    from torch.testing._internal.common_methods_invocations import op_db

    found: Sequence[Any] = op_db
    return found
