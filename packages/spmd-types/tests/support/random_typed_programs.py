"""Random typed programs: those that pass the checker must compute the result of one process.

`python random_typed_programs.py --programs 2000 --seed 0` generates typed programs, runs each on
simulated ranks and in one process, and compares losses and gradients. Then it plants one fault in
each program; the checker must reject the program, or the result must be right all the same.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal_dtensor.errors import ArgumentValueError, SpmdTypeError
from shoal_dtensor.internal import spmd
from shoal_dtensor.testing import simulate_ranks
from shoal_mesh import DeviceMesh, MeshError, abstract_mesh
from shoal_spmd_types import (
    I,
    P,
    PartitionSpec,
    R,
    Shard,
    all_gather,
    all_reduce,
    all_to_all,
    assert_type,
    convert,
    reduce_scatter,
    set_current_mesh,
    typecheck,
)

AXES = ("a", "b")
MESHES = ((2,), (3,), (2, 2))
# multiples of 12, so that shards of up to two axes and of three ranks are even
SIZES = (12, 12, 24)
STEPS = 9
# tolerance for sums in another order, in float64
TOLERANCE = 1e-9
KINDS = ("left out", "wrong destination", "R for I", "partial multiplied", "axis", "dim")


class Input(NamedTuple):
    """An input of a program: its global shape and its type by axis."""

    shape: tuple[int, ...]
    types: dict[str, Any]


@dataclass(frozen=True)
class Instruction:
    """An operator on earlier values, or a move of one along an axis.

    Attributes:
        name: the name of the operator or of the move.
        operands: positions of earlier values.
        number: a dim or another parameter of the operator.
        axis: the axis of a move.
        src: its source type.
        dst: its destination type.
    """

    name: str
    operands: tuple[int, ...]
    number: int = 0
    axis: str = ""
    src: Any = None
    dst: Any = None


@dataclass(frozen=True)
class Program:
    """Inputs, instructions, and the positions of the values whose sum is the loss."""

    shape: tuple[int, ...]
    inputs: tuple[Input, ...]
    instructions: tuple[Instruction, ...] = ()
    results: tuple[int, ...] = field(default=())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes."""
        return AXES[: len(self.shape)]


def part_of_joined(dim: int, x: Tensor, y: Tensor) -> Tensor:
    """Return the first or the last part of an operator's result on two joined tensors."""
    at = dim % max(x.ndim, 1)
    joined_tensors = torch.cat([x, y], at).transpose(at, -1).tanh()
    return torch.split(joined_tensors, [x.shape[at], y.shape[at]], -1)[dim % 2]


