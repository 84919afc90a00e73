"""Trainings with edges before or around a random step.

They are tokens and labels out of range, placements of parameters passed on, other settings,
averages of half numbers near the end of their range, and calls that a mode watches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from integration_tests.random_modules.edges import PASSED, SETTINGS
from integration_tests.random_training.compose import Program
from integration_tests.random_training.model import WORDS, batch_of
from integration_tests.random_training.train import Training, difference, mesh_of, text_of
from torch import Tensor, nn

from settings_and_refusals import Watcher, unless_refused
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import DTensor, full_tensor, implicit_replication

__all__ = ["EdgeProgram", "draw_edges", "verdict_with_edges"]

CHANCE = 0.5
# number of the batch of edges, which no step has
BATCH = 800
# all tokens or labels: a rank without one out of range would go on
OUTSIDE = {"token beyond": WORDS, "token -1": -1, "label beyond": WORDS, "label -1": -1}
# In float64, autocast has no effect.
AROUND = ("default float64", "default bfloat16", "deterministic", "anomaly")
WATCHED = ("backward", "step", "evaluation")
WITHOUT_GRADIENTS = ("no_grad", "inference")
# Sums over four ranks of the large ones are out of range; a fourth of a small one has few bits.
HALVES = {"large": 40000.0, "small": 1e-6}
# An average may differ by this part of it, and by the step of the smallest numbers.
PRECISION, SMALLEST = 2.0**-8, 2.0**-24


@dataclass(frozen=True)
class EdgeProgram:
    """A training with edges; an empty name is an edge that it does not have.

    Attributes:
        program: the training.
        step: the step that has the edges.
        outside: the value out of range of a forward before the step, in `OUTSIDE`.
        without_gradients: the setting in which that forward runs; with gradients if it is empty.
        passed: the call that takes placements of parameters, in `PASSED`.
        around: the setting around the step, in `SETTINGS`.
        watched: what a mode watches in all steps, in `WATCHED`.
        half: the size of half numbers that are averaged, in `HALVES`.
    """

    program: Program
    step: int
    outside: str
    without_gradients: str
    passed: str
    around: str
    watched: str
    half: str


def draw_edges(program: Program) -> EdgeProgram:
    """Draw the edges of a program."""
    random = Random(f"edges {program.seed}")

    def draw(names: tuple[str, ...]) -> str:
        name = random.choice(names)
        return name if random.random() < CHANCE else ""

    return EdgeProgram(
        program,
        step=random.randrange(len(program.steps)),
        outside=draw(tuple(OUTSIDE)),
        without_gradients=draw(WITHOUT_GRADIENTS),
        passed=draw(tuple(PASSED)),
        around=draw(AROUND),
        watched=draw(WATCHED),
        half=draw(tuple(HALVES)),
    )


def verdict_with_edges(edges: EdgeProgram) -> str:
    """One rank's part, as `verdict` has it."""
    expected = _EdgeTraining(edges, None)
    try:
        expected.run()
    except Exception as failed:
        return f"void: {type(failed).__name__}: {str(failed)[:200]}"
    got = _EdgeTraining(edges, mesh_of(edges.program))
    try:
        got.run()
        return difference(expected.seen, got.seen)
    except Exception as failed:
        return text_of(failed, got.stage)


class _EdgeTraining(Training):
    """A training with edges."""

    def __init__(self, edges: EdgeProgram, mesh: Any) -> None:
        super().__init__(edges.program, mesh)
        self.edges = edges

    def watcher(self, part: str) -> AbstractContextManager[Any]:
        """The mode, if it watches a part of a step."""
        if self.edges.watched != part or self.mesh is None:
            return nullcontext()
        return Watcher()  # type: ignore[no-untyped-call]  # torch does not type it

    def backward(self, number: int, *arguments: Any) -> None:
        with self.watcher("backward"):
            super().backward(number, *arguments)

    def _step(self, step: int, optimizer: Any) -> None:
        with ExitStack() as around:
            if step == self.edges.step:
                self._visit_edges()
                if self.edges.around:
                    around.enter_context(SETTINGS[self.edges.around]())
            around.enter_context(self.watcher("step"))
            super()._step(step, optimizer)

    def _visit_edges(self) -> None:
        """Meet the edges that come before the step."""
        if self.edges.outside:
            self.stage = f"outside: {self.edges.outside}"
            self._visit_outside()
        if self.edges.passed:
            self.stage = f"passed: {self.edges.passed}"
            self._visit_passed()
        if self.edges.half:
            self.stage = "half"
            self._visit_half()
        if self.edges.watched == "evaluation":
            self.stage = "watched evaluation"
            with torch.inference_mode(), self.watcher("evaluation"):
                self._losses(BATCH + 1, "watched evaluation")

    def _visit_outside(self) -> None:
        """Call the model and the loss with a value out of range in the rows of all ranks."""
        without = self.edges.without_gradients
        setting = SETTINGS[without] if without else nullcontext
        is_refused = unless_refused(partial(self._loss_outside, setting)) is None
        self._see("outside", [("refused", torch.tensor(float(is_refused)))])

    def _loss_outside(self, setting: Any) -> Any:
        scope = implicit_replication() if self.program.placed == "tensors" else nullcontext()
        with setting(), scope:
            return [float(full_tensor(loss.detach())) for loss in self._losses(BATCH)]

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        tokens, labels = batch_of(self.program, number)
        if number == BATCH:
            changed = tokens if self.edges.outside.startswith("token") else labels
            changed.fill_(OUTSIDE[self.edges.outside])
        return tokens, labels

    def _visit_passed(self) -> None:
        """Make tensors in the placements of parameters by another call."""
        way = PASSED[self.edges.passed]
        for name, parameter in self.model.named_parameters():
            value = parameter.detach()
            made = way(value) if isinstance(value, DTensor) else value
            self._see("passed", [(name, made)])

    def _visit_half(self) -> None:
        """Average gradients of half numbers near an end of their range."""
        layer: Any = nn.Linear(self.program.width, 1, bias=False, dtype=torch.float16)
        nn.init.constant_(layer.weight, 2.0**-10)
        count = torch.arange(self.parts * self.program.width, dtype=torch.float64)
        values = 1.0 + 0.5 * (count * (self.program.seed + 1.3)).sin()
        rows = (HALVES[self.edges.half] * values).half().view(self.parts, self.program.width)
        mean = rows.double().mean(0, keepdim=True)
        if self.mesh is None:
            gradient: Any = mean
        else:
            gradient = full_tensor(self._half_gradient(layer, rows)).double()
        is_right = bool(((gradient - mean).abs() <= PRECISION * mean + SMALLEST).all())
        self._see("half", [("gradient", torch.tensor(float(is_right)))])

    def _half_gradient(self, layer: Any, rows: Tensor) -> Any:
        """The averaged gradient of a layer of half numbers, each rank's from its own row."""
        assert self.mesh is not None, "gradients are averaged on a mesh"
        is_hybrid = self.program.parallel == "hybrid"
        data = self.mesh if is_hybrid else self.mesh["data"]
        if is_hybrid or self.program.parallel == "fully_shard":
            fully_shard(layer, mesh=data)
        else:
            replicate(layer, data, shard_optimizer=self.program.parallel == "optimizer shards")
        rank = self.mesh.get_rank() if is_hybrid else self.mesh.get_local_rank("data")
        layer(rows[rank : rank + 1]).sum().backward()
        return layer.weight.grad
