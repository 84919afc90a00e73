"""The seam to torch: every private or unstable torch name that this package alone uses."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

NormBase = _NormBase


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
