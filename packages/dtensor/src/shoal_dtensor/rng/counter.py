"""The "counter" mode: values from a key and an element's global index alone, by Philox.

The last tensor dim is divided into blocks of four values (two if a value needs more than 32 bits).
The number of the block, and the number of its row among the rows of all leading dims, are Philox's
counter. The cost is therefore proportional to the size of the shard, and the mesh does not matter.
Arithmetic is in float64, so that CPU and CUDA round to the same float32, except for last-bit
differences of their logarithms and cosines. Uniform, Bernoulli and integer values are exactly
equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from ..layout.boxes import Box

if TYPE_CHECKING:
    from .streams import Fill

# Number of values that are made at a time. The few dozen int64 operations on them stay in the
# second-level cache.
_CHUNK: Final = 1 << 14
_MASK: Final = 0xFFFFFFFF
_WORD: Final = 2.0**-32
# Bits of the significand: a uniform value is a multiple of 2 ** -bits, so that `[from, to)` stays
# half open.
_BITS: Final = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)  # the key's step from round to round


def fill_counter(
    local: Tensor,
    shape: tuple[int, ...],
    box: Box,
    fill: Fill,
    key: tuple[int, int],
    *,
    operand: Tensor | None = None,
) -> None:
    """Fill `local`, the box of a tensor of shape `shape`, with two 32-bit words as the key.

    `operand` holds the probabilities of `bernoulli_`.
    """
    if local.numel() == 0:
        return
    if local.is_complex():
        if fill.name == "normal_":
            deviation = _arg(fill, 1, 1.0) / math.sqrt(2.0)
            fill = fill._replace(args=(_arg(fill, 0, 0.0), deviation))
        local = torch.view_as_real(local)
        shape = (*shape, 2)
        box = (*box, (0, 2))
    if not shape:
        shape = (1,)
        box = ((0, 1),)
    low, high = box[-1]
    # the numbers of the box's rows among the rows of the global tensor
    rows = torch.zeros(1, dtype=torch.int64, device=local.device)
    outer = zip(shape[:-1], box[:-1], strict=True)
    for n, (start, stop) in outer:
        # Example: [2, 3] for rows 2:4.
        inner = torch.arange(start, stop, device=local.device)
        rows = (rows[:, None] * n + inner).reshape(-1)
    table = (len(rows), high - low)
    target = local.view(table) if local.is_contiguous() else local.new_empty(table)
    odds = None if operand is None else operand.reshape(table)
    for left in range(low, high, _CHUNK):
        right = min(left + _CHUNK, high)
        # Example: 163 rows of 100 values at a time.
        step = max(1, _CHUNK // (right - left))
        for top in range(0, len(rows), step):
            rows_of_chunk = rows[top : top + step]
            columns = slice(left - low, right - low)
            place = (slice(top, top + step), columns)
            values = _values(fill, rows_of_chunk, (left, right), local.dtype, key=key)
            if odds is not None:
                values = values < odds[place]
            target[place].copy_(values)
    if not local.is_contiguous():
        local.copy_(target.view(local.shape))


def _values(
    fill: Fill, rows: Tensor, columns: tuple[int, int], dtype: torch.dtype, key: tuple[int, int]
) -> Tensor:
    """Return the values of a fill in these rows and these columns (start, stop)."""
    left, right = columns
    if fill.name == "random_":
        is_wide = _integer_range(fill, dtype).size > 1 << 32
    else:
        is_narrow = fill.name in ("uniform_", "normal_", "bernoulli_")
        is_wide = dtype == torch.float64 or not is_narrow
    # Example: the columns 5:10 are in the blocks 1 and 2 of 4 values, which are the columns 4:12.
    values_of_block = 2 if is_wide else 4
    first_block = left // values_of_block
    end_block = -(-right // values_of_block)
    block = torch.arange(first_block, end_block, device=rows.device)[None, :]
    row = rows[:, None]
    counter = (block & _MASK, row & _MASK, row >> 32, block >> 32)
    # The shape is (rows, blocks, 4).
    words = torch.stack(philox(counter, key), -1)
    values = _values_of_blocks(fill, words, dtype).flatten(1)
    # In the example, they are 1:6 of the columns 4:12.
    skipped = left % values_of_block
    return values[:, skipped : skipped + right - left]


def _values_of_blocks(fill: Fill, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of each block.

    For `bernoulli_` without arguments, return uniform values to compare with the operand.
    """
    first = partial(_arg, fill, 0)
    second = partial(_arg, fill, 1)
    match fill.name:
        case "uniform_":
            return _uniform(words, dtype, first(0.0), second(1.0))
        case "normal_":
            return _standard_normal(words, dtype).mul_(second(1.0)).add_(first(0.0))
        case "log_normal_":
            logarithm = _standard_normal(words, torch.float64).mul_(second(2.0)).add_(first(1.0))
            return logarithm.exp_()
        case "bernoulli_":
            is_wide = dtype == torch.float64
            uniform = _open_uniform(words) if is_wide else words.double().mul_(_WORD)
            return uniform < first(0.5) if fill.args else uniform
        case "exponential_":
            return _open_uniform(words).log_().mul_(-1.0 / first(1.0))
        case "cauchy_":
            angle = _open_uniform(words).sub_(0.5).mul_(math.pi)
            return angle.tan_().mul_(second(1.0)).add_(first(0.0))
        case "geometric_":
            chance = first(0.5)
            uniform = _open_uniform(words)
            if chance == 1.0:
                return torch.ones_like(uniform, dtype=words.dtype)
            return uniform.log_().div_(math.log1p(-chance)).ceil_().clamp_(min=1.0)
    assert fill.name == "random_", f"no distribution {fill.name}"
    return _integers(words, _integer_range(fill, dtype))


