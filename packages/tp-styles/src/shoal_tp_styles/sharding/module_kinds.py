"""Kinds of modules in a style's table: class, base classes, or structure; and modules of experts.

For experts the file determines the arguments of their forwards, their number, and the sharding of
their parameters.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from shoal_dtensor import Shard
from shoal_dtensor.errors import LayoutError, UnsupportedModuleError

from .module_sharding import ExpertOwner, Experts, Heads, HeadShard, ParameterPlacement

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class TransposedLinear(nn.Module):
    """Table entry for modules that compute `x @ weight + bias`: a Linear of weight (in, out).

    GPT-2's `Conv1D` of the Hugging Face library is an example. Such a module is recognized without
    importing anything: it has no children and buffers, its only parameters are a matrix and perhaps
    a vector, and its `nf` is the number of columns.
    """


def _is_transposed(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    bias = module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or not module._parameters.keys() <= {"weight", "bias"}:
        return False
    columns = weight.shape[1]
    fits = getattr(module, "nf", None) == columns and (bias is None or bias.shape == (columns,))
    return fits and not module._modules and not module._buffers


def kinds_of(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the kinds of a module, most specific first: structure, its class, its base classes."""
    parents = tuple(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return (TransposedLinear, *parents) if _is_transposed(module) else parents


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module, also after `fully_shard` or `replicate` replaced it."""
    kind: type[nn.Module] = getattr(type(module), "_shoal_class", type(module))
    return kind


def is_grouped(module: Any) -> bool:
    """Tell whether a module is a convolution of several groups.

    Each input channel is read in one group only.
    """
    return isinstance(module, CONVOLUTIONS) and module.groups > 1


def keeps_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Tell whether a module of kind `kind` keeps that kind's forward.

    A subclass may have its own forward.
    """
    return kind is TransposedLinear or type(module).forward is kind.forward


def computed_parameters(module: nn.Module) -> list[str]:
    """Return tensors that are computed from other parameters before each forward.

    These are parametrizations, weight_norm and pruning.
    """
    names: list[str] = [*module.parametrizations] if is_parametrized(module) else []  # type: ignore[misc]  # a ModuleDict
    # the older utilities keep the result as a plain attribute
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and any(
            f"{name}{end}" in module._parameters for end in ("_g", "_orig")
        ):
            names.append(name)
    return names


def out_features(module: nn.Module) -> int | None:
    """Return the number of output features of a Linear or transposed Linear, else None."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.get_parameter("weight").shape[1] if _is_transposed(module) else None


EXPERTS = "(hidden_states, top_k_index, top_k_weights) or (rows, num_tokens_per_expert)"
_CHOICES = ("index", "indices", "indexes", "selected_experts")
_WEIGHTS = ("weight", "score", "prob")


def experts_of(style: str, module: nn.Module, capacity: float | None = None) -> Experts:
    """Return the call form and number of experts of a module, or raise UnsupportedModuleError."""
    names = [*inspect.signature(type(module).forward).parameters][1:]
    grouped = len(names) > 1 and "num_tokens" in names[1]
    routed = (
        len(names) > 2
        and names[1].endswith(_CHOICES)
        and any(word in names[2] for word in _WEIGHTS)
    )
    if not grouped and not routed:
        raise UnsupportedModuleError(
            f"{style}: the forward of {type(module).__name__} takes ({', '.join(names)}), and the "
            f"style routes tokens by {EXPERTS}. Put the experts into a module with such a forward, "
            "and the style on that module"
        )
    listed = isinstance(module, nn.ModuleList)
    if grouped and (listed or capacity is not None):
        what = (
            "is a ModuleList"
            if listed
            else "gets rows that are sorted already, so that no capacity can drop some"
        )
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} takes (rows, num_tokens_per_expert), and {what}; "
            "let its forward take (hidden_states, top_k_index, top_k_weights)"
        )
    packed = [
        param for param in module._parameters.values() if param is not None and param.ndim == 3
    ]
    sizes = {len(module)} if isinstance(module, nn.ModuleList) else {p.shape[0] for p in packed}
    if len(sizes) != 1:
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} has parameters of three dims for {sorted(sizes)} "
            "experts; expected a nn.ModuleList of experts, or parameters of shape (experts, in, "
            "out) or (experts, out, in) of its own"
        )
    return Experts(sizes.pop(), grouped, listed, capacity)


def expert_shards(module: nn.Module, experts: Experts) -> dict[str, ParameterPlacement]:
    """Return the placements of the experts' parameters along the axis of experts."""
    if not experts.listed:
        own = module.named_parameters(recurse=False)
        return {name: Shard(0) for name, p in own if p.ndim > 1 and p.shape[0] == experts.count}
    owned: dict[str, ParameterPlacement] = {}
    for index, child in enumerate(module.children()):
        for name, param in child.named_parameters():
            if param.ndim == 0:
                raise UnsupportedModuleError(
                    f"ExpertParallel: {index}.{name} of {type(module).__name__} is a number, which "
                    "has no rows that one rank could hold; make it a tensor of one element"
                )
            owned[f"{index}.{name}"] = ExpertOwner(index, experts.count, param.shape[0])
    return owned


# Blocks that the name stands for, and whether the hidden features are what the product returns
# (else what it sums).
_WEIGHT_NAMES = {
    "gate_up_proj": (2, True),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (1, True)),
    **dict.fromkeys(("down_proj", "w2"), (1, False)),
}


