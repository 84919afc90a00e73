"""SPMD types of lowered modules at their ports, by which plain code around them is checked.

`shoal_dtensor.spmd.types.axis_types` explains the types R, I, V, P and S(dim). The inside of a
lowered module is not checked, because tests compare its results with one process. A replicated
activation between modules is I, because its gradient is complete on every rank. A module that reads
the activation and reduces its gradient makes it R inside. Along data axes, which are not axes of a
plan's mesh, parameters are R.

May import: lowering, sharding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shoal_dtensor import DTensor, Partial, Placement, Shard as Sharded, Spec
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd
from shoal_mesh import Comm

from .lowering import collective_functions as moves
from .lowering.lowered import FeaturePart, Lowered, lowered_of
from .lowering.parameters import DeliveredShards
from .lowering.ports import DTensorForward
from .sharding.module_sharding import Port

AxisType = spmd.AnyAxisType


def _shard_along(dim: int, sizes: Sequence[int] | None) -> AxisType:
    """Return S(dim) for equal shards, V for others."""
    return V if sizes is not None and len({*sizes}) > 1 else Shard(dim)


def _types_of_move(move: Any, back: Any, place: Sequence[Any]) -> tuple[AxisType, AxisType]:
    """Return the types before and after a move; the move `back` of its gradient determines them."""
    if back is moves.reduce:
        return I, R
    if back is moves.keep_tensor:
        return P, I
    shard = _shard_along(*place[1:])
    if back is moves.split:
        return shard, I
    if back is moves.scatter:
        return shard, R
    return (I, shard) if move is moves.own_shard else (P, shard)


def _declare_move(outputs: Any, args: tuple[Any, ...]) -> None:
    tensor, move, back, place = args
    if spmd.type_of(tensor) is None:
        return
    src, dst = _types_of_move(move, back, place)
    axis = spmd.normalize_axis(place[0])
    spmd.check_source(tensor, axis, src, "a collective of a parallel module")
    spmd.set_type(outputs, spmd.moved_type(tensor, axis, dst, outputs.ndim))


def type_of_parameter(spec: Spec, partial_over: Comm | None) -> spmd.TensorType:
    """Return the type of a parameter's local shard.

    Args:
        spec: the layout of the parameter.
        partial_over: the axis along which its backward sums the ranks' gradients.
    """
    reduced = None if partial_over is None else spmd.normalize_axis(partial_over)
    by_axis: dict[spmd.MeshAxis, AxisType] = {}
    for axis, placement in zip(spmd.axes_of(spec.mesh), spec.placements, strict=True):
        axis_type = spmd.type_of_placement(placement)
        if axis_type is R and axis != reduced:
            axis_type = I
        if axis.size() > 1:
            by_axis[axis] = V if axis_type is None or not spec.even else axis_type
    current = spmd.MESH.get()
    for axis in current.axes if current is not None else ():
        by_axis.setdefault(axis, R)
    return spmd.TensorType(by_axis)


def _declare_shards(outputs: Any, args: tuple[Any, ...]) -> None:
    comm, *params = args
    for output, param in zip(outputs, params, strict=True):
        if isinstance(param, DTensor):
            spmd.set_type(output, type_of_parameter(param.spec, comm))


class _LoweredBoundary:
    """The types of the plain tensors that enter and leave a lowered module, from its ports."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.sharding = lowered.sharding
        self.axis = spmd.normalize_axis(lowered.comm)

    def check_inputs(self, args: tuple[Any, ...]) -> None:
        """Compare the types of plain tensors with the layouts that the style expects."""
        if self.axis.size() == 1:
            return
        for value, port in zip(args, self.sharding.inputs or (), strict=False):
            if port is None or spmd.type_of(value) is None:
                continue
            if self._shards_tokens(value):
                continue
            wanted = _type_of_layout(port.layout, value.ndim)
            if wanted is not V:
                spmd.check_source(value, self.axis, wanted, f"input of {self.sharding.style}")

    def declare_outputs(self, args: tuple[Any, ...], outputs: Any) -> None:
        """Give plain outputs the types of the layouts in which they leave the module."""
        typed = [value for value in args if spmd.type_of(value) is not None]
        listed = outputs if isinstance(outputs, tuple | list) else (outputs,)
        for index, output in enumerate(listed):
            if not isinstance(output, Tensor) or isinstance(output, DTensor):
                continue
            if typed:
                axis_type = self._output_type(index, output, typed[0])
                spmd.set_type(output, _type_beside(typed[0], output, self.axis, axis_type))
            elif any(isinstance(value, DTensor) for value in args) and self._port(index):
                # A DTensor has no type along the axes that are not in its mesh.
                axis_type = self._declared_type(index, output)
                spmd.set_type(output, spmd.TensorType({self.axis: axis_type}))

    def _shards_tokens(self, value: Tensor) -> bool:
        """Tell whether a tensor is a shard of a dim in which the module computes tokens alone."""
        present = spmd.type_of(value)
        axis_type = None if present is None else present.by_axis.get(self.axis)
        return isinstance(axis_type, Shard) and axis_type.dim in self.lowered.dims_of_tokens(
            value.ndim
        )

    def _output_type(self, index: int, output: Tensor, entered: Tensor) -> AxisType:
        """Return the type of a plain output; without a declared layout, that of the input.

        A module that computes tokens alone keeps any shard of them: the norms of queries and keys
        get shards of heads, S(2), where their style names positions, S(1).
        """
        keeps_tokens = self._shards_tokens(entered) and output.shape == entered.shape
        if self._port(index) is not None and not keeps_tokens:
            return self._declared_type(index, output)
        present = spmd.type_of(entered)
        axis_type = V if present is None else present.by_axis.get(self.axis, V)
        if isinstance(axis_type, Shard) and output.shape != entered.shape:
            return V
        return axis_type

    def _port(self, index: int) -> Port | None:
        """Return the port of an output; None if none is declared."""
        ports = self.sharding.outputs or ()
        return ports[index] if index < len(ports) else None

    def _declared_type(self, index: int, output: Tensor) -> AxisType:
        """Return the type of a plain output with a port."""
        port = self._port(index)
        assert port is not None, "an output with a port"
        parts = self.lowered.feature_parts() if port.layout == port.desired else ()
        if parts:
            return _type_of_parts(parts, output.ndim - 1)
        return _type_of_layout(port.desired, output.ndim)


