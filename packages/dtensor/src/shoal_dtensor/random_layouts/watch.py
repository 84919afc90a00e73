"""`Watch`: while active, torch functions propagate layouts of local tensors and draw as DTensors.

    h = up(x)            the style declares: h is sharded along its last dim
    a = act(h)           a is sharded in the same way
    d = dropout(a)       d is this rank's shard of the dropout of the DTensor that has the shard a

Only the torch functions that modules call are watched, not the operators in them. The computation
of lowered modules (modules whose forward a style has replaced) is not watched. The effect of a
function on layouts is computed once per function and layouts (`infer_layouts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh, all_gather

from .._torch.interception import FunctionMode
from .._torch.tensors import local_of, saving_state, unwatched_functions
from ..dispatch.global_call import replicated_spec
from ..errors import LayoutError
from ..layout.placements import Placement, Replicate, Shard
from ..layout.spec import Spec
from ..layout.tensor_meta import flatten, map_instances
from ..modules.forwards import ModuleForward
from ..scopes import implicit_replication
from ..spmd.first_check import copy_type
from ..tensor.dtensor import DTensor
from .drawing_calls import draws_numbers
from .drawing_modules import draws_now, find_drawing_modules
from .layout_inference import infer_layouts
from .layouts import (
    UNSEEN,
    UNSHARDED,
    WAY_OUT,
    AnyShard,
    LocalLayout,
    UnknownLayoutError,
    global_stride,
    known_layout,
    known_spec,
    note_layout,
    shard_sizes_along,
    sized_placement,
)


class Watch(FunctionMode):
    """A mode that tracks layouts of local tensors on the axes of styles and draws as one device."""

    def __init__(self, mesh: DeviceMesh, axes: Mapping[DeviceMesh, int]) -> None:
        super().__init__()
        self.mesh: DeviceMesh = mesh
        # The index in the mesh of each axis. Axes that divide an axis of the batch have no index.
        self.axes: Mapping[DeviceMesh, int] = axes
        # The saving state at the start of the innermost watched forward. If it differs at a draw, a
        # checkpoint inside that forward would repeat the draw without a watch.
        self.saving_state: tuple[bool, object] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # Example: "bernoulli" for `bernoulli.default`.
        name = str(getattr(func, "__name__", "")).partition(".")[0]
        if draws_numbers(name, args, kwargs):
            return self.draw(name, func, args, kwargs)
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Tensor):
            self.follow(name, func, args, kwargs, outs=(out,))
        elif isinstance(out, tuple | list) and out and isinstance(out[0], Tensor):
            tensors = [result for result in out if isinstance(result, Tensor)]
            self.follow(name, func, args, kwargs, outs=tensors)
        elif name == "__setitem__":
            self.note_write(name, args[0], args[1:])
        return out

    # --- inputs -----------------------------------------------------------------------------------

    def enter_batch(self, tensors: Sequence[Tensor], axes: DeviceMesh) -> None:
        """Note that plain tensors with as many rows as the first tensor are rows of a batch."""
        rows = []
        for tensor in tensors:
            has_rows = tensor.ndim > 0 and type(tensor) is Tensor
            # -1 for DTensors and for tensors without dims
            rows.append(len(tensor) if has_rows else -1)
        if max(rows, default=-1) < 0:
            return
        # for each tensor, its number of rows on each rank
        rows_by_tensor = [list(column) for column in zip(*_rows_by_rank(rows, axes), strict=True)]
        sizes = next(column for column, n in zip(rows_by_tensor, rows, strict=True) if n >= 0)
        even = len({*sizes}) == 1
        shard = Shard(0, sizes=None if even else sizes)
        along = [mesh for mesh in self.axes if {*mesh.axis_names} <= {*axes.axis_names}]
        for tensor, column in zip(tensors, rows_by_tensor, strict=True):
            if column != sizes:
                continue
            layout = known_layout(tensor)
            if layout is not UNSEEN and (layout.spec is None or layout.spec.mesh != self.mesh):
                # The noted layout belongs to another watch.
                note_layout(tensor, UNSHARDED)
            if not even and any(mesh.size() != axes.size() for mesh in along):
                note_layout(
                    tensor,
                    LocalLayout(
                        unknown_reason="two axes shard the batch, in shards of different sizes"
                    ),
                )
                continue
            for mesh in along:
                note_layout(tensor, self.layout_with_shard(tensor, self.axes[mesh], shard, tensor))

    # --- layouts of results -----------------------------------------------------------------------

    def follow(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outs: Sequence[Tensor],
    ) -> None:
        """Attach layouts to the tensors that a function returned."""
        tensors = [*flatten((*args, *kwargs.values()))]
        layouts = [known_layout(tensor) for tensor in tensors]
        if all(layout.counts_as_equal for layout in layouts):
            for out in outs:
                if known_layout(out) is UNSEEN:
                    note_layout(out, UNSHARDED)
            return
        if len(outs) == 1 and any(outs[0] is tensor for tensor in tensors):
            self.note_write(name, outs[0], tensors)
            return
        shards = [*map(local_of, outs)]
        out_layouts = infer_layouts(name, func, args, kwargs, outs=shards, layouts=layouts)
        for out, layout in zip(outs, out_layouts, strict=True):
            note_layout(out, layout)

    def note_write(self, name: str, target: Tensor, sources: Sequence[Any]) -> None:
        """Note that a function wrote to a tensor, whose layout may become unknown.

        If the tensor was not known to be sharded, its layout is unknown from now on.
        """
        others = [
            source for source in sources if isinstance(source, Tensor) and source is not target
        ]
        if known_spec(target) is None and not all(
            known_layout(source).counts_as_equal for source in others
        ):
            note_layout(target, LocalLayout(unknown_reason=f"{name} wrote shards to it"))

    # --- modules ----------------------------------------------------------------------------------

    def call(self, forward: ModuleForward, *args: Any, **kwargs: Any) -> Any:
        """Run a module with a style and return its result with its layout.

        Only functions of the module's own code are watched.
        """
        source = next(flatten((*args, *kwargs.values())), None)
        with unwatched_functions():
            self._check(forward, args, kwargs, source)
        with nullcontext() if forward.sampling == "watched" else unwatched_functions():
            out = forward(*args, **kwargs)
        with unwatched_functions():
            results = out if isinstance(out, tuple | list) else (out,)
            with_layouts = zip(results, forward.output_layouts(), strict=False)
            for index, (result, layout) in enumerate(with_layouts):
                if layout is None or result is source:
                    continue
                if isinstance(result, DTensor):
                    self.note_spec(result, result.spec, source)
                elif isinstance(result, Tensor):
                    note_layout(result, self._output(forward, result, index, layout, source=source))
        return out

    def _check(
        self,
        forward: ModuleForward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        source: Tensor | None,
    ) -> None:
        """Raise an error if a module's draws would not be the draws of one device.

        This is so if an input was drawn as replicated but is a shard, or if the module itself draws
        rows in another order, or draws on one axis only while other axes shard its input.
        """
        for value, arrives in forward.declared_inputs(args, kwargs):
            drawn = type(value) is Tensor and known_layout(value).has_equal_draws
            spec = known_spec(value) if drawn and isinstance(arrives, Shard) else None
            axis = self.axes.get(forward.mesh)
            if axis is None or spec is None:
                continue
            if not spec.placements[axis].is_shard():
                raise LayoutError(
                    f"{forward.title}: an input that is {arrives} on every rank holds random "
                    "numbers that were drawn as if it were replicated, because its sharding was "
                    f"unknown at that point. {WAY_OUT}"
                )
        if forward.sampling == "refused" and any(
            map(draws_now, find_drawing_modules(forward.module))
        ):
            raise LayoutError(
                f"{forward.title}: the experts of {type(forward.module).__name__} draw random "
                "numbers (dropout) on rows that one device has in another order. Apply dropout "
                "after the experts, or set its probability to 0"
            )
        spec = known_spec(source) if forward.one_axis and draws_now(forward.module) else None
        if spec is None:
            return
        other_placements = [*spec.placements]
        if forward.mesh in self.axes:
            del other_placements[self.axes[forward.mesh]]
        if any(placement.is_shard() for placement in other_placements):
            raise LayoutError(
                f"{forward.title}: {type(forward.module).__name__} draws its dropout mask on "
                f"{forward.mesh} only, but its input is sharded over other axes too. Leave a "
                f"Dropout module out of the plan; set the dropout of attention to 0. {WAY_OUT}"
            )

    def note_spec(self, local: Tensor, spec: Spec, source: Tensor | None = None) -> None:
        """Note that a tensor is a DTensor, or its shard, on one axis.

        On the other axes it is placed like `source`.
        """
        if spec.mesh not in self.axes or spec.partials:
            return
        # On a mesh of one axis, a DTensor draws by itself.
        if self.mesh.ndim > 1 or not isinstance(local, DTensor):
            axis = self.axes[spec.mesh]
            note_layout(
                local,
                self.layout_with_shard(local_of(local), axis, sized_placement(spec, 0), source),
            )

    def _output(
        self,
        forward: ModuleForward,
        result: Tensor,
        index: int,
        layout: Placement,
        source: Tensor | None,
    ) -> LocalLayout:
        """Return the layout of a module's result, which its style declares to be `layout`."""
        axis = self.axes.get(forward.mesh)
        if axis is None:
            # The style exchanges rows of the batch, and returns each rank the rows that it had.
            return self.layout_with_shard(result, None, None, source)
        blocks = forward.output_blocks()
        if blocks is not None:
            return self._fused_output(forward, result, blocks, source)
        noted = known_spec(result)
        spec = known_spec(source)
        shard: AnyShard | None = None
        if noted is not None:
            # The module has noted a layout with the sizes of all shards.
            shard = sized_placement(noted, axis)
        elif spec is not None and forward.keeps_shard(spec, axis, result):
            shard = sized_placement(spec, axis)
        elif isinstance(layout, Shard):
            dim = layout.dim % result.ndim
            sizes = layout.sizes or forward.output_sizes(index, result.shape[dim])
            input_dim = None if spec is None else getattr(spec.placements[axis], "dim", None)
            if not sizes and spec is not None and input_dim == dim:
                # Use the sizes of the first input's shards, if they fit the output.
                input_sizes = shard_sizes_along(spec, axis)
                is_same_here = input_sizes[forward.mesh.comm(0).rank] == result.shape[dim]
                sizes = input_sizes if is_same_here else None
            shard = Shard(dim, sizes=sizes)
        return self.layout_with_shard(result, axis, shard, source)

    def _fused_output(
        self,
        forward: ModuleForward,
        result: Tensor,
        blocks: Sequence[Sequence[int]],
        source: Tensor | None,
    ) -> LocalLayout:
        """Return the layout of a result of fused blocks, given the sizes of each block's shards."""
        if not blocks:
            return LocalLayout(unknown_reason="several ranks hold the same heads")
        specs = []
        for sizes in blocks:
            local = result.narrow(-1, 0, sizes[forward.mesh.comm(0).rank])
            shard = Shard(result.ndim - 1, sizes=sizes)
            placed = self.layout_with_shard(local, self.axes[forward.mesh], shard, source)
            if placed.spec is None:
                return placed
            specs.append(placed.spec)
        if len(specs) == 1:
            return LocalLayout(specs[0])
        return LocalLayout(
            unknown_reason="it holds shards of several blocks; split them first",
            block_specs=tuple(specs),
        )

    def layout_with_shard(
        self, local: Tensor, axis: int | None, shard: AnyShard | None, source: Tensor | None
    ) -> LocalLayout:
        """Return the layout of a local tensor with `shard` along one axis.

        Along the other axes, or along all axes if `axis` is None, it is placed like `source`.
        """
        outer_layout = UNSEEN if source is None else known_layout(source)
        if outer_layout.unknown_reason and (axis is None or self.mesh.ndim > 1):
            return outer_layout
        try:
            placements = self._kept_placements(local, outer_layout.spec, axis)
            if axis is not None:
                placements[axis] = shard or Replicate()
            if any(isinstance(placement, AnyShard) for placement in placements):
                spec = self._global_spec(local, placements)
                return LocalLayout(spec, has_equal_draws=outer_layout.has_equal_draws)
        except UnknownLayoutError as error:
            return LocalLayout(unknown_reason=str(error))
        if outer_layout.has_equal_draws:
            return LocalLayout(replicated_spec(self.mesh, local), has_equal_draws=True)
        return UNSHARDED

    def _kept_placements(
        self, local: Tensor, source: Spec | None, axis: int | None
    ) -> list[Placement]:
        """Return the placements of a local tensor that is sharded like `source`, except on `axis`.

        Raises:
            UnknownLayoutError: a dim of the source that is sharded is not a dim of the tensor, or
                several axes shard it unevenly.
        """
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        if source is None:
            return placements
        for other in range(self.mesh.ndim):
            kept = sized_placement(source, other)
            if other == axis or kept is None:
                continue
            has_dim = kept.dim < local.ndim
            if not has_dim or local.shape[kept.dim] != source.local_shape[kept.dim]:
                raise UnknownLayoutError(
                    f"where the sharded dim {kept.dim} of the module's input went"
                )
            sharding = source.dim_shardings[kept.dim]
            if len(sharding.axes) > 1 and not sharding.even:
                raise UnknownLayoutError(
                    f"several axes shard dim {kept.dim}, in shards of different sizes"
                )
            placements[other] = kept
        return placements

    def _global_spec(self, local: Tensor, placements: Sequence[Placement]) -> Spec:
        """Return the spec of the global tensor that has a local tensor as its shard on this rank.

        Raises:
            UnknownLayoutError: the placements do not determine it, or it has another shard.
        """
        dims = [placement.dim for placement in placements if isinstance(placement, AnyShard)]
        shape = [*local.shape]
        final = [*placements]
        for axis, placement in enumerate(placements):
            if not isinstance(placement, AnyShard):
                continue
            dim = placement.dim
            sizes = placement.sizes
            if sizes is None or len({*sizes}) == 1:
                final[axis] = Shard(dim) if isinstance(placement, Shard) else placement
                # Example: 4 rows on each of 2 ranks are 8 rows.
                shape[dim] *= self.mesh.size(axis)
            elif dims.count(dim) == 1:
                shape[dim] = sum(sizes) * getattr(placement, "split_factor", 1)
            else:
                raise UnknownLayoutError(
                    f"several axes shard dim {dim}, in shards of different sizes"
                )
        spec = Spec(self.mesh, final, shape, global_stride(local, shape), dtype=local.dtype)
        if spec.local_shape != local.shape:
            raise UnknownLayoutError(f"a shard of shape {tuple(local.shape)} is none of {spec}")
        return spec

    # --- draws ------------------------------------------------------------------------------------

    def draw(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return this rank's shard of the random result of one device, or raise on all ranks."""
        tensors = [*flatten((*args, *kwargs.values()))]
        layouts = [known_layout(tensor) for tensor in tensors]
        for tensor, layout in zip(tensors, layouts, strict=True):
            why = layout.unknown_reason
            # A tensor that was computed, but not by a watched function.
            is_unwatched = layout is UNSEEN and tensor.requires_grad and not tensor.is_leaf
            if isinstance(tensor, DTensor):
                is_replicated = layout.spec is not None and layout.spec.replicated
                is_on_other_mesh = self.mesh.ndim > 1 and tensor.spec.mesh != self.mesh
                is_unwatched = is_on_other_mesh and not is_replicated
            if is_unwatched:
                why = "it comes from code that is not a torch function, or from a DTensor of some of the axes"
            if why:
                raise LayoutError(
                    f"{name} between styles must draw the numbers of one device, but the sharding "
                    f"of its argument of local shape {tuple(tensor.shape)} over {self.mesh} is "
                    f"unknown: {why}. {WAY_OUT}"
                )
        if self.saving_state != saving_state():
            raise LayoutError(
                f"{name} in a function that is checkpointed (or under no_grad, as a reentrant "
                "checkpoint is) would draw other numbers when backward runs the function again; "
                "checkpoint a module instead"
            )
        if any(layout.spec and not layout.spec.replicated for layout in layouts):
            return self._draw_sharded(name, func, args, kwargs)
        out = func(*args, **kwargs)
        for result in out if isinstance(out, tuple | list) else (out,):
            if type(result) is Tensor and result.ndim:
                note_layout(
                    result, LocalLayout(replicated_spec(self.mesh, result), has_equal_draws=True)
                )
        return out

    def _draw_sharded(
        self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Draw on DTensors; the layout of the first argument is the layout of the result."""
        like = known_spec(args[0])
        if like is None:
            raise LayoutError(
                f"{name}: its other arguments are sharded, but its first argument is not known to "
                f"be sharded. {WAY_OUT}"
            )
        first = known_layout(args[0])
        target = args[0] if name.endswith("_") or kwargs.get("inplace") else None
        # If autograd records the target, the draw writes to a copy, which is copied to the target
        # below. Otherwise it writes to the memory of the target.
        if target is not None:
            written = target.clone() if target.requires_grad else target.detach()
            note_layout(written, first)
            args = (written, *args[1:])
        with implicit_replication():
            given, named = map_instances((tuple(args), dict(kwargs)), Tensor, self._as_dtensor)
            drawn = func(*given, **named)
        out: Any
        if type(drawn) is tuple:
            out = tuple(_local(each, like, name) for each in drawn)
        else:
            out = _local(drawn, like, name)
            # Shards of different sizes have no type of their own, but the argument has one.
            if out.shape == args[0].shape:
                copy_type(args[0], out)
        if target is None:
            return out
        if target.requires_grad:
            target.copy_(out)
        note_layout(target, first)
        return target

    def _as_dtensor(self, value: Tensor) -> Tensor:
        """Return the DTensor that a plain tensor is a shard of; another tensor as it is."""
        if type(value) is not Tensor:
            return value
        spec = known_spec(value)
        if spec is None:
            if value.requires_grad:
                raise LayoutError(
                    "a function that draws random numbers gets shards together with a tensor of "
                    f"shape {tuple(value.shape)} that is not sharded and needs a gradient. "
                    f"{WAY_OUT}"
                )
            return value
        return DTensor.from_local(
            value, self.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )


def _rows_by_rank(rows: list[int], axes: DeviceMesh) -> list[list[int]]:
    """Return the numbers of rows of tensors on all ranks, gathered in one small collective.

    A batch may be sharded unevenly, so this rank's numbers do not determine the others.
    """
    local = torch.tensor([rows], device=axes.device_type)
    comm = axes.comm(tuple(range(axes.ndim)))
    if "fake" in comm.backend:
        return [rows] * comm.size
    gathered: list[list[int]] = all_gather(local, comm).tolist()
    return gathered


def _local(drawn: Any, like: Spec, name: str) -> Any:
    """Return this rank's shard of a result, sharded like the function's first argument."""
    if not isinstance(drawn, DTensor):
        return drawn
    placements = like.placements
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if dim is not None and (dim >= drawn.ndim or drawn.shape[dim] != like.shape[dim]):
            raise LayoutError(
                f"{name}: the sharded dim {dim} of its argument is not a dim of its result. "
                f"{WAY_OUT}"
            )
    placed = drawn.redistribute(placements=placements)
    local: Tensor = placed.to_local(grad_placements=placements)
    note_layout(
        local, LocalLayout(placed.spec, has_equal_draws=not all(p.is_shard() for p in placements))
    )
    return local
