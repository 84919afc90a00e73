"""The checker: a mode that compares every operator on typed tensors with the operator's rule.

`Checker` reads the types of an operator's operands, infers the types of its results (see `infer`),
and stores them on the results. An autograd function is checked as one operation, by the types that
it declares (`apply_checked`). `typecheck` is the block in which all of this is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from shoal_mesh.internal import Event, observing

from .._torch.interception import (
    BackwardHookFunction,
    CheckpointFunction,
    TorchDispatchMode,
    intercept_autograd_functions,
)
from .._torch.operators import OpOverload, decomposition_of, signature_of
from ..dispatch.propagate import rule_of
from ..errors import SpmdTypeError
from ..layout.tensor_meta import map_instances
from ..rules.language.op_call import schema_of
from ..scopes import current as current_scope
from ..tensor.dtensor import DTensor
from .assertions import on_current_mesh
from .checker_state import CHECKER, TRACE_LOG, TRACES, active_checker, paused, varying_axes
from .declared import (
    DECOMPOSITIONS,
    LOCAL_FUNCTIONS,
    declaration_of,
    declare_local,
)
from .first_check import load_declarations
from .function_hints import LEADING, FunctionHints, with_wildcard
from .inference.infer import infer_types
from .inference.messages import user_line
from .inference.operator_call import LocalOperatorCall, Operand, local_meta
from .module_boundaries import module_boundaries
from .types.axis_types import I, R, V
from .types.mesh_axes import MESH, MeshAxis
from .types.tensor_types import (
    TensorType,
    is_constant,
    mark_constant,
    set_type,
    tensors_in,
    type_of,
)

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_dtensor", "shoal_mesh"})


class Checker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """The mode that infers types of operators' results.

    Attributes:
        strict: whether an operand without a type among operands with types is an error.
        is_local: whether every axis is local, so that S(i) counts as V.
    """

    def __init__(self, strict: bool, is_local: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.strict = strict
        self.is_local = is_local
        self._results: dict[Any, list[TensorType]] = {}

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # A tensor without memory reads its own device by `prim::device`.
        if active_checker() is None or func.namespace == "prim":
            return func(*args, **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in tensors_in((args, kwargs))):
            with paused():
                return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not any(type_of(tensor) is not None for tensor in tensors):
            return _run_untyped(func, args, kwargs, tensors)
        if func.namespace in _COLLECTIVES:
            raise SpmdTypeError(
                f"{user_line()}: {func} on a typed tensor: this collective does not propagate "
                "types or gradients. Way out: the typed collectives (all_reduce, all_gather, "
                "reduce_scatter, all_to_all with src and dst), or no_typecheck with out_types"
            )
        return self._run_typed(func, args, kwargs, tensors)

    def _run_typed(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
    ) -> Any:
        """Run an operator with typed operands, and give its outputs their types."""
        code_place = "" if _are_on_current_mesh(tensors) else _place_of(func)
        untyped = [tensor for tensor in tensors if type_of(tensor) is None]
        if any(not _counts_as_constant(tensor) for tensor in untyped):
            if self.strict:
                shape = _shape_without_type(untyped)
                types = [type_of(tensor) for tensor in tensors]
                raise SpmdTypeError(
                    f"{_place_of(func)}: an operand of shape {shape} does not have a type, but "
                    f"other operands do: {types}. Way out: assert_type(x, ...) where the program "
                    "creates the tensor"
                )
            return func(*args, **kwargs)
        if rule_of(func, current_scope()) is None:
            decomposed = decomposition_of(func)
            if decomposed is not None and not _all_replicated(tensors):
                with self:
                    return decomposed(*args, **kwargs)
        for tensor in tensors:
            if type_of(tensor) is not None:
                on_current_mesh(tensor, code_place)
        before = [(tensor, type_of(tensor)) for tensor in _written_tensors(func, args, kwargs)]
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        inferred = self._infer(func, args, kwargs, outputs)
        for output, tensor_type in zip(outputs, inferred, strict=True):
            _give_type(output, tensor_type, before)
        if TRACES.context_value():
            operands = [type_of(tensor) for tensor in tensors]
            TRACE_LOG.info("%s: %s%s -> %s", user_line(), func, operands, inferred)
        return result

    def _infer(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
    ) -> list[TensorType]:
        """Return the types of the outputs; equal calls are inferred once."""
        grad = torch.is_grad_enabled()
        operands: list[Operand] = []

        def read(tensor: Tensor) -> Operand:
            differentiable = tensor.is_floating_point() or tensor.is_complex()
            takes_gradient = grad and tensor.requires_grad and differentiable
            operand = Operand(local_meta(tensor), type_of(tensor), takes_gradient)
            operands.append(operand)
            return operand

        described, named = map_instances((args, {**kwargs}), Tensor, read)
        described = with_wildcard(func, described)
        axes = _common_axes(func, operands)
        is_varying = varying_axes()
        varying = frozenset([axis for axis in axes if is_varying(axis)])
        metas = tuple([local_meta(output) for output in outputs])
        leading = LEADING.context_value()
        key = (func, _hashable(described), _hashable(named), varying, axes, metas, leading)
        found = self._results.get(key)
        if found is None:
            if not self.is_local:
                _refuse_varying(func, operands, varying)
            call = LocalOperatorCall(
                func, described, named, operands=tuple(operands), outputs=metas
            )
            found = infer_types(call, axes, varying, leading)
            self._results[key] = found
        return found


def _are_on_current_mesh(tensors: Sequence[Tensor]) -> bool:
    """Tell whether all types of tensors are over the axes of the current mesh, if there is one."""
    mesh = MESH.get()
    if mesh is None:
        return True
    axes = {*mesh.axes}
    types = [type_of(tensor) for tensor in tensors]
    return all(found is None or found.by_axis.keys() == axes for found in types)


def _hashable(value: Any) -> Any:
    """Return a hashable value for the arguments of a call."""
    if isinstance(value, Operand):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple([(name, _hashable(item)) for name, item in value.items()])
    # 1, 1.0 and True are equal but give different dtypes.
    return (type(value), value) if isinstance(value, int | float) else value


def _run_untyped(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]
) -> Any:
    """Run an operator on tensors without types; results made of constants alone are constants."""
    result = func(*args, **kwargs)
    schema = schema_of(func)
    made_of_constants = all(map(is_constant, tensors)) or func is torch.ops.aten.lift_fresh.default
    if schema.is_random or not made_of_constants:
        for tensor in _written_tensors(func, args, kwargs):
            mark_constant(tensor, False)
            if tensor._base is not None:
                mark_constant(tensor._base, False)
        return result
    for output in tensors_in(result):
        mark_constant(output, True)
    return result


def _written_tensors(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors that a call writes to."""
    schema = schema_of(func)
    if not schema.written and not schema.outs:
        return []
    bound = {**dict(zip(schema.positional, args, strict=False)), **kwargs}
    return tensors_in([bound.get(name) for name in (*schema.written, *schema.outs)])


