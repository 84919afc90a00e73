"""The seam to torch: every private or unstable torch name that this package uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._compile import _disable_dynamo as never_compiled
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageReference
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "FakeTensor",
    "ReplacedAttention",
    "StorageReference",
    "TorchDispatchMode",
    "apply",
    "at_end_of_backward",
    "autocast_dtype",
    "autocasting",
    "backward_number",
    "direct",
    "disabled_torch_function",
    "dispatch_modes",
    "flash_attention",
    "flash_attention_backward",
    "is_compiling",
    "is_tracing",
    "make_wrapper",
    "never_compiled",
    "preserving_versions",
    "pytree",
    "saving_state",
    "selectively_checkpointed",
    "split_sizes",
    "transforming",
    "unwatched",
    "unwatched_functions",
    "use_count",
    "watching_functions",
    "will_run",
]

is_compiling = torch.compiler.is_compiling

# Whether torch.compile reads the program that is running; False while autograd traces what it read.
is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling


autocasting = torch._C._is_any_autocast_enabled


transforming = torch._C._are_functorch_transforms_active

# Whether the backward pass in progress will run an autograd node; RuntimeError for a leaf of torch.autograd.grad.
will_run = torch._C._will_engine_execute_node

# How many refer to a tensor; all of Python counts as one.
use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # no stub has it


def direct(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without the search for functorch's wrappers, for callers that know no transform is active."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]  # defined in C


# Number of dispatch modes that are active.
dispatch_modes = torch._C._len_torch_dispatch_stack


def _is_selective(mode: object) -> bool:
    return isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)


def selectively_checkpointed() -> bool:
    """Whether selective activation checkpointing watches: what it saves must not be written to afterwards."""
    return dispatch_modes() > 0 and any(map(_is_selective, _get_current_dispatch_mode_stack()))


def unwatched() -> AbstractContextManager[object]:
    """A block whose operators selective activation checkpointing does not see, so that it saves none of their results.

    For collectives on fresh results: they are run again in the recomputation.
    """
    return _disable_current_modes() if selectively_checkpointed() else nullcontext()


# A block in which modes and subclasses do not see calls of torch functions.
unwatched_functions: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction


# The reverse: modes see calls again, inside of such a block too.
watching_functions: Callable[[], AbstractContextManager[object]] = torch._C._EnableTorchFunction


def saving_state() -> tuple[bool, object]:
    """Whether gradients are recorded, and the hooks on what is saved for them: a checkpoint changes one of them."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(True)


# A subclass with this as its `__torch_function__` is a plain tensor to functions, and to torch.compile.
disabled_torch_function = torch._C._disabled_torch_function_impl


make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply untyped


def split_sizes(tensor: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """`tensor.split` along dim 0, which torch leaves untyped."""
    return list(torch.split_with_sizes(tensor, sizes))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The dtype in which autocast runs matrix products of `tensor`; None where it leaves them alone.

    As autocast itself: only floating tensors on the autocast device, and never float64.
    """
    device = tensor.device.type
    if (
        device == "meta"
        or not torch.is_autocast_enabled(device)
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return None
    return torch.get_autocast_dtype(device)


def backward_number() -> int:
    """A number for the backward pass that is running on this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have the backward pass that is running call a function when all gradients are computed."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Inside the block, writes to these tensors do not count: autograd takes what it saved of them for unchanged.
preserving_versions: Callable[..., Any] = torch.autograd.grad_mode._unsafe_preserve_version_counter


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of torch's CPU attention kernel; none of the tensors is empty."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = op(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse


def flash_attention_backward(  # noqa: PLR0913  # the kernel's
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values of torch's CPU attention kernel."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dq, dk, dv = op(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    return dq, dk, dv


class ReplacedAttention(TorchFunctionMode):
    """Inside, `F.scaled_dot_product_attention` is another function of the same arguments."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._attend = attend

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
