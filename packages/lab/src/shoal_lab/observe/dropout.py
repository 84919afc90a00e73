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
        """Replace the functions; the process ends with its program, so they are not restored."""
        for name in _NAMES:
            setattr(F, name, self._watched(getattr(F, name)))
        F.scaled_dot_product_attention = self._watched_attention(F.scaled_dot_product_attention)

    def _watched(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a dropout that records its mask."""

        def dropout(
            input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
        ) -> Tensor:
            if self._keeps():
                return function(input, p, training, inplace)
            if training and p > 0:
                self._draw(input, p, input.shape)
            return input

        return dropout

    def _watched_attention(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return attention that records the mask of its dropout."""

        def attention(
            query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
            is_causal: bool = False, **options: Any,
        ) -> Tensor:  # fmt: skip
            if dropout_p > 0 and not self._keeps():
                self._draw(query, dropout_p, (*query.shape[:-1], key.shape[-2]))
                dropout_p = 0.0
            return function(query, key, value, attn_mask, dropout_p, is_causal, **options)

        return attention

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
