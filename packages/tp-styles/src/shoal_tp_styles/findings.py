"""What is wrong with a plan, found before anything is changed and without a process group."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shoal_dtensor import Shard
from shoal_mesh import DeviceMesh

from .errors import LayoutError, PlanError, UnsupportedModuleError
from .plan import Plan, Resolved, Use, axis_mesh, resolve

__all__ = ["Verification", "verify"]


@dataclass(frozen=True, slots=True)
class Verification:
    """Findings about a plan, one readable line each.

    Attributes:
        errors: what keeps the plan from being applied: unsupported modules, wrong axes, ambiguity, tied conflicts.
        unmatched: entries that match no module.
        uneven: parameters whose cut dim does not divide: ranks hold unequal parts (right, but slower).
        empty: cut parameters of which some rank would hold nothing.
        unsharded: matrices that stay whole on every rank, with their share of all parameters.
    """

    errors: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the plan can be applied and every entry means something."""
        return not self.errors and not self.unmatched

    def require(self) -> None:
        """Raise unless `ok`.

        Raises:
            PlanError: with all findings.
        """
        if not self.ok:
            raise PlanError(str(self))

    def __str__(self) -> str:
        lines = [
            f"{name}: {line}"
            for name in ("errors", "unmatched", "empty", "uneven", "unsharded")
            for line in getattr(self, name)
        ]
        return "\n".join(lines) or "the plan fits"


def verify(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> Verification:
    """What a plan would do wrong on a model.  Nothing is changed; the mesh may be an `abstract_mesh`.

    Args:
        model: the root of the plan's paths; on any device, also meta.
        plan: as for `parallelize_module`.
        mesh: the mesh it is meant for.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles import ColwiseParallel
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        >>> print(verify(model, {"0": ColwiseParallel(), "7": ColwiseParallel()}, abstract_mesh((4,))))
        unmatched: plan entry '7' matches no module of Sequential: no child of the root matches '7'
        empty: 0.weight: dim 0 of 6 in parts of [2, 2, 2, 0] along 0
        empty: 0.bias: dim 0 of 6 in parts of [2, 2, 2, 0] along 0
        unsharded: 1.weight (4, 6) stays whole on every rank (41% of all parameters)
    """
    try:
        resolved = resolve(model, plan)
    except (PlanError, UnsupportedModuleError) as error:
        return Verification(errors=(str(error),))
    errors = [*resolved.ambiguous(), *resolved.tied_conflicts()]
    uneven: list[str] = []
    empty: list[str] = []
    for use in resolved.uses:
        try:
            its_mesh = axis_mesh(mesh, use.style)
        except LayoutError as error:
            errors.append(f"{use.key!r}: {error}")
            continue
        for line, is_empty in _parts(use, its_mesh):
            (empty if is_empty else uneven).append(line)
    return Verification(tuple(errors), resolved.unmatched, tuple(uneven), tuple(empty), tuple(_unsharded(resolved)))


def _parts(use: Use, mesh: DeviceMesh) -> Iterator[tuple[str, bool]]:
    """Cut parameters whose parts differ in size, and whether some part is empty."""
    if use.sharding is None or not use.sharding.distributes:
        return
    for name, param in use.module.named_parameters():
        if not use.sharding.cuts(name):
            continue
        placement = use.sharding.placement(name, mesh.size())
        assert isinstance(placement, Shard), "a cut parameter is sharded"
        sizes = part_sizes(param.shape[placement.dim], placement, mesh.size())
        if len(set(sizes)) > 1:
            path = f"{use.path}.{name}" if use.path else name
            of = f" (multiples of {placement.multiple_of})" if placement.multiple_of > 1 else ""
            size = f"dim {placement.dim} of {param.shape[placement.dim]}{of}"
            yield f"{path}: {size} in parts of {sizes} along {mesh.axis_names[0]}", 0 in sizes


def part_sizes(size: int, placement: Shard, ways: int) -> list[int]:
    """How many elements each rank holds of a dim."""
    if placement.sizes is not None:
        return list(placement.sizes)
    unit = placement.multiple_of
    step = -(-math.ceil(size / unit) // ways) * unit
    return [max(0, min(step, size - rank * step)) for rank in range(ways)]


def _unsharded(resolved: Resolved) -> Iterator[str]:
    cut = {
        id(param)
        for use in resolved.uses
        if use.sharding is not None and use.sharding.distributes
        for name, param in use.module.named_parameters()
        if use.sharding.cuts(name)
    }
    total = sum(param.numel() for param in resolved.root.parameters()) or 1
    for name, param in resolved.root.named_parameters():
        if param.ndim > 1 and id(param) not in cut:
            share = f"{param.numel() / total:.0%} of all parameters"
            yield f"{name} {tuple(param.shape)} stays whole on every rank ({share})"
