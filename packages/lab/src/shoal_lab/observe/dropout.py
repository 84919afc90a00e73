"""Dropout under observation: masks are drawn as in the program, fingerprinted, and not applied.

Without masks the values can be compared with the values of one device. The masks are compared by
their fingerprints: ranks with equal inputs must draw equal masks, and ranks with different inputs
must draw different masks. Programs that use shoal keep their dropout, because shoal draws on each
rank its part of the mask of one device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..records import MaskDraw

_NAMES = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


class DropoutWatch:
    """Replacements for the dropout functions of `torch.nn.functional`.

    Args:
        draws: the list to which the record of each mask is appended.
        keeps: returns whether dropout is applied, because the program uses shoal.
        place: returns the path of the module whose forward runs.
    """

    def __init__(
        self, draws: list[MaskDraw], keeps: Callable[[], bool], place: Callable[[], str]
    ) -> None:
        self._draws = draws
        self._keeps = keeps
        self._place = place

    def install(self) -> None:
        """Replace the functions; the process ends with its program, so nothing is put back.

        A compiled program leaves its graph to draw a mask.
        """
        disable: Any = torch.compiler.disable
        self._replaces = disable(self._replaces)  # type: ignore[method-assign]  # of this instance
        for name in _NAMES:
            setattr(F, name, self._record_masks(getattr(F, name)))
        F.scaled_dot_product_attention = self._watched_attention(F.scaled_dot_product_attention)

    def _record_masks(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a dropout that records its mask."""

        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            is_active = training and p > 0
            if is_active and self._replaces(input, p, input.shape):
                return input
            return function(input, p, training, inplace)

        return dropout

    def _watched_attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return attention that records the mask of its dropout."""

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None,
            dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
        ) -> Tensor:  # fmt: skip
            shape = (*query.shape[:-1], key.shape[-2])
            if dropout_p > 0 and self._replaces(query, dropout_p, shape):
                dropout_p = 0.0
            return function(query, key, value, attn_mask, dropout_p, is_causal, **options)

        return attention

    def _replaces(self, input: Tensor, p: float, shape: Any) -> bool:
        """Draw the mask of a dropout that is not applied; return False if it is applied."""
        if self._keeps():
            return False
        self._draw(input, p, shape)
        return True

    def _draw(self, input: Tensor, p: float, shape: Any) -> None:
        """Draw a mask from the program's generator, and record it."""
        with torch.no_grad():
            mask = torch.empty(shape, device=input.device).bernoulli_(1 - min(p, 1.0))
        # a measure of how unlikely equal masks are by chance (`analysis.masks`)
        bits = min(p, 1 - p) * mask.numel()
        place = f"{self._place()} ({bits:.0f})"
        self._draws.append(MaskDraw(place, _digest(input.detach()), _digest(mask)))


def _digest(tensor: Tensor) -> int:
    """Return a fingerprint of the values of a plain tensor."""
    numbers = tensor.double().cpu().contiguous().view(torch.uint8).flatten().tolist()
    return int.from_bytes(hashlib.blake2b(bytes(numbers), digest_size=8).digest(), "big")
