"""Exchange of ranges of a sharded dim between ranks, for example of the halos of windows.

An operator like `roll` or `repeat` puts every shard of a dim at one or more places of its result.
These places, and the ranges of the result that the ranks want, determine the blocks that each rank
sends and receives. One all-to-all sends all blocks, without padding. For example, `roll` by 1 of 6
elements on 2 ranks puts the shard 0:3 at 1 and the shard 3:6 at 4. The end of the second shard is
outside of the result 0:6, and returns at its start. Therefore each shard is also put 6 elements
earlier, at -5 and at -2. Only the parts in a range that a rank wants are sent:

    rank 0: a b c  ->  f a b        sends c to rank 1
    rank 1: d e f  ->  c d e        sends f to rank 0

Halos are the border rows of other ranks that windows along a sharded dim read. A convolution of 8
rows with kernel 3 and padding 1, sharded as 4 + 4 on 2 ranks (`-` is padding):

    rank 0 holds  0 1 2 3  computes outputs 0..3, reads  - 0 1 2 3 4  row 4 is its halo, from rank 1
    rank 1 holds  4 5 6 7  computes outputs 4..7, reads  3 4 5 6 7 -  row 3 is its halo, from rank 0

In a transposed convolution with stride 2, kernel 3 and padding 1, input `i` adds to the outputs
2i-1, 2i and 2i+1. With 4 inputs and 7 outputs:

    rank 0 holds  0 1  computes outputs 0..3, reads  0 1 2  input 2 adds to output 3
    rank 1 holds  2 3  computes outputs 4..6, reads  2 3

Rank 0 calls the kernel without padding on the inputs 0 1 2. The kernel returns the outputs -1..5:
input 0 adds to -1, and input 2 adds to 5. They are cropped to 0..3. Outputs that the kernel does
not compute are filled with zeros. The gradient of a halo is sent back and added to the gradient of
the rank that holds the rows.

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
    """Elements that a rank sends to another: their places in the shard and in the wanted range."""

    in_shard: int
    in_wanted: int
    length: int


def _blocks(places: Sequence[int], size: int, wanted: Interval) -> list[RelocatedBlock]:
    """Return the blocks of a shard that fill parts of the range `wanted` of a result.

    Args:
        places: the positions in the result at which the shard begins.
        size: the number of elements of the shard.
        wanted: the range of the result.
    """
    first, last = wanted
    blocks = []
    for place in places:
        # Example: the shard 3:6, put at 4, has the part 4:6 of the wanted range 3:6.
        start = max(place, first)
        stop = min(place + size, last)
        if start < stop:
            # In the example, 2 elements from position 0 of the shard, at position 1 of the range.
            blocks.append(RelocatedBlock(start - place, start - first, stop - start))
    return blocks


class Relocation:
    """The exchange from the shards of a dim to the ranges that ranks want.

    Every rank along the axes of the dim takes part. Every shard is put at one or more places of the
    result, and each rank wants a range of the result. The ranges may overlap and reach over the
    ends of the dim. If nothing `moves`, every rank already has the elements of its range, and no
    collective is started.

    Args:
        spec: the spec of the tensor with the shards.
        dim: the sharded dim.
        places: for each shard, the positions in the result of its first element.
        wanted: for each shard, the range of the result that its rank wants.
        moves: whether elements move between ranks.
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
        # Example: in the roll of abc | def by 1, rank 0 wants f a b and sends c to rank 1.
        self.wanted: Interval = wanted[self.index]
        self.sends = [_blocks(own_places, self.size, range_of_rank) for range_of_rank in wanted]
        self.receives: list[list[RelocatedBlock]] = []
        for places_of_rank, size in zip(places, sizes, strict=True):
            self.receives.append(_blocks(places_of_rank, size, self.wanted))
        # True if the arriving blocks fill the whole range. `forwards` then does not write the fill
        # value to the range first. A dtype without a zero, such as float8_e8m0fnu, cannot hold it.
        start, stop = self.wanted
        arriving = sum(block.length for blocks in self.receives for block in blocks)
        self._has_no_gap = arriving == stop - start
        # If nothing moves, how much larger the range is than the shard at its start and end.
        # Example: the shard 4:8 and the range 3:9 give (1, 1), the range 5:7 gives (-1, -1).
        # Only `Halos` sets `moves` to False. It puts each shard at one place.
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
        self._exchange_blocks(sent, arriving, x, result)
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
        self._exchange_blocks(sent, arriving, gradient, total)
        for blocks, summands in zip(self.sends, arriving, strict=True):
            # In `arriving`, `_exchange_blocks` has appended an empty tensor to this rank's own
            # list. It does not have a block, so `zip` drops it.
            for block, summand in zip(blocks, summands, strict=False):
                total.narrow(self.dim, block.in_shard, block.length).add_(summand)
        return total

    def _in_wanted(self, tensor: Tensor, blocks: Sequence[RelocatedBlock]) -> list[Tensor]:
        """Return the views of some blocks in a tensor with the wanted range."""
        return [tensor.narrow(self.dim, block.in_wanted, block.length) for block in blocks]

    def _exchange_blocks(
        self, blocks: list[list[Tensor]], out: list[list[Tensor]], source: Tensor, result: Tensor
    ) -> None:
        """Send each rank its list of blocks; receive each rank's blocks in the tensors of `out`.

        An empty tensor is appended to this rank's own list in `blocks`, and in `out`.
        """
        # A rank that sends and receives nothing needs a tensor with the dtype.
        blocks[self.index].append(source.narrow(self.dim, 0, 0))
        out[self.index].append(result.narrow(self.dim, 0, 0))
        axes = self.spec.dim_sharding(self.dim).axes
        all_to_all_blocks(blocks, self.spec.mesh.comm(axes), out)

    def _shape(self, like: Tensor, length: int) -> list[int]:
        """Return the shape of a tensor with another length of the exchanged dim."""
        return [length if d == self.dim else n for d, n in enumerate(like.shape)]


