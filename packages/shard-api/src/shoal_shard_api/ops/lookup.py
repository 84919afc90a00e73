"""``F.embedding`` and ``F.embedding_bag`` of a sharded weight and plain indices.

By default each rank has its own indices. They are gathered over the ranks and looked up as one
batch, and each rank keeps the rows of its own indices:

                              rank 0    rank 1    rank 2
    own indices               [3 7]     []        [1]
    gathered indices          [3 7 1]   [3 7 1]   [3 7 1]
    rows of the result kept   0 and 1   none      2
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
        equal: False declares, in an inner block, that each rank has indices of its own.

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
    """Run a look-up of rows by indices.

    All ranks call it. If the arguments of one rank are wrong, all ranks raise the error.
    """
    bound = LOOKUPS[call.func].bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    weight = arguments["weight"]
    inputs = [arguments.get(name) for name in ("input", "offsets", "per_sample_weights")]
    is_sharded = isinstance(weight, call.cls)
    are_plain = not any(isinstance(tensor, call.cls | DTensor) for tensor in inputs)
    if not is_sharded or not are_plain:
        return call.run(args, kwargs)
    call.check_layouts()
    if _REPLICATED.context_value():
        _check_and_describe(call, arguments)
        # Every rank returns the whole result as a plain tensor.
        return call.run((), arguments, plain=DTensor.full_tensor)
    group = weight.process_group
    # for each rank the values of its facts, by name
    reports = agree_on(group, lambda: _check_and_describe(call, arguments))
    sizes_by_rank = [report["sizes"] for report in reports]
    index_counts, row_counts = zip(*sizes_by_rank, strict=True)
    device = weight._local_tensors[0].device
    mesh = one_dim_mesh(group, device.type)
    gathered = _gather_arguments(arguments, mesh, index_counts, row_counts)

    def keep_own_rows(all_rows: DTensor) -> torch.Tensor:
        return all_rows.redistribute(mesh, [Shard(0, sizes=row_counts)]).to_local()

    rows = call.run((), gathered, plain=keep_own_rows)
    if _is_bag(arguments):
        return rows
    return rows.view(*arguments["input"].shape, rows.shape[-1])


def _is_bag(arguments: dict[str, Any]) -> bool:
    """Tell whether the function is `embedding_bag`: `embedding` has no argument `offsets`."""
    return "offsets" in arguments


def _check_and_describe(call: DTensorCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """Check this rank's indices; return facts for `agree_on`.

    The fact "sizes" may differ between ranks. It has the length of the indices along dim 0, and the
    number of rows of the result: (3, 2) for embedding_bag of 3 indices in 2 bags.
    """
    name = call.name
    bags = _is_bag(arguments)
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
    # On another device, the program would have to wait for the result of the check.
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
        # The last offset may be the end of the last bag.
        includes_end = bool(arguments["include_last_offset"])
        bag_count = len(offsets) - 1 if includes_end else len(offsets)
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
    arguments: dict[str, Any],
    mesh: DeviceMesh,
    index_counts: Sequence[int],
    row_counts: Sequence[int],
) -> dict[str, Any]:
    """Gather the indices, offsets and weights of all ranks, in the order of the ranks.

    Args:
        arguments: The arguments of the look-up, by name.
        mesh: The ranks, in group order.
        index_counts: Per rank, the length of its indices along dim 0.
        row_counts: Per rank, the number of rows of its result.
    """

    def collect(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Gather shards of dim 0.

        In backward, each rank takes a slice of the result's gradient, which is equal on all ranks:
        all ranks look up all rows, and `look_up` shards the result.
        """
        shape = torch.Size([sum(sizes), *tensor.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        placement = Shard(0, sizes=tuple(sizes))
        sharded = DTensor.from_local(
            tensor, mesh, [placement], run_check=False, shape=shape, stride=stride
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
        gathered[name] = collect(tensor, index_counts)
    if offsets is not None:
        # Example: rank 0 has the offsets [0 2] of 3 indices, and rank 1 has [0] of 1 index. The
        # ranks' indices start at 0 and 3, so all offsets are [0 2 3]. With `include_last_offset`,
        # rank 0 has [0 2 3] and rank 1 has [0 1]. Without the ends they are gathered in the same
        # way, and the end of all indices is added: [0 2 3 4].
        includes_end = bool(arguments["include_last_offset"])
        *starts, end = accumulate(index_counts, initial=0)
        bag_starts = offsets[:-1] if includes_end else offsets
        joined = collect(bag_starts + starts[mesh.get_local_rank()], row_counts)
        if includes_end:
            joined = torch.cat([joined, joined.new_tensor([end])])
        gathered["offsets"] = joined
    return gathered
