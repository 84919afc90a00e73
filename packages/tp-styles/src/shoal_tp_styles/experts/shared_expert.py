"""A shared expert that is computed while tokens are under way to the routed experts, by a block as it is written.

The block calls its experts first. While their rows travel, the shared expert runs on the block's input, and in backward
its own backward while their gradients do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import eager_only, saving_state

from ..lowering.lowered import lowered_of
from ..lowering.ports import Boundary
from .expert_forward import RoutedExperts

# Autograd's names of views that keep all elements in order.
_VIEWS = {
    f"{view}Backward{i}" for view in ("View", "UnsafeView", "ReshapeAlias", "Unsqueeze", "Squeeze") for i in (0, 1)
}


class BlockMembers(NamedTuple):
    """Paths of the experts and of the shared expert in their block."""

    experts: str
    shared: str


class OverlappedBlock(Boundary):
    """The forward of a block, in which the shared expert runs beside the dispatch of tokens."""

    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        members, block = self.sharding.options_of(BlockMembers), self.module
        experts = lowered_of(block.get_submodule(members.experts))
        if not isinstance(experts, RoutedExperts) or not experts.sharded:
            raise LayoutError(
                f"SharedExpertOverlap: {members.experts} of {type(block).__name__} dispatches no tokens; give it "
                "ExpertParallel() with input_layouts=Shard(0), or leave SharedExpertOverlap out of the plan"
            )
        above, _, name = members.shared.rpartition(".")
        siblings: dict[str, Any] = block.get_submodule(above)._modules
        shared = siblings[name]
        computed = siblings[name] = _Computed(shared, members, (*args, *kwargs.values())[0])
        experts.beside = computed.start
        try:
            return super().__call__(*args, **kwargs)
        finally:
            siblings[name], experts.beside, computed.in_turn = shared, None, True


class _Computed:
    """Stands for a shared expert while its block runs: calls get what was computed beside the dispatch.

    It is computed where the block calls it in a recomputation: of the experts, to which what runs inside of them would
    belong, or of the shared expert itself, which still calls this object when the block is done.
    """

    def __init__(self, shared: Any, members: BlockMembers, tokens: Tensor) -> None:
        self.shared, self.members, self.tokens = shared, members, tokens
        self.output: Tensor | None = None
        self.in_turn, self.state = False, saving_state()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shared, name)

    def start(self) -> Callable[[], None] | None:
        """What runs the shared expert, if it can run now."""
        self.in_turn = saving_state() != self.state
        return None if self.in_turn else self.compute

    def compute(self) -> None:
        self.output = self.shared(self.tokens)

    def __call__(self, input: Tensor) -> Tensor:
        if self.in_turn:
            return self.shared(input)  # type: ignore[no-any-return]  # a module's call has no type
        if self.output is None or not _is_same(input, self.tokens):
            wrong = "before the experts" if self.output is None else "with another tensor than the block's input"
            raise LayoutError(
                f"SharedExpertOverlap: {self.members.shared} is called {wrong}. A block first calls "
                f"{self.members.experts}, then {self.members.shared} with its own input or a view of it; change its "
                "forward so, or leave SharedExpertOverlap out of the plan"
            )
        return self.output if input is self.tokens else self.output.view(*input.shape[:-1], -1)


def _is_same(input: Tensor, tokens: Tensor) -> bool:
    """Whether a tensor has the elements of another, and passes its gradient on to it unchanged."""
    if input is tokens or type(input) is not Tensor or type(tokens) is not Tensor:
        return input is tokens
    of_input, of_tokens = (
        (x.data_ptr(), x.numel(), x.shape[-1], x.dtype, x.is_contiguous(), x.requires_grad) for x in (input, tokens)
    )
    return of_input == of_tokens and (not tokens.requires_grad or _source(input) is _source(tokens))


def _source(tensor: Tensor) -> Any:
    """The node, or the leaf, of which a tensor is a view."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return tensor if node is None else getattr(node, "variable", node)
