"""The text of the emitted file: tables of parameters and inputs, assertions, and the lines.

May import: checked_program, trace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal_mesh import DeviceMesh

from .checked_program import CheckedProgram, ProgramLine, types_of, types_text
from .trace import Trace, TracedValue

_IMPORTED = (
    "I",
    "P",
    "R",
    "S",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assert_type",
    "computed_once",
    "convert",
    "normalize_axis",
    "pending",
    "reduce_scatter",
)


def source_of(
    module: nn.Module,
    mesh: DeviceMesh,
    trace: Trace,
    program: CheckedProgram,
    inputs: Mapping[str, Any],
) -> str:
    """Return the text of the file.

    Args:
        module: the module.
        mesh: the mesh.
        trace: the recorded forward.
        program: the lines of the program.
        inputs: the arguments of the forward by name.
    """
    tables = [
        "# sizes of the axes of the mesh",
        f"MESH = {_sizes(mesh)}",
        "# local shape, dtype, types, and whether it takes a gradient",
        *_table("WEIGHTS", trace.parameters, mesh),
        *_table("INPUTS", trace.inputs, mesh),
    ]
    forward = [
        _signature(trace, inputs),
        *_checks(mesh, inputs),
        *_call_of_constants(program),
        *_body(module, program, constants=False),
        f"    return {_result_text(trace.results, program)}",
    ]
    text = "\n".join([*tables, "", "", *_constants(module, program), *forward])
    head = "\n".join(_head(module, mesh, text))
    return f"{head}\n\n{text}\n"


def _sizes(mesh: DeviceMesh) -> str:
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    return "{" + ", ".join([f'"{name}": {size}' for name, size in sizes]) + "}"


def _head(module: nn.Module, mesh: DeviceMesh, text: str) -> list[str]:
    """Return the lines of the docstring, and of the imports of the names in the text."""
    mode = "training" if module.training else "evaluation"
    names = [name for name in _IMPORTED if re.search(rf"\b{name}\b", text)]
    kind = type(module).__name__
    lines = [
        f'"""The forward of {kind} on a rank of the mesh {_sizes(mesh)}, in {mode} mode.',
        "",
        (
            "Written by `shoal_spmd_types.emit`. "
            "Every line has the dtype, the local shape and the types"
        ),
        "of its result. `forward` takes the local tensors of parameters and buffers, by name.",
        '"""',
        "",
        "from collections.abc import Mapping",
        "",
        "import torch",
        "from torch import Tensor",
    ]
    if "F." in text:
        lines.append("from torch.nn import functional as F")
    return [*lines, "", f"from shoal_spmd_types import {', '.join(names)}"]


def _table(name: str, values: Mapping[str, TracedValue], mesh: DeviceMesh) -> list[str]:
    """Return the lines of a dict: name -> shape, dtype, types, and whether there is a gradient."""
    lines = [f"{name} = {{"]
    for key, value in values.items():
        types = types_text(types_of(value, mesh))
        entry = f"{value.shape}, {value.dtype}, {types}, {value.takes_gradient}"
        lines.append(f'    "{key}": ({entry}),')
    return [*lines, "}"]


def _signature(trace: Trace, inputs: Mapping[str, Any]) -> str:
    """Return the line `def forward(...)`.

    The default of an argument that is not a tensor is its value in the recorded forward.
    """
    arguments = ["weights: Mapping[str, Tensor]"]
    arguments += [f"{name}: Tensor" for name in trace.inputs]
    others = [name for name in inputs if name not in trace.inputs]
    if others:
        arguments.append("*")
    arguments += [f"{name}: object = {inputs[name]!r}" for name in others]
    return f"def forward({', '.join(arguments)}) -> {_annotation(trace.results)}:"


def _annotation(result: Any) -> str:
    if isinstance(result, TracedValue):
        return "Tensor"
    return "dict[str, object]" if isinstance(result, dict) else "object"


def _checks(mesh: DeviceMesh, inputs: Mapping[str, Any]) -> list[str]:
    """Return the lines that assert the mesh, the arguments and the settings of the program."""
    tensors = [f'"{name}": {name}' for name, value in inputs.items() if isinstance(value, Tensor)]
    checked = ", ".join(["**weights", *tensors])
    # In an f-string, two braces stand for one brace of the emitted line: given = {**weights, ...}
    lines = [
        "    for axis, size in MESH.items():",
        '        assert normalize_axis(axis).size() == size, f"made for {axis}={size}"',
        f"    given = {{{checked}}}",
        "    for name, (shape, dtype, types, grad) in (*WEIGHTS.items(), *INPUTS.items()):",
        "        tensor = assert_type(given[name], types)",
        '        assert tensor.shape == shape, f"{name}: made for {shape}, got {tensor.shape}"',
        '        assert tensor.dtype == dtype, f"{name}: made for {dtype}, got {tensor.dtype}"',
        (
            "        assert grad or not tensor.requires_grad, "
            'f"{name}: made for one without a gradient"'
        ),
    ]
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            lines.append(f'    assert {name} == {value!r}, "made for {name}={value!r}"')
    default = torch.get_default_dtype()
    device = mesh.device_type
    return [
        *lines,
        f'    assert torch.get_default_dtype() == {default}, "made for {default} as default"',
        f'    assert not torch.is_autocast_enabled("{device}"), "made without autocast"',
    ]


def _constants(module: nn.Module, program: CheckedProgram) -> list[str]:
    """Return the function that computes the constants; nothing if there are none."""
    if not program.constants:
        return []
    annotation = "Tensor" if len(program.constants) == 1 else "tuple[Tensor, ...]"
    return [
        "@computed_once",
        f"def {program.names.constants}() -> {annotation}:",
        '    """Compute what depends on sizes and numbers alone."""',
        *_body(module, program, constants=True),
        f"    return {', '.join(program.constants)}",
        "",
        "",
    ]


def _call_of_constants(program: CheckedProgram) -> list[str]:
    if not program.constants:
        return []
    return ["", f"    {', '.join(program.constants)} = {program.names.constants}()"]


def _body(module: nn.Module, program: CheckedProgram, *, constants: bool) -> list[str]:
    """Return the constant lines or the others.

    They are under headings with the paths of modules that contain other modules.
    """
    parents = {path for path, submodule in module.named_modules() if [*submodule.children()]}
    lines: list[str] = []
    heading = ""
    for line in program.lines:
        if line.is_constant is not constants:
            continue
        # The lines of a module without inner modules are under the heading of its parent.
        path = line.path if line.path in parents else line.path.rpartition(".")[0]
        if path != heading:
            lines += ["", f"    # {path or type(module).__name__}"]
        heading = path
        lines.append(_line_text(line))
    return lines


def _line_text(line: ProgramLine) -> str:
    return f"    {line.text}  # {line.comment}" if line.comment else f"    {line.text}"


def _result_text(result: Any, program: CheckedProgram) -> str:
    if isinstance(result, TracedValue):
        return program.names.of(result)
    if isinstance(result, dict):
        items = [f'"{name}": {_result_text(item, program)}' for name, item in result.items()]
        return "{" + ", ".join(items) + "}"
    if isinstance(result, tuple):
        items = [_result_text(item, program) for item in result]
        comma = "," if len(items) == 1 else ""
        return f"({', '.join(items)}{comma})"
    return repr(result)