def hidden_shards(style: str, module: nn.Module) -> dict[str, ParameterPlacement]:
    """Return the placements of packed weights and biases along the axis of hidden features.

    A bias that is added to the sum over the hidden features stays replicated.
    """
    if isinstance(module, nn.ModuleList):
        return _hidden_of_linears(style, module)
    params = dict(module.named_parameters())
    weights = {
        name: param for name, param in params.items() if param.ndim == 3 and name in _WEIGHT_NAMES
    }
    down = next((param for name, param in weights.items() if not _WEIGHT_NAMES[name][1]), None)
    first = next((name for name in weights if _WEIGHT_NAMES[name][1]), None)
    if (
        down is None
        or first is None
        or any(name.removesuffix("_bias") not in weights for name in params)
    ):
        raise _unknown_features(style, module)
    blocks = _WEIGHT_NAMES[first][0]
    up = params[first]
    # (experts, out, in), as nn.Linear, or (experts, in, out)
    for into, out in ((2, 1), (1, 2)):
        if up.shape[out] == blocks * down.shape[into] and up.shape[into] == down.shape[out]:
            break
    else:
        raise UnsupportedModuleError(
            f"{style}: {first} {tuple(up.shape)} and the weight behind it {tuple(down.shape)} of "
            f"{type(module).__name__} have no hidden features in common"
        )
    shards: dict[str, ParameterPlacement] = {}
    for name, param in params.items():
        blocks, returned = _WEIGHT_NAMES[name.removesuffix("_bias")]
        if name in weights or returned:
            dim = 1 if name not in weights else out if returned else into
            shards[name] = _hidden(module, dim, blocks, param)
    return shards


def _hidden_of_linears(style: str, module: nn.ModuleList) -> dict[str, ParameterPlacement]:
    shards: dict[str, ParameterPlacement] = {}
    for path, param in module.named_parameters():
        owner, _, kind = path.rpartition(".")
        name = owner.rpartition(".")[2]
        if name not in _WEIGHT_NAMES or not isinstance(module.get_submodule(owner), nn.Linear):
            raise _unknown_features(style, module)
        blocks, returned = _WEIGHT_NAMES[name]
        if returned or kind == "weight":
            shards[path] = _hidden(module, 0 if returned else 1, blocks, param)
    return shards


def _unknown_features(style: str, module: nn.Module) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"{style}: which features of {type(module).__name__} are hidden is known of parameters "
        f"called {', '.join(_WEIGHT_NAMES)}, and <name>_bias, or of Linears called so in a "
        f"ModuleList; it has {', '.join(name for name, _ in module.named_parameters())}"
    )


def _hidden(module: nn.Module, dim: int, blocks: int, param: Tensor) -> ParameterPlacement:
    if blocks == 1:
        return Shard(dim)
    if param.shape[dim] % blocks:
        raise LayoutError(f"dim {dim} of {tuple(param.shape)} does not hold {blocks} equal blocks")
    # Gate and up lie behind each other; or every other feature is one of them.
    if getattr(module, "is_concatenated", True) is False:
        return Shard(dim, multiple_of=blocks)
    return HeadShard(dim, Heads(param.shape[dim] // blocks, 1, chunked=True), blocks)
