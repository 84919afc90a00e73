"""Linear layers sharded by output features (columns) or input features (rows), on local tensors.

    columns  x: R -> y: S(-1)     backward: all-reduce of dx (shared by all readers of x), beside dW
             x: S(d) -> y: S(-1)  all-gather of x; backward: reduce-scatter of dx, beside dW
    rows     x: S(-1) -> y: R     all-reduce of y; backward: nothing
             x: S(-1) -> y: S(d)  reduce-scatter of y; backward: all-gather of dy

Under a style with `.overlapped(chunks)` the gather of x, the reduction of y, and in the backward
the gather of dy run in chunks of dim 0 and overlap the products of other chunks.

The product and its collectives are one autograd function, which works on the local shard of the
weight. The shard's gradient is added to `.grad`, or returned as a DTensor with the weight's spec.
For backward the function saves an alias of the input, and the shard of the weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import linear

from shoal_dtensor import DTensor, Partial
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    apply,
    first_order_only,
    grad_route,
    is_compiling,
    local_shard,
    open_blocks,
    replicas_are_compared,
    unwatched,
    unwatched_by_subclasses,
)
from shoal_mesh import Comm
from shoal_mesh.internal import Pending, all_reduce_, observers

from .._torch import autocast_dtype, autocasting
from ..lowering import ports
from ..lowering.collective_functions import (
    ActivationShard,
    gather_dim,
    reduce_scatter_dim,
    sharded_dim,
)
from ..lowering.lowered import Lowered, input_collectives, output_collectives, spec_of
from ..lowering.overlap import (
    chunked_collectives,
    chunks_of,
    gathered_product,
    reduced_product,
)
from ..lowering.parameters import check_plain, deliver_grad, deliver_product, plain_error
from ..lowering.ports import from_local, local_input
from ..lowering.shared_reduction import find_shared_input, keep_shared_input
from ..sharding.module_sharding import Collective, ModuleCall

# On a CPU the reduction of dx overlaps the product for the weight gradient if the product takes at
# least this many multiplications, about 50 us.
OVERLAP_FROM = 1 << 20

# A collective: a communicator for replicated or partial tensors, a shard for sharded ones; None for
# no collective.
Where = Comm | ActivationShard | None


class LinearOptions(NamedTuple):
    """Collectives before and after a product, and the form in which it runs.

    Attributes:
        before: the collective on the input: None, the input and its gradient stay as they are; a
            communicator, the input is replicated and its gradient is all-reduced; a sharded dim,
            the input is gathered and its gradient is reduce-scattered.
        after: the collective on the product: None, the product stays as it is; a communicator, the
            product is all-reduced; a sharded dim, the product is reduce-scattered and its gradient
            is gathered.
        dtype: the dtype of the product, if autocast chooses one.
        is_first_reader: whether other readers of the input may follow, so that the shared input is
            returned too (`shared_reduction`).
        chunks: number of chunks in which a collective overlaps the product.
    """

    before: Where = None
    after: Where = None
    dtype: torch.dtype | None = None
    is_first_reader: bool = False
    chunks: int = 1


class LinearProduct(Function):
    """Function x W^T + b of the local shards, with the collectives before and after it.

    The bias is added once, after the reduction. The first of several readers also returns the
    shared input, the replicated x that the later readers multiply.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: DTensor, bias: DTensor | None, options: LinearOptions
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.options = options
        ctx.input_dtype = x.dtype
        try:
            ctx.params = (weight, bias)
            bias_spec = None if bias is None else bias.spec
            ctx.specs = (weight.spec, bias_spec)
        except AttributeError:
            is_plain = not isinstance(weight, DTensor)
            plain: Any = weight if is_plain else bias
            raise plain_error("weight" if is_plain else "bias", plain) from None
        before, after, dtype, is_first_reader, chunks = options
        w = local_shard(weight)
        b = None if bias is None else local_shard(bias)
        if dtype is not None:
            w = w.to(dtype)
            # A bias that is added after a reduction keeps its dtype.
            if b is not None and after is None:
                b = b.to(dtype)
        out = None
        if isinstance(before, ActivationShard):
            shard = x if dtype is None else x.to(dtype)
            with unwatched():
                if chunks > 1:
                    shared, out = gathered_product(shard, w, b, before, chunks=chunks)
                else:
                    shared = gather_dim(shard, *before)
        else:
            shared = x.detach() if is_first_reader else x
        local = shared if dtype is None else shared.to(dtype)
        # The backward reads the input for the weight's gradient, and the weight for the input's.
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(local if needs_weight else None, w if needs_input else None)
        if after is not None:
            return reduced_product(local, w, b, after, chunks=chunks)
        if out is None:
            out = linear(local, w, b)
        if not is_first_reader:
            return out
        ctx.set_materialize_grads(False)
        if not needs_input:
            ctx.mark_non_differentiable(shared)
        return out, shared

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, follower_grads: Tensor | None = None
    ) -> tuple[Any, ...]:
        first_order_only()
        x, w = ctx.saved_tensors
        options: LinearOptions = ctx.options
        needs_input = ctx.needs_input_grad[0]
        dx: Any = None
        if isinstance(options.after, ActivationShard) and grad is not None:
            grad = grad.contiguous()
            if needs_input and options.chunks > 1:
                grad, dx = gathered_product(grad, w.t(), None, options.after, chunks=options.chunks)
            else:
                grad = gather_dim(grad, *options.after)
        if needs_input:
            if grad is not None and dx is None:
                dx = grad.matmul(w)
            dx = _input_gradient(ctx, dx, follower_grads, w)
        dw = None
        db = None
        if grad is not None:
            # Torch calls a Python function for each attribute of a DTensor, but not in this block.
            with unwatched_by_subclasses():
                dw, db = _weight_gradients(ctx, grad, x)
        if isinstance(dx, Pending):
            dx = dx.wait()
        if dx is not None and dx.dtype is not ctx.input_dtype:
            dx = dx.to(ctx.input_dtype)
        return dx, dw, db, None

    @staticmethod
    def gradient_shares(ctx: Any) -> Sequence[int] | None:
        """Return the ranks that contribute a share of the input's gradient; None for the whole."""
        before, after = ctx.options[:2]
        if isinstance(after, ActivationShard):
            return after.comm.ranks
        if after is not None:
            return None
        if before is None:
            # The gradient passes on unchanged: to the shared input, or to x.
            return ()
        comm: Comm = before.comm if isinstance(before, ActivationShard) else before
        return comm.ranks


