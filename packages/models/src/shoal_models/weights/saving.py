"""Writing of a model's shards into safetensors files, shard by shard.

No parameter is gathered. Files have their final size before the first byte of data, and a box of a
tensor is written at its place in a file: ranks only send each other names, shapes and boxes.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shoal_dtensor.internal import Box, in_groups, takes, volume
from shoal_mesh.internal import agree
from shoal_tp_styles.internal import progress
from shoal_transfer.internal import own_rank, weights_of

from ..errors import CheckpointError

T = TypeVar("T")

# of Linux
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Saved(NamedTuple):
    """The result of saving.

    Attributes:
        files: names of the files with tensors, in the directory.
        bytes_written: bytes of tensors that this rank wrote.

    Example:
        >>> Saved(files=("model.safetensors",), bytes_written=36).bytes_written
        36
    """

    files: tuple[str, ...]
    bytes_written: int


@dataclass(slots=True)
class StoredTensor:
    """An entry of the files: its boxes, their ranks and writers, and its place."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    holders: dict[Box, list[int]] = field(default_factory=dict)
    writers: dict[Box, int] = field(default_factory=dict)
    file: str = ""
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@takes(module=nn.Module)
def save_sharded(
    module: nn.Module, directory: str | PathLike[str], *, max_file_bytes: int = 5 * 2**30
) -> Saved:
    """Write a model's parameters and persistent buffers as safetensors.

    The names are the names of the plain model.

    All ranks of the world call this function, with a directory that all of them can access.
    `load_sharded` reads the files on any number of ranks, and so does plain `from_pretrained` of
    transformers, bit for bit: a model with a configuration gets its `config.json` and
    `generation_config.json` too. Packed and split parameters are written as fused parameters,
    shared parameters once. A rank needs no memory beyond one contiguous copy of its shard of one
    parameter.

    Files are written beside the directory, which is then exchanged in one step (or in two renames
    if the file system does not support this); an interruption leaves the old directory. Other files
    of the directory are kept.

    Args:
        module: parallel or plain.
        directory: made where it does not exist.
        max_file_bytes: bytes of tensors in one file; a larger tensor has a file of its own.

    Returns:
        The names of the files, and how many bytes this rank wrote.

    Raises:
        CheckpointError: on all ranks, if one of them cannot write; the directory is as it was.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as home:
        ...     save_sharded(nn.Linear(2, 3), f"{home}/linear")
        Saved(files=('model.safetensors',), bytes_written=36)
    """
    target = Path(directory).resolve()
    boxes = dict[str, list[tuple[Box, Tensor]]]()
    stage = target.with_name(f".{target.name}.saving")
    failed = "save_sharded: nothing is replaced, cannot"
    described = agree(
        lambda: _describe(module, boxes), None, CheckpointError, f"{failed} describe its tensors"
    )
    tensors = _merged(described)
    files = _pack(tensors, max_file_bytes)
    try:
        on_first(f"{failed} prepare the files", lambda: _prepare(module, stage, tensors, files))
        unwritten = f"{failed} write to {stage} (is it visible on all ranks?)"
        mine = agree(lambda: _write(boxes, tensors, stage), None, CheckpointError, unwritten)
        on_first(f"{failed} replace {target}", lambda: _publish(stage, target))
    finally:
        if own_rank() == 0:
            shutil.rmtree(stage, ignore_errors=True)
    return Saved(tuple(files), mine[own_rank()])


def on_first(failed: str, step: Callable[[], T]) -> T | None:
    """Run a step on rank 0; return its result on every rank.

    If the step fails, all ranks raise a CheckpointError whose message begins with `failed`.
    """
    return agree(lambda: step() if own_rank() == 0 else None, None, CheckpointError, failed)[0]


def _describe(module: nn.Module, shards: dict[str, list[tuple[Box, Tensor]]]) -> dict[str, Any]:
    """Describe dtype, shape and this rank's boxes of every entry.

    The tensors of the boxes are added to `shards`.
    """
    described: dict[str, Any] = {}
    for weight in weights_of(module):
        name = weight.name
        if weight.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name!r} is {weight.dtype}, which safetensors files do not hold"
            )
        mine = shards.setdefault(name, [])
        for held in weight.boxes():
            if held.memory.is_meta:
                raise CheckpointError(
                    f"{name!r} is on the meta device; load or initialize it first"
                )
            if held.view.numel() or not prod(weight.shape):
                mine.append((held.box, held.view))
        described[name] = (weight.dtype, weight.shape, [box for box, _ in mine])
    return described


def _merged(described: list[dict[str, Any]]) -> dict[str, StoredTensor]:
    """Merge the entries of all ranks, with one writer per box; equal on every rank."""
    tensors: dict[str, StoredTensor] = {}
    for rank, entries in enumerate(described):
        for name, (dtype, shape, boxes) in entries.items():
            tensor = tensors.setdefault(name, StoredTensor(dtype, shape))
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                raise CheckpointError(
                    f"rank {rank} has {name!r} as {dtype} {shape}, an earlier rank as "
                    f"{tensor.dtype} {tensor.shape}"
                )
            for box in boxes:
                tensor.holders.setdefault(box, []).append(rank)
    for number, (name, tensor) in enumerate(tensors.items()):  # entry 5, of ranks [0, 1]: 1 writes
        tensor.writers = {box: ranks[number % len(ranks)] for box, ranks in tensor.holders.items()}
        covered = sum(map(volume, tensor.holders))  # rows 0:2 and 2:3 of (3, 4): 8 + 4
        if covered != prod(tensor.shape):
            raise CheckpointError(
                f"the ranks hold {covered} of the {prod(tensor.shape)} elements of {name!r}; all "
                "ranks of its mesh make the call, with the same model"
            )
    return tensors


