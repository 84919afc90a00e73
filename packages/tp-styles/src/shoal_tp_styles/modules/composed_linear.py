"""Linear layers of several factors or blocks: adapters, latents, fused projections, attention.

adapter   y = x W^T + scale * x A^T B^T   base and adapter run every collective together
    columns   x: R | S(d), W: S(0), A: R, B: S(0) -> y: S(-1)
    rows      x: S(-1), W: S(1), A: S(1), B: R -> y: R | S(d)
latent    x: R, W: R -> y: R              the gradient of the last features is summed over the ranks
fused     x: R | S(d) -> y: S(-1)         each block is sharded
heads     query, key, value: R -> output: R | S(d), by one reduction; the averaged weights, if they
          are requested, by another

R is replicated, and S(d) is sharded along dim d. `R | S(d)` is what the style declares: replicated,
or sharded along a dim of tokens. S(-1) are shards of the features. In the row `latent`, each rank
has the whole output and reads its last features for its own heads.

If several ranks hold the same head, the gradients of its parameters are summed over these ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.nn.functional import linear

from shoal_dtensor.errors import UnsupportedModuleError
from shoal_dtensor.internal import apply, is_compiling, shard_sizes
from shoal_mesh import Comm

from ..lowering import ports
from ..lowering.collective_functions import reduce
from ..lowering.lowered import (
    FeaturePart,
    Lowered,
    input_collectives,
    nbytes,
    output_collectives,
)
from ..lowering.parameters import local_parameters
from ..lowering.ports import from_local
from ..lowering.shared_reduction import copy
from ..sharding.module_sharding import (
    Adapter,
    Collective,
    FusedBlocks,
    Heads,
    HeadShard,
    LatentFeatures,
    ModuleCall,
)


class AdapterLinear(Lowered):
    """Forward of a Linear with a low-rank adapter, sharded by columns or by rows like its base."""

    __slots__ = ("is_row_sharded",)

    def resolve(self) -> None:
        self.is_row_sharded: bool = self.sharding.shards("lora_A")

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        adapter = call.sharding.options_of(Adapter)
        weight = call.module.get_parameter("weight")
        # By rows each rank holds B (out, rank) whole, by columns A (rank, in).
        is_row_sharded = call.sharding.shards("lora_A")
        width = weight.shape[0] if is_row_sharded else weight.shape[1]
        factor_bytes = adapter.rank * width * weight.element_size()
        yield from input_collectives(call)
        yield from output_collectives(call, "bias" if adapter.train_base else None)
        yield Collective("all_reduce", factor_bytes, backward=True)

    def __call__(self, input: Tensor) -> Tensor:
        sharded: tuple[str, ...]
        if self.is_row_sharded:
            x = ports.sharded_input(self, input)
            sharded = ("weight", "lora_A")
            replicated = "lora_B"
        else:
            x = ports.replicated_input(self, input)
            sharded = ("weight", "bias", "lora_B")
            replicated = "lora_A"
        # Each rank multiplies the replicated factor with its shard of the other one, so the
        # gradients of the replicated factor are partial sums. `comm=` adds them over the ranks.
        params: Any = {**self.local(*sharded), **self.local(replicated, comm=self.comm)}
        base = linear(x, params["weight"], params.get("bias"))
        adapted = linear(linear(x, params["lora_A"]), params["lora_B"])
        out: Tensor = base + self.sharding.options_of(Adapter).scale * adapted
        if self.is_row_sharded:
            return ports.partial_output(self, out, "bias")
        return ports.sharded_output(self, out)


class LatentLinear(Lowered):
    """Forward of a Linear of multi-head latent attention.

    The first features of its output are the latent. The last `rotary` features are for rotary
    positions. Each rank's heads read all of them, so their gradients are partial sums, which are
    added over the ranks. Example: 576 features, of which 64 are rotary -> a latent of 512.
    """

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        if call.output.requires_grad:
            rotary = call.sharding.options_of(LatentFeatures).rotary
            feature_bytes = nbytes(call.output) // call.output.shape[-1]
            yield Collective("all_reduce", feature_bytes * rotary, backward=True)

    def feature_parts(self) -> Sequence[FeaturePart]:
        rotary = self.sharding.options_of(LatentFeatures).rotary
        features = self.params["weight"].shape[0]
        return (FeaturePart(features - rotary, "whole"), FeaturePart(rotary, "read_by_rank"))

    def __call__(self, input: Tensor) -> Tensor:
        local: Any = self.local("weight", "bias")
        # The weight is replicated, so an input in the layout "sharded like the weight" is whole.
        out = linear(ports.sharded_input(self, input), local["weight"], local["bias"])
        # Example: 576 features, of which 64 are rotary -> 512 and 64.
        sizes = [part.size for part in self.feature_parts()]
        latent, read_by_heads = torch.split_with_sizes(out, sizes, -1)
        return torch.cat([latent, copy(read_by_heads, self.comm)], -1)


class _Concatenate(Function):
    """Function from local shards to their concatenation along dim 0.

    If the shards are adjacent in one buffer, the result is a view of the buffer. After a change of
    dtype or a load they may not be adjacent, and the result is a copy.
    """

    @staticmethod
    def forward(ctx: Any, *shards: Tensor) -> Tensor:
        ctx.rows = [shard.shape[0] for shard in shards]
        first = shards[0]
        end = first.data_ptr()
        storage = first.untyped_storage().data_ptr()
        for shard in shards:
            is_adjacent = shard.data_ptr() == end and shard.is_contiguous()
            if not is_adjacent or shard.untyped_storage().data_ptr() != storage:
                return torch.cat(shards)
            # Example: a shard (2, 4) in float32 at address 1000 -> the next one must be at 1032.
            end += shard.numel() * shard.element_size()
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.split_with_sizes(grad, ctx.rows))


class FusedLowering(Lowered):
    """Base class of the forwards of fused modules; it concatenates the parameters of the blocks."""

    __slots__ = ("comms", "transposed_name")

    def resolve(self) -> None:
        fused = self.sharding.options_of(FusedBlocks)
        # whether each block is a parameter of its own, such as `weight_q`
        splits = fused.splits(self.comm.size)
        comm_of_blocks = [self._comm_of_same_heads(heads) for heads in fused.blocks.values()]
        # For the fused weight and bias, by name of each parameter that they consist of: the ranks
        # that hold the same heads as this rank, or None.
        self.comms: dict[str, dict[str, Comm | None]] = {}
        for fused_name in fused.names:
            if splits:
                names = fused.parts(fused_name)
                self.comms[fused_name] = dict(zip(names, comm_of_blocks, strict=True))
            else:
                self.comms[fused_name] = {fused_name: None}
        # the fused weight if its shape is (in, out), so that it has to be transposed
        self.transposed_name: str | None = None
        if fused.transposed and not splits:
            self.transposed_name = fused.names[0]

    def _comm_of_same_heads(self, heads: Heads) -> Comm | None:
        """Return the ranks that hold the same head of a block as this rank; None for this alone.

        Example: 2 heads on 4 ranks -> ranks 0 and 1 hold head 0, and ranks 2 and 3 hold head 1.
        """
        # either one axis, or (heads, ranks that hold the same head)
        mesh = heads.mesh(self.mesh)
        return None if mesh.ndim == 1 else mesh.comm(1)

    def concatenate(self, fused_name: str) -> Tensor | None:
        """Return the local weight (out, in), or bias, of all blocks; None if there is no bias."""
        comms = self.comms[fused_name]
        # parameters whose gradients are not summed share one autograd node
        local = self.local(*(name for name, comm in comms.items() if comm is None))
        for name, comm in comms.items():
            if comm is not None:
                local |= self.local(name, comm=comm)
        # `comms` has the order of the blocks.
        shards = []
        for name in comms:
            shard = local[name]
            if shard is not None:
                shards.append(shard)
        if not shards:
            return None
        if len(shards) == 1:
            matrix = shards[0]
        elif is_compiling():
            matrix = torch.cat(shards)
        else:
            matrix = apply(_Concatenate, *shards)
        return matrix.t() if fused_name == self.transposed_name else matrix


class FusedColumn(FusedLowering):
    """Forward of a fused Linear, or of a Linear of heads that several ranks may hold."""

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from super().collectives(call)
        fused = call.sharding.options_of(FusedBlocks)
        for param in call.trained_parameters(*fused.names):
            # bytes of one row of a weight, or of one element of a bias
            feature_bytes = nbytes(param) // fused.features
            for heads in fused.blocks.values():
                # The gradients of a head are summed over the ranks that hold it. Example: 2 heads
                # of 8 features on 4 ranks -> 8 rows are summed over 4 // 2 = 2 ranks.
                if heads.replicated(call.ranks):
                    size = feature_bytes * heads.size
                    ranks = call.ranks // heads.count
                    yield Collective("all_reduce", size, backward=True, ranks=ranks)

    def feature_parts(self) -> Sequence[FeaturePart]:
        parts = []
        for heads in self.sharding.options_of(FusedBlocks).blocks.values():
            # Example: 2 heads of 8 features on 4 ranks. Each rank has one head of 8 features. They
            # count as its shard of a block of 4 heads, in which each head is repeated.
            is_repeated = heads.replicated(self.comm.size)
            size = heads.size if is_repeated else self._shard_sizes(heads)[self.comm.rank]
            parts.append(FeaturePart(size, "shard"))
        return parts

    def _shard_sizes(self, heads: Heads) -> Sequence[int]:
        """Return the sizes of the ranks' shards of a block that is not replicated."""
        ranks = self.comm.size
        return shard_sizes(heads.features, HeadShard(0, heads).on(ranks), ranks)

    def output_blocks(self) -> Sequence[Sequence[int]]:
        """Return the sizes of the ranks' shards of each block; empty if ranks hold the same heads.

        Example: a query block with 4 heads of 8 features, and a key block with 2, on 2 ranks ->
        ((16, 16), (8, 8)).
        """
        fused = self.sharding.options_of(FusedBlocks)
        ranks = self.comm.size
        sizes = []
        for heads in fused.blocks.values():
            if heads.replicated(ranks):
                return ()
            sizes.append(self._shard_sizes(heads))
        return sizes

    def __call__(self, input: Tensor) -> Tensor:
        input = ports.replicated_input(self, input)
        weight = self.concatenate("weight")
        assert weight is not None, "a Linear has a weight"
        return linear(input, weight, self.concatenate("bias"))


