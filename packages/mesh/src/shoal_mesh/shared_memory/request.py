"""What a rank does in a turn, as a number that ranks can compare."""

from __future__ import annotations

from functools import lru_cache

import torch

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "all_reduce_by_parts")
OPS = ("", "sum", "min", "max", "product")
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
# What a backend is asked for may have more of both.
_ALL_OPS = (*OPS, "avg", "band", "bor", "bxor")
_ALL_DTYPES = (
    *DTYPES, torch.bool, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@lru_cache(maxsize=4096)
def request(kind: str, dtype: torch.dtype, count: int, op: str = "", root: int = 0) -> int:
    """What a rank is doing: `count` elements of a dtype, reduced with `op` or sent from the group's rank `root`."""
    return ((count * 4096 + root) * 8 + OPS.index(op)) * 64 + KINDS.index(kind) * 8 + DTYPES.index(dtype)


def describe(number: int) -> str:
    """What `request` says, for people."""
    number, dtype = divmod(number, 8)
    number, kind = divmod(number, 8)
    number, op = divmod(number, 8)
    count, root = divmod(number, 4096)
    return _in_words(kind, OPS[op], root, count, str(DTYPES[dtype]))


@lru_cache(maxsize=4096)
def announcement(kind: str, dtype: torch.dtype, count: int, op: str = "", root: int = 0) -> int:
    """What a rank asks of its backend, likewise; a dtype that has no number of its own counts as any such."""
    number = _ALL_DTYPES.index(dtype) if dtype in _ALL_DTYPES else 31
    return (((count * 4096 + root) * 16 + _ALL_OPS.index(op)) * 8 + KINDS.index(kind)) * 32 + number


def describe_announced(number: int) -> str:
    """What `announcement` says, for people."""
    number, dtype = divmod(number, 32)
    number, kind = divmod(number, 8)
    number, op = divmod(number, 16)
    count, root = divmod(number, 4096)
    return _in_words(
        kind, _ALL_OPS[op], root, count or "any number", "another dtype" if dtype == 31 else str(_ALL_DTYPES[dtype])
    )


def _in_words(kind: int, op: str, root: int, count: int | str, dtype: str) -> str:
    extra = f" {op}" if op else f" from {root}" if KINDS[kind] == "broadcast" else ""
    return f"{KINDS[kind]}{extra} of {count} x {dtype.removeprefix('torch.')}"
