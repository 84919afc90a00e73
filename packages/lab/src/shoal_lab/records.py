"""Records of one rank's run: the values that certification compares, and their known layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalValue:
    """The values of one logical tensor on one rank.

    Attributes:
        tensor: the values as float64 or complex128 on the CPU, in the local shape.
        shape: the shape of the logical tensor, if the tensor's metadata has it; else None.
        index: for each local element its position in the flattened logical tensor; None if the
            metadata does not have it.
        pending: for a partial sum, the ranks whose values are to be summed; () otherwise.
    """

    tensor: Tensor
    shape: tuple[int, ...] | None = None
    index: Tensor | None = None
    pending: tuple[int, ...] = ()


# the values of tensors by name
Values = dict[str, LocalValue]


@dataclass(slots=True)
class MaskDraw:
    """One dropout: fingerprints of its input and of the mask that the program drew.

    Attributes:
        place: the path of the module, with the number of random bits of the mask: `mlp.drop (96)`.
        values: the fingerprint of the input.
        mask: the fingerprint of the mask.
    """

    place: str
    values: int
    mask: int


@dataclass(slots=True)
class Output:
    """The output of one module in one forward, or the gradient at that output.

    Attributes:
        path: the path of the module.
        kind: "output" or "gradient".
        value: the values on this rank.
    """

    path: str
    kind: str
    value: LocalValue


@dataclass(slots=True)
class StepRecord:
    """The values of one optimizer step.

    Attributes:
        before: the parameters when the first forward of the step begins.
        replaced: the names that had other parameters in an earlier step.
        gradients: the gradients of the parameters that the optimizer updates, when its step begins.
        trained: the names of the parameters that an optimizer of this rank updates.
        unreduced: for each backward, the growth of the gradients during the backward.
        states_before: the state of an optimizer before its first step, by parameter and key. It is
            empty unless the state was loaded.
        states: the state of the optimizers after the step, by parameter and key.
        losses: the value at the root of each backward, if it is a scalar.
        counts: the number of targets in each call of a loss function.
        norms: the gradient norms that clipping functions of torch returned.
    """

    before: Values = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
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
        steps: the record of each step of the optimizer.
        after: the parameters at the end of the program.
        replaced_after: the names that had other parameters in the last step.
        returned: the values that the program returned by name.
        masks: the dropouts, in order.
        outputs: the outputs of modules, in order, if they were requested.
        meshes: for each device mesh that was found, its axis names and its ranks as nested lists.
        groups: the ranks of each process group that the program made.
        epsilon: the largest rounding unit (`torch.finfo.eps`) of the values; 2e-16 for float64.
        batches: for each iteration over a data loader, the batches that it returned.
        uses_shoal: whether the program uses a parallel form of shoal. If so, dropout draws the same
            masks on any mesh as on one device.
    """

    steps: list[StepRecord] = field(default_factory=list)
    after: Values = field(default_factory=dict)
    replaced_after: set[str] = field(default_factory=set)
    returned: Values = field(default_factory=dict)
    masks: list[MaskDraw] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    meshes: list[tuple[tuple[str, ...], Any]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    epsilon: float = 2.220446049250313e-16
    batches: list[list[Any]] = field(default_factory=list)
    uses_shoal: bool = False
