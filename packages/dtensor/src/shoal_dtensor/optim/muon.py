"""A step of torch's Muon on sharded matrices: one gather of the update, everything else on local shards.

Muon orthogonalizes the update of each matrix by five products of matrices. On shards, operator by operator, these take
11 to 21 collectives. Here every rank gathers the update, in bfloat16 as Muon computes, and orthogonalizes all of it,
with the bits of one device. Updates travel in groups, one group beside the products of the group before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    waiting = iter([*_groups(matrices), []])
    following = next(waiting)
    in_flight = _gather(following)
    for then in waiting:
        current, updates, following = following, in_flight, then
        in_flight = _gather(following)
        for matrix, update in zip(current, updates.wait() if updates else (), strict=True):
            full = orthogonalized(update, group)
            if matrix.moves is not None:
                (full,) = redistribute_shards([full.contiguous()], [matrix.moves[::-1]]).wait()
            matrix.shard.mul_(1 - rate * group["weight_decay"])
            matrix.shard.add_(full, alpha=-adjusted_rate(rate, group, matrix.shape))


def _groups(matrices: Iterable[_Matrix]) -> Iterator[list[_Matrix]]:
    """Matrices whose gathered updates fill `GROUP` bytes; each matrix in one group."""
    group: list[_Matrix] = []
    room = GROUP
    for matrix in matrices:
        size = 2 * matrix.shape.numel()  # bfloat16
        if group and size > room:
            yield group
            group, room = [], GROUP
        group.append(matrix)
        room -= size
    if group:
        yield group


@dataclass(slots=True, eq=False)
class _Updates:
    """The updates of a group: those that are sharded are on their way."""

    matrices: Sequence[_Matrix]
    in_flight: ShardsInFlight

    def wait(self) -> list[Tensor]:
        gathered = iter(self.in_flight.wait())
        return [matrix.update if matrix.moves is None else next(gathered) for matrix in self.matrices]


def _gather(group: Sequence[_Matrix]) -> _Updates | None:
    sharded = [(matrix.update, matrix.moves) for matrix in group if matrix.moves is not None]
    if not group:
        return None
    with purpose("a step of Muon gathers updates"):
        return _Updates(group, redistribute_shards([u for u, _ in sharded], [moves for _, moves in sharded]))
