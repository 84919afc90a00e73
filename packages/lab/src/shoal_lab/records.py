"""Records of one rank's run: the values that certification compares, with the layouts that are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalValue:
    """The values of one logical tensor on one rank.

    Attributes:
        tensor: float64 or complex128, on the CPU, of the local shape.
        shape: of the logical tensor, if its metadata says so.
        index: for each local element its position in the flattened logical tensor, if known.
        pending: the ranks whose values are still to be summed, as metadata says; () for none.
    """

    tensor: Tensor
    shape: tuple[int, ...] | None = None
    index: Tensor | None = None
    pending: tuple[int, ...] = ()


# Values by name.
Values = dict[str, LocalValue]


@dataclass(slots=True)
class MaskDraw:
    """One dropout: fingerprints of its input and of the mask that the program drew."""

    place: str
    values: int
    mask: int


@dataclass(slots=True)
class Output:
    """The output of one module in one forward, or the gradient at that output."""

    path: str
    kind: str
    value: LocalValue


@dataclass(slots=True)
class StepRecord:
    """The values of one optimizer step.

    Attributes:
        before: parameters when the first forward of the step begins.
        gradients: when the optimizer's step begins, of the parameters that it updates.
        trained: names of the parameters that an optimizer of this rank updates.
        unreduced: for each backward, the growth of the gradients when it ends.
        states_before: the optimizer's before its first step, by parameter and key, if it was loaded.
        states: the optimizer's, after the step, by parameter and key.
        losses: the value at the root of each backward, if it is a scalar.
        counts: the number of targets of each loss function that was called.
        norms: the gradient norms that clipping functions of torch returned.
    """

    before: Values = field(default_factory=dict)
    gradients: Values = field(default_factory=dict)
    trained: set[str] = field(default_factory=set)
    unreduced: list[Values] = field(default_factory=list)
    states_before: Values = field(default_factory=dict)
    states: Values = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RankRecord:
    """Everything that was observed on one rank.

    Attributes:
        steps: one for each step of the optimizer.
        after: parameters at the end of the program.
        returned: the values that the program returned by name.
        masks: of dropouts, in order.
        outputs: of modules, in order, if they were asked for.
        meshes: axis names and the grid of ranks, as nested lists, of each mesh that was found.
        groups: ranks of each process group that the program made.
        epsilon: the largest rounding unit of the values, 2e-16 for float64.
        batches: for each data loader, the batches that it gave.
        uses_shoal: whether a parallel form of shoal's own was found. Dropout then draws the same
            masks on any mesh as on one device.
    """

    steps: list[StepRecord] = field(default_factory=list)
    after: Values = field(default_factory=dict)
    returned: Values = field(default_factory=dict)
    masks: list[MaskDraw] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    meshes: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    epsilon: float = 2.220446049250313e-16
    batches: list[list[Any]] = field(default_factory=list)
    uses_shoal: bool = False
