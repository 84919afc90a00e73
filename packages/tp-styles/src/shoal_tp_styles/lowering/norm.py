"""Modules that treat every token alone, on the rank's own part of the sequence.

x: S(sequence) -> y: S(sequence), no communication; the gradients of the replicated parameters are partial
sums and are reduced together, in one collective per module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor

from .boundary import arrive_local, wrap_like
from .enter import enter
from .forward import Lowered

__all__ = ["TOKENWISE", "Tokenwise", "is_norm"]

Params = dict[str, Tensor | None]


def _layer_norm(module: Any, x: Tensor, p: Params) -> Tensor:
    return functional.layer_norm(x, module.normalized_shape, p["weight"], p["bias"], module.eps)


def _rms_norm(module: Any, x: Tensor, p: Params) -> Tensor:
    return functional.rms_norm(x, module.normalized_shape, p["weight"], module.eps)


def _linear(module: Any, x: Tensor, p: Params) -> Tensor:
    weight = p["weight"]
    assert weight is not None, "a Linear has a weight"
    return functional.linear(x, weight, p["bias"])


def _plain(module: Any, x: Tensor, p: Params) -> Tensor:
    out: Tensor = type(module).forward(module, x)
    return out


TOKENWISE: dict[type[nn.Module], Callable[[Any, Tensor, Params], Tensor]] = {
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
    nn.Linear: _linear,
    nn.Identity: _plain,
    nn.ReLU: _plain,
    nn.GELU: _plain,
    nn.SiLU: _plain,
    nn.Tanh: _plain,
    nn.Sigmoid: _plain,
}


def _own_forward(module: Any, x: Tensor, p: Params) -> Tensor:
    """The module's own forward, with its parameters' local parts in their place for the time of the call."""
    held = dict(module._parameters)
    try:
        module._parameters.update(p)
        out: Tensor = type(module).forward(module, x)
    finally:
        module._parameters.update(held)
    return out


def is_norm(module: nn.Module) -> bool:
    """Whether a module of another library is, by name and parameters, a norm over the last dim."""
    name = type(module).__name__
    params = {key: param for key, param in module._parameters.items() if param is not None}
    plain = params.keys() <= {"weight", "bias"} and all(param.ndim == 1 for param in params.values())
    return plain and name.endswith(("RMSNorm", "LayerNorm")) and not module._modules and not module._buffers


class Tokenwise(Lowered):
    """Stand-in for a norm (or activation) under `SequenceParallel`."""

    __slots__ = ("compute",)

    def resolve(self) -> None:
        self.compute = TOKENWISE.get(type(self.module), _own_forward)

    def __call__(self, input: Tensor) -> Tensor:
        came: tuple[Any, ...] | None = None
        if isinstance(input, DTensor):
            came = (*input.shape,)
            input = arrive_local(input, self.port_in, self.mesh, grad=self.port_in.desired)
        params = enter(self.params, self.comm) if self.params else {}
        out = self.compute(self.module, input, params)
        if self.sharding.local_outputs:
            return out
        shape = None if came is None or out.shape != input.shape else came
        return wrap_like(out, self.port_in.desired, self.mesh, shape)
