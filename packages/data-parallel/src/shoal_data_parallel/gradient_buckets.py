"""Gradients of replicated parameters: reduced in buckets while backward goes on, and delivered at its end.

Autograd accumulates the gradient of this rank's rows in `.grad`.  A pass first sets aside what is there, takes each
bucket's gradients away when the last of them has arrived, and puts the means in their place when it is over.

`torch.autograd.grad` accumulates nothing: what it is to return is a tensor that gets the mean when the pass is over.

May import: reduction, sharded_parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Replicate, Spec
from shoal_dtensor.errors import LayoutError, SecondOrderError, StyleError
from shoal_dtensor.internal import at_end_of_backward, backward_number, leaf_route, local_shard
from shoal_mesh import all_gather
from shoal_mesh.internal import dataclass

from .reduction import ReducedParameter, Reduction, deliver
from .sharded_parameters import DataAxes


class Replica(ReducedParameter, Protocol):
    """A parameter of which every data-parallel rank has a replica.

    Attributes:
        leaf: where autograd accumulates the gradient of this rank's rows.
        held: what optimizers see, and what a backward pass may be asked for.
    """

    leaf: nn.Parameter

    @property
    def held(self) -> nn.Parameter: ...

    def ask(self, take: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have the gradient of a pass that does not accumulate in the leaf taken; handles that undo it.

        Args:
            take: gets the gradient of this rank's rows, and returns what is to be that of `held`.
        """

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""


@dataclass(slots=True, eq=False)
class ReplicatedParameter:
    """A parameter that every data-parallel rank updates in the same way.

    Attributes:
        leaf: the parameter; plain, or a DTensor on the axes of a style.
        partial: the layout of a local gradient over the data axes, in the dtype of the reduction.
        reduced: the layout of the mean.
    """

    leaf: nn.Parameter
    partial: Spec
    reduced: Spec

    @classmethod
    def of(cls, leaf: nn.Parameter, axes: DataAxes, dtype: torch.dtype | None) -> ReplicatedParameter:
        """A parameter, reduced over data axes in a dtype, by default its own."""
        mesh, shape = axes.mesh, leaf.spec.local_shape if isinstance(leaf, DTensor) else leaf.shape
        partial, reduced = ([placement] * mesh.ndim for placement in (Partial(), Replicate()))
        dtype = dtype or leaf.grad_dtype or leaf.dtype
        return cls(leaf, Spec(mesh, partial, shape, None, dtype), Spec(mesh, reduced, shape, None, dtype))

    @property
    def held(self) -> nn.Parameter:
        """The parameter."""
        return self.leaf

    def ask(self, take: Callable[[Tensor], Tensor | None]) -> list[Any]:
        """Have the gradient of a pass that does not accumulate in the leaf taken; handles that undo it."""
        leaf: Any = self.leaf
        node = torch.autograd.graph.get_gradient_edge(leaf).node

        def hook(grad: Tensor | None) -> Tensor | None:
            if grad is None or leaf_route(node) != "return":
                return None
            if [*leaf._backward_hooks][-1] != handle.id:
                raise StyleError(
                    "replicate: a parameter has a gradient hook that was registered after replicate(...), so it would "
                    "change the gradient of this rank's rows that torch.autograd.grad is to return the mean of; "
                    "register it before, or call backward()"
                )
            return take(grad)

        handle = leaf.register_hook(hook)
        return [handle]

    def gradient(self, grad: Tensor | None) -> tuple[Tensor, Spec]:
        """The local gradient and its layout before the reduction; None counts as zeros."""
        if grad is None:
            grad = torch.zeros(self.partial.local_shape, dtype=self.partial.dtype, device=self.leaf.device)
        elif grad.is_sparse:
            raise LayoutError(
                f"replicate: the gradient of a parameter of shape {tuple(self.leaf.shape)} is sparse; gradients are "
                "averaged dense: make the embedding with sparse=False, or pass its weight in ignored_params"
            )
        local = local_shard(grad) if isinstance(grad, DTensor) else grad
        return local.to(self.partial.dtype).contiguous(), self.partial

    def check_hooks(self) -> None:
        """Raise StyleError if users' hooks would not see the reduced gradient."""
        if len(self.leaf._post_accumulate_grad_hooks or ()) > 1:  # one is that of the buckets
            raise StyleError(
                "replicate: a parameter has a post-accumulate-grad hook, which would see the gradient of this rank's "
                "rows; call what it does after backward(), when gradients are reduced"
            )

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced local gradient to the leaf's."""
        grad: Any = reduced.to(self.leaf.grad_dtype or self.leaf.dtype)
        if isinstance(self.leaf, DTensor):
            grad = DTensor(grad, self.leaf.spec.with_(dtype=grad.dtype))
        if self.leaf.grad is None:
            self.leaf.grad = grad
        else:
            self.leaf.grad += grad


