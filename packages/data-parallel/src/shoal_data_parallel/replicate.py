"""`replicate`: data parallelism with a replica of every parameter on each rank, as in torch.

Parameters stay the same objects, plain or DTensors on the axes of a style. A backward pass leaves
the mean over the data axes in `.grad`.

May import: fsdp_module, fully_shard, gradients, parameters, units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import LayoutError, StyleError
from shoal_dtensor.internal import (
    DataDtypes,
    check_plain_tensors,
    check_types,
    complete_forwards,
    in_backward,
    in_groups,
    is_compiling,
    leaf_route,
    local_of,
    owners_of,
    pytree,
    register_owner,
    types_are_checked,
    watch_draws,
    with_methods,
)
from shoal_mesh import DeviceMesh, current_mesh

from .fsdp_module import FSDPModule, refusing_methods_of_units
from .fully_shard import check_modules, install_unit, mesh_of_all_ranks
from .gradients.equal_rows import warn_of_equal_rows
from .gradients.forward_writes import ForwardWrites
from .gradients.global_losses import watch
from .gradients.gradient_buckets import Bucket, GradientBuckets
from .gradients.gradient_group import ReducingModule
from .gradients.reducer import Reducer
from .gradients.replica import Replica, gathered_in_turns, replica_of, value_outside
from .parameters.agreement import check_module_values, check_same_on_data_axes
from .parameters.data_axes import DataAxes
from .parameters.gathered_types import declare_whole
from .parameters.leaf_checks import check_leaf
from .parameters.parameter_meshes import MeshAssignment, data_axes_of
from .parameters.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from .parameters.sharded_parameters import Site
from .parameters.sharding import make_whole, shard_parameter
from .parameters.values_of_one_rank import send_buffers, send_values
from .units.gathered import ValueComparison
from .units.unit import Unit
from .units.unit_settings import UnitSettings

_STATE = "_shoal_replicated"


@overload
def replicate(
    module: nn.Module,
    mesh: DeviceMesh | str | None = None,
    *,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    bucket_bytes: int = ...,
    reduce_dtype: torch.dtype | None = None,
    src_data_rank: int | None = 0,
    shard_optimizer: bool = False,
    broadcast_buffers: bool = False,
) -> ReplicateModule: ...
@overload
def replicate(
    module: list[nn.Module],
    mesh: DeviceMesh | str | None = None,
    *,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    bucket_bytes: int = ...,
    reduce_dtype: torch.dtype | None = None,
    src_data_rank: int | None = 0,
    shard_optimizer: bool = False,
    broadcast_buffers: bool = False,
) -> list[ReplicateModule]: ...
@check_types(
    module=(nn.Module, list),
    mp_policy=MixedPrecisionPolicy,
    offload_policy=OffloadPolicy,
    dp_mesh_dims=(DataParallelMeshDims, type(None)),
    bucket_bytes=int,
    shard_optimizer=bool,
    broadcast_buffers=bool,
)
def replicate(  # noqa: PLR0913  # independent options
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh | str | None = None,
    *,
    # an immutable value, as in torch's signature
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # likewise
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    bucket_bytes: int = 25 * 2**20,
    reduce_dtype: torch.dtype | None = None,
    src_data_rank: int | None = 0,
    shard_optimizer: bool = False,
    broadcast_buffers: bool = False,
) -> ReplicateModule | list[ReplicateModule]:
    """Average the gradients of a module's parameters over data axes; return the module.

    Gradients are reduced in buckets while backward goes on. `replicate` is called before or after
    styles, and before or after the optimizer is made. All gradients of a pass are delivered when it
    ends, so a pass that raises leaves every `.grad` as it was. A parameter that only some ranks
    have used gets the mean of their gradients and zeros; one that no rank has used gets no
    gradient. Tensor hooks of a parameter see the gradient of this rank's rows.
    `torch.autograd.grad` returns means too.

    Buffers are equal on all ranks at first, and separate on each rank from then on: batch norms
    count their rank's rows. With `broadcast_buffers` each forward begins with the buffers of the
    first rank, as in DDP by default. A forward that writes different values to a parameter on
    different ranks is an error of the backward that follows: `nn.Embedding(max_norm=...)` does so.

    Args:
        module: the module, changed in place. Its class becomes a subclass that is a
            `ReplicateModule` too. Descendants that were passed before reduce their parameters
            themselves. Each module of a list is replicated.
        mesh: the data axes, one or several. In a block `with mesh:`, the name of an axis of that
            mesh is enough. By default the data axis has all ranks.
        mp_policy: the dtypes of computation, reduction and outputs. With a dtype of computation or
            outputs, or an `offload_policy`, the module is a unit as made by `fully_shard` (an
            `FSDPModule` too), with replicas for shards: parameters become DTensors.
        offload_policy: where the parameters, their gradients and the optimizer's state are kept.
        dp_mesh_dims: the data axes in `mesh`, on which parameters are DTensors that are replicated
            over them; the module is then a unit, too.
        bucket_bytes: gradients are reduced together, last registered first, until they are this
            many bytes.
        reduce_dtype: the dtype in which gradients are reduced; by default their own.
        src_data_rank: the rank along the data axes whose parameters and buffers are sent to all
            ranks; None leaves every rank its own parameters, which then must be equal.
        ignored_params: parameters whose gradients stay this rank's own.
        shard_optimizer: shard the parameters that the optimizer updates, and so its state, over the
            data axes (ZeRO-1). Then `module.parameters()` are DTensors that are sharded over the
            data axes too, and so are gradients; make the optimizer afterwards. The forward sees
            replicas, and every rank keeps all of them; it gathers the replicas that were updated.
        broadcast_buffers: begin each forward that is followed by a reduction with the buffers of
            the first rank along the data axes.

    Raises:
        LayoutError: if the module is replicated already, a parameter is placed on a data axis
            (by `fully_shard`), or `dp_mesh_dims` names axes to shard over.
        StyleError: if an axis is named without a mesh, `bucket_bytes` is not positive, or a
            parameter is quantized.
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
    modules = module if isinstance(module, list) else [module]
    for one in modules:
        if _STATE in vars(one):
            raise LayoutError(f"replicate: this {type(one).__name__} is replicated already")
    if bucket_bytes <= 0:
        raise StyleError(f"replicate: bucket_bytes must be positive, got {bucket_bytes}")
    mesh = _mesh_of(mesh)
    precision = replace(mp_policy, reduce_dtype=reduce_dtype or mp_policy.reduce_dtype)
    ignored = [*(ignored_params or ())]
    has_policy = replace(precision, reduce_dtype=None) != MixedPrecisionPolicy()
    if has_policy or isinstance(offload_policy, CPUOffloadPolicy) or dp_mesh_dims is not None:
        if shard_optimizer or broadcast_buffers:
            raise StyleError(
                "replicate: shard_optimizer and broadcast_buffers cannot be combined with "
                "mp_policy, offload_policy and dp_mesh_dims; fully_shard(module, mesh, "
                "reshard_after_forward=False, mp_policy=...) shards the optimizer's state"
            )
        replica_axes = _replica_axes(mesh, dp_mesh_dims)
        unit = Unit(
            modules,
            replica_axes,
            ignored,
            MeshAssignment(None, replica_axes),
            policies=(precision, offload_policy),
            settings=UnitSettings(reshard_after_forward=None),
        )
        _install_unit(unit, src_data_rank)
        # their classes are subclasses of ReplicateModule now
        return cast(ReplicateModule | list[ReplicateModule], module)
    axes = DataAxes(mesh, num_sharding_axes=0)
    axes = replace(axes, num_sharding_axes=mesh.ndim) if shard_optimizer else axes
    for one in modules:
        state = Replicas(one, axes, bucket_bytes, precision.reduce_dtype, ignored=ignored)
        state.broadcast_buffers = broadcast_buffers
        _install(state, one, src_data_rank)
    return cast(ReplicateModule | list[ReplicateModule], module)


