"""A model under a plan against the same model on one device: `as_one_device`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Shard, distribute_tensor
from shoal_dtensor.internal import pytree
from shoal_mesh import CommDebugMode, DeviceMesh
from shoal_tp_styles import parallelize_module
from small_models import assert_same_parameters
from tp_checks import counts


class Run(NamedTuple):
    """What a parallel model did.

    Attributes:
        outputs: what it returned, as one list.
        forward, backward: its collectives, as `counts` has them.
    """

    outputs: list[Tensor]
    forward: dict[str, int]
    backward: dict[str, int]


def as_one_device(
    model: nn.Module,
    plan: Any,
    mesh: DeviceMesh,
    inputs: Sequence[Tensor | None],
    *,
    arriving: Placement | None = None,
    leaving: Placement | None = None,
    lower: bool = True,
    **options: Any,
) -> Run:
    """Raise unless a copy of a model under a plan computes what the model does.

    Compared are all outputs, the gradients of inputs and parameters, the parameters and the
    buffers. Gradients of the outputs are random, and parameters' gradients have the parameters'
    placements.

    Args:
        model: on one device, the same on all ranks.
        plan: as for `parallelize_module`.
        mesh: of one axis.
        inputs: whole, the same on all ranks; those of floating point get gradients.
        arriving: how each rank's plain inputs arrive; None: replicated.
        leaving: how outputs leave, plain or as DTensors; None: replicated.
        lower: as for `parallelize_module`.
        options: keyword arguments of both calls.
    """
    model.zero_grad()
    parallel: Any = parallelize_module(copy.deepcopy(model), mesh, plan, lower=lower)
    theirs = [_leaf(x) for x in inputs]
    ours = [_leaf(None if x is None else shard_of(x, arriving, mesh)) for x in inputs]
    expected = pytree.tree_leaves(model(*theirs, **options))
    with CommDebugMode() as forward:
        outputs = pytree.tree_leaves(parallel(*ours, **options))
    got = [out.to_local() if isinstance(out, DTensor) else out for out in outputs]
    if isinstance(leaving, Partial):
        got = [
            DTensor.from_local(out, mesh, [leaving], run_check=False).full_tensor() for out in got
        ]
    for out, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(out, shard_of(wanted, leaving, mesh))
    seeds = [torch.randn_like(out) for out in expected]
    torch.autograd.backward(expected, seeds)
    with CommDebugMode() as backward:
        torch.autograd.backward(got, [shard_of(seed, leaving, mesh) for seed in seeds])
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None and other.requires_grad:
            assert other.grad is not None, "every input of floating point is used"
            torch.testing.assert_close(mine.grad, shard_of(other.grad, arriving, mesh))
    for name, param in parallel.named_parameters():
        if isinstance(param, DTensor):
            assert isinstance(param.grad, DTensor), f"{name}: the gradient is a DTensor"
            assert param.grad.placements == param.placements, name
    assert_same_parameters(parallel, model)
    return Run(outputs, counts(forward), counts(backward))


def shard_of(tensor: Tensor, placement: Placement | None, mesh: DeviceMesh) -> Tensor:
    """This rank's shard of a tensor, detached; all of it where it is not sharded."""
    if not isinstance(placement, Shard):
        return tensor.detach()
    placed = placement.on_dim(placement.dim % tensor.ndim)
    return distribute_tensor(tensor.detach(), mesh, (placed,), src_data_rank=None).to_local()


def _leaf(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().clone().requires_grad_()
