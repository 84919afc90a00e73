"""Sums of squares that are exact, so that they are the same however their terms are sharded.

Every gradient is divided by a power of two above the largest of all, so squares are below 1. The first bits of each go
to one integer, the next bits to another; integers add up exactly, in any order. With 2**k elements in all, an int64
holds sums of 62 - k bits: 2 * 35 bits behind the point for 128 million elements, more than a float64 has.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ldexp, sqrt

import torch
from torch import Tensor


def square_limbs(shards: Sequence[Tensor], exponent: Tensor, elements: int) -> Tensor:
    """(2,) int64: the sum over shards of the first and of the next bits of squares.

    Args:
        shards: any shapes and floating-point dtypes, below 2 ** exponent.
        exponent: an integer on their device, of the power of two that all are divided by.
        elements: how many terms there are at most, on all ranks together.

    Example:
        >>> square_limbs([torch.tensor([0.5])], torch.tensor(0), 1).tolist()
        [1152921504606846976, 0]
    """
    bits = _bits(elements)
    limbs = torch.zeros(2, dtype=torch.int64, device=exponent.device)
    for shard in shards:
        scaled = torch.ldexp(shard.double(), -exponent).square_()
        scaled = torch.ldexp(scaled, torch.tensor(bits))
        first = scaled.floor()
        rest = torch.ldexp(scaled.sub_(first), torch.tensor(bits)).round_()
        limbs += torch.stack([first.to(torch.int64).sum(), rest.to(torch.int64).sum()])
    return limbs


def norm_of_limbs(limbs: Sequence[int], exponent: int, elements: int) -> float:
    """The norm, of the limbs of all ranks.

    Example:
        >>> norm_of_limbs(square_limbs([torch.tensor([3.0, 4.0])], torch.tensor(3), 2).tolist(), 3, 2)
        5.0
    """
    bits = _bits(elements)
    first, rest = limbs
    return ldexp(sqrt(ldexp(float((first << bits) + rest), -2 * bits)), exponent)


def _bits(elements: int) -> int:
    return 62 - max(elements - 1, 0).bit_length()
