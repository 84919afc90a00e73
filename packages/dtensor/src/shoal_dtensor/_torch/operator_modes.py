"""Modes that see functions and operators: selective checkpointing, and attention that is another function."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, ClassVar, Self

import torch
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode as TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from .recomputation import checkpoints, recomputed_in

# Number of dispatch modes that are active.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _is_selective(mode: object) -> bool:
    return isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode)


def selectively_checkpointed() -> bool:
    """Whether selective activation checkpointing watches: what it saves must not be written to afterwards."""
    return dispatch_modes() > 0 and any(map(_is_selective, _get_current_dispatch_mode_stack()))


def unwatched() -> AbstractContextManager[object]:
    """A block whose operators selective activation checkpointing does not see, so that it saves none of their results.

    For collectives on fresh results: they are run again in the recomputation.
    """
    return _disable_current_modes() if selectively_checkpointed() else nullcontext()


def _unseen(function: Any) -> Callable[..., Any]:
    """A function of torch that no mode sees, though modes are active in what it runs."""
    unasked = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)
    unseen = FunctionType(
        function.__code__,
        function.__globals__ | unasked,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    unseen.__kwdefaults__ = function.__kwdefaults__
    return unseen


_BACKWARD = {f: _unseen(f) for f in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class FunctionMode(TorchFunctionMode):
    """A mode that stays active in backward passes, which may recompute forwards; torch deactivates it in each call."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unseen = _BACKWARD.get(func)
        if unseen is None:
            return func(*args, **kwargs)
        own = next((kind for kind in types if kind is not torch.Tensor), None)
        with self:
            return own.__torch_function__(func, types, args, kwargs) if own else unseen(*args, **kwargs)


_active: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack


class ReplacedAttention(FunctionMode):
    """Inside, `F.scaled_dot_product_attention` is another function of the same arguments; in recomputations too."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self._attend = attend
        self._outside: list[list[Any]] = []  # the checkpoints around each time that it was entered

    def __enter__(self) -> Self:
        self._outside.append(checkpoints())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def __exit__(self, *error: Any) -> None:
        self._outside.pop()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no types here

    @classmethod
    def active(cls) -> list[Self]:
        """The active ones of this class, the innermost first; recomputations of what asks run in them too."""
        modes = [mode for mode in reversed(_active()) if isinstance(mode, cls)]
        for mode in modes:
            mode.hold_in_recomputation()
        return modes

    def hold_in_recomputation(self) -> None:
        """Be active too where backward runs again what a checkpoint inside of the block runs now."""
        recomputed_in(self, self._entered_again, self._outside[-1])

    def _entered_again(self) -> AbstractContextManager[object]:
        return nullcontext() if self in _active() else self

    def _replaced(self, args: Any, kwargs: Any) -> Any:
        self.hold_in_recomputation()
        return self._attend(*args, **kwargs)

    # Compiled code has a graph break here: attention asks what its block has agreed upon, and for its layout.
    _replaced_in_graphs: ClassVar[Any] = _disable_dynamo(_replaced)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            replaced = (
                ReplacedAttention._replaced_in_graphs if torch.compiler.is_compiling() else ReplacedAttention._replaced
            )
            return replaced(self, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)
