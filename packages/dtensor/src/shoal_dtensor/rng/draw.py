"""`draw`: fill a rank's box of a global tensor with random numbers in the present random mode."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import torch
from torch import Tensor

from ..errors import PlacementError
from ..layout.dim_sharding import DimSharding
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

    In the default mode, "single_device", the values and the generator's state afterwards equal the
    result of `fill` on the plain global tensor, bit for bit. `random_mode` describes the modes
    "counter", "per_axis" and "local". Every rank of the program may call `draw`, also a rank with
    an empty box or outside the mesh.

    Args:
        spec: the layout of the global tensor.
        fill: the distribution.
        generator: the generator; the default generator when left out.
        out: the tensor to fill, this rank's box; a new one on the mesh's device when left out.
        operand: probabilities of `bernoulli_` for the box.

    Raises:
        PlacementError: for a partial tensor. Its value is the sum of the ranks' addends, and a sum
            of random addends does not have the distribution of `fill`.
    """
    if spec.partials:
        raise PlacementError(
            f"{fill.name}: a partial tensor cannot be filled with random numbers; redistribute it "
            f"first; got {spec}"
        )
    local = empty_local(spec) if out is None else out.detach()
    if local.device.type == "meta":
        return local
    random_mode = current_mode()
    mode = random_mode.mode
    # If a checkpoint runs this draw again in backward, the block's mode holds there, too.
    random_mode.hold_in_recomputation()
    if ranks_must_agree(local):
        # "counter" and "per_axis" draw a key, by default from the generator of the CPU.
        takes_key = mode in {"counter", "per_axis"}
        source = torch.device("cpu") if takes_key else local.device
        check_in_step(spec.mesh, generator_of(source) if generator is None else generator)
    with torch.no_grad():
        if mode == "local":
            fill(local, generator, operand)
            return local
        if mode == "counter":
            # Outside the mesh, a rank has an empty tensor of one dim, and draws the key only.
            box = spec.box(spec.coordinate) if spec.coordinate is not None else ((0, 0),)
            key = key_of(generator)
            fill_counter(local, tuple(spec.shape), box, fill, key=key, operand=operand)
            return local
        walk = memory_walk_of(spec)
        axes = _sharding_axes_of(random_mode.axes, spec)
        # If none of the axes shards the tensor, "per_axis" draws as "single_device" does.
        if mode == "per_axis" and axes:
            key = key_of(generator)
            if spec.coordinate is None:
                return local
            walk, stream = _part_of_stream(walk, spec, spec.coordinate, axes)
            low, high, *_ = philox((stream, len(axes), 0, 0), key)
            # The two words have 32 bits. A shift by 31 keeps the seed below 2 ** 63.
            generator = torch.Generator(local.device).manual_seed((high << 31) ^ low)
        fill_stream(local, walk, fill, generator, operand=operand)
    return local


def ranks_must_agree(local: Tensor) -> bool:
    """Tell whether the ranks' generators must have the same state when they draw for `local`.

    In mode "local" they may differ. A traced program draws later, when it runs.
    """
    is_local = current_mode().mode == "local"
    is_traced = torch.compiler.is_compiling() or type(local) is not Tensor
    return not is_local and not is_traced and local.device.type != "meta"


def _sharding_axes_of(requested: Iterable[str | int], spec: Spec) -> tuple[int, ...]:
    """Return the requested axes that the mesh has and that shard the tensor, ascending.

    The axes are requested by name or by index.
    """
    names = spec.mesh.axis_names
    names_and_indices = (*names, *range(len(names)))
    axes = {spec.mesh.axis_index(axis) for axis in requested if axis in names_and_indices}
    return tuple(axis for axis in sorted(axes) if spec.placements[axis].is_shard())


def draw_dropout_mask(spec: Spec, chance: float, dtype: torch.dtype, *, out: Tensor) -> None:
    """Fill this rank's box of a mask of `native_dropout`: True where an element is kept.

    `dtype` is the dtype of the input.

    Only "single_device" must reproduce the mask that one device draws. On CPU torch draws it by
    `bernoulli_`, on CUDA by the dropout kernel itself.
    """
    is_random = 0.0 < chance < 1.0
    is_on_device = out.device.type != "cpu"
    if is_on_device and is_random and current_mode().mode == "single_device":
        # The kernel draws for 1, 2, 4, 8 or 16 elements at once: a number that divides the number
        # of elements. Numbers that are equal modulo 16 have the same divisors among these.
        draw(spec, Fill("dropout_mask", (chance, dtype), granule=16), out=out)
    else:
        draw(spec, Fill("bernoulli_", (1.0 - chance,)), out=out)


def empty_local(spec: Spec, device: torch.device | str | None = None) -> Tensor:
    """Return uninitialized memory for this rank's box, dims in the order of the global stride."""
    walk = memory_walk_of(spec)
    place = spec.mesh.device_type if device is None else device
    if spec.coordinate is None:
        return torch.empty(0, dtype=spec.dtype, device=place)
    sizes_in_order = [stop - start for start, stop in walk.box]
    packed = torch.empty(sizes_in_order, dtype=spec.dtype, device=place)
    return packed.permute(walk.positions_of_dims())


def _part_of_stream(
    walk: MemoryWalk, spec: Spec, coordinate: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[MemoryWalk, int]:
    """Return the part of a tensor that one stream of "per_axis" fills, and the stream's number.

    Ranks with the same coordinates on `axes` share a stream. Together they hold the part. Example:
    (8, 6) on axes of 2 and 3 ranks, rows sharded by the first and columns by the second. With a
    stream for each coordinate of the first axis, a part is 4 rows of 6 columns.

    Args:
        walk: the walk of the whole tensor.
        spec: the layout of the tensor.
        coordinate: this rank's coordinate.
        axes: the axes with streams of their own.

    Returns:
        The part as a tensor of its own, with this rank's box in it. The number of the stream is the
        row-major index of the coordinates on `axes`.
    """
    shape = []
    box = []
    for dim in walk.order:
        sharding = spec.dim_sharding(dim)
        sizes = sharding.sizes
        own_shard = sharding.index(coordinate)
        shards = _shards_of_stream(sharding, coordinate, axes)
        start = sum(sizes[shard] for shard in shards if shard < own_shard)
        shape.append(sum(sizes[shard] for shard in shards))
        box.append((start, start + sizes[own_shard]))
    stream = 0
    for axis in axes:
        # Example: 5 for the coordinates (1, 2) on axes of 2 and 3 ranks.
        stream = stream * spec.mesh.size(axis) + coordinate[axis]
    return walk._replace(shape=tuple(shape), box=tuple(box)), stream


def _shards_of_stream(
    sharding: DimSharding, coordinate: tuple[int, ...], axes: tuple[int, ...]
) -> list[int]:
    """Return the shards of a dim whose ranks have the coordinates of this rank on `axes`.

    Example: a dim sharded by axes 0 and 1 of 2 and 3 ranks has shards 0 to 5. For axis 0 and a rank
    at (1, 2), the shards are 3, 4 and 5.
    """
    shards = []
    # The shards are numbered row-major over the positions on their axes.
    positions = product(*map(range, sharding.axis_sizes))
    for shard, position in enumerate(positions):
        position_by_axis = dict(zip(sharding.axes, position, strict=True))
        fixed_axes = [axis for axis in sharding.axes if axis in axes]
        if all(position_by_axis[axis] == coordinate[axis] for axis in fixed_axes):
            shards.append(shard)
    return shards