# --- windows and halos ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Windows(ShardingMap):
    """The inputs that each output of an operator with windows reads along a dim.

    A call with the sharding of the inputs returns the sharding of the outputs: each rank computes
    the outputs of its shard of inputs.

    Output `o` reads inputs `o * stride - padding + dilation * j` for `j` below `kernel`; a shard
    computes the outputs whose windows have their middle in it. In a transposed operator, input `i`
    adds to the outputs `i * stride - padding + dilation * j`; a shard of n inputs computes
    `n * stride` outputs, and the last shard also computes the remaining outputs.

    Example:
        >>> sharding = DimSharding(axes=(0,), axis_sizes=(2,), sizes=(5, 3))
        >>> Windows(8, 8, kernel=3, padding=1)(sharding).sizes
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
    # whether each input has a window of outputs
    transposed: bool = False
    # An output reads the inputs whose windows it is in. It also reads this number of inputs on
    # either side of them. The number is 0 except for interpolation.
    beside: int = 0

    @property
    def reach(self) -> int:
        """The distance from the first to the last element of a window."""
        return self.dilation * (self.kernel - 1)

    def __call__(self, sharding: DimSharding) -> DimSharding:
        # `resharded` calls `_before` with the first input of each shard, for its first output.
        # Example: 8 inputs sharded as 5 + 3, kernel 3, padding 1. The outputs begin at 0 and 5.
        return sharding.resharded(self._outputs_before, self.outputs)

    def _outputs_before(self, position: int) -> int:
        """Return the number of outputs that belong to the inputs before `position`."""
        if position >= self.length:
            return self.outputs
        if position == 0:
            return 0
        if self.transposed:
            outputs = position * self.stride
        else:
            # Example: for kernel 3 and padding 1, the middle of the first window is 1 - 1 = 0.
            middle = self.reach // 2 - self.padding
            # `-(-a // b)` is a / b rounded up. In the example, with stride 2, the windows have
            # their middle at 0, 2, 4, 6: ceil(5 / 2) = 3 of them are before input 5.
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
        # The window of input `i` begins at output `i * stride - padding` and ends `reach` outputs
        # later. Therefore the first input whose window has `start` is a quotient rounded up. The
        # last input whose window has `stop - 1` is a quotient rounded down.
        before = start + self.padding - self.reach
        first = -(-before // self.stride) - self.beside
        last_output = stop - 1 + self.padding
        last = last_output // self.stride + 1 + self.beside
        # Example: for kernel 3, stride 2 and padding 1, the outputs 0:4 read the inputs 0:3.
        return self.clip_to_input((first, last))

    def clip_to_input(self, inputs: Interval) -> Interval:
        """Return the part of a range that is inside the input."""
        start = min(max(inputs[0], 0), self.length)
        return start, max(start, min(inputs[1], self.length))

    def reached_outputs(self, inputs: Interval) -> Interval:
        """Return the range of outputs that a range of inputs reaches, for a transposed operator."""
        first, last = inputs
        # Example: for stride 2, kernel 3 and padding 1, the inputs 0:3 reach the outputs from -1 to
        # -1 + 2 * 2 + 3 = 6.
        start = first * self.stride - self.padding
        steps = last - first - 1
        start_of_last = start + steps * self.stride
        return start, start_of_last + self.reach + 1


def per_dim(call: OpCall, name: str, count: int) -> list[int]:
    """Return an argument as a list with one number for each of `count` spatial dims."""
    # Only a dilation may be missing; 1 is its default.
    value = call.get(name, [1])
    # Example: [2] for 3 dims is [2, 2, 2].
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
        Windows of 1 do not need halos. Windows of 2 that do not overlap do: if 4 inputs are sharded
        as 3 + 1, the second window needs an input of each rank.

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
    # The number of inputs that two adjacent windows share, which is about the size of a halo.
    if windows.transposed:
        # Example: for kernel 3 and stride 2, an output is in the windows of at most ceil(3 / 2) = 2
        # inputs. Adjacent outputs share 2 - 1 = 1 input.
        most_inputs = -(-(windows.reach + 1) // windows.stride)
        overlap = max(most_inputs - 1, 0) + 2 * windows.beside
    else:
        # Example: kernel 3 and stride 1 give 2; kernel 2 and stride 2 give 0.
        overlap = windows.reach + 1 - windows.stride
    size = max(overlap, 1) * max(row_bytes, 1)
    # A `Traffic` is a function of the number of ranks. The size of a halo does not depend on it.
    return lambda ranks: size


@lru_cache(maxsize=4096)
def _needs_halo(windows: Windows) -> bool:
    """Tell whether some sharding of the inputs needs halos.

    The test is made with the smallest shards, of one input each.
    """
    single = DimSharding((0,), (windows.length,), (1,) * windows.length)
    return _reads_others(windows, single)


def _reads_others(windows: Windows, sharding: DimSharding) -> bool:
    """Tell whether any shard reads inputs that the shard does not hold."""
    reads = map(windows.clip_to_input, _ranges_read(windows, sharding))
    pairs = zip(spans(sharding.sizes), reads, strict=True)
    for (first, last), (start, stop) in pairs:
        reaches_out = start < first or last < stop
        if start < stop and reaches_out:
            return True
    return False


def _ranges_read(windows: Windows, sharding: DimSharding) -> list[Interval]:
    """Return the range that each shard's windows read; an empty range if a shard has no windows."""
    outputs_of_shards = spans(windows(sharding).sizes)
    wanted = []
    for (place, _), outputs in zip(spans(sharding.sizes), outputs_of_shards, strict=True):
        first, last = outputs
        # Example: -1:5 and 3:9 for the convolution in this module's docstring.
        wanted.append(windows.reads(outputs) if first < last else (place, place))
    return wanted


