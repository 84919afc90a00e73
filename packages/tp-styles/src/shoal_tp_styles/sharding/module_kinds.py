"""Kinds of modules, by which a style finds a module in its table, and facts about expert modules.

A kind is a class, or stands for a structure of parameters (`TransposedLinear`). For a module of
experts the file determines the form of its call, the number of experts, and the sharding of its
parameters.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

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
    params = module._parameters
    weight = params.get("weight")
    bias = params.get("bias")
    if weight is None or weight.ndim != 2 or not params.keys() <= {"weight", "bias"}:
        return False
    columns = weight.shape[1]
    has_columns = getattr(module, "nf", None) == columns
    bias_fits = bias is None or bias.shape == (columns,)
    return has_columns and bias_fits and not module._modules and not module._buffers


def kinds_of(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the kinds of a module, most specific first: structure, its class, its base classes."""
    parents = tuple(cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return (TransposedLinear, *parents) if _is_transposed(module) else parents


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the user's class of a module, also after `fully_shard` or `replicate` replaced it."""
    cls: type[nn.Module] = getattr(type(module), "_shoal_class", type(module))
    return cls


def is_grouped(module: Any) -> bool:
    """Tell whether a module is a convolution of several groups.

    Each input channel is read in one group only.
    """
    return isinstance(module, CONVOLUTIONS) and module.groups > 1


def keeps_forward(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Tell whether a module of class `cls` keeps the forward of that class.

    A subclass may have its own forward.
    """
    return cls is TransposedLinear or type(module).forward is cls.forward


def computed_parameters(module: nn.Module) -> list[str]:
    """Return tensors that are computed from other parameters before each forward.

    These are parametrizations, weight_norm and pruning.
    """
    names: list[str] = []
    if is_parametrized(module):
        parametrizations: Any = module.parametrizations
        names += parametrizations
    # The older utilities keep the result as a plain attribute.
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            originals = {f"{name}_g", f"{name}_orig"}
            if not originals.isdisjoint(module._parameters):
                names.append(name)
    return names


def out_features(module: nn.Module) -> int | None:
    """Return the number of output features of a Linear or transposed Linear, else None."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return module.get_parameter("weight").shape[1] if _is_transposed(module) else None


EXPERTS = "(hidden_states, top_k_index, top_k_weights) or (rows, num_tokens_per_expert)"
# Ends of names of the argument that holds the chosen experts, and parts of names of the argument
# that holds the weights of the choices.
_CHOICES = ("index", "indices", "indexes", "selected_experts")
_WEIGHTS = ("weight", "score", "prob")


def experts_of(style: str, module: nn.Module, capacity: float | None = None) -> Experts:
    """Return the call form and number of experts of a module, or raise UnsupportedModuleError."""
    grouped = _takes_grouped_rows(style, module)
    listed = isinstance(module, nn.ModuleList)
    obstacle = ""
    if grouped and listed:
        obstacle = "is a ModuleList"
    elif grouped and capacity is not None:
        obstacle = "gets rows that are sorted already, so a capacity cannot drop rows"
    if obstacle:
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} takes (rows, num_tokens_per_expert), and "
            f"{obstacle}; let its forward take (hidden_states, top_k_index, top_k_weights)"
        )
    return Experts(_expert_count(style, module), grouped, listed, capacity)


def _takes_grouped_rows(style: str, module: nn.Module) -> bool:
    """Tell whether a forward takes rows sorted by expert; False if it takes tokens and choices.

    The call form is read from the names of the arguments of the forward.
    """
    arguments = [*inspect.signature(type(module).forward).parameters][1:]
    if len(arguments) > 1 and "num_tokens" in arguments[1]:
        return True
    if len(arguments) > 2:
        takes_choices = arguments[1].endswith(_CHOICES)
        takes_weights = any(word in arguments[2] for word in _WEIGHTS)
        if takes_choices and takes_weights:
            return False
    raise UnsupportedModuleError(
        f"{style}: the forward of {type(module).__name__} takes ({', '.join(arguments)}), but the "
        f"style needs {EXPERTS} to route tokens. Put the experts into a module with such a "
        "forward, and apply the style to that module"
    )


def _expert_count(style: str, module: nn.Module) -> int:
    """Return the number of experts: the length of a ModuleList, or dim 0 of packed parameters."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    counts = set()
    for param in module._parameters.values():
        if param is not None and param.ndim == 3:
            counts.add(param.shape[0])
    if len(counts) != 1:
        raise UnsupportedModuleError(
            f"{style}: {type(module).__name__} has parameters of three dims for {sorted(counts)} "
            "experts; expected a nn.ModuleList of experts, or parameters of shape (experts, in, "
            "out) or (experts, out, in) of its own"
        )
    return counts.pop()


def expert_shards(module: nn.Module, experts: Experts) -> dict[str, ParameterPlacement]:
    """Return the placements of the experts' parameters along the axis of experts."""
    shards: dict[str, ParameterPlacement] = {}
    if not experts.listed:
        for name, param in module.named_parameters(recurse=False):
            if param.ndim > 1 and param.shape[0] == experts.count:
                shards[name] = Shard(0)
        return shards
    for index, child in enumerate(module.children()):
        for name, param in child.named_parameters():
            if param.ndim == 0:
                raise UnsupportedModuleError(
                    f"ExpertParallel: {index}.{name} of {type(module).__name__} has 0 dims, so it "
                    "cannot be sharded by experts; make it a tensor of one element"
                )
            shards[f"{index}.{name}"] = ExpertOwner(index, experts.count, param.shape[0])
    return shards


