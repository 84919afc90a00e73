"""Streams of torch's CPU and CUDA generators, positioned at a rank's own elements.

No kernel is imitated. torch's own kernels fill parts of the global tensor, with the generator in
the state that it has at this part on one device. A rank draws the parts that contain elements of
its box. Whether a distribution can be drawn in parts is tested once per distribution, with a
separate generator. A distribution that fails the test is drawn as a whole (`fill_whole`).

CPU: the Mersenne twister cannot jump cheaply. Chunks without own elements are skipped by drawing
and discarding raw words (1.6 ns per word, against 3 to 30 ns for a value).

CUDA: thread `t` of a launch reads subsequence `t` of Philox from the generator's offset on, and a
launch has at most as many threads as the device runs at once. Therefore a large tensor is filled in
rounds. Round `k` fills the same number of consecutive elements (of the walk, see `memory_walk`)
from offset + `k * step`, in the same way. If the generator's offset is moved to the start of round
`k`, torch fills this round alone. Size and step of a round are measured on the device.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch.compiling import recorder
from .._torch.tensors import TRACED
from ..layout.boxes import whole_box
from .memory_walk import MemoryWalk
from .state import generator_of


class Fill(NamedTuple):
    """One of torch's in-place random methods with its arguments: `Fill("random_", (0, 6))`."""

    # the method: `uniform_`, `normal_`, `bernoulli_`, `exponential_`, `cauchy_`, `geometric_`,
    # `log_normal_` or `random_`; or `dropout_mask`, the mask of the device's dropout kernel, with
    # arguments (chance to drop, dtype of the input)
    name: str
    args: tuple[Any, ...] = ()  # its arguments before `generator`
    # The kernel may depend on the number of elements modulo this number.
    granule: int = 1

    def __call__(
        self,
        target: Tensor,
        generator: torch.Generator | None = None,
        operand: Tensor | None = None,
    ) -> None:
        """Fill a plain tensor in place; `bernoulli_`'s operand has a probability per element."""
        if self.name == "dropout_mask":
            chance, dtype = self.args
            _dropout_mask(target, chance, dtype, generator)
            return
        if self._has_bounds and (isinstance(target, TRACED) or recorder()):
            start, stop = self.args
            target.copy_(_integers_between(target, start, stop, generator))
            return
        args = self.args if operand is None else (operand, *self.args)
        getattr(target, self.name)(*args, generator=generator)

    @property
    def _has_bounds(self) -> bool:
        """True if the values are integers with a given lower and upper bound."""
        return self.name == "random_" and len(self.args) == 2 and self.args[1] is not None


def _integers_between(
    like: Tensor, start: int, stop: int, generator: torch.Generator | None
) -> Tensor:
    """Return the values of `like.random_(start, stop)` as a new tensor, by traceable operators.

    `random_` with two bounds is the overload `aten.random_.from`. `from` is a keyword of Python, so
    the code that torch generates for a graph with this overload is a SyntaxError.
    """
    if generator is None:
        return torch.randint_like(like, start, stop)
    return torch.randint_like(like, start, stop, generator=generator)


def _dropout_mask(
    mask: Tensor, chance: float, dtype: torch.dtype, generator: torch.Generator | None
) -> None:
    """Fill `mask` with the mask of `native_dropout` for a tensor of its shape.

    `native_dropout` does not take a generator, so the state of another generator is swapped in.
    """
    source = torch.ones(mask.shape, dtype=dtype, device=mask.device)
    default = generator_of(mask.device)
    if generator is None or generator is default:
        mask.copy_(torch.native_dropout(source, chance, train=True)[1])
        return
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        mask.copy_(torch.native_dropout(source, chance, train=True)[1])
        generator.set_state(default.get_state())
    finally:
        default.set_state(before)


def fill_stream(
    local: Tensor,
    walk: MemoryWalk,
    fill: Fill,
    generator: torch.Generator | None,
    operand: Tensor | None = None,
) -> None:
    """Fill `local`, this rank's box, as one device fills the global tensor; advance the generator.

    Afterwards the generator has the state that it would have on one device.
    """
    # The dims of the box, and of its probabilities in `operand`, are in the tensor's own order.
    has_all = walk.has(local) and walk.box == whole_box(walk.shape)
    in_order = has_all and walk.in_walking_order(local).is_contiguous()
    # If the box is the whole tensor, the plain operator fills it.
    if in_order and local.is_contiguous() == walk.contiguous:
        fill(local, generator, operand)
        return
    fill_by_parts = {"cpu": fill_cpu, "cuda": fill_cuda}.get(local.device.type, fill_whole)
    fill_by_parts(local, walk, fill, generator, operand=operand)


