"""What is wrong with a plan, by its declarations and by a run, before anything is changed or a process group exists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from shoal_context_parallel.internal import ContextOptions
from shoal_dtensor.errors import PlanError, StyleError
from shoal_dtensor.internal import takes
from shoal_mesh import DeviceMesh

from .resolve import Plan, Resolved, Use, axis_mesh, resolve, sharded_parameters
from .trial import PlanTrial, try_plan


class Verification(NamedTuple):
    """Findings about a plan, one readable line each.

    Attributes:
        errors: what keeps the plan from being applied: unsupported modules, wrong axes, ambiguity, tied conflicts.
        wrong: what a run of the plan on simulated ranks computes differently from the plain model.
        unproven: why the plan was not run.
        unmatched: entries that match no module.
        uneven: sharded parameters whose ranks hold shards of different sizes (correct, but slower).
        empty: sharded parameters of which some rank holds an empty shard.
        unsharded: matrices that are replicated, with their fraction of all parameters.
    """

    errors: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    unmatched: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    unsharded: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the plan can be applied, every entry matches, and nothing that was run is wrong."""
        return not self.errors and not self.unmatched and not self.wrong

    @property
    def proven(self) -> bool:
        """Whether the plan was run on simulated ranks and computes what the plain model computes."""
        return self.ok and not self.unproven

    def require(self) -> None:
        """Raise unless `ok`.

        Raises:
            PlanError: with all findings.
        """
        if not self.ok:
            raise PlanError(str(self))

    @property
    def verdict(self) -> str:
        """In a few words, what the findings come to; the first line of what is printed."""
        if not self.ok:
            return "the plan does not fit"
        return "the plan fits" if self.proven else "nothing is wrong with the plan, but it was not run"

    def _lines(self) -> list[tuple[str, str]]:
        names = ("errors", "wrong", "unmatched", "empty", "uneven", "unsharded", "unproven")
        return [(name, line) for name in names for line in getattr(self, name)]

    def __repr__(self) -> str:
        return "\n".join([self.verdict, *(f"{name}: {line}" for name, line in self._lines())])

    def _repr_html_(self) -> str:
        from html import escape  # 2 ms, for notebooks only

        rows = (f"<tr><th>{name}</th><td>{escape(line)}</td></tr>" for name, line in self._lines())
        return f"<p>{self.verdict}</p>" + (f"<table>{''.join(rows)}</table>" if self._lines() else "")


@takes(model=nn.Module)
def verify(model: nn.Module, plan: Plan, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Verification:
    """What is wrong with a plan for a model.  Nothing is changed or raised; the mesh may be an `abstract_mesh`.

    With example inputs the plan is run: one forward and backward on every rank of the mesh, simulated in this process,
    against the plain model, in float64 and eval mode; and in training mode, from one seed, if the model drops or draws.
    A small configuration of a model proves the plan for its shape.

    Args:
        model: the root of the plan's paths; on any device, also meta.
        plan: as for `parallelize_module`.
        mesh: the mesh that the plan is for.
        args: example inputs of global shape, which every rank gets.
        kwargs: likewise.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles import ColwiseParallel
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        >>> print(verify(model, {"0": ColwiseParallel(), "7": ColwiseParallel()}, abstract_mesh((4,))))
        the plan does not fit
        unmatched: plan entry '7' matches no module of Sequential: no child of the root matches '7'
        empty: 0.weight: dim 0 of 6 in shards of [2, 2, 2, 0] along 0
        empty: 0.bias: dim 0 of 6 in shards of [2, 2, 2, 0] along 0
        unsharded: 1.weight (4, 6) is replicated on every rank (41% of all parameters)
        unproven: the plan was not run; give example inputs: verify(model, plan, mesh, *inputs)
    """
    try:
        resolved = resolve(model, plan)
    except (StyleError, TypeError) as error:
        return Verification(errors=(str(error),), unproven=("the plan was not run: it has errors",))
    errors = [*resolved.repeated(), *resolved.ambiguous(), *resolved.tied_conflicts()]
    uneven: list[str] = []
    empty: list[str] = []
    for use in resolved.uses:
        try:
            lines = list(_unequal_shards(use, axis_mesh(mesh, use.style)))
        except StyleError as error:
            errors.append(f"{use.key!r}: {error}")
            continue
        for line, is_empty in lines:
            (empty if is_empty else uneven).append(line)
    trial = PlanTrial(unproven=("the plan was not run: it has errors",))
    # The caller shards their inputs along the sequence.
    local = [use for use in resolved.uses if use.sharding and isinstance(use.sharding.options, ContextOptions)]
    if local and not errors:
        path = local[0].path or "the root"
        trial = PlanTrial(unproven=(f"the plan was not run: {path} takes a rank's positions, not whole inputs",))
    elif not errors:
        trial = try_plan(model, plan, mesh, args, kwargs)
    return Verification(
        tuple(errors),
        trial.wrong,
        trial.unproven,
        resolved.unmatched,
        tuple(uneven),
        tuple(empty),
        tuple(_unsharded(resolved)),
    )


def _unequal_shards(use: Use, mesh: DeviceMesh) -> Iterator[tuple[str, bool]]:
    """Parameters whose shards differ in size, and whether some shard is empty."""
    if use.sharding is None or not use.sharding.distributes:
        return
    for name, _ in use.module.named_parameters():
        for axis, what, _, sizes in use.shard_sizes(name, mesh) if use.sharding.shards(name) else ():
            if len(set(sizes)) > 1:
                path = f"{use.path}.{name}" if use.path else name
                yield f"{path}: {what} in shards of {sizes} along {axis}", 0 in sizes


def _unsharded(resolved: Resolved) -> Iterator[str]:
    sharded = {id(param) for param in sharded_parameters(resolved)}
    total = sum(param.numel() for param in resolved.root.parameters()) or 1
    for name, param in resolved.root.named_parameters():
        if param.ndim > 1 and id(param) not in sharded:
            fraction = f"{param.numel() / total:.0%} of all parameters"
            yield f"{name} {tuple(param.shape)} is replicated on every rank ({fraction})"
