"""A step of torch's Muon on sharded matrices: one gather of the update, everything else on local shards.

Muon orthogonalizes the update of each matrix by five products of matrices. On shards, operator by operator, these take
11 to 21 collectives. Here every rank gathers the update, in bfloat16 as Muon computes, and orthogonalizes all of it,
with the bits of one device. Updates travel in groups, one group beside the products of the group before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import purpose
from shoal_mesh.internal import dataclass

from .._torch import adjusted_rate, orthogonalized
from ..errors import PlacementError
from ..layout.placements import Replicate
from ..layout.spec import Spec
from ..redistribute.shards_in_flight import ShardsInFlight, redistribute_shards
from ..tensor.backward import in_groups
from ..tensor.dtensor import DTensor

# Bytes of gathered updates in one group: enough to hide the latency of a collective.
GROUP = 2**25


@dataclass(slots=True, eq=False)
class _Matrix:
    """A parameter in a step: its shard, and the layouts of its update, as computed and gathered."""

    shape: torch.Size
    shard: Tensor
    update: Tensor
    moves: tuple[Spec, Spec] | None


@torch.no_grad()
def muon_step(optimizer: Any, collect_shards: Callable[..., Any]) -> None:
    """Step a `torch.optim.Muon` whose parameters may be DTensors; its hooks are called around.

    Args:
        optimizer: the optimizer.
        collect_shards: takes the optimizer and the arguments of its `_init_group`, and fills the lists with shards.

    Raises:
        PlacementError: if a parameter is partial.
    """
    for group in optimizer.param_groups:
        params: list[Any] = [param for param in group["params"] if param.grad is not None]
        shards: list[Any] = []
        grads: list[Any] = []
        momenta: list[Any] = []
        collect_shards(optimizer, group, shards, grads, momenta)
        matrices = [_matrix(group, *each) for each in zip(params, shards, grads, momenta, strict=True)]
        _apply(group, matrices)


def _matrix(group: dict[str, Any], param: Any, shard: Any, grad: Any, momentum: Any) -> _Matrix:
    """Advance the momentum of a parameter, element by element; its update before it is orthogonalized."""
    moves = None
    if isinstance(param, DTensor):
        spec = param._spec
        if spec.partials:
            raise PlacementError(
                f"Muon: a parameter has placements {param.placements}; a partial value has no elements of its "
                "own. Redistribute it to Replicate or Shard"
            )
        local = spec.with_(dtype=torch.bfloat16)
        moves = local, local.with_(placements=[Replicate()] * spec.mesh.ndim)
    momentum.lerp_(grad, 1 - group["momentum"])
    update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    return _Matrix(param.shape, shard, update.to(torch.bfloat16, copy=True), moves)  # is written to


def _apply(group: dict[str, Any], matrices: Sequence[_Matrix]) -> None:
    """Orthogonalize updates and add them."""
    rate = float(group["lr"])
    groups = in_groups(matrices, lambda matrix: 2 * matrix.shape.numel(), GROUP)  # of bfloat16
    in_flight = [_gather(first) for first in groups[:1]]
    for at, current in enumerate(groups):
        in_flight += [_gather(following) for following in groups[at + 1 : at + 2]]
        gathered = in_flight.pop(0).wait()
        for matrix in current:
            full = orthogonalized(matrix.update if matrix.moves is None else gathered.pop(0), group)
            if matrix.moves is not None:
                (full,) = redistribute_shards([full.contiguous()], [matrix.moves[::-1]]).wait()
            matrix.shard.mul_(1 - rate * group["weight_decay"])
            matrix.shard.add_(full, alpha=-adjusted_rate(rate, group, matrix.shape))


def _gather(matrices: Sequence[_Matrix]) -> ShardsInFlight:
    """The updates of the sharded ones of some matrices, on their way."""
    sharded = [(matrix.update, matrix.moves) for matrix in matrices if matrix.moves is not None]
    with purpose("a step of Muon gathers updates"):
        return redistribute_shards([update for update, _ in sharded], [moves for _, moves in sharded])