def fill_whole(
    local: Tensor,
    walk: MemoryWalk,
    fill: Fill,
    generator: torch.Generator | None,
    operand: Tensor | None,
) -> None:
    """Draw the global tensor and keep this rank's box.

    This is correct on any device, and traceable because nothing is measured.
    """
    is_on_cpu = local.device.type == "cpu"
    whole = _scratch(walk.shape, local, walk.contiguous or not is_on_cpu)
    box = tuple([slice(start, stop) for start, stop in walk.box])
    odds = None if operand is None else torch.full_like(whole, 0.5, dtype=operand.dtype)
    if odds is not None and operand is not None and walk.has(operand):
        odds[box].copy_(walk.in_walking_order(operand))
    # Kernels of CPU and CUDA walk in memory order for any order of dims.
    if is_on_cpu or local.device.type == "cuda":
        fill(whole, generator, odds)
    else:
        dims = walk.positions_of_dims()
        odds_in_order = None if odds is None else odds.permute(dims)
        fill(whole.permute(dims), generator, odds_in_order)
    if walk.has(local):
        walk.in_walking_order(local).copy_(whole[box])


def _scratch(shape: tuple[int, ...], like: Tensor, contiguous: bool) -> Tensor:
    """Return a tensor of this shape that torch's kernels treat as contiguous, or not."""
    if contiguous:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return torch.empty((*shape, 2), dtype=like.dtype, device=like.device)[..., 0]


# --- CPU ------------------------------------------------------------------------------------------

# elements that are filled at a time; 256 KiB of float32 stay in the second-level cache
CHUNK = 1 << 16
# The units to try. torch's vectorized normal kernel works on 16 real or 8 complex numbers at a
# time.
_UNITS = (1, 8, 16)
# elements of a test: several units, and a rest that is not a multiple of a unit
_PROBE = 83


class Law(NamedTuple):
    """The consumption of the generator by a distribution that gives the same values in chunks."""

    # Chunks start at multiples of this number of elements, and the last chunk has at least as many.
    unit: int
    # 32-bit words per value in all but the last unit; 0 if that varies
    words: int


def fill_cpu(
    local: Tensor,
    walk: MemoryWalk,
    fill: Fill,
    generator: torch.Generator | None,
    operand: Tensor | None = None,
) -> None:
    """Run `fill_stream` on the CPU, in bounded memory."""
    law = None
    if type(local) is Tensor and walk.numel > CHUNK:
        operand_dtype = None if operand is None else operand.dtype
        law = law_of(fill, local.dtype, walk.contiguous, operand_dtype)
    if law is None:
        fill_whole(local, walk, fill, generator, operand=operand)
        return
    scratch = _scratch((CHUNK + law.unit,), local, walk.contiguous)
    odds = None if operand is None else torch.full_like(scratch, 0.5, dtype=operand.dtype)
    target = walk.in_walking_order(local)
    first, last = walk.span
    drawn = 0
    start = 0
    while start < walk.numel:
        # The last chunk includes a rest that is smaller than a unit. Example: 2 * 65536 + 5
        # elements in units of 16 are two chunks.
        rest = walk.numel - start - CHUNK
        stop = walk.numel if rest < law.unit else start + CHUNK
        touches_box = first < stop and start < last
        if touches_box or not law.words or stop == walk.numel:
            # Skip the words of the chunks before that were not drawn.
            skip_words((start - drawn) * law.words, generator)
            drawn = stop
            values = scratch[: stop - start]
            chunk_odds = None
            if odds is not None and operand is not None:
                chunk_odds = odds[: stop - start]
                own_odds = walk.in_walking_order(operand)
                for part, held in walk.stretches(start, stop, flat=odds, held=own_odds):
                    part.copy_(held)
            fill(values, generator, chunk_odds)
            for part, held in walk.stretches(start, stop, flat=scratch, held=target):
                held.copy_(part)
        start = stop


def skip_words(words: int, generator: torch.Generator | None) -> None:
    """Draw this number of 32-bit words and discard them."""
    # Example: 7 words are 3 numbers of 64 bits, and one of 8 bits, which takes a word too.
    pairs, odd = divmod(words, 2)
    scratch = torch.empty(min(pairs, CHUNK), dtype=torch.int64, device="cpu")
    while pairs > 0:
        count = min(pairs, CHUNK)
        scratch[:count].random_(-(2**63), None, generator=generator)
        pairs -= count
    if odd:
        torch.empty(1, dtype=torch.uint8, device="cpu").random_(generator=generator)


@lru_cache(maxsize=512)
def law_of(
    fill: Fill, dtype: torch.dtype, contiguous: bool, operand: torch.dtype | None = None
) -> Law | None:
    """Return the consumption of the generator by `fill`, measured on a separate generator.

    Return None if drawing in chunks gives other values.
    """

    def draw_divided(*ends: int) -> tuple[Tensor, Tensor]:
        """Return the values and the end state of a draw that is divided at `ends`."""
        generator = _generator_with_spare()
        like = torch.empty(0, dtype=dtype, device="cpu")
        values = _scratch((ends[-1],), like, contiguous)
        odds = None if operand is None else torch.full_like(values, 0.5, dtype=operand)
        for start, stop in pairwise((0, *ends)):
            part_odds = None if odds is None else odds[start:stop]
            fill(values[start:stop], generator, part_odds)
        return values, generator.get_state()

    whole, end_state = draw_divided(_PROBE)
    for unit in _UNITS:
        # Example: for a unit of 8, the parts are 0:8, 8:24 and 24:83.
        values, state = draw_divided(unit, 3 * unit, _PROBE)
        has_same_state = torch.equal(state, end_state)
        if has_same_state and torch.equal(values.nan_to_num(), whole.nan_to_num()):
            # 16 values, or 32 for units of 16
            count = 2 * max(unit, 8)
            _, state_after = draw_divided(count)
            return Law(unit, _words_of_value(count, state_after))
    return None


