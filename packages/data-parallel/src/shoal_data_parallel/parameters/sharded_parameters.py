"""One parameter of a unit: its leaf, the tensors that are sent and exposed, and its layouts.

With data axes of 2 ranks and a tensor-parallel axis of 2, a column-parallel weight of shape (8, 6):

    at rest   Shard(0) over tensor, then over data       local (2, 6), a leaf
    gathered  Replicate over data, Shard(0) over tensor  local (4, 6), a DTensor of the tensor axis
    gradient  Partial over data, Shard(0) over tensor    local (4, 6), reduced to the layout at rest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    ShardsInFlight,
    grad_hooked,
    local_shard,
    memory_of,
    redistribute_shards,
    unwatched_by_subclasses,
    upload_packed,
)
from shoal_mesh import purpose

from .data_axes import (
    DataAxes,
    narrow_to_shard,
    partial_over_data,
    partial_over_first,
    resting_and_gathered_layouts,
)
from .declared_layouts import DeclaredLayout
from .gather_extensions import GatherExtension
from .layout_move import LayoutMove
from .leaf_checks import check_leaf
from .policies import MixedPrecisionPolicy

Site = tuple[nn.Module, str]


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """A parameter of a unit, its shard on this rank, and its layouts.

    `replicate` uses it, too: the shard is then the whole replica of this rank, or the part of it
    that an optimizer updates.
    """

    # the modules that hold the parameter, with its name in each; empty for a parameter of
    # `replicate`, because modules always hold the leaf then
    sites: tuple[Site, ...]
    # the sharded parameter, which optimizers and checkpoints see
    leaf: nn.Parameter
    # The layout of the leaf in the dtype of the computation. A gather converts the shard to this
    # dtype and sends it.
    resting: Spec
    gathered: Spec  # the layout in which modules compute
    # The spec of the DTensor that modules see; None if they see a plain tensor. Its mesh has the
    # axes of the styles, and also has the data axes if the user's DTensor had them.
    inner: Spec | None
    # The layout of the leaf in the dtype of the reduction. A reduced gradient has it.
    reduced: Spec
    # The layout of the gathered parameter on the axes of the styles alone; None without styles. It
    # is `inner` without the data axes, or, if SPMD types declare it, `declared.parameter`.
    styled: Spec | None = None
    # the layouts of a plain parameter and of its gradient that SPMD types declare, for which a
    # program calls `shoal_spmd_types.assert_type`
    declared: DeclaredLayout | None = None
    # with `reshard_after_forward=<int>`: the gather from the larger shards after a forward, over a
    # small group of ranks
    after_forward: LayoutMove | None = None
    # the user's dtypes of computation and reduction
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()  # an immutable value
    # The layout of the shard that all replicas have, if the replicas divide the optimizer's work
    # and the leaf is a part of this shard. With 2 shards of (4, 6) and 2 replicas, a leaf
    # is (2, 6).
    shared: Spec | None = None
    # what is sent in place of the shard, if the class of the parameter decides it
    extension: GatherExtension | None = None

    # The next two follow from the fields above, and are read in every pass.
    # from the layout at rest to the layout in which modules compute
    to_gather: LayoutMove = field(init=False)
    # the layout of gradients before their reduction over the data axes
    partial: Spec = field(init=False)
    # the dtype and the `grad_dtype` of the leaf when the layouts were set last
    _dtypes_of_leaf: tuple[torch.dtype, torch.dtype | None] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._follow_layouts()

    def _follow_layouts(self) -> None:
        styled: tuple[Placement, ...] = ()
        if self.declared is not None:
            styled = self.declared.gradient
        elif self.styled is not None:
            styled = self.styled.placements
        self.to_gather = LayoutMove(self.resting, self.gathered)
        self.partial = partial_over_data(self.reduced, styled)

    @property
    def is_on_data_axes(self) -> bool:
        """True if modules see a DTensor that is replicated over the data axes."""
        if self.inner is None:
            return False
        # Without styles, all axes of `inner` are data axes.
        return self.styled is None or self.styled.mesh.ndim < self.inner.mesh.ndim

    def scattered_layout(self, axes: DataAxes) -> Spec:
        """Return the layout of gradients that are reduced over the shards, but not the replicas."""
        axes_of_replicas = axes.mesh.ndim - axes.num_sharding_axes
        shard = (self.shared or self.reduced).with_(dtype=self.reduced.dtype)
        return partial_over_first(shard, axes_of_replicas)

    def move_to_replicas(self) -> LayoutMove:
        """Return the move that gathers a shared shard from the leaves of all replicas.

        Both layouts are in the dtype of the computation, in which the elements are sent.
        """
        assert self.shared is not None, "the leaf is a part of a shared shard"
        return LayoutMove(self.resting, self.shared.with_(dtype=self.resting.dtype))

    def move_of_shared_shard(self) -> LayoutMove:
        """Return the move that gathers the parameter from shared shards."""
        shared = self.move_to_replicas().target
        return LayoutMove(shared, self.gathered)

    def keep_inside(self, axes: DataAxes, inside: DataAxes) -> None:
        """Have a unit keep shards over the axes `inside` after a forward.

        The shards over `inside` divide the same dim as the shards over `axes`.
        """
        if self.extension is not None:
            raise self.extension.refuse("cannot be kept in larger shards after a forward")
        # The last of the data axes always shards, and the axes before it may hold replicas.
        placement = self.resting.placements[axes.mesh.ndim - 1]
        placement_inside = (
            Shard(placement.dim) if isinstance(placement, Shard | StridedShard) else None
        )
        self.after_forward = LayoutMove(
            *resting_and_gathered_layouts(self.leaf, inside, self.styled, placement_inside)
        )

    def shard_after_forward(self, local: Tensor) -> Tensor:
        """Return the larger shard of a gathered tensor that this rank keeps after a forward."""
        move = self.move_after_forward()
        shard = narrow_to_shard(local.detach(), move.target, move.source)
        return shard.clone(memory_format=torch.contiguous_format)

    def move_after_forward(self) -> LayoutMove:
        """Return `after_forward`, with both layouts in the dtype of the computation."""
        assert self.after_forward is not None, "reshard_after_forward was an int"
        source, target = self.after_forward
        dtype = self.resting.dtype
        return LayoutMove(source.with_(dtype=dtype), target.with_(dtype=dtype))

    def version(self) -> tuple[object, ...]:
        """Return a value that changes when the parameter is written to, or gets other data.

        Writes may be to the DTensor or to its shard.
        """
        shard = local_shard(self.leaf)  # type: ignore[arg-type]  # a Parameter that holds a DTensor
        return self.leaf._version, shard._version, memory_of(shard), shard.dtype

    def shard_on_device(self) -> Tensor:
        """Return this rank's shard on the device of the mesh, in the dtype of the leaf."""
        shard: Tensor = local_shard(self.leaf).detach()  # type: ignore[arg-type]  # holds a DTensor
        return shard.to(self.gathered.mesh.device_type)

    def view(self, local: Tensor) -> Tensor:
        """Return the tensor that modules see: a view of a gathered local tensor."""
        local_view = local.detach()
        if self.inner is None:
            return local_view
        return cast(Tensor, DTensor(local_view, self.inner))

    def put(self, tensor: Tensor) -> None:
        for module, name in self.sites:
            # `torch.nn.utils.parametrize.remove_parametrizations` registers the tensor as a buffer
            # if it is not a Parameter, and a gathered parameter is not.
            if name in module._buffers:
                del module._buffers[name]
            module._parameters[name] = tensor  # type: ignore[assignment]  # it is gathered

    def is_replaced(self, shown: Tensor) -> bool:
        """Return whether a module holds another Parameter than the tensor that it was shown."""
        for module, name in self.sites:
            held: Any = module._parameters.get(name)
            if held is not shown and held is not self.leaf and isinstance(held, nn.Parameter):
                return True
        return False

    def adopt(self) -> None:
        """Adopt the parameter that the first module holds now.

        `to`, `to_empty` and `load_state_dict` may replace it.
        """
        module, name = self.sites[0]
        held: Any = module._parameters.get(name)
        if held is not self.leaf:
            resting = self.resting
            if not isinstance(held, DTensor) or not held.spec.with_(
                dtype=resting.dtype
            ).same_layout(resting):
                raise self._replaced_error(held)
            check_leaf(held, f"{name!r} of {type(module).__name__}")
            self.leaf = held  # type: ignore[assignment]  # a Parameter that holds a DTensor
        self.set_dtypes()

    def _replaced_error(self, held: Any) -> LayoutError:
        """Return the error for what a module holds in the place of the leaf."""
        module, name = self.sites[0]
        parameter = f"fully_shard: {name!r} of {type(module).__name__}"
        if held is None:
            return LayoutError(
                f"{parameter} was removed from the module, as parametrizations, weight_norm and "
                "pruning do: apply them before fully_shard"
            )
        got = repr(held.spec) if isinstance(held, DTensor) else f"a plain {type(held).__name__}"
        return LayoutError(
            f"{parameter} was replaced by {got}; it must stay sharded as {self.resting!r}"
        )

    def set_dtypes(self) -> None:
        """Set the dtypes of the layouts, which follow from the dtype of the leaf."""
        leaf = self.leaf
        dtype = leaf.dtype
        grad_dtype = leaf.grad_dtype
        dtypes = dtype, grad_dtype
        # the usual case in every pass
        if dtypes == self._dtypes_of_leaf:
            return
        self._dtypes_of_leaf = dtypes
        precision = self.precision
        computed = (precision.param_dtype if dtype.is_floating_point else None) or dtype
        # torch's default for `grad_dtype` is the dtype of the leaf, so another dtype is the choice
        # of the user.
        chosen = None if grad_dtype is dtype else grad_dtype
        reduce_dtype = precision.reduce_dtype or chosen or computed
        is_unchanged = computed == self.resting.dtype and reduce_dtype == self.reduced.dtype
        if is_unchanged:
            return
        self.resting = self.resting.with_(dtype=computed)
        self.gathered = self.gathered.with_(dtype=computed)
        self.inner = self.inner.with_(dtype=computed) if self.inner else None
        self.reduced = self.reduced.with_(dtype=reduce_dtype)
        self._follow_layouts()

    def gradient(self, grad: Tensor | None) -> tuple[Tensor, Spec]:
        """Return the dense local gradient of the tensor that modules saw; zeros for None.

        It has the layout and dtype before the reduction.
        """
        spec = self.partial
        if grad is None:
            return torch.zeros(
                spec.local_shape, dtype=spec.dtype, device=self.gathered.mesh.device_type
            ), spec
        if grad.is_sparse:
            raise LayoutError(
                f"the gradient of a parameter of shape {tuple(grad.shape)} is sparse, but only "
                "dense gradients can be averaged: make the embedding with sparse=False, or pass "
                "its weight in ignored_params"
            )
        if isinstance(grad, DTensor):
            # it may be placed differently on the styles' axes
            if self.is_on_data_axes:
                return self._summand(grad)
            if self.inner is not None:
                spec = partial_over_data(self.reduced, grad.placements)
            grad = local_shard(grad)
        return grad, spec

    def _summand(self, grad: DTensor) -> tuple[Tensor, Spec]:
        """Return this rank's summand of a gradient, and its layout.

        The gradient is on the data axes and the axes of the styles. If it is replicated over data
        axes, each rank has the whole gradient. The reduction adds up the ranks, so each rank
        contributes the gradient divided by the number of these ranks.
        """
        mesh = grad.spec.mesh
        styled = () if self.styled is None else self.styled.mesh.axis_names
        on_axis = dict(zip(mesh.axis_names, grad.placements, strict=True))
        for name, placement in on_axis.items():
            # On a data axis the gradient is a pending sum or replicated. Shards and other pending
            # reductions are made replicated.
            if name not in styled and placement != Partial():
                on_axis[name] = Replicate()
        grad = grad.redistribute(placements=[*on_axis.values()])
        holders = 1
        for name, ranks in zip(mesh.axis_names, mesh.shape, strict=True):
            if name not in styled and on_axis[name].is_replicate():
                holders *= ranks
        spec = partial_over_data(self.reduced, tuple(on_axis[name] for name in styled))
        local = local_shard(grad)
        if holders > 1:
            local = local / holders
        return local, spec

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced local gradient to the gradient of the leaf.

        If the leaf has hooks, autograd adds it in a backward of the leaf, which calls them.
        """
        leaf: Any = self.leaf
        # Torch calls a Python function for each attribute of a DTensor, but not in this block.
        with unwatched_by_subclasses():
            dtype = leaf.grad_dtype or leaf.dtype
            device = leaf.device
            accumulated = leaf.grad
            # Without sites this is a parameter of `replicate`. Its hooks were called in the
            # backward pass, with the gradient of this rank.
            calls_hooks = bool(self.sites) and grad_hooked(leaf)
        # The message is split into views under no_grad, which autograd lets nobody write recorded
        # values to. `detach` makes them ordinary tensors.
        grad = reduced.detach().to(device, dtype)
        if isinstance(leaf, DTensor):
            spec = leaf.spec
            grad = DTensor(grad, spec if dtype is spec.dtype else spec.with_(dtype=dtype))
        if calls_hooks:
            torch.autograd.backward([leaf], [grad])
        elif accumulated is None:
            leaf.grad = grad
        else:
            accumulated += grad


# --- what ranks send to gather --------------------------------------------------------------------


def shards_to_send(parameters: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return the shards in the dtypes of the computation and on the device of the mesh.

    Shards on the host are sent to the device all together.
    """
    if not parameters:
        return []
    leaves: list[Any] = [parameter.leaf for parameter in parameters]
    shards: list[Tensor] = [local_shard(leaf).detach() for leaf in leaves]
    device = torch.device(parameters[0].gathered.mesh.device_type)
    dtypes = [p.resting.dtype for p in parameters]
    on_host: list[int] = []
    if device.type != "cpu":
        on_host = [i for i, shard in enumerate(shards) if shard.is_cpu]
    if on_host:
        sent = upload_packed([shards[i] for i in on_host], device, [dtypes[i] for i in on_host])
        for i, shard in zip(on_host, sent, strict=True):
            shards[i] = shard
    return [shard.to(device, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]


def parts_to_send(parameters: Sequence[ShardedParameter]) -> tuple[list[Tensor], list[LayoutMove]]:
    """Return the tensors that are sent for all parameters, with their moves.

    That is one shard for each parameter, unless its class decides what is gathered.
    """
    # Shards of parameters without an extension are copied to the device all together.
    plain = [i for i, parameter in enumerate(parameters) if parameter.extension is None]
    if len(plain) == len(parameters):
        return shards_to_send(parameters), [parameter.to_gather for parameter in parameters]
    shards = shards_to_send([parameters[i] for i in plain])
    shard_at = dict(zip(plain, shards, strict=True))
    tensors: list[Tensor] = []
    moves: list[LayoutMove] = []
    for i, parameter in enumerate(parameters):
        if parameter.extension is None:
            tensors.append(shard_at[i])
            moves.append(parameter.to_gather)
            continue
        shard = parameter.shard_on_device()
        parts, moves_of_parts = parameter.extension.send(shard)
        tensors += parts
        moves += moves_of_parts
    return tensors, moves


def start_to_gather(parameters: Sequence[ShardedParameter], text: str) -> ShardsInFlight:
    """Send the shards of all parameters together."""
    with purpose(text):
        tensors, moves = parts_to_send(parameters)
        return redistribute_shards(tensors, moves)


# --- tensors that modules hold in place of a parameter --------------------------------------------


def install_switch(recorded: Any, parameter: ShardedParameter) -> None:
    """Replace `requires_grad_` of the tensor that modules use of a trained parameter.

    The tensor is computed from the parameter's leaf, and torch allows `requires_grad_(False)` only
    on leaves. A call changes two things:

    | call                    | the modules get                     | the leaf, for later forwards |
    | ----------------------- | ----------------------------------- | ---------------------------- |
    | `requires_grad_(False)` | `recorded.detach()`                 | is frozen                    |
    | `requires_grad_(True)`  | `recorded`, which autograd recorded | is trained                   |

    Args:
        recorded: the tensor that autograd has recorded.
        parameter: the parameter.
    """
    # A weak reference, because the function is an attribute of the tensor. The caller (a unit's
    # views, or a replica) keeps the tensor alive as long as modules may use it.
    recorded.requires_grad_ = partial(_switch_gradient, parameter, ref(recorded))


def _switch_gradient(
    parameter: ShardedParameter, recorded: ref[Tensor], requires_grad: bool = True
) -> Tensor | None:
    """Give the modules the recorded tensor, or a detached one; return the tensor.

    Returns None if the recorded tensor is freed: then only the leaf is changed.
    """
    parameter.leaf.requires_grad_(requires_grad)
    shown: Any = recorded()
    if shown is None:
        return None
    if not requires_grad:
        shown = shown.detach()
        shown.requires_grad_ = partial(_switch_gradient, parameter, recorded)
    parameter.put(shown)
    return cast(Tensor, shown)


# what code that knows the parameter as a DTensor may ask it for
_OF_DTENSORS = ("full_tensor", "to_local", "redistribute", "placements", "device_mesh")


def with_methods_of_dtensors(values: Any, leaf: Any) -> Any:
    """Return a plain tensor with a parameter's values, which answers as the parameter does.

    `model.logit_scale.full_tensor()` then works at all times, also while the module shows values.
    """
    if not isinstance(values, DTensor):
        for name in _OF_DTENSORS:
            setattr(values, name, getattr(leaf, name))
    return values
