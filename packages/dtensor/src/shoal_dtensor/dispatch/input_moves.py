"""The redistributions that a decided call needs, and the texts about what it communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..layout.spec import Spec
from ..redistribute.plan import plan
from ..redistribute.steps import Plan
from ..rules.language.rule import OpCall, Rule
from ..scopes import Scope, notice_of
from .results import check_writes

if TYPE_CHECKING:
    from .assign import Sharding


class ShardedCall(NamedTuple):
    """A call of an operator with the shardings that were chosen for it.

    Attributes:
        rule: the rule that offered the shardings.
        call: the call with a `TensorMeta` for each tensor.
        specs: the present specs of its inputs, followed by the specs of its `out=` arguments.
        sharding: the chosen specs of its inputs and outputs.
    """

    rule: Rule
    call: OpCall
    specs: tuple[Spec, ...]
    sharding: Sharding


class InputMove(NamedTuple):
    """The redistribution of one tensor argument before a call, and back if the call writes to it.

    Attributes:
        position: flat index among the inputs and `out=` arguments.
        plan: the plan from its own layout to the layout that the call requires.
        write_back: the plan back to its own layout; None if the call does not write to it.
    """

    position: int
    plan: Plan
    write_back: Plan | None


class CommunicationTexts(NamedTuple):
    """Texts about the communication of a decided call; empty if they are not needed.

    Attributes:
        reason: the operator with its inputs, if inputs move by collectives.
        notice: the warning of the communication policy.
        watched: the operator with its inputs, if the policy holds for its local function.
    """

    reason: str = ""
    notice: str = ""
    watched: str = ""


def plan_moves(sharded: ShardedCall, copies: frozenset[int]) -> list[InputMove]:
    """Plan redistributions of inputs and `out=` arguments; refuse writes that cannot be made."""
    _, call, specs, sharding = sharded
    # An `out=` argument is written in the layout of its output.
    outs = specs[len(sharding.inputs) :]
    results = (*sharding.outputs, *outs[len(sharding.outputs) :])
    wanted_outs = [out.in_layout_of(to) for out, to in zip(outs, results, strict=False)]
    wanted = [*sharding.inputs, *wanted_outs]
    out_positions = range(len(sharding.inputs), len(specs))
    written = (*call.written, *out_positions, *call.updated)
    check_writes(call.op, specs, written, copies)
    moves = []
    for index, (spec, to) in enumerate(zip(specs, wanted, strict=True)):
        if not spec.same_layout(to):
            write_back = plan(to, spec) if index in written else None
            moves.append(InputMove(index, plan(spec, to), write_back))
    return moves


def communication_of(
    sharded: ShardedCall, moves: Sequence[InputMove], scope: Scope
) -> CommunicationTexts:
    """Describe what a call communicates, as far as debug modes and the policy need it.

    A CommunicationForbiddenError is raised if the policy forbids it.
    """
    is_allowed = scope.communication == "allow"
    has_collectives = any(move.plan.collectives for move in moves)
    if is_allowed and not has_collectives:
        return CommunicationTexts()
    call_text = f"{sharded.call.op}({', '.join(map(repr, sharded.specs))})"
    reason = call_text if has_collectives else ""
    if is_allowed:
        return CommunicationTexts(reason)
    needs = _needs(sharded, moves)
    notice = notice_of(call_text, needs, scope) if needs else ""
    watched = "" if sharded.sharding.communicating else call_text
    return CommunicationTexts(reason, notice, watched)


def _needs(sharded: ShardedCall, moves: Sequence[InputMove]) -> list[str]:
    """Describe everything that a call communicates, one line each.

    These are the plans of its inputs, and the collectives of its local function along mesh axes.
    """
    plans = [(move.position, move.plan) for move in moves]
    plans += [(move.position, move.write_back) for move in moves if move.write_back]
    needs = []
    for i, plan_of_input in plans:
        if plan_of_input.collectives:
            ends = f"{plan_of_input.src!r} -> {plan_of_input.dst!r}"
            needs.append(f"  input {i}: {ends}\n{plan_of_input}")
    mesh = sharded.specs[0].mesh
    axes = [axis for axis in sharded.sharding.communicating if mesh.shape[axis] > 1]
    if axes:
        names = ", ".join(repr(mesh.axis_names[axis]) for axis in axes)
        needs.append(f"  collectives of its local function along {names}")
    return needs
