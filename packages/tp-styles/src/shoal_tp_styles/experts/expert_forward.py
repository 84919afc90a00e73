"""Forward of a module of experts, on the experts or hidden features that this rank holds.

hidden features     x, choices, weights: R, W: S(hidden) -> y: P -> R
                    one reduction of y, and of each gradient
tokens replicated   x: R -> y: P -> R
                    each rank computes its experts for all tokens; one reduction
tokens sharded      x: S(0) -> y: S(0)
                    rows to the ranks of their experts by an all-to-all of exact sizes, and back by
                    another; one gather of the counts before them

On two axes the second axis shards hidden features: y is partial along it too, and is reduced over
both axes together. The rank that holds a token multiplies the experts' outputs by the weights of
the token's choices. So the gradient of these weights, which goes to the router, needs no rows of
other ranks.

A shared expert may be computed while tokens are in flight to the routed experts. The block's own
forward calls its experts first. While the rows are in flight, the shared expert runs on the block's
input, and the block's later call of the shared expert returns this output. In backward the shared
expert's backward overlaps the exchange of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, Partial, Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError
from shoal_dtensor.internal import eager_only, saving_state, shard_sizes, upload
from shoal_mesh import Comm, all_gather

from ..lowering.collective_functions import reduce
from ..lowering.lowered import Lowered, lowered_of, nbytes
from ..lowering.parameters import local_parameters, run_own_forward
from ..lowering.ports import DTensorForward, local_input
from ..lowering.shared_reduction import copy
from ..sharding.module_kinds import EXPERTS
from ..sharding.module_sharding import (
    Collective,
    Experts,
    ModuleCall,
    ModuleSharding,
    ParameterPlacement,
)
from .token_route import ExpertExchange, counts_of, first_pairs, sorted_choices, within_capacity


def local_shards(
    module: nn.Module, sharding: ModuleSharding, experts: Comm | None, hidden: Comm | None
) -> dict[str, Tensor | None]:
    """Return the local shards of all parameters, by path.

    The axis `experts` shards the experts, the axis `hidden` their hidden features.

    Every rank along an axis that replicates a parameter uses it in a part of the computation, so
    the gradients of the parameter are summed over the axis. A bias that is added to the sum over
    hidden features is zero on all ranks of `hidden` but the first.
    """
    by_expert: Mapping[str, ParameterPlacement] = {}
    by_feature: Mapping[str, ParameterPlacement] = sharding.parameters
    if experts is not None:
        by_expert = sharding.parameters
        by_feature = sharding.second_axis or {}
    by_comm: dict[Comm | None, dict[str, Tensor | None]] = {}
    for name, param in module.named_parameters():
        summed_over = None if name in by_feature else hidden
        if experts is not None and name not in by_expert:
            assert summed_over is None, (
                "experts with sharded hidden features only have parameters of experts"
            )
            summed_over = experts
        by_comm.setdefault(summed_over, {})[name] = param
    local: dict[str, Tensor | None] = {}
    for comm, params in by_comm.items():
        local |= local_parameters(params, comm)
        if comm is hidden and hidden is not None and hidden.rank > 0:
            for name in params:
                shard = local[name]
                local[name] = None if shard is None else shard * 0
    return local


def forward_of_own_experts(
    module: nn.Module, local: Mapping[str, Any], count: int, own_experts: range, *args: Any
) -> Any:
    """Run the module's own forward as if the module had this rank's experts only.

    Args:
        module: the module of experts.
        local: local shards of parameters, by path.
        count: number of experts of all ranks. Integer attributes with this value and "experts" in
            their names have the number of own experts during the call.
        own_experts: indices of this rank's experts.
        args: arguments of the forward.
    """
    values = dict(local)
    for name, value in vars(module).items():
        if "experts" in name and type(value) is int and value == count:
            values[name] = len(own_experts)
    if isinstance(module, nn.ModuleList):
        values["_modules"] = {
            str(i): module._modules[str(index)] for i, index in enumerate(own_experts)
        }
    return run_own_forward(module, values, *args)


class SlicedExperts(Lowered):
    """Forward of a module of experts under `ExpertTensorParallel`.

    Each rank holds some hidden features of all experts, so the module's own forward returns a
    partial sum.
    """

    sampling: ClassVar[Literal["refused"]] = "refused"

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from _shared_over(call, call.ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        module = self.module
        args = tuple(map(self.with_partial_gradient, args))
        kwargs = {name: self.with_partial_gradient(value) for name, value in kwargs.items()}
        local = local_shards(module, self.sharding, None, self.comm)
        out = run_own_forward(module, local, *args, **kwargs)
        if type(out) is not Tensor:
            raise UnsupportedModuleError(
                f"{self.sharding.style}: {type(module).__name__} returns a {type(out).__name__}; "
                "expected one tensor, the weighted sum over the experts of each token"
            )
        return reduce(out, self.comm)

    def with_partial_gradient(self, value: Any) -> Any:
        """Return an argument whose gradient is partial inside the module."""
        if isinstance(value, DTensor):
            return local_input(value, self.port_in, self.mesh, grad=Partial())
        if isinstance(value, Tensor):
            return copy(value, self.comm)
        return value


class DividedInput(Lowered):
    """Forward of a module without parameters among experts whose outputs are summed over ranks.

    Each rank computes on an equal share of the input, so the sum over the ranks is the output. This
    is correct for `nn.Identity`.
    """

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return run_own_forward(self.module, {}, input / self.comm.size, *args, **kwargs)


class _RankBounds(NamedTuple):
    """The rows of one rank that has tokens of its own.

    Attributes:
        bounds: the first row of each expert, and the end of the last expert's rows.
        rows: number of the rank's rows, including rows that belong to no expert.
    """

    bounds: list[int]
    rows: int


class RoutedExperts(Lowered):
    """Forward of a module of experts under `ExpertParallel`.

    Each expert is held by one rank along the first axis.
    """

    __slots__ = ("beside", "experts", "own_experts", "per_rank", "shared", "tensor")
    sampling: ClassVar[Literal["refused"]] = "refused"

    def resolve(self) -> None:
        self.experts: Experts = self.sharding.options_of(Experts)
        # Set by `OverlappedBlock` for the next call: returns the function to call while rows are in
        # flight, or None if nothing is to overlap.
        self.beside: Callable[[], Callable[[], None] | None] | None = None
        self.per_rank: list[int] = shard_sizes(self.experts.count, Shard(0), self.comm.size)
        # Example: 3 experts on 2 ranks, (2, 1) -> rank 1 has the experts 2:3.
        first = sum(self.per_rank[: self.comm.rank])
        self.own_experts: range = range(first, first + self.per_rank[self.comm.rank])
        # The axis that shards the hidden features, and the axes along which inputs are replicated
        # and outputs partial.
        self.tensor: Comm | None = self.mesh.comm(1) if self.mesh.ndim > 1 else None
        all_axes = self.comm if self.tensor is None else self.mesh.comm((0, 1))
        self.shared: Comm | None = self.tensor if self.has_sharded_tokens else all_axes

    @property
    def has_sharded_tokens(self) -> bool:
        """True if the ranks along the axis have different tokens."""
        return isinstance(self.sharding.input_port().desired, Shard)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        x = call.input()
        chosen = call.input(1)
        experts = call.sharding.options_of(Experts)
        assert x is not None, "experts get tokens"
        assert chosen is not None, "and choices"
        sizes = call.axis_sizes
        if not isinstance(call.sharding.input_port().desired, Shard):
            yield from _shared_over(call, prod(sizes))
            return
        ranks = sizes[0]
        routed = nbytes(x) if experts.grouped else nbytes(x) * chosen.shape[-1]
        counts_bytes = 8 * (experts.count + 2) * ranks
        yield Collective("all_gather", counts_bytes, ranks=ranks)
        yield from [Collective("all_to_all", routed, ranks=ranks)] * 2
        if call.output.requires_grad:
            exchange = Collective("all_to_all", routed, backward=True, ranks=ranks)
            yield from [exchange] * (1 + x.requires_grad)
        if len(sizes) > 1:
            yield from _shared_over(call, sizes[1])

    # not compiled, because the numbers of rows depend on values
    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.run(*args, *kwargs.values())

    def run(self, x: Tensor, chosen: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the module's output.

        The arguments are tokens and their choices, or rows sorted by expert and their counts.
        """
        if isinstance(x, DTensor):
            if self.mesh.ndim > 1:
                raise LayoutError(
                    f"{self.sharding.style}: on two axes the input must be a plain tensor, got "
                    f"{x.spec}"
                )
            grad = self.port_in.desired if self.has_sharded_tokens else Partial()
            x = local_input(x, self.port_in, self.mesh, grad=grad)
        elif self.shared is not None:
            x = copy(x, self.shared)
        if (weights is None) is not self.experts.grouped:
            raise LayoutError(
                f"{self.sharding.style}: call the experts with positional arguments, {EXPERTS}"
            )
        if weights is None:
            out = self.run_grouped(x, chosen)
        else:
            out = self.run_routed(x, chosen, weights)
        return out if self.shared is None else reduce(out, self.shared)

    def run_routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' outputs for each token, as a weighted sum over its choices."""
        if chosen.shape != weights.shape or chosen.shape[:-1] != x.shape[:-1]:
            raise LayoutError(
                f"{self.sharding.style}: expected choices and weights of shape (*tokens, choices) "
                f"for an input of shape {tuple(x.shape)}, got {tuple(chosen.shape)} and "
                f"{tuple(weights.shape)}"
            )
        if self.shared is not None:
            weights = copy(weights, self.shared)
        tokens = x.reshape(-1, x.shape[-1])
        choices = chosen.shape[-1]
        pairs, bounds = sorted_choices(chosen.reshape(len(tokens), choices), self.experts.count)
        ranks = self.read_bounds(bounds, chosen.numel())
        counts = [counts_of(rank.bounds) for rank in ranks]
        if self.experts.capacity is not None:
            total = sum(rank.rows for rank in ranks)
            counts = within_capacity(counts, self.experts.capacity, total)
        rank = self.comm.rank if self.has_sharded_tokens else 0
        pairs = first_pairs(pairs, ranks[rank].bounds, counts[rank])
        if not self.has_sharded_tokens:
            # Keep the pairs of this rank's experts. Example: 2 0 1 pairs of three experts, of which
            # this rank has 1:3 -> pairs[2:3].
            first = sum(counts[0][: self.own_experts.start])
            end = sum(counts[0][: self.own_experts.stop])
            pairs = pairs[first:end]
        # Example: with 2 choices per token, pair 5 is the second choice of token 2.
        token_ids = pairs // max(choices, 1)
        rows = self.run_experts(tokens.index_select(0, token_ids), counts)
        rows = rows * weights.reshape(-1).index_select(0, pairs).unsqueeze(-1)
        out = rows.new_zeros(len(tokens), rows.shape[-1]).index_add(0, token_ids, rows)
        return out.to(x.dtype).view(*x.shape[:-1], rows.shape[-1])

    def run_grouped(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Return the outputs for rows sorted by expert; partial if all ranks have all rows."""
        ranks: list[_RankBounds] = []
        fits = sizes.shape == (self.experts.count,)
        if fits:
            # Example: sizes 2 0 1 -> bounds 0 2 2 3.
            bounds = functional.pad(sizes.cumsum(0), (1, 0)).to(rows.device)
            ranks = self.read_bounds(bounds, len(rows))
        if not fits or any(rank.bounds[-1] > rank.rows for rank in ranks):
            raise LayoutError(
                f"{self.sharding.style}: expected one number of rows for each of "
                f"{self.experts.count} experts, {len(rows)} rows in all, got {sizes.tolist()}"
            )
        counts = [counts_of(rank.bounds) for rank in ranks]
        if self.has_sharded_tokens:
            used = ranks[self.comm.rank].bounds[-1]
            out = self.run_experts(rows.narrow(0, 0, used), counts)
            unused = len(rows) - used
            return functional.pad(out, (0, 0, 0, unused)) if unused else out
        # Example: bounds 0 2 2 3, and this rank has the experts 1:3 -> rows 2:3.
        start = ranks[0].bounds[self.own_experts.start]
        end = ranks[0].bounds[self.own_experts.stop]
        out = self.run_experts(rows.narrow(0, start, end - start), counts)
        # Example, continued: two rows of zeros before the output of row 2.
        return functional.pad(out, (0, 0, start, len(rows) - end))

    def read_bounds(self, bounds: Tensor, rows: int) -> list[_RankBounds]:
        """Return the bounds and number of rows of each rank that has tokens of its own.

        The host waits for the device only here.
        """
        if not self.has_sharded_tokens:
            return [_RankBounds(bounds.tolist(), rows)]
        sent = torch.cat([bounds, bounds.new_full((1,), rows)])
        received = all_gather(sent, self.comm).view(self.comm.size, -1).tolist()
        return [_RankBounds(values[:-1], values[-1]) for values in received]

    def run_experts(self, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """Return the experts' outputs for rows sorted by expert.

        If tokens are sharded, the rows are this rank's rows for all experts. If tokens are
        replicated, they are all rows for this rank's experts.
        """
        if not self.has_sharded_tokens:
            return self.compute(rows, [counts[0][self.own_experts.start : self.own_experts.stop]])
        exchange = ExpertExchange.of(counts, self.per_rank, self.comm)
        beside = self.beside() if self.beside is not None else None
        self.beside = None
        arrived = exchange.to_experts(rows, beside)
        return exchange.back(self.compute(arrived, exchange.rows_per_own_expert))

    def compute(self, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """Return the outputs of this rank's experts for rows ordered by sender, then by expert.

        `counts` has the number of rows from each sender for each own expert, (senders, experts).
        """
        module: Any = self.module
        local = local_shards(module, self.sharding, self.comm, self.tensor)
        if not self.own_experts:
            return rows + _anchor(local)
        if not len(rows):
            # Compute one row of zeros and drop its output, so that the parameters get gradients of
            # zero. The row is appended to `rows`, so that the backward of `rows`, which has
            # collectives, runs here as on the other ranks. Example for two experts: [[1, 0]].
            counts_of_one = [[int(index == 0) for index in range(len(self.own_experts))]]
            padded = functional.pad(rows, (0, 0, 0, 1))
            return self.compute(padded, counts_of_one).narrow(0, 0, 0)
        # Example: 2 0 1 and 1 1 0 rows from two senders for three experts -> the six parts end at
        # 2 2 3 4 5 5. Row 3 is in part 3, so it belongs to expert 3 % 3 = 0.
        flat_counts = [size for row in counts for size in row]
        ends = upload([*accumulate(flat_counts)], rows.device)
        row_ids = torch.arange(len(rows), device=rows.device)
        expert_ids = torch.searchsorted(ends, row_ids, right=True) % len(self.own_experts)
        run_forward = partial(
            forward_of_own_experts, module, local, self.experts.count, self.own_experts
        )
        if self.experts.grouped:
            order = torch.argsort(expert_ids, stable=True)
            # Example, continued: the three experts have 3 1 1 rows.
            sizes = upload([sum(column) for column in zip(*counts, strict=True)], rows.device)
            sorted_out = run_forward(rows.index_select(0, order), sizes)
            out: Tensor = sorted_out.index_select(0, torch.argsort(order))
        else:
            ones = torch.ones_like(expert_ids, dtype=rows.dtype).unsqueeze(-1)
            out = run_forward(rows, expert_ids.unsqueeze(-1), ones)
        return out + _anchor(local) if self.experts.listed else out


def _shared_over(call: ModuleCall, ranks: int) -> Iterator[Collective]:
    """Yield the collectives over ranks that have the same inputs.

    The output is reduced once, and so is the gradient of each input.
    """
    yield Collective("all_reduce", nbytes(call.output), ranks=ranks)
    for tensor in (*call.args, *call.kwargs.values()):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            yield Collective("all_reduce", nbytes(tensor), backward=True, ranks=ranks)


def _anchor(local: dict[str, Tensor | None]) -> Tensor:
    """Return a zero that depends on all parameters, so that each of them gets a gradient.

    The parameters of experts without rows get zeros.
    """
    zeros = [param.reshape(-1)[:0].sum() for param in local.values() if param is not None]
    return torch.stack(zeros).sum()


# --- a block whose shared expert overlaps the dispatch of tokens ----------------------------------

# Autograd's names of the nodes of views that keep all elements in order.
_VIEWS = {
    f"{view}Backward{i}"
    for view in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze")
    for i in (0, 1)
}


class BlockMembers(NamedTuple):
    """Paths of the experts and of the shared expert in their block."""

    experts: str
    shared: str


class OverlappedBlock(DTensorForward):
    """The forward of a block; its shared expert overlaps the dispatch of tokens."""

    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        members = self.sharding.options_of(BlockMembers)
        block = self.module
        experts = lowered_of(block.get_submodule(members.experts))
        if not isinstance(experts, RoutedExperts) or not experts.has_sharded_tokens:
            raise LayoutError(
                f"SharedExpertOverlap: {members.experts} of {type(block).__name__} does not "
                "dispatch tokens; give it ExpertParallel() with input_layouts=Shard(0), or leave "
                "SharedExpertOverlap out of the plan"
            )
        parent, _, name = members.shared.rpartition(".")
        siblings: dict[str, Any] = block.get_submodule(parent)._modules
        shared = siblings[name]
        tokens = (*args, *kwargs.values())[0]
        substitute = _SharedExpert(shared, members, tokens)
        siblings[name] = substitute
        experts.beside = substitute.start
        try:
            return super().__call__(*args, **kwargs)
        finally:
            siblings[name] = shared
            experts.beside = None
            substitute.in_turn = True


class _SharedExpert:
    """A substitute for a shared expert while its block runs.

    A call returns the output that was computed during the dispatch.

    A checkpoint inside the block is an exception: the shared expert is then computed when it is
    called (`in_turn`). A checkpoint of the experts would otherwise recompute the shared expert with
    them. A checkpoint of the shared expert still calls this object after the block has returned.
    """

    def __init__(self, shared: Any, members: BlockMembers, tokens: Tensor) -> None:
        self.shared = shared
        self.members = members
        self.tokens = tokens
        self.output: Tensor | None = None
        self.in_turn = False
        self.state = saving_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    def start(self) -> Callable[[], None] | None:
        """Return the function that runs the shared expert, or None if it cannot run now."""
        self.in_turn = saving_state() != self.state
        return None if self.in_turn else self.compute

    def compute(self) -> None:
        self.output = self.shared(self.tokens)

    def __call__(self, input: Tensor) -> Tensor:
        if self.in_turn:
            output: Tensor = self.shared(input)
            return output
        if self.output is None:
            raise self._wrong_call("before the experts")
        if not _is_same(input, self.tokens):
            raise self._wrong_call("with a tensor that is not the block's input")
        if input is self.tokens:
            return self.output
        return self.output.view(*input.shape[:-1], -1)

    def _wrong_call(self, circumstance: str) -> LayoutError:
        return LayoutError(
            f"SharedExpertOverlap: {self.members.shared} is called {circumstance}. The block's "
            f"forward must first call {self.members.experts}, then {self.members.shared} with the "
            "block's input or a view of it; change the forward, or leave SharedExpertOverlap out "
            "of the plan"
        )


def _is_same(input: Tensor, tokens: Tensor) -> bool:
    """Tell whether `input` is `tokens` or a view of it that passes gradients on unchanged."""
    if input is tokens:
        return True
    if type(input) is not Tensor or type(tokens) is not Tensor:
        return False
    if _properties_of_views(input) != _properties_of_views(tokens):
        return False
    return not tokens.requires_grad or _node_of_base(input) is _node_of_base(tokens)


def _properties_of_views(tensor: Tensor) -> tuple[object, ...]:
    """Return properties that are equal for a tensor and its views of other leading dims."""
    return (
        tensor.data_ptr(),
        tensor.numel(),
        tensor.shape[-1],
        tensor.dtype,
        tensor.is_contiguous(),
        tensor.requires_grad,
    )


def _node_of_base(tensor: Tensor) -> Any:
    """Return the autograd node, or the leaf, of the tensor that a tensor is a view of."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return tensor if node is None else getattr(node, "variable", node)
