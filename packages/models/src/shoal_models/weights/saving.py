"""`save_sharded`: write a model's shards into safetensors files, without gathering parameters.

A box is a range of indices per dim of a tensor; a rank's shard is one or several boxes. The ranks
send each other only names, dtypes, shapes and boxes, and compute from these the place of every box
in the files. Rank 0 makes files of their final size, and then each rank writes its boxes into them.
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

from shoal_dtensor.internal import Box, check_types, in_groups, volume
from shoal_mesh.internal import agree
from shoal_tp_styles.internal import progress
from shoal_transfer.internal import own_rank, weights_of

from ..errors import CheckpointError

T = TypeVar("T")

# Constants of Linux for `renameat2`.
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


class DescribedEntry(NamedTuple):
    """An entry of the files, as one rank describes it to the others.

    Attributes:
        dtype: the dtype of the entry.
        shape: the shape of the entry in the files.
        boxes: the boxes of the entry that the rank holds.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: list[Box]


# This rank's boxes of each entry, with their values.
LocalBoxes = dict[str, list[tuple[Box, Tensor]]]


@dataclass(slots=True)
class StoredTensor:
    """An entry of the files: its boxes, the ranks that hold and write them, and its place.

    Attributes:
        dtype: the dtype of the entry.
        shape: the shape of the entry in the files.
        holders: box -> the ranks that hold it.
        writers: box -> the rank that writes it.
        file: the name of the file that has the entry.
        start: the byte of this file at which the data of the entry start.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    holders: dict[Box, list[int]] = field(default_factory=dict)
    writers: dict[Box, int] = field(default_factory=dict)
    file: str = ""
    start: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@check_types(module=nn.Module)
def save_sharded(
    module: nn.Module, directory: str | PathLike[str], *, max_file_bytes: int = 5 * 2**30
) -> Saved:
    """Write a model's parameters and persistent buffers as safetensors.

    The files have the names of the plain model.

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
        module: a model, parallel or plain.
        directory: the directory of the files. It is made if it does not exist.
        max_file_bytes: most bytes of tensors in one file; a larger tensor has a file of its own.

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
    stage = target.with_name(f".{target.name}.saving")
    boxes: LocalBoxes = {}
    failed = "save_sharded failed, existing files are unchanged: cannot"
    described = agree(
        lambda: _describe(module, boxes), None, CheckpointError, f"{failed} describe its tensors"
    )
    tensors = _merge(described)
    headers = _pack(tensors, max_file_bytes)
    try:
        on_first(f"{failed} prepare the files", lambda: _prepare(module, stage, tensors, headers))
        unwritten = f"{failed} write to {stage} (is it visible on all ranks?)"
        bytes_of_ranks = agree(
            lambda: _write(boxes, tensors, stage), None, CheckpointError, unwritten
        )
        on_first(f"{failed} replace {target}", lambda: _publish(stage, target))
    finally:
        if own_rank() == 0:
            shutil.rmtree(stage, ignore_errors=True)
    return Saved(tuple(headers), bytes_of_ranks[own_rank()])


def on_first(failed: str, step: Callable[[], T]) -> T | None:
    """Run a step on rank 0; return its result on every rank.

    If the step fails, all ranks raise a CheckpointError whose message begins with `failed`.
    """
    results = agree(lambda: step() if own_rank() == 0 else None, None, CheckpointError, failed)
    return results[0]


def _describe(module: nn.Module, local_boxes: LocalBoxes) -> dict[str, DescribedEntry]:
    """Return dtype, shape and this rank's boxes of every entry.

    The boxes and their values are also added to `local_boxes`.
    """
    described: dict[str, DescribedEntry] = {}
    for weight in weights_of(module):
        name = weight.name
        if weight.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name!r} is {weight.dtype}, which safetensors files cannot store"
            )
        local = local_boxes.setdefault(name, [])
        for held in weight.boxes():
            if held.memory.is_meta:
                raise CheckpointError(
                    f"{name!r} is on the meta device; load or initialize it first"
                )
            if held.view.numel() or not prod(weight.shape):
                local.append((held.box, held.view))
        boxes = [box for box, _ in local]
        described[name] = DescribedEntry(weight.dtype, weight.shape, boxes)
    return described


def _merge(described: list[dict[str, DescribedEntry]]) -> dict[str, StoredTensor]:
    """Merge the descriptions of all ranks, and choose one writer per box.

    The result is the same on every rank.
    """
    tensors: dict[str, StoredTensor] = {}
    for rank, entries in enumerate(described):
        for name, (dtype, shape, boxes) in entries.items():
            tensor = tensors.setdefault(name, StoredTensor(dtype, shape))
            if (tensor.dtype, tensor.shape) != (dtype, shape):
                raise CheckpointError(
                    f"rank {rank} has {name!r} as {dtype} {shape}, but a lower rank has it as "
                    f"{tensor.dtype} {tensor.shape}"
                )
            for box in boxes:
                tensor.holders.setdefault(box, []).append(rank)
    for number, (name, tensor) in enumerate(tensors.items()):
        # The holders take turns. Example: of ranks [0, 1], rank 1 writes the box of entry 5.
        for box, ranks in tensor.holders.items():
            tensor.writers[box] = ranks[number % len(ranks)]
        # Example: rows 0:2 and 2:3 of shape (3, 4) have 8 + 4 elements.
        covered = sum(map(volume, tensor.holders))
        elements = prod(tensor.shape)
        if covered != elements:
            raise CheckpointError(
                f"the ranks hold {covered} of the {elements} elements of {name!r}; call "
                "save_sharded on all ranks of the mesh, with the same model"
            )
    return tensors


