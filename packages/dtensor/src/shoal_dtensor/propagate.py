"""From an operator and the specs of its inputs to a `Decision`: what each input must become, what comes out.

Nothing here touches values, and nothing here knows an operator by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from shoal_mesh import DeviceMesh

from ._torch import Build, DataDependentError, OpOverload, decomposition_of, direct, is_view, shapes_of
from .assign import Assignment, Operands, assign
from .errors import CommunicationForbiddenError, InPlaceError, MixedTensorError, NoRuleError
from .metadata import in_place_view
from .placements import Replicate
from .policy import Scope
from .redistribute import Plan, plan
from .rules import LocalCall, OpCall, Rule, flatten
from .spec import Spec, TensorMeta
from .structure import indices_at, is_list, metas_of, numbered, places_of, specs_in
from .writes import check_outs, check_writes, despite_overlap

__all__ = ["Decision", "Form", "decide", "rule_of"]


class Form(IntEnum):
    """How the result of a call becomes DTensors."""

    ONE = 0  # one fresh tensor
    SAME = 1  # the first argument, written in place
    LIST = 2  # a list or tuple of fresh tensors
    PLAIN = 3  # no tensor at all
    OTHER = 4  # anything else


class Move(NamedTuple):
    """An input that must be redistributed first.

    Attributes:
        place: its position, or its name.
        item: its index if the argument is a list; None if it is the argument itself.
        plan: how it moves.
    """

    place: int | str
    item: int | None
    plan: Plan

    def within(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What contains the input among these arguments, and the index or name that it has there."""
        container = args if isinstance(self.place, int) else kwargs
        return (container, self.place) if self.item is None else (container[self.place], self.item)


@dataclass(slots=True, frozen=True)
class Decision:
    """How one call runs.

    Attributes:
        form: what becomes of the result.
        call: the function to run on local tensors; with `composite`, on the DTensors themselves.
        outputs: spec of every tensor output, flattened.
        plans: the inputs that must be redistributed first, and how.
        aliased: for each output the flat index of the input that it is (in-place and `out=` forms), or None.
        copied: whether a view operator's output does not alias its input, because that had to be redistributed.
        dynamic: whether the outputs' shapes are known only afterwards.
        composite: whether `call` computes the operator by other operators.
        back: how the written inputs among them move to where they lie, afterwards.
        reason: what collectives of the redistributions are for, as debug modes and errors of the mesh layer repeat it.
        special: whether the call is not just the function on local tensors and wrappers around what it returns.
        notice: what to warn of when it runs.
        silent: the arguments that an operator writes to which returns nothing: torch does not count these writes.
        each: whether such an operator does the same to every element of its lists, one after the other.
    """

    form: Form
    call: Callable[..., Any]
    outputs: tuple[Spec, ...] = ()
    plans: tuple[Move, ...] = ()
    aliased: tuple[int | None, ...] = ()
    copied: bool = False
    dynamic: bool = False
    composite: bool = False
    back: tuple[Move, ...] = ()
    reason: str = ""
    special: bool = True
    notice: str = ""
    silent: tuple[int | str, ...] = ()
    each: bool = False


def rule_of(op: OpOverload, scope: Scope) -> Rule | None:
    """The rule of an operator: innermost overlay first, then the standing tables."""
    for table in scope.overlays:
        if op in table:
            found: Rule = table[op]
            return found
    from .rules.default import TABLE  # here: the first operator pays 0.15 s for the tables, `import` does not

    return TABLE.get(op)


