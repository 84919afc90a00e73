"""Explanations and findings as data: kinds, axes, and the sentences that a report prints."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of explanations, in the order in which a report prefers them.
KINDS = (
    "missing reduction",
    "too large",
    "too small",
    "sign",
    "local clip norm",
    "wrong divisor",
    "uneven mean",
    "stale",
    "not zeroed",
    "microbatches",
    "wrong shard",
    "zero",
    "some ranks",
    "permuted",
    "random",
    "forward",
    "scaled",
    "missing",
    "copies",
    "unexplained",
)


@dataclass(frozen=True, slots=True)
class FittingExplanation:
    """One combination that turns the values of the ranks into the values of one device.

    Attributes:
        kind: one of `KINDS`.
        axes: the mesh axes that the explanation names, in the order of the mesh.
        text: the sentence for the report.

    Example:
        >>> FittingExplanation("stale", ("dp",), "stale at dp=1").axes
        ('dp',)
    """

    kind: str
    axes: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class CertificationFinding:
    """One logical tensor that differs from one device.

    Attributes:
        step: the step of the optimizer, from 0.
        quantity: the kind of value: parameter, gradient, optimizer state, returned value, dropout.
        name: the name of the parameter, or of the module.
        difference: the norm of the difference relative to the norm of the value.
        explanations: all explanations that fit.

    Example:
        >>> print(CertificationFinding(0, "gradient", "head.bias", 0.5, explanations=()))
        step 0: gradient of head.bias: differs by 5.0e-01; no combination of the ranks explains it
    """

    step: int
    quantity: str
    name: str
    difference: float
    explanations: tuple[FittingExplanation, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that all explanations name; () if there is no explanation, or they differ."""
        axes = {explanation.axes for explanation in self.explanations}
        return axes.pop() if len(axes) == 1 else ()

    def __str__(self) -> str:
        """Return the line of the report."""
        head = f"step {self.step}: {self.quantity} of {self.name}"
        return f"{head}: {self.sentence()}"

    def sentence(self) -> str:
        """Return the explanations as one sentence."""
        texts = [explanation.text for explanation in self.explanations]
        if not texts:
            return f"differs by {self.difference:.1e}; no combination of the ranks explains it"
        if len(texts) == 1:
            return texts[0]
        return f"{_count(len(texts))} explanations fit: {'; or '.join(texts)}"


def _count(number: int) -> str:
    """Return a small number as a word."""
    words = {2: "two", 3: "three", 4: "four", 5: "five"}
    return words.get(number, str(number))
