"""Operator overloads: output shapes, cheapest bindings, decompositions, in-place views, groups."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._guards import TracingContext, detect_fake_mode
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from .primitives import by_aten

DataDependentError = (DataDependentOutputException, DynamicOutputShapeException)
META = torch.device("meta")

# The signature of an overload: its name, arguments and results.
signature_of: Callable[[Any], torch.FunctionSchema] = attrgetter("_schema")
# The name of an overload among those of its operator: "Tensor" of `aten.add.Tensor`.
overload_name: Callable[[Any], str] = attrgetter("_overloadname")
# Ends the program with a text if a bool tensor is false; an accelerator reads it without the host.
assert_on_device: Callable[[torch.Tensor, str], None] = torch.ops.aten._assert_async.msg

# A function that builds the arguments of a call, with tensors on the given device.
Build = Callable[[torch.device], tuple[Sequence[Any], Mapping[str, Any]]]

# Counts the modes that observe operators before torch dispatches them.
_count_pre_dispatch_modes: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


_fake_mode: Callable[[], FakeTensorMode] = cache(FakeTensorMode)


def shapes_of(op: OpOverload, build: Build, device_type: str) -> Any:
    """Return the outputs of an operator on a type of device, as tensors without memory or values.

    The modes of users do not observe the call. Raise DataDependentError if the result's shape
    depends on values.
    """
    mode = detect_fake_mode() if TracingContext.try_get() else None
    with out_of_sight(), _without_traces():
        # The meta kernel alone takes 0.1 ms, a fake tensor takes 2 ms. A few operators do not have
        # a meta kernel, or need the device.
        try:
            args, kwargs = build(META)
            args = _for_meta_kernel(op._schema.name, args)
            compute_shapes = _SHAPES.get(op._schema.name, op)
            shapes = compute_shapes(*args, **kwargs)
            return _as_on_device(op._schema.name, args, shapes, device_type)
        except (NotImplementedError, RuntimeError):
            pass
        except ZeroDivisionError:
            # The mean of no elements. The kernel itself can run, because it has nothing to compute.
            return results_of(op, build)
        with mode or _fake_mode():
            args, kwargs = build(torch.device("cpu"))
            return op(*_for_meta_kernel(op._schema.name, args), **kwargs)


def results_of(op: OpOverload, build: Build) -> Any:
    """Return the outputs of an operator on the CPU, unobserved by the modes of users."""
    with out_of_sight():
        args, kwargs = build(torch.device("cpu"))
        return op(*args, **kwargs)


def out_of_sight() -> AbstractContextManager[Any]:
    """Return a block in which the modes of users do not observe operators.

    Torch's own block takes 13 us, so it is entered only if there are modes.
    """
    modes = torch._C._len_torch_dispatch_stack() or _count_pre_dispatch_modes()
    return _disable_current_modes() if modes else nullcontext()


@contextmanager
def _without_traces() -> Iterator[None]:
    """Suppress logs of fake tensor errors, and drop the frames (and tensors) that torch keeps."""
    # Some meta kernels import torch.compile. When torch.fx is imported, it stores its frame in a
    # variable of that frame, and a frame refers to its callers. Only garbage collection frees such
    # a cycle.
    imported = "torch._dynamo" in sys.modules
    log = logging.getLogger("torch._subclasses.fake_tensor")
    # The errors are raised too, so the log is not needed.
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
        if not imported and "torch._dynamo" in sys.modules:
            gc.collect()


def direct(op: OpOverload, build: Build, expected: Sequence[Any]) -> Callable[..., Any]:
    """Return the cheapest callable for an operator and arguments like the arguments of `build`.

    torch's Python bindings (`torch.mm`, `Tensor.add_`) take 0.5 to 2 us less per call than the
    overload object, and methods without arguments (`Tensor.relu`) 0.1 us less than functions. A
    binding is used if a call without memory accepts the arguments and returns the expected shapes
    and dtypes, or the tensors that the operator writes to.
    """
    for binding in _bindings(op):
        with out_of_sight():
            try:
                args, kwargs = build(META)
                result = binding(*args, **kwargs)
            except (TypeError, RuntimeError):
                continue
        if op._schema.is_mutable:
            same = result is (args[0] if op._schema.returns else None)
        else:
            results = result if isinstance(result, list | tuple) else [result]
            same = len(results) == len(expected) and all(map(_is_like, results, expected))
        if same:
            return binding
    return op._op


def _bindings(op: OpOverload) -> list[Callable[..., Any]]:
    """Return the Python bindings that could run an operator, cheapest first."""
    space, _, name = op._schema.name.partition("::")
    if space != "aten":
        return []
    # Example: torch._C._linalg for linalg_cross.
    family = getattr(torch._C, f"_{name.partition('_')[0]}", torch._C._nn)
    function = getattr(torch._C._VariableFunctions, name, None) or getattr(family, name, None)
    method = getattr(torch._C.TensorBase, name, None)
    # Methods without arguments are cheaper. Many in-place operators do not have a function.
    is_short = len(op._schema.arguments) == 1 or op._schema.is_mutable
    candidates = (method, function) if is_short else (function,)
    return [binding for binding in candidates if callable(binding)]


def _of_aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Operators that write to `running_mean` and `running_var` in training, although their schemas do
# not declare these writes.
WITH_UNMARKED_WRITES = _of_aten(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts batch_norm_update_stats"
)


def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """Return a function that computes an operator by other operators, or None.

    The function is the operator's composite kernel or torch's decomposition.
    """
    from torch._decomp import decomposition_table

    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose if makes_views(op) else partial(_decompose, op)
    if op is torch.ops.aten._weight_norm_interface.default:
        return _weight_norm
    return by_aten(op) or decomposition_table.get(op)


def _decompose(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator by its parts, and tie views among the parts to their bases.

    Composite operators arrive here in inference mode alone. Torch has then left out the key of
    views for the parts too, so `reshape` would return a tensor that shares memory with its input,
    but not the count of writes.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return op.decompose(*args, **kwargs)


def _weight_norm(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weight with the direction of `v` and norm `g` along `dim`, and the norm of `v`.

    torch's decomposition is wrong for vectors.
    """
    norm = torch.norm_except_dim(v, 2, dim)
    return v * (g / norm), norm


