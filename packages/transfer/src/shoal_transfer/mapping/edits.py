"""Edits of the names and shapes of tensors; each function makes one step of a mapping.

Names in edits are templates: `{}` stands for one part of a name between dots, so that
``"layers.{}.q"`` is the q of every layer. `{index}` stands for the number of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal_dtensor.internal import spans

from ..errors import MappingError
from .assignment import Assignment
from .regions import Region, whole_region

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


class Edit(NamedTuple):
    """The tensors after an edit, and their assignments from the tensors before it."""

    targets: dict[str, Shape]
    assignments: tuple[Assignment, ...]


def copy_of(target: str, source: str, shape: Shape) -> Assignment:
    """Return the assignment of a whole tensor to another one of its shape."""
    region = whole_region(shape)
    return straight(target, region, source, region)


def straight(target: str, region: Region, source: str, source_region: Region) -> Assignment:
    """Return an assignment without transposition: dim d of the target gets dim d of the source."""
    dims = tuple(range(len(region)))
    return Assignment(target, region, source=source, source_region=source_region, dims=dims)


def edit_names(shapes: Shapes, patterns: Mapping[str, str]) -> Edit:
    """Replace regular expressions in names, all patterns in order."""
    names = dict[str, str]()
    for name in shapes:
        new = name
        for pattern, replacement in patterns.items():
            new = re.sub(pattern, replacement, new)
        if new in names:
            raise MappingError(f"rename: {names[new]!r} and {name!r} would both become {new!r}")
        names[new] = name
    parts = [copy_of(new, old, shapes[old]) for new, old in names.items()]
    return Edit({new: shapes[old] for new, old in names.items()}, tuple(parts))


def fuse(shapes: Shapes, fused: Mapping[str, Sequence[str]], dim: int, groups: int) -> Edit:
    """Concatenate tensors along a dim, in groups of shares.

    The dim of each tensor is divided into `groups` equal shares. The result has the first share of
    each tensor, then the second share of each tensor, and so on (see the example of `_turns`).
    """
    taken = set[str]()
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for target_template, templates in fused.items():
        for filling in _fillings(shapes, templates[0]):
            target = target_template.format(*filling)
            names = [template.format(*filling) for template in templates]
            _require(shapes, names, target)
            lengths = [_share(shapes, name, dim, groups) for name in names]
            targets[target] = _with_size(shapes[names[0]], dim, groups * sum(lengths))
            for block in _turns(names, lengths, groups):
                region = _along(targets[target], dim, block.rows_in_fused)
                source_region = _along(shapes[block.name], dim, block.rows)
                parts.append(straight(target, region, block.name, source_region))
            taken |= {*names}
    return _with_others(shapes, taken, targets, parts)


def split(shapes: Shapes, blocks: Mapping[str, Mapping[str, int]], dim: int, groups: int) -> Edit:
    """Split tensors along a dim into blocks of the given sizes; the inverse of `fuse`."""
    taken = set[str]()
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for template, sizes in blocks.items():
        for filling in _fillings(shapes, template):
            source = template.format(*filling)
            shape = shapes[source]
            names = [name.format(*filling) for name in sizes]
            if sum(sizes.values()) != shape[dim]:
                raise MappingError(
                    f"split: {source!r} {shape} cannot be split into blocks of {dict(sizes)}"
                )
            for name, size in zip(names, sizes.values(), strict=True):
                targets[name] = _with_size(shape, dim, size)
            lengths = [_share(targets, name, dim, groups) for name in names]
            for block in _turns(names, lengths, groups):
                region = _along(targets[block.name], dim, block.rows)
                source_region = _along(shape, dim, block.rows_in_fused)
                parts.append(straight(block.name, region, source, source_region))
            taken.add(source)
    return _with_others(shapes, taken, targets, parts)


def stack(shapes: Shapes, stacked: Mapping[str, str]) -> Edit:
    """Stack tensors along a new first dim; their names have the numbers 0, 1, 2, ..."""
    taken = set[str]()
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for target_template, template in stacked.items():
        first = template.replace("{index}", "0")
        for filling in _fillings(shapes, first):
            names = _numbered_names(shapes, template, filling)
            target = target_template.format(*filling)
            _require(shapes, names, target)
            shape = shapes[names[0]]
            targets[target] = (len(names), *shape)
            for index, name in enumerate(names):
                region = (range(index, index + 1), *whole_region(shape))
                # The new dim has no source dim; target dim d + 1 gets source dim d.
                dims = (None, *range(len(shape)))
                whole = whole_region(shapes[name])
                parts.append(Assignment(target, region, name, whole, dims=dims))
            taken |= {*names}
    return _with_others(shapes, taken, targets, parts)


def unstack(shapes: Shapes, stacked: Mapping[str, str]) -> Edit:
    """Give each index of the first dim a tensor of its own; the inverse of `stack`."""
    taken = set[str]()
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for template, target_template in stacked.items():
        for filling in _fillings(shapes, template):
            source = template.format(*filling)
            count, *rest = shapes[source]
            for index in range(count):
                name = target_template.format(*filling, index=index)
                targets[name] = tuple(rest)
                region = whole_region(rest)
                source_region = (range(index, index + 1), *region)
                dims = tuple(range(1, len(rest) + 1))
                parts.append(Assignment(name, region, source, source_region, dims=dims))
            taken.add(source)
    return _with_others(shapes, taken, targets, parts)


def transpose(shapes: Shapes, templates: Iterable[str], dims: tuple[int, int]) -> Edit:
    """Exchange two dims of tensors."""
    taken = matched_names(shapes, templates)
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for name in taken:
        shape = shapes[name]
        order = [*range(len(shape))]
        one, other = (dim % len(shape) for dim in dims)
        order[one] = other
        order[other] = one
        targets[name] = tuple(shape[dim] for dim in order)
        region = whole_region(targets[name])
        parts.append(Assignment(name, region, name, whole_region(shape), dims=tuple(order)))
    return _with_others(shapes, {*taken}, targets, parts)


def pad(shapes: Shapes, sizes: Mapping[str, int], dim: int, fill: float | None) -> Edit:
    """Lengthen a dim of tensors to a given size.

    New elements get the value `fill`. If `fill` is None, the target keeps the values that it has in
    their place.
    """
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for template, size in sizes.items():
        for name in matched_names(shapes, [template]):
            old = shapes[name]
            if size < old[dim]:
                raise MappingError(f"pad: {name!r} {old} is longer than {size} along dim {dim}")
            targets[name] = _with_size(old, dim, size)
            whole = whole_region(old)
            parts.append(straight(name, _along(targets[name], dim, whole[dim]), name, whole))
            rest = _along(targets[name], dim, range(old[dim], size))
            if size > old[dim]:
                parts.append(Assignment(name, rest, fill=fill))
    return _with_others(shapes, {*targets}, targets, parts)


def repeat(shapes: Shapes, templates: Iterable[str], times: int, block: int, dim: int) -> Edit:
    """Repeat each block of a dim a number of times; the copies of a block are adjacent."""
    targets = dict[str, Shape]()
    parts: list[Assignment] = []
    for name in matched_names(shapes, templates):
        old = shapes[name]
        blocks, rest = divmod(old[dim], block)
        if rest:
            raise MappingError(
                f"repeat: dim {dim} of {name!r} {old} cannot be divided into blocks of {block}"
            )
        targets[name] = _with_size(old, dim, old[dim] * times)
        for number in range(blocks * times):
            # Example: 3 times -> the blocks 0, 1 and 2 of the target are copies of block 0.
            start = number // times * block
            rows = range(start, start + block)
            place = range(number * block, (number + 1) * block)
            region = _along(targets[name], dim, place)
            parts.append(straight(name, region, name, _along(old, dim, rows)))
    return _with_others(shapes, {*targets}, targets, parts)


def add_copies(shapes: Shapes, copies: Mapping[str, str]) -> Edit:
    """Add tensors that are copies of others, for example an output head tied to an embedding."""
    _require(shapes, list(copies.values()), "copies")
    targets = {new: shapes[old] for new, old in copies.items()}
    parts = [copy_of(new, old, shapes[old]) for new, old in copies.items()]
    return _with_others(shapes, set(), targets, parts)


def add_filled(shapes: Shapes, added: Shapes, fill: float | None) -> Edit:
    """Add tensors without a source: filled with a value, or kept as the target has them."""
    targets = dict(added)
    parts = [Assignment(name, whole_region(shape), fill=fill) for name, shape in added.items()]
    return _with_others(shapes, set(), targets, parts)


def drop(shapes: Shapes, templates: Iterable[str]) -> Edit:
    """Leave tensors out."""
    return _with_others(shapes, {*matched_names(shapes, templates)}, {}, [])


# --- names ---------------------------------------------------------------------------------------


def _pattern(template: str) -> re.Pattern[str]:
    """Return the expression that matches the names of a template."""
    # Example: "layers.{}.q" -> r"layers\.([^.]+)\.q"
    return re.compile(r"([^.]+)".join(map(re.escape, template.split("{}"))))


def _fillings(shapes: Shapes, template: str) -> Iterator[tuple[str, ...]]:
    """Yield the texts that `{}` stands for in each name that a template matches."""
    found = [match.groups() for name in shapes if (match := _pattern(template).fullmatch(name))]
    if not found:
        raise MappingError(f"no tensor is named {template!r}; the names are {_first_names(shapes)}")
    yield from found


def matched_names(shapes: Shapes, templates: Iterable[str]) -> list[str]:
    """Return the names that the templates match, each template at least one."""
    names: list[str] = []
    for template in templates:
        names += [template.format(*filling) for filling in _fillings(shapes, template)]
    return names


def _numbered_names(shapes: Shapes, template: str, filling: Sequence[str]) -> list[str]:
    """Return the names with the indices 0, 1, 2, ... as far as they exist."""
    names: list[str] = []
    while (name := template.format(*filling, index=len(names))) in shapes:
        names.append(name)
    return names


def _require(shapes: Shapes, names: Sequence[str], target: str) -> None:
    missing = [name for name in names if name not in shapes]
    if missing:
        raise MappingError(
            f"{target!r}: the tensor {missing[0]!r} does not exist; the names are "
            f"{_first_names(shapes)}"
        )


def _first_names(shapes: Shapes) -> str:
    text = ", ".join([*shapes][:6])
    left_out = len(shapes) - 6
    return f"{text} and {left_out} more" if left_out > 0 else text


# --- shapes --------------------------------------------------------------------------------------


def _with_size(shape: Shape, dim: int, size: int) -> Shape:
    sizes = [*shape]
    sizes[dim] = size
    return tuple(sizes)


def _along(shape: Shape, dim: int, indices: range) -> Region:
    """Return the region of a tensor with these indices along one dim."""
    region = [*whole_region(shape)]
    region[dim] = indices
    return tuple(region)


def _share(shapes: Shapes, name: str, dim: int, groups: int) -> int:
    share, rest = divmod(shapes[name][dim], groups)
    if rest:
        raise MappingError(
            f"dim {dim} of {name!r} {shapes[name]} cannot be divided into {groups} equal groups"
        )
    return share


class _FusedBlock(NamedTuple):
    """Rows of a tensor, and the rows of the fused tensor that hold them."""

    name: str
    rows: range
    rows_in_fused: range


def _turns(names: Sequence[str], lengths: Sequence[int], groups: int) -> Iterator[_FusedBlock]:
    """Yield the blocks of a fused tensor in their order.

    The tensors take turns: each adds one block of its rows in every group.

    Example: q of 4 rows and k of 2 rows in 2 groups -> the fused tensor has the rows 0:2 of q, 0:1
    of k, 2:4 of q, and 1:2 of k.
    """
    places = spans([*lengths] * groups)
    for number, place in enumerate(places):
        group, member = divmod(number, len(names))
        length = lengths[member]
        rows = range(group * length, (group + 1) * length)
        yield _FusedBlock(names[member], rows, rows_in_fused=range(*place))


def _with_others(
    shapes: Shapes, taken: set[str], targets: dict[str, Shape], parts: list[Assignment]
) -> Edit:
    """Add the tensors that an edit does not take, unchanged."""
    others = {name: shape for name, shape in shapes.items() if name not in taken}
    both = others.keys() & targets.keys()
    if both:
        raise MappingError(f"{min(both)!r} is the name of a new tensor and of an existing one")
    copies = [copy_of(name, name, shape) for name, shape in others.items()]
    return Edit({**targets, **others}, (*parts, *copies))
