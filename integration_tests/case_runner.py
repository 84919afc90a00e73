"""Runner of many cases on the ranks of a pool, in step.

A case that hangs or ends a rank does not affect other cases.

A case is a picklable value; a verdict is one rank's text about it: empty if right, else `kind:
...`.
"""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from integration_tests.op_cases import in_step

from shoal_mesh.errors import PeerError, RankError
from shoal_mesh.testing import rank_pool

__all__ = ["kind", "run_cases", "signature"]

RANKS = 4


def run_cases(
    verdict: Callable[[Any], str], cases: Sequence[Any], patience: float = 30.0, ranks: int = RANKS
) -> list[str]:
    """What became of each case on ranks of the pool, four when left out.

    Beyond what one rank says: `disagreement: ...` where the ranks say different things, or some are
    still at work when others are done; `hang: ...` where none is done after `patience` seconds.
    """
    found: list[str] = []
    while len(found) < len(cases):
        with tempfile.TemporaryDirectory() as folder:
            text = ""
            try:
                rank_pool(ranks).run(
                    _run_many, verdict, list(cases[len(found) :]), folder, patience, timeout=None
                )
            except RankError as error:
                text = "" if _Torn.__name__ in str(error) else str(error)
                if (
                    text
                    and "OutOfStep" not in text
                    and not re.search(r"the process of rank .* ended", text)
                ):
                    raise
            files = [Path(folder) / f"rank{rank}" for rank in range(ranks)]
            said = [
                [json.loads(line) for line in f.read_text().splitlines()] if f.exists() else []
                for f in files
            ]
        found += [_agreed(answers) for answers in zip(*said, strict=False)]
        if text:
            found.append(_broken([answers[min(map(len, said)) :] for answers in said], text))
    return found[: len(cases)]


class _Torn(RuntimeError):
    """A case has torn the ranks' communicators, which the next one is not to get."""


def _run_many(
    verdict: Callable[[Any], str], cases: Sequence[Any], folder: str, patience: float
) -> None:
    """One rank's part: a line of JSON for each case as soon as it is done."""
    # optimizers import it at their first use, which takes seconds
    importlib.import_module("torch._dynamo")
    with open(f"{folder}/rank{torch.distributed.get_rank()}", "w") as done:
        for case in cases:
            with in_step(patience):
                said = verdict(case)
                print(json.dumps(said), file=done, flush=True)
            if PeerError.__name__ in said:
                raise _Torn


def _agreed(answers: Sequence[str]) -> str:
    """What the ranks say of one case."""
    kinds = {
        ": ".join(answer.split(": ")[: 2 if kind(answer) == "refused" else 1]) for answer in answers
    }
    torn = any("gloo/transport" in answer for answer in answers)  # messages of different sizes met
    if kinds <= {"", "wrong"}:  # some ranks hold right values
        return max(answers, key=len)
    if len(kinds) == 1 and not torn:
        return answers[0]
    return "disagreement: " + "; ".join(
        f"rank {rank}: {answer[:300] or 'right'}" for rank, answer in enumerate(answers)
    )


def _broken(said: Sequence[Sequence[str]], text: str) -> str:
    """What became of a case at which the ranks stopped."""
    calls = re.findall(r'File "\S*/(shoal_\w+/\S+)", line (\d+) in (\w+)', text)
    where = (
        "; ".join(dict.fromkeys(f"{file}:{line} {name}" for file, line, name in calls[:40]))
        or text[-600:]
    )
    if any(said):
        answers = "; ".join(
            f"rank {rank}: {each[0][:300] or 'right'}" for rank, each in enumerate(said) if each
        )
        return f"disagreement: {answers}; others were still at work: {where}"
    return f"hang: {where}"


def kind(outcome: str) -> str:
    """The class of an outcome: empty if right."""
    return outcome.partition(":")[0]


def signature(outcome: str) -> str:
    """What outcomes of one cause have in common: kind, type, stage and words."""
    text = re.sub(r"(rank \d: |blocks|[\[(].*?[\])]|['\"].*?['\"]|[\d.,]+)", "", outcome)
    return " ".join(text.split()[:9])
