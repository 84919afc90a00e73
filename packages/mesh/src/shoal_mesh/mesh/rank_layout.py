"""The fields of a mesh as checked values: ranks at coordinates, and the arguments of users.

Ranks with equal distances, as in most meshes and their slices, are stored as a range: a mesh over
16,384 ranks takes as much memory as one over four.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import inf, prod
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from .._torch import BackendOptions
from ..argument_types import kind_of, require, require_each
from ..errors import AxisError, BackendError, MeshError, MeshTypeError
from ..groups.process_groups import BackendChoice, Comm

# axis -> "gloo", options, or ("nccl", options)
BackendOverride = Mapping[int, Any] | Mapping[str, Any] | Mapping[int | str, Any]


@dataclass(frozen=True)
class Layout:
    """A grid of distinct ranks: a shape, and the ranks in row-major order.

    Create one with `of` or `dense`: they store equal grids in the same way, so that these compare
    equal.
    """

    shape: tuple[int, ...]
    # a range if all steps between neighbors are equal, else a tuple
    ranks: Sequence[int]

    @classmethod
    def of(cls, shape: Sequence[int], ranks: Sequence[int]) -> Layout:
        """Return the grid of any distinct ranks in row-major order."""
        first = ranks[0]
        step = ranks[1] - first if len(ranks) > 1 else 1
        # 1 3 5 7: range(1, 9, 2)
        line = range(first, first + step * len(ranks), step)
        is_line = all(map(int.__eq__, line, ranks))
        return cls(tuple(shape), line if is_line else tuple(ranks))

    def __setstate__(self, state: Any) -> None:
        """Restore a grid, also from files of earlier versions.

        These files have (size, step) pairs for each axis, an offset, and perhaps a list of ranks.
        """
        if "axes" in state:
            grid = Layout._of_earlier_version(state["axes"], state["offset"], state["listed"])
            state = vars(grid)
        vars(self).update(state)

    @classmethod
    def _of_earlier_version(
        cls, axes: Sequence[Sequence[tuple[int, int]]], offset: int, listed: Sequence[int] | None
    ) -> Layout:
        """Return the grid for the state of an earlier version.

        `listed` has the ranks in the order of places; None if ranks and places are equal.
        """
        # sizes (2, 3) with steps (3, 1): places 0 1 2 3 4 5
        steps = [range(0, size * step, step) for axis in axes for size, step in axis]
        places = [offset + sum(shifts) for shifts in product(*steps)]
        ranks = places if listed is None else [listed[place] for place in places]
        shape = []
        for axis in axes:
            sizes = [size for size, _ in axis]
            shape.append(prod(sizes))
        return cls.of(shape, ranks)

    @classmethod
    def dense(cls, shape: Sequence[int]) -> Layout:
        """Return the grid of the ranks 0, 1, 2, ... in row-major order."""
        return cls(tuple(shape), range(prod(shape)))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        """By axis, the distance in `ranks` between neighbors along the axis."""
        # shape (2, 3, 4): 12, 4, 1
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(self.ndim))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate."""
        # coordinate (1, 2, 3) in shape (2, 3, 4): 1 * 12 + 2 * 4 + 3 * 1 = 23
        position = sum(map(int.__mul__, coordinate, self._steps))
        return self.ranks[position]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Return the coordinate of a rank; None if the grid does not have the rank."""
        if rank not in self.ranks:
            return None
        position = self.ranks.index(rank)
        sizes = zip(self._steps, self.shape, strict=True)
        return tuple(position // step % size for step, size in sizes)

    def select(self, axes: Sequence[int], at: Sequence[int]) -> Layout:
        """Return the grid over some axes in the given order, through a coordinate."""
        others = [axis for axis in range(self.ndim) if axis not in axes]
        positions = [sum(at[axis] * self._steps[axis] for axis in others)]
        # Shape (2, 3, 4), axes (2, 0), position 1 of axis 1: the positions are 4 at first, then
        # with axis 2 they are 4 5 6 7, then with axis 0 they are 4 16 5 17 6 18 7 19.
        for axis in axes:
            step = self._steps[axis]
            steps = range(0, self.shape[axis] * step, step)
            positions = [position + shift for position in positions for shift in steps]
        shape = [self.shape[axis] for axis in axes]
        return Layout.of(shape, [self.ranks[position] for position in positions])

    def flatten(self) -> Layout:
        """Return the grid with all axes merged into one, row-major."""
        return Layout((len(self.ranks),), self.ranks)

    def unflatten(self, axis: int, sizes: Sequence[int]) -> Layout:
        """Return the grid with one axis split row-major into several.

        Raises MeshError if the product of the sizes is not the size of the axis.
        """
        count = self.shape[axis]
        if prod(sizes) != count or any(size < 1 for size in sizes):
            raise MeshError(
                f"axis {axis} of shape {self.shape} has {count} ranks, which is not the product "
                f"of {tuple(sizes)}"
            )
        before = self.shape[:axis]
        after = self.shape[axis + 1 :]
        return Layout((*before, *sizes, *after), self.ranks)

    # --- parts of a larger grid; positions are indices into the ranks of the larger grid ----------

    def cross_parts(self, parts: Sequence[Layout]) -> Layout | None:
        """Return the grid with the axes of several parts of this grid, which cross at one rank.

        The parts with the ranks 4 5 6 7 and 1 5 of a 2 x 4 grid cross at rank 5. They give the
        4 x 2 grid 0 4, 1 5, 2 6, 3 7. Returns None unless the parts share exactly one rank.
        """
        lines = [self._positions(part) for part in parts]
        common = set(lines[0]).intersection(*lines[1:])
        if not common:
            return None
        crossing = next(iter(common))
        repeated = crossing * (len(lines) - 1)
        # A rank of the result is at the sum of one position of each part, counted from the
        # crossing. With the crossing 5, the positions 4 and 1 give 4 + 1 - 5 = 0, and 4
        # and 5 give 4.
        positions = [sum(combination) - repeated for combination in product(*lines)]
        has_repeated = len(set(positions)) < len(positions)
        if has_repeated or max(positions) >= len(self.ranks):
            return None
        shape = [size for part in parts for size in part.shape]
        return Layout.of(shape, [self.ranks[position] for position in positions])

    def _positions(self, part: Layout) -> list[int]:
        """Return the positions of a part's ranks in this grid."""
        return [self.ranks.index(rank) for rank in part.ranks]

    def is_crossed_by_axes(self, part: Layout) -> bool:
        """Return whether a part equals the grid that its lines along axes give (`cross_parts`)."""
        origin = (0,) * part.ndim
        axes = [part.select((axis,), origin) for axis in range(part.ndim)]
        return self.cross_parts(axes) == part

    def parallel(self, part: Layout, rank: int) -> Layout:
        """Return the parallel part, with the same steps, that contains another rank.

        The ranks 4-7 are a row of a 2 x 4 grid. The parallel row that contains rank 1 is 0-3.
        """
        positions = self._positions(part)
        first = min(positions)
        # moves back from the position of the rank to the first position of the parallel part
        start = self.ranks.index(rank)
        offsets = [position - first for position in sorted(positions)]
        # The part 4-7 and 16-19 of a 2 x 3 x 4 grid has the offsets 0 1 2 3 12 13 14 15. They begin
        # with a run of 4 in steps of 1. Every fourth offset remains: 0 12, a run of 2 in steps of
        # 12.
        while len(offsets) > 1:
            step = offsets[1]
            size = _length_of_run(offsets)
            # Rank 21 has index 1 in a run of 4 in steps of 1: 21 - 1 = 20. Rank 20 has index 1 in a
            # run of 2 in steps of 12: 20 - 12 = 8. The parallel part is 8-11 and 20-23.
            start -= start // step % size * step
            offsets = offsets[::size]
        shift = start - first
        return Layout.of(part.shape, [self.ranks[position + shift] for position in positions])