OWN_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class AttentionHeads(FusedLowering):
    """Forward of nn.MultiheadAttention on this rank's heads."""

    # `apply_dropout` draws the numbers of all heads on this axis. It does not know other axes that
    # shard the input, so dropout is refused if there are any.
    one_axis = True

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        for index in range(3):
            yield from input_collectives(call, index)
        yield from output_collectives(call, "out_proj.bias")
        weights = call.outputs[1]
        if weights is not None:
            yield Collective("all_reduce", nbytes(weights))

    def __call__(  # noqa: PLR0913  # the signature of nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self.module
        if need_weights and not average_attn_weights:
            raise UnsupportedModuleError(
                "HeadParallel: average_attn_weights=False is not supported, because the weights "
                "of single heads are on different ranks; leave it True"
            )
        is_batched = query.ndim == 3
        inputs = [query, key, value]
        if not is_batched:
            inputs = [x.unsqueeze(0) for x in inputs]
        elif not module.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        q, k, v = self.project(inputs, same=(query is key and key is value))
        # As in nn.MultiheadAttention, `is_causal` is only a hint if there is a mask: the mask is
        # then causal itself.
        adds_causal_mask = is_causal and attn_mask is None
        mask = _mask(q, k, key_padding_mask, attn_mask, causal=adds_causal_mask)
        drops = module.training and module.dropout > 0
        attention = None
        if need_weights or drops:
            scores = torch.matmul(q, k.transpose(-2, -1)) * module.head_dim**-0.5
            if mask is not None:
                scores = scores + mask
            attention = scores.softmax(-1)
            if drops:
                attention = self.apply_dropout(attention)
            mixed = attention @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        weight: Any = local_parameters({"weight": module.out_proj.weight})["weight"]
        # (batch, heads, length, head_dim) -> (length, batch, features of this rank's heads). The
        # memory has this order as in nn.MultiheadAttention, because a dropout that follows draws
        # values in the order of memory.
        by_position = mixed.permute(2, 0, 1, 3).flatten(-2)
        # (length, batch, features)
        partial = functional.linear(by_position, weight)
        # `partial_output` reads dims of the caller's tensors, so they are restored first. The views
        # do not change the memory.
        if not is_batched:
            # (length, features)
            partial = partial.squeeze(1)
        elif module.batch_first:
            # (batch, length, features)
            partial = partial.transpose(0, 1)
        out = ports.partial_output(self, partial, module.out_proj.bias)
        if attention is None or not need_weights:
            return out, None
        weights = reduce(attention.sum(1), self.comm) / module.num_heads
        if not is_batched:
            weights = weights.squeeze(0)
        return out, weights

    def project(self, inputs: list[Tensor], *, same: bool) -> list[Tensor]:
        """Return this rank's queries, keys and values: `(batch, heads, length, head_dim)`."""
        bias = self.concatenate("in_proj_bias")
        weight = self.concatenate("in_proj_weight")
        separate = self.local(*OWN_PROJECTIONS)
        # Example: 4 heads of 8 features on this rank -> a weight of 96 rows, 32 for the queries, 32
        # for the keys and 32 for the values.
        projected: Sequence[Tensor]
        if same and weight is not None:
            x = copy(inputs[0], self.comm)
            # Example, continued: three tensors (batch, length, 32).
            projected = functional.linear(x, weight, bias).chunk(3, -1)
        else:
            # There are separate weights where keys or values have dims of their own.
            weights: Any = separate.values() if weight is None else weight.chunk(3)
            biases: Sequence[Tensor | None] = [None] * 3 if bias is None else bias.chunk(3)
            projected = []
            for x, w, b in zip(inputs, weights, biases, strict=True):
                projected.append(functional.linear(copy(x, self.comm), w, b))
        head_dim: Any = self.module.head_dim
        by_head = [x.view(*x.shape[:-1], x.shape[-1] // head_dim, head_dim) for x in projected]
        # (batch, length, heads, head_dim) -> (batch, heads, length, head_dim)
        return [x.transpose(1, 2) for x in by_head]

    def apply_dropout(self, attention: Tensor) -> Tensor:
        """Return attention weights after dropout, with the values that one device would draw.

        The weights become a DTensor of all heads. Dropout on it draws the random numbers of the
        global shape, and each rank takes the numbers of its heads.
        """
        module: Any = self.module
        placement = HeadShard(1, Heads(module.num_heads, 1)).on(self.comm.size)
        shape = attention.shape[0], module.num_heads, *attention.shape[2:]
        whole = from_local(attention, placement, self.mesh, shape)
        out: Any = functional.dropout(whole, module.dropout)
        local: Tensor = out.to_local(grad_placements=(placement,))
        return local


def _mask(
    q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, *, causal: bool
) -> Tensor | None:
    """Return the mask that is added to the scores.

    The mask broadcasts over `(batch, heads, queries, keys)`.
    """
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    if mask is not None and mask.ndim == 3:
        raise UnsupportedModuleError(
            "HeadParallel: a mask per head is not supported, because it would have to be sharded "
            "by heads; use one mask for all heads"
        )
    masks = [] if mask is None else [mask]
    if padding is not None:
        # (batch, keys) -> (batch, 1, 1, keys)
        masks.append(padding.view(-1, 1, 1, k.shape[-2]))
    total: Tensor | None = None
    for addend in masks:
        if addend.dtype == torch.bool:
            zeros = torch.zeros_like(addend, dtype=q.dtype)
            addend = zeros.masked_fill_(addend, -torch.inf)
        total = addend if total is None else total + addend
    return total
