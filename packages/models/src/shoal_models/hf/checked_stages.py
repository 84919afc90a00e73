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
    """The connection of stages that run one after the other; `passed` has the hidden states."""

    def __init__(self, stage: int, stages: int, passed: list[Tensor]) -> None:
        self.stage = stage
        self.stages = stages
        self._passed = passed

    def receive(self, device: torch.device) -> Tensor:
        return self._passed.pop()

    def send(self, hidden: Tensor) -> Tensor:
        self._passed.append(hidden)
        return hidden

    def deliver(
        self, outputs: Mapping[str, Tensor], token: Tensor | None, device: torch.device
    ) -> Mapping[str, Tensor]:
        return outputs

    def fail(self, error: BaseException, device: torch.device, *, has_sent: bool) -> None:
        # the error leaves the process by itself
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
            f"from_pretrained: that stages of {kind} compute what the model computes could not be "
            f"proven: {sample.reason}. Compare a small configuration with one process",
            PlanWarning,
            stacklevel=4,
        )
        return
    whole: Any = sample.model.double()
    simulated = min(stages, parts_of(whole, 1).count)
    if simulated < 2:
        raise PlanError(f"DistributedConfig(pp_size={stages}): {kind} has one layer; {_REMEDY}")
    try:
        problems = [*_differences(whole, sample.inputs, simulated)]
    # any error of a model whose layers are called in another way
    except Exception as error:
        problems = [kind_and_first_line(error)]
    if problems:
        raise PlanError(
            f"DistributedConfig(pp_size={stages}): stages of {kind} do not compute what the model "
            f"computes: {problems[0]}; {_REMEDY}"
        )


def _differences(whole: Any, inputs: Mapping[str, Tensor], count: int) -> Iterator[str]:
    """Yield what differs between the whole model and its stages."""
    stages: list[Any] = []
    passed: list[Tensor] = []
    for number in range(count):
        stage = copy.deepcopy(whole)
        Stage(stage, parts_of(stage, count), _SimulatedLink(number, count, passed))
        stages.append(stage)
    expected = whole(**inputs).logits
    found = _logits(stages, inputs)
    if not _is_close(found, expected):
        yield "its logits differ"
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    torch.autograd.backward([expected, found], [weights, weights])
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, param in stage.named_parameters():
            if param.grad is not None:
                # embeddings that are also the head have a gradient on two stages
                gradients[name] = gradients.get(name, 0) + param.grad
    for name, param in whole.named_parameters():
        if param.grad is not None and not _is_close(gradients.get(name), param.grad):
            yield f"the gradient of {name!r} differs"
    yield from _differences_with_cache(whole, stages, inputs)


@torch.no_grad()
def _differences_with_cache(
    whole: Any, stages: list[Any], inputs: Mapping[str, Tensor]
) -> Iterator[str]:
    """Compare the logits of later tokens, whose earlier tokens are in a cache of each stage."""
    accepted = inspect.signature(whole.forward).parameters
    tokens = inputs["input_ids"]
    name = next((name for name in ("cache", "past_key_values") if name in accepted), None)
    if name is None:
        return
    earlier = tokens[:, :-2]
    later = tokens[:, -2:]
    caches = [stage(input_ids=earlier, use_cache=True)[name] for stage in (whole, *stages)]
    expected = whole(input_ids=later, use_cache=True, **{name: caches[0]}).logits
    for stage, cache in zip(stages, caches[1:], strict=True):
        found = stage(input_ids=later, use_cache=True, **{name: cache}).logits
    if not _is_close(found, expected):
        yield "logits of tokens after cached ones differ"


def _logits(stages: list[Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of the last of some stages."""
    for stage in stages:
        logits: Tensor = stage(**inputs).logits
    return logits


def _is_close(found: Tensor | None, expected: Tensor) -> bool:
    return found is not None and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
