"""Proposals of data- and tensor-parallel degrees for ranks under a memory bound, with their cost.

Activations are counted by one forward on the meta device: simulated ranks run the parallel model on
tensors without values. Every new storage is recorded, and storages that still exist when the
forward ends are counted: tensors that autograd, custom functions and checkpoints keep, and the
outputs. Attention without dropout is counted as torch's fused kernels, which the meta device does
not have: they keep no weights.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel.internal import flash_attention
from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    ReplacedAttention,
    TorchDispatchMode,
    format_bytes,
    local_of,
    pytree,
    takes,
)
from shoal_mesh import DeviceMesh, abstract_mesh, all_reduce, topology_of
from shoal_tp_styles import preview
from shoal_tp_styles.internal import Plan, StorageReference, apply_plan, map_tensors, to_meta

from .auto import auto_plan

# Data parallelism -> what it divides by the number of replicas, of (parameters, gradients,
# optimizer state), and how often a step sends the parameters' bytes around a ring.
_REPLICAS = {
    "replicate": ((), 2),
    "replicate(shard_optimizer=True)": ((2,), 2),
    "fully_shard": ((0, 1, 2), 3),
}


class Candidate(NamedTuple):
    """One way to spread a model over ranks.

    Attributes:
        shape: replicas and tensor-parallel ranks: the shape of the mesh ("dp", "tp").
        data: the function for the axis of replicas.
        nbytes: parameters, gradients, optimizer state and activations on the rank that holds most.
        activation_bytes: bytes of these that a forward keeps for its backward, and of its outputs.
        seconds: expected time of the collectives of a step, without overlap.
    """

    shape: tuple[int, int]
    data: str
    nbytes: int
    activation_bytes: int
    seconds: float


class Proposal(NamedTuple):
    """All candidates: those within the bound by speed, then the others by memory.

    Attributes:
        plan: of the tensor-parallel axis.
        bound: bytes per rank.
        candidates: of every shape.
        uncounted: reason why activations are not counted for some candidates; empty if they are.
    """

    plan: Plan
    bound: int
    candidates: tuple[Candidate, ...]
    uncounted: str = ""

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate within the bound; None if there is none."""
        first = self.candidates[0]
        return first if first.nbytes <= self.bound else None

    def __repr__(self) -> str:
        rows = [
            f"{each.shape[0]:>4} x {each.shape[1]:<4} {each.data:32} "
            f"{format_bytes(each.nbytes):>11} {format_bytes(each.activation_bytes):>12} "
            f"{each.seconds * 1e3:9.2f} ms  "
            f"{'' if each.nbytes <= self.bound else 'too much'}".rstrip()
            for each in self.candidates
        ]
        head = f"  dp x tp   data parallelism {'':19} bytes/rank  activations   of {format_bytes(self.bound)}"
        return "\n".join(
            [
                head,
                *rows,
                *[f"activations are not counted: {self.uncounted}"] * bool(self.uncounted),
            ]
        )


