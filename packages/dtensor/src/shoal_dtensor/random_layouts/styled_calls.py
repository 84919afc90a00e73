"""Calls of modules with a style in a watched forward: checks of inputs, and layouts of outputs.

The code of such a module, with its collectives, is not watched. Its style declares the placements
of its inputs and outputs along the style's axis instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import LayoutError
from ..layout.placements import Placement, Shard
from ..layout.spec import Spec
from ..modules.forwards import ModuleForward
from ..tensor.dtensor import DTensor
from .activation_axes import ActivationAxes
from .drawing_modules import draws_now, find_drawing_modules
from .layouts import (
    WAY_OUT,
    AnyShard,
    LocalLayout,
    known_layout,
    known_spec,
    note_layout,
    shard_sizes_along,
    sized_placement,
)


class StyledCall(NamedTuple):
    """One call of a module with a style.

    Attributes:
        axes: the axes on which layouts are described.
        forward: the callable that replaces the module's forward.
        source: the first tensor among the inputs; None without one. Along the axes on which the
            style does not act, outputs are placed like it.
    """

    axes: ActivationAxes
    forward: ModuleForward
    source: Tensor | None

    # --- inputs -----------------------------------------------------------------------------------

    def check_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if draws before or in the module would not be the draws of one device."""
        self._check_equal_draws(args, kwargs)
        forward = self.forward
        is_refused = forward.sampling == "refused"
        if is_refused and any(map(draws_now, find_drawing_modules(forward.module))):
            raise LayoutError(
                f"{forward.title}: the experts of {type(forward.module).__name__} draw random "
                "numbers (dropout) on rows that one device has in another order. Apply dropout "
                "after the experts, or set its probability to 0"
            )
        if forward.one_axis and draws_now(forward.module):
            self._check_other_axes()

    def _check_equal_draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise an error if the style declares that an input with equal draws is a shard."""
        declared_inputs = self.forward.declared_inputs(args, kwargs)
        axis = self.axes.index.get(self.forward.mesh)
        if axis is None:
            return
        for value, declared_placement in declared_inputs:
            if type(value) is not Tensor or not isinstance(declared_placement, Shard):
                continue
            layout = known_layout(value)
            if not layout.has_equal_draws or layout.spec is None:
                continue
            if not layout.spec.placements[axis].is_shard():
                raise LayoutError(
                    f"{self.forward.title}: an input that is {declared_placement} on every rank "
                    "holds random numbers that were drawn as if it were replicated, because its "
                    f"sharding was unknown at that point. {WAY_OUT}"
                )

    def _check_other_axes(self) -> None:
        """Raise an error if other axes than the style's axis shard the input.

        The module draws by itself, as one device along the axis of its style only.
        """
        spec = known_spec(self.source)
        if spec is None:
            return
        forward = self.forward
        other_placements = [*spec.placements]
        if forward.mesh in self.axes.index:
            del other_placements[self.axes.index[forward.mesh]]
        if any(placement.is_shard() for placement in other_placements):
            raise LayoutError(
                f"{forward.title}: {type(forward.module).__name__} draws its dropout mask on "
                f"{forward.mesh} only, but its input is sharded over other axes too. Leave a "
                f"Dropout module out of the plan; set the dropout of attention to 0. {WAY_OUT}"
            )

    # --- outputs ----------------------------------------------------------------------------------

    def note_outputs(self, out: Any) -> None:
        """Attach layouts to the module's outputs."""
        results = out if isinstance(out, tuple | list) else (out,)
        with_placements = zip(results, self.forward.output_layouts(), strict=False)
        for index, (result, declared_placement) in enumerate(with_placements):
            if declared_placement is None or result is self.source:
                continue
            if isinstance(result, DTensor):
                self.axes.note_spec(result, result.spec, self.source)
            elif isinstance(result, Tensor):
                note_layout(result, self._output_layout(result, index, declared_placement))

    def _output_layout(
        self, result: Tensor, index: int, declared_placement: Placement
    ) -> LocalLayout:
        """Return the layout of a plain output.

        Args:
            result: the output.
            index: its index among the outputs.
            declared_placement: the placement that the style declares for it.
        """
        axis = self.axes.index.get(self.forward.mesh)
        if axis is None:
            # The style exchanges rows of the batch, and returns each rank the rows that it had.
            return self.axes.layout_with_shard(result, None, None, self.source)
        blocks = self.forward.output_blocks()
        if blocks is not None:
            return self._fused_layout(result, axis, blocks)
        noted_spec = known_spec(result)
        if noted_spec is not None:
            # The module has noted a layout with the sizes of all shards.
            shard = sized_placement(noted_spec, axis)
        else:
            shard = self._output_shard(result, index, declared_placement, axis=axis)
        return self.axes.layout_with_shard(result, axis, shard, self.source)

    def _output_shard(
        self, result: Tensor, index: int, declared_placement: Placement, *, axis: int
    ) -> AnyShard | None:
        """Return the placement of an output along the style's axis; None if it is not a shard."""
        source_spec = known_spec(self.source)
        if source_spec is not None and self.forward.keeps_shard(source_spec, axis, result):
            return sized_placement(source_spec, axis)
        if not isinstance(declared_placement, Shard):
            return None
        dim = declared_placement.dim % result.ndim
        sizes = declared_placement.sizes or self.forward.output_sizes(index, result.shape[dim])
        if not sizes and source_spec is not None:
            sizes = self._sizes_of_source(source_spec, result, dim, axis)
        return Shard(dim, sizes=sizes)

    def _sizes_of_source(
        self, source: Spec, result: Tensor, dim: int, axis: int
    ) -> Sequence[int] | None:
        """Return the sizes of the source's shards if the output can have the same."""
        if getattr(source.placements[axis], "dim", None) != dim:
            return None
        sizes = shard_sizes_along(source, axis)
        rank = self.forward.mesh.comm(0).rank
        return sizes if sizes[rank] == result.shape[dim] else None

    def _fused_layout(
        self, result: Tensor, axis: int, blocks: Sequence[Sequence[int]]
    ) -> LocalLayout:
        """Return the layout of a fused output.

        Args:
            result: the output; its blocks follow each other along the last dim.
            axis: the index of the style's axis.
            blocks: the sizes of the shards of each block on all ranks. Empty if several ranks hold
                the same elements.
        """
        if not blocks:
            return LocalLayout(unknown_reason="several ranks hold the same heads")
        rank = self.forward.mesh.comm(0).rank
        specs = []
        for sizes in blocks:
            # Any elements do: the layout of a block depends only on its shape.
            local = result.narrow(-1, 0, sizes[rank])
            shard = Shard(result.ndim - 1, sizes=sizes)
            layout = self.axes.layout_with_shard(local, axis, shard, self.source)
            if layout.spec is None:
                return layout
            specs.append(layout.spec)
        if len(specs) == 1:
            return LocalLayout(specs[0])
        reason = "it holds shards of several blocks; split them first"
        return LocalLayout(unknown_reason=reason, block_specs=tuple(specs))
