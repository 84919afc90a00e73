"""Memory for large results: in huge pages, where the system gives these to who asks (`madvise`, the usual setting)."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

from torch import Tensor

# Of this size malloc takes new memory from the system each time, page by page as it is first written: 20 ms for 32 MiB,
# eight times what copying takes. In pages of 2 MiB it takes 3.
LARGE_BYTES = 32 << 20


def in_huge_pages(new: Tensor) -> Tensor:
    """The tensor, whose memory nobody has written yet: a large one on the CPU will be in huge pages.

    Example:
        >>> in_huge_pages(torch.empty(1 << 23)).shape
        torch.Size([8388608])
    """
    madvise = _madvise() if new.nbytes >= LARGE_BYTES and new.is_cpu else None
    if madvise is not None:
        first = -(-new.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (new.data_ptr() + new.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(first, length, mmap.MADV_HUGEPAGE)  # a wish: whether it is granted changes nothing but the time
    return new


@cache
def _madvise() -> Any:
    """The system's; None where it has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