def _pack(tensors: dict[str, StoredTensor], limit: int) -> dict[str, bytes]:
    """Distribute the entries to files of at most `limit` bytes; return the header of each file.

    The file and the place of every entry are set.
    """
    groups = in_groups(tensors, lambda name: tensors[name].nbytes, limit) or [[]]
    headers: dict[str, bytes] = {}
    for number, names in enumerate(groups, 1):
        file = "model.safetensors"
        if len(groups) > 1:
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header_bytes = _place(names, tensors)
        headers[file] = header_bytes
        for name in names:
            tensors[name].file = file
            # The data follow the header, so their place moves by the size of the header.
            tensors[name].start += len(header_bytes)
    return headers


def _place(names: list[str], tensors: dict[str, StoredTensor]) -> bytes:
    """Set where the data of the entries of one file start; return the header of the file.

    Entries with larger elements come first, so that every element is aligned to its size. Here
    places count from the end of the header.
    """
    end = 0
    header = dict[str, Any](__metadata__={"format": "pt"})
    for name in sorted(names, key=lambda entry: -tensors[entry].dtype.itemsize):
        tensor = tensors[name]
        # Example: float32 entries of shapes (2, 3) and (3,) have the bytes 0 to 24 and 24 to 36.
        start = end
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
        tensor.start = start
    text = json.dumps(header).encode()
    # Pad to a multiple of 8. Example: 61 bytes and 3 spaces, so the data start at 8 + 64.
    text += b" " * (-len(text) % 8)
    # The file starts with the length of the text, in 8 bytes.
    return len(text).to_bytes(8, "little") + text


def _prepare(
    module: nn.Module, stage: Path, tensors: dict[str, StoredTensor], headers: dict[str, bytes]
) -> None:
    """Make the directory beside the target: files of their final size, index, and configuration."""
    # An interrupted save may have left this directory.
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir(parents=True)
    for file, header in headers.items():
        data_bytes = sum(tensor.nbytes for tensor in tensors.values() if tensor.file == file)
        with open(stage / file, "wb") as out:
            out.write(header)
            out.truncate(len(header) + data_bytes)
    if len(headers) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        files = {name: tensor.file for name, tensor in tensors.items()}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (stage / _INDEX).write_text(json.dumps(index, indent=2))
    model: Any = module
    # a model of transformers
    if hasattr(getattr(model, "config", None), "save_pretrained"):
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(stage)
        if model.can_generate():
            model.generation_config.save_pretrained(stage)


def _write(local_boxes: LocalBoxes, tensors: dict[str, StoredTensor], stage: Path) -> int:
    """Write the boxes that this rank writes; return their bytes."""
    rank = own_rank()
    written = 0
    with ExitStack() as stack:
        descriptors: dict[str, int] = {}
        for name, boxes in progress(local_boxes.items(), "saving parameters"):
            tensor = tensors[name]
            for box, shard in boxes:
                if tensor.writers[box] != rank:
                    continue
                if tensor.file not in descriptors:
                    out = stack.enter_context(open(stage / tensor.file, "rb+", buffering=0))
                    descriptors[tensor.file] = out.fileno()
                written += _write_box(descriptors[tensor.file], tensor, box, shard)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    return written


def _write_box(descriptor: int, tensor: StoredTensor, box: Box, shard: Tensor) -> int:
    """Write one box in runs of bytes that are adjacent in the file; return the number of bytes.

    Dims after the last dim that is not full belong to a run whole. There is one run for each
    combination of indices of the dims before it.

    Example: a float32 tensor of shape (6, 4, 5) has the strides 80, 20 and 4 bytes. The box of all
    rows and columns 1:3 is not full in dim 1. It is written in 6 runs of 2 * 20 bytes, and the run
    of row 3 starts at byte 3 * 80 + 1 * 20.
    """
    values: Any = shard.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(values)
    if not data.nbytes:
        return 0
    # Number of dims up to the last one that is not full. In the example it is 2.
    partial_dims = len(box)
    while partial_dims and box[partial_dims - 1] == (0, tensor.shape[partial_dims - 1]):
        partial_dims -= 1
    itemsize = tensor.dtype.itemsize
    strides = [prod(tensor.shape[dim + 1 :]) * itemsize for dim in range(len(box))]
    # ((0, 6),) in the example
    outer = box[: max(partial_dims - 1, 0)]
    # 240 // 6 = 40 in the example
    run_bytes = data.nbytes // volume(outer)
    base = tensor.start
    if partial_dims:
        # 1 * 20 in the example
        last = partial_dims - 1
        base += box[last][0] * strides[last]
    for number, indices in enumerate(product(*(range(*bounds) for bounds in outer))):
        # 3 * 80 for row 3 of the example
        offset = base
        for index, stride in zip(indices, strides, strict=False):
            offset += index * stride
        first = number * run_bytes
        _write_run(descriptor, data[first : first + run_bytes], offset)
    return data.nbytes


def _write_run(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset, in several calls if the system writes only a part of them."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data = data[count:]
        offset += count


def _publish(stage: Path, target: Path) -> None:
    """Put the new directory in the place of the old one, with the other files of the old one."""
    if not target.exists():
        stage.rename(target)
        return
    if not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; save_sharded takes a directory")
    # Weights of the old checkpoint are removed, because readers would load them beside the new
    # weights.
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
        # The old directory gets the name of the stage, which the caller removes.
        old.rename(stage)


def _keep(source: str, new: str) -> None:
    """Link or copy an old file, unless the new directory has a file of this name."""
    if os.path.exists(new):
        return
    try:
        os.link(source, new)
    except OSError:
        shutil.copy2(source, new)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False if the system does not support this."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    status: int = renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE)
    return status == 0
