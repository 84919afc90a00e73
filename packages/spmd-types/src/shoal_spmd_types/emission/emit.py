"""`emit`: the forward of a module as a Python file of local operators and typed collectives.

May import: checked_program, constants, names, recorder, sides, source, statements.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import count, zip_longest
from math import prod
from typing import Any

from torch import Tensor, nn

from shoal_dtensor import DTensor, PartitionSpec, Placement, Replicate, Spec
from shoal_dtensor.errors import ArgumentTypeError, ArgumentValueError
from shoal_dtensor.internal import spmd
from shoal_mesh import DeviceMesh, abstract_mesh

from .checked_program import CheckedProgram
from .constants import constant_operations, merge_equal_constants
from .names import check_names_of_inputs
from .recorder import EmissionError, Layouts, record
from .sides import ProgramSides
from .source import source_of
from .statements import Statements

Layout = Mapping[str, Any] | PartitionSpec | Sequence[Placement]
_NUMBERS = count(1)


@dataclass(frozen=True, slots=True)
class EmittedProgram:
    """A forward as the text of a Python file.

    Attributes:
        source: the text. Its function `forward` takes the local tensors of the parameters and
            buffers by name, and the local tensors of the inputs.
        specs: the layouts of parameters, buffers and inputs, by name.

    Example:
        >>> program = EmittedProgram("forward = lambda x: 2 * x", {})
        >>> program.load()(3)
        6
    """

    source: str
    specs: Mapping[str, Spec]

    def __str__(self) -> str:
        return self.source

    def load(self) -> Callable[..., Any]:
        """Return the function `forward` of the text; its lines are in tracebacks."""
        name = f"<emitted program {next(_NUMBERS)}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[name] = (len(self.source), None, lines, name)
        scope: dict[str, Any] = {"__name__": name}
        exec(compile(self.source, name, "exec"), scope)
        forward: Callable[..., Any] = scope["forward"]
        return forward


def emit(
    module: nn.Module,
    plan: Mapping[str, Layout],
    mesh: DeviceMesh,
    /,
    *args: Any,
    input_types: Mapping[str, Layout] | None = None,
    **kwargs: Any,
) -> EmittedProgram:
    """Write the forward of a module as plain local operators and typed collectives.

    The forward runs on DTensors without memory, on an abstract mesh, as the first and as the last
    rank. Every operator that a rank calls on its shards becomes a line, and so does every
    collective. Each line has run under the checker in global mode. The program computes the values
    that DTensors compute, bit by bit. Lines that depend on sizes and numbers alone, such as those
    of a causal mask, are in a function `constants` that runs once; see `computed_once`.

    Args:
        module: the module; the values of its parameters and buffers are not read and not changed.
        plan: layouts by name, where names may have the wildcards of `fnmatch`. A name is that of a
            parameter or buffer, which is replicated by default, or the path of a module whose
            output gets the layout. A layout is a dict of types by axis, a `PartitionSpec`, or
            placements.
        mesh: the mesh, which may be abstract.
        args: arguments of the forward, with global tensors whose values are not read.
        input_types: layouts of tensor arguments by name; replicated by default.
        kwargs: keyword arguments of the forward.

    Returns:
        The program, for arguments of these shapes and dtypes.

    Raises:
        EmissionError: if the forward reads values of tensors, draws random numbers, or writes in
            place to its inputs or buffers; if a tensor does not have shards of equal sizes; or if
            there is no typed collective for a move.
        ArgumentValueError: if a name of the plan matches nothing.

    Example:
        >>> mesh = abstract_mesh((4,), ("tp",))
        >>> plan = {"weight": {"tp": S(0)}, "bias": {"tp": S(0)}}
        >>> program = emit(torch.nn.Linear(8, 4), plan, mesh, torch.zeros(2, 8))
        >>> print(program.source.splitlines()[-2].strip())
        linear = F.linear(input, weights["weight"], weights["bias"])  # f32[2, 1] tp: S(1)
    """
    inputs = _bind(module, args, kwargs)
    types = input_types or {}
    views = _first_and_last(mesh)
    programs = [_emit_on_rank(module, plan, view, inputs, input_types=types) for view in views]
    first = programs[0]
    for other in programs[1:]:
        _require_equal(first.source, other.source)
    return first


def _first_and_last(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the abstract meshes of the first and the last rank; one mesh if there is one rank."""
    ranks = {0, prod(mesh.shape) - 1}
    return [
        abstract_mesh(mesh.shape, mesh.axis_names, rank=rank, device_type=mesh.device_type)
        for rank in sorted(ranks)
    ]


