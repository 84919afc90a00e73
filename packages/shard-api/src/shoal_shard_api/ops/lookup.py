"""``F.embedding`` and ``F.embedding_bag`` of a sharded weight and plain indices, each rank's own or replicated.

Own indices are gathered over the ranks and looked up as one batch; each rank keeps the rows of its own.  On a 1-D mesh
the last step is a reduce-scatter of the rows:

    indices of ranks 0..2   [3 7] [] [1]     gathered: [3 7 1], one shard of rows per rank: sizes (2, 0, 1)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, product
from typing import Any

import torch
import torch.nn.functional as F

from shoal_dtensor import DTensor, Shard
from shoal_dtensor.internal import spans, whole_box
from shoal_mesh import DeviceMesh, all_gather
from shoal_mesh.internal import dataclass

from ..arguments import expect, type_name
from ..errors import ArgumentTypeError, IndexRangeError, RankMismatchError
from ..ranks.process_groups import comm_of
from ..ranks.reshard import collect, move
from .dtensor_conversion import from_dtensor

_REPLICATED: ContextVar[bool] = ContextVar("replicated_indices", default=False)

LOOKUPS: dict[Callable[..., Any], inspect.Signature] = {
    F.embedding: inspect.signature(F.embedding),
    F.embedding_bag: inspect.signature(F.embedding_bag),
}

_PROBLEMS = (
    "",
    "indices must be a plain tensor of int32 or int64",
    "offsets must be a plain 1-D tensor of the dtype of the indices; 1-D indices need them, 2-D indices have none",
    "indices of embedding_bag must have 1 or 2 dims",
    "per_sample_weights must be a plain tensor of the shape of the indices",
    "an index is out of range",
)


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
    token = _REPLICATED.set(equal)
    try:
        yield
    finally:
        _REPLICATED.reset(token)


def look_up(
    call_of: Callable[..., Any], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Indices -> rows: the result of a look-up; plain for plain indices; all ranks call it.

    Args:
        call_of: The DTensorCall of this function and some of its ShardedTensors, all of them by default.
        func: embedding or embedding_bag.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ArgumentTypeError: Indices, offsets or per-sample weights have a wrong type or shape.
        IndexRangeError: An index is out of range (checked on CPU).
        RankMismatchError: Ranks have indices of different dtypes, bags of different widths, or weights on some only.

        Each is raised on every rank.
    """
    bound = LOOKUPS[func].bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    weight = arguments["weight"]
    own = [arguments[name] for name in ("input", "offsets", "per_sample_weights") if name in arguments]
    call = call_of()
    if not isinstance(weight, call.cls) or any(isinstance(each, call.cls | DTensor) for each in own):
        return call.run(args, kwargs)
    call = call_of([weight])
    call.check_layouts()
    group = _Lookup(call, func, arguments, comm_of(weight.process_group, weight.device.type))
    return group.replicated() if _REPLICATED.get() else group.own_rows()


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a rank looks up: ``rows`` results from ``indices`` indices, of ``width`` each in 2-D bags."""

    problem: int
    dtype: int
    dims: int
    width: int
    weighted: int
    indices: int
    rows: int


class _Lookup:
    """One call of embedding or embedding_bag with plain indices."""

    def __init__(self, call: Any, func: Callable[..., Any], arguments: dict[str, Any], comm: Any) -> None:
        self.call, self.func, self.arguments, self.comm = call, func, arguments, comm
        self.weight = arguments["weight"]
        self.bags = func is F.embedding_bag

    def replicated(self) -> Any:
        """The result of indices that are equal on all ranks: no gather."""
        self._raise([self._describe()])
        return self.call.run((), self.arguments, plain=DTensor.full_tensor)

    def own_rows(self) -> Any:
        """The rows of this rank's indices."""
        mine = self._describe()
        table = torch.tensor([[getattr(mine, name) for name in _Rows.__slots__]], device=self.weight.device)
        ranks = [_Rows(*row) for row in all_gather(table, self.comm).tolist()]
        self._raise(ranks)
        home = self.call.home()
        order = [home.rank_at(each) for each in product(*(range(n) for n in home.shape))]
        in_order = [ranks[self.comm.ranks.index(rank)] for rank in order]
        gathered = self._gathered(order, in_order)
        rows: torch.Tensor = self.call.run((), gathered, plain=lambda result: self._own(result, home, order, in_order))
        return rows if self.bags else rows.view(*self.arguments["input"].shape, rows.shape[-1])

    def _describe(self) -> _Rows:
        """The sizes of this rank's arguments, or the number of the problem with them."""
        indices, offsets = self.arguments["input"], self.arguments.get("offsets")
        weights = self.arguments.get("per_sample_weights")
        problem = self._problem(indices, offsets, weights)
        if problem:
            return _Rows(problem, 0, 0, 0, 0, 0, 0)
        bags = indices.shape[0] if offsets is None else len(offsets) - bool(self.arguments["include_last_offset"])
        return _Rows(
            problem=0,
            dtype=indices.element_size(),
            dims=indices.dim() if self.bags else 1,
            width=indices.shape[1] if self.bags and indices.dim() == 2 else 0,
            weighted=0 if weights is None else 1,
            indices=indices.numel(),
            rows=bags if self.bags else indices.numel(),
        )

    def _problem(self, indices: Any, offsets: Any, weights: Any) -> int:
        if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
            return 1
        if self.bags and indices.dim() not in (1, 2):
            return 3
        if self.bags and (offsets is not None) is not (indices.dim() == 1):
            return 2
        if offsets is not None and not (
            isinstance(offsets, torch.Tensor) and offsets.dim() == 1 and offsets.dtype == indices.dtype
        ):
            return 2
        if weights is not None and not (isinstance(weights, torch.Tensor) and weights.shape == indices.shape):
            return 4
        if indices.device.type == "cpu" and indices.numel():
            low, high = torch.aminmax(indices)
            return 5 if low.item() < 0 or high.item() >= self.weight.shape[0] else 0
        return 0

    def _raise(self, ranks: Sequence[_Rows]) -> None:
        """Raise what is wrong with the arguments of some rank; all ranks see the same sizes."""
        name = self.call.name
        wrong = {rank: each.problem for rank, each in enumerate(ranks) if each.problem}
        if wrong:
            problem = min(wrong.values())
            kind: type[Exception] = IndexRangeError if problem == 5 else ArgumentTypeError
            own = f"; here the indices are a {type_name(self.arguments['input'])}"
            where = f" (ranks {[rank for rank, each in wrong.items() if each == problem]})" if len(ranks) > 1 else ""
            raise kind(f"{name}: {_PROBLEMS[problem]}{where}{own if problem == 1 else ''}")
        for field in ("dtype", "dims", "width", "weighted"):
            values = [getattr(each, field) for each in ranks]
            if len(set(values)) > 1:
                raise RankMismatchError(
                    f"{name}: the {field} of the indices differs between ranks: {values}; dtype is in bytes"
                )

    def _gathered(self, order: Sequence[int], ranks: Sequence[_Rows]) -> dict[str, Any]:
        """The arguments with the indices, offsets and weights of all ranks, rank after rank in mesh order."""
        arguments = dict(self.arguments)
        names = ["input", "per_sample_weights"] if ranks[0].weighted else ["input"]
        for name in names:
            tensor = arguments[name] if self.bags else arguments[name].reshape(-1)
            arguments[name] = self._collect(tensor, [each.indices // max(each.width, 1) for each in ranks], order)
        if arguments.get("offsets") is not None:
            last = bool(arguments["include_last_offset"])
            starts = list(accumulate((each.indices for each in ranks), initial=0))
            own = arguments["offsets"] + starts[order.index(self.comm.ranks[self.comm.rank])]
            offsets = self._collect(own[: len(own) - last], [each.rows for each in ranks], order)
            arguments["offsets"] = torch.cat([offsets, offsets.new_tensor(starts[-1:])]) if last else offsets
        return arguments

    def _collect(self, tensor: torch.Tensor, sizes: Sequence[int], order: Sequence[int]) -> torch.Tensor:
        layout = {rank: (span, *whole_box(tensor.shape[1:])) for rank, span in zip(order, spans(sizes), strict=True)}
        shape = torch.Size([sum(sizes), *tensor.shape[1:]])
        return collect([tensor], tuple((rank, layout[rank]) for rank in self.comm.ranks), shape, self.comm)

    def _own(self, result: DTensor, home: DeviceMesh, order: Sequence[int], ranks: Sequence[_Rows]) -> torch.Tensor:
        """Partial or sharded -> S(0), one shard of rows per rank, returned as a plain tensor with its gradient."""
        sizes = tuple(each.rows for each in ranks)
        if home.ndim == 1:
            return result.redistribute(placements=[Shard(0, sizes=sizes)]).to_local()
        even = result.redistribute(placements=[Shard(0)] * home.ndim)
        sharded = from_dtensor(self.call.cls, even, like=self.weight)
        width = (0, result.shape[1])
        target = tuple((rank, (span, width)) for rank, span in zip(order, spans(sizes), strict=True))
        return move(sharded._local_tensors, sharded._layout, target, self.comm)[0].view(-1, result.shape[1])
