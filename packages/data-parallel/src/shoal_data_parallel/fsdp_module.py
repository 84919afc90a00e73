"""Control of sharded modules: methods that `fully_shard` adds, under torch's names.

A method records one choice of the user, which the passes read, or makes one transition of a unit.

May import: gradients, units.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal_dtensor import DTensor
from shoal_dtensor.errors import (
    LayoutError,
    StyleError,
    StyleTypeError,
    UnsupportedModuleError,
)
from shoal_dtensor.internal import check_types, in_backward
from shoal_mesh.internal import require

from .gradients.communication import AllGather, ReduceScatter
from .gradients.gradient_group import ReducingModule
from .gradients.reduction import CommContext, GroupReduction, deliver
from .units.unit import STATE, Unit, unit_of, units_of
from .units.unit_passes import as_forward, enter, value_outside

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class UnshardHandle:
    """Parameters that are being gathered; `wait()` returns when the module sees them.

    Args:
        unit: the module's unit; `unshard(async_op=True)` of the module makes the handle.
    """

    unit: Unit

    def wait(self) -> None:
        """Have the module see the gathered parameters."""
        # The peers are the units of one `fully_shard` call: one unit for each mesh that parameters
        # of the module are on. `enter` waits for the gather, and puts the gathered parameters into
        # the module.
        for unit in self.unit.peers:
            enter(unit)


@dataclass(frozen=True, slots=True)
class GradientReductionHandle:
    """Gradients that are being reduced; `wait()` returns when they are in `.grad`.

    Args:
        contexts: the contexts with the reductions; `finalize_backward(async_op=True)` of a module
            makes the handle.

    Example:
        >>> from shoal_data_parallel import fully_shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     layer = fully_shard(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        ...     with layer.no_sync():
        ...         layer(torch.ones(2, 8)).sum().backward()
        ...     handle = layer.finalize_backward(async_op=True)
        ...     # the gradient is missing before `wait`, which returns None, and is there after it
        ...     layer.weight.grad is None, handle.wait(), layer.weight.grad is None
        (True, None, False)
    """

    contexts: Sequence[CommContext]

    def wait(self) -> None:
        """Deliver all gradients in flight, including the gradients of earlier backwards.

        A backward leaves its gradients in flight if it is not the last one of its step
        (`set_is_last_backward`).
        """
        for context in self.contexts:
            deliver(context.take_pending())


class FSDPModule(ReducingModule):
    """The class that `fully_shard` adds to a module's class.

    It controls gathering and reducing, under torch's names.
    """

    _made_by = "fully_shard"
    # `set_gradient_divide_factor` holds for this module's units, not for units of inner modules.
    _divides_inside = False

    # Gathering and freeing are not registered as hooks of the module. If the user compiles the
    # module in place (`Module.compile`), torch would trace its hooks.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with its hooks, between gathering and freeing."""
        forward = super().__call__
        # STATE is the name of the attribute with the module's unit. `as_forward` gathers its
        # parameters, calls `forward` and frees them.
        return (
            as_forward(self, forward, args, kwargs)
            if STATE in vars(self)
            else forward(*args, **kwargs)
        )

    def _reducers(self, recurse: bool = True) -> list[Unit]:
        return units_of(self, recurse)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, and copies of gathered values between forward and backward."""
        value = super().__getattr__(name)
        # modules that run hold gathered parameters, which are DTensors only under styles
        return value_outside(self, value) if type(value) is DTensor else value

    # --- gathering --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, until `reshard()`; with `async_op`, only start.

        The gathered parameters are for reading. A write to them is lost, and `reshard()` then
        raises.
        """
        handle = UnshardHandle(unit_of(self))
        if not async_op:
            handle.wait()
            return None
        for unit in handle.unit.peers:
            unit.gather_ahead()
        return handle

    def reshard(self) -> None:
        """Free this unit's gathered parameters; the module holds its shards again.

        Raises:
            StyleError: if something was written to the gathered parameters.
        """
        for unit in units_of(self, recurse=False):
            unit.reshard()

    @check_types(reshard_after_forward=bool)
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether gathered parameters are freed after a forward.

        If they are freed, the next backward or forward gathers them again.
        """
        for unit in units_of(self, recurse):
            # The setting is the user's choice, which may also be None or a number. The unit has the
            # resulting bool, which the passes read.
            unit.settings.reshard_after_forward = reshard_after_forward
            unit.frees_after_forward = reshard_after_forward

    @check_types(reshard_after_backward=bool)
    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether gathered parameters are freed after a backward.

        If this and `reshard_after_forward` are both False, the parameters are gathered once for all
        microbatches of a step.
        Parameters that an optimizer has written to are always gathered again. Set True before
        the last backward of a step, or the parameters stay gathered until the next backward ends.
        """
        for unit in units_of(self, recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    @check_types(unshard_in_backward=bool)
    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether this unit is gathered for its backward.

        A backward that reads no parameter of the unit, such as the backward of an embedding, does
        not need the parameters. With False they are gathered only if the backward reads a view of a
        parameter that autograd has saved.
        """
        for unit in units_of(self, recurse=False):
            unit.settings.unshard_in_backward = unshard_in_backward

    @check_types(keep=bool)
    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether gathered parameters keep their memory and addresses when resharded.

        Then each gather writes to the same memory, as captured CUDA graphs need.
        """
        for unit in units_of(self, recurse):
            unit.settings.keep_unsharded_storage = keep
            # `current` has the gathered tensors. If they have values, the next reshard releases
            # their memory.
            if not keep and not unit.current.has_values:
                unit.current.release(keeps_memory=False)

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the modules that start to gather their parameters when this forward begins.

        By default it is one module: the module whose forward came next the last time. A copy of
        this module has the default, because this choice is not copied. An empty list turns
        prefetching off.

        Args:
            modules: modules that `fully_shard` was called on. All ranks pass the same modules in
                one order.

        Raises:
            StyleError: if one of them is not sharded.
        """
        prefetched = _units(modules)
        for unit in units_of(self, recurse=False):
            unit.settings.prefetch_in_forward = prefetched

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Set the modules that start to gather their parameters when this backward begins.

        By default it is the module whose forward came before the forward of this one.

        Raises:
            StyleError: if one of them is not sharded.
        """
        prefetched = _units(modules)
        for unit in units_of(self, recurse=False):
            unit.settings.prefetch_in_backward = prefetched

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event that the next forward waits for before it gathers.

        Record it after the optimizer's step, if the step runs on another stream of the device than
        the forward. The event holds for one forward. The current stream of the device waits for the
        event. In torch only the streams that run the gathers wait for it.

        Args:
            event: its `wait()` has the current stream wait.
        """
        # All units inside of the outermost module share one schedule, so one unit is enough here.
        unit_of(self).schedule.post_optimizer_event = event

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Have this unit's parameters gathered by a function of the user.

        It is called with a flat input tensor of this rank's shards, padded to the length of the
        longest, and with a flat output tensor for the shards of all ranks. The output tensor is
        from `comm.allocate`, and the input tensor is a slice of it.

        Args:
            comm: called as `comm(output_tensor=, input_tensor=, group=, async_op=True)`; it returns
                the work to wait for, or None if the output is complete.

        Raises:
            StyleError: if it is not callable, or has no `allocate`.
        """
        for unit in units_of(self, recurse=False):
            unit.communication.all_gather = _checked_comm("set_custom_all_gather", unit, comm)

    # --- reducing ---------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """Reduce the gradients that were kept, without another backward.

        Raises:
            StyleError: if a backward is running, or if a backward raised after it had added to kept
                gradients.
        """
        units = self._reducers()
        _check_finished("reduce_gradients", units)
        context_of_units = [unit.schedule.context for unit in units]
        started = [_start_over_all_axes(unit) for unit in units if unit.holds_gradients]
        # Units may share a context. `dict.fromkeys` keeps each context once, in the units' order.
        pending = [
            reduction
            for context in dict.fromkeys(context_of_units)
            for reduction in context.take_pending()
        ]
        deliver([*pending, *started])

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce kept gradients, and deliver all gradients that backwards have left in flight.

        Modules that do not reduce gradients (`set_requires_gradient_sync(False)`) keep them.

        Args:
            async_op: return when the reductions have started, without waiting for them.

        Returns:
            With `async_op`, a handle; call its `wait()` before the optimizer's step.

        Raises:
            StyleError: if a backward is running, or if a backward raised after it had added to kept
                gradients.
        """
        units = self._reducers()
        _check_finished("finalize_backward", units)
        contexts = [*dict.fromkeys(unit.schedule.context for unit in units)]
        for unit in units:
            if unit.syncs and unit.holds_gradients:
                # {} means that no new gradients are added to the kept ones.
                unit.schedule.context.pending.append(GroupReduction.start(unit, {}))
        # The optimizer's step raises until the gradients are delivered.
        _watch(contexts)
        handle = GradientReductionHandle(contexts)
        if async_op:
            return handle
        handle.wait()
        return None

    @check_types(enabled=bool)
    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards leave reduced gradients in flight for `finalize_backward`.

        It holds for all units of the outermost module. The optimizer's step raises until the
        gradients are delivered.
        """
        schedule = unit_of(self).schedule
        schedule.finalizes_manually = enabled
        _watch([schedule.context])

    @check_types(is_last_backward=bool)
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one of a step.

        A backward that is not the last one leaves its gradients in flight, which overlaps the next
        microbatch; the last one delivers them. It holds for all units of the outermost module. The
        optimizer's step raises until the gradients are delivered.
        """
        schedule = unit_of(self).schedule
        schedule.is_last_backward = is_last_backward
        _watch([schedule.context])

    @check_types(requires_all_reduce=bool)
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether gradients are reduced over replicas, or over the shards alone.

        This has an effect with two data axes. With False the sums over the shards are kept. The
        next backward that reduces over replicas adds them to its own sums.
        `set_requires_gradient_sync` sets this choice too.
        """
        for unit in units_of(self, recurse):
            unit.all_reduces = requires_all_reduce

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: Any | None = None
    ) -> None:
        """Set a function that gets this unit's reduced gradients, before they are delivered.

        With a data mesh of one axis it can reduce them over replicas that are unknown to shoal.
        While a hook is set, all parameters get a gradient, also parameters that no rank of this
        mesh has used.

        Args:
            hook: called with the gradients of this rank's shards, one flat tensor per dtype, which
                it may write to. They are means, or sums with
                `set_force_sum_reduction_for_comms(True)`.
            stream: the device's stream on which it runs; the current one by default.

        Raises:
            LayoutError: if a stream is passed for a mesh of two axes, or of CPUs.
        """
        for unit in units_of(self, recurse=False):
            _check_stream(unit, stream)
            unit.communication.hook = hook
            unit.communication.hook_stream = stream

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Have this unit's gradients reduced over its shards by a function of the user.

        It is called with a flat tensor of equal parts, one for each shard. A part has the gradients
        of the shard, and one number per parameter: 1 if this rank has a gradient of the parameter,
        0 if it does not. All parts are padded to the length of the longest one. Gradients are
        reduced over the replicas of a second data axis as always.

        Args:
            comm: called as `comm(output_tensor=, input_tensor=, group=, op=, async_op=True)`; it
                returns the work to wait for, or None if the output is complete. `op` is AVG where
                gradients in float32 or bfloat16 are divided by the number of ranks, SUM otherwise.

        Raises:
            StyleError: if it is not callable, or has no `allocate`.
        """
        name = "set_custom_reduce_scatter"
        for unit in units_of(self, recurse=False):
            unit.communication.reduce_scatter = _checked_comm(name, unit, comm)

    @check_types(enable=bool)
    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether custom reduce-scatters and hooks of this unit get sums instead of means.

        The collectives of shoal always sum, and gradients are divided afterwards.
        """
        for unit in units_of(self, recurse=False):
            unit.communication.sums_only = enable

    @check_types(reduce_scatter_unused_params=bool)
    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether parameters that no rank has used get zeros as gradients, or none.

        With zeros, all units whose forward has run take part in the reductions of a backward,
        whether or not the backward reaches them on this rank. They are reduced at its end, because
        ranks may reach units in different orders. If some ranks have used a parameter, it gets the
        mean of their gradients and zeros in any case.
        """
        for unit in units_of(self, recurse):
            unit.communication.zeros_for_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many units' gradients may be in flight at once during a backward: 1 by default.

        Raises:
            StyleError: if it is not a positive integer. The error is also a TypeError if it is not
                an integer, and a ValueError if it is below 1.
        """
        taken = "set_reduce_scatter_max_input_buffers: max_input_buffers is an int"
        require(max_input_buffers, int, taken, StyleTypeError, without=bool)
        if max_input_buffers < 1:
            raise LayoutError(
                "set_reduce_scatter_max_input_buffers: max_input_buffers must be at least 1, got "
                f"{max_input_buffers}"
            )
        for unit in units_of(self, recurse):
            unit.communication.max_in_flight = max_input_buffers

    @check_types(enable=bool)
    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are reduced over process groups of their own.

        On some backends gathers and reductions of one communicator wait for each other. The groups
        are made at the first reduction; all ranks of the mesh set the same value.
        """
        for unit in units_of(self, recurse):
            unit.communication.separate_groups = enable

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Set the divisor of gradients, by torch's older name for `set_gradient_divide_factor`."""
        warnings.warn(
            "Use `set_gradient_divide_factor` instead", category=FutureWarning, stacklevel=2
        )
        self.set_gradient_divide_factor(factor)

    # --- faults, and features of CUDA only
    # -----------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Reset all units after a forward or a backward that raised.

        All units are then sharded and keep no gradients. Gradients of earlier microbatches that
        were kept, or are in flight, are dropped; `.grad` stays. All ranks call it, on the outermost
        module.

        Raises:
            StyleError: if another module is the outermost one. It is also a RuntimeError.
        """
        unit = unit_of(self)
        if unit is not unit.schedule.units[0]:
            raise LayoutError(
                f"reset_iter_state: call it on the outermost fully_shard module; {unit.name!r} is "
                f"inside of {unit.schedule.units[0].name!r}"
            )
        for reduction in unit.schedule.context.take_pending():
            reduction.wait()
        unit.schedule.running = False
        unit.schedule.post_optimizer_event = None
        for inner in unit.schedule.units:
            inner.reset()

    @check_types(enable=bool)
    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse buffers of the process group's allocator; False changes nothing.

        Raises:
            UnsupportedModuleError: if `enable` is True.
        """
        if enable:
            raise UnsupportedModuleError(
                "set_allocate_memory_from_process_group_for_comm: not supported: shoal gathers "
                "from and to the parameters' own memory without buffers. Pass a custom "
                "collective whose `allocate` uses the process group's allocator: "
                "set_custom_all_gather, set_custom_reduce_scatter"
            )

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse NCCL's symmetric memory.

        Raises:
            UnsupportedModuleError: always.
        """
        raise UnsupportedModuleError(
            "set_symm_mem_for_comm: not supported: shoal gathers from and to the parameters' own "
            f"memory, without buffers in symmetric memory of {backend!r}, which exist on CUDA "
            "only. Pass a custom collective whose `allocate` returns such buffers: "
            "set_custom_all_gather, set_custom_reduce_scatter"
        )


def refusing_methods_of_units(cls: type[M]) -> type[M]:
    """Give a class of modules without units the public methods of `FSDPModule`, as refusals.

    In torch all modules of `replicate` have these methods.
    """
    for name in vars(FSDPModule):
        is_public = not name.startswith("_")
        if is_public and not hasattr(cls, name):
            setattr(cls, name, _refusal_of(name))
    return cls


def _refusal_of(name: str) -> Callable[..., NoReturn]:
    """Return a method that refuses a method of units, and has its signature."""

    @wraps(getattr(FSDPModule, name))
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModuleError(
            f"{name}: only a unit has this method, and replicate has made {type(self).__name__} "
            "without one: its parameters are always whole, and gradients are reduced in buckets. "
            "Pass dp_mesh_dims=DataParallelMeshDims(replicate=...) to replicate, which then makes "
            "a unit"
        )

    refuse.__doc__ = f"Refuse `{name}`, which only units have (`replicate(..., dp_mesh_dims=)`)."
    return refuse


def _start_over_all_axes(unit: Unit) -> GroupReduction:
    """Start to reduce the kept gradients of a unit, over its shards and its replicas.

    If the user has turned only the reductions over replicas off, they stay off.
    `set_requires_gradient_sync(False)` turns both off; then `reduce_gradients` is the reduction
    that the user wants, and it includes the replicas.
    """
    all_reduces = unit.all_reduces
    unit.all_reduces = all_reduces or not unit.syncs
    try:
        return GroupReduction.start(unit, {})
    finally:
        unit.all_reduces = all_reduces


def _check_stream(unit: Unit, stream: Any | None) -> None:
    if stream is not None and unit.axes.has_replicas:
        raise LayoutError(
            "set_all_reduce_hook: stream cannot be set when fully_shard reduces over replicas "
            f"itself, over {unit.axes.mesh!r}; leave it out"
        )
    if stream is not None and unit.axes.mesh.device_type == "cpu":
        raise LayoutError(
            "set_all_reduce_hook: CPUs do not have streams; leave `stream` out on a mesh of type "
            "'cpu'"
        )


def _checked_comm(name: str, unit: Unit, comm: Any) -> Any:
    if not unit.axes.num_sharding_axes:
        raise LayoutError(
            f"{name}: the parameters of this unit are replicated, so there are no shards to gather "
            "or scatter; set_all_reduce_hook gets its reduced gradients"
        )
    if callable(comm) and callable(getattr(comm, "allocate", None)):
        return comm
    raise StyleTypeError(
        f"{name}: comm must be callable with the buffers and have a method allocate(size, *, "
        f"dtype, device), got {type(comm).__name__}"
    )


def _check_finished(name: str, units: Sequence[Unit]) -> None:
    if in_backward():
        raise StyleError(f"{name}: a backward is running; call {name} after it")
    for unit in units:
        unit.check_kept()


def _units(modules: Sequence[nn.Module]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise StyleError(
                f"expected modules that fully_shard was called on, got {type(module).__name__}"
            )
    return [unit_of(module) for module in modules]


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Have modules share the gradients that backwards leave in flight.

    The stages of a pipeline on one rank use it. The gradients in flight of all modules are bounded
    together (`set_reduce_scatter_max_input_buffers`), and the last backward of one module delivers
    the gradients of all.

    Args:
        modules: outermost modules that `fully_shard` was called on.

    Raises:
        StyleError: if one of them is not sharded. It is also a ValueError.

    Example:
        >>> from shoal_data_parallel import fully_shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     share_comm_ctx([fully_shard(nn.Linear(8, 8), mesh) for _ in range(2)])
    """
    if not isinstance(modules, (list, tuple)):
        raise StyleTypeError(
            f"share_comm_ctx: expected a list of modules, got {type(modules).__name__}"
        )
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise LayoutError(
                "share_comm_ctx: expected modules that fully_shard was called on, got "
                f"{type(module).__name__}"
            )
    schedules = [unit_of(module).schedule for module in modules]
    for schedule in schedules[1:]:
        shared = schedules[0].context
        shared.pending += schedule.context.take_pending()
        schedule.context = shared


# --- gradients that are not delivered yet ---------------------------------------------------------

_WATCHED: WeakSet[CommContext] = WeakSet()


def _watch(contexts: Sequence[CommContext]) -> None:
    """Have the step of an optimizer raise while gradients of its parameters are in flight."""
    _WATCHED.update(contexts)
    _watch_optimizers()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    pending = [reduction for context in _WATCHED for reduction in context.pending]
    if not pending:
        return
    leaves = {id(parameter.leaf) for one in pending for parameter in one.group.parameters}
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if leaves & held:
        raise StyleError(
            f"{type(optimizer).__name__}.step: gradients are still in flight, because no backward "
            "was the last one: call finalize_backward() of the module, or "
            "set_is_last_backward(True) before the last backward"
        )


# cached, so that the hook is registered once
_watch_optimizers = cache(lambda: register_optimizer_step_pre_hook(_before_step))


@check_types(module=nn.Module, method_name=str)
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have a method of a unit count as its forward.

    Parameters are gathered before the method and freed after it.

    Args:
        module: a module; nothing is done unless it is an `FSDPModule`.
        method_name: the name of the method, for example "generate" or "encode".

    Raises:
        LayoutError: if the class does not have the method.

    Example:
        >>> from shoal_data_parallel import fully_shard
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> class Encoder(nn.Linear):
        ...     def encode(self, x: torch.Tensor) -> torch.Tensor:
        ...         return x @ self.weight.T
        >>> with fake_world(4):
        ...     model = fully_shard(Encoder(8, 8), init_device_mesh("cpu", (4,)))
        ...     register_fsdp_forward_method(model, "encode")
        ...     model.encode(torch.ones(2, 8)).shape
        torch.Size([2, 8])
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise LayoutError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
        )
    vars(module)[method_name] = lambda *args, **kwargs: as_forward(module, method, args, kwargs)
