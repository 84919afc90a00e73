"""`ExpertParallel` and `ExpertTensorParallel`: sharding by experts, or by their hidden features.

Both styles go on the module that holds the experts and is called as `(hidden_states, top_k_index,
top_k_weights)` or `(rows, num_tokens_per_expert)`; the router and shared experts are separate
modules. `SharedExpertOverlap` goes on the block that holds all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Placement, Replicate, Shard
from shoal_dtensor.errors import LayoutError

from ..experts.expert_forward import (
    BlockMembers,
    DividedInput,
    OverlappedBlock,
    RoutedExperts,
    SlicedExperts,
)
from ..sharding.module_kinds import class_of, expert_shards, experts_of, hidden_shards
from ..sharding.module_sharding import ModuleSharding, Port
from .style import DeclaredStyle, unsupported_error


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ExpertParallel(DeclaredStyle):
    """Style that holds some experts on each rank, and sends tokens to them.

    The experts are packed in parameters of shape (experts, ...), or are the children of a
    ModuleList with a forward. The number of experts need not be a multiple of the number of ranks.
    No tokens are dropped unless a capacity is given.

    On two axes, `ExpertParallel().on(("expert", "tensor"))`, the second one shards the hidden
    features of each expert as `ExpertTensorParallel` does; all ranks along it have the same tokens.

    Args:
        input_layouts: `Shard(0)`: every rank along the axis has tokens of its own, which are sent
            to the ranks of their experts and back. `Replicate()`: all ranks have all tokens; each
            computes its experts for them, and the outputs are summed.
        capacity_factor: capacity of an expert, as a multiple of the tokens that it would get if all
            experts got equally many, over all ranks; the last tokens are dropped and get no output
            from this expert.

    Raises:
        LayoutError: if the layout is another one, or the factor is not positive (at construction).
        UnsupportedModuleError: if the module is not called in one of these ways (when applied).

    Example:
        >>> import torch
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.ones(4, 2, 8))
        ...     def forward(self, hidden_states, top_k_index, top_k_weights): ...
        >>> ExpertParallel().sharding(Experts()).parameters
        {'up': Shard(dim=0)}
    """

    input_layouts: Placement = Shard(0)  # an immutable value
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if self.input_layouts not in (Replicate(), Shard(0)):
            raise LayoutError(
                "ExpertParallel: input_layouts must be Shard(0) or Replicate(), got "
                f"{self.input_layouts!r}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise LayoutError(
                "ExpertParallel: capacity_factor must be a positive number or None, got "
                f"{self.capacity_factor}"
            )

    def sharding(self, module: nn.Module) -> ModuleSharding:
        experts = experts_of("ExpertParallel", module, self.capacity_factor)
        hidden = None
        if isinstance(self.axis, tuple):
            hidden = hidden_shards("ExpertParallel", module)
        port = Port(self.input_layouts, self.input_layouts)
        inputs = 2 if experts.grouped else 3
        return ModuleSharding(
            "ExpertParallel",
            expert_shards(module, experts),
            second_axis=hidden,
            inputs=(port,) * inputs,
            outputs=(port,),
            lowering=RoutedExperts,
            options=experts,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class ExpertTensorParallel(DeclaredStyle):
    """Style that holds some hidden features of every expert on each rank, and sums the outputs.

    The style recognizes parameters by their names: gate_up_proj, gate_proj, up_proj, w1, w3 and
    down_proj, w2, and their biases. They are packed over the experts, or belong to Linears in a
    ModuleList. All ranks have the same tokens.

    Raises:
        UnsupportedModuleError: if the module has other parameters (when applied).

    Example:
        >>> import torch
        >>> class Experts(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate_up_proj = nn.Parameter(torch.ones(4, 16, 2))
        ...         self.down_proj = nn.Parameter(torch.ones(4, 2, 8))
        >>> ExpertTensorParallel().sharding(Experts()).placements("gate_up_proj", (2,))
        (StridedShard(dim=1, sf=2, sizes=(4, 4)),)
    """

    def sharding(self, module: nn.Module) -> ModuleSharding:
        port = Port(Replicate(), Replicate())
        return ModuleSharding(
            "ExpertTensorParallel",
            hidden_shards("ExpertTensorParallel", module),
            inputs=(port,),
            outputs=(port,),
            lowering=SlicedExperts,
        )


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class IdentityExpert(DeclaredStyle):
    """Style for an `nn.Identity` among experts: each rank returns its share of the sum.

    The other experts have the style `ExpertTensorParallel`, so the outputs of all experts are
    summed over the ranks.

    Raises:
        UnsupportedModuleError: if the module is another one (when applied).

    Example:
        >>> IdentityExpert().sharding(nn.Identity()).distributes
        False
    """

    def sharding(self, module: nn.Module) -> ModuleSharding:
        if class_of(module) is not nn.Identity:
            raise unsupported_error("IdentityExpert", module, (nn.Identity,))
        return ModuleSharding("IdentityExpert", lowering=DividedInput, distributes=False)


@dataclass(unsafe_hash=True, kw_only=True, repr=False)
class SharedExpertOverlap(DeclaredStyle):
    """Style that computes a block's shared expert while tokens are in flight to routed experts.

    In the backward, the shared expert's backward overlaps the exchange of gradients.

    The style goes on the block that holds both, in addition to `ExpertParallel()` on its experts.
    Values and collectives stay the same. The block calls the experts first, then the shared expert
    with its own input or a view of it; the shared expert treats every token alone. A compiled graph
    breaks at the block. A checkpoint goes around the block, not inside.

    Args:
        experts: path of the experts in the block.
        shared: path of the shared expert in the block.

    Raises:
        LayoutError: if the block has no such modules (when applied), or does something else, or its
            experts dispatch no tokens (when called).

    Example:
        >>> block = nn.ModuleDict({"experts": nn.ModuleList(), "shared_experts": nn.Linear(2, 2)})
        >>> SharedExpertOverlap().sharding(block).options
        BlockMembers(experts='experts', shared='shared_experts')
    """

    experts: str = "experts"
    shared: str = "shared_experts"

    def sharding(self, module: nn.Module) -> ModuleSharding:
        for path in (self.experts, self.shared):
            try:
                module.get_submodule(path)
            except AttributeError:
                children = ", ".join(name for name, _ in module.named_children())
                raise LayoutError(
                    f"SharedExpertOverlap: {type(module).__name__} does not have a module "
                    f"{path!r}; its modules are {children}"
                ) from None
        return ModuleSharding(
            "SharedExpertOverlap",
            lowering=OverlappedBlock,
            options=BlockMembers(self.experts, self.shared),
            distributes=False,
        )