class _HiddenFeatures(NamedTuple):
    """The hidden features of a weight of an expert.

    Attributes:
        blocks: number of equal blocks of hidden features in the weight; 2 for gate and up together.
        are_outputs: True if the product returns the hidden features, False if it sums over them.
    """

    blocks: int
    are_outputs: bool


_HIDDEN_FEATURES: dict[str, _HiddenFeatures] = {
    "gate_up_proj": _HiddenFeatures(2, are_outputs=True),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), _HiddenFeatures(1, are_outputs=True)),
    **dict.fromkeys(("down_proj", "w2"), _HiddenFeatures(1, are_outputs=False)),
}


def hidden_shards(style: str, module: nn.Module) -> dict[str, ParameterPlacement]:
    """Return the placements of packed weights and biases along the axis of hidden features.

    A bias that is added to the sum over the hidden features stays replicated.
    """
    if isinstance(module, nn.ModuleList):
        return _hidden_shards_of_linears(style, module)
    params = dict(module.named_parameters())
    packed = {name: param for name, param in params.items() if param.ndim == 3}
    weights = {name: param for name, param in packed.items() if name in _HIDDEN_FEATURES}
    ups = [name for name in weights if _HIDDEN_FEATURES[name].are_outputs]
    downs = [name for name in weights if not _HIDDEN_FEATURES[name].are_outputs]
    is_known = all(name.removesuffix("_bias") in weights for name in params)
    if not ups or not downs or not is_known:
        raise _unknown_features(style, module)
    input_dim = _input_dim(style, module, ups[0], weights[downs[0]])
    output_dim = 3 - input_dim
    shards: dict[str, ParameterPlacement] = {}
    for name, param in params.items():
        features = _HIDDEN_FEATURES[name.removesuffix("_bias")]
        if name not in weights:
            # (experts, out); a bias that is added to the sum over hidden features is replicated
            if features.are_outputs:
                shards[name] = _hidden_shard(module, 1, features.blocks, param)
            continue
        dim = output_dim if features.are_outputs else input_dim
        shards[name] = _hidden_shard(module, dim, features.blocks, param)
    return shards


def _input_dim(style: str, module: nn.Module, up_name: str, down: nn.Parameter) -> int:
    """Return the dim of packed weights that holds the input features of the products.

    It is 2 for weights (experts, out, in), as of nn.Linear, and 1 for (experts, in, out).
    """
    up = module.get_parameter(up_name)
    blocks = _HIDDEN_FEATURES[up_name].blocks
    for input_dim, output_dim in ((2, 1), (1, 2)):
        hidden_fits = up.shape[output_dim] == blocks * down.shape[input_dim]
        features_fit = up.shape[input_dim] == down.shape[output_dim]
        if hidden_fits and features_fit:
            return input_dim
    raise UnsupportedModuleError(
        f"{style}: {up_name} {tuple(up.shape)} and the second weight {tuple(down.shape)} of "
        f"{type(module).__name__} do not have the same number of hidden features"
    )


def _hidden_shards_of_linears(style: str, module: nn.ModuleList) -> dict[str, ParameterPlacement]:
    shards: dict[str, ParameterPlacement] = {}
    for path, param in module.named_parameters():
        owner, _, suffix = path.rpartition(".")
        name = owner.rpartition(".")[2]
        is_linear = isinstance(module.get_submodule(owner), nn.Linear)
        if name not in _HIDDEN_FEATURES or not is_linear:
            raise _unknown_features(style, module)
        features = _HIDDEN_FEATURES[name]
        if features.are_outputs:
            shards[path] = _hidden_shard(module, 0, features.blocks, param)
        elif suffix == "weight":
            shards[path] = _hidden_shard(module, 1, features.blocks, param)
    return shards


def _unknown_features(style: str, module: nn.Module) -> UnsupportedModuleError:
    names = ", ".join(name for name, _ in module.named_parameters())
    return UnsupportedModuleError(
        f"{style}: to find the hidden features of {type(module).__name__}, its parameters must be "
        f"named {', '.join(_HIDDEN_FEATURES)} or <name>_bias, or be Linears of these names in a "
        f"ModuleList; got {names}"
    )


def _hidden_shard(module: nn.Module, dim: int, blocks: int, param: Tensor) -> ParameterPlacement:
    """Return the placement of a parameter whose dim holds so many blocks of hidden features."""
    if blocks == 1:
        return Shard(dim)
    size = param.shape[dim]
    if size % blocks:
        raise LayoutError(
            f"dim {dim} of {tuple(param.shape)} cannot be divided into {blocks} equal blocks"
        )
    # By default all gate features come first, then all up features. Otherwise they alternate, and
    # shards of even sizes keep the pairs together.
    if getattr(module, "is_concatenated", True) is False:
        return Shard(dim, multiple_of=blocks)
    return HeadShard(dim, Heads(size // blocks, 1, chunked=True), blocks)
