"""Trainings in which one rank raises or returns in the middle: the others end in a typed error."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch.distributed as dist
from integration_tests.case_runner import run_cases
from integration_tests.random_training.compose import Program
from integration_tests.random_training.train import TYPED, Training, mesh_of, verdict

from shoal_mesh.errors import CollectiveError, RankError
from shoal_mesh.testing import rank_pool

__all__ = ["Stop", "draw_stop", "verdict_of_stop"]

RANKS = 4
REASON = "this rank stops in the middle"
# in the error of ranks that `launch` ends, because they wait for ranks that have returned
NOTICED = "waited in a collective for ranks that had"
UNTYPED = "untyped: "
# seconds from the stop until no rank waits
LIMIT = 20.0
PLACES = ("forward", "backward", "gradients", "save")


class Returned(Exception):
    """The end of the rank that returns in the middle."""


@dataclass(frozen=True)
class Stop:
    """Where a training ends on one rank.

    Attributes:
        rank: the rank.
        batch: the microbatch.
        place: in its forward, in its backward, after its backward, or instead of the save
            of a resume.
        block: the block in whose forward or backward it ends.
        raises: whether the rank raises an error then; otherwise it returns.
    """

    rank: int
    batch: int
    place: str
    block: int
    raises: bool


def draw_stop(program: Program) -> Stop:
    """Draw the rank, the place and the form of a stop."""
    random = Random(f"stop {program.seed}")
    places = PLACES if program.resume is not None else PLACES[:-1]
    return Stop(
        random.randrange(RANKS),
        random.randrange(sum(map(len, program.steps))),
        random.choice(places),
        random.randrange(len(program.blocks)),
        random.random() < 0.5,
    )


class _StoppedTraining(Training):
    """A training that ends at a stop."""

    def __init__(self, program: Program, stop: Stop) -> None:
        super().__init__(program, mesh_of(program))
        self.stop = stop

    def end(self, *_: object) -> None:
        """End this rank."""
        if self.stop.raises:
            raise ValueError(REASON)
        raise Returned

    def backward(self, number: int, events: Sequence[str]) -> None:
        is_reached = number == self.stop.batch
        norm = self.model.blocks[self.stop.block].norm
        if is_reached and self.stop.place == "forward":
            norm.register_forward_hook(self.end)
        if is_reached and self.stop.place == "backward":
            norm.register_full_backward_pre_hook(self.end)
        super().backward(number, events)
        if is_reached and self.stop.place == "gradients":
            self.end()

    def save(self, folder: str, step: int, optimizer: Any) -> None:
        if self.stop.place == "save":
            self.end()
        super().save(folder, step, optimizer)


def run_until_stop(program: Program, stop: Stop) -> None:
    """Train on this rank, up to the stop if it is the rank that stops."""
    if dist.get_rank() != stop.rank:
        try:
            Training(program, mesh_of(program)).run()
        except Exception as failed:
            if isinstance(failed, (*TYPED, CollectiveError)):
                raise
            raise AssertionError(f"{UNTYPED}{failed!r}") from failed
        return
    try:
        _StoppedTraining(program, stop).run()
    except Returned:
        return


def verdict_of_stop(program: Program, stop: Stop) -> str:
    """Return how other ranks wait in vain, or an error does not give the reason; "" if all is well.

    A program that is not right without a stop keeps that outcome: only one that a single device
    does not run either is void.
    """
    (ordinary,) = run_cases(verdict, [program])
    if ordinary:
        return ordinary
    began = time.perf_counter()
    outcome = outcome_of_stop(program, stop)
    seconds = time.perf_counter() - began
    if seconds > LIMIT and not outcome:
        return f"hang: ranks waited for {seconds:.0f} s"
    return outcome


def outcome_of_stop(program: Program, stop: Stop) -> str:
    """Run a program up to a stop; return the outcome."""
    try:
        rank_pool(RANKS).run(run_until_stop, program, stop, timeout=60.0)
    except RankError as error:
        text = str(error)
        if error.hung and NOTICED not in text and not error.failures:
            return f"hang: ranks {error.hung} wait: {text[-2000:]}"
        if stop.raises and REASON not in text:
            return f"wrong: the error does not give the reason: {text[-2000:]}"
        if stop.raises and stop.rank not in error.failures:
            return f"wrong: the rank that raised is not named: {text[-2000:]}"
        if UNTYPED in text:
            return f"error: a rank that waited ends in an untyped error: {text[-2000:]}"
        return ""
    return "wrong: the error of a rank was lost" if stop.raises else ""
