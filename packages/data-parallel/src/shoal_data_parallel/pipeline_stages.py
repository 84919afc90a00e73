"""Sharded modules as stages of `torch.distributed.pipelining`.

After `prepare_pipeline`, one step of a rank with two stages of two units, and three microbatches,
runs as follows:

    schedule's action       units of the stage                        gradients
    UNSHARD                 start to gather                           -
    forwards, backwards     gathered; `reshard_after_forward=True`    each rank keeps its own
                            frees them from a forward to the next
                            forward or backward
    REDUCE_GRAD             resharded                                 reduced, scaled
    RESHARD                 resharded                                 -

Schedules with one stage per rank have no UNSHARD and RESHARD: the first microbatch gathers.

May import: _torch, gradients, stage_borders, units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn

from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import submodule_of

from ._torch import is_torch_fsdp, pipeline_actions, stages_of
from .gradients.gradient_group import ReducingModule
from .gradients.placeholders import drop_placeholders
from .stage_borders import GetMesh, watch_borders
from .units.unit import Unit, units_of

# of schedules and stages
_PREPARED = "_shoal_prepared"
# of stages: the step that runs keeps its gradients
_KEEPS = "_shoal_keeps_gradients"


def prepare_pipeline(schedule: Any, *, get_mesh: GetMesh | None = None) -> None:
    """Have a pipeline schedule gather and reduce sharded stages once per step.

    The schedule is from `torch.distributed.pipelining`. Units stay gathered from one microbatch to
    the next, as far as `reshard_after_forward=False` allows it, and gradients are reduced after the
    last microbatch. Schedules with several stages per rank gather and free whole stages ahead of
    time. Stages of `replicate` reduce after the last microbatch, too. Without this call each
    microbatch gathers and reduces, with the same values.

    DTensors that a stage returns arrive as DTensors at the next one, in the same layout on the mesh
    of its ranks.

    `schedule.step(..., finalize_gradients=False)` keeps the gradients of a step, as torch 2.15's
    does: the next step that finalizes them reduces and scales their sum.

    Call it once, when the schedule has been made, on all of its ranks.

    Args:
        schedule: a schedule; it and its stages are changed in place. The `submod` of a stage, or
            modules in it, were passed to `fully_shard` or `replicate`. Other stages only send and
            receive DTensors, and keep gradients with `finalize_gradients=False`.
        get_mesh: given the names of the axes of an arriving DTensor, returns the mesh of this
            rank's stage with these axes; by default the mesh of a parameter of the stage.

    Raises:
        LayoutError: if it has no stages, or one is sharded by torch's own `fully_shard`.

    Example:
        >>> from torch import nn
        >>> from torch.distributed.pipelining import PipelineStage, Schedule1F1B
        >>> from shoal_data_parallel import fully_shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        ...     half = fully_shard(nn.Linear(8, 8), mesh["data"], reshard_after_forward=False)
        ...     stage = PipelineStage(half, 0, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        ...     prepare_pipeline(Schedule1F1B(stage, n_microbatches=4))
    """
    stages = stages_of(schedule)
    if not stages:
        raise LayoutError(
            "prepare_pipeline: expected a schedule of torch.distributed.pipelining with stages, "
            f"got {type(schedule).__name__}"
        )
    if any(is_torch_fsdp(stage.submod) for stage in stages):
        raise LayoutError(
            "prepare_pipeline: a stage is sharded by torch's fully_shard, but the schedule would "
            "no longer start its gathers; shard all stages of a rank with shoal's fully_shard"
        )
    if getattr(schedule, _PREPARED, False):
        return
    setattr(schedule, _PREPARED, True)
    watch_borders(stages, get_mesh)
    for stage in stages:
        _reduce_at_end(stage)
    _let_steps_keep_gradients(schedule, stages)
    units = {stage.stage_index: units_of(stage.submod) for stage in stages}
    for units_of_stage in units.values():
        for unit in units_of_stage:
            unit.settings.reshard_after_backward = False
    register = getattr(schedule, "register_custom_function", None)
    if register is not None:
        unshard, reshard = pipeline_actions()
        register(unshard, partial(_unshard, units))
        register(reshard, partial(_reshard, units))


def reduce_after_last_microbatch(stage: Any) -> None:
    """Have a pipeline stage reduce gradients once per step, after its last microbatch.

    The stage is from `torch.distributed.pipelining`. Backwards keep gradients on each rank. Without
    this call they are reduced for every microbatch, with the same values. `prepare_pipeline` does
    this for all stages of a schedule, and also has units stay gathered.

    Args:
        stage: a pipeline stage whose `submod`, or modules in it, were passed to `fully_shard` or
            `replicate`; changed in place.

    Raises:
        LayoutError: if none of its modules is sharded or replicated.

    Example:
        >>> from torch import nn
        >>> from torch.distributed.pipelining import PipelineStage
        >>> from shoal_data_parallel import fully_shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "data"))
        ...     half = fully_shard(nn.Linear(8, 8), mesh["data"])
        ...     stage = PipelineStage(half, 0, 2, torch.device("cpu"), group=mesh.get_group("pipe"))
        ...     reduce_after_last_microbatch(stage)
    """
    module = submodule_of("reduce_after_last_microbatch", stage)
    if not _reducing_modules(module):
        raise LayoutError(
            "reduce_after_last_microbatch: expected a stage whose submod, or a module in it, was "
            f"passed to fully_shard or replicate, got a stage of {type(module).__name__}"
        )
    _reduce_at_end(stage)


def _reduce_at_end(stage: Any) -> None:
    """Have a stage's backwards keep gradients, and its `perform_reduce_grad` reduce them."""
    if getattr(stage, _PREPARED, False):
        return
    setattr(stage, _PREPARED, True)
    modules = _reducing_modules(stage.submod)
    reducers = [reducer for module in modules for reducer in module._reducers()]
    scale: Callable[..., None] = stage.perform_reduce_grad

    def perform_reduce_grad(grad_scale_factor: int, *args: Any, **kwargs: Any) -> None:
        leaves = [leaf for reducer in reducers for leaf in reducer.leaves()]
        drop_placeholders(leaves)
        if getattr(stage, _KEEPS, False):
            return
        # before the reduction, so that gathered parameters and sums are not held together
        for unit in units_of(stage.submod):
            unit.reshard()
        earlier = _take_gradients(leaves)
        try:
            for module in modules:
                module.reduce_gradients()
            scale(grad_scale_factor, *args, **kwargs)
        finally:
            _add_gradients(earlier)

    for module in modules:
        module.set_requires_gradient_sync(False)
    for reducer in reducers:
        reducer.returns_zero_gradients = True
    stage.perform_reduce_grad = perform_reduce_grad


