"""Philox4x32-10 in integer tensor operations, on any device with 64-bit integers.

The generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds of two 32 x 32-bit
products turn a 128-bit counter and a 64-bit key into four random words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # the key's step from round to round
_MASK: Final = 0xFFFFFFFF


def philox(counter: Sequence[Tensor | int], key: tuple[int, int]) -> list[Tensor]:
    """Four random words for every counter.

    Args:
        counter: four 32-bit words, least significant first, each an int or an int64 tensor; they broadcast.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of the broadcast shape, each with values in `[0, 2**32)`.

    Example:
        >>> [f"{int(word):08x}" for word in philox((torch.tensor(0), 0, 0, 0), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = _broadcast(counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap around, which keeps all 64 bits of the unsigned product; the mask drops the sign.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (right >> 32).bitwise_and_(_MASK).bitwise_xor_(c1).bitwise_xor_(k0),
            right.bitwise_and_(_MASK),
            (left >> 32).bitwise_and_(_MASK).bitwise_xor_(c3).bitwise_xor_(k1),
            left.bitwise_and_(_MASK),
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def _broadcast(words: Sequence[Tensor | int]) -> list[Tensor]:
    device = next((word.device for word in words if isinstance(word, Tensor)), torch.device("cpu"))
    tensors = [torch.as_tensor(word, dtype=torch.int64, device=device) for word in words]
    return [*torch.broadcast_tensors(*tensors)]  # type: ignore[no-untyped-call]  # torch has no types
