"""Operations on types, for the `spmd_typecheck` declarations of autograd functions.

Each operation takes typed tensors, or `NdimWithSpmdType` in their place, and returns an
`NdimWithSpmdType`: no values are computed.

May import: nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shoal_dtensor.errors import ArgumentTypeError, ArgumentValueError, SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd

__all__ = [
    "NdimWithSpmdType",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "convert",
    "einsum",
    "ignore",
    "output",
    "reduce_scatter",
    "reinterpret",
]


class NdimWithSpmdType:
    """A stand-in for a tensor that has a number of dims and a type only.

    Args:
        ndim: the number of dims.

    Example:
        >>> NdimWithSpmdType(2).ndim
        2
    """

    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def __repr__(self) -> str:
        return f"NdimWithSpmdType({self.ndim}, {spmd.type_of(self)})"


Operand = torch.Tensor | NdimWithSpmdType


class _Declaration:
    """A running declaration, and the tensors that it has accounted for in `seen`."""

    # the declaration that runs now
    running: _Declaration | None = None

    def __init__(self) -> None:
        self.seen: list[Any] = []


def touch(*operands: Any) -> None:
    """Record that the running declaration accounts for some operands.

    Args:
        operands: tensors.
    """
    if _Declaration.running is not None:
        _Declaration.running.seen += operands


def ignore(*tensors: Any) -> None:
    """Declare tensors that do not influence the result, such as ones kept for the backward.

    Args:
        tensors: arguments of the function.

    Example:
        >>> ignore(torch.zeros(2))
    """
    touch(*tensors)


def _give_type(ndim: int, tensor_type: spmd.TensorType, out: torch.Tensor | None) -> Any:
    """Give a type to `out`, or else to a new stand-in, and return it."""
    if out is not None:
        if out.ndim != ndim:
            raise SpmdTypeError(f"out has {out.ndim} dims, but its type is for {ndim}")
        spmd.set_type(out, tensor_type)
        return out
    result = NdimWithSpmdType(ndim)
    spmd.set_type(result, tensor_type)
    return result


def _move(
    call: str,
    x: Operand,
    axis: Any,
    types: tuple[Any, Any],
    *,
    out: torch.Tensor | None,
    change: int = 0,
) -> Any:
    """Return the type of a move along an axis; `change` is added to the number of dims."""
    touch(x)
    src, dst = types
    mesh_axis = spmd.normalize_axis(axis)
    spmd.check_source(x, mesh_axis, src, f"rules.{call}")
    ndim = x.ndim + change
    return _give_type(ndim, spmd.moved_type(x, mesh_axis, dst, ndim), out)


def all_reduce(
    x: Operand, axis: Any, *, src: Any = P, dst: Any, out: torch.Tensor | None = None
) -> Any:
    """Return the type of `all_reduce(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: P or V.
        dst: R or I.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: for other types.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     rules.all_reduce(assert_type(torch.zeros(4), {"tp": P}), "tp", dst=I)
        NdimWithSpmdType(1, {tp: I})
    """
    if src not in (P, V) or dst not in (R, I):
        raise ArgumentValueError(
            f"rules.all_reduce: the types must be P or V to R or I, got {src} -> {dst}"
        )
    return _move("all_reduce", x, axis, (src, dst), out=out)


def all_gather(
    x: Operand, axis: Any, *, src: Any = V, dst: Any, out: torch.Tensor | None = None
) -> Any:
    """Return the type of `all_gather(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: S(i), or V; with V the result has one dim more.
        dst: R or I.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: for other types.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     rules.all_gather(assert_type(torch.zeros(4), {"tp": V}), "tp", dst=R)
        NdimWithSpmdType(2, {tp: R})
    """
    if not _is_varying(src) or dst not in (R, I):
        raise ArgumentValueError(
            f"rules.all_gather: the types must be V or S(i) to R or I, got {src} -> {dst}"
        )
    is_stacked = src is V
    return _move("all_gather", x, axis, (src, dst), out=out, change=int(is_stacked))


def reduce_scatter(
    x: Operand, axis: Any, *, src: Any = P, dst: Any = V, out: torch.Tensor | None = None
) -> Any:
    """Return the type of `reduce_scatter(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: P or V.
        dst: S(i), or V; with V the result has one dim less.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: for other types.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     rules.reduce_scatter(assert_type(torch.zeros(4), {"tp": P}), "tp", dst=S(0))
        NdimWithSpmdType(1, {tp: V})
    """
    if src not in (P, V) or not _is_varying(dst):
        raise ArgumentValueError(
            f"rules.reduce_scatter: the types must be P or V to V or S(i), got {src} -> {dst}"
        )
    loses_dim = dst is V
    return _move("reduce_scatter", x, axis, (src, dst), out=out, change=-int(loses_dim))


def all_to_all(
    x: Operand, axis: Any, *, src: Any = V, dst: Any = V, out: torch.Tensor | None = None
) -> Any:
    """Return the type of `all_to_all(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: S(i) or V.
        dst: S(j) or V.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: for other types.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck(local=False):
        ...     x = assert_type(torch.zeros(4, 2), {"tp": S(0)})
        ...     rules.all_to_all(x, "tp", src=S(0), dst=S(1))
        NdimWithSpmdType(2, {tp: S(1)})
    """
    if not _is_varying(src) or not _is_varying(dst):
        raise ArgumentValueError(
            f"rules.all_to_all: the types must be V or S(i) to V or S(j), got {src} -> {dst}"
        )
    return _move("all_to_all", x, axis, (src, dst), out=out)


def convert(x: Operand, axis: Any, *, src: Any, dst: Any, out: torch.Tensor | None = None) -> Any:
    """Return the type of `convert(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: R, I, V, P or S(i).
        dst: R, I, V, P or S(i).
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: if the change needs communication.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     rules.convert(assert_type(torch.zeros(4), {"tp": I}), "tp", src=I, dst=R)
        NdimWithSpmdType(1, {tp: R})
    """
    sends = src is P or (_is_varying(src) and dst is not P)
    if sends and src is not dst:
        raise ArgumentValueError(
            f"rules.convert: {src} -> {dst} needs communication; use a collective"
        )
    change = 0
    if src is V and dst is P:
        change = 1
    elif dst is V and src in (R, I):
        change = -1
    return _move("convert", x, axis, (src, dst), out=out, change=change)


def reinterpret(
    x: Operand, axis: Any, *, src: Any, dst: Any, out: torch.Tensor | None = None
) -> Any:
    """Return the type of `reinterpret(x, axis, src=, dst=)`.

    Args:
        x: a typed operand.
        axis: the mesh axis.
        src: R, I, V or P.
        dst: R, I, V or P.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if `x` is not of type `src`.
        ArgumentValueError: for S(i), or if `dst` claims more about the values than `src` does.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     rules.reinterpret(assert_type(torch.zeros(4), {"tp": V}), "tp", src=V, dst=P)
        NdimWithSpmdType(1, {tp: P})
    """
    if src is P:
        claims_more = dst is not P
    else:
        claims_more = src is V and dst not in (V, P)
    has_shards = isinstance(src, Shard) or isinstance(dst, Shard)
    if has_shards or claims_more:
        raise ArgumentValueError(f"rules.reinterpret: {src} -> {dst} does not keep the bytes")
    return _move("reinterpret", x, axis, (src, dst), out=out)


def _is_varying(axis_type: Any) -> bool:
    return axis_type is V or isinstance(axis_type, Shard)


# --- einsum ---------------------------------------------------------------------------------------


def einsum(
    equation: str,
    *operands: Operand,
    linear_in: Sequence[int | Sequence[int]] = (),
    out: torch.Tensor | None = None,
) -> Any:
    """Return the type of a computation whose dims behave as in an einsum.

    If the result has a sharded label, its dim is sharded too. If it does not have the label, the
    result is P. Operands without the label must be R along the axis.

    Args:
        equation: labels of the operands and of the result, such as `"mk,nk->mn"`. `_` is a dim that
            must not be sharded, `...` stands for the leading dims of all operands.
        operands: typed operands.
        linear_in: operands in which the computation is linear, so that they may be P. An index is
            an operand that may be P while the others are R; a sequence of indices are operands that
            may be P together.
        out: a tensor that gets the type.

    Returns:
        A `NdimWithSpmdType`, or `out`.

    Raises:
        SpmdTypeError: if the types do not fit the equation.
        ArgumentValueError: if the equation does not fit the operands.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck(local=False):
        ...     x = assert_type(torch.zeros(4, 2), {"tp": S(1)})
        ...     w = assert_type(torch.zeros(3, 2), {"tp": S(1)})
        ...     rules.einsum("mk,nk->mn", x, w)
        NdimWithSpmdType(2, {tp: P})
    """
    touch(*operands)
    labels = _read_equation(equation, operands)
    types = [_required_type(operand) for operand in operands]
    axes = dict.fromkeys(axis for tensor_type in types for axis in tensor_type.by_axis)
    groups = [(item,) if isinstance(item, int) else tuple(item) for item in linear_in]
    is_local = spmd.varying_axes()
    by_axis: dict[spmd.MeshAxis, Any] = {}
    for axis in axes:
        kinds = [_type_along(tensor_type, axis, equation) for tensor_type in types]
        if is_local(axis):
            kinds = [spmd.local_type(axis_type) for axis_type in kinds]
        by_axis[axis] = _TypesOnAxis(equation, axis, kinds).result(labels, groups)
    # the order of axes, which only matters for dims that several axes shard
    order = []
    for dim, label in enumerate(labels.result):
        axes_of_dim = _axes_of_label(label, types, labels.inputs)
        if len(axes_of_dim) > 1 and _shards(by_axis, dim, axes_of_dim):
            order.append((dim, axes_of_dim))
    result_type = spmd.TensorType(by_axis, tuple(order))
    return _give_type(len(labels.result), result_type, out)


class _Labels(NamedTuple):
    """The labels of an equation, one for each dim.

    Attributes:
        inputs: labels of every operand.
        result: labels of the result.
    """

    inputs: Sequence[str]
    result: str


def _shards(by_axis: Mapping[Any, Any], dim: int, axes: Iterable[Any]) -> bool:
    return all(by_axis[axis] is Shard(dim) for axis in axes)


def _axes_of_label(
    label: str, types: Sequence[spmd.TensorType], inputs: Sequence[str]
) -> tuple[spmd.MeshAxis, ...]:
    """Return the axes that shard a label, outermost first."""
    for tensor_type, labels in zip(types, inputs, strict=True):
        position = labels.find(label)
        if position >= 0 and position in tensor_type.dims:
            return tensor_type.dims[position]
    return ()


def _required_type(operand: Operand) -> spmd.TensorType:
    """Return the type of an operand; raise SpmdTypeError if it has none."""
    found = spmd.type_of(operand)
    if found is None:
        raise SpmdTypeError(
            f"{spmd.user_line()}: rules.einsum: an operand does not have a type; assert one first"
        )
    return found


def _type_along(tensor_type: spmd.TensorType, axis: spmd.MeshAxis, equation: str) -> Any:
    """Return the type along one axis; raise SpmdTypeError if there is none."""
    if axis not in tensor_type.by_axis:
        raise SpmdTypeError(
            f"rules.einsum {equation!r}: an operand does not have a type over {axis!r}"
        )
    return tensor_type.by_axis[axis]


class _TypesOnAxis(NamedTuple):
    """The types of the operands of an equation on one axis.

    Attributes:
        equation: the equation.
        axis: the axis.
        kinds: the type of each operand.
    """

    equation: str
    axis: spmd.MeshAxis
    kinds: Sequence[Any]

    def refusal(self, reason: str) -> SpmdTypeError:
        """Return the error for types that cannot be combined."""
        return SpmdTypeError(
            f"{spmd.user_line()}: rules.einsum {self.equation!r} over {self.axis!r}: {reason}; the "
            f"operands are {list(self.kinds)}"
        )

    def result(self, labels: _Labels, groups: Sequence[Sequence[int]]) -> Any:
        """Return the type of the result; `groups` are the operands in which it is linear."""
        if any(isinstance(axis_type, Shard) for axis_type in self.kinds):
            label = self._sharded_label(labels.inputs)
            return Shard(labels.result.index(label)) if label in labels.result else P
        if any(axis_type is P for axis_type in self.kinds):
            self._check_linear(groups)
            return P
        found = {*self.kinds}
        if found == {R, V}:
            return V
        if len(found) != 1:
            raise self.refusal("these types cannot be combined")
        return found.pop()

    def _sharded_label(self, inputs: Sequence[str]) -> str:
        """Return the label that the axis shards, in all operands that have the label."""
        sharded_labels = set()
        for labels_of_operand, axis_type in zip(inputs, self.kinds, strict=True):
            if isinstance(axis_type, Shard):
                sharded_labels.add(labels_of_operand[axis_type.dim])
        if len(sharded_labels) > 1:
            raise self.refusal(f"the axis shards the labels {sorted(sharded_labels)}")
        label = sharded_labels.pop()
        if label == "_":
            raise self.refusal("a dim that must be whole is sharded")
        for position, axis_type in enumerate(self.kinds):
            if isinstance(axis_type, Shard):
                continue
            if label in inputs[position] or axis_type is not R:
                raise self.refusal(
                    f"operand {position} must be sharded with {label!r}, or R without it"
                )
        return label

    def _check_linear(self, groups: Sequence[Sequence[int]]) -> None:
        """Refuse operands with P, unless the result is linear in them and the others are R."""
        partial = [position for position, axis_type in enumerate(self.kinds) if axis_type is P]
        # the first group that contains all partial operands has to consist of them
        containing = [group for group in groups if {*partial} <= {*group}]
        is_linear = bool(containing) and {*containing[0]} == {*partial}
        others_are_replicated = all(
            axis_type is R for axis_type in self.kinds if axis_type is not P
        )
        if not is_linear or not others_are_replicated:
            raise self.refusal(
                f"P in the operands {partial} does not pass through; reduce it first"
            )


def _read_equation(equation: str, operands: Sequence[Operand]) -> _Labels:
    """Return the labels of the operands and of the result, with `...` written out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or len(inputs) != len(operands):
        raise ArgumentValueError(
            f"rules.einsum: {equation!r} must name {len(operands)} operands and a result"
        )
    # Greek capitals, from U+0391 on, are the labels of the dims of `...`
    greek = map(chr, range(0x391, 0x391 + 26))
    spare = "".join(filter(str.isalpha, greek))
    leading = ""
    written: list[str] = []
    for labels, operand in zip(inputs, operands, strict=True):
        if "..." in labels:
            count = operand.ndim - len(labels) + len("...")
            dims = spare[:count]
            if len(leading) < count:
                leading = dims
            labels = labels.replace("...", dims)
        if len(labels) != operand.ndim:
            raise ArgumentValueError(
                f"rules.einsum: {labels!r} in {equation!r} is for {len(labels)} dims, but the "
                f"operand has {operand.ndim}"
            )
        written.append(labels)
    return _Labels(written, right.replace("...", leading))


# --- declarations ---------------------------------------------------------------------------------


def output(out: Any, typed: Any) -> None:
    """Give the outputs of a function the types of operands that have the same structure.

    Args:
        out: a tensor, or a list or tuple of tensors; None for an output that is left out.
        typed: a typed operand for each output.

    Raises:
        SpmdTypeError: if the structures, or numbers of dims, differ.

    Example:
        >>> with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
        ...     x = assert_type(torch.zeros(4), {"tp": P})
        ...     y = torch.zeros(4)
        ...     rules.output(y, rules.all_reduce(x, "tp", dst=R))
        ...     get_local_type(y)
        {tp: R}
    """
    if out is None:
        return
    if isinstance(out, list | tuple):
        if not isinstance(typed, list | tuple) or len(typed) != len(out):
            raise SpmdTypeError(f"rules.output: got {len(out)} outputs, but types for {typed!r}")
        for tensor, its_type in zip(out, typed, strict=True):
            output(tensor, its_type)
        return
    found = spmd.type_of(typed)
    if found is None:
        raise SpmdTypeError("rules.output: the operand does not have a type; assert one first")
    _give_type(typed.ndim, found, out)


def run_declaration(function: type, outputs: Any, args: tuple[Any, ...]) -> None:
    """Give the outputs of an autograd function the types that its `spmd_typecheck` declares.

    Args:
        function: the class.
        outputs: the result of `apply`.
        args: the arguments of `apply`.

    Raises:
        SpmdTypeError: if the declaration leaves out a tensor argument, or an output.
    """
    named = _bound_arguments(function, args)
    declaration, keywords = _call_of(function, named)
    takes_outputs = _takes_outputs(declaration)
    before = _Declaration.running
    running = _Declaration()
    _Declaration.running = running
    try:
        if takes_outputs:
            declaration(outputs, **keywords)
            running.seen += keywords.values()
        else:
            typed = declaration(**keywords)
            output(outputs, typed)
    finally:
        _Declaration.running = before
    _check_coverage(function, named, running.seen, outputs)


def check_arguments(function: type, args: tuple[Any, ...]) -> None:
    """Run a declaration that returns types, without the function.

    A declaration that takes the outputs is not run.

    Args:
        function: the class.
        args: the arguments of `apply`.

    Raises:
        SpmdTypeError: if the declaration refuses the types of the arguments.
    """
    declaration, keywords = _call_of(function, _bound_arguments(function, args))
    if not _takes_outputs(declaration):
        declaration(**keywords)


def _takes_outputs(declaration: Callable[..., Any]) -> bool:
    """Return whether a declaration has a positional argument, which is for the outputs."""
    parameters = inspect.signature(declaration).parameters.values()
    return not all(_is_keyword(parameter) for parameter in parameters)


def _is_keyword(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _call_of(function: type, named: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the declaration of a class, and the keywords that it takes."""
    declaration: Callable[..., Any] = getattr(function, "spmd_typecheck")  # noqa: B009  # untyped
    parameters = inspect.signature(declaration).parameters.values()
    wanted = [parameter.name for parameter in parameters if _is_keyword(parameter)]
    unknown = [name for name in wanted if name not in named]
    if unknown:
        raise ArgumentTypeError(
            f"{function.__name__}.spmd_typecheck names {', '.join(unknown)}, which are not "
            "arguments of forward"
        )
    return declaration, {name: named[name] for name in wanted}


def _bound_arguments(function: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments of `apply` by their names in `forward`."""
    forward: Callable[..., Any] = getattr(function, "forward")  # noqa: B009  # not in the type
    names = [*inspect.signature(forward).parameters]
    # without `setup_context`, the first argument of `forward` is the context
    has_context = "setup_context" not in vars(function)
    if has_context:
        names = names[1:]
    return dict(zip(names, args, strict=False))


def _check_coverage(
    function: type, named: Mapping[str, Any], seen: Sequence[Any], outputs: Any
) -> None:
    """Raise unless a declaration has accounted for all tensors and given all outputs a type."""
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            continue
        if not any(value is operand for operand in seen):
            raise SpmdTypeError(
                f"{function.__name__}.spmd_typecheck does not account for {name}: use it in a rule "
                "or an assert_type, or declare it by rules.ignore"
            )
    for tensor in spmd.tensors_in(outputs):
        if spmd.type_of(tensor) is None:
            shape = tuple(tensor.shape)
            raise SpmdTypeError(
                f"{function.__name__}.spmd_typecheck leaves an output of shape {shape} without a "
                "type"
            )


def declare_by_method(function: type) -> Callable[[Any, tuple[Any, ...]], None] | None:
    """Return a function that runs the `spmd_typecheck` of a class; None if it has no such method.

    Args:
        function: the class of an autograd function.
    """
    if not hasattr(function, "spmd_typecheck"):
        return None
    return lambda outputs, args: run_declaration(function, outputs, args)
