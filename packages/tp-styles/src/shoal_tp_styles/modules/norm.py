"""Modules that treat every token, or every group of channels, alone.

tokenwise   x: S(sequence) -> y: S(sequence)                           no communication of activations; the gradients
            of the replicated parameters are partial sums, reduced in one collective per module
channels    x: S(channels), W: S(0), b: S(0) -> y: S(channels)         no communication; of group norms complete groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import shard_sizes

from ..lowering.boundary import Boundary, from_local, input_dtensor
from ..lowering.lowered import Lowered
from ..lowering.parameters import local_parameters, while_replaced
from ..lowering.ports import declare_summed_gradients, declares, own_input, sharded_output
from ..sharding.module_kinds import keeps_forward
from ..sharding.module_sharding import Collective, ModuleCall

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


# The computation, and the parameters that it reads.
TOKENWISE: dict[type[nn.Module], tuple[Callable[[Any, Tensor, Params], Tensor], tuple[str, ...]]] = {
    nn.LayerNorm: (_layer_norm, ("weight", "bias")),
    nn.RMSNorm: (_rms_norm, ("weight",)),
    nn.Linear: (_linear, ("weight", "bias")),
    **dict.fromkeys((nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid), (_plain, ())),
}


def _own_forward(module: Any, x: Tensor, p: Params, counts: dict[str, int] | None = None) -> Tensor:
    """The module's own forward, with local shards in the place of its parameters and buffers, and other counts."""
    forward, buffers = partial(type(module).forward, module, x), local_parameters(module._buffers)
    out: Tensor = while_replaced(
        forward, (module._parameters, p), (module._buffers, buffers), (vars(module), counts or {})
    )
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
        self.compute: Callable[[Any, Tensor, Params], Tensor]
        self.read: tuple[str, ...] | None  # None: all parameters
        self.compute, self.read = TOKENWISE.get(type(module), (_own_forward, None))
        # Dims of the input that belong to one token; elementwise modules have none.
        self.features: int = 0 if self.compute is _plain else len(getattr(module, "normalized_shape", (1,)))

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from declare_summed_gradients(call.module.parameters())

    def __call__(self, input: Tensor) -> Tensor:
        global_shape = (*input.shape,) if isinstance(input, DTensor) else None
        input = own_input(self, input)
        self.check_dim(input)
        out = self.computed(input)
        if self.sharding.local_outputs:
            return out
        shape = global_shape if out.shape == input.shape else None
        return from_local(out, self.port_in.desired, self.mesh, shape)

    def computed(self, local: Tensor) -> Tensor:
        """What the module makes of this rank's tokens."""
        names = self.params if self.read is None else self.read
        return self.compute(self.module, local, self.local(*names, comm=self.comm) if names else {})

    def check_dim(self, local: Tensor) -> None:
        """Raise LayoutError if a dim of features is sharded, or this is no tensor."""
        if not isinstance(local, Tensor):
            raise LayoutError(f"{self.sharding.style}: expected a tensor as the input, got {type(local).__name__}")
        dim = getattr(self.port_in.desired, "dim", 0)
        if (dim + local.ndim if dim < 0 else dim) >= local.ndim - self.features:
            raise LayoutError(
                f"{self.sharding.style}: dim {dim} of an input of shape {tuple(local.shape)} is a feature dim of "
                f"{type(self.module).__name__}, which reads all features of a token; shard one of the dims before it"
            )


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


class ChannelShards(Lowered):
    """A batch norm, group norm or activation with parameters, on this rank's channels; ranks may hold unequally many.

    What has a forward of its own runs on DTensors, and so does a batch norm or an activation without a channel here.
    """

    __slots__ = ("channels", "groups", "runs_locally", "sizes")
    collectives = declares()

    def resolve(self) -> None:
        module: Any = self.module
        kinds = {nn.PReLU: "num_parameters", nn.GroupNorm: "num_channels", nn.Module: "num_features"}
        self.channels: int = getattr(module, next(name for kind, name in kinds.items() if isinstance(module, kind)))
        placement: Any = self.port_in.desired
        # Of 6 groups of 2 channels on 4 ranks: 4 4 4 0, complete groups.
        self.sizes: list[int] = shard_sizes(self.channels, placement, self.comm.size)
        own = self.sizes[self.comm.rank]
        self.groups: dict[str, int] = {}
        if isinstance(module, nn.GroupNorm):
            self.groups["num_groups"] = own * module.num_groups // module.num_channels
        # All batch norms have the forward of BatchNorm1d.
        kept = any(keeps_forward(module, kind) for kind in (nn.PReLU, nn.GroupNorm, nn.BatchNorm1d))
        self.runs_locally: bool = kept and (own > 0 or isinstance(module, nn.GroupNorm))

    def __call__(self, input: Tensor) -> Tensor:
        module = self.module
        expected = self.sizes[self.comm.rank]
        if not isinstance(input, DTensor) and input.shape[1] != expected:
            unit: Any = getattr(self.port_in.desired, "multiple_of", 1)
            of_groups = f"complete groups: by ColwiseParallel().aligned({unit})"
            raise LayoutError(
                f"ChannelParallel: {module} holds {expected} channels here, but {input.shape[1]} arrived; shard "
                f"the module before it by the same channels ({of_groups if self.groups else '`.aligned` on both'})"
            )
        if not self.runs_locally:
            return self._on_dtensors(input)
        x, params = own_input(self, input), self.local(*self.params)
        if expected:
            out = _own_forward(module, x, params, self.groups)
        else:  # a group norm's: of no channel, which kernels refuse; the gradients are empty, but they arrive
            out = x.movedim(1, -1)
            for name, combine in (("weight", torch.mul), ("bias", torch.add)):
                param = params[name]
                out = out if param is None else combine(out, param)
            out = out.movedim(-1, 1)
        return sharded_output(self, out, 1, self.channels, None)

    def _on_dtensors(self, input: Tensor) -> Tensor:
        module, port = self.module, self.port_in
        if isinstance(input, DTensor):
            arrived = input_dtensor(input, port, self.mesh)
        else:
            arrived = from_local(input, port.desired, self.mesh, (input.shape[0], self.channels, *input.shape[2:]))
        out: Any = type(module).forward(module, arrived)
        if not self.sharding.local_outputs:
            return out  # type: ignore[no-any-return]  # a module's forward has no type
        local: Tensor = out.to_local(grad_placements=(port.desired,))
        return local
