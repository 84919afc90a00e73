"""``F.embedding`` and ``F.embedding_bag`` of a sharded weight and plain indices.

By default each rank has its own indices. They are gathered over the ranks and looked up as one
batch, and each rank keeps the rows of its own indices:

    indices of ranks 0..2   [3 7] [] [1]     gathered: [3 7 1], in shards of 2, 0 and 1 rows
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
from shoal_dtensor.errors import OperatorIndexError
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import ScopedValue, kind_of, require

from ..errors import ArgumentTypeError
from ..ranks.process_groups import Fact, agree_on, one_dim_mesh
from .via_dtensor import DTensorCall

_REPLICATED = ScopedValue("shoal_replicated_indices", False)

_FUNCTIONS: list[Callable[..., Any]] = [F.embedding, F.embedding_bag]
LOOKUPS = {function: inspect.signature(function) for function in _FUNCTIONS}


@contextmanager
def replicated_indices(equal: bool = True) -> Iterator[None]:
    """Declare, inside the ``with``, that indices of embeddings are equal on all ranks.

    They are then looked up without a gather, and every rank has the full result. Outside of the
    block each rank has indices of its own, as in torch.

    Args:
        equal: False gathers again, which is the default outside.

    Example:
        >>> table = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 3)
        >>> with replicated_indices():
        ...     torch.nn.functional.embedding(torch.tensor([0, 3]), table).shape
        torch.Size([2, 3])
    """
    require(equal, bool, "replicated_indices: equal is a bool", ArgumentTypeError)
    with _REPLICATED.change(lambda _: equal):
        yield


def look_up(call: DTensorCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a look-up of rows by indices; all ranks call it and raise its errors."""
    bound = LOOKUPS[call.func].bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    weight = arguments["weight"]
    indices = [arguments.get(name) for name in ("input", "offsets", "per_sample_weights")]
    is_sharded = isinstance(weight, call.cls)
    are_plain = not any(isinstance(tensor, call.cls | DTensor) for tensor in indices)
    if not is_sharded or not are_plain:
        return call.run(args, kwargs)
    call.check_layouts()
    if _REPLICATED.context_value():
        _facts(call, arguments)
        return call.run((), arguments, plain=DTensor.full_tensor)
    # Per rank two sizes: the length of its indices along dim 0, and the number of rows of its
    # result.
    group = weight.process_group
    reports = agree_on(group, lambda: _facts(call, arguments))
    sizes_by_rank = [report["sizes"] for report in reports]
    lengths, sizes = zip(*sizes_by_rank, strict=True)
    device = weight._local_tensors[0].device
    mesh = one_dim_mesh(group, device.type)
    gathered = _gather_arguments(arguments, mesh, lengths, sizes)

    def keep_own_rows(all_rows: DTensor) -> torch.Tensor:
        return all_rows.redistribute(mesh, [Shard(0, sizes=sizes)]).to_local()

    rows = call.run((), gathered, plain=keep_own_rows)
    if "offsets" in arguments:
        return rows
    return rows.view(*arguments["input"].shape, rows.shape[-1])


def _facts(call: DTensorCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """Check this rank's indices; return facts for `agree_on`.

    The sizes, which may differ between ranks, are the length of the indices along dim 0, and the
    number of rows of the result.
    """
    name = call.name
    # Only embedding_bag has offsets.
    bags = "offsets" in arguments
    indices = arguments["input"]
    offsets = arguments.get("offsets")
    weights = arguments.get("per_sample_weights")
    rows = arguments["weight"].shape[0]
    is_tensor = isinstance(indices, torch.Tensor)
    if not is_tensor or indices.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError(
            f"{name}: indices must be a plain tensor of int32 or int64, got {kind_of(indices)}"
        )
    if bags and indices.dim() not in (1, 2):
        raise ArgumentTypeError(f"{name}: indices must have 1 or 2 dims, got {indices.dim()}")
    if bags and not _fits_offsets(indices, offsets):
        raise ArgumentTypeError(
            f"{name}: offsets must be a plain 1-D tensor of the dtype of the indices; 1-D indices "
            "need offsets, 2-D indices must not have them"
        )
    has_weights = isinstance(weights, torch.Tensor) and weights.shape == indices.shape
    if weights is not None and not has_weights:
        raise ArgumentTypeError(
            f"{name}: per_sample_weights must be a plain tensor of the shape of the indices"
        )
    if indices.device.type == "cpu" and indices.numel():
        low, high = torch.aminmax(indices)
        if low.item() < 0 or high.item() >= rows:
            raise OperatorIndexError(f"{name}: an index is out of range; the table has {rows} rows")
    facts: dict[str, Any] = {"dtype": indices.dtype, "weighted": weights is not None}
    if not bags:
        count = indices.numel()
        facts["sizes"] = Fact((count, count), compare=False)
        return facts
    bag_count = len(indices)
    if offsets is not None:
        bag_count = len(offsets) - bool(arguments["include_last_offset"])
    facts["shape of a bag"] = tuple(indices.shape[1:])
    facts["sizes"] = Fact((len(indices), bag_count), compare=False)
    return facts


def _fits_offsets(indices: torch.Tensor, offsets: Any) -> bool:
    """Tell whether 1-D indices have offsets of their dtype, and 2-D indices have none."""
    if indices.dim() == 2:
        return offsets is None
    if not isinstance(offsets, torch.Tensor):
        return False
    return offsets.dim() == 1 and offsets.dtype == indices.dtype


def _gather_arguments(
    arguments: dict[str, Any], mesh: DeviceMesh, lengths: Sequence[int], rows: Sequence[int]
) -> dict[str, Any]:
    """Gather the indices, offsets and weights of all ranks, in the order of the ranks.

    Args:
        arguments: The arguments of the look-up, by name.
        mesh: The ranks, in group order.
        lengths: Per rank, the length of its indices along dim 0.
        rows: Per rank, the number of rows of its result.
    """

    def collect(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Gather shards of dim 0 (S(0) -> R); the result's gradient must be equal on all ranks."""
        shape = torch.Size([sum(sizes), *tensor.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        rows = Shard(0, sizes=tuple(sizes))
        sharded = DTensor.from_local(
            tensor, mesh, [rows], run_check=False, shape=shape, stride=stride
        )
        return sharded.full_tensor()

    gathered = dict(arguments)
    offsets = arguments.get("offsets")
    for name in ("input", "per_sample_weights"):
        tensor = arguments.get(name)
        if tensor is None:
            continue
        if "offsets" not in arguments:
            tensor = tensor.reshape(-1)
        gathered[name] = collect(tensor, lengths)
    if offsets is not None:
        # Example: offsets [0 2] of 3 indices on rank 0, and [0] of 1 index on rank 1 -> [0 2 3].
        includes_end = bool(arguments["include_last_offset"])
        *starts, end = accumulate(lengths, initial=0)
        shifted = offsets + starts[mesh.get_local_rank()]
        joined = collect(shifted[: len(shifted) - includes_end], rows)
        if includes_end:
            joined = torch.cat([joined, joined.new_tensor([end])])
        gathered["offsets"] = joined
    return gathered
