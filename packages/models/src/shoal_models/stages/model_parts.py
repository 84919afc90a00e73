"""`ModelParts`: the modules before, in and after the list of layers, by the model's `pp_plan`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal_dtensor.errors import PlanError, TiedWeightError


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The names of the modules with parameters, in the order in which a forward runs them.

    Attributes:
        before: modules of the first stage, such as embeddings.
        layers: the list of layers, which the stages divide.
        after: modules of the last stage: the norm and the head.
        count: the number of layers.
    """

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]
    count: int

    def layers_of(self, stage: int, stages: int) -> range:
        """Return the layers of a stage, as transformers divides them; the first stages have more.

        Example:
            >>> parts = ModelParts(("embed",), "layers", ("norm", "head"), 5)
            >>> [parts.layers_of(stage, 2) for stage in range(2)]
            [range(0, 3), range(3, 5)]
        """
        # Example: 5 layers on 2 stages -> 2 layers each, and the first stage has one more.
        share, stages_with_one_more = divmod(self.count, stages)
        first = stage * share + min(stage, stages_with_one_more)
        count = share + 1 if stage < stages_with_one_more else share
        return range(first, first + count)


def parts_of(model: Any, stages: int) -> ModelParts:
    """Return the parts of a causal language model, by its `pp_plan`.

    Args:
        model: a model of transformers.
        stages: the number of stages.

    Raises:
        PlanError: if the model has no such plan or no head, if it has fewer layers than stages, or
            if parameters belong to no part.
    """
    class_name = type(model).__name__
    request = f"DistributedConfig(pp_size={stages})"
    # An entry may name a module that this configuration of the model does not have.
    names = {name for name, _ in model.named_modules()}
    declared = [*(model.pp_plan or ())]
    plan = [name for name in declared if name in names]
    # Example: "model.embed_tokens", "model.layers" and "model.norm" are of the base model "model".
    prefix_of_base = f"{model.base_model_prefix}."
    # The plan lists the modules of the base model in the order of its forward.
    of_base = [name for name in plan if name.startswith(prefix_of_base)]
    lists = [name for name in of_base if isinstance(model.get_submodule(name), nn.ModuleList)]
    if len(lists) != 1 or model.get_output_embeddings() is None:
        raise PlanError(
            f"{request}: stages need a causal language model whose pp_plan names its one list of "
            f"layers, got {class_name} with the pp_plan {declared}; use tp_size or "
            "fsdp_size, or split the model by hand for torch.distributed.pipelining"
        )
    (layers,) = lists
    index_of_layers = of_base.index(layers)
    heads = [name for name in plan if not name.startswith(prefix_of_base)]
    count = len(model.get_submodule(layers))
    parts = ModelParts(
        before=tuple(of_base[:index_of_layers]),
        layers=layers,
        after=(*of_base[index_of_layers + 1 :], *heads),
        count=count,
    )
    if count < stages:
        raise PlanError(
            f"{request}: {class_name} has {count} layers; pp_size must be at most {count}"
        )
    prefixes = tuple(f"{name}." for name in (*parts.before, parts.layers, *parts.after))
    of_no_part = [name for name, _ in model.named_parameters() if not name.startswith(prefixes)]
    if of_no_part:
        raise PlanError(
            f"{request}: the pp_plan of {class_name} names {plan}, so the parameters "
            f"{of_no_part[:3]} belong to no stage; use tp_size or fsdp_size"
        )
    return parts


def tied_weights(model: nn.Module, parts: ModelParts) -> list[nn.Parameter]:
    """Return the parameters that modules of the first and of the last stage share."""
    ids_of_first = {id(weight) for weight in _parameters_of(model, parts.before)}
    return [weight for weight in _parameters_of(model, parts.after) if id(weight) in ids_of_first]


def check_ties(model: nn.Module, parts: ModelParts, stages: int) -> None:
    """Raise TiedWeightError if layers share a parameter with another stage's layers or with an end.

    The ends are the modules before and after the layers. They may share parameters with each other.
    """
    # by id of a parameter, the stages whose layers have it
    stages_of: dict[int, set[int]] = {}
    for stage in range(stages):
        names = [f"{parts.layers}.{number}" for number in parts.layers_of(stage, stages)]
        for weight in _parameters_of(model, names):
            stages_of.setdefault(id(weight), set()).add(stage)
    ends = {id(weight) for weight in _parameters_of(model, (*parts.before, *parts.after))}
    for name, weight in model.named_parameters():
        stages_with_weight = stages_of.get(id(weight), set())
        is_shared_with_end = bool(stages_with_weight) and id(weight) in ends
        if len(stages_with_weight) > 1 or is_shared_with_end:
            raise TiedWeightError(
                f"DistributedConfig(pp_size={stages}): layers of several stages share {name!r}; "
                "only embeddings and head may share a weight. Use tp_size or fsdp_size"
            )


def _parameters_of(model: nn.Module, names: Iterable[str]) -> list[nn.Parameter]:
    return [weight for name in names for weight in model.get_submodule(name).parameters()]