def view_of(op: OpOverload) -> OpOverload | None:
    """Return the view that an operator takes in place (`squeeze` for `squeeze_`), or None."""
    name = op._schema.name.partition("::")[2]
    if torch.Tag.inplace_view not in op.tags or not name.endswith("_"):
        return None
    packet: Any = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, op._overloadname, None) or getattr(packet, "int", None)


def makes_views(op: OpOverload) -> bool:
    """Tell whether autograd ties a view operator's results to the base, also in inference mode.

    It does so for all view operators except the composite ones, such as `reshape`.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op._name, "ADInplaceOrView"))


def has_views(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor, during its dispatch, has views or is saved by autograd.

    Each view and each saved tensor counts as two more uses.
    """
    uses: int = tensor._use_count()  # type: ignore[attr-defined]  # a method that stubs leave out
    # Without them there are 3 uses in a call from Python, and 4 inside a composite operator.
    return uses > 4


def change_shape(op: OpOverload, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Change the shape and stride of a wrapper as an in-place view would, without touching data.

    When a view or its base is written to, autograd replays the chain of views that led to it.
    Autograd does not record this change of shape, so the gradient would have another shape, or be
    wrong. Therefore the view refuses writes that need a gradient from now on.
    """
    with no_dispatch():
        included = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            op(tensor, *args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(included)
    if tensor._is_view():
        torch._C._autograd._set_creation_meta(
            tensor, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE
        )


# --- corrections of meta kernels: dtypes of statistics, strides of convolutions -------------------

# Normalizations that return their statistics. Meta kernels follow CUDA: small dtypes have float32
# statistics.
_WITH_STATISTICS = _of_aten(
    "_batch_norm_no_update _batch_norm_with_update _native_batch_norm_legit "
    "_native_batch_norm_legit_no_training native_batch_norm native_group_norm native_layer_norm"
)


def _shape_of_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the result of a product of groups, without values.

    torch's meta kernel refuses dtypes other than bfloat16, which kernels accept.
    """
    if a.ndim == 2 and b.ndim == 2:
        assert offs is not None, "the dim that both operands share is divided into groups"
        shape = [len(offs), a.shape[0], b.shape[1]]
    else:
        batch = [a.shape[0]] if a.ndim == b.ndim else []
        shape = [*batch, a.shape[-2], b.shape[-1]]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


# Functions in place of meta kernels that refuse arguments which the kernels accept.
_SHAPES: dict[str, Callable[..., Any]] = {"aten::_grouped_mm": _shape_of_grouped_mm}


def _for_meta_kernel(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of an operator with bool masks in place of byte masks.

    Kernels accept byte masks; meta kernels do not.
    """
    if name not in ("aten::index", "aten::_unsafe_index"):
        return args
    indices = args[1]
    converted = []
    for index in indices:
        is_byte_mask = isinstance(index, torch.Tensor) and index.dtype == torch.uint8
        converted.append(index.bool() if is_byte_mask else index)
    return args[0], converted


def _is_like(result: Any, expected: Any) -> bool:
    """Tell whether a result is a tensor of the expected shape and dtype."""
    if not isinstance(result, torch.Tensor):
        return False
    return result.shape == torch.Size(expected.shape) and result.dtype == expected.dtype


def _is_in_format(tensor: torch.Tensor, memory_format: torch.memory_format) -> bool:
    """Tell whether a tensor has a memory format, and is not row-major at the same time."""
    has_format = tensor.is_contiguous(memory_format=memory_format)
    return has_format and not tensor.is_contiguous()


def _as_on_device(name: str, args: Sequence[Any], result: Any, device_type: str) -> Any:
    """Correct a meta kernel's result to the dtypes and strides of the device's kernel."""
    if name == "aten::convolution" and result.ndim == 4:
        # The result is channels-last if an operand is. With three spatial dims, results on the CPU
        # are contiguous.
        last = torch.channels_last
        like_operands = any(_is_in_format(t, last) for t in args[:2])
        return result.contiguous(memory_format=last) if like_operands else result
    if name in ("aten::native_batch_norm_backward", "aten::batch_norm_backward"):
        # The meta kernel returns the input's gradient even if it is not wanted.
        mask = args[9]
        return tuple(t if wanted else None for t, wanted in zip(result, mask, strict=True))
    needs_weights = args[10] if len(args) > 10 else True
    if name == "aten::_native_multi_head_attention" and not needs_weights:
        # The kernel returns None for the weights, the meta kernel a tensor without elements.
        return (result[0], None)
    if device_type != "cpu":
        return result
    if name == "aten::native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    if name in _WITH_STATISTICS and args[0].dtype in (torch.bfloat16, torch.float16):
        return _with_statistics_of_cpu(args, result)
    return result


def _with_statistics_of_cpu(args: Sequence[Any], result: Any) -> tuple[Any, ...]:
    """Return results with the CPU's dtype of statistics: float32 if an argument is float32."""
    dtypes = {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
    dtype = torch.float32 if torch.float32 in dtypes else args[0].dtype
    first, *others = result
    converted = [t.to(dtype) if t.is_floating_point() else t for t in others]
    return (first, *converted)


# --- collective operators of torch.distributed ----------------------------------------------------


def is_collective(op: OpOverload) -> bool:
    """Tell whether an operator is a collective of `torch.distributed`."""
    return op.namespace in ("c10d", "_c10d_functional")


def group_ranks(group: Any) -> tuple[int, ...]:
    """Return the global ranks of the group argument of a collective operator.

    The argument is a boxed group, a group or its name.
    """
    if isinstance(group, str):
        resolve: Any = torch._C._distributed_c10d._resolve_process_group
        group = resolve(group)
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def reduction_name(reduction: Any) -> str:
    """Return the reduction argument of a collective operator in lower case: `sum`, `avg`, ..."""
    if isinstance(reduction, str):
        return reduction.lower()
    return str(dist.ReduceOp.RedOpType(reduction.op()).name).lower()
