"""The specs of DTensors that torch.compile takes apart and puts together again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from ..layout.spec import Spec
from ..layout.symbolic_sizes import has_symbols


def of_wrapper(
    spec: Spec, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], is_parameter: bool
) -> Spec:
    """The spec of a DTensor of another size, placed as `spec`.

    Where sizes are symbols, the compiler has one for the whole and one for the shard.  That the whole is so many shards
    is a guard, which torch solves for one of the two; so what is computed of both is computed of one.

    Args:
        spec: of the DTensor that was taken apart.
        local: the shard; shape, stride: of the whole.
        is_parameter: whether it is one: sizes of those are constants, as the compiler has them for plain parameters.
    """
    if type(local) is not torch.Tensor and has_symbols((*shape, *stride, *local.shape)):
        if is_parameter:
            shape, stride, _ = ([int(n) for n in sizes] for sizes in (shape, stride, local.shape))
        for whole, part, sharding in zip(shape, local.shape, spec.dim_shardings, strict=True):
            bool(whole == part * prod(spec.mesh.shape[axis] for axis in sharding.axes))
        spec = spec.with_(shape=tuple(shape), stride=tuple(stride))
        assert all(n == m for n, m in zip(local.shape, spec.local_shape, strict=True)), "a shard as its spec says"
    elif tuple(shape) != tuple(spec.shape) or tuple(stride) != spec.stride:
        spec = spec.with_(shape=tuple(shape), stride=tuple(stride))
    return spec


def placed_alike(one: Spec, other: Spec) -> bool:
    """Whether two specs differ in nothing but sizes and strides."""
    return one is other or (
        one.mesh == other.mesh
        and one.placements == other.placements
        and one.shard_order == other.shard_order
        and one.dtype == other.dtype
    )
