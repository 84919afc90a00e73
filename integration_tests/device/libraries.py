"""The names by which programs of the tier call shoal and torch's own stack: mostly the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Library:
    """One of the two.

    Attributes:
        name: "shoal" or "torch".
        tensor, styles, data: the modules that have DTensor, the styles, and `fully_shard`.
        init_device_mesh, replicate, clip_grad_norm_: functions that are elsewhere in torch.
    """

    name: str
    tensor: Any
    styles: Any
    data: Any
    init_device_mesh: Callable[..., Any]
    replicate: Callable[..., Any]
    clip_grad_norm_: Callable[..., Any]

    @property
    def ours(self) -> bool:
        return self.name == "shoal"


def library(name: str) -> Library:
    """Shoal, or torch."""
    if name == "shoal":
        tensor, data = import_module("shoal_dtensor"), import_module("shoal_data_parallel")
        mesh, styles = import_module("shoal_mesh"), import_module("shoal_tp_styles")
        return Library(
            name,
            tensor,
            styles,
            data,
            mesh.init_device_mesh,
            data.replicate,
            tensor.clip_grad_norm_,
        )
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh

    tensor, styles = (
        import_module("torch.distributed.tensor"),
        import_module("torch.distributed.tensor.parallel"),
    )
    data = import_module("torch.distributed.fsdp")

    def replicated(module: nn.Module, mesh: Any) -> object:
        return replicate(module, device_mesh=mesh)

    return Library(
        name, tensor, styles, data, init_device_mesh, replicated, nn.utils.clip_grad_norm_
    )