def _type_of_parts(parts: Sequence[FeaturePart], dim: int) -> AxisType:
    """Return the type of a plain output whose features are in parts along a dim."""
    kinds: dict[str, AxisType] = {"whole": I, "read_by_rank": R, "shard": Shard(dim)}
    return spmd.joined_type(dim, [(part.size, kinds[part.layout]) for part in parts])


def _type_of_layout(layout: Placement, ndim: int) -> AxisType:
    """Return the type of a plain tensor between modules."""
    if layout.is_replicate():
        return I
    if isinstance(layout, Partial):
        return P
    dim = getattr(layout, "dim", None)
    plain = isinstance(layout, Sharded) and layout.sizes is None and layout.multiple_of == 1
    return Shard(dim % ndim) if plain and dim is not None else V


def _type_beside(
    tensor: Tensor, output: Tensor, axis: spmd.MeshAxis, axis_type: AxisType
) -> spmd.TensorType:
    """Return the type of an output; along other axes it has the type of an input.

    A shard of a dim whose size changes is V.
    """
    present = spmd.type_of(tensor) or spmd.TensorType({})
    found = present
    for other, other_kind in present.by_axis.items():
        if other == axis or not isinstance(other_kind, Shard):
            continue
        dim = other_kind.dim
        stays = dim < output.ndim and output.shape[dim] == tensor.shape[dim]
        if not stays:
            found = found.with_axis(other, V)
    return found if axis.size() == 1 else found.with_axis(axis, axis_type)


def _boundary_of(module: nn.Module) -> _LoweredBoundary | None:
    lowered = lowered_of(module)
    # A style that only prepares inputs or outputs leaves the forward to be checked.
    if lowered is None or type(lowered) is DTensorForward:
        return None
    return _LoweredBoundary(lowered)


spmd.BOUNDARY_FINDERS.append(_boundary_of)
spmd.hide_frames_of(str(Path(__file__).parent))
spmd.declare_types(moves.ReversibleMove, _declare_move)
spmd.declare_types(DeliveredShards, _declare_shards)