def _length_of_run(offsets: Sequence[int]) -> int:
    """Return the number of offsets at the beginning that continue the step of the first two."""
    step = offsets[1]
    for length, offset in enumerate(offsets):
        if offset != length * step:
            return length
    return len(offsets)


@dataclass(frozen=True, slots=True)
class MeshFields:
    """The fields of a mesh as checked values, which is also the pickled state.

    Attributes:
        device_type: the device type, without an index.
        layout: the rank at each coordinate.
        names: names of the axes, or None.
        choices: backend of every axis.
        abstract_rank: the rank whose view an abstract mesh is; None for a mesh with process groups.
        connect: function that returns communicators of an abstract mesh, or None.
    """

    device_type: str
    layout: Layout
    names: tuple[str, ...] | None
    choices: tuple[BackendChoice, ...]
    abstract_rank: int | None = None
    connect: Callable[[tuple[int, ...]], Comm] | None = None


# --- what users pass ------------------------------------------------------------------------------


def read_sizes(values: Iterable[int], name: str) -> tuple[int, ...]:
    """Return a sequence of integers as a tuple; raise MeshTypeError for anything else."""
    if not isinstance(values, str | bytes | Set | Mapping):
        # RuntimeError: of torch's own mesh, when it is iterated
        with suppress(TypeError, RuntimeError):
            return tuple(map(index, values))
    raise MeshTypeError(f"{name} is a sequence of int, got {kind_of(values)}")