def _pack(tensors: dict[str, StoredTensor], limit: int) -> dict[str, bytes]:
    """Return the header of each file; set the file and the place of every entry.

    Entries of one file are ordered by size of element.
    """
    groups = in_groups(tensors, lambda name: tensors[name].nbytes, limit) or [[]]
    headers: dict[str, bytes] = {}
    for number, names in enumerate(groups, 1):
        file = (
            f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            if len(groups) > 1
            else "model.safetensors"
        )
        end = 0
        header = dict[str, Any](__metadata__={"format": "pt"})
        for name in sorted(names, key=lambda each: -tensors[each].dtype.itemsize):
            tensor = tensors[name]
            # (2, 3) and (3,) of float32: 0, 24, then 24, 36
            start = end
            end = end + tensor.nbytes
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": (start, end),
            }
            tensor.file = file
            tensor.start = start
        text = json.dumps(header).encode()
        # 61 bytes and 3 spaces: the data begins at 8 + 64
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        for name in names:
            # 8 for the length of the text, then the text
            tensors[name].start += len(headers[file])
    return headers


def _prepare(
    module: nn.Module, stage: Path, tensors: dict[str, StoredTensor], files: dict[str, bytes]
) -> None:
    """Make the directory beside the target: files of their final size, index, and configuration."""
    shutil.rmtree(stage, ignore_errors=True)  # of a save that was interrupted
    stage.mkdir(parents=True)
    for file, header in files.items():
        data = sum(tensor.nbytes for tensor in tensors.values() if tensor.file == file)
        with open(stage / file, "wb") as out:
            out.write(header)
            out.truncate(len(header) + data)
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: each.file for name, each in tensors.items()},
        }
        (stage / _INDEX).write_text(json.dumps(index, indent=2))
    model: Any = module
    if hasattr(getattr(model, "config", None), "save_pretrained"):  # of transformers
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)


def _write(
    shards: dict[str, list[tuple[Box, Tensor]]], tensors: dict[str, StoredTensor], stage: Path
) -> int:
    """Write the boxes that this rank writes; return their bytes."""
    rank = own_rank()
    written = 0
    with ExitStack() as stack:
        files: dict[str, int] = {}
        for name, boxes in progress(shards.items(), "saving parameters"):
            tensor = tensors[name]
            for box, shard in boxes:
                if tensor.writers[box] != rank:
                    continue
                if tensor.file not in files:
                    files[tensor.file] = stack.enter_context(
                        open(stage / tensor.file, "rb+", buffering=0)
                    ).fileno()
                written += _write_box(files[tensor.file], tensor, box, shard)
        for file in files.values():
            os.fsync(file)
    return written


def _write_box(file: int, tensor: StoredTensor, box: Box, shard: Tensor) -> int:
    """Write one box.

    A run of bytes is written for every combination of the dims before the last dim that is not
    full.
    """
    values: Any = shard.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(values)
    if not data.nbytes:
        return 0
    full = len(box)
    # columns 1:3 of (6, 4, 5): 3, then 2
    while full and box[full - 1] == (0, tensor.shape[full - 1]):
        full -= 1
    strides = [prod(tensor.shape[dim + 1 :]) * tensor.dtype.itemsize for dim in range(len(box))]
    outer = box[: max(full - 1, 0)]  # ((0, 6),) where columns are sharded
    run = data.nbytes // volume(outer)  # 6 * 2 * 5 of 4 bytes: 240 // 6 = 40
    base = tensor.start + (box[full - 1][0] * strides[full - 1] if full else 0)  # column 1: 1 * 20
    for number, indices in enumerate(product(*(range(*bounds) for bounds in outer))):
        # row 3: 3 * 80
        offset = base + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        rest = data[number * run : (number + 1) * run]
        while rest:  # a call may write less than it is given
            count = os.pwrite(file, rest, offset)
            rest, offset = rest[count:], offset + count
    return data.nbytes


def _publish(stage: Path, target: Path) -> None:
    """Put the new directory in the place of the old one, with the other files of the old one."""
    if not target.exists():
        stage.rename(target)
        return
    if not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; save_sharded takes a directory")
    # What of the old checkpoint has no place beside the new one.
    safetensors = "model-[0-9]*-of-[0-9]*.safetensors"
    pickled = "pytorch_model-[0-9]*-of-[0-9]*.bin"
    weights = shutil.ignore_patterns(
        "model.safetensors", safetensors, "pytorch_model.bin", pickled, "*.index.json"
    )
    shutil.copytree(target, stage, copy_function=_keep, ignore=weights, dirs_exist_ok=True)
    if not _exchange(stage, target):
        old = target.with_name(f".{target.name}.replaced")
        target.rename(old)
        stage.rename(target)
        old.rename(stage)  # which the caller removes


def _keep(source: str, new: str) -> None:
    if os.path.exists(new):
        return  # the new checkpoint's own
    try:
        os.link(source, new)
    except OSError:
        shutil.copy2(source, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False if system or file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    return (
        call is not None
        and call(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) == 0
    )