def decide(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: Scope,
    copies: frozenset[int] = frozenset(),
) -> Decision:
    """How to run `op`.

    Args:
        op: the overload.
        args: its arguments, each tensor replaced by its `Spec`.
        kwargs: its keyword arguments in schema order, likewise.
        scope: the policies that hold.
        copies: flat indices of the inputs that are views whose storage is not their base's.

    Raises:
        MixedTensorError: if the specs are of different meshes.
        NoRuleError: if the operator has no rule and the policy is "error", or writes to sharded tensors unseen.
        InPlaceError: if a written tensor is such a copy, or would have to change its shape.
        CommunicationForbiddenError: if inputs need a redistribution and the policy forbids it.
    """
    rule = rule_of(op, scope)
    if rule is None:
        composite = in_place_view(op) or decomposition_of(op)
        if composite is not None:
            return Decision(Form.OTHER, composite, composite=True)
        rule = _without_rule(op, scope)
    specs = (*specs_in(args), *specs_in(tuple(kwargs.values())))
    outs = tuple(specs_in(tuple(kwargs[a.name] for a in op._schema.arguments if a.is_out and a.name in kwargs)))
    inputs = specs[: len(specs) - len(outs)]
    build = _without_memory(args, kwargs)
    metas = _global_outputs(op, build, specs[0].mesh.device_type)
    if len(outs) > len(metas) and not all(spec.is_replicated for spec in outs):
        raise NoRuleError(
            f"{op} writes to {', '.join(map(repr, outs))} and does not return it, so its sharding cannot be kept; "
            f"pass replicated tensors, or use the form that returns its result"
        )
    check_outs(op, outs, metas)
    tensors = tuple(spec.tensor_meta for spec in inputs)
    call = OpCall(op, metas_of(args), {name: metas_of(value) for name, value in kwargs.items()}, tensors, metas)
    if rule is _LOCAL:
        decided = _as_the_first(call, inputs)
    elif rule.each:
        decided = _each(rule, call, inputs)
    else:
        decided = _assigned(rule, call, Operands(inputs, metas, _fixed(call), outs, rule.unordered))
    return _decision(rule, call, specs, decided, _Request(scope, copies, build))


def _assigned(rule: Rule, call: OpCall, operands: Operands) -> Assignment:
    mesh, rows = _common_mesh(call.op, operands.specs + operands.outs), rule.rows(call)
    if _data_say(call) and not rule.dynamic:  # what ranks make of their parts would not fit together
        rows = [row for row in rows if row.outputs and all(isinstance(entry, Replicate) for entry in row.outputs)]
    found = assign(rows, operands, mesh)
    for lay in (_reduced, _whole):  # what is written to, anew: the result goes back to where the tensor lies
        if found is None:
            fixed = {index for index, _ in operands.fixed}
            specs = tuple(lay(spec) if i in fixed else spec for i, spec in enumerate(operands.specs))
            found = assign(rows, replace(operands, specs=specs, outs=tuple(map(lay, operands.outs))), mesh)
    if found is None:
        written = [operands.specs[i] for i, _ in operands.fixed] + list(operands.outs)
        raise InPlaceError(
            f"{call.op} writes to {', '.join(map(repr, written))}, but with the inputs "
            f"{', '.join(map(repr, operands.specs))} no result can be written there; use the out-of-place form"
        )
    return found


def _data_say(call: OpCall) -> bool:
    """Whether the operator returns tensors whose shapes only the data say."""
    returned = [r.type.kind() for r in call.op._schema.returns]
    return not call.outputs and any(kind in ("TensorType", "ListType") for kind in returned)


def _reduced(spec: Spec) -> Spec:
    return spec.with_(placements=[Replicate() if p.is_partial() else p for p in spec.placements])


def _whole(spec: Spec) -> Spec:
    return spec.with_(placements=[Replicate()] * spec.mesh.ndim)


