"""What a rank does in a turn, as a number that ranks can compare."""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["DTYPES", "OPS", "describe", "request"]

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "all_reduce_by_parts")
OPS = ("", "sum", "min", "max", "product")
DTYPES = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
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
    extra = f" {OPS[op]}" if op else f" from {root}" if KINDS[kind] == "broadcast" else ""
    return f"{KINDS[kind]}{extra} of {count} x {str(DTYPES[dtype]).removeprefix('torch.')}"
