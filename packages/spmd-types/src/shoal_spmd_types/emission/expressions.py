"""Python text of operators and moves, the most readable form first.

The emission (`emit`) writes the forward of a module as a Python program. An operator call may have
several texts, and a text may compute something else than the call. `checked_program` runs the texts
in this order, and takes the first one that makes the call.

A move is a step of a redistribution from one layout to another (`Step`). In its text, R, I, P and
S(dim) are types of a tensor along a mesh axis. R and I are replicated tensors: the gradients of R
are addends of a pending sum, and those of I (invariant) are equal on all ranks. P is addends of a
pending sum. S(dim) is shards along a dim.

May import: recorder, trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from shoal_dtensor.internal import Step, overload_name, signature_of

from .recorder import EmissionError
from .trace import TracedOperation, TracedValue

# Function from a value to the name of its variable in the emitted program.
NameOf = Callable[[TracedValue], str]

_INFIX = {
    "aten::add": "+",
    "aten::sub": "-",
    "aten::mul": "*",
    "aten::div": "/",
    "aten::eq": "==",
    "aten::ne": "!=",
    "aten::lt": "<",
    "aten::le": "<=",
    "aten::gt": ">",
    "aten::ge": ">=",
    "aten::bitwise_and": "&",
    "aten::bitwise_or": "|",
    "aten::pow": "**",
}
_PREFIX = {"aten::neg": "-", "aten::bitwise_not": "~"}
_VIEWS = frozenset({"aten::reshape", "aten::_unsafe_view", "aten::_reshape_alias"})
# the `end` argument of a slice without an end
_END = str(2**63 - 1)
_ATTENTION = "aten::_scaled_dot_product"


def literal(value: Any, name_of: NameOf) -> str:
    """Return the text of an argument."""
    if isinstance(value, TracedValue):
        return name_of(value)
    if isinstance(value, list):
        items = [literal(item, name_of) for item in value]
        return f"[{', '.join(items)}]"
    if isinstance(value, tuple):
        items = [literal(item, name_of) for item in value]
        comma = "," if len(items) == 1 else ""
        return f"({', '.join(items)}{comma})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        # The index is a rank's own; without it, torch takes the rank's current device.
        return f'"{value.type}"'
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, torch.layout | torch.memory_format):
        return str(value)
    raise EmissionError(f"emit: an argument {value!r} of an operator has no text")


def operator_texts(operation: TracedOperation, name_of: NameOf) -> list[str]:
    """Return texts of an operator call, the most readable first.

    They are a sign such as `+`, special forms, a method, functions of torch, and at last the
    operator itself. Only the last text is certain to make the call: a function of the same name may
    have other arguments or defaults. The caller tries the texts.
    """
    schema = signature_of(operation.operator)
    name = schema.name.removeprefix("aten::")
    args = [literal(arg, name_of) for arg in operation.args]
    named = _named_arguments(operation.kwargs, name_of)
    texts = _sign_texts(schema.name, args) if not named else []
    texts += _special_texts(operation, args, named, name_of)
    if schema.name in _VIEWS:
        texts += _method_texts("view", operation, args, named)
        texts += _method_texts("reshape", operation, args, named)
    texts += _method_texts(name, operation, args, named)
    in_short = ", ".join([*args, *_without_defaults(named)])
    if hasattr(functional, name):
        texts.append(f"F.{name}({in_short})")
    if hasattr(torch, name):
        texts.append(f"torch.{name}({in_short})")
    in_full = ", ".join([*args, *named])
    texts.append(f"torch.ops.{_path(operation.operator)}({in_full})")
    return texts


def _sign_texts(name: str, args: Sequence[str]) -> list[str]:
    """Return a sign with its operands, such as `x + y`; [] for operators without a sign."""
    # Operands are names, numbers or lists. A negative number is the only one that needs parentheses
    # next to a sign: (-2) ** x.
    operands = [f"({text})" if text.startswith("-") else text for text in args]
    if name in _INFIX and len(args) == 2:
        return [f"{operands[0]} {_INFIX[name]} {operands[1]}"]
    if name in _PREFIX and len(args) == 1:
        return [f"{_PREFIX[name]}{operands[0]}"]
    return []


def _special_texts(
    operation: TracedOperation, args: Sequence[str], named: Sequence[str], name_of: NameOf
) -> list[str]:
    """Return the text of an operator whose function has another name or other arguments; or []."""
    name = signature_of(operation.operator).name
    if name.startswith(_ATTENTION):
        return [_attention_text(operation, name_of)]
    match name:
        case "aten::slice":
            return [_slice_text(operation.args, args)]
        case "aten::index":
            # The second argument is a list of index tensors. Its text `[rows, columns]` has the
            # brackets of the index: `x[rows, columns]`.
            return [f"{args[0]}{args[1]}"]
        case "aten::native_layer_norm":
            # The operator returns the output, the mean and the inverse deviation. The function
            # calls the operator and returns the output only.
            return [f"F.layer_norm({', '.join(args)})"]
        case "aten::_to_copy":
            # All arguments after the tensor have names.
            others = ", ".join(_without_defaults(named))
            return [f"{args[0]}.to({others})"]
    return []


def _path(operator: Any) -> str:
    """Return the path of an operator below `torch.ops`, such as `aten.add.Tensor`."""
    namespace, _, name = signature_of(operator).name.partition("::")
    return f"{namespace}.{name}.{overload_name(operator)}"


def _named_arguments(kwargs: Mapping[str, Any], name_of: NameOf) -> list[str]:
    return [f"{name}={literal(value, name_of)}" for name, value in kwargs.items()]


def _without_defaults(named: Sequence[str]) -> list[str]:
    """Leave out arguments that are None or False: for torch's functions these are the defaults."""
    return [text for text in named if not text.endswith(("=None", "=False"))]