def _input_gradient(
    ctx: Any, dx: Tensor | None, follower_grads: Tensor | None, w: Tensor
) -> Tensor | Pending | None:
    """Return the gradient of x, the sum of all readers' gradients, reduced as `before` specifies.

    The reduction may still be in flight.
    """
    before: Where = ctx.options.before
    is_gathered = isinstance(before, ActivationShard)
    # A gathered x has the dtype of the product, and so have the gradients of its readers.
    if dx is not None and not is_gathered and dx.dtype is not ctx.input_dtype:
        dx = dx.to(ctx.input_dtype)
    if follower_grads is not None:
        if dx is not None:
            dx += follower_grads
        elif before is None or is_gathered:
            dx = follower_grads
        else:
            # cloned, because the all-reduce is in place
            dx = follower_grads.clone()
    if dx is None or before is None:
        return dx
    # On a CPU, waking the thread that communicates takes longer than a small weight gradient.
    overlaps = dx.device.type != "cpu" or dx.numel() * w.shape[0] >= OVERLAP_FROM
    if isinstance(before, ActivationShard):
        scattered: Tensor | Pending = reduce_scatter_dim(dx, *before, async_op=overlaps)
        return scattered
    if overlaps:
        return all_reduce_(dx, before, async_op=True)
    return all_reduce_(dx, before)


def _weight_gradients(ctx: Any, grad: Tensor, x: Tensor) -> tuple[DTensor | None, DTensor | None]:
    """Return gradients of weight and bias from local dy (..., out) and x (..., in).

    A gradient that was added to `.grad` is None.
    """
    _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if not needs_weight and not needs_bias:
        return None, None
    weight, bias = ctx.params
    weight_spec, bias_spec = ctx.specs
    edges = ctx.next_functions
    grad_rows = _as_rows(grad)
    weight_grad = None
    bias_grad = None
    if needs_weight:
        route = grad_route(edges[1][0], weight)
        if route != "unused":
            weight_grad = deliver_product(
                route, weight, weight_spec, grad_rows.t(), right=_as_rows(x)
            )
    if needs_bias:
        route = grad_route(edges[2][0], bias)
        if route != "unused":
            bias_grad = deliver_grad(route, bias, bias_spec, grad_rows.sum(0))
    return weight_grad, bias_grad


def _as_rows(tensor: Tensor) -> Tensor:
    """Return a matrix of all rows of a tensor (..., features), which may have no features."""
    if tensor.ndim == 2:
        return tensor
    return tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])


# --- modules ----------------------------------------------------------------------------------


