"""The private torch names that this package alone uses."""

from __future__ import annotations

import torch
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch.distributed.remote_device import _remote_device

RemoteDevice = _remote_device  # the value of "rank:1/cuda:1"
# decides if a module changes data in place
has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type
