"""One parameter of a unit: its leaf, the tensor exposed to modules, and its layouts.

With data axes of 2 ranks and a tensor-parallel axis of 2, a column-parallel weight of shape (8, 6):

    at rest   Shard(0) over tensor, then over data       local (2, 6), a leaf
    gathered  Replicate over data, Shard(0) over tensor  local (4, 6), a DTensor of the tensor axis
    gradient  Partial over data, Shard(0) over tensor    local (4, 6), reduced to the layout at rest
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Replicate, Shard, Spec, StridedShard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import (
    carry_gradient,
    grad_hooked,
    local_of,
    local_shard,
    memory_of,
    move_attachments,
    note_replaced,
    redistribute_shards,
    shard_sizes,
    slices_of,
)
from shoal_mesh import DeviceMesh, purpose

from .data_axes import DataAxes
from .declared_layouts import DeclaredLayout, declared_layout
from .gather_extensions import GatherExtension, extension_of, has_extension
from .layout_move import LayoutMove
from .leaf_checks import check_leaf
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

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

    @property
    def partial(self) -> Spec:
        """The layout of gradients before their reduction over the data axes."""
        styled: tuple[Placement, ...] = ()
        if self.declared is not None:
            styled = self.declared.gradient
        elif self.styled is not None:
            styled = self.styled.placements
        return _partial_over_data(self.reduced, styled)

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
        return _partial_over_first(shard, axes_of_replicas)

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
        self.after_forward = LayoutMove(*_layouts(self.leaf, inside, self.styled, placement_inside))

    def shard_after_forward(self, local: Tensor) -> Tensor:
        """Return the larger shard of a gathered tensor that this rank keeps after a forward."""
        move = self.move_after_forward()
        shard = _narrow_to_shard(local.detach(), move.target, move.source)
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
                got = (
                    repr(held.spec)
                    if isinstance(held, DTensor)
                    else f"a plain {type(held).__name__}"
                )
                raise LayoutError(
                    f"fully_shard: {name!r} of {type(module).__name__} was replaced by {got}; it "
                    f"must stay sharded as {resting!r}"
                )
            check_leaf(held, f"{name!r} of {type(module).__name__}")
            self.leaf = held  # type: ignore[assignment]  # a Parameter that holds a DTensor
        self.set_dtypes()

    def set_dtypes(self) -> None:
        """Set the dtypes of the layouts, which follow from the dtype of the leaf."""
        leaf = self.leaf
        precision = self.precision
        computed = (
            precision.param_dtype
            if precision.param_dtype and leaf.is_floating_point()
            else leaf.dtype
        )
        # torch's default for `grad_dtype` is the dtype of the leaf, so another dtype is the choice
        # of the user.
        chosen = leaf.grad_dtype if leaf.grad_dtype is not leaf.dtype else None
        reduce_dtype = precision.reduce_dtype or chosen or computed
        is_unchanged = computed == self.resting.dtype and reduce_dtype == self.reduced.dtype
        if is_unchanged:
            return
        self.resting = self.resting.with_(dtype=computed)
        self.gathered = self.gathered.with_(dtype=computed)
        self.inner = self.inner.with_(dtype=computed) if self.inner else None
        self.reduced = self.reduced.with_(dtype=reduce_dtype)

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
                spec = _partial_over_data(self.reduced, grad.placements)
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
        spec = _partial_over_data(self.reduced, tuple(on_axis[name] for name in styled))
        local = local_shard(grad)
        if holders > 1:
            local = local / holders
        return local, spec

    def accumulate(self, reduced: Tensor) -> None:
        """Add a reduced local gradient to the gradient of the leaf.

        If the leaf has hooks, autograd adds it in a backward of the leaf, which calls them.
        """
        leaf: Any = self.leaf
        dtype = leaf.grad_dtype or leaf.dtype
        grad = reduced.to(leaf.device, dtype)
        if isinstance(leaf, DTensor):
            grad = DTensor(grad, leaf.spec if dtype is leaf.dtype else leaf.spec.with_(dtype=dtype))
        # Without sites this is a parameter of `replicate`. Its hooks were called in the backward
        # pass, with the gradient of this rank.
        if self.sites and grad_hooked(leaf):
            torch.autograd.backward([leaf], [grad])
        elif leaf.grad is None:
            leaf.grad = grad
        else:
            leaf.grad += grad


def shard_parameter(
    param: nn.Parameter,
    sites: Sequence[Site],
    axes: DataAxes,
    placement: Shard | None,
    policies: tuple[MixedPrecisionPolicy, OffloadPolicy],
    *,
    view: bool = False,
) -> ShardedParameter:
    """Return a parameter that is sharded over the data axes, too.

    The parameter may be plain, or a DTensor on the axes of styles, whose local tensor is then
    sharded. A plain parameter for which a program has asserted SPMD types is sharded like a DTensor
    of its `declared_layout`. `placement` has the dim to shard, by default the first. With `view`
    the shard may share the parameter's memory.
    """
    precision = policies[0].for_parameter(param)
    offload = policies[1]
    inner = param.spec if isinstance(param, DTensor) else None
    if inner is not None and has_extension(local_of(param)):
        raise LayoutError(
            f"fully_shard: a parameter that styles have placed holds a "
            f"{type(local_of(param)).__name__}, whose class decides what is gathered over data "
            "axes; that is for parameters on no other axes"
        )
    styled = None if inner is None else _without_data_axes(inner, axes)
    declared = declared_layout(param, axes)
    if declared is not None:
        styled = declared.parameter
    resting, gathered = _layouts(param, axes, styled, placement)

    def to_shard(tensor: Tensor) -> DTensor:
        shard = _narrow_to_shard(local_of(tensor).detach(), gathered, resting)
        shard = shard.contiguous() if view else shard.clone(memory_format=torch.contiguous_format)
        # A meta shard is not moved to the CPU: `to_empty` allocates it later, on the device that
        # its caller names.
        awaits_values = shard.is_meta and axes.mesh.device_type != "meta"
        if isinstance(offload, CPUOffloadPolicy) and not awaits_values:
            pinned = offload.pin_memory and axes.mesh.device_type != "cpu"
            shard = shard.cpu().pin_memory() if pinned else shard.cpu()
        return DTensor(shard, resting)

    if inner is not None and grad_hooked(param):
        raise LayoutError(
            "fully_shard: a parameter that was placed by a style has gradient hooks, which would "
            "not get the reduced gradient; register the hooks after fully_shard, on the module's "
            "new parameter"
        )
    extension = extension_of(param, resting, sites[0][0], precision)
    leaf = _replacement(param, to_shard, is_styled=inner is not None)
    parameter = ShardedParameter(
        tuple(sites),
        leaf,
        resting,
        gathered,
        inner=inner,
        reduced=resting,
        styled=styled,
        declared=declared,
        precision=precision,
        shared=_shared_layout(param, axes, styled, placement),
        extension=extension,
    )
    parameter.set_dtypes()
    return parameter


@torch.no_grad()
def make_whole(parameters: Sequence[ShardedParameter]) -> None:
    """Have the modules hold the parameters as before data axes sharded them.

    Gradients are made whole, too, in one collective for all.
    """
    for parameter in parameters:
        if parameter.extension is not None:
            raise parameter.extension.refuse("stays sharded over the data axes")
        parameter.adopt()
    # leaves and gradients, whose shards are gathered
    sharded_tensors: list[Tensor] = []
    moves: list[LayoutMove] = []
    shards: list[Tensor] = []
    for parameter in parameters:
        for tensor in (parameter.leaf, parameter.leaf.grad):
            if tensor is None or tensor.is_meta:
                continue
            resting = parameter.resting.with_(dtype=tensor.dtype)
            gathered = parameter.gathered.with_(dtype=tensor.dtype)
            shard = local_shard(cast(DTensor, tensor)).detach()
            sharded_tensors.append(tensor)
            moves.append(LayoutMove(resting, gathered))
            shards.append(shard.to(gathered.mesh.device_type))
    with purpose("styles after data parallelism"):
        whole_tensors = redistribute_shards(shards, moves).wait() if moves else []
    pairs = zip(sharded_tensors, whole_tensors, strict=True)
    local_of_tensor = {id(tensor): local for tensor, local in pairs}

    # `_replacement` calls this function for a leaf and for its gradient.
    def whole(parameter: ShardedParameter, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            shape = parameter.gathered.local_shape
            local = torch.empty(shape, dtype=tensor.dtype, device="meta")
        else:
            local = local_of_tensor[id(tensor)]
        if parameter.inner is None:
            return local
        return DTensor(local, parameter.inner.with_(dtype=tensor.dtype))

    for parameter in parameters:
        is_styled = parameter.inner is not None
        whole_leaf = _replacement(parameter.leaf, partial(whole, parameter), is_styled=is_styled)
        parameter.put(whole_leaf)


@lru_cache(maxsize=1024)
def _partial_over_data(reduced: Spec, styled: tuple[Placement, ...]) -> Spec:
    """Return the layout of a gradient before its reduction over the data axes.

    Args:
        reduced: the layout after the reduction. The data axes come first in its mesh.
        styled: the gradient's placements on the axes of the styles, which come last.
    """
    data: list[Placement] = [Partial()] * (reduced.mesh.ndim - len(styled))
    return Spec(reduced.mesh, (*data, *styled), reduced.shape, None, dtype=reduced.dtype)


@lru_cache(maxsize=1024)
def _partial_over_first(reduced: Spec, count: int) -> Spec:
    """Return the layout of a tensor that is still to be summed over the first axes."""
    return reduced.with_(placements=[*[Partial()] * count, *reduced.placements[count:]])


def _replacement(
    old: nn.Parameter, convert: Callable[[Tensor], Tensor], *, is_styled: bool
) -> nn.Parameter:
    """Return a parameter with converted values and gradient.

    It has the attributes and hooks of the parameter that it replaces.

    Args:
        old: the parameter that is replaced.
        convert: is called for the parameter, and for its gradient if it has one.
        is_styled: whether the modules see a DTensor, which a style has made.
    """
    new = nn.Parameter(convert(old), requires_grad=old.requires_grad)
    carry_gradient(old, new, None if old.grad is None else convert(old.grad))
    if is_styled:
        vars(new).update(vars(old))
        note_replaced(old)
    else:
        move_attachments(old, new)
    return new


def _without_data_axes(inner: Spec, axes: DataAxes) -> Spec | None:
    """Return the layout on the axes of styles of a DTensor on a mesh that may have data axes.

    Raises:
        LayoutError: if it is not replicated over these data axes.
    """
    if not axes.names or not {*axes.names} <= {*inner.mesh.axis_names}:
        return inner
    placed = dict(zip(inner.mesh.axis_names, inner.placements, strict=True))
    if not all(placed[name].is_replicate() for name in axes.names):
        raise LayoutError(
            f"fully_shard: a parameter on {inner!r} must be replicated over the data axes "
            f"{axes.names} before they shard it"
        )
    kept = [name for name in inner.mesh.axis_names if name not in axes.names]
    if not kept:
        return None
    axis_names = inner.mesh.axis_names
    order = []
    for dim, sharding in inner.shard_order:
        kept_axes = [kept.index(axis_names[axis]) for axis in sharding]
        order.append((dim, tuple(kept_axes)))
    return Spec(
        inner.mesh[tuple(kept)],
        [placed[name] for name in kept],
        inner.shape,
        None,
        dtype=inner.dtype,
        shard_order=tuple(order),
    )


def _layouts(
    param: nn.Parameter, axes: DataAxes, inner: Spec | None, chosen: Shard | None
) -> tuple[Spec, Spec]:
    """Return the layout at rest, and the gathered layout.

    At rest, the data axes shard the local tensors that the styles' axes have made.
    """
    if chosen is not None and not isinstance(chosen, Shard):
        raise LayoutError(
            f"shard_placement_fn: expected a Shard or None for each parameter, got {chosen!r}"
        )
    shard = (chosen or Shard(0)) if param.ndim else Replicate()  # a number stays replicated
    placements = axes.placements(shard)
    whole = [Replicate()] * axes.mesh.ndim
    # a plain parameter with types is a shard of the shape of `inner`
    shape = param.shape if inner is None else inner.shape
    meta = shape, None, param.dtype
    if inner is None:
        order_of_axes = None
        if axes.shards_over_replicas and isinstance(shard, Shard):
            order_of_axes = ((shard.dim % param.ndim, axes.axes_of_leaves),)
        return Spec(axes.mesh, placements, *meta, order_of_axes), Spec(axes.mesh, whole, *meta)
    if inner.partials:
        raise LayoutError(
            "a partial parameter cannot be sharded over data axes; redistribute it first: "
            f"{inner!r}"
        )
    shared = set(axes.mesh.axis_names) & set(inner.mesh.axis_names)
    if shared:
        raise LayoutError(
            f"the parameter is placed on axes {inner.mesh.axis_names} already and cannot be "
            f"sharded over the data axes {axes.mesh.axis_names}; use an axis for data or for "
            "styles, not for both"
        )
    mesh = DeviceMesh.concatenate([axes.mesh, inner.mesh])
    order: dict[int, tuple[int, ...]] = {}
    for dim, sharding in inner.shard_order:
        # the axes of the style come after the data axes
        shifted = [axis + axes.mesh.ndim for axis in sharding]
        order[dim] = tuple(shifted)
    gathered = Spec(mesh, [*whole, *inner.placements], *meta, tuple(order.items()))
    if isinstance(shard, Shard):
        dim = shard.dim % len(inner.shape)
        order[dim] = (*order.get(dim, ()), *axes.axes_of_leaves)
        placements = _placements_on_data_axes(inner.placements, shard.on_dim(dim), axes)
    return Spec(
        mesh, [*placements, *inner.placements], *meta, tuple(sorted(order.items()))
    ), gathered


def _shared_layout(
    param: nn.Parameter, axes: DataAxes, inner: Spec | None, chosen: Shard | None
) -> Spec | None:
    """Return the layout of the shards that all replicas have; None if these are the leaves."""
    if not axes.shards_over_replicas:
        return None
    if chosen is not None:
        chosen = axes.placement_of_shards(chosen)
    resting, _ = _layouts(param, replace(axes, shards_over_replicas=False), inner, chosen)
    return resting


def _placements_on_data_axes(
    inner: Sequence[Placement], shard: Shard, axes: DataAxes
) -> list[Placement]:
    """Return the placements on the data axes of a parameter that styles have placed.

    If styles have placed it in runs, the data axes shard each run. Example: a fused weight has 3
    runs (query, key, value) of 8 rows. A rank of a tensor axis of 2 has 4 rows of each run. Data
    axes shard each 4 rows, so that every rank has rows of all 3 runs.
    """
    strided = [p for p in inner if isinstance(p, StridedShard) and p.dim == shard.dim]
    # a StridedShard without sizes, or with one run, only expresses an order of axes
    runs = next((p for p in strided if p.sizes is not None and p.split_factor > 1), None)
    if runs is None or runs.sizes is None:
        return axes.placements(shard)
    if shard.sizes is not None:
        raise LayoutError(
            f"{shard!r} over data axes cannot have sizes, because styles have placed the "
            f"parameter in runs: {runs!r}"
        )
    placements: list[Placement] = [Replicate()] * axes.mesh.ndim
    sizes = list(runs.sizes)
    for axis in axes.axes_of_leaves:
        ranks = axes.mesh.shape[axis]
        sizes = [
            n
            for size in sizes
            for n in shard_sizes(size, Shard(0, multiple_of=shard.multiple_of), ranks)
        ]
        placements[axis] = StridedShard(shard.dim, split_factor=runs.split_factor, sizes=sizes)
    return placements


def _narrow_to_shard(local: Tensor, source: Spec, target: Spec) -> Tensor:
    """Return this rank's shard of a tensor that is replicated over the data axes, as a view."""
    if target.coordinate is None:
        return local.new_empty(target.local_shape)
    if target.is_strided:
        # this sends nothing, because the local tensor contains the shard
        (shard,) = redistribute_shards([local], [(source, target)]).wait()
        return shard
    return local[slices_of(target.box(target.coordinate), source.box(target.coordinate))]
