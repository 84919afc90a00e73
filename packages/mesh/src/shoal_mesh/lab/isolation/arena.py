"""Memory in which ranks that are processes write the tensors of their calls for each other.

Each rank has a file in memory and writes to extents of whole pages in it. The other ranks map the
extents that they read. The parent process makes the files and holds them open. On Linux they have
no names, so nothing is left behind however a rank or the parent ends. An extent is free again when
all of its readers have read it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..scheduling.posted_calls import Meta

_PAGE = mmap.PAGESIZE
# A tensor begins at a multiple of this, the size of the largest element (complex128).
_ALIGNMENT = 16
# tensors of a call with at most so many bytes are sent through the socket
_MOST_INLINE = 1024
# a larger file is emptied when none of its extents is in use
_MOST_IDLE = 1 << 23


class Extent(NamedTuple):
    """Some bytes of a rank's file.

    Attributes:
        rank: the rank that owns the file.
        offset: the first byte.
        length: number of bytes.
    """

    rank: int
    offset: int
    length: int


class Packet(NamedTuple):
    """The tensors of a call, where other processes can read them.

    Attributes:
        metas: shapes and dtypes of the tensors.
        data: their bytes, or the part of a file that has them.
        first: the number of the first tensor among the tensors of the call.
    """

    metas: tuple[Meta, ...]
    data: bytes | Extent
    first: int = 0

    @property
    def length(self) -> int:
        """The number of bytes."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.length

    def tensor(self, number: int) -> Packet:
        """Return the packet of one of the tensors.

        Args:
            number: its number.
        """
        if number >= len(self.metas):
            return self
        starts, _ = _places(self.metas[: number + 1])
        start = starts[-1]
        meta = self.metas[number]
        size = meta.numel * meta.dtype.itemsize
        if isinstance(self.data, bytes):
            return Packet((meta,), self.data[start : start + size], number)
        extent = Extent(self.data.rank, self.data.offset + start, size)
        return Packet((meta,), extent, number)


class SharedFile(NamedTuple):
    """The file of a rank, held open by the parent.

    Attributes:
        descriptor: the descriptor of the parent.
        path: the path by which ranks open it.
    """

    descriptor: int
    path: str


def create_file(folder: str, rank: int) -> SharedFile:
    """Create the file of a rank; outside of Linux it has a name in a folder.

    Args:
        folder: the folder, which the parent removes.
        rank: the rank.
    """
    create = getattr(os, "memfd_create", None)
    if create is None:
        path = f"{folder}/arena{rank}"
        return SharedFile(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC), path)
    descriptor = create(f"shoal_lab_{rank}")
    return SharedFile(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")


class Arena:
    """The files of all ranks, seen by one rank.

    Args:
        rank: the rank.
        paths: the path of each rank's file.
    """

    def __init__(self, rank: int, paths: Sequence[str]) -> None:
        self._rank = rank
        self._paths = paths
        # rank -> descriptor of its file, once it was opened
        self._files: dict[int, int] = {}
        # first byte -> length of the extents in use in this rank's file
        self._used: dict[int, int] = {}
        # length of this rank's file
        self._end = 0

    def write(self, metas: tuple[Meta, ...], tensors: Sequence[Tensor]) -> Packet:
        """Write tensors where the other ranks can read them.

        Args:
            metas: their shapes and dtypes.
            tensors: the tensors.
        """
        starts, length = _places(metas)
        if length <= _MOST_INLINE:
            buffer = bytearray(length)
            if length:
                _fill(torch.frombuffer(buffer, dtype=torch.uint8), starts, tensors)
            return Packet(metas, bytes(buffer))
        extent = Extent(self._rank, self._allocate(length), length)
        with self._map_extent(extent) as memory:
            _fill(memory, starts, tensors)
        return Packet(metas, extent)

    @contextmanager
    def read(self, packet: Packet) -> Iterator[dict[int, Tensor]]:
        """Open a block in which the tensors of a packet can be read, by their numbers.

        Args:
            packet: the packet, of any rank.
        """
        starts, length = _places(packet.metas)
        if isinstance(packet.data, bytes):
            memory = torch.frombuffer(bytearray(packet.data or b"\0"), dtype=torch.uint8)
            yield _views(memory, starts, packet)
            return
        with self._map_extent(packet.data) as memory:
            yield _views(memory[:length], starts, packet)

    def free(self, offsets: Sequence[int]) -> None:
        """Free extents that all other ranks have read.

        Args:
            offsets: their first bytes.
        """
        for offset in offsets:
            del self._used[offset]
        if not self._used and self._end > _MOST_IDLE:
            os.ftruncate(self._file(self._rank), 0)
            self._end = 0

    def _allocate(self, length: int) -> int:
        """Return the first byte of the first gap between extents that is long enough."""
        pages = -(-length // _PAGE) * _PAGE
        position = 0
        for offset, used in sorted(self._used.items()):
            if offset - position >= pages:
                break
            position = offset + used
        self._used[position] = pages
        if position + pages > self._end:
            self._end = position + pages
            os.ftruncate(self._file(self._rank), self._end)
        return position

    @contextmanager
    def _map_extent(self, extent: Extent) -> Iterator[Tensor]:
        """Open a block in which the bytes of an extent are a tensor."""
        # a mapping begins with a page, so it has these bytes before the extent
        before = extent.offset % _PAGE
        if not extent.length:
            yield torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        length = before + extent.length
        memory = mmap.mmap(self._file(extent.rank), length, offset=extent.offset - before)
        # the mapping ends with the last tensor that refers to it
        yield torch.frombuffer(memory, dtype=torch.uint8)[before:]

    def _file(self, rank: int) -> int:
        """Return the descriptor of a rank's file."""
        descriptor = self._files.get(rank)
        if descriptor is None:
            descriptor = os.open(self._paths[rank], os.O_RDWR | os.O_CLOEXEC)
            self._files[rank] = descriptor
        return descriptor


def _places(metas: Sequence[Meta]) -> tuple[list[int], int]:
    """Return the first byte of each tensor in a packet, and the length of the packet."""
    starts = []
    position = 0
    for meta in metas:
        starts.append(position)
        size = meta.numel * meta.dtype.itemsize
        position += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, position


def _fill(memory: Tensor, starts: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Copy tensors to their places in memory."""
    for start, tensor in zip(starts, tensors, strict=True):
        if tensor.numel():
            size = tensor.numel() * tensor.element_size()
            place = memory[start : start + size].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)


def _views(memory: Tensor, starts: Sequence[int], packet: Packet) -> dict[int, Tensor]:
    """Return the tensors of a packet as views of memory, by their numbers in the call."""
    views = {}
    for number, (start, meta) in enumerate(zip(starts, packet.metas, strict=True), packet.first):
        size = meta.numel * meta.dtype.itemsize
        if size:
            views[number] = memory[start : start + size].view(meta.dtype).view(meta.shape)
        else:
            views[number] = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
    return views