def _each(rule: Rule, call: OpCall, inputs: tuple[Spec, ...]) -> Assignment:
    """Assign every element of a `foreach` call by itself: lists are walked in step, other arguments are shared."""
    numbers, values = iter(range(len(inputs))), (*call.args, *call.kwargs.values())
    places = [numbered(value, numbers) for value in values]
    count = max(len(value) for value in values if is_list(value))
    decided: list[Spec | None] = [None] * len(inputs)
    outputs: list[Spec | None] = [None] * len(call.outputs)
    for i in range(count):
        element = [value[i] if is_list(value) and value else value for value in values]
        indices = [j for place in places for j in indices_at(place, i)]
        results = range(i, len(call.outputs), count)
        sub = OpCall(
            call.op,
            tuple(element[: len(call.args)]),
            dict(zip(call.kwargs, element[len(call.args) :], strict=True)),
            tuple(call.tensors[j] for j in indices),
            tuple(call.outputs[j] for j in results),
        )
        fixed = tuple((j, None) for j in sub.written)
        found = _assigned(
            rule, sub, Operands(tuple(inputs[j] for j in indices), sub.outputs, fixed, (), rule.unordered)
        )
        for j, spec in zip(indices, found.inputs, strict=True):
            if decided[j] not in (None, spec):
                raise MixedTensorError(f"{call.op}: the shared input {inputs[j]!r} would have to lie in two ways")
            decided[j] = spec
        for j, spec in zip(results, found.outputs, strict=True):
            outputs[j] = spec
    final = tuple(spec or inputs[j] for j, spec in enumerate(decided))
    return Assignment(final, tuple(spec for spec in outputs if spec is not None))


class _Request(NamedTuple):
    """What a decision depends on besides the call: policies, marked inputs, and how to make the arguments anew."""

    scope: Scope
    copies: frozenset[int]
    build: Build


def _decision(rule: Rule, call: OpCall, specs: tuple[Spec, ...], decided: Assignment, request: _Request) -> Decision:
    wanted = (*decided.inputs, *_outs_as(decided.outputs, specs[len(decided.inputs) :]))
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(specs, wanted, strict=True)) if not a.same_layout(b)]
    plans = tuple((i, plan(a, b)) for i, a, b in pairs)
    notice = _obey(call.op, specs, plans, request.scope)
    places = [*places_of(enumerate(call.args)), *places_of(call.kwargs.items())]
    moves = tuple(Move(*places[i], way) for i, way in plans)
    writes = (*call.written, *range(len(decided.inputs), len(specs)))
    check_writes(call.op, specs, writes, request.copies)
    local = rule.local(LocalCall(call, decided.inputs, decided.outputs)) if rule.local is not None else None
    aliased = _aliased(call, writes, len(decided.outputs))
    copied = is_view(call.op) and (bool(plans) or decided.traffic or bool(request.copies) or rule.copies)
    dynamic = rule.dynamic or _data_say(call)
    form = _form(call, aliased)
    special = bool(moves) or dynamic or copied or form is Form.OTHER
    run = direct(call.op, request.build, call.outputs) if local is None else local
    if form is Form.SAME and len(specs) > 1 and not decided.inputs[0].even:
        run = despite_overlap(run)
    reason = f"{call.op}({', '.join(map(repr, specs))})" if any(way.collectives for _, way in plans) else ""
    back = tuple(Move(*places[i], plan(b, a)) for i, a, b in pairs if i in writes)
    silent = tuple(dict.fromkeys(places[i][0] for i in writes)) if form is Form.PLAIN else ()
    made = Decision(form, run, decided.outputs, moves, aliased, copied, dynamic, False, back, reason, special, notice)
    return replace(made, silent=silent, each=rule.each) if silent else made


def _outs_as(made: Sequence[Spec], outs: Sequence[Spec]) -> Iterator[Spec]:
    """How `out=` arguments must lie to take results: as they do, unless those could not be made so."""
    for i, out in enumerate(outs):
        fits = i >= len(made) or made[i].shape != out.shape or made[i].same_layout(out)
        yield out if fits else out.with_(placements=made[i].placements, shard_order=made[i].shard_order)


def _form(call: OpCall, aliased: tuple[int | None, ...]) -> Form:
    """How the fast path treats the result of an operator whose inputs lie right."""
    returns = call.op._schema.returns
    if not returns or not call.outputs:
        return Form.PLAIN
    if len(returns) == 1 and returns[0].type.kind() == "TensorType":
        if aliased == (None,):
            return Form.ONE
        return Form.SAME if aliased == (0,) and isinstance(call.args[0], TensorMeta) else Form.OTHER
    fresh = all(index is None for index in aliased)
    flat = len(returns) == len(call.outputs) or len(returns) == 1
    return Form.LIST if fresh and flat else Form.OTHER


