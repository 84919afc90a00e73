"""Conversion of DTensors for copies, pickles, checkpoints and torch.compile.

The checkpoint protocol is duck-typed (`__create_write_items__`, `__create_chunk_list__`,
`__get_tensor_shard__`). A rank names the boxes of its shard, so a DTensor saved on one mesh loads
onto another mesh. The checkpoint package is imported only when one of these methods is called. The
DTensor class is an argument here, because this module is below it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, NoReturn

import torch

from shoal_mesh.internal import require

from .._torch.compiling import not_cached
from .._torch.interception import around_staging
from .._torch.tensors import BASE
from ..argument_types import require_tensor
from ..errors import ArgumentTypeError, ArgumentValueError, NoRuleError, PlacementError
from ..layout.boxes import Box, shape_of, slices_of
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..layout.tensor_meta import has_symbols

# Per-object caches that a copy must not inherit: the last value of a partial norm, and the base
# that a copied view follows.
_NOT_COPIED = frozenset({"_reduced", "_source"})


def deep_copy(cls: Any, tensor: Any, memo: dict[int, Any]) -> Any:
    """Copy a leaf with its attributes, and its gradient unless it is a parameter.

    A copy in `memo` is returned as it is.
    """
    if not tensor.is_leaf:
        raise RuntimeError("only leaf tensors can be deep-copied; detach first")
    known = memo.get(id(tensor))
    if known is not None:
        return known
    local = copy.deepcopy(tensor._local_tensor, memo)
    result = cls(local, tensor._spec, requires_grad=tensor.requires_grad)
    memo[id(tensor)] = result
    result.__dict__.update(copy.deepcopy(_attributes(tensor), memo))
    # as torch copies parameters
    if tensor.grad is not None and not isinstance(tensor, torch.nn.Parameter):
        result.grad = copy.deepcopy(tensor.grad, memo)
    return result


def reduce(cls: Any, tensor: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the value of `__reduce_ex__`: `rebuild` and its arguments."""
    spec = tensor._spec
    return rebuild, (
        cls,
        tensor._local_tensor,
        spec,
        tensor.requires_grad,
        _attributes(tensor),
        _place(spec),
    )


def rebuild(  # what a file holds, in its order
    cls: Any,
    local: torch.Tensor,
    spec: Spec,
    requires_grad: bool,
    attributes: Mapping[str, Any],
    place: tuple[int | None, ...],
) -> Any:
    """Rebuild a DTensor of class `cls` with attributes; `_is_param` makes it an `nn.Parameter`.

    Values from a file are checked, because `torch.load(weights_only=True)` promises to build only
    saved values, and because a file has one rank's shard: other ranks have other shards of the same
    shape.
    """
    require(spec, Spec, "DTensor from a file: its spec is a Spec", ArgumentTypeError)
    require_tensor(local, "DTensor from a file: its shard is a tensor")
    if tuple(place) != _place(spec):
        raise PlacementError(
            f"DTensor of a file: it is the shard at {place} of {spec!r}, but this rank is at "
            f"{_place(spec)} (None: an axis of replicas, (): a rank outside the mesh); each rank "
            "must load the file that it saved. To save all shards in one file, use "
            "shoal_dtensor.get_model_state_dict with full_state_dict=True, or "
            "torch.distributed.checkpoint"
        )
    if local.shape != spec.local_shape or local.dtype != spec.dtype:
        wanted_shape = tuple(spec.local_shape)
        shape = tuple(local.shape)
        raise PlacementError(
            f"DTensor of a file: {spec!r} means a {spec.dtype} shard of shape {wanted_shape} on "
            f"this rank, got {local.dtype} of shape {shape}"
        )
    hidden = [name for name in attributes if hasattr(cls, str(name))]
    if hidden:
        raise ArgumentValueError(
            f"DTensor from a file: attribute {hidden[0]!r} would hide the attribute of the class"
        )
    result = cls(local, spec, requires_grad=requires_grad)
    result.__dict__.update(attributes)
    return result


def _place(spec: Spec) -> tuple[int | None, ...]:
    """Return the coordinate of the shard that this rank holds.

    It is None along axes of replicas, and empty outside the mesh.
    """
    coordinate = spec.coordinate or ()
    place: list[int | None] = []
    for index, placement in zip(coordinate, spec.placements, strict=False):
        place.append(None if isinstance(placement, Replicate) else index)
    return tuple(place)


def _attributes(tensor: Any) -> dict[str, Any]:
    return {name: value for name, value in tensor.__dict__.items() if name not in _NOT_COPIED}


# --- checkpoints ----------------------------------------------------------------------------------


def refuse_partial(tensor: Any) -> None:
    """Refuse to save or load values whose reduction is pending."""
    if tensor._spec.partials:
        raise PlacementError(
            f"a checkpoint cannot hold {tensor._spec!r}: redistribute it to Replicate or Shard "
            "first"
        )


