"""The stream of torch's CPU generator (a Mersenne twister), walked in bounded memory.

The twister cannot jump cheaply, so every rank draws the logical tensor chunk by chunk and keeps what is its own;
chunks without own elements are skipped at the price of raw draws (1.6 ns per word, against 3 to 30 ns for a value).
That a distribution may be drawn in chunks, and how many words a value takes, is not taken on trust:
both are probed once per distribution, with a generator of our own, and what fails the probe is drawn in one go.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from shoal_mesh.internal import dataclass

from .fill import Fill
from .memory_order import MemoryOrder, stretches

CHUNK = 1 << 16  # elements; 256 KiB of float32 stay in the second-level cache
_UNITS = (1, 8, 16)  # torch's vectorised normal works on 16 real numbers, 8 complex ones
_PROBE = 83  # elements: several units, and a rest that is not a multiple of any


@dataclass(frozen=True, slots=True)
class Law:
    """How a distribution consumes the generator.

    Attributes:
        unit: chunks that start at multiples of it, and a last chunk of at least so many elements, give the same
            values as one draw; None if the values must be drawn in one go.
        words: 32-bit words per value in all but the last unit; None if that varies.
    """

    unit: int | None
    words: int | None


def fill_cpu(
    local: Tensor, memory: MemoryOrder, fill: Fill, generator: torch.Generator | None, operand: Tensor | None = None
) -> None:
    """Fill `local`, this rank's box, as one device fills the global tensor, and leave the generator as it would.

    Args:
        local: the box, dims in the tensor's own order.
        memory: where the box is in the global tensor, and in which order that is filled.
        fill: the distribution.
        generator: the default generator when left out.
        operand: for `bernoulli_`, the box's probabilities, of the shape of `local`.
    """
    if type(local) is not Tensor:
        _fill_traced(local, memory, fill, generator, operand)
        return
    law = Law(1, None)
    if memory.numel > CHUNK:
        law = law_of(fill, local.dtype, memory.contiguous, None if operand is None else operand.dtype)
    chunk = CHUNK if law.unit else memory.numel
    scratch = _scratch(min(chunk + (law.unit or 0), memory.numel), local, memory.contiguous)
    odds = None if operand is None else torch.full_like(scratch, 0.5, dtype=operand.dtype)
    target = memory.arranged(local)
    given = None if operand is None else memory.arranged(operand)
    first, last = memory.span
    skipped, start = 0, 0
    while start < memory.numel or memory.numel == 0:
        stop = memory.numel if memory.numel - start - chunk < (law.unit or 1) else start + chunk
        if law.words and stop < memory.numel and not (first < stop and start < last):
            skipped += (stop - start) * law.words
            start = stop
            continue
        skip_words(skipped, generator)
        skipped = 0
        part = scratch[: stop - start]
        mine = list(stretches(memory.shape, memory.box, start, stop)) if stop > start else []
        if odds is not None and given is not None:
            for stretch in mine:
                stretch.copy(odds, given, back=True)
        fill(part, generator, None if odds is None else odds[: stop - start])
        for stretch in mine:
            stretch.copy(part, target)
        start = stop
        if memory.numel == 0:
            break


def _fill_traced(
    local: Tensor, memory: MemoryOrder, fill: Fill, generator: torch.Generator | None, operand: Tensor | None
) -> None:
    """The same for a compiler: nothing can be probed, sizes may be symbols, and one draw of all numbers is one node."""
    drawn = _scratch(memory.numel, local, memory.contiguous)
    odds = None if operand is None else torch.full_like(drawn, 0.5, dtype=operand.dtype)
    box = tuple([slice(start, stop) for start, stop in memory.box])
    if odds is not None and operand is not None:
        odds.view(memory.shape)[box].copy_(memory.arranged(operand))
    fill(drawn, generator, odds)
    memory.arranged(local).copy_(drawn.view(memory.shape)[box])


def _scratch(numel: int, like: Tensor, contiguous: bool) -> Tensor:
    """A 1-D tensor; when not `contiguous`, one that torch does not take for contiguous either."""
    if contiguous:
        return torch.empty(numel, dtype=like.dtype, device=like.device)
    return torch.empty((numel, 2), dtype=like.dtype, device=like.device)[:, 0]


def skip_words(words: int, generator: torch.Generator | None) -> None:
    """Draw so many 32-bit words and forget them."""
    pairs, odd = divmod(words, 2)
    scratch = torch.empty(min(pairs, CHUNK), dtype=torch.int64)
    while pairs > 0:
        count = min(pairs, CHUNK)
        scratch[:count].random_(-(2**63), None, generator=generator)
        pairs -= count
    if odd:
        torch.empty(1, dtype=torch.uint8).random_(generator=generator)


@lru_cache(maxsize=512)
def law_of(fill: Fill, dtype: torch.dtype, contiguous: bool, operand: torch.dtype | None = None) -> Law:
    """How `fill` consumes the generator, found by drawing a few numbers from a generator of our own."""
    like = torch.empty(0, dtype=dtype)
    whole, after = _trial(fill, like, contiguous, operand, (0, _PROBE))
    for unit in _UNITS:
        ends = (0, unit, 3 * unit, _PROBE)
        values, state = _trial(fill, like, contiguous, operand, ends)
        if torch.equal(state, after) and _same(values, whole):
            return Law(unit, _words(fill, like, contiguous, operand, unit))
    return Law(None, None)


def _trial(
    fill: Fill, like: Tensor, contiguous: bool, operand: torch.dtype | None, ends: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Values and end state of a draw that is divided at `ends`."""
    generator = _primed()
    values = _scratch(ends[-1], like, contiguous)
    odds = None if operand is None else torch.full_like(values, 0.5, dtype=operand)
    for start, stop in pairwise(ends):
        fill(values[start:stop], generator, None if odds is None else odds[start:stop])
    return values, generator.get_state()


def _words(fill: Fill, like: Tensor, contiguous: bool, operand: torch.dtype | None, unit: int) -> int | None:
    """Words per value in whole units, if the same number leads to the same state from two different starts."""
    count = 2 * max(unit, 8)
    _, after = _trial(fill, like, contiguous, operand, (0, count))
    for words in (1, 2, 4):
        generator = _primed()
        skip_words(count * words, generator)
        if torch.equal(generator.get_state(), after):
            return words
    return None


def _primed() -> torch.Generator:
    """A seeded generator that also holds the spare value that torch's scalar normal keeps."""
    generator = torch.Generator()
    generator.manual_seed(20)
    torch.empty(1, dtype=torch.float64).normal_(generator=generator)
    return generator


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if a.is_floating_point() else torch.equal(a, b)
