"""Covers: hf/checkpoint_files.py: which files a path means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal_models import CheckpointError
from shoal_models.hf.checkpoint_files import find_files, source_of


def test_directory_index_and_file(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        home.mkdir()
    (one / "model.safetensors").touch()
    assert (
        find_files(one)
        == find_files(one / "model.safetensors")
        == (one, [one / "model.safetensors"])
    )
    files = [two / f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = two / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": files[1].name, "b": files[0].name, "c": files[0].name}})
    )
    with pytest.raises(
        CheckpointError, match=r"names \['model-00001-of-00002.safetensors', .*download or copy"
    ):
        find_files(two)
    for file in files:
        file.touch()
    assert find_files(two) == find_files(index) == (two, files)


def test_wrong_paths(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path, message in (
        (tmp_path / "absent", "does not exist; expected"),
        (tmp_path, r"has no file of weights, only \['notes.txt'\]; expected"),
        (tmp_path / "notes.txt", "is not a file of weights; expected"),
    ):
        with pytest.raises(CheckpointError, match=message):
            find_files(path)
    (tmp_path / "x.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not have the entry"):
        find_files(tmp_path / "x.index.json")


def test_pickled_files_are_mapped(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3.0)}, tmp_path / "pytorch_model.bin")
    home, files = find_files(tmp_path)
    source = source_of(files)
    assert home == tmp_path and isinstance(source, dict) and source["w"].tolist() == [0, 1, 2]
