"""Files of a model: which ones a path means, and their tensors under the names, and in the form, of this release.

transformers declares per architecture how entries of files are renamed, and which of them are merged or split (experts
that are stored one by one, fused projections). Renamed entries are read by slices; converted ones are made whole, one
parameter at a time, and the rank takes its shard.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..weights.loading import Reader, Slices

_ONE = ("model.safetensors", "pytorch_model.bin")
_EXPECTED = (
    "expected a directory with config.json and model.safetensors, model.safetensors.index.json or pytorch_model.bin, "
    "or one of those files. A model of the Hub is downloaded first, by huggingface_hub.snapshot_download(name)"
)


def find_files(path: str | PathLike[str]) -> tuple[Path, list[Path]]:
    """The directory with the configuration, and the files with tensors.

    Args:
        path: a directory as `save_pretrained` and `save_sharded` write it, an index, or one file with tensors.

    Raises:
        CheckpointError: if there is no such path, no file in it, or files of the index are missing.
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
    for name in _ONE:  # the order in which transformers looks for them
        for file, several in ((given / name, False), (given / f"{name}.index.json", True)):
            if file.exists():
                return given, _listed(file) if several else [file]
    raise CheckpointError(
        f"no weights in {str(path)!r}, which has {sorted(p.name for p in given.iterdir())}; {_EXPECTED}"
    )


def _listed(index: Path) -> list[Path]:
    weights = json.loads(index.read_text()).get("weight_map")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{str(index)!r} has no weight_map; {_EXPECTED}")
    files = [index.parent / name for name in sorted(set(weights.values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise CheckpointError(
            f"{index.name} names {absent}, which are not in {str(index.parent)!r}: download or copy them"
        )
    return files


def source_of(files: list[Path]) -> list[Path] | dict[str, Tensor]:
    """What `load_sharded` reads: safetensors files as they are, pickled ones mapped into memory."""
    if all(file.suffix == ".safetensors" for file in files):
        return files
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(torch.load(file, map_location="cpu", mmap=True, weights_only=True))
    return tensors


_Conversion = tuple[Any, list[tuple[str, str]]]  # transformers' converter; names of entries, and its patterns for them


class Converted:
    """A reader of a checkpoint by the names of a model.

    Args:
        model: of transformers, not parallel; on the meta device.
        reader: of the files.
    """

    def __init__(self, model: Any, reader: Reader) -> None:
        self.model = model
        self.reader = reader
        self.renamed: dict[str, str] = {}
        self.converted: dict[str, str] = {}  # name -> the first name of those that are made together
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.groups: dict[str, _Conversion] = self._grouped(model.state_dict())
        self.made: tuple[str, dict[str, Tensor]] = ("", {})
        for first in self.groups:
            for name, tensor in self._convert(
                first, lambda each: torch.empty(reader.shape(each), device="meta")
            ).items():
                self.converted[name], self.shapes[name] = first, tuple(tensor.shape)

    def names(self) -> set[str]:
        return self.renamed.keys() | self.converted.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name] if name in self.converted else self.reader.shape(self.renamed[name])

    def read(self, name: str, slices: Slices) -> Tensor:
        if name not in self.converted:
            return self.reader.read(self.renamed[name], slices)
        first = self.converted[name]
        if self.made[0] != first:
            self.made = ("", {})  # before the next ones are made
            self.made = (first, self._convert(first, lambda each: self.reader.read(each, ())))
        return self.made[1][name][slices]

    def _grouped(self, known: Mapping[str, Tensor]) -> dict[str, _Conversion]:
        """Fills `renamed`; returns what has to be converted, by the first name that comes of it."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        transforms = get_model_conversion_mapping(self.model)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        groups: dict[str, _Conversion] = {}
        for name in sorted(self.reader.names(), key=dot_natural_key):
            prefix = self.model.base_model_prefix
            new, pattern = rename_source_key(name, renamings, converters, prefix, known)
            if new not in known and name in known:  # in the model's own form already
                new, pattern = name, None
            if pattern is None or new not in known:
                self.renamed[new] = name
                continue
            converter = next(each for each in converters if pattern in each.source_patterns)
            groups.setdefault(new, (converter, []))[1].append((name, pattern))
        return groups

    def _convert(self, first: str, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        converter, entries = self.groups[first]
        converter = deepcopy(converter)  # it collects tensors
        for name, pattern in entries:
            converter.add_tensor(first, name, pattern, read(name))
        made = converter.convert(first, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
