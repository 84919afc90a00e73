"""Covers: calls.py, memory in huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shoal_mesh.collectives.calls import LARGE_BYTES, in_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes of huge pages in the mapping that the tensor's memory is in."""
    middle, inside, huge = tensor.data_ptr() + tensor.nbytes // 2, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is not None:
            inside = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            huge += int(line.split()[1]) << 10
    return huge


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="the system gives huge pages to all, or none",
)
def test_large_results_are_in_huge_pages() -> None:
    plain, asked = (
        torch.empty(LARGE_BYTES // 4).fill_(1),
        in_huge_pages(torch.empty(LARGE_BYTES // 4)).fill_(1),
    )
    assert huge_bytes(plain) < LARGE_BYTES // 2 <= huge_bytes(asked)


@pytest.mark.parametrize("bytes_", [0, 4, LARGE_BYTES, LARGE_BYTES + 4])
def test_the_tensor_is_the_same(bytes_: int) -> None:
    tensor = torch.empty(bytes_ // 4)
    assert in_huge_pages(tensor) is tensor
    assert torch.equal(tensor.fill_(3), torch.full((bytes_ // 4,), 3.0))
