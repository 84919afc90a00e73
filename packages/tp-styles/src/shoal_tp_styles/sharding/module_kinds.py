"""What a module counts as in a style's table: its class, the classes above, or its structure."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d

HOW_TO_QUANTIZE = (
    "To have quantized weights sharded, apply the plan with parallelize_module(..., lower=False) and quantize then: "
    "values and scales become shards of the same rows and columns"
)


class TransposedLinear(nn.Module):
    """Stands in the tables for modules that compute `x @ weight + bias`: a Linear whose weight is (in, out).

    GPT-2's `Conv1D` of the Hugging Face library is one.  It is recognised without importing anything: a module without
    children and buffers whose only parameters are a matrix and perhaps a vector, and whose `nf` is the number of
    columns.
    """


def _is_transposed(module: nn.Module) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or not module._parameters.keys() <= {"weight", "bias"}:
        return False
    columns = weight.shape[1]
    fits = getattr(module, "nf", None) == columns and (bias is None or bias.shape == (columns,))
    return fits and not module._modules and not module._buffers


def kinds_of(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """What a module counts as, most specific first: by structure, its class, the classes above.

    Example:
        >>> kinds_of(nn.ReLU())[0].__name__
        'ReLU'
    """
    parents = tuple(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return (TransposedLinear, *parents) if _is_transposed(module) else parents


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its user knows it, where `fully_shard` or `replicate` gave it another."""
    kind: type[nn.Module] = getattr(type(module), "_shoal_class", type(module))
    return kind


def is_grouped(module: Any) -> bool:
    """Whether a module is a convolution of several groups, which reads each input channel in one of them."""
    return isinstance(module, CONVOLUTIONS) and module.groups > 1


def keeps_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module that counts as `kind` computes what `kind` computes: a subclass may have its own forward."""
    return kind is TransposedLinear or type(module).forward is kind.forward


def computed_parameters(module: nn.Module) -> list[str]:
    """Tensors that are computed from other parameters before each forward: parametrizations, weight_norm, pruning.

    Example:
        >>> computed_parameters(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
        ['weight']
    """
    names: list[str] = [*module.parametrizations] if is_parametrized(module) else []  # type: ignore[misc]  # a ModuleDict
    for name, value in vars(module).items():  # the older utilities keep the result as a plain attribute
        if isinstance(value, Tensor) and any(f"{name}{end}" in module._parameters for end in ("_g", "_orig")):
            names.append(name)
    return names


def out_features(module: nn.Module) -> int | None:
    """Number of output features of a Linear with a weight of either orientation; None for other modules.

    Example:
        >>> out_features(nn.Linear(4, 8))
        8
    """
    if isinstance(module, nn.Linear):
        return module.out_features
    if not _is_transposed(module):
        return None
    columns: object = module.nf
    assert isinstance(columns, int), "nf is the number of columns"
    return columns
