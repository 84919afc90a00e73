"""Operators of torch's `prims` namespace, computed by operators of `aten`.

Compiled code, exported programs and torch's references call them. In this way they are sharded by
the rules for `aten`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _sum(inp: Tensor, dims: list[int], *, output_dtype: Any = None) -> Tensor:
    return torch.sum(inp, dims, dtype=output_dtype or inp.dtype)


def _prod(inp: Tensor, dims: list[int], *, output_dtype: Any = None) -> Tensor:
    dtype = output_dtype or inp.dtype
    result = inp.to(dtype)
    for dim in sorted((d % inp.ndim for d in dims), reverse=True):
        result = torch.prod(result, dim, dtype=dtype)
    return result


def _amax(inp: Tensor, dims: list[int], *, output_dtype: Any = None) -> Tensor:
    return torch.amax(inp, dims).to(output_dtype or inp.dtype)


def _amin(inp: Tensor, dims: list[int], *, output_dtype: Any = None) -> Tensor:
    return torch.amin(inp, dims).to(output_dtype or inp.dtype)


def _var(
    inp: Tensor,
    dims: list[int],
    correction: float | None = 1,
    *,
    output_dtype: Any = None,
) -> Tensor:
    result: Tensor = aten.var.correction(inp, dims, correction=correction)
    return result if output_dtype is None else result.to(output_dtype)


def _div(self: Tensor, other: Tensor) -> Tensor:
    """Divide; integers are truncated toward zero."""
    has_fractions = self.is_floating_point() or self.is_complex()
    return torch.div(self, other, rounding_mode=None if has_fractions else "trunc")


def _convert(a: Tensor, dtype: torch.dtype) -> Tensor:
    result: Tensor = aten._to_copy.default(a, dtype=dtype)
    return result


# Operators with another name or other arguments than in `aten`.
_RENAMED: dict[str, Callable[..., Any]] = {
    "amax": _amax,
    "amin": _amin,
    "bessel_i0e": aten.special_i0e,
    "bessel_i1": aten.special_i1,
    "bessel_i1e": aten.special_i1e,
    "bessel_j0": aten.special_bessel_j0,
    "bessel_j1": aten.special_bessel_j1,
    "convert_element_type": _convert,
    "copy_to": aten.copy_,
    "div": _div,
    "erfcx": aten.special_erfcx,
    "ndtri": aten.special_ndtri,
    "prod": _prod,
    "spherical_bessel_j0": aten.special_spherical_bessel_j0,
    "sum": _sum,
    "var": _var,
    "view_of": aten.alias,
    "zeta": aten.special_zeta,
}
# Operators with the same name and arguments as in `aten`.
# Operators with the same name and arguments as in `aten`.
_SAME_NAMES = (
    "abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor "
    "ceil conj_physical cos cosh digamma eq erf erfc exp exp2 expm1 floor fmax fmin fmod frexp gcd "
    "ge gt hypot igamma igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ne "
    "neg nextafter pow reciprocal remainder round rsqrt sign signbit sin sinh sqrt sub tan tanh "
    "trunc where add"
)


def by_aten(op: OpOverload) -> Callable[..., Any] | None:
    """Return a function that computes an operator of `prims`; None for other operators."""
    namespace, _, name = op._schema.name.partition("::")
    if namespace != "prims":
        return None
    if name in _SAME_NAMES.split():
        return getattr(aten, name)  # type: ignore[no-any-return]  # namespaces are untyped
    return _RENAMED.get(name)