class _ReaderOptions(NamedTuple):
    """Options of the readers of one activation, by their role.

    Attributes:
        alone: options of a reader that does not share its input.
        first: options of the first reader, which returns the shared input for later readers.
        later: options of a reader of the shared input.
    """

    alone: LinearOptions
    first: LinearOptions
    later: LinearOptions


def _options_of_readers(
    before: Comm | ActivationShard, dtype: torch.dtype | None, chunks: int
) -> _ReaderOptions:
    alone = LinearOptions(before, None, dtype, is_first_reader=False, chunks=chunks)
    first = LinearOptions(before, None, dtype, is_first_reader=True, chunks=chunks)
    return _ReaderOptions(alone, first, later=LinearOptions(dtype=dtype))


class ColumnLinear(Lowered):
    """A column-wise Linear; plain replicated inputs take the shortest path."""

    __slots__ = ("before", "chunks", "is_direct", "leaves_unchanged", "reader_options")

    def resolve(self) -> None:
        is_replicated = self.port_in.layout.is_replicate()
        self.before: Where = (
            self.comm if is_replicated else sharded_dim(self.port_in.layout, self.comm)
        )
        self.chunks: int = chunks_of(self.sharding)
        # whether the local product leaves the module unchanged
        self.leaves_unchanged: bool = (
            self.sharding.local_outputs and self.port_out.layout == self.port_out.desired
        )
        # whether neither a plain input nor the output changes its layout
        self.is_direct: bool = is_replicated and self.leaves_unchanged
        self.reader_options: _ReaderOptions = _options_of_readers(
            self.before or self.comm, None, self.chunks
        )

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        entering = input_collectives(call)
        layout = call.sharding.input_port().layout
        yield from chunked_collectives(call, entering, call.input(), layout, ("all_gather", False))
        yield from output_collectives(call)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            local: Any = self.local("weight", "bias")
            x = ports.replicated_input(self, input)
            return self.finish(linear(x, local["weight"], local["bias"]))
        params = self.params
        is_direct = type(input) is Tensor and self.is_direct and not autocasting()
        # A parameter is missing if it has been computed from others since the plan was applied.
        is_incomplete = params.get("weight") is None or "bias" not in params
        # empty lists outside of every block, in which alone replicas may be compared
        has_block = bool(open_blocks or observers)
        if not is_direct or is_incomplete or (has_block and replicas_are_compared()):
            return self.finish(self.general(input))
        weight = params["weight"]
        bias = params["bias"]
        if torch.is_grad_enabled():
            return self.multiply(input, weight, bias, self.reader_options)
        if type(weight) is not DTensor:
            check_plain(weight)
        return linear(input, local_shard(weight), None if bias is None else local_shard(bias))

    def multiply(self, input: Tensor, weight: Any, bias: Any, options: _ReaderOptions) -> Tensor:
        """Return this module's product of an activation that several modules may read.

        They gather the activation once, and reduce its gradient once (`shared_reduction`).
        """
        out: Tensor
        grad = input.requires_grad and torch.is_grad_enabled()
        before = options.alone.before
        if isinstance(before, ActivationShard):
            # the shared input has the dtype of the product
            key: Hashable = (*before, options.alone.dtype)
            alone = input.is_leaf and grad
        else:
            key = (before, None, None)
            alone = input.is_leaf or not grad
        if alone:
            out = apply(LinearProduct, input, weight, bias, options.alone)
            return out
        shared_input = find_shared_input(input, key, grad)
        if shared_input is not None:
            out = apply(LinearProduct, shared_input, weight, bias, options.later)
            return out
        out, shared_input = apply(LinearProduct, input, weight, bias, options.first)
        keep_shared_input(input, key, shared_input)
        return out

    def general(self, input: Tensor) -> Tensor:
        """Return the local product for DTensor inputs, other layouts and autocast."""
        weight = self.parameter("weight")
        bias = self.parameter("bias")
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        activation, before = self._activation_to_gather(input)
        if before is not None:
            options = self.reader_options
            if dtype is not None or before is not self.before or activation.ndim < 2:
                chunks = self.chunks if activation.ndim > 1 else 1
                options = _options_of_readers(before, dtype, chunks)
            return self.multiply(activation, weight, bias, options)
        local = local_input(input, self.port_in, self.mesh, grad=Partial())
        out: Tensor = apply(LinearProduct, local, weight, bias, LinearOptions(dtype=dtype))
        return out

    def _activation_to_gather(self, input: Tensor) -> tuple[Tensor, Where]:
        """Return the plain activation that `multiply` reads, and the collective before it.

        The collective is None if the input has to be redistributed.
        """
        if not isinstance(input, DTensor):
            if self.before is self.comm:
                ports.compare_replicas(self, input)
            return input, self.before
        if self.chunks == 1 or input.device_mesh != self.mesh:
            return input, None
        (placement,) = input.placements
        shard = sharded_dim(placement, self.comm)
        if shard is None:
            return input, None
        local = input.to_local(grad_placements=(placement,))
        return local, shard._replace(sizes=input.spec.sizes(shard.dim))

    def finish(self, out: Tensor) -> Tensor:
        """Return the local product in the layout that leaves the module."""
        return out if self.leaves_unchanged else ports.sharded_output(self, out)


