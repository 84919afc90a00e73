"""``F.embedding`` and ``F.embedding_bag`` of a sharded weight and plain indices, each rank's own or replicated.

Own indices are gathered over the ranks and looked up as one batch; each rank keeps the rows of its
own:

    indices of ranks 0..2   [3 7] [] [1]     gathered: [3 7 1], one shard of rows per rank: sizes (2, 0, 1)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.internal import ScopedValue
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import kind_of

from ..arguments import expect
from ..errors import ArgumentTypeError, IndexRangeError
from ..ranks.process_groups import agree_on, one_dim_mesh
from .via_dtensor import DTensorCall

_REPLICATED = ScopedValue("shoal_replicated_indices", False)

_FUNCTIONS: list[Callable[..., Any]] = [F.embedding, F.embedding_bag]
LOOKUPS = {function: inspect.signature(function) for function in _FUNCTIONS}


@contextmanager
def replicated_indices(equal: bool = True) -> Iterator[None]:
    """Inside the ``with``, plain indices of embedding and embedding_bag are taken to be equal on all ranks.

    They are then looked up without being gathered, and the full result is on every rank. Outside,
    each rank's indices are its own, as in torch.

    Args:
        equal: False gathers again, which is the default outside.

    Example:
        >>> table = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 3)
        >>> with replicated_indices():
        ...     torch.nn.functional.embedding(torch.tensor([0, 3]), table).shape
        torch.Size([2, 3])
    """
    expect("replicated_indices", "equal", equal, bool)
    with _REPLICATED.entered(equal):
        yield


def look_up(call: DTensorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices -> rows: what a look-up returns, plain for plain indices; all ranks call it, and all raise its errors."""
    bound = LOOKUPS[call.func].bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    weight = bound.arguments["weight"]
    own = [
        arguments[name] for name in ("input", "offsets", "per_sample_weights") if name in arguments
    ]
    if not isinstance(weight, call.cls) or any(
        isinstance(each, call.cls | DTensor) for each in own
    ):
        return call.run(args, kwargs)
    call.check_layouts()
    if _REPLICATED.own():
        _facts(call, arguments)
        return call.run((), arguments, plain=DTensor.full_tensor)
    # Per rank two sizes: the length of its indices along dim 0, and the number of rows of its
    # result.
    reports = agree_on(weight.process_group, lambda: _facts(call, arguments))
    lengths, sizes = zip(*(report["~sizes"] for report in reports), strict=True)
    # in the order of the group
    ranks = one_dim_mesh(weight.process_group, weight._local_tensors[0].device.type)
    gathered = _gathered(arguments, ranks, lengths, sizes)
    own_rows = [Shard(0, sizes=sizes)]
    rows = call.run(
        (), gathered, plain=lambda all_rows: all_rows.redistribute(ranks, own_rows).to_local()
    )
    return rows if "offsets" in arguments else rows.view(*arguments["input"].shape, rows.shape[-1])


def _facts(call: DTensorCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """What is equal on all ranks that look up their own indices, and this rank's sizes, after its checks."""
    # embedding has no such argument
    name = call.name
    bags = "offsets" in arguments
    indices = arguments["input"]
    offsets = arguments.get("offsets")
    weights = arguments.get("per_sample_weights")
    rows = arguments["weight"].shape[0]
    if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(
            f"{name}: indices must be a plain tensor of int32 or int64, got {kind_of(indices)}"
        )
    if bags and indices.dim() not in (1, 2):
        raise ArgumentTypeError(f"{name}: indices must have 1 or 2 dims, got {indices.dim()}")
    is_offsets = (
        isinstance(offsets, torch.Tensor) and offsets.dim() == 1 and offsets.dtype == indices.dtype
    )
    if bags and not (is_offsets if indices.dim() == 1 else offsets is None):
        raise ArgumentTypeError(
            f"{name}: offsets are a plain 1-D tensor of the dtype of the indices: 1-D indices need "
            "them, 2-D have none"
        )
    if weights is not None and not (
        isinstance(weights, torch.Tensor) and weights.shape == indices.shape
    ):
        raise ArgumentTypeError(
            f"{name}: per_sample_weights must be a plain tensor of the shape of the indices"
        )
    if indices.device.type == "cpu" and indices.numel():
        low, high = torch.aminmax(indices)
        if low.item() < 0 or high.item() >= rows:
            raise IndexRangeError(f"{name}: an index is out of range of the {rows} rows")
    facts = {"dtype": indices.dtype, "weighted": weights is not None}
    if not bags:
        return {**facts, "~sizes": (indices.numel(), indices.numel())}
    count = (
        len(indices) if offsets is None else len(offsets) - bool(arguments["include_last_offset"])
    )
    return {**facts, "shape of a bag": tuple(indices.shape[1:]), "~sizes": (len(indices), count)}


def _gathered(
    arguments: dict[str, Any], ranks: DeviceMesh, lengths: Sequence[int], rows: Sequence[int]
) -> dict[str, Any]:
    """The arguments with the indices, offsets and weights of all ranks, rank after rank."""

    def collect(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """S(0) -> R: each rank's gradient of the result is taken to be that of all ranks."""
        shape = torch.Size([sum(sizes), *tensor.shape[1:]])
        placed = [Shard(0, sizes=tuple(sizes))]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tensor, ranks, placed, run_check=False, shape=shape, stride=stride
        ).full_tensor()

    gathered = dict(arguments)
    offsets = arguments.get("offsets")
    for name in ("input", "per_sample_weights"):
        if arguments.get(name) is not None:
            tensor = arguments[name] if "offsets" in arguments else arguments[name].reshape(-1)
            gathered[name] = collect(tensor, lengths)
    # [0 2] and [0] of ranks with 3 and 1 indices: 0 2 3
    if offsets is not None:
        last = bool(arguments["include_last_offset"])
        starts = list(accumulate(lengths, initial=0))
        own = offsets + starts[ranks.get_local_rank()]
        joined = collect(own[: len(own) - last], rows)
        gathered["offsets"] = (
            torch.cat([joined, joined.new_tensor(starts[-1:])]) if last else joined
        )
    return gathered
