"""Gradients of microbatches, added in the same order as the gradients of samples in one pass.

Autograd adds the gradients of four backward passes as ((a + b) + c) + d. `invariant_arithmetic`,
the mode of this package that makes bits independent of the number of ranks, adds the gradients of
four samples in one pass as (a + b) + (c + d), in a binary tree. Here the gradients of every pass
are moved out of `.grad` and added in the same tree. These are its nodes:

    after pass 1    a
    after pass 2    a+b
    after pass 3    a+b   and   c
    after pass 4    (a+b)+(c+d)

May import: arithmetic, invariant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shoal_data_parallel.internal import units_of
from shoal_dtensor.errors import StyleError
from shoal_dtensor.internal import check_types, owners_of, submodule_of

from .arithmetic import refuse_tied
from .invariant.blocks import current_arithmetic

Microbatch = TypeVar("Microbatch")


class _Node(NamedTuple):
    """The sum of the gradients of consecutive passes.

    Attributes:
        passes: the number of passes, a power of two.
        grads: the sum for each parameter; None if it has no gradient in any of the passes.
    """

    passes: int
    grads: list[Tensor | None]


class _GradientTree:
    """The tree over the gradients of several passes over one model."""

    def __init__(self, model: nn.Module, count: int) -> None:
        if current_arithmetic() is None:
            raise StyleError(
                "gradients of microbatches can be added in a tree only inside "
                "invariant_arithmetic()"
            )
        is_power_of_two = count > 0 and count.bit_count() == 1
        if not is_power_of_two:
            raise StyleError(
                "the number of microbatches must be a power of two, with microbatches of equal "
                f"size; got {count}"
            )
        refuse_tied(model)
        self._check_dtypes(model)
        self.model = model
        self.count = count
        self.params: list[nn.Parameter] = []
        self.passes = 0
        # One node for each 1 among the binary digits of the number of passes so far, the largest
        # first. Example: after 6 passes there are nodes of 4 and 2 passes.
        self.nodes: list[_Node] = []

    @staticmethod
    def _check_dtypes(model: nn.Module) -> None:
        """Refuse gradients that are reduced in one dtype and accumulated in another."""
        for unit in units_of(model):
            for parameter in unit.parameters:
                # `reduced` is the layout in which ranks add gradients. `leaf` is the parameter
                # whose `.grad` gets the sum.
                in_pass = parameter.reduced.dtype
                over_passes = parameter.leaf.dtype
                if in_pass != over_passes:
                    raise StyleError(
                        f"one pass adds gradients of samples in {in_pass}, but gradients of "
                        f"passes would be added in {over_passes}; store parameters in the dtype "
                        "of the computation, and leave out param_dtype"
                    )

    def begin(self) -> None:
        """Collect the parameters for a new tree; raise StyleError if one has a gradient."""
        self.params = [*self.model.parameters()]
        self.passes = 0
        self.nodes = []
        if any(param.grad is not None for param in self.params):
            raise StyleError(
                "parameters have gradients of an earlier pass, which would be added to those of "
                "the microbatches; drop them first"
            )

    @torch.no_grad()
    def add(self, number: int) -> None:
        """Move the gradients of pass `number` out of `.grad` into the tree."""
        if number != self.passes:
            raise StyleError(
                f"the backward of microbatch {number} ran as number {self.passes}; run the "
                "backward passes in the order of the microbatches"
            )
        for owner in owners_of(self.model):
            if owner.keeps_gradients:
                raise StyleError(
                    f"{owner.made_by} accumulates gradients of microbatches one after the other; "
                    "let every backward reduce them (without no_sync() and "
                    "reduce_after_last_microbatch)"
                )
        node = _Node(1, [param.grad for param in self.params])
        for param in self.params:
            param.grad = None
        self.passes += 1
        # Add two nodes of equal size to one of twice the size, as a binary counter carries.
        while self.nodes and self.nodes[-1].passes == node.passes:
            node = _join(self.nodes.pop(), node)
        self.nodes.append(node)

    def finish(self) -> None:
        """Put the sums into `.grad`."""
        if self.passes != self.count:
            raise StyleError(
                f"expected one backward pass for each of {self.count} microbatches, got "
                f"{self.passes}"
            )
        root = self.nodes.pop()
        for param, grad in zip(self.params, root.grads, strict=True):
            param.grad = grad


def _join(left: _Node, right: _Node) -> _Node:
    """Add the gradients of two nodes, in the memory of the left one."""
    grads = list[Tensor | None]()
    for a, b in zip(left.grads, right.grads, strict=True):
        if a is None or b is None:
            grads.append(a if b is None else b)
        else:
            grads.append(a.add_(b))
    return _Node(left.passes + right.passes, grads)


@check_types(model=nn.Module, microbatches=Sequence)
def accumulate_in_tree(
    model: nn.Module, microbatches: Sequence[Microbatch]
) -> Iterator[Microbatch]:
    """Yield the microbatches one by one, and add up their gradients.

    The sum has the same bits as the gradients of one backward pass over all samples.

    In every turn of the loop, run one backward pass of a loss that is divided by the number of
    microbatches. There must be no gradients before the loop. During a turn `.grad` has the
    gradients of that pass; after the last turn it has the sum. The tree keeps at most
    log2(number of microbatches) + 1 copies of the gradients. If the loop ends early, the gradients
    of all earlier turns are lost, because the tree gives them back only after the last turn.

    With data parallelism, microbatches are consecutive parts of the global batch. Each of them is
    divided among the ranks, and every backward reduces its gradients over the ranks.

    Args:
        model: a model that was made parallel inside `invariant_arithmetic`.
        microbatches: the microbatches. Their number is a power of two, and all have the same number
            of samples.

    Returns:
        An iterator over the microbatches.

    Raises:
        StyleError: outside `invariant_arithmetic`; if the number of microbatches is not a power of
            two; if there are gradients before the loop; or if `replicate` or `fully_shard` keeps
            gradients for a later reduction.
        TiedWeightError: if modules share a parameter. Autograd would add the gradients of the
            modules in every pass, before the tree adds those of the passes. In one pass over all
            samples, the samples are added first.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_same_bits import invariant_arithmetic
        >>> from shoal_tp_styles import parallelize_module
        >>> with fake_world(1), invariant_arithmetic():
        ...     mesh = init_device_mesh("cpu", (1,))
        ...     model = parallelize_module(nn.Linear(8, 8), mesh, "colwise")
        ...     for part in accumulate_in_tree(model, torch.ones(8, 2, 8).chunk(4)):
        ...         (model(part).mean() / 4).backward()
        ...     model.bias.grad.shape
        torch.Size([8])
    """
    # A wrong call raises here, and not at the first turn of the loop, when `turns` begins to run.
    tree = _GradientTree(model, len(microbatches))
    tree.begin()

    def turns() -> Iterator[Microbatch]:
        for number, microbatch in enumerate(microbatches):
            yield microbatch
            tree.add(number)
        tree.finish()

    return turns()


@check_types(microbatches=int)
def accumulate_stage_in_tree(stage: Any, microbatches: int) -> None:
    """Make a stage of `torch.distributed.pipelining` add gradients as `accumulate_in_tree` does.

    Args:
        stage: a pipeline stage, changed in place. Its `submod` was made parallel inside
            `invariant_arithmetic`.
        microbatches: the number of microbatches of a step of the schedule, a power of two.

    Raises:
        StyleError: in the cases of `accumulate_in_tree`. A step raises it too if its schedule runs
            the backward passes in another order than that of the microbatches.
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
    backward_weight = stage.backward_weight_one_chunk
    reduce_gradients = stage.perform_reduce_grad

    def backward_one_chunk(
        number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if number == 0:
            tree.begin()
        backward(number, loss=loss, full_backward=full_backward, last_backward=last_backward)
        # Otherwise the schedule computes gradients of weights later (`backward_weight_one_chunk`).
        if full_backward and stage.has_backward:
            tree.add(number)

    def backward_weight_one_chunk(number: int, last_backward: bool = False) -> None:
        backward_weight(number, last_backward=last_backward)
        if stage.has_backward:
            tree.add(number)

    def perform_reduce_grad(grad_scale_factor: int) -> None:
        tree.finish()
        reduce_gradients(grad_scale_factor)

    # The schedules of torch call these methods of the stage, and have no hooks between passes.
    stage.backward_one_chunk = backward_one_chunk
    stage.backward_weight_one_chunk = backward_weight_one_chunk
    stage.perform_reduce_grad = perform_reduce_grad