def _counts_as_constant(tensor: Tensor) -> bool:
    return is_constant(tensor) and not tensor.requires_grad


def _shape_without_type(untyped: Sequence[Tensor]) -> tuple[int, ...]:
    return next(tuple(tensor.shape) for tensor in untyped if not _counts_as_constant(tensor))


def _all_replicated(tensors: Sequence[Tensor]) -> bool:
    """Tell whether the types of all tensors that have one are R or I on all axes."""
    found = [type_of(tensor) for tensor in tensors]
    types = [tensor_type for tensor_type in found if tensor_type is not None]
    return all(
        axis_type in (R, I) for tensor_type in types for axis_type in tensor_type.by_axis.values()
    )


def _give_type(
    output: Tensor, tensor_type: TensorType, before: Sequence[tuple[Tensor, TensorType | None]]
) -> None:
    """Give an output its type; a tensor that was written in place must keep its type."""
    for tensor, present in before:
        if tensor is not output:
            continue
        if present is None or present != tensor_type:
            was = "a constant without a type" if present is None else repr(present)
            raise SpmdTypeError(
                f"{user_line()}: a write in place would change the type of a tensor from {was} to "
                f"{tensor_type!r}; write to a new tensor, or assert the type of the target first"
            )
    set_type(output, tensor_type)


def _common_axes(func: OpOverload, operands: Sequence[Operand]) -> tuple[MeshAxis, ...]:
    """Return the axes of the operands' types, which must be the same."""
    types = [operand.tensor_type for operand in operands if operand.tensor_type is not None]
    axes = dict.fromkeys(axis for tensor_type in types for axis in tensor_type.by_axis)
    for tensor_type in types:
        if tensor_type.by_axis.keys() != axes.keys():
            missing = [axis for axis in axes if axis not in tensor_type.by_axis]
            present = [*tensor_type.by_axis]
            raise SpmdTypeError(
                f"{_place_of(func)}: an operand has types over {present}, and others also over "
                f"{missing}; assert its type over these axes too"
            )
    return tuple(axes)


def _place_of(func: OpOverload) -> str:
    """Return the program's line that calls an operator, and the operator's name, for errors."""
    name = signature_of(func).name.removeprefix("aten::")
    return f"{user_line()}: {name}"


def _refuse_varying(
    func: OpOverload, operands: Sequence[Operand], varying: frozenset[MeshAxis]
) -> None:
    """Raise an error if an operand is V over an axis that is not in `varying`."""
    for operand in operands:
        if operand.tensor_type is None:
            continue
        for axis, axis_type in operand.tensor_type.by_axis.items():
            if axis_type is V and axis not in varying:
                raise SpmdTypeError(
                    f"{_place_of(func)}: an operand is V over {axis!r}, so it is not known to be a "
                    "shard of a global tensor. Way out: assert_type(x, S(dim)) or a PartitionSpec, "
                    "or compute in local() or local_map"
                )


