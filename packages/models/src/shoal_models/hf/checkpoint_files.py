"""Which files a path means: a directory of a model, its index, or one file."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError

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
        return given.parent, _listed(given) if given.name.endswith(".index.json") else [_checked(given)]
    for name in _ONE:  # the order in which transformers looks for them
        for file, several in ((given / name, False), (given / f"{name}.index.json", True)):
            if file.exists():
                return given, _listed(file) if several else [file]
    raise CheckpointError(
        f"no weights in {str(path)!r}, which has {sorted(p.name for p in given.iterdir())}; {_EXPECTED}"
    )


def _checked(file: Path) -> Path:
    if file.suffix not in (".safetensors", ".bin"):
        raise CheckpointError(f"{str(file)!r} is no file of weights; {_EXPECTED}")
    return file


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
