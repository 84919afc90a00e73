"""Programs that stop before a random step, and go on in new processes on another mesh."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch.distributed as dist
from integration_tests.case_runner import run_cases
from integration_tests.random_training.compose import Program, compose
from integration_tests.random_training.train import Training, difference, mesh_of, text_of

from shoal_mesh.testing import rank_pool

__all__ = ["FreshResume", "draw_fresh_resume", "verdicts_of_fresh_resumes"]

# of four ranks, or of two that take over
MESHES = ((2, 2), (4, 1), (1, 4), (2, 1), (1, 2))


@dataclass(frozen=True)
class FreshResume:
    """A program whose second part runs in new processes.

    Attributes:
        program: the training, on the first mesh.
        step: the first step of the new processes.
        mesh: the sizes of their mesh.
        folder: where the first processes save.
    """

    program: Program
    step: int
    mesh: tuple[int, int]
    folder: str = ""

    @property
    def ranks(self) -> int:
        """The number of the new processes."""
        return self.mesh[0] * self.mesh[1]


def draw_fresh_resume(seed: int) -> FreshResume:
    """The program of a number, with a step and a mesh of the new processes."""
    program = replace(compose(seed), resume=None)
    random = Random(f"fresh {seed}")
    # a program of one step has one more, in the new processes
    if len(program.steps) == 1:
        program = replace(
            program,
            steps=program.steps * 2,
            events=program.events * 2,
            uses=program.uses * 2,
            entering=program.entering * 2,
        )
    mesh = random.choice(MESHES)
    if program.placed and mesh[1] == 4 and program.width % 4:
        mesh = (2, 2)
    return FreshResume(program, random.randrange(1, len(program.steps)), mesh)


def verdicts_of_fresh_resumes(resumes: Sequence[FreshResume]) -> list[str]:
    """What became of each program; the second parts run on pools that are started for them."""
    root = Path(tempfile.mkdtemp())
    cases = [replace(each, folder=str(root / str(i))) for i, each in enumerate(resumes)]
    found = run_cases(verdict_of_start, cases)
    for ranks in (4, 2):
        rank_pool(ranks).close()
        going_on = [i for i, case in enumerate(cases) if not found[i] and case.ranks == ranks]
        ends = run_cases(verdict_of_end, [cases[i] for i in going_on], ranks=ranks)
        for i, outcome in zip(going_on, ends, strict=True):
            found[i] = outcome
    shutil.rmtree(root)
    return found


def verdict_of_start(resume: FreshResume) -> str:
    """Train up to the resume and save; the outcome of this rank (`verdict`)."""
    expected = Training(resume.program, None)
    try:
        expected.run()
    except Exception as failed:
        return f"void: {type(failed).__name__}: {str(failed)[:200]}"
    got = Training(resume.program, mesh_of(resume.program))
    try:
        optimizer = got.train(got.build(), 0, resume.step)
        got.save(resume.folder, resume.step, optimizer)
        trained = [p.requires_grad for p in got.model.parameters()]
        if dist.get_rank() == 0:
            Path(resume.folder, "trained.json").write_text(json.dumps(trained))
        dist.barrier()
        return difference(expected.seen[: len(got.seen)], got.seen)
    except Exception as failed:
        return text_of(failed, got.stage)


def verdict_of_end(resume: FreshResume) -> str:
    """Load what was saved and train to the end; the outcome of this rank (`verdict`)."""
    program = replace(resume.program, mesh=resume.mesh)
    expected = _Continued(program, resume.program, resume.step)
    expected.run()
    got = Training(program, mesh_of(program))
    try:
        trained = json.loads(Path(resume.folder, "trained.json").read_text())
        optimizer = got.load(resume.folder, trained)
        got.train(optimizer, resume.step, len(program.steps))
        return difference(expected.seen, got.seen)
    except Exception as failed:
        return text_of(failed, got.stage)


class _Continued(Training):
    """The training on one device; a batch has the parts of the second mesh from a step on."""

    def __init__(self, program: Program, before: Program, step: int) -> None:
        super().__init__(before, None)
        self.after, self.first = program, step

    def run(self) -> None:
        optimizer = self.train(self.build(), 0, self.first)
        self.program = self.after
        # a new process does not have gradients yet
        self.model.zero_grad()
        self.seen.clear()
        self.train(optimizer, self.first, len(self.program.steps))
