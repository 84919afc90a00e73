"""Gradients of microbatches, added in the tree in which `invariant_arithmetic` adds those of samples.

Autograd adds the gradients of four backward passes as ((a + b) + c) + d, those of four samples in
one pass are (a + b) + (c + d). Here the gradients of every pass are taken out of `.grad`, and nodes
of one height are added.

May import: arithmetic, invariant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shoal_data_parallel.internal import units_of
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import owners_of, submodule_of, takes

from .arithmetic import refuse_tied
from .invariant.blocks import current_arithmetic

Microbatch = TypeVar("Microbatch")


class _GradientTree:
    """The gradients of some passes over one model."""

    def __init__(self, model: nn.Module, count: int) -> None:
        if current_arithmetic() is None:
            raise StyleError(
                "gradients of microbatches are added in a tree inside invariant_arithmetic()"
            )
        if count < 1 or count & (count - 1):
            raise StyleError(
                f"{count} microbatches are no node of the tree over samples; take a power of two, "
                "of equal sizes"
            )
        refuse_tied(model)
        units = (parameter for unit in units_of(model) for parameter in unit.parameters)
        other = next((p for p in units if p.reduced.dtype != p.leaf.dtype), None)
        if other is not None:
            raise StyleError(
                f"one pass adds gradients of samples in {other.reduced.dtype}, those of passes "
                "would be added in "
                f"{other.leaf.dtype}; have parameters in the dtype of the computation, without "
                "param_dtype"
            )
        # passes: so far
        self.model = model
        self.count = count
        self.passes = 0
        # (How many passes, their gradients): the binary digits of the passes so far, largest first.
        self.nodes: list[tuple[int, list[Tensor | None]]] = []

    def begin(self) -> None:
        """Find the parameters; none may have a gradient."""
        self.params, self.passes, self.nodes = [*self.model.parameters()], 0, []
        if any(param.grad is not None for param in self.params):
            raise StyleError(
                "gradients of an earlier pass would be added to those of microbatches; drop them "
                "first"
            )

    @torch.no_grad()
    def add(self, number: int) -> None:
        """Take the gradients of pass `number`."""
        if number != self.passes:
            raise StyleError(
                f"microbatch {number} has its backward in place {self.passes}; the tree needs "
                "their order"
            )
        kept = next((owner.owner for owner in owners_of(self.model) if owner.keeps_gradients), None)
        if kept is not None:
            raise StyleError(
                f"{kept} keeps gradients of microbatches, which it adds one after the other; have "
                "every backward "
                "reduce them (no no_sync() and no reduce_after_last_microbatch)"
            )
        size = 1
        grads = [param.grad for param in self.params]
        for param in self.params:
            param.grad = None
        self.passes += 1
        while self.nodes and self.nodes[-1][0] == size:
            _, left = self.nodes.pop()
            pairs = zip(left, grads, strict=True)
            size = 2 * size
            grads = [b if a is None else a if b is None else a.add_(b) for a, b in pairs]
        self.nodes.append((size, grads))

    def finish(self) -> None:
        """Put the sums into `.grad`."""
        if self.passes != self.count:
            raise StyleError(
                f"{self.count} microbatches were announced, and there were {self.passes} backward "
                "passes"
            )
        for param, grad in zip(self.params, self.nodes.pop()[1], strict=True):
            param.grad = grad


@takes(model=nn.Module, microbatches=Sequence)
def accumulate_in_tree(
    model: nn.Module, microbatches: Sequence[Microbatch]
) -> Iterator[Microbatch]:
    """The microbatches one by one; `.grad` then has the bits of one pass over all of them.

    Every turn of the loop runs one backward pass, of a loss that is divided by the number of
    microbatches. Before the loop there are no gradients, during it `.grad` has those of one pass,
    and after its last turn the sum. A few gradients are kept: as many as the number of microbatches
    has binary digits. A loop that is left early leaves none.

    With data parallelism, microbatches are consecutive parts of the global batch, each divided
    among the ranks, and every backward reduces.

    Args:
        model: made parallel inside `invariant_arithmetic`.
        microbatches: of equal numbers of samples, a power of two of them.

    Raises:
        StyleError: outside `invariant_arithmetic`; if the number is no power of two; if there are
            gradients before, or `replicate` or `fully_shard` keeps them for a later reduction.
        TiedWeightError: if modules share a parameter, whose gradients autograd adds in every pass
            first.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_same_bits import invariant_arithmetic
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic():
        ...     model = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (1,)), "colwise")
        ...     for part in accumulate_in_tree(model, torch.ones(8, 2, 8).chunk(4)):
        ...         (model(part).mean() / 4).backward()
        ...     model.bias.grad.shape
        torch.Size([8])
    """
    tree = _GradientTree(model, len(microbatches))
    tree.begin()

    def turns() -> Iterator[Microbatch]:
        for number, microbatch in enumerate(microbatches):
            yield microbatch
            tree.add(number)
        tree.finish()

    return turns()


@takes(microbatches=int)
def accumulate_stage_in_tree(stage: Any, microbatches: int) -> None:
    """Have a stage of `torch.distributed.pipelining` add gradients as `accumulate_in_tree` does, in every step.

    Args:
        stage: a pipeline stage whose `submod` was made parallel inside `invariant_arithmetic`;
            changed in place.
        microbatches: of a step of the schedule, a power of two.

    Raises:
        StyleError: as `accumulate_in_tree`; and in a step, if its schedule runs backwards in
            another order.
        TiedWeightError: if modules of the stage share a parameter.

    Example:
        >>> from torch.distributed.pipelining import PipelineStage
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_data_parallel import replicate
        >>> from shoal_same_bits import invariant_arithmetic
        >>> with fake_world(4), invariant_arithmetic():
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        ...     half = replicate(nn.Linear(8, 8), mesh["data"])
        ...     stage = PipelineStage(half, 0, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        ...     accumulate_stage_in_tree(stage, microbatches=4)
    """
    tree = _GradientTree(submodule_of("accumulate_stage_in_tree", stage), microbatches)
    backward = stage.backward_one_chunk
    weights = stage.backward_weight_one_chunk
    reduce = stage.perform_reduce_grad

    def backward_one_chunk(
        number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if number == 0:
            tree.begin()
        backward(number, loss=loss, full_backward=full_backward, last_backward=last_backward)
        if full_backward and stage.has_backward:
            tree.add(number)

    def backward_weight_one_chunk(number: int, last_backward: bool = False) -> None:
        weights(number, last_backward=last_backward)
        if stage.has_backward:
            tree.add(number)

    def perform_reduce_grad(grad_scale_factor: int) -> None:
        tree.finish()
        reduce(grad_scale_factor)

    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk
    stage.perform_reduce_grad = perform_reduce_grad
