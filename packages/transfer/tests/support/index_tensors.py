"""The values of a mapping's targets, computed on whole tensors of numbers, for comparison."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal_transfer import Assignment, WeightMapping


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors whose elements are all different, over all tensors."""
    tensors = {}
    first = 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + count).reshape(shape)
        first += count
    return tensors


def apply_mapping(mapping: WeightMapping, sources: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The targets, element by element; what a target keeps is -1."""
    targets = {name: torch.full(shape, -1) for name, shape in mapping.targets.items()}
    for part in mapping.assignments:
        target = targets[part.target][indexed(part.region)]
        if part.source is None:
            if part.fill is not None:
                target.fill_(int(part.fill))
            continue
        target.copy_(walked(part, sources[part.source]))
    return targets


def indexed(region: tuple[range, ...]) -> tuple[slice, ...]:
    return tuple(slice(one.start, one.stop, one.step) for one in region)


def walked(part: Assignment, source: Tensor) -> Tensor:
    """The values of an assignment, in the shape of its target region."""
    block = source[indexed(part.source_region)]
    walks = [dim for dim in part.dims if dim is not None]
    stays = [dim for dim in range(block.ndim) if dim not in walks]
    block = block.permute([*walks, *stays]).reshape([block.shape[dim] for dim in walks])
    for place, dim in enumerate(part.dims):
        if dim is None:
            block = block.unsqueeze(place)
    return block.expand([len(one) for one in part.region])
