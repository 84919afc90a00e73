"""A module's own forward on local tokens or parameters, or with sequence-parallel attention.

The forward runs on a rank's tokens, with local parameters and counts, or with other attention
inside.

x: S(sequence) -> y: S(sequence)    no communication of activations; the gradients of the replicated parameters are
                                    partial sums, reduced in one collective per module
heads: S, parameter: S -> as the forward computes it        no communication
q, k, v: S(sequence) -> S(sequence)                         that of the attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel.internal import ContextOptions, RoutedAttention
from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import ReplacedAttention, eager_only

from .._torch import watching_functions
from ..lowering.lowered import Lowered, nbytes, summed_gradient_collectives
from ..lowering.parameters import local_parameters, own_forward, while_replaced
from ..lowering.ports import DTensorForward, from_local, sharded_input
from ..sharding.module_sharding import Collective, ModuleCall

Params = dict[str, Tensor | None]
# of a module, its input and its local parameters
Compute = Callable[[Any, Tensor, Params], Tensor]

# The computation, and the parameters that it reads.
TOKENWISE: dict[type[nn.Module], tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    nn.LayerNorm: (
        lambda module, x, p: functional.layer_norm(
            x, module.normalized_shape, p["weight"], p["bias"], module.eps
        ),
        ("weight", "bias"),
    ),
    nn.RMSNorm: (
        lambda module, x, p: functional.rms_norm(
            x, module.normalized_shape, p["weight"], module.eps
        ),
        ("weight",),
    ),
    nn.Linear: (
        lambda module, x, p: functional.linear(x, p["weight"], p["bias"]),
        ("weight", "bias"),
    ),
    **dict.fromkeys(
        (nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        (lambda module, x, _: type(module).forward(module, x), ()),
    ),
}
# Of other modules: all parameters.
_OTHER: Any = (
    lambda module, x, p: own_forward(module, p | local_parameters(module._buffers), x),
    None,
)


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module of another library is a norm over the last dim.

    The test is by the module's name and parameters.
    """
    name = type(module).__name__
    params = {key: param for key, param in module._parameters.items() if param is not None}
    plain = params.keys() <= {"weight", "bias"} and all(
        param.ndim == 1 for param in params.values()
    )
    return (
        plain
        and name.endswith(("RMSNorm", "LayerNorm"))
        and not module._modules
        and not module._buffers
    )


class Tokenwise(Lowered):
    """A norm (or activation) on this rank's shard of the sequence."""

    __slots__ = ("compute", "features", "read")

    def resolve(self) -> None:
        module: Any = self.module
        self.compute: Compute
        self.read: tuple[str, ...] | None  # None: all parameters
        self.compute, self.read = TOKENWISE.get(type(module), _OTHER)
        # Dims of the input that belong to one token; elementwise modules have none.
        self.features: int = (
            0 if self.read == () else len(getattr(module, "normalized_shape", (1,)))
        )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from summed_gradient_collectives(call.module.parameters())

    def __call__(self, input: Tensor) -> Tensor:
        global_shape = (*input.shape,) if isinstance(input, DTensor) else None
        input = sharded_input(self, input)
        if not isinstance(input, Tensor):
            raise LayoutError(
                f"{self.sharding.style}: expected a tensor as the input, got {type(input).__name__}"
            )
        dim = getattr(self.port_in.desired, "dim", 0)
        if (dim + input.ndim if dim < 0 else dim) >= input.ndim - self.features:
            raise LayoutError(
                f"{self.sharding.style}: dim {dim} of an input of shape {tuple(input.shape)} is a "
                f"feature dim of {type(self.module).__name__}, which reads all features of a "
                "token; shard one of the dims before it"
            )
        out = self.computed(input)
        if self.sharding.local_outputs:
            return out
        shape = global_shape if out.shape == input.shape else None
        return from_local(out, self.port_in.desired, self.mesh, shape)

    def computed(self, local: Tensor) -> Tensor:
        """Return the module's output for this rank's tokens."""
        names = self.params if self.read is None else self.read
        return self.compute(self.module, local, self.local(*names, comm=self.comm) if names else {})


class SequenceDropout(DTensorForward):
    """A Dropout under `SequenceParallel`.

    An active one draws, as a DTensor, the values that one device with all tokens would draw.
    """

    one_axis = True

    def __call__(self, input: Tensor) -> Any:
        draws = self.module.training and self.module.p
        plain = self.sharding.local_outputs and not isinstance(input, DTensor)
        return super().__call__(input) if draws or not plain else input


class LocalForward(DTensorForward):
    """The module's forward, with the local shards of its own parameters in their place.

    The options are names of integers that count sharded heads or features; the forward reads this
    rank's part of each.
    """

    __slots__ = ("counts",)

    def resolve(self) -> None:
        ranks = self.comm.size
        self.counts: dict[str, int] = {}
        for name in self.sharding.options_of(tuple):
            count = getattr(self.module, name)
            if count % ranks:
                raise LayoutError(
                    f"{self.sharding.style}: {name} of {type(self.module).__name__} is {count}, "
                    f"which {ranks} ranks do not share equally; use fewer ranks, or "
                    "ColwiseParallel(output_layouts=Replicate()) on the projections, whose outputs "
                    "all ranks then hold"
                )
            self.counts[name] = count // ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(super().__call__, *args, **kwargs)
        local = local_parameters(dict(self.params))
        return while_replaced(forward, (self.params, local), (vars(self.module), self.counts))


class ContextAttention(DTensorForward):
    """The previous forward, with attention of the sharded sequence."""

    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with (
            watching_functions(),
            RoutedAttention(self.mesh, self.sharding.options_of(ContextOptions)),
        ):
            return super().__call__(*args, **kwargs)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        method = call.sharding.options_of(ContextOptions).method
        ranks = call.ranks
        steps = call.ranks - 1
        found = _attentions(call) if ranks > 1 else []
        if found:  # whether the arguments of all ranks fit
            yield Collective("all_gather", 4 * ranks)
        for q, k, v in found:
            block = nbytes(k, v)
            out = nbytes(q) // q.shape[-1] * v.shape[-1]
            # those of low precision travel in float32
            sums = block * max(4 // k.element_size(), 1)
            for backward in (False, True) if any(x.requires_grad for x in (q, k, v)) else (False,):
                # in a step each rank sends a block, `1 / ranks` of the whole
                if method == "ring":
                    yield from [Collective("all_to_all", block // steps, backward)] * steps
                    if backward:
                        yield from [Collective("all_to_all", sums // steps, backward)] * ranks
                elif method == "allgather":
                    yield Collective("all_gather", block, backward)
                    if backward:
                        yield Collective("reduce_scatter", sums, backward)
                else:
                    yield Collective("all_to_all", nbytes(q) + block, backward)
                    yield Collective("all_to_all", out, backward)


def _attentions(call: ModuleCall) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of the attentions in a call.

    They are recorded in a run on meta tensors of global shape.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append((query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    state = {name: value.to("meta") for name, value in call.module.named_buffers()}
    for name, value in call.module.named_parameters():
        state[name] = value.detach().to("meta").requires_grad_(value.requires_grad)
    with torch.enable_grad(), ReplacedAttention(attend):
        torch.func.functional_call(call.module, state, call.args, dict(call.kwargs))
    return found
