"""How a tensor of any dtype travels: which reductions a dtype has, and what stands for it on the wire.

Backends send few dtypes and reduce fewer (gloo knows no int16 and no complex all-gather). Data that only moves travels
as bytes; complex sums as pairs of reals; small integers are reduced in a wider type. An average of a backend without
one is a sum and a division.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ._torch import ReduceOp
from .errors import CollectiveError

__all__ = ["PLAIN", "REDUCE", "Reduction", "reduction", "unwire", "wire"]

REDUCE = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
_BITWISE = {"band", "bor", "bxor"}
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_INTS = {torch.int64, torch.int32, torch.int8, torch.uint8}
PLAIN = frozenset(_FLOATS | _INTS | {torch.bool})  # what every backend sends and reduces
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


@dataclass(frozen=True, slots=True)
class Reduction:
    """How to reduce one dtype with one op.

    Attributes:
        op: what the backend is asked for.
        dtype: what the tensor becomes on the wire, None when it travels as it is.
        divide: whether the sum is divided by the number of ranks afterwards.
    """

    op: str
    dtype: torch.dtype | None = None
    divide: bool = False


@cache
def reduction(dtype: torch.dtype, op: str) -> Reduction:
    """How `dtype` is reduced with `op` (the cache is bounded by dtypes times ops).

    Raises:
        CollectiveError: no such op, or it has no meaning for the dtype.
    """
    if op not in REDUCE:
        raise CollectiveError(f"no reduction {op!r}: there are {', '.join(REDUCE)}")
    kernel, divide = ("sum", True) if op == "avg" else (op, False)
    exact = not dtype.is_floating_point and not dtype.is_complex
    if op in _BITWISE and not exact:
        raise CollectiveError(f"reduction {op!r} works on bits, so it has no meaning for {dtype}: use an integer dtype")
    if op == "avg" and exact:
        raise CollectiveError(
            f"the average of {dtype} is no {dtype}: reduce with 'sum' and divide, or convert to float"
        )
    if dtype.is_complex and op not in {"sum", "avg"}:
        raise CollectiveError(f"reduction {op!r} of {dtype}: complex numbers have only 'sum' and 'avg' here")
    if dtype in PLAIN:
        return Reduction(kernel, None, divide)
    if dtype in _REAL:
        return Reduction(kernel, _REAL[dtype], divide)
    if dtype in _WIDER:
        return Reduction(kernel, _WIDER[dtype], divide)
    if dtype.is_floating_point:  # float8 and friends: accumulate where there is room
        return Reduction(kernel, torch.float32, divide)
    raise CollectiveError(f"reduction {op!r} of {dtype}: this dtype cannot be reduced, only moved")


def wire(tensor: Tensor, to: torch.dtype) -> Tensor:
    """A contiguous tensor of dtype `to` that stands for `tensor` in a reduction; same leading dims."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().contiguous())
    return tensor.to(to)


def unwire(carrier: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor that a carrier stands for."""
    return torch.view_as_complex(carrier) if dtype.is_complex else carrier.to(dtype)
