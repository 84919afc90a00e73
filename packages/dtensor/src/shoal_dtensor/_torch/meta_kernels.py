"""What kernels return and meta kernels do not say: dtypes of statistics, strides of convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Normalisations that return the statistics they used.  Meta kernels say what CUDA does: small dtypes have float32 ones.
_WITH_STATISTICS = frozenset(
    {
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit",
        "aten::_native_batch_norm_legit_no_training",
        "aten::native_batch_norm",
        "aten::native_group_norm",
        "aten::native_layer_norm",
    }
)


def as_meta_kernels_take_it(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Arguments of an operator with masks of bytes, which the kernel takes, as the masks of bools they stand for."""
    if name not in ("aten::index", "aten::_unsafe_index"):
        return args
    bytes_ = (isinstance(each, torch.Tensor) and each.dtype == torch.uint8 for each in args[1])
    return (args[0], [each.bool() if mask else each for each, mask in zip(args[1], bytes_, strict=True)])


def as_kernels_make_it(name: str, args: Sequence[Any], result: Any, device_type: str) -> Any:
    """A meta kernel's result with the dtypes and strides of the device's kernel.

    Args:
        name: of the operator.
        args: its arguments, tensors without memory among them.
        result: what the meta kernel returned.
        device_type: where the operator will run.
    """
    if name == "aten::convolution":
        return _as_convolved(args, result)
    if name in ("aten::native_batch_norm_backward", "aten::batch_norm_backward"):
        mask = args[9]  # the meta kernel returns the input's gradient whether it is wanted or not
        return tuple(t if wanted else None for t, wanted in zip(result, mask, strict=True))
    if name == "aten::_native_multi_head_attention" and not (args[10] if len(args) > 10 else True):
        return (result[0], None)  # the meta kernel returns weights without elements where the kernel returns none
    return _as_on_cpu(name, args, result) if device_type == "cpu" else result


def _as_on_cpu(name: str, args: Sequence[Any], result: Any) -> Any:
    """The dtypes of the CPU's kernel: float32 statistics if a parameter is float32."""
    if name == "aten::native_group_norm_backward" and result[0] is not None:
        return (result[0].to(args[1].dtype), *result[1:])
    if name not in _WITH_STATISTICS or args[0].dtype not in (torch.bfloat16, torch.float16):
        return result
    mixed = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 for arg in args)
    dtype = torch.float32 if mixed else args[0].dtype
    return (result[0], *(t.to(dtype) if t.is_floating_point() else t for t in result[1:]))


def _as_convolved(args: Sequence[Any], result: torch.Tensor) -> torch.Tensor:
    """Channels-last if an operand is; in three spatial dims the CPU's results are contiguous."""
    last = torch.channels_last
    like_operands = result.ndim == 4 and any(
        t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in args[:2]
    )
    return result.contiguous(memory_format=last) if like_operands else result
