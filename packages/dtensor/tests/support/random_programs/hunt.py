"""Hunt for failing programs on ranks, which are then shrunk: `python -m random_programs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shoal_dtensor.testing import on_threads, thread_meshes
from shoal_mesh.errors import DeadlockError, LockstepError, RankError
from shoal_mesh.testing import rank_pool

from .compose import compose, holds
from .program import Program, run_many, run_one

__all__ = ["Finding", "hunt", "on_one", "on_ranks", "shrink"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A program that does not do on a mesh what it does on one device."""

    seed: int
    program: Program
    outcome: str

    def __str__(self) -> str:
        return f"program {self.seed}: {self.outcome}\n{self.program.script()}"


def on_one(programs: Sequence[Program]) -> list[str]:
    """What became of each program on ranks that are threads of this process.

    "" is well, see `run_one`.

    Programs that change settings of the process run on ranks that are processes.
    """
    found = []
    for program in programs:
        if program.changes_settings:
            found += on_ranks([program], 60.0)
            continue
        meshes = thread_meshes(program.mesh)
        try:
            found.append(
                _verdict(
                    on_threads(
                        [partial(_on_thread, program, mesh) for mesh in meshes], meshes, seed=7
                    )
                )
            )
        except (DeadlockError, LockstepError) as error:
            found.append(f"hang: {error!r}")
    return found


def _on_thread(program: Program, mesh: Any) -> str:
    with torch.enable_grad():
        return run_one(program, mesh)


def on_ranks(programs: Sequence[Program], timeout: float = 240.0) -> list[str]:
    """The same on four ranks of the pool; seconds until they count as hung."""
    try:
        ranks = rank_pool(4).run(run_many, list(programs), timeout=timeout)
    except RankError as error:
        if len(programs) == 1:
            return [f"hang: {str(error)[-3000:]}"]
        return [found for program in programs for found in on_ranks([program], 60.0)]
    return [_verdict(answers) for answers in zip(*ranks, strict=True)]


def _verdict(answers: Sequence[str]) -> str:
    """What the ranks say of one program: the same, or whose complaint comes first."""
    if len({*answers}) == 1:
        return answers[0]
    return next(f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if answer)


def kind(found: str) -> str:
    """What two failures of one cause have in common; a refusal on some ranks only is an error."""
    if found.startswith("refused"):
        return "refused"
    return next(
        (word for word in ("hang", "wrong", "error", "refused") if f"{word}: " in found), ""
    )


def shrink(program: Program, found: str) -> tuple[Program, str]:
    """The program without the lines that its failure does not need, and what it says then."""
    i = len(program.lines)
    while i > 0:
        i -= 1
        fewer = Program(program.mesh, (*program.lines[:i], *program.lines[i + 1 :]))
        if not holds(fewer):
            continue
        (now,) = on_one([fewer])
        if kind(now) == kind(found):
            program, found = fewer, now
            i = min(i, len(program.lines))
    return program, found


def hunt(
    seeds: Sequence[int], *, refusals: bool = False, shrinking: bool = True
) -> Iterator[Finding]:
    """The programs among these seeds that fail on threads, shrunk.

    Args:
        seeds: numbers of programs.
        refusals: whether typed errors count too.
        shrinking: whether to shrink them.
    """
    for seed in seeds:
        program = compose(seed)
        (found,) = on_one([program])
        if kind(found) and (refusals or kind(found) != "refused"):
            yield Finding(seed, *(shrink(program, found) if shrinking else (program, found)))