def _method_texts(
    name: str, operation: TracedOperation, args: Sequence[str], named: Sequence[str]
) -> list[str]:
    """Return a call of the first argument's method; [] if it is not a tensor with the method."""
    parameters = signature_of(operation.operator).arguments
    is_self = bool(parameters) and parameters[0].name == "self"
    is_tensor = bool(operation.args) and isinstance(operation.args[0], TracedValue)
    has_method = is_self and is_tensor and hasattr(torch.Tensor, name)
    if not has_method:
        return []
    rest = [*args[1:]]
    is_list = len(rest) == 1 and isinstance(operation.args[1], list)
    if is_list and not named:
        # `x.view(2, 3)` for `x.view([2, 3])`
        rest = [rest[0][1:-1]]
    arguments = ", ".join([*rest, *_without_defaults(named)])
    return [f"{args[0]}.{name}({arguments})"]


def _slice_text(values: Sequence[Any], args: Sequence[str]) -> str:
    """Return a slice as an index: `x[:, :, 4:8]`."""
    dim = values[1] if len(values) > 1 else 0
    # the operator takes the tensor, the dim, start, end and step
    start = _slice_bound(args, 2, default="0")
    end = _slice_bound(args, 3, default=_END)
    step = _slice_bound(args, 4, default="1")
    step_suffix = "" if step == "1" else f":{step}"
    bounds = f"{_unless(start, '0')}:{_unless(end, _END)}{step_suffix}"
    if dim < 0:
        # dim -1: x[..., 4:8], dim -2: x[..., 4:8, :]
        dims_after = -dim - 1
        after = ", :" * dims_after
        return f"{args[0]}[..., {bounds}{after}]"
    # dim 2: x[:, :, 4:8]
    before = ":, " * dim
    return f"{args[0]}[{before}{bounds}]"


def _slice_bound(args: Sequence[str], position: int, *, default: str) -> str:
    """Return a bound of a slice; the default for a bound that is left out or None."""
    is_missing = position >= len(args) or args[position] == "None"
    return default if is_missing else args[position]