@takes(model=nn.Module, ranks=int, bound=(int, float))
def propose(
    model: nn.Module,
    ranks: int,
    bound: int,
    *args: Any,
    plan: Plan | None = None,
    state: float = 2.0,
    **kwargs: Any,
) -> Proposal:
    """Propose degrees and a plan under a memory bound, compared with the alternatives.

    The function needs no process group.

    Memory is counted for parameters, gradients, optimizer state, and activations that a forward
    keeps: give a model that returns its loss, in the mode and with the checkpoints with which it
    trains. Temporary memory of a step is not included: the parameters that `fully_shard` has
    gathered for a unit, buckets of reductions, gradients of activations. Prove the plan by `verify`
    on a small configuration.

    Args:
        model: not parallel, on any device, also meta.
        ranks: of the whole mesh.
        bound: bytes per rank.
        args: example inputs of global shape, the batch along dim 0.
        plan: of the tensor-parallel axis; `auto_plan(model)` if left out.
        state: optimizer state in units of the parameters' bytes: 2 for Adam.
        kwargs: likewise inputs.

    Raises:
        LayoutError: if there is no rank, or if the bound is not positive.

    Example:
        >>> import torch
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> propose(mlp, 4, 1700, torch.randn(8, 10)).best.shape
        (4, 1)
    """
    if ranks < 1 or bound < 1:
        raise LayoutError(
            f"propose: at least one rank and one byte per rank, got {ranks} ranks and {bound} bytes"
        )
    chosen: Plan = auto_plan(model) if plan is None else plan
    found: list[Candidate] = []
    uncounted = ""
    for tensor in (size for size in range(1, ranks + 1) if ranks % size == 0):
        replicas = ranks // tensor
        mesh = abstract_mesh((tensor,))
        inputs = _of_one(args, replicas)
        named = _of_one(kwargs, replicas)
        try:
            activations = activation_bytes(model, chosen, mesh, inputs, kwargs=named)
        except Exception as error:
            # whatever the user's model raises without values is a finding
            activations = 0
            uncounted = f"{type(error).__name__}: {str(error)[:200]}"
        cost = preview(model, chosen, mesh, *inputs, **named)
        link = topology_of(abstract_mesh((replicas,)))[0]
        for data, (divided, times) in _REPLICAS.items():
            if replicas > 1 or not divided:
                sizes = [cost.parameter_bytes, cost.parameter_bytes, cost.parameter_bytes * state]
                nbytes = sum(
                    size / (replicas if part in divided else 1) for part, size in enumerate(sizes)
                )
                around = cost.parameter_bytes * times * (replicas - 1) / replicas  # a ring
                seconds = cost.seconds + (link.seconds(around) if replicas > 1 else 0.0)
                found.append(
                    Candidate(
                        (replicas, tensor),
                        data,
                        round(nbytes) + activations,
                        activations,
                        seconds=seconds,
                    )
                )
    order = sorted(
        found, key=lambda c: (c.nbytes > bound, c.seconds if c.nbytes <= bound else c.nbytes)
    )
    return Proposal(chosen, bound, tuple(order), uncounted)


def _of_one(value: Any, replicas: int) -> Any:
    """Return the inputs of one replica, on the meta device."""

    def rows(tensor: Tensor) -> Tensor:
        return tensor[: -(-tensor.shape[0] // replicas)].to("meta") if tensor.ndim else tensor

    return map_tensors(rows, value)


# --- activations ----------------------------------------------------------------------------------


class _Storages(TorchDispatchMode):
    """Record of the storages that operators make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.made: dict[int, tuple[Any, int]] = {}  # references, and bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in filter(torch.is_tensor, pytree.tree_leaves(out)):
            storage: Any = local_of(leaf).untyped_storage()
            self.made[storage._cdata] = StorageReference(storage), storage.nbytes()  # type: ignore[no-untyped-call]  # torch
        return out


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention that saves the same tensors on the meta device as a fused kernel."""
    fits = query.ndim == key.ndim == value.ndim == 4 and query.shape[-1] == value.shape[-1]
    if dropout_p or not fits or any(isinstance(each, DTensor) for each in (query, key, value)):
        attend = functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask = (
        attn_mask
        if attn_mask is None or attn_mask.is_floating_point()
        else attn_mask.to(query.dtype)
    )
    return flash_attention(query, key, value, is_causal, mask=mask, scale=options.get("scale"))[0]


def activation_bytes(model: nn.Module, plan: Plan, mesh: DeviceMesh, args: Any, kwargs: Any) -> int:
    """Return the bytes of activations after a forward, on the rank that keeps most.

    The model is not parallel, in the mode and with the checkpoints in which it will train; inputs
    are of global shape. The model may raise any error if it reads values, because tensors on the
    meta device have no values.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> mlp = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 10))
        >>> activation_bytes(mlp, {}, abstract_mesh((1,)), (torch.randn(8, 10),), {})
        832
    """
    # here: it takes longer to import than the whole layer
    from shoal_dtensor.testing import simulate_ranks

    def one_rank(view: DeviceMesh) -> int:
        # A copy whose parameters and buffers have no values; tied ones stay tied.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
        }
        memo |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
        module = copy.deepcopy(model, memo)
        apply_plan(plan, module, view)
        tensors = [*module.parameters(), *module.buffers()]
        parameters = {local_of(tensor).untyped_storage()._cdata for tensor in tensors}
        storages = _Storages()
        inputs = to_meta(args)
        named = to_meta(kwargs)
        with torch.enable_grad(), storages, ReplacedAttention(_attention):
            out = module(*inputs, **named)
        # ranks that have not come as far refer to what this one has sent
        all_reduce(torch.zeros(1), view.comm(0))
        made = storages.made.items()
        nbytes = sum(
            size for key, (storage, size) in made if key not in parameters and not storage.expired()
        )
        del out  # not before: it holds the graph
        return nbytes

    with torch.random.fork_rng(devices=()):
        return max(simulate_ranks(mesh, one_rank))
