"""`draw`: fill a rank's box of a global tensor with random numbers in the present random mode."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from ..errors import PlacementError
from ..layout.spec import Spec
from .counter import fill_counter, philox
from .memory_walk import MemoryWalk, memory_walk_of
from .state import check_in_step, current_mode, generator_of, key_of
from .streams import Fill, fill_stream


def draw(
    spec: Spec,
    fill: Fill,
    generator: torch.Generator | None = None,
    *,
    out: Tensor | None = None,
    operand: Tensor | None = None,
) -> Tensor:
    """Return this rank's box of a global random tensor.

    The same call on every rank makes one global tensor.

    In the default mode, the values and the generator's state afterwards equal the result of `fill`
    on the plain global tensor, bit for bit. Every rank of the program may call it, also a rank with
    an empty box or outside the mesh.

    Args:
        spec: the layout of the global tensor.
        fill: the distribution.
        generator: the generator; the default generator when left out.
        out: the tensor to fill, this rank's box; a new one on the mesh's device when left out.
        operand: probabilities of `bernoulli_` for the box.

    Raises:
        PlacementError: for a partial tensor, because random addends do not have the distribution of
            the sum.
    """
    if spec.partials:
        raise PlacementError(
            f"{fill.name}: a partial tensor cannot be filled with random numbers; redistribute it "
            f"first; got {spec}"
        )
    local = empty_local(spec) if out is None else out.detach()
    if local.device.type == "meta":
        return local
    mode = current_mode()
    mode.hold_in_recomputation()
    if mode.mode != "local" and not torch.compiler.is_compiling() and type(local) is Tensor:
        # These modes draw a key, by default from the generator of the CPU.
        takes_key = mode.mode in {"counter", "per_axis"}
        source = torch.device("cpu") if takes_key else local.device
        check_in_step(spec.mesh, generator_of(source) if generator is None else generator)
    with torch.no_grad():
        if mode.mode == "local":
            fill(local, generator, operand)
            return local
        if mode.mode == "counter":
            box = spec.box(spec.coordinate) if spec.coordinate is not None else ((0, 0),)
            key = key_of(generator)
            fill_counter(local, tuple(spec.shape), box, fill, key=key, operand=operand)
            return local
        memory = memory_walk_of(spec)
        axes = _sharding_axes_of(mode.axes, spec)
        if mode.mode == "per_axis" and axes:
            key = key_of(generator)
            if spec.coordinate is None:
                return local
            memory, number = _own_part(memory, spec, spec.coordinate, axes)
            low, high, *_ = philox((number, len(axes), 0, 0), key)
            generator = torch.Generator(local.device).manual_seed((high << 31) ^ low)
        fill_stream(local, memory, fill, generator, operand=operand)
    return local


def _sharding_axes_of(requested: Iterable[str | int], spec: Spec) -> tuple[int, ...]:
    """Return the requested axes that the mesh has and that shard the tensor, ascending."""
    names = spec.mesh.axis_names
    known = (*names, *range(len(names)))
    axes = {spec.mesh.axis_index(axis) for axis in requested if axis in known}
    return tuple(axis for axis in sorted(axes) if spec.placements[axis].is_shard())


def draw_dropout_mask(spec: Spec, chance: float, dtype: torch.dtype, *, out: Tensor) -> None:
    """Fill this rank's box of a mask of `native_dropout`: True where an element is kept.

    `dtype` is the dtype of the input.
    """
    is_random = 0.0 < chance < 1.0
    is_on_device = out.device.type != "cpu"
    if is_on_device and is_random and current_mode().mode == "single_device":
        draw(spec, Fill("dropout_mask", (chance, dtype), granule=16), out=out)
    else:
        draw(spec, Fill("bernoulli_", (1.0 - chance,)), out=out)


def empty_local(spec: Spec, device: torch.device | str | None = None) -> Tensor:
    """Return uninitialized memory for this rank's box, dims in the order of the global stride."""
    memory = memory_walk_of(spec)
    place = spec.mesh.device_type if device is None else device
    if spec.coordinate is None:
        return torch.empty(0, dtype=spec.dtype, device=place)
    sizes = [stop - start for start, stop in memory.box]
    packed = torch.empty(sizes, dtype=spec.dtype, device=place)
    return packed.permute(memory.restored())


def _own_part(
    memory: MemoryWalk, spec: Spec, coordinate: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[MemoryWalk, int]:
    """Return the part of the tensor that ranks with this rank's coordinates on `axes` hold.

    The part is described as a tensor of its own, with this rank's box in it. Also return the
    row-major index of the coordinates on `axes`.
    """
    shape = []
    box = []
    for dim in memory.order:
        sharding = spec.dim_sharding(dim)
        own_shard = sharding.index(coordinate)
        sizes = sharding.sizes
        # Among the shards of the dim, find the shards that these ranks hold.
        fixed = [axis in axes for axis in sharding.axes]
        own_position = [coordinate[axis] for axis in sharding.axes]
        held = []
        for shard, position in enumerate(product(*map(range, sharding.axis_sizes))):
            triples = zip(fixed, position, own_position, strict=True)
            if all(at == own_at for is_fixed, at, own_at in triples if is_fixed):
                held.append(shard)
        before = sum(sizes[shard] for shard in held if shard < own_shard)
        shape.append(sum(sizes[shard] for shard in held))
        box.append((before, before + sizes[own_shard]))
    number = 0
    for axis in axes:
        # Example: 5 for the coordinates (1, 2) on axes of 2 and 3 ranks.
        number = number * spec.mesh.size(axis) + coordinate[axis]
    return memory._replace(shape=tuple(shape), box=tuple(box)), number