def _mesh_of(mesh: DeviceMesh | str | None) -> DeviceMesh:
    if mesh is None:
        return mesh_of_all_ranks()
    if isinstance(mesh, str):
        mesh_of_block = current_mesh()
        if mesh_of_block is None:
            raise StyleError(
                f"replicate: mesh={mesh!r} is the name of an axis, but no mesh is active. Pass "
                f"mesh[{mesh!r}], or call it in `with mesh:`"
            )
        return mesh_of_block[mesh]
    return DataAxes(mesh).mesh


def _replica_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataAxes:
    if dims is None:
        return DataAxes(mesh, num_sharding_axes=0)
    if dims.shard_names:
        raise LayoutError(
            f"replicate: dp_mesh_dims names axes to shard over, {dims.shard_names}, which "
            "replicate does not support; use fully_shard"
        )
    return data_axes_of(mesh, dims)


def _install_unit(unit: Unit, src_data_rank: int | None) -> None:
    check_modules("replicate", unit.modules)
    tensors: list[Tensor] = [param for param, _ in unit.owned_parameters()]
    for module in unit.modules:
        check_same_on_data_axes("replicate", module.named_parameters(), unit.axes)
        tensors += module.buffers()
    send_values(tensors, unit.axes, src_data_rank)
    install_unit(unit, ReplicatedUnitModule)


