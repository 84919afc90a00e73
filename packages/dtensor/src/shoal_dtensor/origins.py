"""Which plain tensors torch itself has made: those count as replicated among DTensors, a user's do not."""

from __future__ import annotations

import sys
from functools import cache
from types import FrameType
from typing import Any

import torch

from ._torch import FakeTensor, disabled_torch_function, make_wrapper, pytree

__all__ = ["composed_in", "draws", "is_nameless"]


def is_nameless(tensor: torch.Tensor) -> bool:
    """Whether no Python code but the dispatch in progress can refer to a plain tensor, nor to one that it is a view of.

    Such a tensor was made by torch's own C++: the index that `x[[0, 1]]` becomes, zeros and ranges inside a composite
    operator or a gradient formula.  It is the same on every rank.  What a user passes, even as a temporary, is also
    referred to by the calling frame.  Call it on the parameter of a function that got it from a loop over arguments.
    """
    if sys.getrefcount(tensor) != _references_of_nameless() + 1:
        return False
    base = tensor._base
    return base is None or sys.getrefcount(base) == _BASE_REFERENCES


def _references_of_base() -> int:
    """References to what a view is of, held in a variable, when nothing else in Python refers to it; measured."""
    view = torch.ones(2).view(2)
    base = view._base
    return sys.getrefcount(base)


_BASE_REFERENCES = _references_of_base()  # at import: inside a dispatch, views do not tell what they are of


@cache
def _references_of_nameless() -> int:
    """References to such a tensor one call above `is_nameless`; measured, for it differs between versions of Python."""
    seen: list[int] = []

    def look(tensor: torch.Tensor) -> None:
        seen.append(sys.getrefcount(tensor))

    class Probe(torch.Tensor):
        __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # torch's stub has one argument more

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]  # torch's stub describes the bound form without func
            cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            for index in args[1]:
                look(index)
            return args[0]

    make_wrapper(Probe, (2,))[[0]]
    return seen[0] if seen else -1


# Modules of torch whose functions compose operators in Python.  They have no modules or optimizers that hold tensors: a
# tensor that they did not get as an argument, they have made.
_COMPOSING = frozenset(
    {
        "torch._jit_internal",
        "torch._linalg_utils",
        "torch._lowrank",
        "torch.functional",
        "torch.masked._ops",
        "torch.nn.functional",
        "torch.nn.modules.linear_cross_entropy",
    }
)
_OWN = __name__.rpartition(".")[0]


def composed_in(cls: type, tensor: torch.Tensor) -> str:
    """The module of a Python function of torch's that leads to the operator in dispatch and was given no plain tensors.

    Whatever plain tensor such a function (the outermost, where they call each other) hands to an operator, it has made
    itself: the same on every rank, if it draws random numbers then as any random operator does.  Empty if there is no
    such function, or if a plain tensor is among its arguments, for then its result may follow from that.  An argument
    that was left out and that the function has set since (`embedding_bag`'s offsets) is known by its values: equal
    steps from 0.

    Args:
        cls: the class of tensors that are not plain.
        tensor: the plain tensor.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (_module(frame).startswith(_OWN) or frame.f_code.co_name == "__torch_dispatch__"):
        frame = frame.f_back
    if frame is None or _module(frame) not in _COMPOSING:
        return ""
    while frame.f_back is not None and _module(frame.f_back) in _COMPOSING:
        frame = frame.f_back
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & _VARARGS) + bool(code.co_flags & _NAMED)
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    leaves = [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and not isinstance(t, cls)]
    known = all(t is tensor and _is_range(t) for t in leaves if t.ndim)
    return _module(frame) if known else ""


def _is_range(tensor: torch.Tensor) -> bool:
    """Whether a vector of integers goes up from 0 in equal steps."""
    if tensor.ndim != 1 or tensor.dtype not in (torch.int32, torch.int64) or isinstance(tensor, FakeTensor):
        return False
    step = int(tensor[1]) if len(tensor) > 1 else 1
    return step > 0 and torch.equal(tensor, torch.arange(0, step * len(tensor), step, dtype=tensor.dtype))


def draws(module: str) -> bool:
    """Whether functions of a module that `composed_in` names draw random numbers from the default generator."""
    return module in ("torch._jit_internal", "torch._lowrank", "torch.nn.functional")


_VARARGS, _NAMED = 4, 8  # flags of a code object: it takes *args, **kwargs


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
