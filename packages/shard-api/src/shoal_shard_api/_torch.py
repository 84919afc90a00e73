"""The private torch names that this package uses, so that a torch upgrade reviews one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.distributed_c10d
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.distributed.remote_device import _remote_device
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map

RemoteDevice = _remote_device  # the value of "rank:1/cuda:1"
has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type  # decides if a module changes data in place


def make_wrapper(  # noqa: PLR0913  # the fields of a tensor without storage
    cls: type,
    size: torch.Size,
    stride: Sequence[int] | None,
    dtype: torch.dtype,
    *,
    device: torch.device,
    layout: torch.layout,
    pin_memory: bool,
) -> Any:
    """A tensor of type ``cls`` with these properties and no storage; contiguous where no stride is given."""
    return torch.Tensor._make_wrapper_subclass(
        cls, size, stride, dtype=dtype, device=device, layout=layout, pin_memory=pin_memory, requires_grad=False
    )


def default_group() -> torch.distributed.ProcessGroup:
    """The process group of init_process_group."""
    group: torch.distributed.ProcessGroup = torch.distributed.distributed_c10d._get_default_group()
    return group