class RowLinear(Lowered):
    """A row-wise Linear; plain sharded inputs and plain outputs take the shortest path."""

    __slots__ = ("after", "chunks", "is_direct", "options")

    def resolve(self) -> None:
        is_reduced = self.port_out.desired.is_replicate()
        self.chunks: int = chunks_of(self.sharding)
        self.after: Where = (
            self.comm if is_reduced else sharded_dim(self.port_out.desired, self.comm)
        )
        # whether plain tensors enter without a change of layout, and leave
        is_plain = self.port_in.layout == self.port_in.desired and self.sharding.local_outputs
        self.is_direct: bool = is_reduced and is_plain and self.chunks == 1
        self.options: LinearOptions = LinearOptions(after=self.comm)

    @classmethod
    def collectives(cls, call: ModuleCall) -> Iterator[Collective]:
        yield from input_collectives(call)
        x = call.input()
        placement = call.sharding.output_port().desired
        chunked = [("all_reduce", False), ("reduce_scatter", False)]
        if x is not None and x.requires_grad:
            chunked.append(("all_gather", True))
        leaving = output_collectives(call, None)
        yield from chunked_collectives(call, leaving, call.output, placement, *chunked)

    def __call__(self, input: Tensor) -> Tensor:
        if is_compiling():
            local_weight: Any = self.local("weight")["weight"]
            product = linear(ports.sharded_input(self, input), local_weight)
            return ports.partial_output(self, product, "bias")
        params = self.params
        is_direct = type(input) is Tensor and self.is_direct and not autocasting()
        # A parameter is missing if it has been computed from others since the plan was applied.
        if not is_direct or params.get("weight") is None or "bias" not in params:
            return self.general(input)
        weight = params["weight"]
        try:
            out: Tensor = apply(LinearProduct, input, weight, params["bias"], self.options)
        except RuntimeError as error:
            self._check_features(input, weight, error)
            raise
        return out

    def _check_features(self, input: Tensor, weight: Any, error: RuntimeError) -> None:
        """Raise LayoutError if an input does not have this rank's features."""
        spec = spec_of(weight, "weight")
        features = spec.local_shape[1]
        if input.ndim == 0 or input.shape[-1] != features:
            raise LayoutError(
                f"{self.sharding.style}: a plain input must be this rank's shard, with {features} "
                f"of {spec.shape[1]} features in its last dim, got shape {tuple(input.shape)}. "
                "Pass input_layouts=Replicate() if every rank holds all features, or shard the "
                "preceding module with ColwiseParallel()"
            ) from error

    def general(self, input: Tensor) -> Tensor:
        """Return the output for DTensor inputs, other layouts and autocast."""
        weight = self.parameter("weight")
        bias = self.parameter("bias")
        spec_of(weight, "weight")
        dtype = autocast_dtype(input)
        local = ports.sharded_input(self, input)
        after = self.reduction_of(local.shape)
        if after is None:
            product = apply(LinearProduct, local, weight, None, LinearOptions(dtype=dtype))
            return ports.partial_output(self, product, bias)
        chunks = self.chunks if local.ndim > 1 else 1
        options = LinearOptions(after=after, dtype=dtype, chunks=chunks)
        out: Tensor = apply(LinearProduct, local, weight, bias, options)
        if self.sharding.local_outputs:
            return out
        return from_local(out, self.port_out.desired, self.mesh)

    def reduction_of(self, shape: torch.Size) -> Where:
        """Return the communicator, or sharded dim, over which the partial output is reduced.

        None if the output needs more than this reduction.
        """
        after = self.after
        if not isinstance(after, ActivationShard):
            return after
        ndim = len(shape)
        dim = after.dim + ndim if after.dim < 0 else after.dim
        shards_features = dim >= ndim - 1
        if shards_features or (after.sizes is None and shape[dim] % after.comm.size):
            return None
        return after._replace(dim=dim)
