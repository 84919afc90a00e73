"""`Assignment`: the elements of a region of one target tensor, and where their values come from.

A region has a progression of indices for each dim of a tensor. Assignments can be restricted to a
region, and composed with the assignments that define their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..errors import MappingError
from .regions import Region, common_positions, format_region, take


@dataclass(frozen=True, slots=True)
class Assignment:
    """A region of a target tensor and the source of its values.

    Target dim `d` advances together with source dim `dims[d]`: the k-th index of the target dim
    gets its values from the k-th index of the source dim. A transposed copy has dims (1, 0). If
    dims[d] is None, all indices of target dim `d` get the same values. A source dim that is not in
    `dims` has one index, which all elements of the target use.

    Attributes:
        target: name of the target tensor.
        region: the elements of the target, one progression per dim.
        source: name of the source tensor; None if the values do not come from a source.
        source_region: the elements of the source, one progression per dim; () without a source.
        dims: the source dim that advances with each target dim, or None.
        fill: the value of a region without a source. None keeps the values that the target has.
        casts: whether values may change their dtype; they are cast before they are sent.

    Example:
        >>> rows = (range(0, 2), range(0, 4))
        >>> Assignment("qkv", (range(4, 6), range(0, 4)), "k", rows, (0, 1))
        Assignment('qkv'[4:6, 0:4] = 'k'[0:2, 0:4])
        >>> Assignment("vocabulary", (range(10, 16), range(0, 4)), fill=0.0)
        Assignment('vocabulary'[10:16, 0:4] = 0.0)
    """

    target: str
    region: Region
    source: str | None = None
    source_region: Region = ()
    dims: tuple[int | None, ...] = ()
    fill: float | None = None
    casts: bool = False

    def __repr__(self) -> str:
        return f"Assignment({self})"

    def __str__(self) -> str:
        target = f"{self.target!r}{format_region(self.region)}"
        if self.source is None:
            return f"{target} = {'keep' if self.fill is None else self.fill}"
        source = f"{self.source!r}{format_region(self.source_region)}"
        # `dims` is printed only if dim d of the target does not simply get dim d of the source.
        is_straight = self.dims == tuple(range(len(self.source_region)))
        return f"{target} = {source}{'' if is_straight else f' along {self.dims}'}"

    def check(self, shape: Sequence[int], source_shape: Sequence[int] | None) -> None:
        """Check that both regions are in their tensors and have the same lengths.

        Args:
            shape: shape of the target tensor.
            source_shape: shape of the source tensor; None if the source does not exist.

        Raises:
            MappingError: a region is not in its tensor, or the dims do not correspond.
        """
        _check_inside(self.target, self.region, shape)
        if self.source is None:
            return
        if source_shape is None:
            raise MappingError(f"{self}: the source tensor {self.source!r} does not exist")
        _check_inside(self.source, self.source_region, source_shape)
        if self.fill is not None:
            raise MappingError(f"{self}: got both a source and a fill value; pass one of them")
        advanced = [dim for dim in self.dims if dim is not None]
        is_complete = len(self.dims) == len(self.region)
        is_injective = len({*advanced}) == len(advanced)
        is_inside = {*advanced} <= {*range(len(self.source_region))}
        if not is_complete or not is_injective or not is_inside:
            raise MappingError(
                f"{self}: dims must give each target dim a different source dim or None, got "
                f"{self.dims}"
            )
        for indices, dim in zip(self.region, self.dims, strict=True):
            if dim is not None and len(indices) != len(self.source_region[dim]):
                raise MappingError(f"{self}: {len(indices)} indices advance with source dim {dim}")
        for dim, indices in enumerate(self.source_region):
            if dim not in advanced and len(indices) != 1:
                raise MappingError(f"{self}: no target dim advances with source dim {dim}")

    def restricted_to(self, region: Region) -> Assignment | None:
        """Return the part of this assignment whose target elements are in `region`, None if empty.

        Example:
            >>> whole = Assignment("b", (range(2, 8),), "a", (range(0, 6),), (0,))
            >>> whole.restricted_to((range(4, 20),))
            Assignment('b'[4:8] = 'a'[2:6])
        """
        positions = []
        for indices, others in zip(self.region, region, strict=True):
            # positions in `self.region`, which `_at` takes
            shared, _ = common_positions(indices, others)
            if not shared:
                return None
            positions.append(shared)
        return self._at(positions)

    def reading_from(self, region: Region) -> Assignment | None:
        """Return the part of this assignment whose source elements are in `region`, None if empty.

        Example:
            >>> whole = Assignment("b", (range(2, 8),), "a", (range(0, 6),), (0,))
            >>> whole.reading_from((range(0, 2),))
            Assignment('b'[2:4] = 'a'[0:2])
        """
        shared = []
        for indices, others in zip(self.source_region, region, strict=True):
            common, _ = common_positions(indices, others)
            if not common:
                return None
            shared.append(common)
        positions = [range(len(indices)) for indices in self.region]
        for target_dim, dim in enumerate(self.dims):
            if dim is not None:
                positions[target_dim] = shared[dim]
        return self._at(positions)

    def after(self, earlier: Assignment) -> Assignment | None:
        """Compose with the assignment that defines this source; None if they share no element.

        Args:
            earlier: an assignment whose target is the source of this one.

        Returns:
            An assignment from the source of `earlier` to the target of this one.

        Example:
            >>> fused = Assignment("qkv", (range(4, 6),), "k", (range(0, 2),), (0,))
            >>> split = Assignment("k of rank 1", (range(0, 1),), "qkv", (range(5, 6),), (0,))
            >>> split.after(fused)
            Assignment('k of rank 1'[0:1] = 'k'[1:2])
        """
        later = self.reading_from(earlier.region)
        if later is None:
            return None
        part = earlier.restricted_to(later.source_region)
        assert part is not None, "both must have the common elements"
        has_source = part.source is not None
        # Each target dim leads to a dim of this source, which leads to a dim of the earlier source.
        # Without an earlier source there are no dims.
        dims = [None if dim is None else part.dims[dim] for dim in later.dims if has_source]
        return replace(
            later,
            source=part.source,
            source_region=part.source_region,
            dims=tuple(dims),
            fill=part.fill,
            casts=self.casts or earlier.casts,
        )

    def _at(self, positions: Sequence[range]) -> Assignment:
        """Return the part at some positions of each target dim."""
        region = tuple(map(take, self.region, positions))
        if self.source is None:
            return replace(self, region=region)
        source = [*self.source_region]
        for dim, chosen in zip(self.dims, positions, strict=True):
            if dim is not None:
                source[dim] = take(source[dim], chosen)
        return replace(self, region=region, source_region=tuple(source))

    def to_json(self) -> dict[str, Any]:
        """Return the assignment as JSON values; progressions are [start, stop, step]."""
        value: dict[str, Any] = {"target": self.target, "region": _as_lists(self.region)}
        if self.source is not None:
            value["source"] = self.source
            value["source_region"] = _as_lists(self.source_region)
            value["dims"] = list(self.dims)
        elif self.fill is not None:
            value["fill"] = self.fill
        if self.casts:
            value["casts"] = True
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Assignment:
        """Return the assignment that `to_json` has written."""
        region = _as_region(value["region"])
        casts = value.get("casts", False)
        if "source" not in value:
            return cls(value["target"], region, fill=value.get("fill"), casts=casts)
        source_region = _as_region(value["source_region"])
        dims = tuple(value["dims"])
        return cls(value["target"], region, value["source"], source_region, dims=dims, casts=casts)


class Strided:
    """A strided view of a contiguous tensor, as one progression of indices per dim of the tensor.

    Args:
        shape: shape of the contiguous tensor.
        offset: offset of the view, in elements.
        sizes: sizes of the view.
        strides: strides of the view, in elements.

    Attributes:
        start: the index of the first element, one number per dim of the tensor.
        steps: a pair (dim of the tensor, step) for each dim of the view; None for a dim of stride 0
            or size 1.

    Raises:
        MappingError: a dim of the view walks along several dims of the tensor, or two dims of the
            view walk along one dim. Copy the view in slices along its first dim.

    Example:
        Column 1 of a (4, 6) tensor, two rows at a time:

        >>> view = Strided((4, 6), 1, (2,), (12,))
        >>> view.start, view.steps
        ((0, 1), ((0, 2),))
    """

    def __init__(
        self, shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]
    ) -> None:
        self.shape = tuple(shape)
        self.sizes = tuple(sizes)
        dim_strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        rest = offset
        start = []
        for stride in dim_strides:
            # the stride is 0 if a following dim has size 0
            index, rest = divmod(rest, stride) if stride else (0, 0)
            start.append(index)
        self.start = tuple(start)
        steps = []
        for size, stride in zip(self.sizes, strides, strict=True):
            steps.append(self._step(dim_strides, size, stride))
        self.steps: tuple[tuple[int, int] | None, ...] = tuple(steps)
        walked_dims = [step[0] for step in steps if step is not None]
        if len({*walked_dims}) < len(walked_dims):
            raise MappingError(f"two dims of a view {self.sizes}, {tuple(strides)} walk along one")

    def _step(self, dim_strides: Sequence[int], size: int, stride: int) -> tuple[int, int] | None:
        """Return the dim of the tensor that a dim of the view walks along, and its step."""
        if size == 1 or stride == 0:
            return None
        for dim, stride_of_dim in enumerate(dim_strides):
            # A stride of 0 belongs to an empty tensor. The rest 1 makes the test below fail.
            step, rest = divmod(stride, stride_of_dim) if stride_of_dim else (0, 1)
            last = self.start[dim] + (size - 1) * step
            if step > 0 and not rest and last < self.shape[dim]:
                return dim, step
        raise MappingError(
            f"stride {stride} over {size} elements does not walk along one dim of {self.shape}"
        )

    @property
    def region(self) -> Region:
        """The elements of the view."""
        region = [range(index, index + 1) for index in self.start]
        for size, dim_and_step in zip(self.sizes, self.steps, strict=True):
            if dim_and_step is not None:
                dim, step = dim_and_step
                start = self.start[dim]
                last = start + (size - 1) * step
                region[dim] = range(start, last + 1, step)
        return tuple(region)


def assign_strided(target: str, to: Strided, source: str, of: Strided) -> Assignment:
    """Return the assignment of a copy between two strided views of the same sizes.

    Args:
        target: name of the target tensor.
        to: the view of the target that is written.
        source: name of the source tensor.
        of: the view of the source that is read.

    Raises:
        MappingError: the sizes differ, or the target's view writes an element twice.

    Example:
        >>> rows = Strided((6, 4), 8, (2, 4), (4, 1))
        >>> assign_strided("qkv", rows, "k", Strided((2, 4), 0, (2, 4), (4, 1)))
        Assignment('qkv'[2:4, 0:4] = 'k'[0:2, 0:4])
    """
    if to.sizes != of.sizes:
        raise MappingError(
            f"{target!r}: a view of sizes {to.sizes} cannot be copied from a view of sizes "
            f"{of.sizes}"
        )
    dims: list[int | None] = [None] * len(to.shape)
    for size, step, source_step in zip(to.sizes, to.steps, of.steps, strict=True):
        if size == 1:
            continue
        if step is None:
            raise MappingError(f"{target!r}: the copy writes an element {size} times")
        dims[step[0]] = None if source_step is None else source_step[0]
    return Assignment(target, to.region, source=source, source_region=of.region, dims=tuple(dims))


def _check_inside(name: str, region: Region, shape: Sequence[int]) -> None:
    is_inside = len(region) == len(shape)
    for indices, size in zip(region, shape, strict=False):
        is_inside = is_inside and indices.step > 0
        if indices:
            is_inside = is_inside and indices[0] >= 0 and indices[-1] < size
    if not is_inside:
        raise MappingError(
            f"{name!r}: region {format_region(region)} is outside of the tensor's shape "
            f"{tuple(shape)}"
        )


def _as_lists(region: Region) -> list[list[int]]:
    return [[indices.start, indices.stop, indices.step] for indices in region]


def _as_region(lists: Sequence[Sequence[int]]) -> Region:
    return tuple(range(*numbers) for numbers in lists)
