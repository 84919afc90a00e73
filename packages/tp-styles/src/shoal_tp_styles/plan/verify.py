"""Verification of a plan by its declarations and by a run on simulated ranks.

It changes nothing, and needs no process group.

`try_plan` runs one forward and backward of a parallel model on simulated ranks, and compares the
results with the plain model. Inputs are replicated; outputs may be sharded. The runs are in float64
and eval mode, in which only an error of the plan makes a difference. A model that draws random
numbers runs in training mode too.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal_context_parallel.internal import ContextOptions
from shoal_dtensor import DTensor
from shoal_dtensor.errors import PlanError, StyleError
from shoal_dtensor.internal import check_types, draws_now, find_drawing_modules, holds_tensors
from shoal_mesh import DeviceMesh, abstract_mesh
from shoal_mesh.internal import html_table, unobserved

from ..apply.apply import plain_module
from .explain_difference import explain_difference
from .resolve import Plan, ResolvedPlan, apply_plan, resolve, sharded_parameters
from .styled_module import StyledModule, axis_mesh

_NOT_RUN = "the plan was not run"


class Verification(NamedTuple):
    """Findings about a plan, one readable line each.

    Attributes:
        errors: reasons why the plan cannot be applied: unsupported modules, wrong axes, ambiguity,
            tied conflicts.
        wrong: results of a run on simulated ranks that differ from the plain model.
        unproven: reason why the plan was not run.
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
        """True if the plan can be applied, every entry matches, and no result of a run is wrong."""
        return not self.errors and not self.unmatched and not self.wrong

    @property
    def proven(self) -> bool:
        """True if the plan was run on simulated ranks and gives the results of the plain model."""
        return self.ok and not self.unproven

    def require(self) -> None:
        """Raise PlanError unless `ok`.

        Raises:
            PlanError: with all findings.
        """
        if not self.ok:
            raise PlanError(str(self))

    @property
    def verdict(self) -> str:
        """Short summary of the findings; the first line of the printed report."""
        if not self.ok:
            return "the plan does not fit"
        if not self.proven:
            return "no error was found, but the plan was not run"
        return "the plan fits"

    def _findings(self) -> list[tuple[str, str]]:
        kinds = ("errors", "wrong", "unmatched", "empty", "uneven", "unsharded", "unproven")
        return [(kind, finding) for kind in kinds for finding in getattr(self, kind)]

    def __repr__(self) -> str:
        findings = [f"{kind}: {finding}" for kind, finding in self._findings()]
        return "\n".join([self.verdict, *findings])

    def _repr_html_(self) -> str:
        return html_table(self._findings(), caption=self.verdict)


@check_types(model=nn.Module)
def verify(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, *args: Any, **kwargs: Any
) -> Verification:
    """Find errors of a plan for a model; the mesh may be an `abstract_mesh`.

    Nothing is changed or raised.

    With example inputs the plan is run: this process simulates one forward and backward of every
    rank of the mesh, in float64 and eval mode, and compares the results with the plain model. A
    model that draws random numbers, such as dropout, is also run in training mode, from one seed.
    A plan for a large model can be verified on a small configuration of the model.

    Args:
        model: the root of the plan's paths, on any device, including meta.
        plan: the plan, as for `parallelize_module`.
        mesh: the mesh that the plan is for.
        args: example inputs of global shape; every rank gets the same inputs.
        kwargs: keyword arguments among the example inputs.

    Returns:
        The findings: errors, uneven and empty shards, and reasons why the plan was not run.

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_tp_styles import ColwiseParallel
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        >>> plan = {"0": ColwiseParallel(), "7": ColwiseParallel()}
        >>> print(verify(model, plan, abstract_mesh((4,))))
        the plan does not fit
        unmatched: plan entry '7' matches no module of Sequential: no child of the root matches '7'
        empty: 0.weight: dim 0 of 6 in shards of [2, 2, 2, 0] along 0
        empty: 0.bias: dim 0 of 6 in shards of [2, 2, 2, 0] along 0
        unsharded: 1.weight (4, 6) is replicated on every rank (41% of all parameters)
        unproven: the plan was not run; give example inputs: verify(model, plan, mesh, *inputs)
    """
    has_errors = (f"{_NOT_RUN}, because it has errors",)
    try:
        resolved = resolve(model, plan)
    except (StyleError, TypeError) as error:
        return Verification(errors=(str(error),), unproven=has_errors)
    errors = [str(error) for error in resolved.errors()]
    uneven: list[str] = []
    empty: list[str] = []
    for use in resolved.uses:
        try:
            unequal = [*use.unequal_shards(axis_mesh(mesh, use.style))]
        except StyleError as error:
            errors.append(f"{use.key!r}: {error}")
            continue
        uneven += [found.description for found in unequal if not found.has_empty_shard]
        empty += [found.description for found in unequal if found.has_empty_shard]
    reads_positions = _module_of_positions(resolved)
    if errors:
        trial = Verification(unproven=has_errors)
    elif reads_positions is not None:
        path = reads_positions.path or "the root"
        reason = f"{_NOT_RUN}: {path} takes a rank's positions, not whole inputs"
        trial = Verification(unproven=(reason,))
    else:
        trial = try_plan(model, plan, mesh, args, kwargs=kwargs)
    return trial._replace(
        errors=tuple(errors),
        uneven=tuple(uneven),
        empty=tuple(empty),
        unsharded=tuple(_unsharded_matrices(model, resolved)),
        unmatched=resolved.unmatched,
    )


