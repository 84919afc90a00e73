"""The stream of torch's CUDA generator, entered at a rank's own elements.

torch's CUDA distributions use Philox: thread `t` of a launch reads subsequence `t` of the seed, from the generator's
offset on, and a launch has at most as many threads as the device runs at once.  A large tensor is therefore filled in
rounds: round `k` fills the same number of consecutive elements (of the walk, see `memory_order`) from offset
+ `k * step`, in the same way.  So round `k` alone is what torch itself fills when the generator's offset is moved
there: no kernel is imitated, every distribution is exact by construction, and a rank draws only the rounds that
touch its box.  The size of a round and the step are measured on the device, once per distribution, and
the claim is tested on a generator of our own; where it does not hold, the logical tensor is drawn in one go.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from shoal_mesh.internal import dataclass

from .fill import Fill
from .memory_order import MemoryOrder, stretches

_LARGEST = 1 << 24  # elements: no device known holds a round of more
_INDEX_LIMIT = 1 << 31  # elements: from here on torch splits a launch in two


@dataclass(frozen=True, slots=True)
class Rounds:
    """How a distribution uses up the generator's offset on one device.

    Attributes:
        size: elements that one round fills.
        step: by how much a round moves the offset.
    """

    size: int
    step: int


def fill_cuda(
    local: Tensor, memory: MemoryOrder, fill: Fill, generator: torch.Generator | None, operand: Tensor | None = None
) -> None:
    """Fill `local`, this rank's box, as one device fills the global tensor, and leave the generator as it would.

    Args:
        local: the box, dims in the tensor's own order.
        memory: where the box is in the global tensor, and in which order that is filled.
        fill: the distribution.
        generator: the default generator of `local`'s device when left out.
        operand: for `bernoulli_`, the box's probabilities; torch's kernel for them has no rounds.
    """
    target = memory.arranged(local)
    rounds = None
    if operand is None and memory.numel < _INDEX_LIMIT:
        rounds = rounds_of(fill, local.dtype, local.device, memory.numel % fill.granule)
    if rounds is None or memory.numel <= rounds.size:
        _fill_at_once(target, memory, fill, generator, None if operand is None else memory.arranged(operand))
        return
    generator = torch.cuda.default_generators[local.device.index] if generator is None else generator
    start = generator.get_offset()
    # A round's worth, and a bit of the next if that takes the kernel which a tensor of that many elements takes.
    flat = torch.empty(rounds.size + memory.numel % fill.granule, dtype=local.dtype, device=local.device)
    first, last = memory.span
    for k in range(first // rounds.size, -(-last // rounds.size)):
        begin = k * rounds.size
        mine = list(stretches(memory.shape, memory.box, begin, min(begin + rounds.size, memory.numel)))
        if mine:
            generator.set_offset(start + k * rounds.step)
            fill(flat, generator)
            for stretch in mine:
                stretch.copy(flat, target)
    generator.set_offset(start + -(-memory.numel // rounds.size) * rounds.step)


def _fill_at_once(
    target: Tensor, memory: MemoryOrder, fill: Fill, generator: torch.Generator | None, odds: Tensor | None
) -> None:
    flat = torch.empty(memory.numel, dtype=target.dtype, device=target.device)
    mine = list(stretches(memory.shape, memory.box, 0, memory.numel)) if memory.numel else []
    chances = None if odds is None else torch.full_like(flat, 0.5, dtype=odds.dtype)
    if chances is not None and odds is not None:
        for stretch in mine:
            stretch.copy(chances, odds, back=True)
    fill(flat, generator, chances)
    for stretch in mine:
        stretch.copy(flat, target)


@lru_cache(maxsize=512)
def rounds_of(fill: Fill, dtype: torch.dtype, device: torch.device, residue: int = 0) -> Rounds | None:
    """Size and step of a round, measured; None if drawing round by round does not give what one draw gives.

    Args:
        fill: the distribution.
        dtype: of the values; device: of the tensor.
        residue: number of the tensor's elements modulo the distribution's granule.
    """
    generator = _private_generator(device)
    scratch = torch.empty(2 * _LARGEST + 1, dtype=dtype, device=device)
    step = _advance(fill, scratch[:1], generator)
    if step <= 0 or _advance(fill, scratch[:_LARGEST], generator) == step:
        return None
    low, high = 1, _LARGEST  # a draw of `low` takes one round, a draw of `high` more
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _advance(fill, scratch[:middle], generator) == step else (low, middle)
    rounds = Rounds(low, step)
    return rounds if _holds(rounds, fill, scratch, generator, residue) else None


def _private_generator(device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.manual_seed(20)
    return generator


def _advance(fill: Fill, scratch: Tensor, generator: torch.Generator) -> int:
    before = generator.get_offset()
    fill(scratch, generator)
    after: int = generator.get_offset()
    return after - before


def _holds(rounds: Rounds, fill: Fill, scratch: Tensor, generator: torch.Generator, residue: int) -> bool:
    """Whether a draw of two rounds and a bit equals its rounds, drawn one by one and last round first."""
    numel = 2 * rounds.size + min(rounds.size, 1024 + (residue if fill.granule > 1 else 3))
    if numel > scratch.numel():
        return False
    start = generator.get_offset()
    fill(scratch[:numel], generator)
    if generator.get_offset() != start + 3 * rounds.step:
        return False
    alone = torch.empty(rounds.size + residue, dtype=scratch.dtype, device=scratch.device)
    for k in (2, 0, 1):
        generator.set_offset(start + k * rounds.step)
        fill(alone, generator)
        part = scratch[k * rounds.size : min((k + 1) * rounds.size, numel)]
        if not torch.equal(part, alone[: part.numel()]):
            return False
    return True
