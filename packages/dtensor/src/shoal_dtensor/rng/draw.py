"""`draw`: fill a rank's box of a global tensor with random numbers, as the mode in force says."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from ..errors import PlacementError
from ..layout.spec import Spec
from .counter import fill_counter, philox
from .memory_order import MemoryOrder, memory_order_of
from .modes import current_mode
from .state import check_in_step, generator_of, key_of
from .streams import Fill, fill_stream


def draw(
    spec: Spec,
    fill: Fill,
    generator: torch.Generator | None = None,
    *,
    out: Tensor | None = None,
    operand: Tensor | None = None,
) -> Tensor:
    """This rank's box of a global random tensor; the same call on every rank makes one global tensor.

    In the default mode its values, and the generator's state afterwards, are those of `fill` on the plain global
    tensor, bit for bit.  Every rank of the program may call it, also one with an empty box or outside the mesh.  The
    numbers go to the box `out`, else to a new one on the mesh's device; a `bernoulli_` may have the box's probabilities
    as its operand.

    Raises:
        PlacementError: if the tensor is partial: random addends do not have the sum's distribution.
        RandomStateError: if the ranks' generators are out of step (found at a mesh's first draw).

    Example:
        >>> from shoal_mesh import abstract_mesh
        >>> from shoal_dtensor import Shard
        >>> spec = Spec(abstract_mesh((2,), rank=1), (Shard(0),), (5,))
        >>> _ = torch.manual_seed(0); part = draw(spec, Fill("normal_"))
        >>> _ = torch.manual_seed(0); torch.equal(part, torch.randn(5)[3:])
        True
    """
    if spec.partials:
        raise PlacementError(f"{fill.name}: a partial tensor cannot be filled with random numbers; got {spec}")
    local = empty_local(spec) if out is None else out.detach()
    if local.device.type == "meta":
        return local
    mode = current_mode()
    mode.hold_in_recomputation()
    if mode.mode != "local" and not torch.compiler.is_compiling() and type(local) is Tensor:
        source = torch.device("cpu") if mode.mode in {"counter", "per_axis"} else local.device  # these take a key
        check_in_step(spec.mesh, generator_of(source) if generator is None else generator)
    with torch.no_grad():
        if mode.mode == "local":
            fill(local, generator, operand)
            return local
        if mode.mode == "counter":
            box = spec.box(spec.coordinate) if spec.coordinate is not None else ((0, 0),)
            fill_counter(local, tuple(spec.shape), box, fill, key_of(generator), operand=operand)
            return local
        memory = memory_order_of(spec)
        if mode.mode == "per_axis":
            axes = _sharding_axes(spec, mode.axes)
            if axes and spec.coordinate is None:
                key_of(generator)
                return local
            if axes:
                memory, generator = _own_stream(spec, memory, axes, local.device, generator)
        fill_stream(local, memory, fill, generator, operand)
    return local


def draw_dropout_mask(spec: Spec, chance: float, dtype: torch.dtype, *, out: Tensor) -> None:
    """Fill this rank's box of the mask of a `native_dropout`: True where an element stays.

    The dtype is the input's, on which torch's kernels of devices depend.
    """
    if out.device.type != "cpu" and 0.0 < chance < 1.0 and current_mode().mode == "single_device":
        draw(spec, Fill("dropout_mask", (chance, dtype), granule=16), out=out)
    else:
        draw(spec, Fill("bernoulli_", (1.0 - chance,)), out=out)


def empty_local(spec: Spec, device: torch.device | str | None = None) -> Tensor:
    """Uninitialised memory for this rank's box, its dims in memory as the global stride has them."""
    memory = memory_order_of(spec)
    place = spec.mesh.device_type if device is None else device
    if spec.coordinate is None:
        return torch.empty(0, dtype=spec.dtype, device=place)
    packed = torch.empty([stop - start for start, stop in memory.box], dtype=spec.dtype, device=place)
    return packed.permute(memory.restored())


def _sharding_axes(spec: Spec, asked: tuple[int | str, ...]) -> tuple[int, ...]:
    """Mesh axes among `asked` that shard the tensor."""
    mesh = spec.mesh
    chosen = {mesh.axis_index(axis) for axis in asked if axis in (*mesh.axis_names, *range(mesh.ndim))}
    return tuple(axis for axis, placement in enumerate(spec.placements) if axis in chosen and placement.is_shard())


def _own_stream(
    spec: Spec, memory: MemoryOrder, axes: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> tuple[MemoryOrder, torch.Generator]:
    """What the ranks at this rank's coordinates on `axes` hold together, as one tensor with a generator of its own."""
    key = key_of(generator)
    coordinate = spec.coordinate
    assert coordinate is not None, "a rank outside the mesh has no stream of its own"
    shape, box = [], []
    for dim in memory.order:
        sharding = spec.dim_sharding(dim)
        own, before, total = sharding.index(coordinate), 0, 0
        positions = product(*map(range, sharding.axis_sizes))  # of the shards, along the axes that make them
        for shard, (position, size) in enumerate(zip(positions, sharding.sizes, strict=True)):
            if all(at == coordinate[axis] for axis, at in zip(sharding.axes, position, strict=True) if axis in axes):
                before += size if shard < own else 0
                total += size
        shape.append(total)
        box.append((before, before + sharding.sizes[own]))
    number = 0
    for axis in axes:
        number = number * spec.mesh.size(axis) + coordinate[axis]
    low, high, *_ = philox((number, len(axes), 0, 0), key)
    own_generator = torch.Generator(device)
    own_generator.manual_seed((int(high) << 31) ^ int(low))
    return MemoryOrder(memory.order, tuple(shape), tuple(box), memory.contiguous), own_generator