def checkpoint_chunks(tensor: Any) -> list[Any]:
    """Return the chunks that this rank reads or writes.

    They are its boxes of the global tensor, or the chunks that a local tensor declares.
    """
    refuse_partial(tensor)
    local: Any = tensor._local_tensor
    # torch's LocalShardsWrapper holds several shards
    if hasattr(local, "__create_chunk_list__"):
        return local.__create_chunk_list__()  # type: ignore[no-any-return]  # torch's protocol
    return chunks_of(box for box, _ in _boxes(tensor._spec))


def chunks_of(boxes: Iterable[Box]) -> list[Any]:
    """Return the boxes as torch.distributed.checkpoint describes them."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    chunks = []
    for box in boxes:
        offsets = torch.Size([start for start, _ in box])
        chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape_of(box))))
    return chunks


def _boxes(spec: Spec) -> list[tuple[Box, Box]]:
    return [] if spec.coordinate is None else spec.boxes(spec.coordinate)


def checkpoint_write_items(tensor: Any, fqn: str, _: Any) -> list[Any]:
    """Return the write items of this rank's shard: one for each of its boxes."""
    local: Any = tensor._local_tensor
    if hasattr(local, "__create_write_items__"):
        refuse_partial(tensor)
        items: list[Any] = local.__create_write_items__(fqn, tensor)
        return items
    return write_items(fqn, checkpoint_chunks(tensor), torch.Size(tensor._spec.shape), local)


def write_items(
    fqn: str, chunks: Sequence[Any], size: torch.Size, local: torch.Tensor
) -> list[Any]:
    """Return the write items of chunks of a global tensor of this size.

    They have the dtype and device of a local tensor.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    items = []
    for chunk in chunks:
        data = TensorWriteData(chunk, properties, size)
        index = MetadataIndex(fqn, chunk.offsets)
        items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    return items


def checkpoint_shard(tensor: Any, index: Any) -> torch.Tensor:
    """Return the view of the local tensor for a metadata index."""
    refuse_partial(tensor)
    local: Any = tensor._local_tensor
    if hasattr(local, "__get_tensor_shard__"):
        shard: torch.Tensor = local.__get_tensor_shard__(index)
        return shard
    boxes = _boxes(tensor._spec)
    for box, place in boxes:
        origin = tuple([start for start, _ in box])
        is_only = index.offset is None and len(boxes) == 1
        if is_only or (index.offset is not None and tuple(index.offset) == origin):
            return local[slices_of(place)]  # type: ignore[no-any-return]  # a part of the shard
    raise PlacementError(
        f"checkpoint index {index} does not match a box of {tensor._spec!r} on this rank"
    )


# --- copies of state dicts by torch.distributed.checkpoint ----------------------------------------


class ShardedKind(NamedTuple):
    """A class of tensors that consist of tensors on this rank, for copies of state dicts.

    Attributes:
        cls: the class.
        parts: returns the tensors of this rank, detached.
        rebuild: returns a tensor like another one with other parts, of the same shapes.
        whole: returns the whole tensor, by a collective.
    """

    cls: type[torch.Tensor]
    parts: Callable[[Any], list[torch.Tensor]]
    rebuild: Callable[[Any, list[torch.Tensor]], Any]
    whole: Callable[[Any], torch.Tensor]


def install_state_dict_copies(kind: ShardedKind) -> None:
    """Have torch's stagers and helpers for state dicts copy tensors of a kind by their parts."""
    around_staging(partial(_stage, kind), partial(_walk, kind))


def install_state_dict_copies_of_dtensors(cls: Any) -> None:
    """Have torch's stagers and helpers for state dicts copy DTensors by their shards."""

    def rebuild(tensor: Any, parts: list[torch.Tensor]) -> Any:
        [local] = parts
        spec = tensor._spec
        has_same_order = local.stride() == tensor._local_tensor.stride()
        return cls(local, spec if has_same_order else spec.with_(shape=spec.shape))

    kind = ShardedKind(
        cls,
        parts=lambda tensor: [tensor._local_tensor.detach()],
        rebuild=rebuild,
        whole=lambda tensor: cls.full_tensor(tensor.detach()),
    )
    install_state_dict_copies(kind)


def _stage(
    kind: ShardedKind,
    original: Callable[..., Any],
    stager: Any,
    tensor: Any,
    memo: dict[int, Any],
    **options: Any,
) -> Any:
    """Copy a tensor like torch's stager: part by part if it is of the kind, with its attributes."""
    if not isinstance(tensor, kind.cls):
        return original(stager, tensor, memo, **options)
    copy_of = stager.deepcopy_with_tensor_offload
    parts = [copy_of(part, memo, **options) for part in kind.parts(tensor)]
    result = kind.rebuild(tensor, parts)
    memo[id(tensor)] = result
    for name, value in _attributes(tensor).items():
        if name not in result.__dict__:
            result.__dict__[name] = copy_of(value, memo, **options)
    return result


