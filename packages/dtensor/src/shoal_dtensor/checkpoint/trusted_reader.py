"""Reading of torch.distributed.checkpoint files as data.

A load does not run code that a file contains, and it refuses metadata that do not fit the files.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from ..errors import CheckpointError
from ..layout.boxes import Box, box_at, format_box, overlap, volume

_MODULE = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_MODULE}.metadata.{name}"
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{_MODULE}.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout",
}  # fmt: skip
_PATHS = {
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads the classes of metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        whole = f"{module}.{name}"
        # These are paths on the machine that wrote the file. They are not read, so text is enough.
        if whole in _PATHS:
            return lambda *parts: "/".join(map(str, parts))
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if whole in _CLASSES or is_dtype:
            return super().find_class(module, name)
        raise CheckpointError(
            f"the metadata of a checkpoint contain {whole}, which is not allowed in metadata: "
            "they are not loaded"
        )


class TrustedReader(FileSystemReader):
    """A reader of a folder whose files have known sizes.

    Raises from `read_metadata`:
        CheckpointError: metadata that are broken, contain objects that are not metadata, name files
            or bytes that the folder does not have, or describe tensors whose parts overlap, exceed
            the tensor, or do not cover it.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        super().__init__(folder)
        self._folder = folder
        self._sizes = sizes

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, checked."""
        try:
            data = (self._folder / ".metadata").read_bytes()
            metadata: Any = _Unpickler(io.BytesIO(data)).load()
            _check_metadata(metadata, self._sizes)
        except CheckpointError:
            raise
        # Broken bytes may raise any error.
        except Exception as error:
            raise CheckpointError(
                f"the metadata in {self._folder} are broken: {error!r}"
            ) from error
        metadata.storage_meta.load_id = self.load_id
        return cast(Metadata, metadata)

    def read_value(self, metadata: Metadata, name: str) -> Any:
        """Read one entry that is not a tensor, on this rank alone."""
        place = metadata.storage_data[MetadataIndex(name)]
        with open(self._folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            return _load_value(name, io.BytesIO(file.read(place.length)))


class TrustedPlanner(DefaultLoadPlanner):
    """A planner that loads values that are not tensors only if they hold no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store a value at its name if `torch.load(weights_only=True)` allows its classes."""
        _load_value(str(read_item.dest_index.fqn), value)
        value.seek(0)
        super().load_bytes(read_item, value)


def _load_value(name: str, value: io.BytesIO) -> Any:
    """Load a value that is not a tensor, or raise CheckpointError if it could hold code."""
    try:
        return torch.load(value, weights_only=True)
    except Exception as error:
        # Broken bytes may raise any error in the loader.
        raise CheckpointError(
            f"{name} is not loaded: it contains objects other than tensors, numbers, strings and "
            f"their containers ({error!r:.200})"
        ) from error


def _check_metadata(metadata: Any, sizes: Mapping[str, int]) -> None:
    """Raise CheckpointError unless every value has its parts, and every part has its bytes."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError("the metadata of the checkpoint have an unexpected class")
    indices: set[Any] = set()
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            _check_parts(name, stored)
            indices |= {MetadataIndex(name, chunk.offsets) for chunk in stored.chunks}
        elif isinstance(stored, BytesStorageMetadata):
            indices.add(MetadataIndex(name))
        else:
            raise CheckpointError(f"{name} is neither a tensor nor a value")
    if indices != set(metadata.storage_data):
        odd = next(iter(indices ^ set(metadata.storage_data)))
        raise CheckpointError(f"the parts of {odd.fqn} and their locations do not fit together")
    for index, place in metadata.storage_data.items():
        end = place.offset + place.length
        whole = sizes.get(place.relative_path, -1)
        is_inside = 0 <= place.offset <= end <= whole
        if not is_inside or getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{index.fqn} should be at bytes {place.offset} to {end} of "
                f"{place.relative_path!r}, but this checkpoint does not have such a part of a file"
            )


def _check_parts(name: str, stored: TensorStorageMetadata) -> None:
    """Raise CheckpointError unless the parts of a tensor cover it exactly once."""
    shape = tuple(stored.size)
    boxes = []
    for chunk in stored.chunks:
        offsets = tuple(chunk.offsets)
        sizes = tuple(chunk.sizes)
        has_dims = len(offsets) == len(sizes) == len(shape)
        box = box_at(offsets, sizes) if has_dims else None
        if box is None or not _is_inside(box, shape):
            raise CheckpointError(
                f"a part of {name} {shape} with offsets {offsets} and sizes {sizes} is outside of "
                "the tensor"
            )
        boxes.append(box)
    elements = sum(map(volume, boxes))
    if elements != prod(shape) or overlap(boxes) is not None:
        parts = ", ".join(map(format_box, boxes[:8]))
        raise CheckpointError(
            f"the {len(boxes)} parts of {name} {shape} do not cover it exactly once: {parts}"
        )


def _is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Tell whether a box, also an empty one, is inside a tensor of this shape."""
    intervals = zip(box, shape, strict=True)
    return all(0 <= start <= stop <= size for (start, stop), size in intervals)
