"""The seam to torch: every private or unstable torch name that this package alone uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# Inside the block, writes to these tensors do not count: autograd takes what it saved of them for
# unchanged.
preserving_versions: Callable[..., Any] = torch.autograd.grad_mode._unsafe_preserve_version_counter
# The functions (pack, unpack) for tensors that autograd saves now; None without hooks.
outer_saved_tensors_hooks: Callable[[], tuple[Callable[..., Any], Callable[..., Any]] | None] = (
    partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
)


def run_when_ready(node: Any) -> None:
    """Have a backward run a node as soon as its gradient is complete, like those of leaves."""
    node._set_sequence_nr(torch.iinfo(torch.int64).max)