def _module_of_positions(resolved: ResolvedPlan) -> StyledModule | None:
    """Return a module whose caller shards its inputs along the sequence, if there is one."""
    for use in resolved.uses:
        if use.sharding is not None and isinstance(use.sharding.options, ContextOptions):
            return use
    return None


def _unsharded_matrices(model: nn.Module, resolved: ResolvedPlan) -> Iterator[str]:
    """Describe the matrices that every rank holds whole."""
    sharded = {id(param) for param in sharded_parameters(resolved)}
    total = sum(param.numel() for param in model.parameters()) or 1
    for name, param in model.named_parameters():
        if param.ndim > 1 and id(param) not in sharded:
            fraction = param.numel() / total
            yield (
                f"{name} {tuple(param.shape)} is replicated on every rank ({fraction:.0%} of "
                "all parameters)"
            )


MOST_RANKS = 16
# Parameters of all ranks' copies together: 512 MiB in float64.
MOST_PARAMETERS = 1 << 26


class _Inputs(NamedTuple):
    """The arguments of the model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        with_gradients: whether floating-point inputs require gradients.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    with_gradients: bool = True


class _Results(NamedTuple):
    """Results of one rank, or of the plain model.

    Attributes:
        outputs: full tensors.
        grads: gradients of the parameters that require one, by path.
        input_grads: gradients of floating-point inputs.
        frozen: paths of parameters that do not require a gradient.
    """

    outputs: list[Tensor]
    grads: dict[str, Tensor | None]
    input_grads: list[Tensor | None]
    frozen: frozenset[str]


def try_plan(
    model: nn.Module, plan: Plan, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Verification:
    """Compare a plan, on a copy for each rank, with the plain model.

    Outputs are compared, and gradients of parameters and inputs.
    """
    refusal = _reason_not_to_run(model, mesh, args, kwargs)
    if refusal:
        return Verification(unproven=(refusal,))
    with _kept_random_states():
        try:
            plain = copy.deepcopy(model).double().cpu().eval()
        # whatever the user's model raises is a finding
        except Exception as error:
            reason = f"{_NOT_RUN}: the model cannot be copied: {kind_and_first_line(error)}"
            return Verification(unproven=(reason,))
        _vary_constants(plain)
        inputs = _Inputs(args, kwargs)
        trial = _compare_runs(plain, plan, mesh, inputs)
        if trial.proven and any(map(draws_now, find_drawing_modules(plain.train()))):
            trial = _compare_runs(plain, plan, mesh, inputs)
    return trial


@contextmanager
def _kept_random_states() -> Iterator[None]:
    """Restore the states of the generators of torch, Python and NumPy after the block."""
    # imported here because few programs need the lab
    from shoal_mesh.lab import RandomStates

    states = RandomStates.capture()
    try:
        yield
    finally:
        states.restore()


def _compare_runs(plain: nn.Module, plan: Plan, mesh: DeviceMesh, inputs: _Inputs) -> Verification:
    """Compare a run of the plan with the plain model, in the mode of the plain model.

    In training mode all runs start from one seed.
    """
    mode = " in training mode, with random numbers" if plain.training else ""
    try:
        inputs, expected = _run_plain(plain, inputs)
        if plain.training:
            repeated = _run_module(copy.deepcopy(plain), inputs)
            if any(_differences([repeated], expected, abstract_mesh((1,)))):
                reason = f"the plain model computes different results with the same seed{mode}"
                return Verification(unproven=(reason,))
    # whatever the user's model raises is a finding
    except Exception as error:
        description = kind_and_first_line(error)
        reason = f"the plain model does not run on these inputs{mode}: {description}"
        return Verification(unproven=(reason,))

    def run_on_one_rank(view: DeviceMesh) -> _Results:
        module = copy.deepcopy(plain)
        with unobserved():
            apply_plan(plan, module, view)
            return _run_module(module, inputs)

    try:
        # imported here because few programs need the lab
        from shoal_mesh.lab import simulate_ranks

        results = simulate_ranks(mesh, run_on_one_rank)
    # any error that the model raises is a finding
    except Exception as error:
        description = f"{kind_and_first_line(error)}{_line_of_model(error)}"
        finding = f"the plan does not run{mode}: {description}"
        if plain.training:
            return Verification(unproven=(finding,))
        return Verification(wrong=(finding,))
    differences = _differences(results, expected, mesh)
    wrong = tuple(f"{difference}{mode}" for difference in differences)
    return Verification(wrong=wrong, unproven=tuple(_unreached_entries(plain, plan, expected)))


def _unreached_entries(plain: nn.Module, plan: Plan, expected: _Results) -> Iterator[str]:
    """Yield entries whose parameters get no gradient: parts that these inputs do not run.

    If no parameter of the model gets a gradient, these parts cannot be found.
    """
    parameters = dict(plain.named_parameters())
    reached = {id(parameters[name]) for name, grad in expected.grads.items() if grad is not None}
    if not reached:
        return
    reached_by_entry: dict[str, list[bool]] = {}
    for use in resolve(plain, plan).uses:
        for param in use.module.parameters():
            if param.requires_grad:
                reached_by_entry.setdefault(use.key, []).append(id(param) in reached)
    for key, are_reached in reached_by_entry.items():
        if not any(are_reached):
            yield f"{key!r} was not run, because these inputs do not reach its parameters"


def _run_plain(plain: nn.Module, inputs: _Inputs) -> tuple[_Inputs, _Results]:
    """Run the plain model; return its results, and the inputs in the form that the model accepts.

    Some models write to their inputs or set `requires_grad` of a view of them, which autograd
    refuses for inputs that require gradients. Such models get inputs without gradients.
    """
    try:
        return inputs, _run_module(copy.deepcopy(plain), inputs)
    except RuntimeError:
        without_gradients = inputs._replace(with_gradients=False)
        return without_gradients, _run_module(copy.deepcopy(plain), without_gradients)


def _reason_not_to_run(
    model: nn.Module, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return the reason why a model is not run on simulated ranks; empty if it is."""
    if not args and not kwargs:
        return f"{_NOT_RUN}; give example inputs: verify(model, plan, mesh, *inputs)"
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return f"{_NOT_RUN}: parameters on the meta device have no values"
    count = sum(tensor.numel() for tensor in tensors) * mesh.size()
    if mesh.size() > MOST_RANKS or count > MOST_PARAMETERS:
        return (
            f"{_NOT_RUN}: {mesh.size()} ranks with {count} parameters are too much for "
            f"one process ({MOST_RANKS} ranks, {MOST_PARAMETERS} parameters); verify a smaller "
            "configuration of the model"
        )
    return ""


