"""The model of the tests of data parallelism, with styles along the axis "tensor"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from data_parallel_model import Model, two_equal_models
from shoal_mesh import DeviceMesh
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def styled(model: Any, mesh: DeviceMesh) -> Any:
    """The model with its plan along "tensor"."""
    return parallelize_module(model, mesh["tensor"], PLAN)


def models(mesh: DeviceMesh, make: Callable[[], nn.Module] = Model) -> list[Any]:
    """A model on one device, and the same with styles over "tensor" if that has several ranks."""
    plain, model = two_equal_models(make)
    return [plain, styled(model, mesh) if mesh.shape[1] > 1 else model]
