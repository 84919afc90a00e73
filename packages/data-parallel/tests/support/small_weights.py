"""Classes of parameters that send small numbers: float8 of a wide weight, and int8 with scales."""

# mypy: disable-error-code="no-untyped-call"
# Torch gives the constructors of tensor subclasses no types.

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

aten = torch.ops.aten
KEEPS_CLASS = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.view.default,
    aten.alias.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._to_copy.default,
}
LARGEST = 448.0  # float8_e4m3fn


class _Wrapper(torch.Tensor):
    """A tensor of tensors, which operators see as `plain()`."""

    parts: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls: Any, *tensors: Any, like: Tensor, dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=dtype, device=like.device, requires_grad=False
        )

    def plain(self) -> Tensor:
        raise NotImplementedError

    def over(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator that keeps the class."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.parts], self.dtype

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is of an instance
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0]
        if op in KEEPS_CLASS and isinstance(first, _Wrapper):
            return first.over(op, args[1:], kwargs)
        if op is aten.copy_.default and isinstance(first, _Wrapper):
            first.write(args[1])
            return first
        args, kwargs = pytree.tree_map_only(_Wrapper, lambda t: t.plain(), (args, kwargs))
        return op(*args, **kwargs)

    def write(self, values: Tensor) -> None:
        raise NotImplementedError

    # as torch documents
    __torch_function__: Any = torch._C._disabled_torch_function_impl


class Float8Weight(_Wrapper):
    """A wide weight that is sent as float8, with one scale for all of it."""

    parts = ("wide",)

    @staticmethod
    def __new__(cls: Any, wide: Tensor) -> Any:
        return _Wrapper.__new__(cls, like=wide, dtype=wide.dtype)

    def __init__(self, wide: Tensor) -> None:
        self.wide = wide

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["wide"])

    def plain(self) -> Tensor:
        return self.wide

    def over(self, op: Any, args: Any, kwargs: Any) -> Any:
        return type(self)(op(self.wide, *args, **kwargs))

    def write(self, values: Tensor) -> None:
        self.wide.copy_(values.wide if isinstance(values, Float8Weight) else values)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert tuple(outer_size)[1:] == tuple(self.shape)[1:]
        assert isinstance(module, nn.Module) and outer_stride[-1] == 1
        largest = self.wide.abs().amax() if self.wide.numel() else self.wide.new_zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = scale_for(largest)
        return (to_float8(self.wide, scale),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,) = outputs
        (scale,) = metadata
        if out is not None:
            assert out.small.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            out.scale = scale
            return None
        return Float8Gathered(data, scale, param_dtype), (data,)


class Float8Gathered(_Wrapper):
    """A gathered weight in float8."""

    parts = ("small", "scale")

    @staticmethod
    def __new__(cls: Any, small: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return _Wrapper.__new__(cls, like=small, dtype=dtype)

    def __init__(self, small: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.small = small
        self.scale = scale

    def plain(self) -> Tensor:
        return self.small.to(self.dtype) * self.scale.to(self.dtype)

    def over(self, op: Any, args: Any, kwargs: Any) -> Any:
        return Float8Gathered(op(self.small, *args), self.scale, self.dtype)


class Int8Weight(_Wrapper):
    """A weight of int8 with a scale for each row, which is sent as it is."""

    parts = ("small", "scale")

    @staticmethod
    def __new__(cls: Any, small: Tensor, scale: Tensor) -> Any:
        return _Wrapper.__new__(cls, like=small, dtype=scale.dtype)

    def __init__(self, small: Tensor, scale: Tensor) -> None:
        self.small = small
        self.scale = scale

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return cls(inner["small"], inner["scale"])

    @classmethod
    def of(cls, wide: Tensor) -> Any:
        scale = wide.abs().amax(1) / 127
        return cls((wide / scale[:, None]).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.small.to(self.dtype) * self.scale[:, None]

    def over(self, op: Any, args: Any, kwargs: Any) -> Any:
        if op is aten.slice.Tensor and args and args[0] != 0:
            return Int8Weight(op(self.small, *args), self.scale)
        if op is aten.view.default:
            return self
        return Int8Weight(op(self.small, *args), op(self.scale, *args))

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        """The older form, with the mesh alone."""
        return (self.small, self.scale), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        small, scale = outputs
        if out is not None:
            return None
        return Int8Weight(small, scale), (small, scale)


def scale_for(largest: Tensor) -> Tensor:
    """A power of two with which values up to `largest` fit into float8."""
    return 2.0 ** torch.log2(largest / LARGEST).ceil()


def to_float8(wide: Tensor, scale: Tensor) -> Tensor:
    return (wide / scale).to(torch.float8_e4m3fn)


def as_sent(wide: Tensor) -> Tensor:
    """A whole weight with the rounding of float8."""
    scale = scale_for(wide.abs().amax())
    return to_float8(wide, scale).to(wide.dtype) * scale