def _install(state: Replicas, module: Any, src_data_rank: int | None) -> None:
    axes = state.axes
    state.check()
    check_same_on_data_axes("replicate", module.named_parameters(), axes)
    tensors = [*state.held_parameters(), *module.buffers()]
    send_values(tensors, axes, src_data_rank)
    # Shards are not sent later: random operators fill a DTensor as on one device.
    if not axes.num_sharding_axes and any(local_of(tensor).is_meta for tensor in tensors):
        state.awaited_rank = src_data_rank
    state.take_parameters()
    complete_forwards(axes.mesh, module, over_data=DataDtypes(compute=None, reduce=state.dtype))
    register_owner(state)
    watch(axes.mesh)
    state.attach()
    vars(module)[_STATE] = state
    module.__class__ = with_methods(ReplicateModule, module.__class__)
    module.register_forward_pre_hook(state.prepare_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(state.end_forward, always_call=True)
    watch_draws(module, axes.mesh)


class Replicas(Reducer):
    """The state of a replicated module: its parameters, and the buckets of their gradients."""

    made_by = "replicate"

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
        self._bucket_bytes = bucket_bytes
        # the dtype in which gradients are reduced; None for their own
        self.dtype = dtype
        self.ignored: list[nn.Parameter] = list(ignored)  # parameters that it leaves alone
        self.gradients: GradientBuckets = GradientBuckets([], self)
        # The replicas of shards that the optimizer updates, and whether modules see the replicas.
        self.replicas: list[Replica] = []
        self._shows_replicas = False
        self._attached: list[tuple[Any, ...]] = []
        # whether one of the attached parameters was on the meta device
        self._was_on_meta = False
        self._depth = 0  # of forwards that are running
        self.writes = ForwardWrites()
        self._comparison = ValueComparison()
        # the parameters that the module held at the beginning of the running or last forward
        self._held: list[nn.Parameter] = []
        # whether each forward begins with the buffers of the first rank
        self.broadcast_buffers = False
        # the data-parallel rank whose values are sent once the module has left the meta device
        self.awaited_rank: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the module.

        The first forward of the copy attaches the parameters of the copy, and fills its replicas.
        """
        state = {name: value for name, value in vars(self).items() if name != "gradients"}
        replicas = [replace(replica, version=None, recorded_view=None) for replica in self.replicas]
        return {
            **state,
            "replicas": replicas,
            "_shows_replicas": False,
            "_attached": [],
            "_was_on_meta": False,
            "_depth": 0,
            "writes": ForwardWrites(),
            "_comparison": ValueComparison(),
            "_held": [],
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, gradients=GradientBuckets([], self))
        register_owner(self)
        watch(self.axes.mesh)

    def leaves(self) -> list[Tensor]:
        """Return the parameters whose gradients are reduced, and their replicas."""
        return [
            tensor
            for replica in self.gradients.replicas
            for tensor in (replica.leaf, replica.optimizer_parameter)
        ]

    @property
    def keeps_gradients(self) -> bool:
        return any(bucket.kept for bucket in self.gradients.buckets)

    def drop_kept(self) -> None:
        for bucket in self.gradients.buckets:
            bucket.drop_kept()

    def held_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that it replicates, or their shards."""
        # Every forward asks, so the modules are walked once; `parameters()` would walk them again.
        others = set(map(id, self.ignored))
        found: dict[int, nn.Parameter] = {}
        for owner in self.module.modules():
            if _STATE in vars(owner) and owner is not self.module:
                others.update(map(id, owner.parameters()))
            for param in owner._parameters.values():
                if param is not None:
                    found[id(param)] = param
        return [param for number, param in found.items() if number not in others]

    def restore_parameters(self) -> None:
        """Have the module hold whole parameters without hooks."""
        self.gradients.remove()
        self.gradients, self._attached = GradientBuckets([], self), []
        make_whole([replica.target for replica in self.replicas])

    def take_parameters(self) -> None:
        """Replicate the parameters that the module holds now.

        If optimizers update shards, the module gets shards of them.
        """
        if not self.axes.num_sharding_axes:
            return
        sites_of: dict[int, tuple[nn.Parameter, list[Site]]] = {
            id(param): (param, []) for param in self.held_parameters()
        }
        for owner in self.module.modules():
            for name, param in owner._parameters.items():
                if id(param) in sites_of:
                    sites_of[id(param)][1].append((owner, name))
        policies = MixedPrecisionPolicy(reduce_dtype=self.dtype), OffloadPolicy()
        self.replicas = []
        self._shows_replicas = False
        # modules still use `param` in a pass; at other times they hold its shard
        for param, sites in sites_of.values():
            shard = shard_parameter(param, sites, self.axes, None, policies=policies, view=True)
            shard.put(shard.leaf)
            self.replicas.append(Replica(param, shard, shard.version()))

    def check(self) -> None:
        """Raise if a parameter is placed on a data axis, sharded, quantized, or not a leaf."""
        data = set(self.axes.mesh.axis_names)
        owners = owners_of(self.module)
        of_units = {
            id(param)
            for owner in owners
            if owner.made_by == "fully_shard"
            for param in owner.held_parameters()
        }
        check_plain_tensors("replicate", self.held_parameters())
        for param in self.held_parameters():
            check_leaf(param, "replicate: a parameter")
            if isinstance(param, DTensor) and (
                data & set(param.spec.mesh.axis_names) or id(param) in of_units
            ):
                raise LayoutError(
                    f"replicate: a parameter is placed on {param.spec!r} already, so its "
                    f"gradients cannot be averaged over {self.axes.mesh.axis_names}. fully_shard "
                    "averages the gradients of its own parameters (with a mesh of two axes also "
                    "over replicas); pass other such parameters in ignored_params"
                )

    def attach(self) -> None:
        """Have the gradients of the module's present trained parameters averaged."""
        held = self.held_parameters()
        self._held = held
        if self.axes.num_sharding_axes:
            trained = [replica for replica in self.replicas if replica.adopt()]
            pairs = [(replica.leaf, replica.optimizer_parameter) for replica in trained]
            known = {id(replica.optimizer_parameter) for replica in self.replicas}
            if {id(param) for param in held} - known:
                raise StyleError(
                    "replicate: a parameter was added to the module after replicate(..., "
                    "shard_optimizer=True), so its optimizer state cannot be sharded; add "
                    "parameters before"
                )
        else:
            pairs = [(param, param) for param in held if param.requires_grad]
        # the buckets keep both tensors alive, so no other tensor can get their ids
        attached = [(id(leaf), id(held), leaf.dtype, leaf.device) for leaf, held in pairs]
        if attached == self._attached:
            return
        for bucket in self.gradients.buckets:
            bucket.check_kept()
        if self.keeps_gradients:
            raise StyleError(
                "replicate: the set of trained parameters has changed since the last backward, "
                "whose gradients this rank keeps for a later reduction; run the backward that "
                "reduces them first"
            )
        if not self.axes.num_sharding_axes:
            self.check()
            trained = [replica_of(param, self.axes, self.dtype) for param, _ in pairs]
        self.gradients.remove()
        self.gradients, self._attached = GradientBuckets(self._buckets(trained), self), attached
        self._was_on_meta = any(leaf.is_meta for leaf, _ in pairs)

    def after_conversion(self) -> None:
        """Have the next forward attach new buckets if the conversion replaced autograd's nodes."""
        if self.gradients.lacks_nodes():
            # equal to no other
            self._attached = [(None, *others) for _, *others in self._attached]

    def _buckets(self, trained: Sequence[Replica]) -> list[Bucket]:
        """Return buckets of at most `bucket_bytes`, last parameter first.

        A larger parameter has a bucket of its own.
        """
        groups = in_groups(reversed(trained), Replica.mean_shard_bytes, self._bucket_bytes)
        buckets = [Bucket(f"bucket {i}", group, self.axes) for i, group in enumerate(groups)]
        for bucket in buckets[:1]:
            bucket.watch_writes(self.writes)
        return buckets

    def prepare_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Prepare a forward; a hook.

        Parameters may have been updated, replaced, frozen or added since the last forward.
        """
        if is_compiling():
            return
        self._depth += 1
        if self._depth > 1 or self.gradients.is_running:
            return
        warn_of_equal_rows(module, args, kwargs, self.axes.comm)
        for state in reversed(self.module._reducers()):
            state.check_materialized()
            state.send_materialized()
            state.gather()
            state.attach()
        self._show_replicas(True)
        self._watch_writes()
        if self.broadcast_buffers and self.syncs:
            send_buffers(self.module, self.axes)

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a forward, and have its outputs begin the backward pass; a hook.

        It also runs after a forward that raised.
        """
        if is_compiling():
            return
        self._depth -= 1
        if not self._depth and not self.gradients.is_running:
            self.writes.end(self.module)
        if self.gradients.is_running:
            self.begin_pass()
        else:
            self.end_pass()
            # a forward that raised has no output
            self.awaits_backward = output is not None
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self.gradients.begin_if_needed)

    def _watch_writes(self) -> None:
        """Watch the tensors that modules use in the forward that begins."""
        # the parameters that optimizers update: the same tensors, or their shards
        parameters: list[nn.Parameter] = self._held
        used: Sequence[Tensor] = self._held
        if self.replicas:
            parameters = [replica.optimizer_parameter for replica in self.replicas]
            used = [replica.module_tensor for replica in self.replicas]
        self.writes.begin(used, parameters, reads_values=self._comparison.decide())

    def begin_pass(self) -> None:
        """Have modules see replicas in a backward pass, because it may recompute forwards."""
        self._show_replicas(True)
        self._begin_inner_passes()

    def end_pass(self) -> None:
        """Have modules see shards, unless a forward is running."""
        self._show_replicas(self._depth > 0)

    def _show_replicas(self, shows: bool) -> None:
        """Have modules see the replicas, or the shards that optimizers update."""
        if shows is self._shows_replicas:
            return
        self._shows_replicas = shows
        for replica in self.replicas:
            tensor = replica.module_tensor if shows else replica.optimizer_parameter
            if types_are_checked() and tensor is not replica.optimizer_parameter:
                declare_whole(replica.target.resting.mesh, replica.optimizer_parameter, tensor)
            replica.target.put(tensor)

    def _begin_inner_passes(self) -> None:
        """Begin the pass in all inner replicated modules, whether or not it reaches them.

        All ranks then reduce the modules in the same order. A pass of torch.autograd.grad does not
        do this.
        """
        inner = self.module._reducers()[1:]
        if not inner or any(
            leaf_route(node) == "return" for node in self.gradients.optimizer_nodes
        ):
            return
        for state in reversed(inner):
            state.gradients.begin()

    def check_materialized(self) -> None:
        """Raise StyleError if parameters have no values since they were on the meta device."""
        if self._was_on_meta and self.axes.mesh.device_type != "meta":
            check_module_values("replicate", self.module)

    @torch.no_grad()
    def send_materialized(self) -> None:
        """Send the values that a module has got since it was on the meta device, once.

        Each rank has initialized its own values, perhaps from another seed.
        """
        rank = self.awaited_rank
        if rank is None or self.axes.mesh.device_type == "meta":
            return
        self.awaited_rank = None
        send_values((*self.held_parameters(), *self.module.buffers()), self.axes, rank)

    @torch.no_grad()
    def gather(self) -> None:
        """Fill the replicas whose shards were written to.

        One group of shards is in flight while another is copied to its replicas.
        """
        for replica in self.replicas:
            replica.adopt()
        stale = (
            replica for replica in self.replicas if replica.version != replica.target.version()
        )
        groups = in_groups(
            stale, lambda replica: replica.target.gathered.local_bytes, self._bucket_bytes
        )
        for group, tensors in gathered_in_turns(groups):
            for replica, gathered in zip(group, tensors, strict=True):
                replica.fill(gathered)


