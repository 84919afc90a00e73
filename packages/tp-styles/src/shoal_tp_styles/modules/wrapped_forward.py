"""A module's own forward, called with local parameters and counts, or with the attention of a sharded sequence.

heads: S, parameter: S -> as the forward computes it        no communication
q, k, v: S(sequence) -> S(sequence)                         that of the attention
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoal_context_parallel.internal import ContextOptions, RoutedAttention
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import eager_only

from .._torch import watching_functions
from ..lowering.lowered import nbytes
from ..lowering.parameters import local_parameters, while_replaced
from ..lowering.ports import Boundary
from ..sharding.module_sharding import Collective, ModuleCall


class LocalCounts(NamedTuple):
    """Names of integers that count heads or features which are sharded; a rank's forward reads its part of each."""

    names: tuple[str, ...]


class LocalForward(Boundary):
    """The module's forward, with the local shards of its own parameters, and its counts, in their place."""

    __slots__ = ("counts",)

    def resolve(self) -> None:
        options, ranks = self.sharding.options, self.comm.size
        self.counts: dict[str, int] = {}
        for name in options.names if isinstance(options, LocalCounts) else ():
            count = getattr(self.module, name)
            if count % ranks:
                raise LayoutError(
                    f"{self.sharding.style}: {name} of {type(self.module).__name__} is {count}, which {ranks} ranks do "
                    "not share equally; use fewer ranks, or ColwiseParallel(output_layouts=Replicate()) on the "
                    "projections, whose outputs all ranks then hold"
                )
            self.counts[name] = count // ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, local = partial(super().__call__, *args, **kwargs), local_parameters(dict(self.params))
        return while_replaced(forward, (self.params, local), (vars(self.module), self.counts))


class ContextAttention(Boundary):
    """What was the forward before, with attention of the sharded sequence."""

    __slots__ = ()

    @eager_only
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with watching_functions(), RoutedAttention(self.comm, self.sharding.options_of(ContextOptions)):
            return super().__call__(*args, **kwargs)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        method, ranks = call.sharding.options_of(ContextOptions).method, call.ranks
        found = _attentions(call) if ranks > 1 else []
        if found:  # whether the arguments of all ranks fit
            yield Collective("all_gather", 4 * ranks)
        for q, k, v in found:
            yield from _declared(method, q, k, v, ranks)


def _declared(method: str, q: Tensor, k: Tensor, v: Tensor, ranks: int) -> Iterator[Collective]:
    """The collectives of one attention; in a step of the ring each rank sends a block, `1 / ranks` of the whole."""
    trained = any(x.requires_grad for x in (q, k, v))
    block, out = nbytes(k, v), nbytes(q) // q.shape[-1] * v.shape[-1]
    # Sums of low precision travel in float32.
    sums = block * max(4 // k.element_size(), 1)
    step = 1 if ranks == 1 else ranks - 1
    if method == "ring":
        yield from [Collective("all_to_all", block // step)] * (ranks - 1)
        if trained:
            yield from [Collective("all_to_all", block // step, backward=True)] * (ranks - 1)
            yield from [Collective("all_to_all", sums // step, backward=True)] * ranks
    elif method == "allgather":
        yield Collective("all_gather", block)
        if trained:
            yield Collective("all_gather", block, backward=True)
            yield Collective("reduce_scatter", sums, backward=True)
    else:
        for backward in (False, True) if trained else (False,):
            yield Collective("all_to_all", nbytes(q) + block, backward=backward)
            yield Collective("all_to_all", out, backward=backward)


def _attentions(call: ModuleCall) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of the attentions in a call, from a run on meta tensors of global shape."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    class _AttentionRecorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is functional.scaled_dot_product_attention:
                named = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs or {})
                found.append((named["query"], named["key"], named["value"]))
            return func(*args, **(kwargs or {}))

    module: nn.Module = call.module
    state = {name: value.to("meta") for name, value in module.named_buffers()}
    for name, value in module.named_parameters():
        state[name] = value.detach().to("meta").requires_grad_(value.requires_grad)
    with torch.enable_grad(), _AttentionRecorder():
        torch.func.functional_call(module, state, call.args, dict(call.kwargs))
    return found