def _unless(text: str, default: str) -> str:
    """Return a text, or '' if it is the default."""
    return "" if text == default else text


def _attention_text(operation: TracedOperation, name_of: NameOf) -> str:
    """Return attention as a call of the function that chooses the kernel."""
    arguments = [argument.name for argument in signature_of(operation.operator).arguments]
    values = dict(zip(arguments, operation.args, strict=False))
    values |= operation.kwargs
    text = ", ".join([literal(values[name], name_of) for name in ("query", "key", "value")])
    mask = values.get("attn_mask", values.get("attn_bias"))
    if mask is not None:
        text += f", attn_mask={literal(mask, name_of)}"
    if values.get("is_causal"):
        text += ", is_causal=True"
    if values.get("scale") is not None:
        text += f", scale={literal(values['scale'], name_of)}"
    return f"F.scaled_dot_product_attention({text})"


# --- moves ----------------------------------------------------------------------------------------


def move_text(step: Step, source: str, target_is_r: bool, source_is_r: bool) -> str:
    """Return a step of a redistribution as the text of a typed collective or a conversion.

    Args:
        step: the step.
        source: the text of the tensor.
        target_is_r: True if a replicated result is R, False if it is I.
        source_is_r: True if a replicated source is R, False if it is I.

    Raises:
        EmissionError: if no typed function does the step.
    """
    # In an even layout all shards of a dim have one size.
    has_even_shards = step.src.even and step.dst.even
    if len(step.axes) != 1 or not has_even_shards:
        raise _no_typed_function(step)
    axis = step.axes[0]
    name = step.src.mesh.axis_names[axis]
    whole = "R" if target_is_r else "I"
    whole_source = "R" if source_is_r else "I"
    # `step.dims` are the tensor dims whose sharding along the axis changes: the dim of a shard, and
    # for AllToAll the dims of the shard before and after. A reduction may also divide its result by
    # `step.divisor`, or average; typed collectives do neither.
    if step.name == "AllReduce" and step.divisor == 1 and step.op != "avg":
        src = "P" if step.op == "sum" else f'pending("{step.op}")'
        return f'all_reduce({source}, "{name}", src={src}, dst={whole})'
    if step.name == "AllGather":
        return f'all_gather({source}, "{name}", src=S({step.dims[0]}), dst={whole})'
    if step.name == "ReduceScatter" and step.divisor == 1 and step.op == "sum":
        return f'reduce_scatter({source}, "{name}", src=P, dst=S({step.dims[0]}))'
    if step.name == "AllToAll":
        dim_before, dim_after = step.dims
        return f'all_to_all({source}, "{name}", src=S({dim_before}), dst=S({dim_after}))'
    if step.name == "Slice":
        return f'convert({source}, "{name}", src={whole_source}, dst=S({step.dims[0]}))'
    if step.name == "MakePartial" and _makes_sum_of_whole(step, axis):
        # `convert` asks for a confirmation of I -> P.
        confirmation = "" if source_is_r else ", expert_mode=True"
        return f'convert({source}, "{name}", src={whole_source}, dst=P{confirmation})'
    raise _no_typed_function(step)


def _makes_sum_of_whole(step: Step, axis: int) -> bool:
    """Return whether a step makes a pending sum of a tensor that is replicated along the axis."""
    changes_shards = bool(step.dims)
    is_whole = step.src.placements[axis].is_replicate()
    return not changes_shards and is_whole and (axis, "sum") in step.dst.partials


def _no_typed_function(step: Step) -> EmissionError:
    return EmissionError(
        f"emit: no typed collective does the step {step.line()} from {step.src!r} to {step.dst!r}: "
        "typed collectives work along one axis, on shards of equal sizes, and reduce sums "
        "(all_reduce also max, min and product). Give the output of an earlier module another "
        "placement in the plan, so that this step is not needed"
    )
