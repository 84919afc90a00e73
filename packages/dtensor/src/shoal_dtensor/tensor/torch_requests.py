"""What torch's stack asks of a DTensor: `fully_shard`, who looks for its internals or its memory, and the compiler."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

import torch

from .._torch import BASE, not_cached
from ..errors import ArgumentTypeError, NoRuleError
from ..layout.spec import Spec
from ..layout.tensor_meta import has_symbols


def refuse_fsdp(tensor: Any) -> NoReturn:
    """Refuse to be sharded: torch asks every parameter for `fsdp_pre_all_gather` when it is wrapped.

    Raises:
        ArgumentTypeError: always; no AttributeError, which `hasattr` would take for "no".
    """
    raise ArgumentTypeError(
        f"torch's fully_shard and replicate take plain parameters and torch's DTensors, got {tensor.spec!r}; use "
        "shoal_data_parallel.fully_shard(module, mesh['data']) or shoal_data_parallel.replicate, which take both kinds"
    )


def refuse_memory(tensor: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse raw memory: that of the wrapper is null, and reading it ends the process.

    Raises:
        NoRuleError: always; a NotImplementedError, for which those who look for shared memory are prepared.
    """
    raise NoRuleError(
        f"a DTensor has no memory of its own (data_ptr, storage, dlpack, share_memory_, apply_), got {tensor.spec!r}; "
        "use to_local(), which is this rank's part, or full_tensor()"
    )


# They tell tensors apart by their storages, and read none.
_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses", "torch.fx")


def storage_for_compilers(tensor: Any) -> Any:
    """The storage of the wrapper, for torch's compiler alone; for anybody else `refuse_memory`."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILERS):
        return BASE.untyped_storage(tensor)
    refuse_memory(tensor)


# --- DTensors that torch.compile takes apart and puts together again -------------------------------------------------


def of_wrapper(
    spec: Spec, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], is_parameter: bool
) -> Spec:
    """The spec of a DTensor of this shape and stride, placed as that was which the compiler took apart.

    Where sizes are symbols, the compiler has one for the whole and one for the shard.  That the whole is so many shards
    is a guard, which torch solves for one of the two; so what is computed of both is computed of one.  Sizes of
    parameters are constants, as the compiler has them for plain ones.
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


def refuse_graph_cache(tensor: Any) -> NoReturn:
    """Keep graphs with a DTensor among their inputs out of the cache on disk, which the ranks of a host share.

    Such a graph is one rank's: which part of a tensor is its shard, and by which name it calls its group, are constants
    that appear as it is traced.  What the cache knows of it before is the same on all ranks.
    """
    not_cached("graphs of DTensors are of one rank, and the cache does not know of which")