@refusing_methods_of_units
class ReplicateModule(ReducingModule):
    """The class that `replicate` adds to a module's class.

    It controls the reduction of gradients, under torch's names.
    """

    _made_by = "replicate"

    def _reducers(self, recurse: bool = True) -> Sequence[Reducer]:
        modules = self.modules() if recurse else [self]
        return [vars(module)[_STATE] for module in modules if _STATE in vars(module)]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute, and the replica of a shard between forward and backward."""
        value = super().__getattr__(name)
        has_shards = type(value) is DTensor and _STATE in vars(self)
        return value_outside(vars(self)[_STATE], value) if has_shards else value

    def reduce_gradients(self) -> None:
        """Reduce the gradients that were kept, without another backward.

        All ranks call it.

        Raises:
            StyleError: if a backward is running, or one that added to kept gradients raised.
        """
        if in_backward():
            raise StyleError(
                "reduce_gradients: a backward is running; call reduce_gradients after it"
            )
        for state in reversed(cast(Sequence[Replicas], self._reducers())):
            state.gradients.reduce_kept()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients.

        This is `set_requires_gradient_sync`: replicas are reduced in one step, so no step over
        shards alone is left.
        """
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)


class ReplicatedUnitModule(FSDPModule, ReplicateModule):
    """The class that `replicate` adds to a module's class if it makes the module a unit.

    It does so for a policy of dtypes or memory, and for `dp_mesh_dims`.
    """

    _made_by = "replicate"
