"""Exchange of ranges of a sharded dim by one all-to-all with exact blocks; windows and halos.

An operator like `roll` or `repeat` puts every shard of a dim at some places of its result. The
blocks that each rank sends and receives follow from these places and from the ranges that the ranks
want. `roll` by 1 of 6 elements on 2 ranks puts 0:3 at 1 and at -5:

    rank 0: a b c  ->  f a b        sends c to rank 1
    rank 1: d e f  ->  c d e        sends f to rank 0

Halos are the border rows of other ranks that windows along a sharded dim read. A convolution of 8
rows with kernel 3 and padding 1, sharded as 4 + 4 on 2 ranks (`-` is padding):

    rank 0 holds  0 1 2 3        computes outputs 0..3, reads  - 0 1 2 3 4    row 4 is its halo, from rank 1
    rank 1 holds  4 5 6 7        computes outputs 4..7, reads  3 4 5 6 7 -    row 3 is its halo, from rank 0

Transposed, with stride 2, kernel 3 and padding 1, input `i` adds to the outputs 2i-1, 2i, 2i+1.
With 4 inputs and 7 outputs:

    rank 0 holds  0 1            computes outputs 0..3, reads  0 1 2          input 2 adds to output 3
    rank 1 holds  2 3            computes outputs 4..6, reads  2 3

Without padding, inputs 0 1 2 make the outputs -1..5, which are cropped to 0..3, or filled up with
zeros. The gradient of a halo goes back the same way and is added to the owner's.

May import: language.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal_mesh import all_to_all_blocks

from ..layout.boxes import spans
from ..layout.dim_sharding import DimSharding
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta
from .language.local_ops import shard_index
from .language.op_call import ShardingMap
from .language.rule import OpCall, Traffic

Interval = tuple[int, int]


class RelocatedBlock(NamedTuple):
    """Elements that one rank sends to another: their places in the shard and in the wanted range."""

    in_shard: int
    in_wanted: int
    length: int


def _blocks(places: Sequence[int], size: int, wanted: Interval) -> list[RelocatedBlock]:
    """Return the parts of the range `wanted` in a shard that is put at each of `places`."""
    first, last = wanted
    blocks = []
    for place in places:
        # 3:6 at 4, of 3:6: 4, 6
        start = max(place, first)
        stop = min(place + size, last)
        if start < stop:
            # 0, 1, 2
            blocks.append(RelocatedBlock(start - place, start - first, stop - start))
    return blocks


class Relocation:
    """The exchange from the shards of a dim to the ranges that ranks want.

    Every rank along the axes of the dim takes part.

    Every shard is put at some places of a dim, and the rank of each shard wants a range of that
    dim. The ranges may overlap and reach over the ends of the dim. If nothing `moves`, every rank
    already has its range in place, and no collective is started.
    """

    def __init__(
        self,
        spec: Spec,
        dim: int,
        places: Sequence[Sequence[int]],
        wanted: Sequence[Interval],
        *,
        moves: bool = True,
    ) -> None:
        self.spec = spec
        self.dim = dim
        self.moves = moves
        self.index: int = shard_index(spec, dim)
        sizes = spec.sizes(dim)
        own_places = places[self.index]
        self.size: int = sizes[self.index]
        # roll of abc | def by 1: rank 0 wants f ab, and sends c to rank 1
        self.wanted: Interval = wanted[self.index]
        self.sends = [_blocks(own_places, self.size, range_of_rank) for range_of_rank in wanted]
        self.receives: list[list[RelocatedBlock]] = []
        for places_of_rank, size in zip(places, sizes, strict=True):
            self.receives.append(_blocks(places_of_rank, size, self.wanted))
        # Whether something is put everywhere. Not every dtype has a zero to fill gaps with.
        start, stop = self.wanted
        arriving = sum(block.length for blocks in self.receives for block in blocks)
        self._has_no_gap = arriving == stop - start
        # How much more is wanted at the start and at the end, where nothing moves: 3:9 of 4:8: (1,
        # 1); 5:7: (-1, -1).
        place = own_places[0]
        before = place - start
        after = stop - place - self.size
        self._widths: dict[int, Interval] = {dim: (before, after)}

    def forwards(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Exchange shards; return the range that this rank wants, `fill` where nothing is put."""
        if not self.moves:
            return _pad(x, self._widths, fill)
        start, stop = self.wanted
        shape = self._shape(x, stop - start)
        result = x.new_empty(shape) if self._has_no_gap else x.new_full(shape, fill)
        sent = []
        for blocks in self.sends:
            parts = [x.narrow(self.dim, block.in_shard, block.length) for block in blocks]
            sent.append(parts)
        arriving = [self._in_wanted(result, blocks) for blocks in self.receives]
        self._exchange(sent, arriving, x, result)
        return result

    def backwards(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's shard, summed over the gradients of all ranks."""
        if not self.moves:
            return _pad(gradient, self._widths, sign=-1).contiguous()
        total = gradient.new_zeros(self._shape(gradient, self.size))
        sent = [self._in_wanted(gradient, blocks) for blocks in self.receives]
        arriving = []
        for blocks in self.sends:
            shapes = [self._shape(gradient, block.length) for block in blocks]
            arriving.append([gradient.new_empty(shape) for shape in shapes])
        self._exchange(sent, arriving, gradient, total)
        for blocks, summands in zip(self.sends, arriving, strict=True):
            # behind this rank's summands is an empty one
            for block, summand in zip(blocks, summands, strict=False):
                total.narrow(self.dim, block.in_shard, block.length).add_(summand)
        return total

    def _in_wanted(self, tensor: Tensor, blocks: Sequence[RelocatedBlock]) -> list[Tensor]:
        """Return the views of some blocks in a tensor with the wanted range."""
        return [tensor.narrow(self.dim, block.in_wanted, block.length) for block in blocks]

    def _exchange(
        self, blocks: list[list[Tensor]], out: list[list[Tensor]], source: Tensor, result: Tensor
    ) -> None:
        # so that a rank that sends and receives nothing has the dtype
        blocks[self.index].append(source.narrow(self.dim, 0, 0))
        out[self.index].append(result.narrow(self.dim, 0, 0))
        axes = self.spec.dim_sharding(self.dim).axes
        all_to_all_blocks(blocks, self.spec.mesh.comm(axes), out)

    def _shape(self, like: Tensor, length: int) -> list[int]:
        return [length if d == self.dim else n for d, n in enumerate(like.shape)]


# --- windows and halos ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Windows(ShardingMap):
    """The inputs that each output reads along a dim; as a map of shardings, the outputs of a shard.

    Output `o` reads inputs `o * stride - padding + dilation * j` for `j` below `kernel`; a shard
    computes the outputs whose windows have their middle in it. Transposed, input `i` adds to the
    outputs `i * stride - padding + dilation * j`; a shard of n inputs computes `n * stride`
    outputs, and the last shard also computes the remaining outputs.

    Example:
        >>> Windows(8, 8, kernel=3, padding=1)(DimSharding((0,), (2,), (5, 3))).sizes
        (5, 3)
        >>> doubled = Windows(8, 16, kernel=2, stride=2, transposed=True, beside=1)
        >>> doubled.reads((4, 8))
        (1, 5)
    """

    length: int  # how many inputs
    outputs: int  # how many outputs
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False  # whether windows are of outputs
    # more inputs on either side that an output reads besides the inputs of its window; only
    # interpolation reads them
    beside: int = 0

    @property
    def reach(self) -> int:
        """The distance from the first to the last element of a window."""
        return self.dilation * (self.kernel - 1)

    def __call__(self, sharding: DimSharding) -> DimSharding:
        # 8 outputs of 5 + 3, kernel 3: from 0, 5
        return sharding.resharded(self._before, self.outputs)

    def _before(self, position: int) -> int:
        """Return the number of outputs that belong to the inputs before `position`."""
        if position >= self.length:
            return self.outputs
        if position == 0:
            return 0
        if self.transposed:
            outputs = position * self.stride
        else:
            # kernel 3, padding 1: 1 - 1 = 0
            middle = self.reach // 2 - self.padding
            # 5, by 2: 3
            outputs = -(-(position - middle) // self.stride)
        return min(max(outputs, 0), self.outputs)

    def reads(self, outputs: Interval) -> Interval:
        """Return the range of inputs that a range of outputs reads.

        Windows over inputs may reach over both ends of the input.
        """
        start, stop = outputs
        if not self.transposed:
            first = start * self.stride - self.padding
            last = (stop - 1) * self.stride - self.padding
            return first, last + self.reach + 1
        before = start + self.padding - self.reach
        first = -(-before // self.stride) - self.beside
        last_output = stop - 1 + self.padding
        last = last_output // self.stride + 1 + self.beside
        # kernel 3, stride 2, padding 1, outputs 0:4: inputs 0:3
        return self.clipped((first, last))

    def clipped(self, inputs: Interval) -> Interval:
        """Return the part of a range that is inside the input."""
        start = min(max(inputs[0], 0), self.length)
        return start, max(start, min(inputs[1], self.length))

    def reached(self, inputs: Interval) -> Interval:
        """Return the range of outputs that a range of inputs reaches, for a transposed operator."""
        first, last = inputs
        # inputs 0:3, stride 2, padding 1: -1
        start = first * self.stride - self.padding
        # -1 + 2 * 2 + 3 = 6
        steps = last - first - 1
        start_of_last = start + steps * self.stride
        return start, start_of_last + self.reach + 1


def per_dim(call: OpCall, name: str, count: int) -> list[int]:
    """Return an argument as a list with one number for each of `count` spatial dims."""
    value = call.get(name, [1])
    # [2] for 3 dims: [2, 2, 2]
    return [*value] * count if len(value) == 1 else [*value]


def windows_of(
    call: OpCall,
    source: TensorMeta,
    result: TensorMeta,
    kernel: Sequence[int],
    *,
    transposed: bool = False,
) -> dict[int, Windows]:
    """Return the windows along every spatial dim (the last dims) of a call.

    The call has a stride and a padding, and may have a dilation.
    """
    count = len(kernel)
    stride = per_dim(call, "stride", count) if call["stride"] else kernel
    padding = per_dim(call, "padding", count)
    dilation = per_dim(call, "dilation", count)
    windows = {}
    for i, dim in enumerate(range(source.ndim - count, source.ndim)):
        windows[dim] = Windows(
            source.shape[dim],
            result.shape[dim],
            kernel[i],
            stride[i],
            padding=padding[i],
            dilation=dilation[i],
            transposed=transposed,
        )
    return windows


def halo_traffic(windows: Windows, source: TensorMeta, dim: int) -> Traffic | None:
    """Return the traffic of windows along a sharded dim of `source`; None if they need no halos.

    Example:
        Windows of 2 that do not overlap, of 4 inputs: sharded as 3 + 1 the second one needs an
            input of the first rank.

        >>> row = TensorMeta((4, 2), (2, 1), torch.float32)
        >>> halo_traffic(Windows(4, 4, kernel=1), row, 0) is None
        True
        >>> halo_traffic(Windows(4, 2, kernel=2, stride=2), row, 0)(4)
        8
    """
    if not _needs_halo(windows):
        return None
    other_sizes = [n for d, n in enumerate(source.shape) if d != dim]
    row_bytes = source.dtype.itemsize * prod(other_sizes)
    # Inputs that two neighbouring windows share, so about the size of a halo.
    if windows.transposed:
        # 3, by 2: 2 - 1 = 1
        windows_of_input = -(-(windows.reach + 1) // windows.stride)
        overlap = max(windows_of_input - 1, 0) + 2 * windows.beside
    else:
        # kernel 3, stride 1: 2; kernel 2, stride 2: 0
        overlap = windows.reach + 1 - windows.stride
    size = max(overlap, 1) * max(row_bytes, 1)
    return lambda ranks: size


@lru_cache(maxsize=4096)
def _needs_halo(windows: Windows) -> bool:
    """Tell whether shards read each other under any sharding; test shards of one input each."""
    single = DimSharding((0,), (windows.length,), (1,) * windows.length)
    return _reads_others(windows, single)


def _reads_others(windows: Windows, sharding: DimSharding) -> bool:
    """Tell whether any shard reads inputs that the shard does not hold."""
    reads = map(windows.clipped, _wanted(windows, sharding))
    pairs = zip(spans(sharding.sizes), reads, strict=True)
    for (first, last), (start, stop) in pairs:
        reaches_out = start < first or last < stop
        if start < stop and reaches_out:
            return True
    return False


def _wanted(windows: Windows, sharding: DimSharding) -> list[Interval]:
    """Return the range that each shard's windows read; an empty range if a shard has no windows."""
    outputs_of_shards = spans(windows(sharding).sizes)
    wanted = []
    for (place, _), outputs in zip(spans(sharding.sizes), outputs_of_shards, strict=True):
        first, last = outputs
        # -1:5, 3:9
        wanted.append(windows.reads(outputs) if first < last else (place, place))
    return wanted


class Halos:
    """The halos of a shard of an input along all sharded dims along which windows run."""

    def __init__(self, spec: Spec, windows: Mapping[int, Windows]) -> None:
        # By dim: the exchange that fetches the inputs of this rank's windows, and returns the
        # gradient of these inputs.
        self.exchanges: dict[int, Relocation] = {}
        # Outputs missing at the start and at the end because the operator reads only the local
        # window; negative where it computes too many.
        self._widths: dict[int, tuple[int, int]] = {}
        # The sizes of the shard with its halos and with padding beyond the ends of the input, and
        # its start.
        self.shape = [*spec.local_shape]
        self.first = [0] * spec.ndim
        for dim, along in windows.items():
            if not spec.dim_shardings[dim].axes:
                continue
            sharding = spec.dim_sharding(dim)
            places = [(start,) for start in sharding.offsets]
            wanted = _wanted(along, sharding)
            moves = _reads_others(along, sharding)
            exchange = Relocation(spec, dim, places, wanted, moves=moves)
            begin, end = along(sharding).interval_of(exchange.index)
            # kernel 3, padding 1, outputs 0:4: rows -1:5
            first, last = exchange.wanted
            start = begin
            stop = end
            if along.transposed:
                # inputs 0:3 to -1:6
                start, stop = along.reached((first, last))
            self.exchanges[dim] = exchange
            # of 0:4, -1:6: (-1, -2)
            self._widths[dim] = (start - begin, end - stop)
            # rows -1:5: from -1, 6 of them
            self.first[dim] = first
            self.shape[dim] = last - first

    def __bool__(self) -> bool:
        return bool(self.exchanges)

    def unpadded(self, call: OpCall, count: int) -> dict[str, list[int]]:
        """Return the paddings of `call` for its last `count` dims, 0 along the dims of these halos.

        The shard itself is padded along the dims of the halos.
        """
        if not self.exchanges:
            return {}
        spatial = len(self.shape) - count
        paddings: dict[str, list[int]] = {}
        for name in call.bound:
            if name in ("padding", "output_padding"):
                paddings[name] = per_dim(call, name, count)
                for dim in self.exchanges:
                    # dim 3 of 4, the last 2: padding[1]
                    paddings[name][dim - spatial] = 0
        return paddings

    def fetch(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Return this rank's shard with border rows of other ranks; `fill` beyond the ends."""
        for exchange in self.exchanges.values():
            x = exchange.forwards(x, fill)
        return x

    def return_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this rank's shard, given the gradient of the result of `fetch`."""
        for exchange in reversed(self.exchanges.values()):
            gradient = exchange.backwards(gradient)
        return gradient

    def cropped(self, outputs: Tensor) -> Tensor:
        """Return this rank's outputs, given the operator's outputs for the result of `fetch`."""
        return _pad(outputs, self._widths)

    def uncropped(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the operator's outputs, given the gradient of this rank's outputs.

        The operator's outputs are its outputs for the result of `fetch`.
        """
        return _pad(gradient, self._widths, sign=-1)


def _pad(
    x: Tensor, widths: Mapping[int, tuple[int, int]], fill: float = 0.0, sign: int = 1
) -> Tensor:
    """Return `x` padded by `widths` at the ends of dims; cropped where a width is negative.

    The widths are multiplied by `sign`.
    """
    # torch begins with the last
    pad = []
    for dim in reversed(range(x.ndim)):
        pad += [sign * n for n in widths.get(dim, (0, 0))]
    return torch.constant_pad_nd(x, pad, fill) if any(pad) else x