def _open_uniform(words: Tensor) -> Tensor:
    """Return two values per block in the open interval (0, 1), from 52 bits each."""
    high = words[..., 0::2]
    low = words[..., 1::2]
    bits = (high << 20) + (low >> 12)
    return bits.double().add_(0.5).mul_(2.0**-52)


def _uniform(words: Tensor, dtype: torch.dtype, start: float, stop: float) -> Tensor:
    """Return values in `[start, stop)`: multiples of 2 ** -bits, scaled."""
    bits = _BITS[dtype]
    if bits > 32:
        # 32 + 21 = 53 bits from two words
        high = words[..., 0::2]
        low = words[..., 1::2]
        units = (high << 21) + (low >> 11)
    else:
        # for example the upper 24 bits of a word for float32
        units = words >> (32 - bits)
    fractions = units.double().mul_(2.0**-bits)
    values = fractions.mul_(stop - start).add_(start).to(dtype)
    if stop <= start:
        return values
    return values.masked_fill_(values >= stop, start)


def _standard_normal(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return standard normal values by Box and Muller's transform, in float64."""
    if dtype == torch.float64:
        both = _open_uniform(words)
        uniform = both[..., :1]
        turn = both[..., 1:]
    else:
        uniform = words[..., 0::2].double().add_(0.5).mul_(_WORD)
        turn = words[..., 1::2].double().mul_(_WORD)
    radius = uniform.log().mul_(-2.0).sqrt_()
    angle = turn * (2.0 * math.pi)
    pairs = [angle.cos().mul_(radius), angle.sin().mul_(radius)]
    return torch.stack(pairs, -1).flatten(-2)


def _integers(words: Tensor, integers: _IntegerRange) -> Tensor:
    """Return integers of a range: from one word each, or from two if there are more than 2**32."""
    lowest, count = integers
    if count <= 1 << 32:
        # Example: word % 3 + 2 for random_(2, 5).
        return words.remainder(count).add_(lowest)
    high = words[..., 0::2]
    low = words[..., 1::2]
    if count >= 1 << 64:
        return (high << 32) | low
    numbers = (high << 31) | (low >> 1)
    if count != 1 << 63:
        numbers = numbers.remainder_(count)
    return numbers.add_(lowest)


class _IntegerRange(NamedTuple):
    """The lowest of consecutive integers, and how many there are."""

    lowest: int
    size: int


def _integer_range(fill: Fill, dtype: torch.dtype) -> _IntegerRange:
    """Return the first value and the number of values of `random_`, as torch documents them."""
    bounds = [int(bound) for bound in fill.args if bound is not None]
    if fill.args and fill.args[-1] is not None:
        start, stop = bounds if len(bounds) == 2 else (0, *bounds)
        # Example: random_(2, 5) is one of 3 numbers from 2 on.
        return _IntegerRange(start, stop - start)
    start = bounds[0] if bounds else 0
    return _IntegerRange(start, _largest_integer(dtype) - start + 1)


def _largest_integer(dtype: torch.dtype) -> int:
    """Return the largest value of `random_` without an upper bound: 2**24 for float32."""
    if dtype in _BITS:
        return 1 << _BITS[dtype]
    if dtype == torch.bool:
        return 1
    return int(torch.iinfo(dtype).max)


def _arg(fill: Fill, position: int, default: float) -> float:
    return float(fill.args[position]) if position < len(fill.args) else default


# --- Philox4x32-10 --------------------------------------------------------------------------------


def philox(counter: Sequence[Any], key: tuple[int, int]) -> list[Any]:
    """Return four random words for every counter.

    This is the generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    Ten rounds of two 32 x 32-bit products turn a 128-bit counter and a 64-bit key into four words
    in `[0, 2**32)`. Counter and key are given as 32-bit words, the least significant first. The
    words of a counter are integers or int64 tensors; the results have their broadcast shape.

    Example:
        >>> [f"{word:08x}" for word in philox((0, 0, 0, 0), (0, 0))]
        ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap around, which keeps all 64 bits of the unsigned product; the mask
        # drops the sign.
        left = c0 * _MULTIPLIERS[0]
        right = c2 * _MULTIPLIERS[1]
        c0 = ((right >> 32) & _MASK) ^ c1 ^ k0
        c1 = right & _MASK
        c2 = ((left >> 32) & _MASK) ^ c3 ^ k1
        c3 = left & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]
