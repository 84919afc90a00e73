"""`replicate`: data parallelism with a replica of every parameter on each rank, under torch's name.

    replicate(model, mesh["data"])

Parameters stay what they are: the same objects, plain or DTensors on the axes of a style.  What a backward pass leaves
in `.grad` is the mean over the data axes.

May import: gradient_buckets, optimizer_shards, reduction, sharded_parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    check_plain_tensors,
    complete_forms,
    extended,
    in_groups,
    is_compiling,
    leaf_route,
    local_of,
    owners_of,
    pytree,
    register_owner,
    takes,
    watch_draws,
)
from shoal_mesh import DeviceMesh, broadcast, check_replicas, current_mesh

from .gradient_buckets import Bucket, GradientBuckets, Replica, ReplicatedParameter, reduced_of
from .optimizer_shards import OptimizerShards, ShardedReplica
from .reduction import Reducer, ReducingModule
from .sharded_parameters import DataAxes, Site, make_whole

_STATE = "_shoal_replicated"


@takes(module=nn.Module, bucket_bytes=int, shard_optimizer=bool)
def replicate(  # noqa: PLR0913  # options that exclude one another in no way
    module: nn.Module,
    mesh: DeviceMesh | str,
    *,
    bucket_bytes: int = 25 * 2**20,
    reduce_dtype: torch.dtype | None = None,
    src_data_rank: int | None = 0,
    ignored_params: Iterable[nn.Parameter] = (),
    shard_optimizer: bool = False,
) -> Any:  # of the module's class and a `ReplicateModule`, which no type says
    """The module, the gradients of its parameters averaged over data axes: in buckets, while backward goes on.

    It is called before or after styles, and before or after the optimizer is made.  All of a pass's
    gradients are delivered when it ends, so one that raises leaves every `.grad` as it was.  A parameter that only some
    ranks have used gets the mean of their gradients and zeros; one that no rank has used gets none.  Tensor hooks of a
    parameter see the gradient of this rank's rows.  `torch.autograd.grad` returns means too.

    Buffers are equal on all ranks at first, and each rank's own from then on: batch norms count their rank's rows.

    Args:
        module: changed in place; its class becomes a subclass that is a `ReplicateModule` too.  Descendants that were
            passed before reduce their parameters themselves.
        mesh: the data axes, one or several; or the name of an axis of the mesh of the enclosing `with mesh:`.
        bucket_bytes: gradients are reduced together, last registered first, until they are this many bytes.
        reduce_dtype: in which gradients are reduced; by default their own.
        src_data_rank: the rank along the data axes whose parameters and buffers all get; None leaves every rank its
            own, which then must be equal.
        ignored_params: parameters whose gradients stay this rank's own.
        shard_optimizer: shard what the optimizer updates, and so its state, over the data axes (ZeRO-1). Then
            `module.parameters()` are DTensors that are sharded over them too, and so are gradients; make the optimizer
            afterwards. The forward sees replicas, of which every rank keeps all; it gathers those that were updated.

    Raises:
        LayoutError: if the module is replicated already, or a parameter is placed on a data axis (by `fully_shard`).
        StyleError: if an axis is named without a mesh, `bucket_bytes` is not positive, or a parameter is quantized.
        LockstepError: on all ranks, if they have other parameters.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        ...     model = replicate(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), mesh["data"])
        ...     type(model).__name__, type(model[0].weight).__name__
        ('Sequential', 'Parameter')
    """
    if _STATE in vars(module):
        raise LayoutError(f"replicate: this {type(module).__name__} is replicated already")
    if bucket_bytes <= 0:
        raise StyleError(f"replicate: bucket_bytes must be positive, got {bucket_bytes}")
    state = Replicas(module, _data_axes(mesh, shard_optimizer), bucket_bytes, reduce_dtype, ignored_params)
    state.check(module)
    _agree(module, state.axes)
    if src_data_rank is not None:
        _broadcast([*state.held(), *module.buffers()], state.axes, src_data_rank)
    if shard_optimizer:
        state.shard(module)
    _install(state, module)
    watch_draws(module, state.axes.mesh)
    return module


def _install(state: Replicas, module: Any) -> None:
    complete_forms(state.axes.mesh, module, over_data=(None, state.dtype))
    register_owner(state)
    state.attach(module)
    vars(module)[_STATE] = state
    module.__class__ = extended(ReplicateModule, module.__class__)
    module.register_forward_pre_hook(state.before, prepend=True)
    module.register_forward_hook(state.after, always_call=True)


def _data_axes(mesh: DeviceMesh | str, shards: bool) -> DataAxes:
    if isinstance(mesh, str):
        around = current_mesh()
        if around is None:
            raise StyleError(f"replicate: axis {mesh!r} of which mesh? Pass mesh[{mesh!r}], or call it in `with mesh:`")
        mesh = around[mesh]
    axes = DataAxes(mesh, sharded=0)
    return replace(axes, sharded=mesh.ndim) if shards else axes


def _agree(module: nn.Module, axes: DataAxes) -> None:
    """Raise on all ranks unless they have parameters of the same names, shapes and dtypes."""
    comm = axes.mesh.comm(tuple(range(axes.mesh.ndim)))
    if "fake" in comm.backend:
        return
    rows = [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=16).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(axes.mesh.device_type)
    check_replicas(own, comm, "names, shapes and dtypes of parameters")


@torch.no_grad()
def _broadcast(tensors: Iterable[Tensor], axes: DataAxes, source: int) -> None:
    """Give all ranks the values of one."""
    comm = axes.mesh.comm(tuple(range(axes.mesh.ndim)))
    for tensor in tensors:
        local = local_of(tensor).detach()
        if not local.is_meta:
            local.copy_(broadcast(local.contiguous(), comm, source))


class Replicas(Reducer):
    """What a replicated module knows.

    Attributes:
        owner: the function that made it, for messages.
        module: the module.
        axes: the data axes.
        ignored: the parameters that it leaves alone.
        gradients: the buckets of its trained parameters.
        dtype: in which gradients are reduced; None for their own.
        shards: what the optimizer updates instead of the parameters; None if it updates them.
    """

    owner = "replicate"
    shards: OptimizerShards | None = None

    def __init__(
        self,
        module: Any,
        axes: DataAxes,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        ignored: Iterable[nn.Parameter],
    ) -> None:
        self.module = module
        self.axes = axes
        self.divisor = float(axes.mesh.size())
        self._bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.ignored: list[nn.Parameter] = list(ignored)
        self.gradients: GradientBuckets = GradientBuckets([], self, self.around)
        self._attached: list[tuple[Any, ...]] = []
        self._depth = 0  # of forwards that are running

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy of the module, whose own parameters are attached at its first forward."""
        state = {name: value for name, value in vars(self).items() if name != "gradients"}
        return {**state, "_attached": [], "_depth": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gradients=GradientBuckets([], self, self.around))
        register_owner(self)

    @property
    def data_mesh(self) -> DeviceMesh:
        """That of the data axes."""
        return self.axes.mesh

    @property
    def keeps_gradients(self) -> bool:
        """Whether this rank keeps gradients for a later reduction."""
        return any(bucket.kept for bucket in self.gradients.buckets)

    def drop_kept(self) -> None:
        for bucket in self.gradients.buckets:
            bucket.drop_kept()

    def held(self) -> Iterable[Tensor]:
        """The parameters that it replicates, or their shards."""
        return [*self._parameters(self.module)]

    def give_back(self) -> None:
        """Have the module hold whole parameters without hooks."""
        self.gradients.remove()
        self.gradients, self._attached = GradientBuckets([], self, self.around), []
        if self.shards:
            make_whole([replica.sharded for replica in self.shards.replicas])

    def take(self) -> None:
        """Replicate the parameters that the module holds now."""
        if self.shards:
            self.shard(self.module)

    def _parameters(self, module: nn.Module) -> Iterator[nn.Parameter]:
        others = set(map(id, self.ignored))
        for child in module.modules():
            if child is not module and _STATE in vars(child):
                others.update(map(id, child.parameters()))
        return (param for param in module.parameters() if id(param) not in others)

    def check(self, module: nn.Module) -> None:
        """Raise StyleError if a parameter is placed on a data axis, sharded by `fully_shard`, or quantized."""
        data = set(self.axes.mesh.axis_names)
        of_units = {id(param) for owner in owners_of(module) if owner.owner == "fully_shard" for param in owner.held()}
        check_plain_tensors("replicate", self._parameters(module))
        for param in self._parameters(module):
            if isinstance(param, DTensor) and (data & set(param.spec.mesh.axis_names) or id(param) in of_units):
                raise LayoutError(
                    f"replicate: a parameter is placed on {param.spec!r} already; its gradients are to be averaged "
                    f"over {self.axes.mesh.axis_names}. fully_shard averages those of its parameters itself (over two "
                    "axes to replicate too); others can be passed in ignored_params"
                )

    def shard(self, module: nn.Module) -> None:
        """Give the module shards of its parameters, for the optimizer."""
        own = {id(param): param for param in self._parameters(module)}
        sites: dict[int, list[Site]] = {key: [] for key in own}
        for owner in module.modules():
            for name, param in owner._parameters.items():
                if id(param) in own:
                    sites[id(param)].append((owner, name))
        replicas = [ShardedReplica.of(param, sites[key], self.axes, self.dtype) for key, param in own.items()]
        self.shards = OptimizerShards(replicas, self._bucket_bytes)

    def attach(self, module: nn.Module) -> None:
        """Have the gradients of the module's trained parameters as they are now averaged.

        Raises:
            LayoutError: if one is placed on a data axis.
            StyleError: if they have changed while gradients were kept, or cannot be sharded.
        """
        held = self._parameters(module)
        trained: list[Any] = self.shards.trained(held) if self.shards else [p for p in held if p.requires_grad]
        pairs = [(one.leaf, one.held) if self.shards else (one, one) for one in trained]
        attached = [(id(leaf), id(held), leaf.dtype, leaf.device) for leaf, held in pairs]  # the buckets hold both
        if attached == self._attached:
            return
        for bucket in self.gradients.buckets:
            bucket.check_kept()
        if self.keeps_gradients:
            raise StyleError(
                "replicate: the trained parameters are not those of the last backward, whose gradients this rank keeps "
                "for the next one that reduces; run that one first"
            )
        if self.shards is None:
            self.check(module)
            trained = [ReplicatedParameter.of(leaf, self.axes, self.dtype) for leaf, _ in pairs]
        self.gradients.remove()
        self.gradients, self._attached = GradientBuckets(self._buckets(trained), self, self.around), attached

    def _buckets(self, trained: Sequence[Replica]) -> list[Bucket]:
        """Parameters in reverse order, in groups of at most `bucket_bytes`, or one alone."""

        def size_of(one: Replica) -> int:  # of uneven shards the mean: the ranks of a style make the same groups
            leaf = one.leaf
            axes = zip(leaf.placements, leaf.device_mesh.shape, strict=True) if isinstance(leaf, DTensor) else ()
            return leaf.numel() * reduced_of(one).partial.dtype.itemsize // prod(n for p, n in axes if p.is_shard())

        groups = in_groups(reversed(trained), size_of, self._bucket_bytes)
        return [Bucket(f"bucket {i}", group, self.axes) for i, group in enumerate(groups)]

    def before(self, module: nn.Module, args: Any) -> None:
        """Hook: parameters may have been updated, replaced, frozen or added since the last forward."""
        if is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or self.gradients.running:
            return
        for state in reversed(self.module._reducers()):
            if state.shards:
                state.shards.gather()
            state.attach(state.module)
        self.around(False)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Hook, also of a forward that raised: a backward through the output begins there."""
        if is_compiling():
            return
        self._depth -= 1
        self.around(self.gradients.running)
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                self.gradients.watch(tensor.grad_fn)

    def around(self, running: bool) -> None:
        """Have modules see replicas in forwards and in backward passes, which may run forwards again.

        A pass begins in the replicated modules inside first, whether it reaches them or not: in one order on all ranks.
        """
        if self.shards:
            self.shards.show(running or self._depth > 0)
        inside = self.module._reducers()[1:] if running else []
        if inside and not any(leaf_route(node) == "return" for node in self.gradients.held):  # torch.autograd.grad
            for state in reversed(inside):
                state.gradients.begin()


class ReplicateModule(ReducingModule):
    """What `replicate` adds to a module's class: control over the reduction of gradients, as torch names it."""

    def extra_repr(self) -> str:
        """What the module shows of itself when it is printed."""
        return ", ".join(filter(None, [super().extra_repr(), "replicate"]))

    def _reducers(self, recurse: bool = True) -> list[Replicas]:
        return [vars(owner)[_STATE] for owner in (self.modules() if recurse else [self]) if _STATE in vars(owner)]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what summed gradients are divided by: the number of ranks on the data axes by default.

        With batches of different sizes, let every rank divide its summed loss by the size of the global batch, and set
        1 here.
        """
        for state in self._reducers():
            state.divisor = float(factor)
