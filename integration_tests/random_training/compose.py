"""Random programs: a model, its placement, its wrappers, and the features of its training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

KINDS = ("mlp", "norm", "attention", "optional", "scaled", "shared", "inner")
PARALLEL = ("fully_shard", "hybrid", "replicate", "optimizer shards")
EVENTS = (
    "evaluate", "unshard", "fault", "copy", "state", "parameters", "twice", "keep zeros",
    "freeze", "double",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One training.

    Attributes:
        seed: of values.
        width: of the model; uneven over four ranks or even.
        blocks: their kinds; "tied" says whether the head has the embedding's weight.
        mesh: sizes of the data axis and the axis of styles; of two data axes for "hybrid".
        placed: how parameters are placed along the second axis: not, by styles, or as DTensors with
            these dims.
        entering: the placement of the rows along the second axis, for each microbatch.
        styles_first: whether styles come before data parallelism.
        parallel: what data parallelism; `units` numbers of blocks that are wrapped on their own;
            `options` of it.
        checkpoint: of blocks: "", "reentrant" or "plain".
        steps: microbatches of each step; True where the gradients of one are reduced.
        events: what happens besides, by step.
        uses: by microbatch and data rank, whether optional blocks are used.
        optimizer: its name; `clip` a norm, or 0.
        resume: the step before which a new model and a new optimizer load what was saved;
            `resume_mesh` the sizes of the mesh that they are on.
    """

    seed: int
    width: int
    blocks: tuple[str, ...]
    tied: bool
    mesh: tuple[int, int]
    placed: str
    dims: tuple[int | None, ...]
    entering: tuple[int | None, ...]
    styles_first: bool
    parallel: str
    units: tuple[int, ...]
    options: tuple[tuple[str, object], ...]
    checkpoint: str
    steps: tuple[tuple[bool, ...], ...]
    events: tuple[tuple[str, ...], ...]
    uses: tuple[tuple[bool, ...], ...]
    optimizer: str
    clip: float
    resume: int | None
    resume_mesh: tuple[int, int]


def compose(seed: int) -> Program:
    """The program of a number."""
    r = Random(seed)
    parallel = r.choice(PARALLEL)
    blocks = tuple(r.choice(KINDS) for _ in range(r.randint(1, 4)))
    mesh = (2, 2) if parallel == "hybrid" else r.choice(((4, 1), (2, 2), (2, 2)))
    placed = (
        ""
        if mesh[1] == 1 or parallel == "hybrid"
        else r.choice(("", "styles", "tensors", "tensors"))
    )
    options: list[tuple[str, object]] = []
    if parallel in ("fully_shard", "hybrid"):
        options += _some(
            r,
            (("reshard_after_forward", r.choice((True, False))), ("columns", True), ("wide", True)),
        )
        # numbers of a generator of their own leave the other choices of a seed as they were
        if parallel == "hybrid" and Random(f"optimizer {seed}").random() < 0.5:
            options.append(("shard_optimizer", True))
    else:
        options += _some(r, (("bucket_bytes", r.choice((1, 700))), ("wide", True)))
    steps = tuple(
        (*(r.random() < 0.4 for _ in range(r.randint(0, 2))), True) for _ in range(r.randint(1, 3))
    )
    batches = sum(map(len, steps))
    return Program(
        seed,
        r.choice((8, 8, 6)),
        blocks,
        r.random() < 0.3,
        mesh,
        placed,
        tuple(r.choice((None, None, 0, 1)) for _ in range(4)),
        tuple(r.choice((None, 0, 1, 2)) if placed == "tensors" else None for _ in range(batches)),
        r.random() < 0.7,
        parallel,
        tuple(i for i in range(len(blocks)) if r.random() < 0.6),
        tuple(options),
        r.choice(("", "", "reentrant", "plain")),
        steps,
        tuple(
            tuple(
                event
                for event in EVENTS
                if r.random() < 0.12 and not (event == "fault" and "optional" in blocks)
            )
            for _ in steps
        ),
        tuple(tuple(r.random() < 0.6 for _ in range(4)) for _ in range(batches)),
        r.choice(("SGD", "AdamW", "AdamW foreach", "AdamW fused")),
        r.choice((0.0, 0.0, 0.5, 100.0)),
        r.randint(1, len(steps) - 1) if len(steps) > 1 and r.random() < 0.5 else None,
        r.choice(((2, 2), (4, 1), (1, 4)) if parallel == "hybrid" else ((2, 2), (4, 1))),
    )


def _some(r: Random, each: Sequence[tuple[str, object]]) -> list[tuple[str, object]]:
    return [one for one in each if r.random() < 0.4]
