"""Wrapper subclasses, storages and version counters of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree

from .compiling import is_tracing

pytree = _pytree
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
BASE: Any = torch._C.TensorBase  # attributes below what a subclass makes of them
TRACED = (FakeTensor, FunctionalTensor)  # what a compiler sees in place of a tensor; the second is around the first

# The binding below the method of the same name, which is in Python and takes 2 us to come to it.
split: Callable[..., Any] = BASE.split


class TensorNote:
    """What is left on a tensor object as an attribute; it goes along into no copy and no file.

    In a file it is an empty size, which a load of weights only builds, as it does not None: false says that none is.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type[torch.Size], tuple[()]]:
        return torch.Size, ()

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None


def _around(cls: Any, local: torch.Tensor, spec: Any, requires_grad: bool) -> Any:
    """A wrapper of class `cls` with `local` as its `_local_tensor` and `spec` as its `_spec`.

    Size and stride are those of `spec.tensor_meta`, dtype and device those of `local`.
    """
    shape, stride, _dtype = spec.tensor_meta
    dtensor = make_wrapper(
        cls, shape, stride, None, None, local.dtype, torch.strided, local.device, requires_grad=requires_grad
    )
    dtensor._local_tensor, dtensor._spec = local, spec
    return dtensor


# torch has the same in C++, made for its own DTensor: 0.7 us where the above takes 1.1.
around: Callable[..., Any] = getattr(torch.Tensor, "_dtensor__new__", _around)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of one; also when they are empty, so that all ranks say the same."""
    if is_tracing():
        return False
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in (one, other)]
    return bool(storages[0]._cdata == storages[1]._cdata)


def memory_of(tensor: torch.Tensor) -> tuple[object, int]:
    """Where a tensor's elements are, to compare with where they are later; an empty tensor has a place of its own too.

    An address would not do: it is zero for all empty tensors, and that of freed memory is given to others.
    """
    return ref(tensor.untyped_storage()), tensor.storage_offset()


def count_write(tensors: Any) -> None:
    """Tell autograd that a tensor, or several, were written to; those of inference mode have no count."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    try:
        torch._C._increment_version(tensors)
    except RuntimeError:
        torch._C._increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def with_conjugates(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for use below a tensor subclass, where torch does not look at marks for "conjugate (or negate) later".

    Kernels that are made of other operators may use such marks for their intermediate results.
    """
    exclude = torch._C._SetExcludeDispatchKeyGuard
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)

    def run(*args: Any, **kwargs: Any) -> Any:
        with exclude(keys[0], False), exclude(keys[1], False):
            result = function(*args, **kwargs)
            return pytree.tree_map_only(torch.Tensor, lambda t: t.resolve_conj().resolve_neg(), result)

    return run