class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        owner: the function that made it, for messages and profiles.
        name: its number, likewise.
        parameters: the parameters; all of them are `trained`.
        axes: the data axes.
        kept: local gradients of passes that did not reduce, by parameter.
        divisor: what summed gradients are divided by.
    """

    owner = "replicate"

    def __init__(self, name: str, parameters: Sequence[Replica], axes: DataAxes) -> None:
        self.name = name
        self.parameters = parameters
        self.axes = axes
        self.trained: list[int] = list(range(len(parameters)))
        self.kept: dict[int, Tensor] = {}
        self.divisor: float = float(axes.mesh.size())

    def take(self) -> list[Tensor | None]:
        """The gradients that autograd has accumulated, taken away from the parameters."""
        grads = [parameter.leaf.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.leaf.grad = None
        return grads

    def with_kept(self) -> dict[int, Tensor]:
        """What stays on this rank after a pass that does not reduce: what was kept before, and accumulated since."""
        kept = dict(self.kept)
        for i, grad in enumerate(self.take()):
            if grad is not None:
                local, _ = self.parameters[i].gradient(grad)
                kept[i] = kept[i] + local if i in kept else local
        return kept


class GradientBuckets:
    """The buckets of a module's trained parameters, and the backward pass that fills them.

    Attributes:
        buckets: in the order in which they are reduced.
        syncs: whether passes reduce gradients; otherwise this rank keeps them for the next pass that does.
        around: called when a pass begins (True) and when it is over, also by an error (False).
        held: the nodes of the parameters that optimizers see.
    """

    def __init__(self, buckets: Sequence[Bucket], around: Callable[[bool], None] = lambda running: None) -> None:
        self.buckets = buckets
        self.syncs: bool = True
        self.around = around
        self.parameters: list[Replica] = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._bucket_of = {id(p.leaf): i for i, bucket in enumerate(buckets) for p in bucket.parameters}
        self._pass: Callable[[], _Pass | None] = lambda: None
        with torch.inference_mode(False), torch.enable_grad():  # a leaf's node lives no longer than somebody holds it
            self._nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(p.leaf).node for p in self.parameters]
            self.held: list[Any] = [torch.autograd.graph.get_gradient_edge(p.held).node for p in self.parameters]
            self._handles = [
                handle for at, p in enumerate(self.parameters) for handle in p.ask(partial(self._take, at))
            ]
        self._handles += [node.register_prehook(self._begin) for node in self._nodes]
        # This hook also has lowered modules leave the accumulation to autograd, so `_begin` comes before it.
        for parameter in self.parameters:
            self._handles.append(parameter.leaf.register_post_accumulate_grad_hook(self._arrived))  # type: ignore[no-untyped-call]  # torch

    @property
    def running(self) -> bool:
        """Whether a backward pass is."""
        return self._pass() is not None

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def watch(self, output: Tensor) -> None:
        """Have a backward pass through a module's output begin here, whatever parameters it reaches."""
        node: Any = output.grad_fn
        node.register_prehook(self._begin_if_needed)

    def _begin_if_needed(self, _: Any) -> None:
        if self._pass() is None and any(leaf_route(node) != "unused" for node in self.held):
            self._begin(None)

    def _begin(self, _: Any) -> None:
        if self._pass() is None:
            self._pass = ref(_Pass(self))

    def _arrived(self, leaf: Tensor) -> None:
        current = self._pass()
        assert current is not None, "the leaf's node began it"
        current.arrive(self._bucket_of[id(leaf)])

    def _take(self, at: int, grad: Tensor) -> Tensor | None:
        self._begin(None)
        current = self._pass()
        assert current is not None, "it has just begun"
        return current.take(at, grad)