def read_device(device_type: str) -> str:
    """Return the device type; raise MeshError if it has an index, as `cuda:0` has."""
    require(device_type, str | torch.device, "a device type is 'cpu', 'cuda', ...")
    try:
        device = torch.device(device_type)
    except RuntimeError as error:
        raise MeshError(f"{device_type!r} is not a device type: use 'cpu', 'cuda', ...") from error
    if ":" in str(device_type):
        raise MeshError(
            f"device type {device_type!r} has an index: a mesh spans the devices of all ranks, so "
            f"pass {device.type!r} and choose this rank's device with "
            "torch.accelerator.set_device_index"
        )
    return device.type


def read_shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Return a mesh shape as plain positive integers; raise MeshError for other shapes."""
    sizes = read_sizes((shape,) if isinstance(shape, int) else shape, "a mesh shape")
    if not sizes or any(size < 1 for size in sizes):
        raise MeshError(f"a mesh shape must have one positive size per axis, got {shape}")
    return sizes


def read_ranks(mesh: torch.Tensor | Sequence[Any] | None, world: int | None) -> Layout:
    """Return the layout of the ranks that a user has listed.

    Args:
        mesh: a tensor or nested list of ranks; None for the whole world in a row.
        world: the number of ranks of the world; None if it is unknown.

    Raises:
        MeshTypeError: the ranks are not integers.
        MeshError: ranks are repeated or not in the world, or there are none.
    """
    if mesh is None:
        return Layout.dense((world or 1,))
    try:
        ranks = torch.as_tensor(mesh, device="cpu").cpu()
    except (TypeError, RuntimeError) as error:
        raise MeshTypeError(
            f"the ranks of a mesh are a tensor or nested list of int, got {kind_of(mesh)}"
        ) from error
    except ValueError as error:
        raise MeshError(
            f"the ranks of a mesh are a tensor or nested list of int of equal lengths: {error}"
        ) from error
    is_integer = not ranks.is_floating_point() and not ranks.is_complex()
    if not is_integer or ranks.dtype == torch.bool:
        raise MeshTypeError(f"the ranks of a mesh must be integers, got {ranks.dtype}")
    if ranks.numel() == 0:
        raise MeshError(f"a mesh must have at least one rank, got shape {tuple(ranks.shape)}")
    shape = tuple(ranks.shape) or (1,)
    flat = ranks.reshape(-1).tolist()
    counts = Counter(flat)
    repeated = sorted(rank for rank, count in counts.items() if count > 1)
    if repeated:
        raise MeshError(
            f"each rank can be in a mesh once, but {repeated} are repeated in the mesh of shape "
            f"{shape}"
        )
    limit = inf if world is None else world
    wrong = [rank for rank in flat if not 0 <= rank < limit]
    if wrong:
        raise MeshError(
            f"ranks {wrong[:8]} are not in the world of {world} ranks (mesh of shape {shape})"
        )
    return Layout.of(shape, flat)


def read_names(names: Sequence[Any] | None, ndim: int) -> tuple[str, ...] | None:
    """Return one distinct name per axis, or None."""
    if names is None:
        return None
    if isinstance(names, str):
        names = (names,)
    require_each(names, str, f"names of mesh axes are strings, one for each of {ndim} axes")
    axis_names = tuple(names)
    if len(axis_names) != ndim:
        raise AxisError(f"a mesh of {ndim} axes needs {ndim} names, got {axis_names}")
    if len(set(axis_names)) != len(axis_names) or not all(axis_names):
        raise AxisError(f"names of mesh axes must be distinct, non-empty strings, got {axis_names}")
    return axis_names


def read_backends(
    override: BackendOverride | None,
    names: Sequence[str] | None,
    ndim: int,
    *,
    keeps_rank_order: bool = False,
) -> tuple[BackendChoice, ...]:
    """Return the backend choice of every axis.

    Args:
        override: backends by name or index of an axis.
        names: names of the axes.
        ndim: number of axes.
        keeps_rank_order: whether the groups of all axes have the order of the mesh.

    Raises:
        AxisError: an axis does not exist, or is given by name and by index.
    """
    choices: dict[int, BackendChoice] = {}
    require(override, Mapping | None, "backend_override maps axes to backends")
    axis_names = tuple(names or ())
    for axis, value in (override or {}).items():
        position = axis
        if isinstance(axis, str) and axis in axis_names:
            position = axis_names.index(axis)
        if not isinstance(position, int) or not 0 <= position < ndim:
            axes: Sequence[object] = axis_names or range(ndim)
            raise AxisError(f"backend_override names axis {axis!r}; the axes are {tuple(axes)}")
        if position in choices:
            raise AxisError(f"backend_override gives axis {axis!r} twice, by name and by index")
        choices[position] = _read_choice(axis, value)
    return tuple(
        replace(choices.get(i, BackendChoice()), keeps_rank_order=keeps_rank_order)
        for i in range(ndim)
    )


def _read_choice(axis: int | str, value: object) -> BackendChoice:
    """Return the backend choice that a user passes for an axis."""
    if isinstance(value, BackendOptions):
        return BackendChoice(options=value)
    backend = value
    options = None
    if isinstance(value, tuple | list) and len(value) == 2:
        backend, options = value
    if not isinstance(backend, str):
        raise BackendError(
            f"backend_override of axis {axis!r} is a backend, its options, or both as a pair, got "
            f"{kind_of(value)}"
        )
    known = dist.Backend.backend_list
    # "cpu:gloo,cuda:nccl": gloo, nccl
    parts = [part.rpartition(":")[2] for part in backend.lower().split(",")]
    if any(part not in known for part in parts):
        raise BackendError(
            f"backend {backend!r} of axis {axis!r} must be one of {', '.join(known)}, or a "
            "combination such as cpu:gloo,cuda:nccl"
        )
    return BackendChoice(backend, options)


def check_fits(shape: Sequence[int], world: int) -> None:
    """Raise MeshError unless a mesh of this shape fits the world."""
    needed = prod(shape)
    if needed > world:
        raise MeshError(
            f"a mesh of shape {tuple(shape)} needs {needed} ranks; the world has {world}"
        )
