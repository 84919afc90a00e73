"""Hunt for failing programs: runs them on ranks, shrinks failures, and counts outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from integration_tests.case_runner import kind, run_cases, signature
from integration_tests.random_modules.compose import compose
from integration_tests.random_modules.edges import with_edges
from integration_tests.random_modules.program import Program
from integration_tests.random_modules.verdict import verdict

__all__ = ["hunt", "on_ranks", "shrink"]

PLAIN = "torch.optim.SGD(groups, lr=0.01)"


def on_ranks(programs: Sequence[Program], patience: float = 30.0) -> list[str]:
    """What became of each program on four ranks of the pool (see `verdict` and `run_cases`)."""
    return run_cases(verdict, programs, patience)


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with something less: much at first."""
    plain = replace(program, features=(), steps=1, optimizer=PLAIN)
    yield from [plain] if plain != program else []
    if len(program.blocks) > 1:
        yield from (_without_block(program, i) for i in range(len(program.blocks)))
    for i in range(len(program.features)):
        yield replace(program, features=program.features[:i] + program.features[i + 1 :])
    if program.steps > 1:
        yield replace(program, steps=1)
    if program.sizes[3]:
        layouts = [
            (n, x)
            for n, x in program.layouts
            if n.partition(".")[0] not in ("embed", "head", "input", "target")
        ]
        yield replace(program, sizes=(*program.sizes[:3], 0), layouts=tuple(layouts))
    if program.optimizer != PLAIN:
        yield replace(program, optimizer=PLAIN)
    for i in range(len(program.layouts)):
        yield replace(program, layouts=program.layouts[:i] + program.layouts[i + 1 :])


def _without_block(program: Program, index: int) -> Program:
    """The program without a block; later ones move up."""
    layouts = []
    for name, text in program.layouts:
        number, _, rest = name.removeprefix("blocks.").partition(".")
        if not name.startswith("blocks."):
            layouts.append((name, text))
        elif int(number) != index:
            layouts.append(
                (f"blocks.{int(number) - (int(number) > index)}{'.' + rest if rest else ''}", text)
            )
    blocks = program.blocks[:index] + program.blocks[index + 1 :]
    return replace(program, blocks=blocks, layouts=tuple(layouts))


def shrink(program: Program, outcome: str, patience: float = 10.0) -> tuple[Program, str]:
    """The program without what its failure does not need, and what it says then."""
    going = True
    while going:
        going = False
        for fewer in _simpler(program):
            (now,) = on_ranks([fewer], patience)
            if kind(now) == kind(outcome) and (
                kind(now) != "error" or signature(now) == signature(outcome)
            ):
                program, outcome, going = fewer, now, True
                break
    return program, outcome


def hunt(seeds: Sequence[int], patience: float = 30.0) -> Iterator[tuple[int, Program, str]]:
    """Programs by number, with what became of them."""
    programs = [with_edges(compose(seed)) for seed in seeds]
    yield from zip(seeds, programs, on_ranks(programs, patience), strict=True)