def _walk(
    kind: ShardedKind,
    original: Callable[..., Any],
    value: Any,
    gathers: bool,
    *functions: Any,
    companion_obj: Any = None,
    **options: Any,
) -> Any:
    """Apply torch's helper for state dicts to the parts of a tensor, or to the whole tensor.

    Other values are passed to the helper, which calls this function for their contents.
    """
    if not isinstance(value, kind.cls):
        return original(value, *functions, companion_obj=companion_obj, **options)
    if gathers:
        return original(kind.whole(value), *functions, companion_obj=companion_obj, **options)
    parts = kind.parts(value)
    if companion_obj is not None:
        targets = kind.parts(companion_obj) if isinstance(companion_obj, kind.cls) else []
        shapes = [tuple(part.shape) for part in parts]
        shapes_of_targets = [tuple(target.shape) for target in targets]
        if shapes_of_targets != shapes:
            raise PlacementError(
                f"a copy of a {kind.cls.__name__} with shards of {shapes} can only be copied "
                f"into an object of the same layout, got {type(companion_obj).__name__} with "
                f"{shapes_of_targets}"
            )
        for part, target in zip(parts, targets, strict=True):
            original(part, *functions, companion_obj=target, **options)
        return companion_obj
    made = [original(part, *functions, **options) for part in parts]
    if any(part is None for part in made):
        # helpers return nothing on ranks that do not want it
        return None
    is_same = all(new is part for new, part in zip(made, parts, strict=True))
    return value if is_same else kind.rebuild(value, made)


# --- refused: raw memory, and sharding by torch's FSDP --------------------------------------------


def refuse_fsdp(tensor: Any) -> NoReturn:
    """Refuse `fsdp_pre_all_gather`, by which torch requests a shard.

    The error is not an AttributeError, because `hasattr` would catch it and return False.
    """
    raise ArgumentTypeError(
        "torch's fully_shard and replicate support plain parameters and torch's DTensors only, "
        f"got {tensor.spec!r}; use shoal_data_parallel.fully_shard(module, mesh['data']) or "
        "shoal_data_parallel.replicate"
    )


def refuse_memory(tensor: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse raw memory: the pointer of the wrapper is null, and reading it ends the process.

    The error is a NotImplementedError, which libraries that look for shared memory expect.
    """
    raise NoRuleError(
        "a DTensor does not have memory of its own (data_ptr, storage, dlpack, share_memory_, "
        f"apply_), got {tensor.spec!r}; use to_local(), which returns this rank's part, or "
        "full_tensor()"
    )


# The modules of torch's compiler distinguish tensors by their storages, and do not read them.
_COMPILERS = (
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch._subclasses",
    "torch.fx",
)


def storage_for_compilers(tensor: Any) -> Any:
    """Return the wrapper's storage to torch's compiler; call `refuse_memory` for other callers."""
    if sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILERS):
        return BASE.untyped_storage(tensor)
    refuse_memory(tensor)


# --- DTensors that torch.compile takes apart and puts together again ------------------------------


def rebuilt_spec(
    spec: Spec, local: torch.Tensor, shape: Sequence[int], stride: Sequence[int], is_parameter: bool
) -> Spec:
    """Return the spec of a DTensor that the compiler rebuilds with this shape and stride.

    Its placements are the placements of the DTensor that the compiler took apart.

    If sizes are symbols, the compiler has one symbol for the whole and one for the shard. A guard
    states that the whole is a number of shards, and torch solves it for one of the two symbols.
    Therefore everything that depends on both is computed from one of them. Sizes of parameters are
    constants, as the compiler treats the sizes of plain parameters.
    """
    if type(local) is not torch.Tensor and has_symbols((*shape, *stride, *local.shape)):
        if is_parameter:
            shape = [int(n) for n in shape]
            stride = [int(n) for n in stride]
        for whole, part, sharding in zip(shape, local.shape, spec.dim_shardings, strict=True):
            shards = prod([spec.mesh.shape[axis] for axis in sharding.axes])
            # The comparison creates the guard.
            bool(whole == part * shards)
        spec = spec.with_(shape=tuple(shape), stride=tuple(stride))
        sizes = zip(local.shape, spec.local_shape, strict=True)
        assert all(n == m for n, m in sizes), "the shard has the local shape of its spec"
    elif tuple(shape) != tuple(spec.shape) or tuple(stride) != spec.stride:
        spec = spec.with_(shape=tuple(shape), stride=tuple(stride))
    return spec


def refuse_graph_cache(tensor: Any) -> NoReturn:
    """Keep graphs with DTensor inputs out of the disk cache that the ranks of a host share.

    Such a graph belongs to one rank, because tracing makes constants of the index of its shard and
    of the name of its group. The cache's key is computed before tracing and is the same on all
    ranks.
    """
    not_cached("graphs of DTensors belong to one rank, and the cache does not record which")