def _vary_constants(module: nn.Module) -> None:
    """Add noise to parameters whose elements are equal.

    Without it a bias of zeros that is added once per rank would not be found.
    """
    with torch.no_grad():
        for param in module.parameters():
            if holds_tensors(param) or not param.is_floating_point():
                continue
            first_element = param.flatten()[:1]
            if (param == first_element).all():
                param.add_(torch.rand_like(param), alpha=0.1)


@torch.enable_grad()
def _run_module(module: nn.Module, inputs: _Inputs) -> _Results:
    # imported here because few programs need the lab
    from shoal_mesh.lab import RandomStates

    RandomStates.seed(0)
    leaves: list[Tensor] = []

    def copy_input(tensor: Tensor) -> Tensor:
        """Copy an input; a floating-point tensor becomes a float64 leaf."""
        tensor = tensor.detach().cpu().clone()
        if tensor.is_floating_point():
            tensor = tensor.double().requires_grad_(inputs.with_gradients)
            leaves.append(tensor)
        return tensor

    args = map_tensors(copy_input, inputs.args)
    kwargs = map_tensors(copy_input, inputs.kwargs)
    outputs = list(_whole_tensors(module(*args, **kwargs)))
    loss = torch.zeros((), dtype=torch.double, device="cpu")
    for output in outputs:
        if output.requires_grad and output.is_floating_point():
            loss = loss + output.square().sum()
    if loss.requires_grad:
        torch.autograd.backward(loss)
    plain_module(module)
    grads: dict[str, Tensor | None] = {}
    frozen: list[str] = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            grads[name] = param.grad
        else:
            frozen.append(name)
    return _Results(
        outputs=[output.detach() for output in outputs],
        grads=grads,
        input_grads=[leaf.grad for leaf in leaves],
        frozen=frozenset(frozen),
    )


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Replace the tensors in the arguments of a model; a mapping of any kind becomes a dict."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(change, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_tensors(change, item) for item in value)
    return value


