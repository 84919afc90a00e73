"""Files of a model: the files of a path, and their tensors in the form of this release.

The tensors have the names of this release of transformers.

transformers declares per architecture how entries of files are renamed, and which entries are
merged or split (experts that are stored one by one, fused projections). Renamed entries are read by
slices; converted entries are made whole, one parameter at a time, and the rank takes its shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..weights.loading import Lazy, Slices, Stored

_ONE = ("model.safetensors", "pytorch_model.bin")
_EXPECTED = (
    "expected a directory with config.json and model.safetensors, model.safetensors.index.json or "
    "pytorch_model.bin, or one of those files. A model of the Hub is downloaded first, by "
    "huggingface_hub.snapshot_download(name)"
)


def find_files(path: str | PathLike[str]) -> tuple[Path, list[Path]]:
    """Return the directory with the configuration, and the files with tensors.

    The path names a directory, an index, or one file.

    CheckpointError is raised if the path does not exist or has no files, or if files of the index
    are missing.
    """
    given = Path(path)
    if not given.exists():
        raise CheckpointError(f"{str(path)!r} does not exist; {_EXPECTED}")
    if given.is_file():
        if given.name.endswith(".index.json"):
            return given.parent, _listed(given)
        if given.suffix not in (".safetensors", ".bin"):
            raise CheckpointError(f"{str(given)!r} is no file of weights; {_EXPECTED}")
        return given.parent, [given]
    # the order in which transformers looks for them
    for name in _ONE:
        for file, several in ((given / name, False), (given / f"{name}.index.json", True)):
            if file.exists():
                return given, _listed(file) if several else [file]
    raise CheckpointError(
        f"no weights in {str(path)!r}, which has {sorted(p.name for p in given.iterdir())}; "
        f"{_EXPECTED}"
    )


def _listed(index: Path) -> list[Path]:
    weights = json.loads(index.read_text()).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{str(index)!r} has no weight_map; {_EXPECTED}")
    files = [index.parent / name for name in sorted(set(weights.values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"{index.name} names {absent}, which are not in {str(index.parent)!r}: download or "
            "copy them"
        )
    return files


def source_of(files: list[Path]) -> list[Path] | dict[str, Tensor]:
    """Return the source for `load_sharded`: safetensors files, or tensors mapped into memory.

    Pickled files are mapped.
    """
    if all(file.suffix == ".safetensors" for file in files):
        return files
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return tensors


def stored_for(model: Any, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by the names of a model, which is on the meta device.

    The model is a model of transformers.
    """
    found, groups = _by_names_of(model, stored)
    # those that were made last, by the first name
    last: dict[str, dict[str, Tensor]] = {}

    def make(first: str, name: str, slices: Slices) -> Tensor:
        if first not in last:
            last.clear()  # before the next ones are made
            last[first] = _convert(model, first, *groups[first], lambda entry: stored[entry][()])
        return last[first][name][slices]

    for first, group in groups.items():
        made = _convert(
            model, first, *group, lambda name: torch.empty(stored[name].shape, device="meta")
        )
        found |= {
            name: Lazy(tuple(each.shape), partial(make, first, name)) for name, each in made.items()
        }
    return found


# transformers' converter; names of entries, and its patterns for them
_Conversion = tuple[Any, list[tuple[str, str]]]


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
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamed: dict[str, Stored] = {}
    groups: dict[str, _Conversion] = {}
    for name in sorted(stored, key=dot_natural_key):
        new, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if new not in known and name in known:  # in the model's own form already
            new = name
            pattern = None
        if pattern is None or new not in known:
            renamed[new] = stored[name]
            continue
        converter = next(each for each in converters if pattern in each.source_patterns)
        groups.setdefault(new, (converter, []))[1].append((name, pattern))
    return renamed, groups


def _convert(
    model: Any,
    first: str,
    converter: Any,
    entries: list[tuple[str, str]],
    read: Callable[[str], Tensor],
) -> dict[str, Tensor]:
    converter = deepcopy(converter)  # it collects tensors
    for name, pattern in entries:
        converter.add_tensor(first, name, pattern, read(name))
    made = converter.convert(first, model=model, config=model.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
