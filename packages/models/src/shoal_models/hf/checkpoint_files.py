"""Search for the files of a model, and access to their tensors by the model's own names.

transformers declares per architecture how entries of files are renamed, and which entries are
converted: merged or split, such as experts that are stored one by one, or fused projections. A rank
reads slices of an entry that is only renamed. Converted entries are made whole on every rank, one
conversion at a time, and the rank takes its shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..weights.loading import Lazy, Slices, Stored

# Names of a file with all tensors, in the order in which transformers looks for them. If the
# tensors are in several files, the index of the files has this name and the suffix `.index.json`.
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_EXPECTED = (
    "expected a directory with config.json and model.safetensors, model.safetensors.index.json "
    "or pytorch_model.bin, or the path of one of these files. Download a model of the Hub first, "
    "with huggingface_hub.snapshot_download(name)"
)


def find_files(path: str | PathLike[str]) -> tuple[Path, list[Path]]:
    """Return the directory with the configuration, and the files with tensors.

    Args:
        path: a directory, an index of files, or one file.

    Raises:
        CheckpointError: if the path does not exist or has no files, or if files of the index are
            missing.
    """
    location = Path(path)
    if not location.exists():
        raise CheckpointError(f"{str(path)!r} does not exist; {_EXPECTED}")
    if location.is_file():
        if location.name.endswith(".index.json"):
            return location.parent, _read_files_of_index(location)
        if location.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f"{str(location)!r} is not a file of weights; {_EXPECTED}")
        return location.parent, [location]
    for name in _SINGLE_FILES:
        file = location / name
        index = location / f"{name}.index.json"
        if file.exists():
            return location, [file]
        if index.exists():
            return location, _read_files_of_index(index)
    names = sorted(file.name for file in location.iterdir())
    raise CheckpointError(f"{str(path)!r} has no file of weights, only {names}; {_EXPECTED}")


def _read_files_of_index(index: Path) -> list[Path]:
    """Return the files that an index names."""
    weights = json.loads(index.read_text()).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f'{str(index)!r} does not have the entry "weight_map"; {_EXPECTED}')
    files = [index.parent / name for name in sorted(set(weights.values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"{index.name} names {absent}, which are not in {str(index.parent)!r}: download or "
            "copy them"
        )
    return files


def source_of(files: list[Path]) -> list[Path] | dict[str, Tensor]:
    """Return a source for `load_sharded`: the files, or the tensors of pickled files.

    These tensors are mapped into memory, so only what is used is read.
    """
    if all(file.suffix == ".safetensors" for file in files):
        return files
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return tensors


def stored_for(model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by the names of a model.

    Args:
        model: a model of transformers, on the meta device.
        stored: the tensors of the files, by their names there.
    """
    by_name, conversions = _by_names_of(model, stored)
    # The results of the latest conversion, keyed like `conversions`. All others are dropped.
    latest: dict[str, dict[str, Tensor]] = {}

    def read_whole(entry: str) -> Tensor:
        # The index () selects all elements.
        return stored[entry][()]

    def read_shape(entry: str) -> Tensor:
        return torch.empty(stored[entry].shape, device="meta")

    def make(first_name: str, name: str, slices: Slices) -> Tensor:
        if first_name not in latest:
            # Free the old results before the new ones are made.
            latest.clear()
            latest[first_name] = _convert(model, first_name, conversions[first_name], read_whole)
        return latest[first_name][name][slices]

    # Each conversion runs here on meta tensors, which gives the names and shapes of its results.
    # `make` runs it on the stored values when one of its results is read.
    for first_name, conversion in conversions.items():
        results = _convert(model, first_name, conversion, read_shape)
        for name, result in results.items():
            by_name[name] = Lazy(tuple(result.shape), partial(make, first_name, name))
    return by_name


class _Conversion(NamedTuple):
    """A conversion of some entries of the files to one or several tensors of the model.

    Attributes:
        converter: the converter of transformers.
        entries: name of an entry, and the pattern of the converter that matches it.
    """

    converter: Any
    entries: list[tuple[str, str]]


def _by_names_of(
    model: Any, stored: Mapping[str, Stored]
) -> tuple[dict[str, Stored], dict[str, _Conversion]]:
    """Return the tensors that are only renamed, and the conversions.

    A conversion is keyed by the first name of its results.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(model)
    known = model.state_dict()
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    renamed: dict[str, Stored] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        # If a renaming leads to a name that the model does not have, an entry whose own name is in
        # the model keeps its own name.
        if new not in known and name in known:
            new = name
            pattern = None
        # Entries without a converter, and entries that the model does not have, are only renamed.
        if pattern is None or new not in known:
            renamed[new] = stored[name]
            continue
        if new not in conversions:
            matching = [item for item in converters if pattern in item.source_patterns]
            conversions[new] = _Conversion(matching[0], [])
        conversions[new].entries.append((name, pattern))
    return renamed, conversions


def _convert(
    model: Any, first: str, conversion: _Conversion, read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Return the results of a conversion by name; `first` is the first of these names."""
    # A converter collects tensors, so each conversion takes a copy.
    converter = deepcopy(conversion.converter)
    for name, pattern in conversion.entries:
        converter.add_tensor(first, name, pattern, read(name))
    results: dict[str, Tensor] = {}
    for name, result in converter.convert(first, model=model, config=model.config).items():
        results[name] = result[0] if isinstance(result, list) else result
    return results