# Operators on tensors, whose arguments do not depend on the number of ranks.
OPERATORS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "add": (2, lambda _, x, y: x + y),
    "subtract": (2, lambda _, x, y: x - y),
    "multiply": (2, lambda _, x, y: x * y),
    "matmul": (2, lambda _, x, y: x @ y / 8),
    "matmul_t": (2, lambda _, x, y: x @ y.transpose(-1, -2) / 8),
    "maximum": (2, lambda _, x, y: torch.maximum(x, y)),
    "where": (2, lambda _, x, y: torch.where(x > 0, x, y)),
    "concatenate": (2, lambda dim, x, y: torch.cat([x, y], dim % max(x.ndim, 1))),
    "joined": (2, lambda dim, x, y: part_of_joined(dim, x, y)),
    "stack": (2, lambda dim, x, y: torch.stack([x, y], dim % (x.ndim + 1))),
    "relu": (1, lambda _, x: x.relu()),
    "tanh": (1, lambda _, x: x.tanh()),
    "negate": (1, lambda _, x: -x),
    "scale": (1, lambda _, x: x * 0.75),
    "offset": (1, lambda _, x: x + 0.5),
    "square": (1, lambda _, x: x * x / 4),
    "sum": (1, lambda dim, x: x.sum(dim % x.ndim) / 8),
    "sum_kept": (1, lambda dim, x: x.sum(dim % x.ndim, keepdim=True) / 8),
    "total": (1, lambda _, x: x.sum() / 32),
    "mean": (1, lambda dim, x: x.mean(dim % x.ndim)),
    "largest": (1, lambda dim, x: x.amax(dim % x.ndim)),
    "softmax": (1, lambda dim, x: x.softmax(dim % x.ndim)),
    "cumulative": (1, lambda dim, x: x.cumsum(dim % x.ndim) / 8),
    "transpose": (1, lambda dim, x: x.transpose(dim % x.ndim, -1)),
    "unsqueeze": (1, lambda dim, x: x.unsqueeze(dim % (x.ndim + 1))),
    "flatten": (1, lambda dim, x: x.flatten(dim % (x.ndim - 1), dim % (x.ndim - 1) + 1)),
    "unflatten": (1, lambda dim, x: x.unflatten(dim % x.ndim, (-1, 6))),
    "unflatten_outer": (1, lambda dim, x: x.unflatten(dim % x.ndim, (2, -1))),
    "flip": (1, lambda dim, x: x.flip(dim % x.ndim)),
    "first_half": (1, lambda dim, x: x.chunk(2, dim % x.ndim)[0]),
    "select": (1, lambda dim, x: x.select(dim % x.ndim, 1)),
    "layer_norm": (1, lambda _, x: torch.nn.functional.layer_norm(x, x.shape[-1:])),
    "norm": (1, lambda dim, x: x.square().sum(dim % x.ndim).add(1).sqrt()),
    "copy": (1, lambda _, x: x.clone()),
    "write": (2, lambda _, x, y: x.clone().mul_(y)),
}
MOVES: dict[str, Callable[..., Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "convert": lambda x, axis, **types: convert(x, axis, expert_mode=True, **types),
}
REFUSALS = (
    SpmdTypeError,
    ArgumentValueError,
    RuntimeError,
    IndexError,
    MeshError,
    ValueError,
    ZeroDivisionError,
)


# --- running --------------------------------------------------------------------------------------


def run(program: Program, inputs: Sequence[Tensor], *, moves: bool) -> Tensor:
    """Return the loss of a program on local or, without moves, on global tensors."""
    values = [*inputs]
    for instruction in program.instructions:
        values.append(run_one(instruction, values, moves=moves))
    loss = values[program.results[0]].sum() * 0
    for position in program.results:
        value = values[position]
        count = torch.arange(value.numel(), dtype=torch.float64, device=value.device)
        loss = loss + (value * count.cos().view(value.shape)).sum()
    return loss


def run_one(instruction: Instruction, values: Sequence[Tensor], *, moves: bool) -> Tensor:
    """Return the value of one instruction."""
    operands = [values[position] for position in instruction.operands]
    if instruction.name in OPERATORS:
        return OPERATORS[instruction.name][1](instruction.number, *operands)
    if not moves or instruction.name == "nothing":
        return operands[0]
    function = MOVES[instruction.name]
    return function(operands[0], instruction.axis, src=instruction.src, dst=instruction.dst)


def written_type(types: dict[str, Any], ndim: int) -> tuple[dict[str, Any], PartitionSpec]:
    """Return types by axis and a partition spec, as `assert_type` takes them."""
    local = {axis: kind for axis, kind in types.items() if not isinstance(kind, Shard)}
    by_dim: list[tuple[str, ...]] = [() for _ in range(ndim)]
    for axis, kind in types.items():
        if isinstance(kind, Shard):
            by_dim[kind.dim] += (axis,)
    return local, PartitionSpec(*[axes or None for axes in by_dim])


def local_shape(one: Input, sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the shape of a rank's part of an input."""
    shape = [*one.shape]
    for axis, kind in one.types.items():
        if isinstance(kind, Shard):
            shape[kind.dim] //= sizes[axis]
    return tuple(shape)


def typed_inputs(program: Program) -> list[Tensor]:
    """Return typed inputs without memory, inside of `typecheck`."""
    sizes = dict(zip(program.names, program.shape, strict=True))
    found = []
    for one in program.inputs:
        shape = local_shape(one, sizes)
        tensor = torch.empty(shape, dtype=torch.float64, device="meta", requires_grad=True)
        assert_type(tensor, *written_type(one.types, len(shape)))
        found.append(tensor)
    return found


def check(program: Program) -> str:
    """Return the error of the checker; empty if the program passes."""
    mesh = abstract_mesh(program.shape, program.names)
    try:
        with set_current_mesh(mesh), typecheck(local=False):
            loss = run(program, typed_inputs(program), moves=True)
            assert_type(loss, I)
    except REFUSALS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def global_values(program: Program, seed: int) -> list[Tensor]:
    """Return the values of the inputs in one process."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in program.inputs
    ]


def part_of(
    value: Tensor, types: dict[str, Any], sizes: Sequence[int], at: Sequence[int]
) -> Tensor:
    """Return a rank's part of a value; the parts of P add up to it."""
    part = value
    for kind, size, position in zip(types.values(), sizes, at, strict=True):
        if isinstance(kind, Shard):
            part = part.chunk(size, kind.dim)[position]
        elif kind is P:
            part = part * (2 - size if position == 0 else 1)
    return part.clone()


def joined(parts: dict[tuple[int, ...], Tensor], types: Sequence[Any]) -> Tensor | str:
    """Return the tensor that ranks have parts of; a text if ranks that must agree do not."""
    for position in reversed(range(len(types))):
        kind = types[position]
        lines: dict[tuple[int, ...], list[Tensor]] = {}
        for at in sorted(parts):
            lines.setdefault(at[:position], []).append(parts[at])
        after = {}
        for at, line in lines.items():
            if isinstance(kind, Shard):
                after[at] = torch.cat(line, kind.dim)
            elif kind is P:
                after[at] = torch.stack(line).sum(0)
            else:
                if not all(is_close(line[0], other) for other in line):
                    return f"ranks differ along axis {position}, where the type is {kind}"
                after[at] = line[0]
        parts = after
    return parts[()]


def is_close(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors agree up to the order of sums."""
    same = one.shape == other.shape
    return same and torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def compare(program: Program, seed: int) -> str:
    """Run a program on simulated ranks and in one process; return the difference, or nothing."""
    values = global_values(program, seed)
    whole = [value.clone().requires_grad_() for value in values]
    expected = run(program, whole, moves=False)
    expected.backward()  # type: ignore[no-untyped-call]  # of torch

    def on_rank(mesh: DeviceMesh) -> tuple[Tensor, list[Tensor]]:
        at = mesh.get_coordinate() or ()
        parts = []
        for value, one in zip(values, program.inputs, strict=True):
            parts.append(part_of(value, one.types, program.shape, at).requires_grad_())
        with set_current_mesh(mesh), torch.enable_grad():
            loss = run(program, parts, moves=True)
            loss.backward()  # type: ignore[no-untyped-call]  # of torch
        zeros = [part.new_zeros(part.shape) for part in parts]
        grads = [
            zero if part.grad is None else part.grad
            for part, zero in zip(parts, zeros, strict=True)
        ]
        return loss.detach(), grads

    results = simulate_ranks(abstract_mesh(program.shape, program.names), on_rank)
    places = [*product(*map(range, program.shape))]
    for loss, _ in results:
        if not is_close(loss, expected.detach()):
            return f"loss {loss.item()}, in one process {expected.item()}"
    for index, (one, value) in enumerate(zip(program.inputs, whole, strict=True)):
        parts = {at: grads[index] for at, (_, grads) in zip(places, results, strict=True)}
        found = joined(parts, [kind.backward_type() for kind in one.types.values()])
        wanted = torch.zeros_like(value) if value.grad is None else value.grad
        if isinstance(found, str):
            return f"gradient of input {index}: {found}"
        if not is_close(found, wanted):
            return f"gradient of input {index} ({one.types}) differs from one process"
    return ""


# --- generation -----------------------------------------------------------------------------------


def draw_program(draw: random.Random) -> Program | None:
    """Return a random program that passes the checker step by step; None if the draw fails."""
    shape = draw.choice(MESHES)
    program = Program(shape, tuple([_draw_input(draw, AXES[: len(shape)]) for _ in range(3)]))
    mesh = abstract_mesh(program.shape, program.names)
    with set_current_mesh(mesh), typecheck(local=False):
        values = typed_inputs(program)
        instructions: list[Instruction] = []
        for _ in range(STEPS * 4):
            if len(instructions) >= STEPS:
                break
            instruction = _draw_instruction(draw, program.names, values)
            if instruction is None or not _append(instruction, instructions, values):
                continue
        results = _finish(draw, program.names, instructions, values)
    if not results:
        return None
    return replace(program, instructions=tuple(instructions), results=tuple(results))


def _draw_input(draw: random.Random, names: Sequence[str]) -> Input:
    shape = tuple([draw.choice(SIZES) for _ in range(draw.choice((1, 2, 2, 2, 3)))])
    kinds = [R, R, I, P, *[Shard(dim) for dim in range(len(shape))] * 2]
    return Input(shape, {axis: draw.choice(kinds) for axis in names})


def _append(
    instruction: Instruction, instructions: list[Instruction], values: list[Tensor]
) -> bool:
    """Run an instruction under the checker, and keep it if it passes."""
    try:
        value = run_one(instruction, values, moves=True)
    except REFUSALS:
        return False
    if value.numel() > 24**3 or value.numel() == 0 or not _types(value):
        return False
    instructions.append(instruction)
    values.append(value)
    return True


def _types(value: Tensor) -> dict[str, Any]:
    """Return the types of a value by the names of axes; nothing for types that cannot be moved."""
    found = spmd.type_of(value)
    if found is None:
        return {}
    named = {repr(axis): kind for axis, kind in found.by_axis.items()}
    movable = all(kind in (R, I, P) or isinstance(kind, Shard) for kind in named.values())
    return named if movable else {}


def _draw_instruction(
    draw: random.Random, names: Sequence[str], values: Sequence[Tensor]
) -> Instruction | None:
    # later values are drawn more often
    position = max(draw.randrange(len(values)), draw.randrange(len(values)))
    if draw.random() < 0.35:
        return _draw_move(draw, names, values, position)
    name = draw.choice([*OPERATORS])
    count, _ = OPERATORS[name]
    if count == 1:
        return Instruction(name, (position,), draw.randrange(3))
    shape = values[position].shape
    alike = [index for index, value in enumerate(values) if {*value.shape} <= {*shape}]
    return Instruction(name, (position, draw.choice(alike)), draw.randrange(3))


def _draw_move(
    draw: random.Random, names: Sequence[str], values: Sequence[Tensor], position: int
) -> Instruction | None:
    axis = draw.choice(names)
    src = _types(values[position]).get(axis)
    dims = [Shard(dim) for dim in range(values[position].ndim)]
    targets: list[tuple[str, Any]] = []
    if src is P:
        targets = [("all_reduce", R), ("all_reduce", I), *[("reduce_scatter", d) for d in dims]]
    elif isinstance(src, Shard):
        targets = [("all_gather", R), ("all_gather", I), ("convert", P)]
        targets += [("all_to_all", dim) for dim in dims if dim is not src]
    elif src in (R, I):
        other = I if src is R else R
        targets = [("convert", other), ("convert", P)]
        targets += [("convert", dim) for dim in dims]
    if not targets:
        return None
    name, dst = draw.choice(targets)
    return Instruction(name, (position,), axis=axis, src=src, dst=dst)


def _finish(
    draw: random.Random,
    names: Sequence[str],
    instructions: list[Instruction],
    values: list[Tensor],
) -> list[int]:
    """Move some of the last values to I on every axis, and return their positions."""
    results = []
    last = [*range(max(0, len(values) - 4), len(values))]
    for position in draw.sample(last, 2):
        current = position
        for _ in range(2 * len(names)):
            for axis in names:
                src = _types(values[current]).get(axis)
                if src is None or src is I:
                    continue
                name = {P: "all_reduce", R: "convert"}.get(src, "all_gather")
                move = Instruction(name, (current,), axis=axis, src=src, dst=I)
                if _append(move, instructions, values):
                    current = len(values) - 1
        if all(kind is I for kind in _types(values[current]).values()):
            results.append(current)
    return results


# --- faults ---------------------------------------------------------------------------------------


def plant_fault(program: Program, kind: str, draw: random.Random) -> Program | None:
    """Return a program with one fault of a kind; None if there is no place for it."""
    moves = [index for index, one in enumerate(program.instructions) if one.name in MOVES]
    if kind == "R for I":
        return _with_other_replication(program, draw)
    if not moves:
        return None
    index = draw.choice(moves)
    move = program.instructions[index]
    changed: Instruction | None = None
    if kind == "left out":
        changed = Instruction("nothing", move.operands)
    elif kind == "wrong destination":
        changed = replace(
            move, dst=draw.choice([one for one in (R, I, Shard(0)) if one != move.dst])
        )
    elif kind == "axis":
        others = [axis for axis in program.names if axis != move.axis]
        changed = replace(move, axis=draw.choice(others)) if others else None
    elif kind == "dim":
        changed = _with_other_dim(move)
    elif kind == "partial multiplied":
        return _with_square(program, draw)
    return None if changed is None else _replaced(program, index, changed)


def _replaced(program: Program, index: int, instruction: Instruction) -> Program:
    instructions = [*program.instructions]
    instructions[index] = instruction
    return replace(program, instructions=tuple(instructions))


def _with_other_replication(program: Program, draw: random.Random) -> Program | None:
    places = [
        (index, axis)
        for index, one in enumerate(program.inputs)
        for axis, kind in one.types.items()
        if kind in (R, I)
    ]
    if not places:
        return None
    index, axis = draw.choice(places)
    inputs = [*program.inputs]
    one = inputs[index]
    other = I if one.types[axis] is R else R
    inputs[index] = Input(one.shape, {**one.types, axis: other})
    return replace(program, inputs=tuple(inputs))


def _with_other_dim(move: Instruction) -> Instruction | None:
    if isinstance(move.dst, Shard):
        return replace(move, dst=_neighbor(move.dst))
    if isinstance(move.src, Shard):
        return replace(move, src=_neighbor(move.src))
    return None


def _neighbor(shard: Shard) -> Shard:
    """Return the shard of another dim."""
    return Shard(1) if shard.dim == 0 else Shard(shard.dim - 1)


def _with_square(program: Program, draw: random.Random) -> Program | None:
    """Square a partial value before it is reduced."""
    places = [
        index
        for index, one in enumerate(program.instructions)
        if one.name in ("all_reduce", "reduce_scatter")
    ]
    if not places:
        return None
    index = draw.choice(places)
    shift = len(program.inputs) + index
    square = Instruction("square", program.instructions[index].operands)
    moved = [_renumbered(one, shift) for one in program.instructions[index:]]
    moved[0] = replace(moved[0], operands=(shift,))
    instructions = (*program.instructions[:index], square, *moved)
    results = tuple([one + (one >= shift) for one in program.results])
    return replace(program, instructions=instructions, results=results)


def _renumbered(one: Instruction, shift: int) -> Instruction:
    return replace(one, operands=tuple([at + (at >= shift) for at in one.operands]))


# --- the trial ------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a trial of programs found.

    Attributes:
        programs: programs that passed the checker.
        wrong: programs that passed, and computed something else than one process.
        faults: programs with a planted fault.
        rejected: of these, how many the checker rejected, by kind.
        right_anyway: how many passed and were right.
        missed: programs with a fault that passed and were wrong.
        operators: how often each operator and move occurs in the programs that passed.
    """

    programs: int = 0
    wrong: list[str] = field(default_factory=list)
    faults: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    right_anyway: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)


def programs(seed: int) -> Iterator[Program]:
    """Yield random programs that pass the checker."""
    draw = random.Random(seed)
    while True:
        program = draw_program(draw)
        if program is not None and not check(program):
            yield program


def try_programs(count: int, seed: int) -> Outcome:
    """Run programs, and as many with a planted fault."""
    outcome = Outcome()
    draw = random.Random(seed + 1)
    for program in programs(seed):
        if outcome.programs >= count and outcome.faults >= count:
            return outcome
        if outcome.programs < count:
            outcome.programs += 1
            outcome.operators.update(one.name for one in program.instructions)
            difference = compare(program, seed)
            if difference:
                outcome.wrong.append(f"{difference}\n  {program}")
        if outcome.faults < count:
            _try_fault(program, draw, seed, outcome)
    return outcome


def _try_fault(program: Program, draw: random.Random, seed: int, outcome: Outcome) -> None:
    kind = draw.choice(KINDS)
    faulty = plant_fault(program, kind, draw)
    if faulty is None:
        return
    outcome.faults += 1
    if check(faulty):
        outcome.rejected[kind] += 1
        return
    try:
        difference = compare(faulty, seed)
    except REFUSALS as error:
        difference = f"{type(error).__name__}: {error}"
    if difference:
        outcome.missed.append(f"{kind}: {difference}\n  {faulty}")
    else:
        outcome.right_anyway[kind] += 1


def main() -> None:
    """Run the trial that the command line asks for, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcome = try_programs(options.programs, options.seed)
    print(f"{outcome.programs} programs passed, {len(outcome.wrong)} of them wrong")
    print(
        f"{outcome.faults} with a fault: {sum(outcome.rejected.values())} rejected "
        f"{dict(outcome.rejected)}, {sum(outcome.right_anyway.values())} passed and right "
        f"{dict(outcome.right_anyway)}, {len(outcome.missed)} passed and wrong"
    )
    print(dict(outcome.operators.most_common()))
    for text in [*outcome.wrong, *outcome.missed][:10]:
        print(text)
    raise SystemExit(1 if outcome.wrong or outcome.missed else 0)


if __name__ == "__main__":
    main()
