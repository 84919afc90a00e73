"""Refusals of torch's fully_shard, and of code that needs internals or memory.

Covers: tensor/serialization.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils import dlpack
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # no __all__

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.errors import ArgumentTypeError, InPlaceError, NoRuleError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


def test_a_parameter_refuses_when_torch_asks_for_its_hook() -> None:
    with fake_world(2):
        weight = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(
            ArgumentTypeError, match=r"got Spec\(f32\[4@\(0\)\].*shoal_data_parallel\.fully_shard"
        ):
            hasattr(weight, "fsdp_pre_all_gather")


MEMORY: dict[str, Callable[[Any], object]] = {
    "data_ptr": lambda x: x.data_ptr(),
    "const_data_ptr": lambda x: x.const_data_ptr(),
    "_data_address": lambda x: torch._C._data_address(x),  # type: ignore[attr-defined]  # no stub
    "unsafe_alloc_void_ptr": lambda x: torch._C._aoti.unsafe_alloc_void_ptr_from_tensor(x),
    "unsafe_alloc_void_ptrs": lambda x: torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([x]),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "dlpack": lambda x: x.__dlpack__(),
    "from_dlpack": from_dlpack,
    # these ended the process, at the first read of what they export
    "to_dlpack": lambda x: dlpack.to_dlpack(x),  # type: ignore[attr-defined]  # no __all__
    # most programs import the name before they make a DTensor
    "to_dlpack by its name": lambda x: to_dlpack(x),
    "torch.to_dlpack": lambda x: torch.to_dlpack(x),  # type: ignore[attr-defined]  # not public
    "_to_dlpack_versioned": lambda x: torch._C._to_dlpack_versioned(x),
    "_pickle_save": lambda x: torch._C._pickle_save([x]),
    "share_memory_": lambda x: x.share_memory_(),
    "share_memory": lambda x: torch.nn.ParameterList([torch.nn.Parameter(x)]).share_memory(),
    "apply_": lambda x: x.apply_(abs),
    "map_": lambda x: x.map_(x, max),
    "reduce_tensor": reduce_tensor,  # to another process
}


@pytest.mark.parametrize("how", MEMORY)
def test_raw_memory_is_refused(how: str) -> None:
    with fake_world(2):
        x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(
            NoRuleError,
            match=r"does not have memory of its own .* got Spec\(f32\[4@\(0\)\].*use to_local\(\)",
        ):
            MEMORY[how](x)


def test_a_plain_tensor_does_not_become_a_dtensor() -> None:
    # an AttributeError that named an internal method
    with fake_world(2):
        x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(InPlaceError, match=r"set_.* a plain tensor of shape \(1,\) a DTensor"):
            torch.zeros(1).set_(x)  # type: ignore[call-overload]  # its types lack tensors
