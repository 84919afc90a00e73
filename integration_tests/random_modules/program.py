"""A program, as plain values that print themselves.

It is a model, how it is placed on a mesh, and how it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from integration_tests.random_modules.blocks import BLOCKS
from torch import Tensor, nn

__all__ = ["Model", "Program", "model_of"]


@dataclass(frozen=True, slots=True)
class Program:
    """A random program.

    Attributes:
        mesh: shape of the mesh, of four ranks.
        blocks: name in `BLOCKS` and arguments, one after the other.
        sizes: batch, sequence, features, vocabulary; a vocabulary of 0 feeds numbers instead of
            tokens.
        plan: `distribute` (`distribute_module`, everything a DTensor) or `parallelize`
            (`parallelize_module`).
        layouts: placements of a parameter, buffer or input by name, or a style by module path, as
            expressions.
        optimizer: an expression of `groups`.
        features: what else the training does (`train.FEATURES`), with arguments after a colon.
        steps: of the optimizer.
        seed: of all random numbers.
        half_layout: placements of the half numbers of an edge, as an expression.
    """

    mesh: tuple[int, ...]
    blocks: tuple[tuple[str, tuple[Any, ...]], ...]
    sizes: tuple[int, int, int, int]
    plan: str
    layouts: tuple[tuple[str, str], ...]
    optimizer: str
    features: tuple[str, ...] = ()
    steps: int = 2
    seed: int = 0
    half_layout: str = ""

    def has(self, feature: str) -> bool:
        """Whether the training does it."""
        return any(each.partition(":")[0] == feature for each in self.features)

    def option(self, feature: str) -> str:
        """What stands after the feature's colon; empty if it is not there."""
        return next(
            (each.partition(":")[2] for each in self.features if each.partition(":")[0] == feature),
            "",
        )

    def script(self) -> str:
        """A script that runs the program on four ranks, and shows where it differs."""
        fields = "".join(f"    {name}={getattr(self, name)!r},\n" for name in self.__slots__)
        return (
            "from integration_tests.random_modules import Program, on_ranks\n\n"
            f"PROGRAM = Program(\n{fields})\n\n"
            'if __name__ == "__main__":\n'
            "    print(*on_ranks([PROGRAM]))\n"
        )


class Model(nn.Module):
    """Tokens or numbers, the blocks with residuals around them, logits."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        _, _, dim, vocabulary = program.sizes
        self.embed = nn.Embedding(vocabulary, dim) if vocabulary else None
        self.blocks = nn.ModuleList([BLOCKS[name](*args) for name, args in program.blocks])
        self.head = nn.Linear(dim, vocabulary, bias=not program.has("tie")) if vocabulary else None
        if self.embed is not None and self.head is not None and program.has("tie"):
            self.head.weight = self.embed.weight
        if program.has("share") and len(self.blocks) > 1:
            self.blocks[-1] = self.blocks[0]

    def forward(self, x: Tensor, around: Any = None) -> Any:
        """The logits, or the last activation.

        Args:
            x: tokens (batch, sequence) or numbers (batch, sequence, features).
            around: runs a block, given the block and its input: a checkpoint, for example.
        """
        y = self.embed(x) if self.embed is not None else x
        for block in self.blocks:
            y = y + (around(block, y) if around is not None else block(y))
        return self.head(y) if self.head is not None else y


def model_of(program: Program) -> Model:
    """The plain model, the same on every rank; its parameters are not zero anywhere."""
    torch.manual_seed(program.seed)
    model = Model(program).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.2 + 0.05)
    return model
