"""`Interceptions`: replacements for attention that no mode of torch observes, in active blocks.

May import: active_block, flex, models_of_transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .._torch import redirect_flex_attention
from .active_block import ActiveBlock
from .flex import attend_by_flex
from .models_of_transformers import change_registries


class Interceptions:
    """Replacements in torch and transformers, which all threads share, while a block is active.

    In a thread without an active block the replacements call the originals.

    Args:
        active: returns the innermost active block of the calling thread.
    """

    def __init__(self, active: ActiveBlock) -> None:
        self._active = active
        self._lock = threading.Lock()
        # number of blocks that are active, in all threads
        self._entered = 0
        # functions that put the originals back
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        """Replace attention at the first block that is entered."""
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._undo.append(redirect_flex_attention(self._attend_by_flex))
                self._undo.extend(change_registries(self._active))

    def leave(self) -> None:
        """Put the originals back when the last block is left."""
        with self._lock:
            self._entered -= 1
            while self._undo and not self._entered:
                self._undo.pop()()

    def _attend_by_flex(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        block = self._active()
        if block is None:
            return original(*args, **kwargs)
        block.agree(args[:3], None)
        # Functions stay watched here: in the functions of a mask, a mode of torch rewrites indexing
        # by tensors.
        return attend_by_flex(original, block.comm, block.options, args, kwargs=kwargs)