# --- autograd functions ---------------------------------------------------------------------------


def _run_checkpointed(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Run a checkpointed function with gradients, as in its recomputation, to infer types."""
    with torch.enable_grad():
        return function(*args)


def _return_arguments(*args: Any) -> tuple[Any, ...]:
    """Return the arguments, as torch's function does that calls a module's backward hooks."""
    return args


DECOMPOSITIONS[CheckpointFunction] = _run_checkpointed
DECOMPOSITIONS[BackwardHookFunction] = _return_arguments
# Functions whose own `typecheck_forward` is running. It calls `apply`, which must not start it
# again.
_RUNNING_CHECKS: list[type] = []


def apply_checked(
    function: type[torch.autograd.Function], apply: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Run an autograd function as one operation, and give its outputs the types that it declares.

    Raises:
        SpmdTypeError: if it has a typed argument and declares no types (strict mode).
    """
    checker = active_checker()
    if checker is None:
        return apply(*args)
    own_check = getattr(function, "typecheck_forward", None)
    if own_check is not None and function not in _RUNNING_CHECKS:
        _RUNNING_CHECKS.append(function)
        try:
            return own_check(*args)
        finally:
            _RUNNING_CHECKS.remove(function)
    reference = DECOMPOSITIONS.get(function)
    expected = tensors_in(reference(*args)) if reference is not None else []
    with paused():
        outputs = apply(*args)
        if reference is not None:
            for output, like in zip(tensors_in(outputs), expected, strict=True):
                set_type(output, type_of(like))
            return outputs
        declaration = declaration_of(function)
        if declaration is not None:
            declaration(outputs, args)
            return outputs
    if own_check is not None:
        return outputs
    if function in LOCAL_FUNCTIONS:
        declare_local(outputs, args)
        return outputs
    if checker.strict and any(type_of(tensor) is not None for tensor in tensors_in(args)):
        raise SpmdTypeError(
            f"{user_line()}: the autograd function {function.__name__} does not declare its "
            "types. Way out: add a static method spmd_typecheck, or register it with "
            "register_local_autograd_function, register_decomposition or register_no_typecheck"
        )
    return outputs


def _refuse_collective(event: Event) -> None:
    """Refuse a collective of shoal_mesh that has no gradient, on a typed tensor."""
    if active_checker() is None:
        return
    if any(type_of(tensor) is not None for tensor in event.tensors):
        raise SpmdTypeError(
            f"{user_line()}: {event.op} on a typed tensor: this collective is not differentiable, "
            "so its result would not have a type. Way out: the typed collectives with src and "
            "dst, or shoal_mesh.differentiable"
        )


# --- the block ------------------------------------------------------------------------------------


@contextmanager
def typecheck(strict_mode: str | None = None, *, local: bool | None = None) -> Iterator[None]:
    """Check the types of the operators inside the block.

    Args:
        strict_mode: "strict": an operand without a type is an error; "permissive": its results
            have no type. In a block inside of another one, None keeps the mode.
        local: True checks R, I, V and P only; False also that S(i) shards stay shards of global
            tensors (global mode). None keeps the setting; outside of a block it is True.

    Raises:
        SpmdTypeError: for another mode.
    """
    if strict_mode not in (None, "strict", "permissive"):
        raise SpmdTypeError(
            f"typecheck: strict_mode must be 'strict' or 'permissive', got {strict_mode!r}"
        )
    present = CHECKER.context_value()
    if present is not None:
        strict = present.strict if strict_mode is None else strict_mode == "strict"
        with settings(strict, present.is_local if local is None else local):
            yield
        return
    load_declarations()
    checker = Checker(strict_mode != "permissive", True if local is None else local)
    with ExitStack() as stack:
        stack.enter_context(CHECKER.entered(checker))
        stack.enter_context(intercept_autograd_functions(apply_checked))
        stack.enter_context(observing(before=_refuse_collective))
        stack.enter_context(module_boundaries())
        stack.enter_context(FunctionHints())
        stack.enter_context(checker)
        yield


@contextmanager
def settings(strict: bool, is_local: bool) -> Iterator[None]:
    """Change the settings of the active checker inside a block."""
    checker = CHECKER.context_value()
    if checker is None:
        yield
        return
    before = (checker.strict, checker.is_local)
    checker.strict = strict
    checker.is_local = is_local
    try:
        yield
    finally:
        checker.strict = before[0]
        checker.is_local = before[1]


@contextmanager
def local() -> Iterator[None]:
    """Count shards as V inside the block: every rank computes on its own.

    Nothing happens if no checker is active.
    """
    checker = CHECKER.context_value()
    with settings(checker.strict if checker is not None else True, True):
        yield
