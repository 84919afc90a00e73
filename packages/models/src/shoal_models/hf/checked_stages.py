"""`check_stages`: the proof that stages of a model compute what the whole model computes.

The stages of a `small_copy` run one after the other in one process, without ranks. Outputs,
gradients, and outputs of a second forward with a cache are compared with the whole copy.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.errors import PlanError
from shoal_tp_styles.internal import kind_and_first_line

from ..errors import PlanWarning
from ..stages.model_parts import parts_of
from ..stages.stage import Stage
from .small_copy import NoSmallCopy, small_copy

_REMEDY = "use tp_size or fsdp_size"
_TOLERANCE = 1e-9


class _SimulatedLink:
    """The connection (`StageLink`) of stages that run one after the other in one process.

    Args:
        stage: the number of the stage.
        stages: the number of stages.
        passed: a list that all stages share. A stage appends the hidden states for the next stage,
            which takes them out.
    """

    def __init__(self, stage: int, stages: int, passed: list[Tensor]) -> None:
        self.stage = stage
        self.stages = stages
        self._passed = passed

    def receive(self, device: torch.device) -> Tensor:
        return self._passed.pop()

    def send(self, hidden: Tensor) -> Tensor:
        self._passed.append(hidden)
        # Any tensor serves as the token: `deliver` ignores it, because autograd connects the stages
        # of one process.
        return hidden

    def deliver(
        self, outputs: Mapping[str, Tensor], token: Tensor | None, device: torch.device
    ) -> Mapping[str, Tensor]:
        return outputs

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        # All stages run in this process, so no other process waits for a message. The error
        # propagates to the caller.
        pass


def check_stages(model: Any, stages: int) -> None:
    """Raise PlanError unless stages compute what the whole model computes.

    Args:
        model: a whole model of transformers, on any device, including meta.
        stages: the number of stages.

    Warns:
        PlanWarning: if it could not be proven, because the model has no small copy.
    """
    kind = type(model).__name__
    sample = small_copy(model, least_layers=2)
    if isinstance(sample, NoSmallCopy):
        warnings.warn(
            f"from_pretrained: the equality of {kind} and its stages could not be proven: "
            f"{sample.reason}. Compare a small configuration with one process",
            PlanWarning,
            # the line that calls from_pretrained
            stacklevel=4,
        )
        return
    whole: Any = sample.model.double()
    layers = parts_of(whole, 1).count
    # The small copy may have fewer layers than the model has stages. A stage has a layer at least.
    simulated_stages = min(stages, layers)
    if simulated_stages < 2:
        raise PlanError(f"DistributedConfig(pp_size={stages}): {kind} has one layer; {_REMEDY}")
    try:
        problems = [*_differences(whole, sample.inputs, simulated_stages)]
    # A model that does not call its layers as `Stage` assumes may raise any error.
    except Exception as error:
        problems = [kind_and_first_line(error)]
    if problems:
        raise PlanError(
            f"DistributedConfig(pp_size={stages}): stages of {kind} do not compute what the model "
            f"computes: {problems[0]}; {_REMEDY}"
        )


def _differences(whole: Any, inputs: Mapping[str, Tensor], count: int) -> Iterator[str]:
    """Yield the differences between the whole model and `count` stages of it, in words."""
    models_of_stages: list[Any] = []
    passed: list[Tensor] = []
    for stage in range(count):
        model = copy.deepcopy(whole)
        link = _SimulatedLink(stage, count, passed)
        # `Stage` changes the copy into a stage: its forward runs the stage's layers only.
        Stage(model, parts_of(model, count), link)
        models_of_stages.append(model)
    expected = whole(**inputs).logits
    found = _run_stages(models_of_stages, inputs)
    if not _is_close(found, expected):
        yield "its logits differ"
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    torch.autograd.backward([expected, found], [weights, weights])
    gradients: dict[str, Tensor] = {}
    for model in models_of_stages:
        for name, param in model.named_parameters():
            if param.grad is not None:
                # embeddings that are also the head have a gradient on two stages
                gradients[name] = gradients.get(name, 0) + param.grad
    for name, param in whole.named_parameters():
        if param.grad is not None and not _is_close(gradients.get(name), param.grad):
            yield f"the gradient of {name!r} differs"
    yield from _differences_with_cache(whole, models_of_stages, inputs)


@torch.no_grad()
def _differences_with_cache(
    whole: Any, models_of_stages: list[Any], inputs: Mapping[str, Tensor]
) -> Iterator[str]:
    """Compare the logits of later tokens, whose earlier tokens are in a cache of each stage."""
    accepted = inspect.signature(whole.forward).parameters
    tokens = inputs["input_ids"]
    name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    if name is None:
        return
    earlier = tokens[:, :-2]
    later = tokens[:, -2:]
    whole_cache = whole(input_ids=earlier, use_cache=True)[name]
    expected = whole(input_ids=later, use_cache=True, **{name: whole_cache}).logits
    # The stages run in order, because each one takes the hidden states of the one before.
    caches = [model(input_ids=earlier, use_cache=True)[name] for model in models_of_stages]
    for model, cache in zip(models_of_stages, caches, strict=True):
        found = model(input_ids=later, use_cache=True, **{name: cache}).logits
    # `found` has the logits of the last stage, the only one with a head.
    if not _is_close(found, expected):
        yield "logits of tokens after cached ones differ"


def _run_stages(models_of_stages: list[Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """Run the stages in order; return the logits of the last one."""
    for model in models_of_stages:
        logits: Tensor = model(**inputs).logits
    return logits


def _is_close(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