def _obey(op: OpOverload, specs: Sequence[Spec], plans: Sequence[tuple[int, Plan]], scope: Scope) -> str:
    """Apply the communication policy to the plans that the operator needs: what to warn of, or nothing."""
    if scope.communication == "allow" or not any(p.bytes_sent for _, p in plans):
        return ""
    steps = "\n".join(f"  input {i}: {p.src!r} -> {p.dst!r}\n{p}" for i, p in plans if p.bytes_sent)
    message = f"{op} with inputs {', '.join(map(repr, specs))} needs implicit communication:\n{steps}"
    if scope.communication == "forbid":
        raise CommunicationForbiddenError(message + "\nredistribute these inputs explicitly, or allow it here")
    return message


_REPLICATE = Rule(lambda call: ())
_LOCAL = Rule(lambda call: ())


def _without_rule(op: OpOverload, scope: Scope) -> Rule:
    if scope.unknown == "error":
        raise NoRuleError(
            f"{op} has no sharding rule and no decomposition; give it one with shoal_dtensor.register_rule, "
            f"or allow replicated inputs with unknown_ops('replicate')"
        )
    if scope.unknown == "local":
        return _LOCAL
    warnings.warn(
        f"{op} has no sharding rule and no decomposition: its inputs are replicated "
        f"(unknown_ops('error') forbids this; shoal_dtensor.register_rule gives it a rule)",
        stacklevel=2,
    )
    return _REPLICATE


def _as_the_first(call: OpCall, inputs: tuple[Spec, ...]) -> Assignment:
    """The `unknown_ops("local")` sharding: nothing moves, outputs lie as the first input does."""
    first = inputs[0]
    for meta in call.outputs:
        if meta.shape != first.shape:
            raise NoRuleError(
                f"{call.op} has no sharding rule, and unknown_ops('local') cannot tell how an output of shape "
                f"{tuple(meta.shape)} lies when its first input is {first!r}"
            )
    outputs = tuple(first.with_(stride=meta.stride, dtype=meta.dtype) for meta in call.outputs)
    return Assignment(inputs, outputs)


def _without_memory(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Build:
    """A function that makes the global arguments on a device, each tensor without memory."""

    def build(device: torch.device) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return [_empty(value, device) for value in args], {name: _empty(v, device) for name, v in kwargs.items()}

    return build


def _global_outputs(op: OpOverload, build: Build, device_type: str) -> tuple[TensorMeta, ...]:
    """What the global tensor outputs are; none if that depends on data."""
    try:
        result = shapes_of(op, build, device_type)
    except DataDependentError:
        return ()
    return tuple(TensorMeta(tuple(t.shape), t.stride(), t.dtype) for t in flatten(result))


def _empty(value: Any, device: torch.device) -> Any:
    """An argument with tensors that have no memory."""
    if isinstance(value, Spec):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Generator):
        return None  # shapes do not depend on it, and kernels without memory refuse one
    return [_empty(item, device) for item in value] if is_list(value) else value


def _common_mesh(op: OpOverload, specs: Sequence[Spec]) -> DeviceMesh:
    for spec in specs[1:]:
        if spec.mesh is not specs[0].mesh and spec.mesh != specs[0].mesh:
            raise MixedTensorError(
                f"{op}: its inputs live on different meshes: {specs[0].mesh} and {spec.mesh}; "
                f"redistribute one of them to the other's mesh first"
            )
    return specs[0].mesh


def _fixed(call: OpCall) -> tuple[tuple[int, int | None], ...]:
    """The inputs written in place, each with the output that it is."""
    outputs = call.rewritten
    return tuple((index, outputs[k] if k < len(outputs) else None) for k, index in enumerate(call.written))


def _aliased(call: OpCall, writes: Sequence[int], outputs: int) -> tuple[int | None, ...]:
    """For each output the flat index of the written input that it is, or None."""
    following = iter(writes)
    infos = [returned.alias_info for returned in call.op._schema.returns]
    marks = [next(following, None) if info is not None and info.is_write else None for info in infos]
    return tuple(marks) if len(marks) == outputs else (None,) * outputs
