"""A module's own forward on a rank's tokens, on local parameters, or with other attention inside.

x: S(sequence) -> y: S(sequence)      no communication of activations; the gradients of the
                                      replicated parameters are partial sums, reduced in one
                                      collective per module
heads: S, parameter: S -> y           as the forward computes it; no communication
q, k, v: S(sequence) -> S(sequence)   the communication of the attention
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_context_parallel.internal import ContextOptions, RoutedAttention
from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import ReplacedAttention, current_watch, eager_only, is_compiling

from .._torch import watching_functions
from ..lowering.lowered import OnLocalTokens, nbytes
from ..lowering.parameters import call_with_replaced, local_parameters, run_own_forward
from ..lowering.ports import DTensorForward, from_local, sharded_input
from ..sharding.module_sharding import Collective, ModuleCall

Params = dict[str, Tensor | None]
# A module's input and its local parameters.
Compute = Callable[[Any, Tensor, Params], Tensor]


class _Computation(NamedTuple):
    """The computation of a module on some tokens.

    Attributes:
        compute: function of the module, its input and its local parameters.
        reads: names of the parameters that it reads; None: all.
    """

    compute: Compute
    reads: tuple[str, ...] | None


def _layer_norm(module: Any, x: Tensor, params: Params) -> Tensor:
    shape = module.normalized_shape
    return functional.layer_norm(x, shape, params["weight"], params["bias"], module.eps)


def _rms_norm(module: Any, x: Tensor, params: Params) -> Tensor:
    return functional.rms_norm(x, module.normalized_shape, params["weight"], module.eps)


def _linear(module: Any, x: Tensor, params: Params) -> Tensor:
    weight: Any = params["weight"]
    return functional.linear(x, weight, params["bias"])


def _elementwise(module: Any, x: Tensor, params: Params) -> Tensor:
    out: Tensor = type(module).forward(module, x)
    return out


def _forward_of_module(module: Any, x: Tensor, params: Params) -> Tensor:
    out: Tensor = run_own_forward(module, params | local_parameters(module._buffers), x)
    return out


TOKENWISE: dict[type[nn.Module], _Computation] = {
    nn.LayerNorm: _Computation(_layer_norm, ("weight", "bias")),
    nn.RMSNorm: _Computation(_rms_norm, ("weight",)),
    nn.Linear: _Computation(_linear, ("weight", "bias")),
    **dict.fromkeys(
        (nn.Identity, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        _Computation(_elementwise, ()),
    ),
}
_OTHER_MODULES = _Computation(_forward_of_module, None)


def is_norm(module: nn.Module) -> bool:
    """Tell by name and parameters whether a module of another library is a norm of the last dim."""
    if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
        return False
    params = {name: param for name, param in module._parameters.items() if param is not None}
    if not params.keys() <= {"weight", "bias"} or any(p.ndim != 1 for p in params.values()):
        return False
    return not module._modules and not module._buffers


class Tokenwise(OnLocalTokens):
    """Forward of a norm, or another module that treats tokens alone, on this rank's tokens."""

    __slots__ = ("compute", "features", "read")

    def resolve(self) -> None:
        module: Any = self.module
        self.compute: Compute
        # None: all parameters
        self.read: tuple[str, ...] | None
        self.compute, self.read = TOKENWISE.get(type(module), _OTHER_MODULES)
        # Dims of the input that belong to one token; elementwise modules have none.
        is_elementwise = self.read == ()
        normalized_shape = getattr(module, "normalized_shape", (1,))
        self.features: int = 0 if is_elementwise else len(normalized_shape)

    def __call__(self, input: Tensor) -> Tensor:
        global_shape = tuple(input.shape) if isinstance(input, DTensor) else None
        input = sharded_input(self, input)
        if not isinstance(input, Tensor):
            raise LayoutError(
                f"{self.sharding.style}: expected a tensor as the input, got {type(input).__name__}"
            )
        dim = getattr(self.port_in.desired, "dim", 0)
        position = dim + input.ndim if dim < 0 else dim
        if position >= input.ndim - self.features:
            raise LayoutError(
                f"{self.sharding.style}: dim {dim} of an input of shape {tuple(input.shape)} is a "
                f"feature dim of {type(self.module).__name__}, which reads all features of a "
                "token; shard a dim before it"
            )
        out = self.compute_tokens(input)
        if self.sharding.local_outputs:
            return out
        shape = global_shape if out.shape == input.shape else None
        return from_local(out, self.port_in.desired, self.mesh, shape)

    def dims_of_tokens(self, ndim: int) -> range:
        return range(ndim - self.features)

    def compute_tokens(self, local: Tensor) -> Tensor:
        """Return the module's output for this rank's tokens."""
        names = self.params if self.read is None else self.read
        params = self.local(*names, comm=self.comm) if names else {}
        return self.compute(self.module, local, params)


