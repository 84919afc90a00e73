"""Distribution of one rank's plain tensors as shards on every rank.

`scattering` opens a block in which `Scatter.shard` returns shards that are filled later. Tensors
with the same mesh and sharding axes are sent in one collective.

`V -> placements` begins the docstring of a function from V, plain tensors that may differ by rank
("varying"), to shards in the layout of `placements`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import torch

from shoal_mesh import LockstepError
from shoal_mesh.internal import all_to_all_blocks_compared, broadcast_blocks_compared

from ..errors import PlacementError
from ..layout.boxes import slices_of
from ..layout.spec import Spec
from .execution.rank_steps import members
from .plan import unfold_spec

# Tensors are sent as soon as they have more bytes than this together; they stay alive until then.
BUCKET_BYTES = 1 << 24


class _TensorToScatter(NamedTuple):
    """A tensor to distribute, and the shard to fill.

    Attributes:
        tensor: the global tensor.
        spec: the layout of the shard.
        shard: the shard.
        layout: the layout that the ranks compare.
    """

    tensor: torch.Tensor
    spec: Spec
    shard: torch.Tensor
    layout: Spec


class _Batch(NamedTuple):
    """The facts that the tensors of one collective share."""

    mesh: object
    sharding_axes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def shard_of(
    tensor: torch.Tensor, spec: Spec, source: int | None, layout: Spec | None = None
) -> torch.Tensor:
    """`V -> placements`: return this rank's shard of the plain tensor that one rank has.

    See `Scatter` for the arguments.
    """
    with scattering(source) as scatter:
        return scatter.shard(tensor, spec, layout)


@contextmanager
def scattering(source: int | None) -> Iterator[Scatter]:
    """Yield a `Scatter` whose shards are filled at the end of the block, even if it raises."""
    scatter = Scatter(source)
    try:
        yield scatter
    finally:
        scatter.send()


class Scatter:
    """Plain tensors of one rank that become shards on every rank, many in one collective.

    All ranks pass tensors of the same shapes in the same order. They compare the layouts in the
    message that is sent anyway: ranks with other layouts may send as many elements, but of other
    places.

    Args:
        source: the coordinate, equal on all mesh axes, of the rank that has the values. If it is
            None, every rank slices its own tensors and nothing is sent.

    Example:
        >>> from shoal_dtensor import Shard, Spec
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     specs = [Spec(mesh, [Shard(0)], (n,), None, torch.int64) for n in (2, 4)]
        ...     with scattering(0) as scatter:  # one all-to-all
        ...         shards = [scatter.shard(torch.arange(spec.shape[0]), spec) for spec in specs]
        ...     [shard.tolist() for shard in shards]
        [[0], [0, 1]]
    """

    __slots__ = ("_bytes", "_source", "_waiting")

    def __init__(self, source: int | None) -> None:
        self._source = source
        self._bytes = 0
        # the tensors to send; those of one batch are sent together
        self._waiting: dict[_Batch, list[_TensorToScatter]] = {}

    def shard(self, tensor: torch.Tensor, spec: Spec, layout: Spec | None = None) -> torch.Tensor:
        """Return this rank's shard of a global tensor, in memory of its own.

        The shard has its values once `send` has been called.

        On ranks other than the source only the shape and dtype of the tensor are used.

        Args:
            tensor: the global tensor.
            spec: the layout of the shard.
            layout: the layout that all ranks must share, by default `spec`.

        Raises:
            PlacementError: values are to be partial, or the source is not a coordinate of the mesh.
            LockstepError: ranks have different layouts; raised where the tensors are sent.
        """
        layout = layout or spec
        if spec.partials:
            raise PlacementError(
                f"a tensor cannot be distributed to {spec!r}: placements must be Shard or Replicate"
            )
        tensor = tensor.resolve_conj().resolve_neg()
        stays = tensor.device.type == spec.mesh.device_type or tensor.is_meta
        # A device without an index is the current device of its type.
        device = tensor.device if stays else torch.device(spec.mesh.device_type)
        if spec.coordinate is None:
            return tensor.new_empty((0,), device=device)
        if tensor.is_meta:
            # Nothing is sent, so the shard has the memory order of the layout.
            return tensor.new_empty_strided(spec.local_shape, spec.local_stride)
        if spec.is_strided:
            unfolded = unfold_spec(spec)
            return self.shard(tensor.reshape(unfolded.shape), unfolded, layout).reshape(
                spec.local_shape
            )
        if self._source is None:
            shard = tensor[slices_of(spec.box(spec.coordinate))]
            if shard.shape == tensor.shape:
                return shard.contiguous().to(device)
            # A slice would keep the memory of the whole tensor alive.
            return shard.clone(memory_format=torch.contiguous_format).to(device)
        for name, size in zip(spec.mesh.axis_names, spec.mesh.shape, strict=True):
            if not 0 <= self._source < size:
                raise PlacementError(
                    f"src_data_rank must be a coordinate of mesh axis {name!r}, from 0 to "
                    f"{size - 1}, got {self._source}"
                )
        local = torch.empty(spec.local_shape, dtype=tensor.dtype, device=device)
        sharding = tuple(sorted(axis for sharded in spec.dim_shardings for axis in sharded.axes))
        batch = _Batch(spec.mesh.identity, sharding, tensor.dtype, device)
        self._waiting.setdefault(batch, []).append(_TensorToScatter(tensor, spec, local, layout))
        self._bytes += tensor.dtype.itemsize * (spec.example or spec).shape.numel()
        if self._bytes > BUCKET_BYTES:
            self.send()
        return local

    def send(self) -> None:
        """Fill all shards."""
        waiting = self._waiting
        self._waiting = {}
        self._bytes = 0
        for batch, entries in waiting.items():
            assert self._source is not None, "without a source no scatter is in flight"
            _send(entries, batch.sharding_axes, self._source)


def _send(entries: Sequence[_TensorToScatter], sharding: tuple[int, ...], source: int) -> None:
    """Scatter boxes to the ranks of the source's plane, then broadcast them to the other planes.

    A plane is a set of ranks that differ only along the sharding axes. Raise LockstepError if ranks
    have different layouts.
    """
    spec = entries[0].spec
    mesh = spec.mesh
    own_coordinate = spec.coordinate
    assert own_coordinate is not None, "only ranks of the mesh pass entries"
    copying = tuple(axis for axis in range(mesh.ndim) if axis not in sharding)
    shards = [entry.shard for entry in entries]
    statements = [_statement(entry.layout, source) for entry in entries]
    difference = ""
    origin = (source,) * mesh.ndim
    # The coordinate of the rank in the source's plane that has the same shards as this rank.
    # Example: source 0, sharded over axis 1: (0, 2) for (1, 2).
    coordinate_of_first = [*origin]
    for axis in sharding:
        coordinate_of_first[axis] = own_coordinate[axis]
    first = tuple(coordinate_of_first)
    in_plane = own_coordinate == first
    if in_plane and not sharding:
        for entry in entries:
            entry.shard.copy_(entry.tensor)
    elif in_plane:
        group = members(spec, sharding, own_coordinate)
        sent: list[list[torch.Tensor]] = [[] for _ in group]
        received: list[list[torch.Tensor]] = [[] for _ in group]
        if own_coordinate == origin:
            for entry in entries:
                whole = entry.tensor.to(entry.shard.device)
                for blocks, member in zip(sent, group, strict=True):
                    blocks.append(whole[slices_of(entry.spec.box(member))])
        received[group.index(origin)] = shards
        difference = all_to_all_blocks_compared(
            sent, mesh.comm(sharding), received, statements, like=shards[0]
        )
    if prod(mesh.shape[axis] for axis in copying) > 1:
        # The other planes wait for this one, so it tells them a difference that it has found.
        told = [f"different layouts ({difference})"] if difference else statements
        src = members(spec, copying, own_coordinate).index(first)
        found = broadcast_blocks_compared(shards, mesh.comm(copying), src, told)
        difference = difference or found
    if difference:
        raise LockstepError(
            "distribute_tensor: all ranks must pass the same placements, shape, dtype and "
            f"src_data_rank; {difference}"
        )


def _statement(layout: Spec, source: int) -> str:
    """Return a line that all ranks share if they distribute a tensor alike."""
    placements = list(layout.placements)
    shape = tuple(layout.shape)
    return f"{placements} of shape {shape}, {layout.dtype}, src_data_rank {source}"