def _reducing_modules(module: nn.Module) -> list[ReducingModule]:
    """Return the outermost modules in a module that reduce gradients, each once."""
    if isinstance(module, ReducingModule):
        return [module]
    found = [inner for child in module.children() for inner in _reducing_modules(child)]
    return [*dict.fromkeys(found)]


def _let_steps_keep_gradients(schedule: Any, stages: Sequence[Any]) -> None:
    """Add the option `finalize_gradients` to the steps of a schedule, if torch has none."""
    run_step = schedule.step
    is_known = "finalize_gradients" in signature(run_step).parameters

    def step(*args: Any, finalize_gradients: bool = True, **kwargs: Any) -> Any:
        for stage in stages:
            setattr(stage, _KEEPS, not finalize_gradients)
        if is_known:
            kwargs["finalize_gradients"] = finalize_gradients
        return run_step(*args, **kwargs)

    schedule.step = step


def _take_gradients(leaves: Iterable[Any]) -> list[tuple[Any, Tensor]]:
    """Remove and return the gradients in `.grad` from earlier steps, which are scaled already."""
    taken = []
    for leaf in leaves:
        if leaf.grad is not None:
            taken.append((leaf, leaf.grad))
            leaf.grad = None
    return taken


def _add_gradients(gradients: Sequence[tuple[Any, Tensor]]) -> None:
    for leaf, gradient in gradients:
        if leaf.grad is not None:
            gradient += leaf.grad
        leaf.grad = gradient


def _unshard(units: dict[int, list[Unit]], action: Any, context: Any) -> None:
    """Start to gather a stage's units; its next forward or backward waits for them."""
    for unit in units.get(action.stage_index, ()):
        unit.gather_ahead()


def _reshard(units: dict[int, list[Unit]], action: Any, context: Any) -> None:
    for unit in units.get(action.stage_index, ()):
        unit.reshard()
