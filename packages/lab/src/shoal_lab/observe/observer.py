"""`ProgramObserver`: hooks that record one rank's run of an unchanged program.

A step of the record begins with the first forward after an optimizer's step, and ends before the
next such forward. Modules are found when their forward runs (`roots`).
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shoal_data_parallel import FSDPModule
from shoal_dtensor import DTensor
from shoal_dtensor.internal import forward_of, owners_of

from ..records import LocalValue, Output, RankRecord, StepRecord, Values
from .batches import record_batches, replay_batches
from .dropout import DropoutWatch
from .earlier_parameters import ParameterIdentities, StaleParameters
from .local_values import local_value
from .roots import Roots

# The growth of the gradients is recorded for each backward only if the model has at most so many
# elements.
_SMALL_MODEL = 1 << 20
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits")


@dataclass(frozen=True, slots=True)
class Observation:
    """Choices of one observed run.

    Attributes:
        outputs_of_step: the step in which the outputs of modules are recorded; None for no step.
        applies_dropout: whether dropout is applied; None applies it if the program uses shoal.
        uses_stale_parameters: whether every forward uses the parameters from before the most recent
            step of the optimizer. A program with this defect is recognized by comparing it with
            such a run.
        batches: the batches that data loaders return in place of their own; None if their own
            batches are recorded.
    """

    outputs_of_step: int | None = None
    applies_dropout: bool | None = None
    uses_stale_parameters: bool = False
    batches: Any = None


class ProgramObserver:
    """The hooks of one process and their record.

    The process ends with the program, so hooks are not removed.
    """

    def __init__(self, observation: Observation) -> None:
        self.record = RankRecord()
        self._choices = observation
        self._roots = Roots()
        # the modules whose forward runs, innermost last
        self._stack = list[nn.Module]()
        # id of a module -> its path
        self._paths = dict[int, str]()
        # the step that is not complete
        self._step = StepRecord()
        # whether an optimizer has stepped since the step began
        self._has_stepped = False
        # number of optimizers whose `step` runs: one may call another one
        self._stepping = 0
        self._backward_depth = 0
        self._stale = StaleParameters()
        # Whether the program uses shoal, which decides whether dropout is applied; None until this
        # is known. If the observation has a choice about dropout, the choice is used instead.
        self._is_shoal: bool | None = observation.applies_dropout
        # The optimizers that stepped in this step: held, because another one could get the same id.
        self._stepped = list[Any]()
        self._known_optimizers = weakref.WeakSet[Any]()
        self._identities = ParameterIdentities()

    def install(self) -> None:
        """Register all hooks."""
        # The hooks leave the graphs of torch.compile alone, so torch need not warn of them.
        warnings.filterwarnings(
            "ignore", message="Using `torch.compile.module.` when there are global"
        )
        register_module_forward_pre_hook(self._enter_module)
        register_module_forward_hook(self._leave_module, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._watch_backward()
        self._watch_functions()
        DropoutWatch(self.record.masks, self._keeps_dropout, self._place).install()
        if self._choices.batches is None:
            record_batches(self.record.batches)
        else:
            replay_batches(self._choices.batches)

    def finish(self, returned: Any) -> RankRecord:
        """Complete the record when the program has ended."""
        parameters = self._roots.parameters()
        # `before` is empty until the first forward of a step.
        if self._step.before and not self._step.trained:
            # a program without an optimizer: all parameters count as trained
            self._step.trained |= parameters.keys()
            self._step.gradients = self._read(_gradients_of(parameters))
        if self._step.before:
            self._close_step()
        record = self.record
        record.after = self._read(parameters)
        record.replaced_after = self._identities.note(parameters)
        record.returned = self._read_returned(returned)
        if dist.is_initialized():
            record.meshes = _find_meshes()
        if self._is_shoal is None:
            self._is_shoal = self._find_shoal()
        record.uses_shoal = bool(self._is_shoal)
        return record

    # --- modules --------------------------------------------------------------------------------

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        """Begin a module's forward; a hook."""
        if torch.compiler.is_compiling():
            # Modules inside of a compiled one are not observed: a hook would break the graph.
            return
        if not self._stack:
            self._begin_forward(module)
        self._stack.append(module)

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a module's forward, and record its output in the requested step; a hook."""
        if torch.compiler.is_compiling():
            return
        # Remove this module, and before it the inner modules that were left by an exception.
        while self._stack and self._stack.pop() is not module:
            pass
        values = [value for value in _tensors_of(output) if value.is_floating_point()]
        for value in values:
            self._note_dtype(value)
        is_requested = self._choices.outputs_of_step == len(self.record.steps)
        if is_requested and torch.is_grad_enabled() and values:
            self._record_output(module, values[0])

    def _begin_forward(self, module: nn.Module) -> None:
        """Prepare the record for the forward of an outermost module.

        If an optimizer has stepped, a new step begins. Parameters that the record of the step does
        not have yet are recorded. If stale parameters are requested, the first forward of a step
        begins with them.
        """
        self._roots.add(module)
        # Forwards without gradients, and modules without a parameter (losses), begin no step.
        has_parameters = next(module.parameters(), None) is not None
        if not torch.is_grad_enabled() or not has_parameters:
            return
        if self._has_stepped:
            self._close_step()
        parameters = self._roots.parameters()
        is_first = not self._step.before
        missing = {
            name: value for name, value in parameters.items() if name not in self._step.before
        }
        self._step.before |= self._read(missing)
        self._step.replaced |= self._identities.note(missing)
        if self._choices.uses_stale_parameters and is_first:
            self._stale.swap_in(parameters)

    def _close_step(self) -> None:
        """Complete the record of this step, and begin the record of the next step."""
        self.record.steps.append(self._step)
        self._step = StepRecord()
        self._has_stepped = False
        self._stepped.clear()

    def _record_output(self, module: nn.Module, value: Tensor) -> None:
        """Record the output of a module, and the gradient at the output when it is computed."""
        if id(module) not in self._paths:
            self._paths = self._roots.paths()
        path = self._paths.get(id(module), type(module).__name__)
        self.record.outputs.append(Output(path, "output", self._read_one(value)))
        if not value.requires_grad:
            return
        placeholder = Output(path, "gradient", LocalValue(torch.zeros(0, dtype=torch.float64)))
        self.record.outputs.append(placeholder)

        def receive(gradient: Tensor) -> None:
            placeholder.value = self._read_one(gradient)

        value.register_hook(receive)  # type: ignore[no-untyped-call]  # torch has no types here

    def _place(self) -> str:
        """Return the path of the module whose forward runs."""
        if not self._stack:
            return "the program"
        module = self._stack[-1]
        if id(module) not in self._paths:
            self._paths = self._roots.paths()
        return self._paths.get(id(module), type(module).__name__)

    def _keeps_dropout(self) -> bool:
        """Return whether dropout is applied: the observation's choice, or else `_find_shoal`."""
        if self._is_shoal is None:
            self._is_shoal = self._find_shoal()
        return self._is_shoal

    def _find_shoal(self) -> bool:
        """Return whether a module has a parallel form of shoal."""
        for root in self._roots:
            # `fully_shard` and `replicate` register themselves as owners of parameters.
            if owners_of(root) or any(isinstance(p, DTensor) for p in root.parameters()):
                return True
            for module in root.modules():
                # A tensor-parallel style replaces the forward of a module.
                if isinstance(module, FSDPModule) or forward_of(module) is not None:
                    return True
        return False

    # --- backward -------------------------------------------------------------------------------

    def _watch_backward(self) -> None:
        """Replace the two functions that start a backward."""
        tensor: Any = torch.Tensor
        tensor.backward = self._watched_backward(tensor.backward)
        torch.autograd.backward = self._watched_backward(torch.autograd.backward)

    def _watched_backward(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a backward that records the loss, and how much the gradients grow."""

        @functools.wraps(function)
        def backward(root: Any, *args: Any, **kwargs: Any) -> None:
            if self._backward_depth:
                return function(root, *args, **kwargs)
            self._backward_depth += 1
            before = self._gradients()
            try:
                function(root, *args, **kwargs)
            finally:
                self._backward_depth -= 1
            self._note_backward(root, before)
            return None

        return backward

    def _note_backward(self, root: Any, before: Values) -> None:
        """Record the loss, and the growth of the gradients."""
        if isinstance(root, Tensor) and root.numel() == 1:
            # The local tensor has one element. On a rank outside of the mesh it is empty: 0.
            self._step.losses.append(float(local_value(root).tensor.sum()))
        growth = Values()
        for name, value in self._gradients().items():
            tensor = value.tensor
            if name in before and before[name].tensor.shape == tensor.shape:
                tensor = tensor - before[name].tensor
            growth[name] = LocalValue(tensor, value.shape, value.index, value.pending)
        self._step.unreduced.append(growth)

    def _gradients(self) -> Values:
        """Read the gradients of a small model; return {} for a large one."""
        parameters = self._roots.parameters()
        if sum(parameter.numel() for parameter in parameters.values()) > _SMALL_MODEL:
            return {}
        return self._read(_gradients_of(parameters))

    # --- optimizers -----------------------------------------------------------------------------

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the gradients of an optimizer's parameters before its step; a hook."""
        self._stepping += 1
        if self._stepping > 1:
            return
        if any(other is optimizer for other in self._stepped):
            # a second step of this optimizer, without a forward between them
            self._close_step()
        # also parameters that this optimizer does not have, if a root has them
        parameters = self._parameters_of_roots(optimizer)
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = {name: value for name, value in parameters.items() if id(value) in updated}
        self._step.trained |= trained.keys()
        self._step.gradients |= self._read(_gradients_of(trained))
        missing = {
            name: value for name, value in parameters.items() if name not in self._step.before
        }
        self._step.before |= self._read(missing)
        self._step.replaced |= self._identities.note(missing)
        self._stale.swap_out(parameters)
        if optimizer not in self._known_optimizers:
            self._known_optimizers.add(optimizer)
            self._step.states_before |= self._read_states(optimizer)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the state of an optimizer after its step; a hook."""
        self._stepping -= 1
        if self._stepping:
            return
        self._stepped.append(optimizer)
        self._step.states |= self._read_states(optimizer)
        if not self._has_stepped:
            # Read after the first optimizer of every step: at the end of the program, the meshes of
            # torch cannot be read any more if the program has called destroy_process_group.
            self.record.meshes = _find_meshes()
        self._has_stepped = True

    def _read_states(self, optimizer: Any) -> Values:
        """Copy the optimizer's state, by parameter and key."""
        states = Values()
        for name, parameter in self._parameters_of_roots(optimizer).items():
            state = optimizer.state.get(parameter, {})
            values = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, value in self._read(values).items():
                states[f"{name} {key}"] = value
        return states

    def _parameters_of_roots(self, optimizer: Any) -> dict[str, Tensor]:
        """Return the parameters of all roots, and parameters that only the optimizer has."""
        parameters = self._roots.parameters()
        known = {id(parameter) for parameter in parameters.values()}
        for number, group in enumerate(optimizer.param_groups):
            names = group.get("param_names") or range(len(group["params"]))
            for name, parameter in zip(names, group["params"], strict=True):
                if id(parameter) in known:
                    continue
                is_named = isinstance(name, str) and name not in parameters
                full_name = name if is_named else f"optimizer.{number}.{name}"
                parameters[full_name] = parameter
        return parameters

    # --- functions ------------------------------------------------------------------------------

    def _watch_functions(self) -> None:
        """Replace functions of torch, to record numbers of targets, gradient norms and groups."""
        for name in _LOSSES:
            setattr(F, name, self._count_targets(getattr(F, name)))
        utilities: Any = nn.utils
        normed = self._record_norm_of(utilities.clip_grad_norm_)
        utilities.clip_grad_norm_ = normed
        utilities.clip_grad.clip_grad_norm_ = normed
        module: Any = dist
        module.new_group = self._record_groups(dist.new_group)

    def _count_targets(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a loss function that records its number of targets."""

        @functools.wraps(function)
        def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            is_observed = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if is_observed and isinstance(target, Tensor):
                ignored = kwargs.get("ignore_index", -100)
                is_class = not target.is_floating_point()
                counted = (target != ignored) if is_class else torch.ones_like(target)
                self._step.counts.append(int(local_value(counted).tensor.sum()))
            return function(input, target, *args, **kwargs)

        return loss

    def _record_norm_of(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a clipping function that records the norm that it returns."""

        @functools.wraps(function)
        def clip(*args: Any, **kwargs: Any) -> Tensor:
            norm = function(*args, **kwargs)
            self._step.norms.append(float(local_value(norm).tensor.sum()))
            return norm

        return clip

    def _record_groups(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `new_group` that records the ranks of the group."""

        @functools.wraps(function)
        def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            if ranks is not None:
                self.record.groups.append(tuple(ranks))
            return function(ranks, *args, **kwargs)

        return new_group

    # --- values ---------------------------------------------------------------------------------

    def _read(self, tensors: Mapping[str, Tensor]) -> Values:
        """Copy tensors by name."""
        return {name: self._read_one(tensor) for name, tensor in tensors.items()}

    def _read_one(self, tensor: Tensor) -> LocalValue:
        """Return the local value of a tensor, and record its dtype."""
        self._note_dtype(tensor)
        return local_value(tensor)

    def _note_dtype(self, tensor: Tensor) -> None:
        """Record the coarsest dtype of the values."""
        if tensor.is_floating_point() and tensor.numel() > 1:
            epsilon = torch.finfo(tensor.dtype).eps
            self.record.epsilon = max(self.record.epsilon, epsilon)

    def _read_returned(self, returned: Any) -> Values:
        """Copy the values that a program returns by name."""
        if not isinstance(returned, Mapping):
            return {}
        values = Values()
        for name, value in returned.items():
            if isinstance(value, int | float):
                value = torch.tensor(value, dtype=torch.float64)
            if isinstance(value, Tensor):
                values[str(name)] = self._read_one(value)
        return values


def _gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients that exist, by name."""
    gradients = dict[str, Tensor]()
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    return gradients


def _tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors of a module's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [value for value in output if isinstance(value, Tensor)]
    return []


def _find_meshes() -> list[tuple[tuple[str, ...], Any]]:
    """Return names of axes and grids of ranks of all device meshes, of torch or of shoal."""
    meshes = list[tuple[tuple[str, ...], Any]]()
    for candidate in gc.get_objects():
        if type(candidate).__name__ != "DeviceMesh":
            continue
        names = getattr(candidate, "mesh_dim_names", None)
        grid = getattr(candidate, "mesh", None)
        if names and isinstance(grid, Tensor):
            meshes.append((tuple(names), grid.tolist()))
    return meshes
