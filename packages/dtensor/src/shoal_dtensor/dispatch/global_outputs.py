"""What an operator would return for the global tensors: one run without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._torch import Build, DataDependentError, OpOverload, recorded, shapes_of
from ..errors import OperatorArgumentError, OperatorIndexError
from ..layout.spec import Spec
from ..layout.symbolic_sizes import has_symbols
from ..layout.tensor_meta import TensorMeta
from ..rules.language.rule import flatten
from .arguments import is_list


def without_memory(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Build:
    """A function that makes the global arguments on a device, each tensor without memory."""

    def build(device: torch.device) -> tuple[Sequence[Any], Mapping[str, Any]]:
        return [_empty(value, device) for value in args], {name: _empty(v, device) for name, v in kwargs.items()}

    return build


def global_outputs(op: OpOverload, build: Build, specs: Sequence[Spec]) -> tuple[TensorMeta, ...]:
    """What the global tensor outputs are; none if that depends on data.

    Raises:
        OperatorArgumentError: if the operator refuses its arguments; OperatorIndexError: a dim or an index of them.
    """
    try:
        result = shapes_of(op, build, specs[0].mesh.device_type)
    except DataDependentError:
        return ()
    except (RuntimeError, ValueError) as error:
        raise OperatorArgumentError(f"{op}({', '.join(map(repr, specs))}): {error}") from error
    except IndexError as error:
        raise OperatorIndexError(f"{op}({', '.join(map(repr, specs))}): {error}") from error
    metas = tuple(TensorMeta(tuple(t.shape), t.stride(), t.dtype) for t in flatten(result))
    if not has_symbols(metas):
        return metas
    return tuple(TensorMeta(recorded(meta.shape), recorded(meta.stride), meta.dtype) for meta in metas)


def _empty(value: Any, device: torch.device) -> Any:
    """An argument with tensors that have no memory."""
    if isinstance(value, Spec):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.Generator):
        return None  # shapes do not depend on it, and kernels without memory refuse one
    return [_empty(item, device) for item in value] if is_list(value) else value
