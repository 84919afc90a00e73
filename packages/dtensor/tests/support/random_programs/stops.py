"""Programs in which one rank raises or returns in the middle: no other waits for it in vain."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist

from shoal_mesh import init_device_mesh
from shoal_mesh.errors import PeerError, RankError
from shoal_mesh.testing import rank_pool

from .program import Machine, Program

__all__ = ["Stop", "draw_stop", "run_until_stop", "verdict_of_stop"]

RANKS = 4
REASON = "this rank stops in the middle"
# in the error of ranks that `launch` ends, because they wait for ranks that have returned
NOTICED = "waited in a collective for ranks that had"


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a program ends on one rank.

    Attributes:
        rank: the rank.
        line: how many lines it runs.
        raises: whether it raises an error then; otherwise it returns.
    """

    rank: int
    line: int
    raises: bool


def draw_stop(program: Program, seed: int) -> Stop:
    """Draw the rank, the line and the form of a stop."""
    random = Random(seed)
    line = random.randrange(len(program.lines))
    return Stop(random.randrange(RANKS), line, raises=random.random() < 0.5)


def run_until_stop(program: Program, stop: Stop) -> None:
    """Run a program on this rank, up to the stop if it is the rank that stops."""
    is_stopping = dist.get_rank() == stop.rank
    machine = Machine(init_device_mesh("cpu", program.mesh))
    torch.manual_seed(7)
    machine.run(program.lines[: stop.line] if is_stopping else program.lines)
    if not is_stopping:
        outcome = machine.backward()
        if PeerError.__name__ in outcome:
            # The pool ends its ranks then: the next program would be on a group that has failed.
            raise RuntimeError(outcome)
    elif stop.raises:
        raise ValueError(REASON)


def verdict_of_stop(program: Program, stop: Stop, timeout: float = 60.0) -> str:
    """Return how other ranks wait in vain, or an error does not give the reason; "" if all is well.

    The time is long because new ranks on a busy machine import modules for many seconds. Ranks that
    wait for the rank that has stopped are ended seconds after it. So are ranks that are still at
    work when another one has raised an error, which is no hang: the error has the reason.
    """
    try:
        rank_pool(RANKS).run(run_until_stop, program, stop, timeout=timeout)
    except RankError as error:
        if error.hung and NOTICED not in str(error) and not error.failures:
            return f"hang: ranks {error.hung} wait: {str(error)[-2000:]}"
        if stop.raises and REASON not in str(error):
            return f"wrong: the error does not give the reason: {str(error)[-2000:]}"
        if stop.raises and stop.rank not in error.failures:
            return f"wrong: the rank that raised is not named: {str(error)[-2000:]}"
        return ""
    return "wrong: the error of a rank was lost" if stop.raises else ""
