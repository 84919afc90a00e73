"""Covers: trusted_reader.py: hostile and broken metadata are refused, as data."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from shoal_dtensor.checkpoint.trusted_reader import TrustedPlanner, TrustedReader
from shoal_dtensor.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized"
)


# there once the code of a checkpoint has run
_TRACE = Path(tempfile.gettempdir(), f"shoal_hostile_{os.getpid()}")


class _Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {_TRACE}",)


def _saved(folder: Path, value: object = 3) -> dict[str, int]:
    dcp.save({"w": torch.arange(6.0).view(3, 2), "n": value}, checkpoint_id=folder)
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def _change(folder: Path, change: Callable[[Any], object]) -> None:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"]


def _place(metadata: Any) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == "w")


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "code": (lambda m: setattr(m, "planner_data", _Code()), r"contain posix\.system"),
    "path outside": (
        lambda m: setattr(_place(m), "relative_path", "../other"),
        "does not have such a part of a file",
    ),
    "absolute path": (
        lambda m: setattr(_place(m), "relative_path", "/etc/passwd"),
        "does not have such a part of a file",
    ),
    "bytes beyond": (
        lambda m: setattr(_place(m), "length", 1 << 40),
        "does not have such a part of a file",
    ),
    "negative offset": (
        lambda m: setattr(_place(m), "offset", -1),
        "does not have such a part of a file",
    ),
    "transform": (
        lambda m: setattr(_place(m), "transform_descriptors", ["zstd"]),
        "does not have such a part of a file",
    ),
    "larger shape": (lambda m: setattr(_tensor(m), "size", torch.Size([4, 2])), "do not cover it"),
    "part missing": (lambda m: _tensor(m).chunks.clear(), "do not cover it"),
    "part twice": (lambda m: _tensor(m).chunks.append(_tensor(m).chunks[0]), "do not cover it"),
    "part outside": (
        lambda m: setattr(_tensor(m).chunks[0], "offsets", torch.Size([1, 0])),
        "is outside",
    ),
    "other dims": (lambda m: setattr(_tensor(m).chunks[0], "sizes", torch.Size([6])), "is outside"),
    "place missing": (
        lambda m: m.storage_data.pop(next(iter(m.storage_data))),
        "do not fit together",
    ),
    "value missing": (lambda m: m.state_dict_metadata.pop("n"), "do not fit together"),
    "value of a class": (
        lambda m: m.state_dict_metadata.update(n="text"),
        "neither a tensor nor a value",
    ),
    "no places": (lambda m: setattr(m, "storage_data", None), "have an unexpected class"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    sizes = _saved(tmp_path)
    change, text = CHANGES[name]
    _change(tmp_path, change)
    with pytest.raises(CheckpointError, match=text):
        TrustedReader(tmp_path, sizes).read_metadata()
    assert not _TRACE.exists()


def test_overlapping_parts_are_refused(tmp_path: Path) -> None:
    """Two parts of the right number of elements, one of which covers what the other does."""
    sizes = _saved(tmp_path)

    def overlap(metadata: Any) -> None:
        first = _tensor(metadata).chunks[0]
        place = _place(metadata)
        first.sizes = torch.Size([2, 2])
        second = type(first)(offsets=torch.Size([1, 0]), sizes=torch.Size([1, 2]))
        _tensor(metadata).chunks.append(second)
        index = next(index for index in metadata.storage_data if index.fqn == "w")
        metadata.storage_data[type(index)("w", second.offsets)] = place

    _change(tmp_path, overlap)
    with pytest.raises(CheckpointError, match="do not cover it exactly once"):
        TrustedReader(tmp_path, sizes).read_metadata()


@pytest.mark.parametrize(
    "data", [b"", b"\x80", b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(3), pickle.dumps(_Code())]
)
def test_broken_metadata_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="metadata"):
        TrustedReader(tmp_path, {".metadata": len(data)}).read_metadata()


def test_whole_ones_are_loaded(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(3, 2), "n": 0}
    dcp.load(
        state, storage_reader=TrustedReader(tmp_path, _saved(tmp_path)), planner=TrustedPlanner()
    )
    assert state["w"].equal(torch.arange(6.0).view(3, 2))
    assert state["n"] == 3


def test_values_that_hold_code_are_refused() -> None:
    planner, value = TrustedPlanner(), io.BytesIO()
    torch.save(_Code(), value)
    value.seek(0)
    item: Any = type("Item", (), {"dest_index": type("Index", (), {"fqn": "n"})})
    with pytest.raises(
        CheckpointError, match="n is not loaded: it contains objects other than tensors"
    ):
        planner.load_bytes(item, value)
    assert not _TRACE.exists()
