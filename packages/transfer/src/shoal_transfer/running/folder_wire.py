"""Messages through files of a folder that all members see: shared memory, or a file system."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import TransferError
from ..manifest.describe import FILE_DTYPES, read_header

# torch.float32 -> "F32"
_NAME_OF_DTYPE = {getattr(torch, dtype): name for name, dtype in FILE_DTYPES.items()}
_ELEMENTS = "elements"
# Seconds between two checks whether a file exists. The pause doubles after each check, but is at
# most the longest one.
_FIRST_PAUSE = 0.0001
_LONGEST_PAUSE = 0.05


class FolderWire:
    """Messages as files: between processes that share no process group.

    A folder in /dev/shm is memory that the processes of one host share; a folder of a shared file
    system joins hosts. A message is a safetensors file with one tensor, "elements". The file is
    written under another name and then renamed, so that it is complete when it appears. The
    receiver removes it.

    Values of `gather` are pickled. Anybody who can write to the folder can therefore run code in
    the members.

    Args:
        folder: the folder, which is made if it does not exist. Each `WeightTransfer`
            needs a folder of its own.
        member: number of this process among the members: ranks of the source in order, then ranks
            of the target. With 2 source ranks, target rank 0 is member 2.
        size: number of members.
        timeout: seconds after which a message counts as lost.

    Attributes:
        timeout: the seconds; may be changed between messages.

    Raises:
        TransferError: the folder has messages of an earlier run of this member.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as home:
        ...     FolderWire(home, 0, 1).gather("value")
        ['value']
    """

    def __init__(
        self, folder: str | PathLike[str], member: int, size: int, *, timeout: float = 600.0
    ) -> None:
        self.member = member
        self.size = size
        self.timeout = timeout
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        # number of exchanges and gathers so far, equal on all members; part of the names of files
        self._round = 0
        # messages from this member, see `_path`
        old = sorted(self._folder.glob(f"*-{member}-*"))
        if old:
            raise TransferError(f"{old[0]} was written by an earlier run; use a new folder")

    def exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> None:
        """Exchange by one file per pair of members."""
        self._round += 1
        for other, flat in enumerate(sends):
            if other != self.member and flat.numel():
                self._write(self._path(self.member, other), _as_file(flat))
        receives[self.member].copy_(sends[self.member])
        for other, flat in enumerate(receives):
            if other != self.member and flat.numel():
                self._read_elements(self._path(other, self.member), flat)

    def gather(self, value: Any) -> list[Any]:
        """Gather pickled values."""
        self._round += 1
        others = [other for other in range(self.size) if other != self.member]
        for other in others:
            self._write(self._path(self.member, other), [pickle.dumps(value)])
        values: list[Any] = [value] * self.size
        for other in others:
            path = self._path(other, self.member)
            self._wait_for(path)
            values[other] = pickle.loads(path.read_bytes())
            path.unlink()
        return values

    def _path(self, sender: int, receiver: int) -> Path:
        # for example 00000012-0-3
        return self._folder / f"{self._round:08d}-{sender}-{receiver}"

    def _write(self, path: Path, parts: Sequence[bytes | memoryview]) -> None:
        unfinished = path.with_suffix(".unfinished")
        with open(unfinished, "wb") as file:
            file.writelines(parts)
        os.replace(unfinished, path)

    def _read_elements(self, path: Path, flat: Tensor) -> None:
        self._wait_for(path)
        count = read_header(path)[_ELEMENTS]["shape"][0]
        if count != flat.numel():
            raise TransferError(f"{path} has {count} elements, but the plan has {flat.numel()}")
        size = path.stat().st_size
        mapped = torch.from_file(str(path), size=size, dtype=torch.uint8)
        # The data comes last in the file, after the header.
        data = mapped[size - flat.nbytes :]
        # Memory that is viewed as wider elements must begin at a multiple of their size, as a clone
        # does.
        flat.copy_(data.clone().view(flat.dtype))
        path.unlink()

    def _wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + self.timeout
        pause = _FIRST_PAUSE
        while not path.exists():
            if time.monotonic() > deadline:
                raise TransferError(
                    f"{path} did not appear within {self.timeout} s; its sender may have died"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _as_file(flat: Tensor) -> list[bytes | memoryview]:
    """Return the header and the data of a safetensors file with one tensor."""
    if flat.dtype not in _NAME_OF_DTYPE:
        raise TransferError(f"safetensors files cannot store {flat.dtype}")
    data: Any = flat.detach().cpu().contiguous().view(torch.uint8).numpy()
    value = {
        "dtype": _NAME_OF_DTYPE[flat.dtype],
        "shape": [flat.numel()],
        "data_offsets": [0, flat.nbytes],
    }
    text = json.dumps({_ELEMENTS: value}).encode()
    # the data begins at a multiple of 8
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, memoryview(data)]