def _require_equal(source: str, other: str) -> None:
    """Raise EmissionError unless the programs of the first and the last rank are equal."""
    for line, line_of_last in zip_longest(source.splitlines(), other.splitlines()):
        if line != line_of_last:
            raise EmissionError(
                "emit: ranks run different local operators, so one text does not do for all. The "
                f"first rank has\n{line}\nand the last rank\n{line_of_last}\nReplicate the tensors "
                "of this line in the plan"
            )


def _emit_on_rank(
    module: nn.Module,
    plan: Mapping[str, Layout],
    mesh: DeviceMesh,
    inputs: Mapping[str, Any],
    input_types: Mapping[str, Layout],
) -> EmittedProgram:
    """Return the program that the rank of an abstract mesh runs."""
    check_names_of_inputs(inputs)
    specs = _specs(module, plan, mesh, inputs, input_types=input_types)
    trace = record(module, inputs, specs, _layouts_of_outputs(module, plan, mesh))
    entries = trace.without_dead_entries()
    constants = constant_operations(entries, trace.results)
    entries = merge_equal_constants(entries, constants)
    sides = ProgramSides(entries, trace.results, mesh.ndim)
    statements = Statements(entries, sides, mesh.axis_names, constants=constants).found
    # The sort is stable: the others stay in order after the constants.
    statements.sort(key=lambda statement: not statement.is_constant)
    program = CheckedProgram(trace, statements, mesh)
    source = source_of(module, mesh, trace, program, inputs=inputs)
    return EmittedProgram(source, specs)


def _bind(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    signature = inspect.signature(module.forward)
    bound = signature.bind(*args, **kwargs).arguments
    inputs: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ArgumentTypeError("emit: pass the arguments of the forward by name")
        if kind is inspect.Parameter.VAR_KEYWORD:
            inputs |= value
        else:
            inputs[name] = value
    return inputs


def _specs(
    module: nn.Module,
    plan: Mapping[str, Layout],
    mesh: DeviceMesh,
    inputs: Mapping[str, Any],
    input_types: Mapping[str, Layout],
) -> dict[str, Spec]:
    """Return the layouts of parameters, buffers and inputs by name."""
    paths = {path for path, _ in module.named_modules()}
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    names = (*paths, *weights)
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentValueError(
                f"emit: the plan names {pattern!r}, which matches no parameter, buffer or module"
            )
    for name in input_types:
        if name not in tensors:
            raise ArgumentValueError(
                f"emit: input_types names {name!r}, which is not a tensor argument"
            )
    specs = {}
    for name, tensor in weights.items():
        specs[name] = _spec(tensor, _layout_of(name, plan), mesh)
    for name, tensor in tensors.items():
        specs[name] = _spec(tensor, input_types.get(name), mesh)
    return specs


def _layout_of(name: str, plan: Mapping[str, Layout]) -> Layout | None:
    """Return the layout of the first pattern of a plan that matches a name, or None."""
    for pattern, layout in plan.items():
        if fnmatchcase(name, pattern):
            return layout
    return None


def _spec(tensor: Tensor, layout: Layout | None, mesh: DeviceMesh) -> Spec:
    """Return the spec of a tensor with a layout; None is replicated."""
    order = None
    placements: Sequence[Placement] = [Replicate()] * mesh.ndim
    if isinstance(layout, PartitionSpec):
        placements, order = layout.resolve(mesh)
    elif isinstance(layout, Mapping):
        placements = [_placement(layout.get(name, spmd.I), tensor) for name in mesh.axis_names]
    elif layout is not None:
        placements = [*layout]
    return Spec(
        mesh,
        placements,
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        shard_order=order,
    )


def _placement(axis_type: Any, tensor: Tensor) -> Placement:
    """Return the placement of a type along one axis."""
    if isinstance(axis_type, spmd.Shard):
        axis_type = axis_type.resolve(tensor.ndim)
    found = spmd.placement_of(axis_type)
    if found is None:
        raise ArgumentValueError("emit: a layout is R, I, S(dim) or P on each axis, not V")
    return found


def _layouts_of_outputs(module: nn.Module, plan: Mapping[str, Layout], mesh: DeviceMesh) -> Layouts:
    """Return functions that give outputs the layouts in the plan, by the path of the module."""
    layouts = {}
    for path, _ in module.named_modules():
        layout = _layout_of(path, plan)
        if layout is not None:
            layouts[path] = partial(_output_spec, layout=layout, mesh=mesh)
    return layouts


def _output_spec(tensor: DTensor, layout: Layout, mesh: DeviceMesh) -> Spec:
    return _spec(tensor, layout, mesh)
