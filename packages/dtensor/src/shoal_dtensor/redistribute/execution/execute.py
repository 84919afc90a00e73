"""`run(plan, local)`: executes a plan on this rank.  Decides nothing.

The first run of a plan resolves every step to one function of the local tensor, all sizes and
communicators known; later runs only call them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shoal_mesh import (
    Comm,
    DeviceMesh,
    all_gather,
    all_gather_v,
    all_reduce,
    all_to_all,
    all_to_all_v,
    comm_over,
    reduce_scatter,
    reduce_scatter_v,
)

from ...layout.placements import norm_order
from ...layout.tensor_meta import memory_order, remembered
from ..steps import Plan
from .kernels import CollectiveCall, Kernel, kernel, received, unchanged

if TYPE_CHECKING:
    from ...layout.spec import Spec


Stage = Callable[[Tensor], Tensor]

REMEMBERED = 4096  # plans, as many as `plan` remembers


def run(plan: Plan, local: Tensor) -> Tensor:
    """This rank's local tensor under `plan.dst`, given the one under `plan.src`.

    The result never shares memory with `local`, except that a plan without steps returns `local` itself.
    A rank outside the mesh gets back what it passed.
    """
    for stage in _program(plan):
        local = stage(local)
    return local


@remembered(REMEMBERED)
def _program(plan: Plan) -> tuple[Stage, ...]:
    """The stages of a plan on this rank."""
    stages = [stage_of(work, step.src.mesh) for work, step in zip(kernels_of(plan), plan.steps, strict=True)]
    return (*stages, *closing(plan))


@remembered(REMEMBERED)
def kernels_of(plan: Plan) -> tuple[Kernel, ...]:
    """What this rank does in each step; nothing outside the mesh."""
    return tuple(kernel(step, step.src.coordinate) for step in plan.steps)


def closing(plan: Plan) -> tuple[Stage, ...]:
    """What remains after the last step: a slice becomes a tensor of its own, memory order follows the global stride."""
    if not plan.steps or plan.dst.coordinate is None:
        return ()
    if plan.slices:  # a slice must not keep the whole alive
        return (in_memory_order(plan.dst, partial(torch.clone, memory_format=torch.contiguous_format)),)
    return (in_memory_order(plan.dst),) if memory_order(plan.dst.shape, plan.dst.stride) else ()


def stage_of(work: Kernel, mesh: DeviceMesh) -> Stage:
    """One step as a function of the local tensor."""
    prepare, finish = work.prepare, work.finish
    if work.collective is None:
        return lambda local: finish(local, local)
    call = bind(work.collective, mesh)
    if prepare is unchanged and finish is received:
        return call
    return lambda local: finish(call(prepare(local)), local)


def bind(collective: CollectiveCall, mesh: DeviceMesh, **more: Any) -> Callable[[Tensor], Any]:
    """A collective as a function of the buffer; `more` is passed on (`async_op`)."""
    more["comm"] = comm_of(collective, mesh)
    sizes, op = collective.sizes, collective.op
    match collective.kind:
        case "all_gather":
            return partial(all_gather_v, sizes=sizes, **more) if sizes else partial(all_gather, **more)
        case "reduce_scatter":
            return (
                partial(reduce_scatter_v, sizes=sizes, op=op, **more)
                if sizes
                else partial(reduce_scatter, op=op, **more)
            )
        case "all_reduce":
            return partial(all_reduce, op=op, **more)
    assert collective.kind == "all_to_all", f"unknown collective {collective.kind}"
    if not sizes:
        return partial(all_to_all, split_dim=0, concat_dim=0, **more)
    return partial(all_to_all_v, send_sizes=sizes, recv_sizes=collective.receives, **more)


def comm_of(collective: CollectiveCall, mesh: DeviceMesh) -> Comm:
    """The communicator that a collective runs over."""
    return comm_over(collective.ranks) if collective.ranks else mesh.comm(collective.axes)


# --- the order in memory of a local tensor's dims: that of the global stride ------------------------------------------


def in_memory_order(spec: Spec, row_major: Stage = torch.Tensor.contiguous) -> Stage:
    """A function that gives a local tensor the memory order of the global stride, by one that makes it row-major."""
    order = memory_order(spec.shape, spec.stride)
    if not order:
        return row_major
    back = sorted(range(spec.ndim), key=order.__getitem__)
    return lambda local: row_major(local.permute(order)).permute(back)


# --- partial norms ----------------------------------------------------------------------------------------------------

# A partial norm is asked for several times (is it finite? what to divide by? its backward): it is reduced once.
MAX_ELEMENTS = 256  # of a norm that is remembered: a total, or one for each row of a small weight


def run_cached(plan: Plan, local: Tensor, owner: Any, *, fresh: bool = False) -> Tensor:
    """What `run` gives; for a small partial norm, what it gave before if the tensor has not been written to since.

    The DTensor `owner`, which `local` is of, keeps that; a `fresh` result may be written to.
    """
    if not plan.src.partials or not _is_norm(plan.src, owner) or prod(plan.src.shape) > MAX_ELEMENTS:
        return run(plan, local)
    state = (plan.dst, owner._version, local._version)
    known = owner.__dict__.get("_reduced")
    if known is None or known[0] != state or known[1] is not local:
        known = owner._reduced = (state, local, run(plan, local))
    result: Tensor = known[2]
    return result.clone() if fresh else result


def write_back(plan: Plan, result: Tensor, owner: Any) -> None:
    """Write to the DTensor `owner` what an operator made of its values under a layout from which `plan` leads."""
    owner._local_tensor.copy_(run(plan, result))
    if _is_norm(plan.dst, owner):
        increment_version(owner)  # `foreach` operators do not


def _is_norm(spec: Spec, owner: Any) -> bool:
    """Whether a tensor is a partial norm and counts how often it is written to."""
    return bool(spec.partials) and norm_order(spec.partials[0][1]) is not None and not owner.is_inference()
