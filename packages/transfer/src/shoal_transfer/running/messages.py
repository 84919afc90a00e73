"""Messages between two members: packed elements, digests, and deltas against the last message.

`Outgoing` packs blocks of memory into one flat tensor, and `Incoming` writes them to memory.
Digests show whether the elements that arrived are those that were sent. A delta has only the
elements whose bits have changed since the last message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shoal_mesh.internal import pack_blocks, parts_like, unpack_blocks

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INDEX = torch.int32
# words of a digest that are read at a time: with their factors they fit into a cache
_CHUNK = 2**17
# odd, so that a multiplication modulo 2**64 loses nothing; from the golden ratio
_MIX = -7046029254386353131


def as_integers(flat: Tensor) -> Tensor:
    """Return the bits of a flat tensor as integers of the same size, two for 16 bytes.

    Example:
        >>> as_integers(torch.tensor([1.0], dtype=torch.bfloat16))
        tensor([16256], dtype=torch.int16)
    """
    return flat.view(_INTEGERS[min(flat.dtype.itemsize, 8)])


def digest_of(flat: Tensor) -> int:
    """Return a digest of the bits and the order of elements, computed on their device.

    Different digests show elements that are wrong, missing or exchanged. The digest does not
    protect against messages that somebody has made to have the same digest.

    Example:
        >>> digest_of(torch.tensor([1.0, 2.0])) == digest_of(torch.tensor([2.0, 1.0]))
        False
    """
    words = _as_words(flat)
    factors = _factors(flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].long()
        of_chunk = factors[: chunk.numel()]
        # int64 wraps around, so both have the same result; `dot` is faster but exists on CPUs only
        is_on_cpu = flat.device.type == "cpu"
        value = torch.dot(chunk, of_chunk) if is_on_cpu else (chunk * of_chunk).sum()
        total = total * _MIX + value
    return int(total)


@cache
def _factors(device: torch.device) -> Tensor:
    """Return an odd factor for each word of a chunk, the same in every process."""
    # The shifts bring high bits into the low ones, which products do not do.
    places = torch.arange(1, _CHUNK + 1)
    mixed = (places * _MIX) ^ (places << 32)
    mixed = (mixed * _MIX) ^ (mixed >> 29)
    return ((mixed * _MIX) | 1).to(device)


def _as_words(flat: Tensor) -> Tensor:
    """Return the bits as words of 8 bytes, or as single elements if 8 does not divide the bytes."""
    bits = as_integers(flat.contiguous())
    if bits.nbytes % 8:
        return bits
    if bits.storage_offset() * bits.itemsize % 8:
        bits = bits.clone()
    return bits.view(torch.int64)


@dataclass(slots=True)
class Outgoing:
    """The blocks that this rank sends to one member in one exchange.

    Attributes:
        member: the receiver.
        blocks: views of the memory that is read.
        dtype: dtype of the elements on the wire.
        last: the elements that were sent last; None without deltas.
    """

    member: int
    blocks: Sequence[Tensor]
    dtype: torch.dtype
    last: Tensor | None = None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(block.numel() for block in self.blocks)

    def pack(self, flat: Tensor) -> None:
        """Write the elements, cast to the dtype of the wire, to a flat tensor."""
        for part, block in zip(parts_like(flat, self.blocks), self.blocks, strict=True):
            part.copy_(block)


@dataclass(slots=True)
class Incoming:
    """The blocks that this rank receives from one member in one exchange.

    Attributes:
        member: the sender.
        blocks: views of the memory that is written.
        dtype: dtype of the elements.
    """

    member: int
    blocks: Sequence[Tensor]
    dtype: torch.dtype

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(block.numel() for block in self.blocks)

    def read(self) -> Tensor:
        """Return the elements that the memory holds now."""
        return pack_blocks(self.blocks)

    def write(self, flat: Tensor) -> None:
        """Write the elements to the memory."""
        unpack_blocks(flat, self.blocks)


def encode_delta(flat: Tensor, last: Tensor) -> Tensor | None:
    """Return the elements whose bits changed, as bytes; None if all elements are fewer bytes.

    The bytes are the indices, 4 bytes each, and then the elements.

    Args:
        flat: (n,), the elements to send.
        last: (n,), the elements as the receiver has them.

    Example:
        >>> encode_delta(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 9, 4])).tolist()
        [2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]
    """
    # as integers, because torch does not index all dtypes
    bits = _bits_of(flat)
    changed = (bits != _bits_of(last)).any(dim=1).nonzero().reshape(-1)
    itemsize = flat.dtype.itemsize
    fits = flat.numel() < 2**31
    if not fits or changed.numel() * (4 + itemsize) >= flat.numel() * itemsize:
        return None
    indices = changed.to(_INDEX).view(torch.uint8)
    return torch.cat([indices, bits[changed].reshape(-1).view(torch.uint8)])


def apply_delta(encoded: Tensor, base: Tensor) -> Tensor:
    """Return the elements after the changes that `encode_delta` has written.

    Args:
        encoded: bytes.
        base: (n,), the elements before; changed in place.

    Example:
        >>> encoded = encode_delta(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 9, 4]))
        >>> apply_delta(encoded, torch.tensor([1, 2, 9, 4]))
        tensor([1, 2, 3, 4])
    """
    count = encoded.numel() // (4 + base.dtype.itemsize)
    # cloned, because memory that is viewed as wider elements must begin at a multiple of their size
    indices = encoded[: 4 * count].clone().view(_INDEX)
    bits = _bits_of(base)
    values = encoded[4 * count :].clone().view(base.dtype)
    bits[indices.long()] = _bits_of(values)
    return base


def _bits_of(flat: Tensor) -> Tensor:
    """Return the bits of each element, (n, integers of an element)."""
    return as_integers(flat).view(flat.numel(), max(flat.itemsize // 8, 1))
