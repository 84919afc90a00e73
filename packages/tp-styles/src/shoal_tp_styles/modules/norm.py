"""Modules that treat every token alone.

x: S(sequence) -> y: S(sequence)    no communication of activations; the gradients of the replicated parameters are
                                    partial sums, reduced in one collective per module
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError

from ..lowering.lowered import Lowered, declare_summed_gradients
from ..lowering.parameters import local_parameters, own_forward
from ..lowering.ports import Boundary, from_local, sharded_input
from ..sharding.module_sharding import Collective, ModuleCall

Params = dict[str, Tensor | None]


Compute = Callable[[Any, Tensor, Params], Tensor]  # of a module, its input and its local parameters

# The computation, and the parameters that it reads.
TOKENWISE: dict[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.LayerNorm: (
        lambda module, x, p: functional.layer_norm(x, module.normalized_shape, p["weight"], p["bias"], module.eps),
        ("weight", "bias"),
    ),
    nn.RMSNorm: (
        lambda module, x, p: functional.rms_norm(x, module.normalized_shape, p["weight"], module.eps),
        ("weight",),
    ),
    nn.Linear: (lambda module, x, p: functional.linear(x, p["weight"], p["bias"]), ("weight", "bias")),
    **dict.fromkeys(
        (nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        (lambda module, x, _: type(module).forward(module, x), ()),
    ),
}


def _own_forward(module: Any, x: Tensor, p: Params) -> Tensor:
    out: Tensor = own_forward(module, {**p, **local_parameters(module._buffers)}, x)
    return out


def is_norm(module: nn.Module) -> bool:
    """Whether a module of another library is, by name and parameters, a norm over the last dim."""
    name = type(module).__name__
    params = {key: param for key, param in module._parameters.items() if param is not None}
    plain = params.keys() <= {"weight", "bias"} and all(param.ndim == 1 for param in params.values())
    return plain and name.endswith(("RMSNorm", "LayerNorm")) and not module._modules and not module._buffers


class Tokenwise(Lowered):
    """A norm (or activation) on this rank's shard of the sequence."""

    __slots__ = ("compute", "features", "read")

    def resolve(self) -> None:
        module: Any = self.module
        self.compute: Compute
        self.read: tuple[str, ...] | None  # None: all parameters
        self.compute, self.read = TOKENWISE.get(type(module), (_own_forward, None))
        # Dims of the input that belong to one token; elementwise modules have none.
        self.features: int = 0 if self.read == () else len(getattr(module, "normalized_shape", (1,)))

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_summed_gradients(call.module.parameters())

    def __call__(self, input: Tensor) -> Tensor:
        global_shape = (*input.shape,) if isinstance(input, DTensor) else None
        input = sharded_input(self, input)
        if not isinstance(input, Tensor):
            raise LayoutError(f"{self.sharding.style}: expected a tensor as the input, got {type(input).__name__}")
        dim = getattr(self.port_in.desired, "dim", 0)
        if (dim + input.ndim if dim < 0 else dim) >= input.ndim - self.features:
            raise LayoutError(
                f"{self.sharding.style}: dim {dim} of an input of shape {tuple(input.shape)} is a feature dim of "
                f"{type(self.module).__name__}, which reads all features of a token; shard one of the dims before it"
            )
        out = self.computed(input)
        if self.sharding.local_outputs:
            return out
        shape = global_shape if out.shape == input.shape else None
        return from_local(out, self.port_in.desired, self.mesh, shape)

    def computed(self, local: Tensor) -> Tensor:
        """What the module makes of this rank's tokens."""
        names = self.params if self.read is None else self.read
        return self.compute(self.module, local, self.local(*names, comm=self.comm) if names else {})


class SequenceDropout(Boundary):
    """A Dropout under `SequenceParallel`, on this rank's shard of the sequence.

    While it is active it draws as a DTensor: the values that one device with the full sequence would draw.  Otherwise
    it returns its input.
    """

    __slots__ = ()
    one_axis = True

    def __call__(self, input: Tensor) -> Any:
        module: Any = self.module
        idle = not module.training or module.p == 0
        if idle and self.sharding.local_outputs and not isinstance(input, DTensor):
            return input
        return super().__call__(input)
