"""Modules known by their structure rather than by their class."""

from __future__ import annotations

from torch import nn

__all__ = ["TransposedLinear", "kinds_of", "out_features"]


class TransposedLinear(nn.Module):
    """Stands in the tables for modules that compute `x @ weight + bias`: a Linear whose weight is (in, out).

    GPT-2's `Conv1D` of the Hugging Face library is one.  Nothing is imported to know it: a module without children and
    buffers whose only parameters are a matrix and perhaps a vector, and whose `nf` is the number of columns.
    """


def _is_transposed(module: nn.Module) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.ndim != 2 or not module._parameters.keys() <= {"weight", "bias"}:
        return False
    columns = weight.shape[1]
    fits = getattr(module, "nf", None) == columns and (bias is None or bias.shape == (columns,))
    return fits and not module._modules and not module._buffers


def kinds_of(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """What a module counts as, most specific first: what its structure says, its class, the classes above.

    Example:
        >>> kinds_of(nn.ReLU())[0].__name__
        'ReLU'
    """
    parents = tuple(kind for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return (TransposedLinear, *parents) if _is_transposed(module) else parents


def out_features(module: nn.Module) -> int | None:
    """Number of features that a Linear of either orientation gives; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if not _is_transposed(module):
        return None
    columns: object = module.nf
    assert isinstance(columns, int), "the number of columns is a number"
    return columns