def _whole_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a model; a DTensor as its whole tensor."""
    if isinstance(value, DTensor):
        yield value.full_tensor()
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _whole_tensors([*value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _whole_tensors(item)


def _differences(results: list[_Results], expected: _Results, mesh: DeviceMesh) -> Iterator[str]:
    """Describe the results of the ranks that differ from the results of the plain model."""

    def explain(values: Sequence[Tensor | None], wanted: Tensor | None) -> str:
        fault = explain_difference(values, wanted, mesh, _same_values)
        return f": {fault}" if fault else ""

    for index, output in enumerate(expected.outputs):
        shards = [result.outputs[index] for result in results if index < len(result.outputs)]
        is_complete = len(shards) == len(results)
        if not is_complete or not _is_output(shards, output):
            fault = explain(shards, output) if is_complete else ""
            shape = tuple(output.shape)
            yield f"output {index} of shape {shape} differs from the plain model's{fault}"
    for name, grad in expected.grads.items():
        # The style of an adapter freezes the weight that it adapts.
        if all(name in result.frozen for result in results):
            continue
        ranks = []
        for rank, result in enumerate(results):
            if name not in result.grads or not _same_values(result.grads[name], grad):
                ranks.append(rank)
        if ranks:
            fault = explain([result.grads.get(name) for result in results], grad)
            yield f"the gradient of {name} differs from the plain model's on ranks {ranks}{fault}"
    for index, grad in enumerate(expected.input_grads):
        values = [result.input_grads[index] for result in results]
        if not all(_same_values(value, grad) for value in values):
            fault = explain(values, grad)
            yield f"the gradient of floating input {index} differs from the plain model's{fault}"


def _is_output(shards: list[Tensor], expected: Tensor) -> bool:
    """Tell whether the ranks' outputs are replicas or shards of the expected one.

    Shards are along one dim.
    """
    if all(shard.shape == expected.shape for shard in shards):
        return all(_same_values(shard, expected) for shard in shards)
    if any(shard.ndim != expected.ndim for shard in shards):
        return False
    for dim in range(expected.ndim):
        if _are_shards(shards, expected.shape, dim):
            return _same_values(torch.cat(shards, dim), expected)
    return False


def _are_shards(shards: list[Tensor], shape: torch.Size, dim: int) -> bool:
    """Tell whether the shapes are those of shards of `shape` along one dim, in order of ranks."""
    total = 0
    for shard in shards:
        size = shard.shape[dim]
        if shard.shape != (*shape[:dim], size, *shape[dim + 1 :]):
            return False
        total += size
    return total == shape[dim]


def _same_values(value: Tensor | None, expected: Tensor | None) -> bool:
    """Compare two tensors up to sums of another order; no gradient counts as zero."""
    if value is None or expected is None:
        return all(tensor is None or not tensor.any() for tensor in (value, expected))
    if value.shape != expected.shape:
        return False
    # Modules that compute in float32 whatever their dtype round by 1e-6; a wrong plan is wrong in
    # the first digits.
    wanted = expected.double()
    largest = float(wanted.abs().nan_to_num().max()) if wanted.numel() else 0.0
    tolerance = 1e-5 * largest + 1e-9
    return torch.allclose(value.double(), wanted, rtol=1e-6, atol=tolerance, equal_nan=True)


def kind_and_first_line(error: BaseException) -> str:
    """Return the class of an error and the first line of its message, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _line_of_model(error: BaseException) -> str:
    """Return the innermost line of the model's own code that raised an error.

    The form is ` (net.py:42, in Net.forward)`.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        owner = frame.f_locals.get("self")
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if isinstance(owner, nn.Module) and package != "torch":
            file = os.path.basename(frame.f_code.co_filename)
            return f" ({file}:{line}, in {type(owner).__name__}.{frame.f_code.co_name})"
    return ""