class Halos:
    """The halos of a shard of an input, along every sharded dim that has windows."""

    def __init__(self, spec: Spec, windows: Mapping[int, Windows]) -> None:
        # For each dim, the exchange that fetches the inputs of this rank's windows, and sends back
        # the gradient of these inputs.
        self.exchanges: dict[int, Relocation] = {}
        # The number of outputs that the operator, run on the shard with its halos, lacks at the
        # start and at the end. It is negative where the operator computes too many.
        self._widths: dict[int, tuple[int, int]] = {}
        # The sizes and the start of the shard with its halos, which include padding beyond the ends
        # of the input.
        self.shape = [*spec.local_shape]
        self.first = [0] * spec.ndim
        for dim, windows_of_dim in windows.items():
            if not spec.dim_shardings[dim].axes:
                continue
            sharding = spec.dim_sharding(dim)
            places = [(start,) for start in sharding.offsets]
            wanted = _ranges_read(windows_of_dim, sharding)
            moves = _reads_others(windows_of_dim, sharding)
            exchange = Relocation(spec, dim, places, wanted, moves=moves)
            # The outputs of this rank, the inputs that they read, and the outputs that the operator
            # computes from these inputs.
            own_start, own_stop = windows_of_dim(sharding).interval_of(exchange.index)
            # Example: for kernel 3 and padding 1, the outputs 0:4 read the rows -1:5.
            input_start, input_stop = exchange.wanted
            computed_start = own_start
            computed_stop = own_stop
            if windows_of_dim.transposed:
                # Example: the inputs 0:3 reach the outputs -1:6.
                computed_start, computed_stop = windows_of_dim.reached_outputs(
                    (input_start, input_stop)
                )
            self.exchanges[dim] = exchange
            # Example: (-1, -2) if -1:6 is computed and 0:4 is wanted.
            self._widths[dim] = (computed_start - own_start, own_stop - computed_stop)
            # Example: the rows -1:5 are 6 rows from -1 on.
            self.first[dim] = input_start
            self.shape[dim] = input_stop - input_start

    def __bool__(self) -> bool:
        return bool(self.exchanges)

    def remaining_paddings(self, call: OpCall, count: int) -> dict[str, list[int]]:
        """Return the paddings of `call` for its last `count` dims, 0 along the dims of these halos.

        The shard itself is padded along the dims of the halos.
        """
        if not self.exchanges:
            return {}
        spatial = len(self.shape) - count
        paddings: dict[str, list[int]] = {}
        for name in call.arguments:
            if name in ("padding", "output_padding"):
                paddings[name] = per_dim(call, name, count)
                for dim in self.exchanges:
                    # Example: dim 3 of 4 dims, of which 2 are spatial, has the entry 1.
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

    def crop_outputs(self, outputs: Tensor) -> Tensor:
        """Return this rank's outputs, given the operator's outputs for the result of `fetch`."""
        return _pad(outputs, self._widths)

    def pad_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the operator's outputs for the result of `fetch`.

        `gradient` is the gradient of this rank's outputs.
        """
        return _pad(gradient, self._widths, sign=-1)


def _pad(
    x: Tensor, widths: Mapping[int, tuple[int, int]], fill: float = 0.0, sign: int = 1
) -> Tensor:
    """Return `x` padded by `widths` at the ends of dims; cropped where a width is negative.

    The widths are multiplied by `sign`.
    """
    # torch lists the widths from the last dim on.
    pad = []
    for dim in reversed(range(x.ndim)):
        pad += [sign * n for n in widths.get(dim, (0, 0))]
    return torch.constant_pad_nd(x, pad, fill) if any(pad) else x