def _words_of_value(count: int, state_after: Tensor) -> int:
    """Return how many words a value takes: skipping those of `count` values leads to this state.

    Return 0 if no number of words does.
    """
    for words in (1, 2, 4):
        generator = _generator_with_spare()
        skip_words(count * words, generator)
        if torch.equal(generator.get_state(), state_after):
            return words
    return 0


def _generator_with_spare() -> torch.Generator:
    """Return a seeded generator that also holds the spare value of torch's scalar normal."""
    generator = torch.Generator().manual_seed(20)
    torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=generator)
    return generator


# --- CUDA -----------------------------------------------------------------------------------------

# elements; a round of every known device is smaller
_LARGEST = 1 << 24
# elements; from this number on, torch divides a launch in two
_INDEX_LIMIT = 1 << 31


class Rounds(NamedTuple):
    """The size and offset step of a round of a distribution on one device."""

    size: int  # elements that one round fills
    step: int  # by how much a round moves the offset


def fill_cuda(
    local: Tensor,
    walk: MemoryWalk,
    fill: Fill,
    generator: torch.Generator | None,
    operand: Tensor | None = None,
) -> None:
    """Run `fill_stream` on CUDA, by the rounds that contain elements of the box.

    With an operand, torch's kernel does not work in rounds, so the whole tensor is drawn.
    """
    residue = walk.numel % fill.granule
    rounds = None
    if operand is None and walk.numel < _INDEX_LIMIT:
        rounds = rounds_of(fill, local.dtype, local.device, residue)
    if rounds is None or walk.numel <= rounds.size:
        fill_whole(local, walk, fill, generator, operand=operand)
        return
    target = walk.in_walking_order(local)
    if generator is None:
        generator = torch.cuda.default_generators[local.device.index]
    start = generator.get_offset()
    # The elements of one round, and as many more as make torch choose the kernel that it would
    # choose for the global tensor.
    flat = torch.empty(rounds.size + residue, dtype=local.dtype, device=local.device)
    first, last = walk.span
    # Example: the elements 2500:5200 are in the rounds 2 to 5 of 1000 elements.
    first_round = first // rounds.size
    end_round = -(-last // rounds.size)
    for k in range(first_round, end_round):
        # In the example, round 2 begins at element 2000 and at the offset start + 2 * step.
        begin = k * rounds.size
        end = min(begin + rounds.size, walk.numel)
        own_stretches = [*walk.stretches(begin, end, flat=flat, held=target)]
        if own_stretches:
            generator.set_offset(start + k * rounds.step)
            fill(flat, generator)
            for part, held in own_stretches:
                held.copy_(part)
    # In the example, 5200 elements take 6 rounds.
    all_rounds = -(-walk.numel // rounds.size)
    generator.set_offset(start + all_rounds * rounds.step)


@lru_cache(maxsize=512)
def rounds_of(
    fill: Fill, dtype: torch.dtype, device: torch.device, residue: int = 0
) -> Rounds | None:
    """Return the measured size and offset step of a round.

    Return None if drawing round by round gives other values than one draw. `residue` is the number
    of the tensor's elements modulo the granule of the distribution.
    """
    generator = _private_generator(device)
    scratch = torch.empty(2 * _LARGEST + 1, dtype=dtype, device=device)

    def advance(numel: int) -> int:
        """Return the change of the offset by a draw of this number of elements."""
        before = generator.get_offset()
        fill(scratch[:numel], generator)
        return int(generator.get_offset() - before)

    step = advance(1)
    if step <= 0 or advance(_LARGEST) == step:
        return None
    # A round has one element less than the fewest elements that take a second round.
    fewest = bisect_left(range(_LARGEST), True, lo=1, key=lambda numel: advance(numel) != step)
    size = fewest - 1
    # The test draws 3 rounds, of which the last one is short.
    rest = 1024 + (residue if fill.granule > 1 else 3)
    numel = 2 * size + min(size, rest)
    if numel > scratch.numel():
        return None
    start = generator.get_offset()
    fill(scratch[:numel], generator)
    if generator.get_offset() != start + 3 * step:
        return None
    alone = torch.empty(size + residue, dtype=dtype, device=device)
    # Draw each round alone, in another order.
    for k in (2, 0, 1):
        generator.set_offset(start + k * step)
        fill(alone, generator)
        end = min((k + 1) * size, numel)
        part = scratch[k * size : end]
        if not torch.equal(part, alone[: part.numel()]):
            return None
    return Rounds(size, step)


def _private_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(20)
