"""Covers: tensor/serialization.py: what a file says of a DTensor is checked before it is built."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from shoal_dtensor import ArgumentValueError, DTensor, PlacementError, Shard, distribute_tensor, safe_globals
from shoal_dtensor.tensor.serialization import rebuild
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world


class Forged:
    """What pickles as a DTensor of other parts than one has."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return rebuild, self.arguments


def _loaded(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    with torch.serialization.safe_globals(safe_globals()):
        return torch.load(file, weights_only=True)


def test_a_tensor_comes_back_with_its_attributes() -> None:
    with fake_world(2):
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        x.note = "mine"  # type: ignore[attr-defined]  # set by a user
        loaded = _loaded({"x": x})["x"]
        assert loaded.spec == x.spec
        assert loaded.note == "mine"


@pytest.mark.parametrize(
    ("local", "attributes", "error"),
    [
        (torch.ones(99), {}, PlacementError),
        (torch.ones(4, 4), {}, PlacementError),
        (torch.ones(2, 4, dtype=torch.float64), {}, PlacementError),
        (torch.ones(2, 4), {"redistribute": "hidden"}, ArgumentValueError),
        (torch.ones(2, 4), {"_spec": "hidden"}, ArgumentValueError),
        (torch.ones(2, 4), {"shape": "hidden"}, ArgumentValueError),
    ],
)
def test_what_does_not_fit_is_not_built(
    local: torch.Tensor, attributes: dict[str, Any], error: type[Exception]
) -> None:
    with fake_world(2):
        x = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        with pytest.raises(error):
            _loaded(Forged(DTensor, local, x.spec, False, attributes))
