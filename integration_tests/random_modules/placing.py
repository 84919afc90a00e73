"""Placement of a model on a mesh by the layouts of a program."""

from __future__ import annotations

import warnings
from typing import Any

from integration_tests.random_modules.program import Program
from torch import Tensor, nn

import shoal_tp_styles
from shoal_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    StridedShard,
    distribute_module,
    distribute_tensor,
)
from shoal_mesh import DeviceMesh
from shoal_tp_styles import parallelize_module

__all__ = ["place_model", "place_tensor"]

NAMES = {
    "Shard": Shard,
    "StridedShard": StridedShard,
    "Replicate": Replicate,
    "Partial": Partial,
}
STYLES = NAMES | {name: getattr(shoal_tp_styles, name) for name in shoal_tp_styles.__all__}


def place_tensor(tensor: Tensor, mesh: DeviceMesh, text: str) -> DTensor:
    """The tensor with the placements and shard order of an expression: `[Shard(0)], ()`."""
    placements, order = eval(text, dict(NAMES)) if text else ([Replicate()] * mesh.ndim, ())
    return distribute_tensor(
        tensor, mesh, placements, src_data_rank=None, shard_order=order or None
    )


def place_model(program: Program, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model itself, distributed or made parallel."""
    layouts = dict(program.layouts)
    if program.plan == "parallelize":
        plan = {path: eval(text, dict(STYLES)) for path, text in program.layouts}
        tensor_parallel = mesh if mesh.ndim == 1 else mesh["tp"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return parallelize_module(model, tensor_parallel, plan)
    placed: dict[int, Any] = {}
    # ids are of tensors that are still there
    kept = []

    def partition(path: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                text = layouts.get(f"{path}.{name}" if path else name)
                if (
                    tensor is None
                    or isinstance(tensor, DTensor)
                    or (text is None and id(tensor) not in placed)
                ):
                    continue
                if id(tensor) not in placed:
                    made: Any = place_tensor(tensor.detach(), mesh, text or "")
                    if isinstance(tensor, nn.Parameter):
                        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                    placed[id(tensor)] = made
                    kept.append(tensor)
                table[name] = placed[id(tensor)]

    return distribute_module(model, mesh, partition)