class SequenceDropout(DTensorForward):
    """Forward of a Dropout under `SequenceParallel`.

    An active Dropout runs on a DTensor, so it draws the values that one device with all tokens
    would draw.
    """

    one_axis = True

    def __call__(self, input: Tensor) -> Any:
        draws = self.module.training and self.module.p
        is_plain = self.sharding.local_outputs and not isinstance(input, DTensor)
        if is_plain and not draws:
            return input
        return super().__call__(input)


class LocalForward(DTensorForward):
    """The module's own forward on the local shards of its own parameters.

    The options of the `ModuleSharding` are names of integers that count sharded heads or features.
    While the forward runs, each of them is this rank's part of the count.
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
                    f"which cannot be divided equally by {ranks} ranks; use fewer ranks, or "
                    "gather the outputs of the projections with "
                    "ColwiseParallel(output_layouts=Replicate())"
                )
            self.counts[name] = count // ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(super().__call__, *args, **kwargs)
        local = local_parameters(dict(self.params))
        watch = None if is_compiling() else current_watch()
        if watch is not None:
            for name, shard in local.items():
                param = self.params[name]
                if shard is not None and isinstance(param, DTensor):
                    watch.axes.note_spec(shard, param.spec)
        return call_with_replaced(forward, (self.params, local), (vars(self.module), self.counts))


class ContextAttention(DTensorForward):
    """The module's earlier forward, whose attention reads the sequence of all ranks."""

    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        routed = RoutedAttention(self.mesh, self.sharding.options_of(ContextOptions))
        with watching_functions(), routed:
            return super().__call__(*args, **kwargs)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        method = call.sharding.options_of(ContextOptions).method
        ranks = call.ranks
        attentions = _attentions(call) if ranks > 1 else []
        if attentions:
            # the ranks compare their arguments, 4 bytes from each rank
            yield Collective("all_gather", 4 * ranks)
        for attention in attentions:
            yield from _collectives_of_attention(method, attention, ranks, backward=False)
            if any(tensor.requires_grad for tensor in attention):
                yield from _collectives_of_attention(method, attention, ranks, backward=True)


class _Attention(NamedTuple):
    """Queries, keys and values of one attention, of global shape."""

    query: Tensor
    key: Tensor
    value: Tensor


def _collectives_of_attention(
    method: str, attention: _Attention, ranks: int, *, backward: bool
) -> Iterator[Collective]:
    """Yield the collectives of one attention in one direction."""
    query, key, value = attention
    block = nbytes(key, value)
    # gradients of lower precision are summed in float32, with 4 bytes per element
    sums = block * max(4 // key.element_size(), 1)
    if method == "ring":
        # In a step each rank sends a block, `1 / ranks` of all keys and values.
        steps = ranks - 1
        yield from [Collective("all_to_all", block // steps, backward)] * steps
        if backward:
            yield from [Collective("all_to_all", sums // steps, backward)] * ranks
    elif method == "allgather":
        yield Collective("all_gather", block, backward)
        if backward:
            yield Collective("reduce_scatter", sums, backward)
    else:
        out = nbytes(query) // query.shape[-1] * value.shape[-1]
        yield Collective("all_to_all", nbytes(query) + block, backward)
        yield Collective("all_to_all", out, backward)


def _attentions(call: ModuleCall) -> list[_Attention]:
    """Return the attentions in a call.

    They are recorded in a run on meta tensors of global shape.
    """
    attentions: list[_Attention] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attentions.append(_Attention(query, key, value))
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    state = {name: value.to("meta") for name, value in call.module.named_buffers()}
    for name, value in call.module.named_parameters():
        state[name] = value.detach().to("meta").requires_grad_(value.requires_grad)
    with torch.enable_grad(), ReplacedAttention(attend):
        torch.func.functional_call(call.module, state, call.args, dict(call.kwargs))
    return attentions
