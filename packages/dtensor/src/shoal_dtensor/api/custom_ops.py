"""User code on DTensors: functions of plain tensors on local shards, and rules for operators.

Rules are given in shoal's notation, or in the form of torch's `register_sharding`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal_mesh import DeviceMesh, check_replicas
from shoal_mesh.internal import FUNCTION, require

from .._torch.compiling import is_tracing, never_compiled
from .._torch.operators import OpOverload
from .._torch.tensors import pytree
from ..argument_types import check_mesh, suggests_keywords
from ..errors import (
    ArgumentTypeError,
    ArgumentValueError,
    MixedTensorError,
    PlacementError,
    PlacementIndexError,
)
from ..layout.placements import Placement, Replicate, Shard
from ..layout.spec import Spec
from ..layout.tensor_meta import TensorMeta
from ..rules.language.rule import Entry, OpCall, R, Row, Rule, S
from ..scopes import SCOPES, replicas_are_compared
from ..tensor.dtensor import DTensor
from ..tensor.spec_arguments import layout_of_ranks

Placements = Sequence[Placement] | None


@suggests_keywords()
def local_map(  # noqa: PLR0913  # torch's arguments, and whether to compare
    func: Callable[..., Any] | None = None,
    out_placements: Placements | tuple[Placements, ...] = None,
    in_placements: tuple[Placements, ...] | None = None,
    in_grad_placements: tuple[Placements, ...] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    run_check: bool = True,
    spmd_types: bool = False,
) -> Callable[..., Any]:
    """Return `func`, which works on local tensors, as a function on DTensors.

    Given plain tensors alone, the result behaves as `func`.

    Args:
        func: takes and returns plain tensors; if left out, this is a decorator.
        out_placements: placements of the outputs: one list for all, or a tuple with one for each;
            None leaves an output plain.
        in_placements: required placements of the inputs (flattened), one entry each; None for
            values that are not DTensors, or for any placements.
        in_grad_placements: placements of the inputs' gradients as they come back from `func`.
        device_mesh: the mesh of the outputs; the inputs' own when left out.
        redistribute_inputs: redistribute inputs of other placements instead of raising.
        run_check: in every call, compare over the mesh the shapes of the outputs, which may be
            uneven, and the values of replicated outputs: one all-gather of 152 bytes for each
            output; threads may call in any order. In `lockstep()` and `checked_replicas()`, the
            values of replicated inputs are compared too. If False, replicas are assumed to be
            equal, and all ranks to have shapes as on this rank, or as `Shard(dim, sizes=...)`
            declares. Compiled code does not compare; it refuses unevenly sharded inputs unless this
            is False.
        spmd_types: check the types of plain tensors in `func` (the guide "Type-check
            hand-written collectives") instead of comparing ranks: a local tensor has the type of
            its placement, I for a replicated one whose gradient arrives replicated, R if
            `in_grad_placements` has a partial gradient; outputs must have the types of
            `out_placements`.

    Raises:
        LockstepError: (of shoal_mesh, when called, on all ranks) if a replicated input differs
            between ranks, where inputs are compared.
        PlacementError: (when called) if an input has other placements, if the number of placements
            does not fit, or on all ranks, if the outputs' shapes fit no sharding or replicas
            differ.
        MixedTensorError: (when called) if a placement is given for a plain tensor.
        SpmdTypeError: (when called) with `spmd_types`, if types do not fit an operator of `func`,
            or the placements of its outputs.
    """
    if func is None:
        options = (out_placements, in_placements, in_grad_placements, device_mesh)
        return lambda func: local_map(
            func,
            *options,
            redistribute_inputs=redistribute_inputs,
            run_check=run_check,
            spmd_types=spmd_types,
        )
    require(func, FUNCTION | None, "local_map: func is a function or None", ArgumentTypeError)
    for name, entries in (
        ("in_placements", in_placements),
        ("in_grad_placements", in_grad_placements),
    ):
        require(
            entries,
            (tuple, list, type(None)),
            f"local_map: {name} is a tuple with one entry for each input",
            ArgumentTypeError,
        )
    require(
        out_placements,
        (tuple, list, type(None)),
        "local_map: out_placements is a list of placements",
        ArgumentTypeError,
    )
    if device_mesh is not None:
        check_mesh("local_map", device_mesh)

    @functools.wraps(func)
    def run_on_shards(*args: Any, **kwargs: Any) -> Any:
        flat, structure = pytree.tree_flatten(args)
        kinds = [isinstance(item, DTensor) for item in flat if isinstance(item, torch.Tensor)]
        if kinds and not any(kinds):
            return func(*args, **kwargs)
        if run_check and replicas_are_compared() and not is_tracing():
            _compare_replicas(flat)
        local, specs = _local_inputs(flat, in_placements, in_grad_placements, redistribute_inputs)
        if run_check and is_tracing():
            _refuse_uneven(specs)
        first_mesh = specs[0].device_mesh if specs else None
        mesh = device_mesh or first_mesh
        arguments = pytree.tree_unflatten(local, structure)
        if spmd_types and mesh is not None and not is_tracing():
            # Imported here, so that only programs that check types load the checker.
            from ..spmd.checker import typecheck
            from ..spmd.local_map_types import check_outputs, declare_inputs
            from ..spmd.types.mesh_axes import set_current_mesh

            with set_current_mesh(mesh), typecheck(local=False):
                declare_inputs(local, flat, in_grad_placements)
                result = func(*arguments, **kwargs)
                check_outputs(result, out_placements, mesh)
            return _outputs(result, out_placements, mesh, None)
        result = func(*arguments, **kwargs)
        is_compared = run_check and not is_tracing()
        about = functools.partial(_output_of, func, specs) if is_compared else None
        return _outputs(result, out_placements, mesh, about)

    if not is_tracing():
        never_compiled(run_on_shards)
    return run_on_shards


def _local_inputs(
    flat: list[Any],
    wanted: tuple[Placements, ...] | None,
    grads: tuple[Placements, ...] | None,
    redistribute: bool,
) -> tuple[list[Any], list[Spec]]:
    """Return the inputs of the function, and the layouts of the DTensors among its arguments."""
    for name, entries in ("in_placements", wanted), ("in_grad_placements", grads):
        if entries is not None and len(entries) != len(flat):
            counts = f"{name} has {len(entries)} entries, but the function got {len(flat)} inputs"
            raise PlacementIndexError(f"local_map: {counts}")
    no_placements: tuple[Any, ...] = (None,) * len(flat)
    entries_of_inputs = zip(flat, wanted or no_placements, grads or no_placements, strict=True)
    local = []
    specs = []
    for i, (item, placements, grad) in enumerate(entries_of_inputs):
        placed = _in_placements(i, item, placements, redistribute)
        if isinstance(placed, DTensor):
            specs.append(placed._spec)
            placed = placed.to_local(grad_placements=grad)
        local.append(placed)
    return local, specs


def _in_placements(index: int, item: Any, wanted: Placements, redistribute: bool) -> Any:
    """Return an input in the required placements."""
    if wanted is None or not isinstance(item, torch.Tensor):
        return item
    if not isinstance(item, DTensor):
        raise MixedTensorError(
            f"local_map: input {index} is a plain tensor, but in_placements expects {list(wanted)}"
        )
    target = item._spec.with_(placements=tuple(wanted))
    if item._spec.same_layout(target):
        return item
    if not redistribute:
        raise PlacementError(
            f"local_map: input {index} is {item._spec!r}, but in_placements expects "
            f"{list(wanted)}; redistribute it, or set redistribute_inputs=True"
        )
    return item.redistribute(placements=wanted)


def _compare_replicas(inputs: Sequence[Any]) -> None:
    """Raise LockstepError on all ranks if a replicated input differs between ranks."""
    for index, item in enumerate(inputs):
        if not isinstance(item, DTensor) or item._spec.coordinate is None:
            continue
        placements = enumerate(item.placements)
        axes = tuple([axis for axis, placement in placements if isinstance(placement, Replicate)])
        if axes:
            comm = item.device_mesh.comm(axes)
            check_replicas(item._local_tensor.detach(), comm, f"input {index} of local_map")


def _refuse_uneven(specs: Sequence[Spec]) -> None:
    """Refuse uneven inputs in compiled code, because outputs may differ in shape between ranks."""
    if not all(spec.even for spec in specs):
        raise PlacementError(
            f"local_map in compiled code: an input is unevenly sharded, {specs}, and ranks cannot "
            "compare the outputs; pass the sizes, out_placements=[Shard(dim, sizes=...)], and "
            "run_check=False, or call it outside of compiled code"
        )


def _output_of(func: Any, specs: Sequence[Spec], index: int) -> str:
    """Return a text that identifies an output of a function, equal on all ranks."""
    module = getattr(func, "__module__", "")
    name = getattr(func, "__qualname__", type(func).__qualname__)
    line = getattr(getattr(func, "__code__", None), "co_firstlineno", 0)
    return f"output {index} of local_map of {module}.{name} (line {line}) on {specs}"


def _outputs(
    result: Any, out_placements: Any, mesh: DeviceMesh | None, about: Callable[[int], str] | None
) -> Any:
    """Return the result of the function with DTensors for its tensors.

    `about` identifies the outputs, if ranks compare them.
    """
    flat, structure = pytree.tree_flatten(result)
    entries = out_placements
    if not isinstance(entries, tuple):
        entries = (entries,) * len(flat)
    if len(entries) != len(flat):
        raise PlacementIndexError(
            f"local_map: out_placements has {len(entries)} entries, but the function returned "
            f"{len(flat)} outputs"
        )
    outputs: list[Any] = []
    for i, (item, placements) in enumerate(zip(flat, entries, strict=True)):
        if placements is None or not isinstance(item, torch.Tensor):
            outputs.append(item)
            continue
        if mesh is None:
            raise PlacementError(
                "local_map: no input is a DTensor; pass device_mesh for the outputs"
            )
        options: dict[str, Any] = {}
        if about is not None and mesh.get_coordinate() is not None and mesh.size() > 1:
            about_output = functools.partial(about, i)
            # `item` gets the memory order that all ranks have.
            spec, item = layout_of_ranks(
                item, mesh, placements, None, about=about_output, values=True
            )
            placements = spec.placements
            options = {"shape": spec.shape, "shard_order": spec.shard_order}
        outputs.append(DTensor.from_local(item, mesh, placements, **options))
    return pytree.tree_unflatten(outputs, structure)


@suggests_keywords()
def register_rule(
    op: OpOverload | Sequence[OpOverload], rule: Rule, *, replace: bool = False
) -> None:
    """Give operators a rule for the rest of the process; for a block, use `rules.overlay`.

    Args:
        op: one overload or several, including in-place operators, operators without output and
            operators with tensor keyword arguments.
        rule: the rule, for instance `product("m k, k n -> m n")`.
        replace: allow an operator that has a rule already.

    Raises:
        ArgumentValueError: if an operator has a rule and `replace` is not set.

    Example:
        >>> from shoal_dtensor.rules import pointwise
        >>> register_rule(torch.ops.aten.special_airy_ai.default, pointwise(), replace=True)
    """
    require(
        rule,
        Rule,
        "register_rule: rule is a Rule, such as product('m k, k n -> m n')",
        ArgumentTypeError,
    )
    overloads = _overloads("register_rule", op)
    # Imported here, so that `import shoal_dtensor` does not build the tables.
    from ..rules.all_rules import TABLE

    for overload in overloads:
        if overload in TABLE and not replace:
            raise ArgumentValueError(
                f"{overload} has a rule already; pass replace=True to replace it"
            )
        TABLE[overload] = rule
        for scope in [*SCOPES]:
            scope.decisions.pop(id(overload), None)


def register_sharding(
    op: OpOverload | Sequence[OpOverload],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function in the form of torch's `register_sharding` to make a rule of it.

    The function gets the operator's arguments, with each tensor replaced by its `TensorMeta`
    (global shape, stride, dtype), and returns a list of pairs (output placements, input
    placements). Each pair declares one way to shard along ONE mesh axis; inputs that are not
    tensors have None. The pair in which everything is replicated may be left out.

    Args:
        op: one overload or several.

    Raises:
        PlacementError: (when the operator is called) if a pair does not fit the operator's tensors.

    Example:
        >>> from shoal_dtensor import Shard
        >>> @torch.library.custom_op("shoal_example::twice", mutates_args=())
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> @register_sharding(torch.ops.shoal_example.twice.default)
        ... def rows_stay_sharded(x):
        ...     return [([Shard(0)], [Shard(0)])]
    """
    _overloads("register_sharding", op)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def rows(call: OpCall) -> list[Row]:
            pairs = function(*call.args, **call.kwargs)
            return [_row(call, outputs, inputs) for outputs, inputs in pairs]

        register_rule(op, Rule(rows), replace=True)
        return function

    return decorate


def _row(call: OpCall, outputs: Sequence[Any], inputs: Sequence[Any]) -> Row:
    """Return one pair of placements as a row, without the entries of non-tensor arguments."""
    input_placements = _placements_in(inputs)
    output_placements = _placements_in(outputs)
    tensors = (len(call.tensors), len(call.outputs))
    if (len(input_placements), len(output_placements)) != tensors:
        registered = f"{len(input_placements)} and {len(output_placements)}"
        raise PlacementError(
            f"{call.op}: it has {len(call.tensors)} tensor inputs and {len(call.outputs)} tensor "
            f"outputs, but the registered sharding has placements for {registered}"
        )
    entries = tuple(map(_entry, input_placements, call.tensors))
    return Row(entries, tuple(map(_entry, output_placements, call.outputs)))


def _placements_in(value: Any) -> list[Placement]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Placement)]


def _entry(placement: Placement, meta: TensorMeta) -> Entry:
    if isinstance(placement, Shard):
        return S(placement.dim % meta.ndim)
    if placement.is_replicate():
        return R
    return placement  # type: ignore[return-value]  # what is left is Partial


def _overloads(call: str, op: OpOverload | Sequence[OpOverload]) -> list[OpOverload]:
    """Return one or several overloads as a list; raise an error for anything else."""
    overloads: list[Any] = list(op) if isinstance(op, list | tuple) else [op]
    for overload in overloads:
        require(
            overload,
            OpOverload,
            f"{call}: op is an overload, such as torch.ops.aten.mm.default, or several",
            ArgumentTypeError,
        )
    return overloads
