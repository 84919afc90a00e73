"""Small servers whose loaders write parameters in many ways.

The results of these loaders for real tensors are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from index_tensors import apply_mapping, numbered
from shoal_transfer import WeightMapping

Shapes = Mapping[str, tuple[int, ...]]
Weights = dict[str, Tensor]
Load = Callable[["Server", Weights], object]


class Server(nn.Module):
    """Parameters of some shapes, and a function that loads them."""

    p: Tensor
    t: Tensor
    s: Tensor
    x: Tensor
    head: Tensor
    steps: Tensor

    def __init__(self, shapes: Shapes, load: Load, device: str = "meta") -> None:
        super().__init__()
        for name, shape in shapes.items():
            value = torch.full(shape, -1.0, dtype=torch.float64, device=device)
            self.register_parameter(name, nn.Parameter(value))
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            self._load(self, dict(weights))


def loaded_values(shapes: Shapes, load: Load, sources: Shapes) -> dict[str, Tensor]:
    """The parameters after the loader has run on numbered tensors; what it leaves is -1."""
    server = Server(shapes, load, device="cpu")
    values = {name: value.double() for name, value in numbered(sources).items()}
    server.load_weights(iter(values.items()))
    return {name: value.detach() for name, value in server.named_parameters()}


def mapped_values(mapping: WeightMapping) -> dict[str, Tensor]:
    """The parameters of rank 0 by the mapping of numbered tensors."""
    values = apply_mapping(mapping, numbered(mapping.sources))
    return {name.removesuffix("@0"): value.double() for name, value in values.items()}
