"""``F.embedding`` and ``F.embedding_bag`` of a sharded weight and plain indices, each rank's own or replicated.

Own indices are gathered over the ranks and looked up as one batch; each rank keeps the rows of its own.  On a 1-D mesh
the last step is a reduce-scatter of the rows:

    indices of ranks 0..2   [3 7] [] [1]     gathered: [3 7 1], one shard of rows per rank: sizes (2, 0, 1)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.internal import ScopedValue
from shoal_mesh import DeviceMesh
from shoal_mesh.internal import kind_of

from ..arguments import expect
from ..errors import ArgumentTypeError, IndexRangeError
from ..ranks.process_groups import agree_on, one_dim_mesh

if TYPE_CHECKING:
    from .via_dtensor import DTensorCall

_REPLICATED = ScopedValue("shoal_replicated_indices", False)

LOOKUPS: dict[Callable[..., Any], inspect.Signature] = {
    F.embedding: inspect.signature(F.embedding),
    F.embedding_bag: inspect.signature(F.embedding_bag),
}


@contextmanager
def replicated_indices(equal: bool = True) -> Iterator[None]:
    """Inside the ``with``, plain indices of embedding and embedding_bag are taken to be equal on all ranks.

    They are then looked up without being gathered, and the full result is on every rank.  Outside, each rank's indices
    are its own, as in torch.

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
    own = [arguments[name] for name in ("input", "offsets", "per_sample_weights") if name in arguments]
    if not isinstance(arguments["weight"], call.cls) or any(isinstance(each, call.cls | DTensor) for each in own):
        return call.run(args, kwargs)
    call.check_layouts()
    lookup = _TableLookup(call, arguments)
    return lookup.replicated() if _REPLICATED.own() else lookup.own_rows()


class _TableLookup:
    """One call of embedding or embedding_bag with plain indices.

    Per rank two sizes are exchanged: the length of its indices along dim 0, and the number of rows of its result.
    """

    def __init__(self, call: DTensorCall, arguments: dict[str, Any]) -> None:
        self.call, self.arguments, self.weight = call, arguments, arguments["weight"]
        self.bags = call.func is F.embedding_bag
        group, device_type = self.weight.process_group, self.weight._local_tensors[0].device.type
        self.ranks: DeviceMesh = one_dim_mesh(group, device_type)  # in the order of the group

    def replicated(self) -> Any:
        """The result of indices that are equal on all ranks: no gather."""
        self._facts()
        return self.call.run((), self.arguments, plain=DTensor.full_tensor)

    def own_rows(self) -> Any:
        """The rows of this rank's indices."""
        reports = agree_on(self.weight.process_group, self._facts)
        lengths, sizes = zip(*(report["~sizes"] for report in reports), strict=True)

        def own(result: DTensor) -> torch.Tensor:
            return result.redistribute(self.ranks, [Shard(0, sizes=sizes)]).to_local()

        rows: torch.Tensor = self.call.run((), self._gathered(lengths, sizes), plain=own)
        return rows if self.bags else rows.view(*self.arguments["input"].shape, rows.shape[-1])

    def _facts(self) -> dict[str, Any]:
        """What is equal on all ranks that look up their own indices, and this rank's sizes, after its checks."""
        indices, offsets = self.arguments["input"], self.arguments.get("offsets")
        weights = self.arguments.get("per_sample_weights")
        self._check(indices, offsets, weights)
        facts = {"dtype": indices.dtype, "weighted": weights is not None}
        if not self.bags:
            return {**facts, "~sizes": (indices.numel(), indices.numel())}
        rows = len(indices) if offsets is None else len(offsets) - bool(self.arguments["include_last_offset"])
        return {**facts, "shape of a bag": tuple(indices.shape[1:]), "~sizes": (len(indices), rows)}

    def _check(self, indices: Any, offsets: Any, weights: Any) -> None:
        """Raise what is wrong with this rank's arguments."""
        name = self.call.name
        if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(f"{name}: indices must be a plain tensor of int32 or int64, got {kind_of(indices)}")
        if self.bags and indices.dim() not in (1, 2):
            raise ArgumentTypeError(f"{name}: indices must have 1 or 2 dims, got {indices.dim()}")
        is_offsets = isinstance(offsets, torch.Tensor) and offsets.dim() == 1 and offsets.dtype == indices.dtype
        if self.bags and not (is_offsets if indices.dim() == 1 else offsets is None):
            raise ArgumentTypeError(
                f"{name}: offsets must be a plain 1-D tensor of the dtype of the indices; 1-D indices need them, "
                "2-D indices have none"
            )
        if weights is not None and not (isinstance(weights, torch.Tensor) and weights.shape == indices.shape):
            raise ArgumentTypeError(f"{name}: per_sample_weights must be a plain tensor of the shape of the indices")
        if indices.device.type == "cpu" and indices.numel():
            low, high = torch.aminmax(indices)
            if low.item() < 0 or high.item() >= self.weight.shape[0]:
                raise IndexRangeError(f"{name}: an index is out of range of the {self.weight.shape[0]} rows")

    def _gathered(self, lengths: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
        """The arguments with the indices, offsets and weights of all ranks, rank after rank."""
        arguments = dict(self.arguments)
        for name in ("input", "per_sample_weights"):
            if arguments.get(name) is not None:
                tensor = arguments[name] if self.bags else arguments[name].reshape(-1)
                arguments[name] = self._collect(tensor, lengths)
        if arguments.get("offsets") is not None:
            last = bool(arguments["include_last_offset"])
            starts = list(accumulate(lengths, initial=0))
            own = arguments["offsets"] + starts[self.ranks.get_local_rank()]
            offsets = self._collect(own[: len(own) - last], rows)
            arguments["offsets"] = torch.cat([offsets, offsets.new_tensor(starts[-1:])]) if last else offsets
        return arguments

    def _collect(self, tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """S(0) -> R: each rank's gradient of the result is taken to be that of all ranks."""
        shape, rows = torch.Size([sum(sizes), *tensor.shape[1:]]), [Shard(0, sizes=tuple(sizes))]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, self.ranks, rows, run_check=False, shape=shape, stride=stride).full_tensor()