class _Pass:
    """One backward pass.  It is alive as long as the pass, so one that raises restores what was there."""

    __slots__ = ("__weakref__", "_before", "_given", "_late", "_missing", "_number", "_of", "_open", "_reductions")

    def __init__(self, of: GradientBuckets) -> None:
        self._of, self._number = of, backward_number()
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # gradients of this rank's rows, and what gets the means
        self._open = False
        for parameter in of.parameters:
            parameter.check_hooks()
        self._before = [parameter.leaf.grad for parameter in of.parameters]
        for parameter in of.parameters:
            parameter.leaf.grad = None
        self._missing = [len(bucket.parameters) for bucket in of.buckets]
        self._late: set[int] = set()
        self._reductions: list[Reduction] = []  # of the first buckets, in order
        self._open = True
        of.around(True)
        at_end_of_backward(self.finish)

    def arrive(self, at: int) -> None:
        """A gradient has been accumulated; buckets are reduced in order as soon as they are complete."""
        self._missing[at] -= 1
        # Reentrant checkpointing runs passes inside of this one, each of which may bring a parameter's gradient.
        if at < len(self._reductions):
            self._late.add(at)
        if not self._of.syncs or backward_number() != self._number:
            return
        while len(self._reductions) < len(self._missing) and self._missing[len(self._reductions)] <= 0:
            self._reduce(len(self._reductions))

    def take(self, at: int, grad: Tensor) -> Tensor | None:
        """Keep a gradient that autograd does not accumulate; what it is to return instead."""
        parameter = self._of.parameters[at]
        if leaf_route(self._of.held[at]) != "return":
            parameter.leaf.grad = grad if parameter.leaf.grad is None else parameter.leaf.grad + grad
            return None
        if backward_number() != self._number:
            return None  # the pass around this one reduces what is made of it
        if torch.is_grad_enabled():
            raise SecondOrderError(
                "replicate: torch.autograd.grad(..., create_graph=True) of a replicated parameter: the mean over ranks "
                "has no derivative. Ask for gradients of inputs, or differentiate the module before it is replicated"
            )
        self._given[at] = grad, torch.empty_like(parameter.held.detach())
        return self._given[at][1]

    def _fill(self) -> None:
        """Reduce what `torch.autograd.grad` was asked for, and fill what it returns."""
        axes, asked = self._of.buckets[0].axes, sorted(self._given)
        comm = axes.mesh.comm(tuple(range(axes.mesh.ndim)))
        own = torch.tensor([[at in self._given for at in range(len(self._before))]], device=axes.mesh.device_type)
        ranks = all_gather(own, comm).sum(0).tolist()
        for parameter, count in zip(self._of.parameters, ranks, strict=True):
            if 0 < count < comm.size:
                raise LayoutError(
                    f"replicate: torch.autograd.grad of a parameter of shape {tuple(parameter.leaf.shape)} that only "
                    f"{count} of {comm.size} data-parallel ranks have used: the others would get None for it. Use "
                    "backward(), which gives all ranks the mean with zeros"
                )
        bucket = Bucket("gradients that were asked for", [self._of.parameters[at] for at in asked], axes)
        bucket.divisor = self._of.buckets[0].divisor
        means: list[Any] = Reduction(bucket, [self._given[at][0] for at in asked], ["return"] * len(asked)).wait()
        for at, mean in zip(asked, means, strict=True):
            given: Any = self._given[at][1]
            (local_shard(given) if isinstance(given, DTensor) else given).copy_(mean)

    def _reduce(self, at: int) -> None:
        bucket = self._of.buckets[at]
        self._reductions.append(Reduction(bucket, bucket.take(), ["accumulate"] * len(bucket.trained)))

    def finish(self) -> None:
        """Reduce what is left, also of parameters that this rank has not used, and deliver."""
        buckets = self._of.buckets
        if self._given:
            self._fill()
            self._restore()
        elif self._of.syncs:
            for at in (*range(len(self._reductions), len(buckets)), *sorted(self._late)):
                self._reduce(at)
            for reduction in self._reductions:
                reduction.wait()
            reductions, self._reductions = self._reductions, []
            self._restore()
            deliver(reductions)
        else:
            for bucket, kept in [(bucket, bucket.with_kept()) for bucket in buckets]:
                bucket.kept = kept
            self._restore()

    def _restore(self) -> None:
        if not self._open:
            return
        self._open = False
        self._of.around(False)
        for parameter, grad in zip(self._of.parameters, self._before, strict=True):
            parameter.leaf.grad = grad
        for reduction in reversed(self._reductions):
            reduction.give_back()

    def __del__(self) -> None:
        self._restore()  # a pass that raised was not finished
