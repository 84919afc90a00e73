"""Places of local parameters in the logical parameters of one device.

A place comes from metadata, or is found from the initial values of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..records import LocalValue, RankRecord, Values
from .copies import Setting
from .find_index import find_index
from .grid import MeshGrid


@dataclass(frozen=True, slots=True, eq=False)
class ValuePlace:
    """The place of a local tensor.

    Attributes:
        name: the name of the logical parameter.
        index: for each element its position in the flattened logical parameter; int64, in the local
            shape.
    """

    name: str
    index: Tensor


@dataclass(slots=True)
class Places:
    """The places of all local parameters of all ranks.

    Attributes:
        by_rank: for each rank the places by local name.
        unplaced: local names by rank that no logical parameter fits.
        ambiguous: local names whose place is not found because their values are constant.
        known: for each rank the local names that were looked for.
    """

    by_rank: list[dict[str, ValuePlace]] = field(default_factory=list)
    unplaced: list[tuple[int, str]] = field(default_factory=list)
    ambiguous: list[tuple[int, str]] = field(default_factory=list)
    known: list[set[str]] = field(default_factory=list)


def place_parameters(ranks: Sequence[RankRecord], reference: RankRecord, grid: MeshGrid) -> Places:
    """Find every local parameter in the logical parameters.

    Args:
        ranks: records of all ranks.
        reference: the record of one device.
        grid: axes of the ranks.
    """
    wholes = reference.steps[0].before if reference.steps else reference.after
    places = Places()
    for rank, record in enumerate(ranks):
        values = record.steps[0].before if record.steps else record.after
        places.by_rank.append({})
        places.known.append(set(values))
        _place_rank(places, grid, rank, values=values, wholes=wholes, slack=0.0)
    return places


def place_replaced(
    places: Places, ranks: Sequence[tuple[Values, set[str]]], wholes: Values, setting: Setting
) -> Places:
    """Find the parameters that a program has replaced, or has made after the first step.

    A parameter that is replaced by a copy keeps its place.

    Args:
        places: before.
        ranks: for each rank the parameters, and the names that had other parameters before.
        wholes: the parameters of one device at the same time.
        setting: the grid, and the tolerance for trained values.

    Returns:
        The places of all parameters; unplaced and ambiguous are the new ones alone.
    """
    found = Places([dict(by_name) for by_name in places.by_rank])
    for rank, (values, replaced) in enumerate(ranks):
        before = places.by_rank[rank]
        new = Values()
        for name, value in values.items():
            is_first = name not in places.known[rank]
            is_copy = name in before and _is_at(value, before[name], wholes, setting)
            if is_first or (name in replaced and not is_copy):
                new[name] = value
                found.by_rank[rank].pop(name, None)
        found.known.append(places.known[rank] | set(values))
        if new:
            slack = setting.tolerance * _largest_element(wholes)
            _place_rank(found, setting.grid, rank, values=new, wholes=wholes, slack=slack)
    return found


def _largest_element(values: Values) -> float:
    """Return the largest absolute value of all elements."""
    largest = 0.0
    for value in values.values():
        if value.tensor.numel():
            largest = max(largest, float(value.tensor.abs().max()))
    return largest


def _is_at(value: LocalValue, place: ValuePlace, wholes: Values, setting: Setting) -> bool:
    """Tell whether a parameter of this place has the values of one device there."""
    whole = wholes.get(place.name)
    if whole is None or value.tensor.shape != place.index.shape or value.index is not None:
        return False
    if place.index.numel() and int(place.index.max()) >= whole.tensor.numel():
        return False
    return setting.is_close(value.tensor, whole.tensor.flatten()[place.index])


def _place_rank(
    places: Places, grid: MeshGrid, rank: int, *, values: Values, wholes: Values, slack: float
) -> None:
    """Find the parameters of one rank in those of one device, within a slack of each element."""
    found = places.by_rank[rank]
    postponed = list[str]()
    for name, value in values.items():
        at = _place(name, value, wholes, slack)
        if at is None:
            postponed.append(name)
        else:
            found[name] = at
    for name in postponed:
        at = _place_by_sibling(name, values[name], found, wholes)
        if at is None:
            at = _place_by_name(name, values[name], wholes)
        if at is None:
            at = _place_by_chunk(name, values[name], wholes, grid=grid, rank=rank)
        if at is not None:
            found[name] = at
        elif _is_constant(values[name].tensor):
            places.ambiguous.append((rank, name))
        else:
            places.unplaced.append((rank, name))


def _place(name: str, value: LocalValue, wholes: Values, slack: float) -> ValuePlace | None:
    """Find a parameter by metadata, by name and values, or by values alone."""
    same = wholes.get(name)
    has_layout = value.index is not None and value.shape is not None
    if same is not None and has_layout and value.shape == tuple(same.tensor.shape):
        assert value.index is not None
        return ValuePlace(name, value.index)
    if _is_constant(value.tensor) and value.tensor.numel():
        return None
    if same is not None:
        index = find_index(value.tensor, same.tensor, slack)
        if index is not None:
            return ValuePlace(name, index)
    for other, whole in wholes.items():
        has_size = value.tensor.numel() <= whole.tensor.numel()
        if other != name and has_size and value.tensor.numel():
            index = _find_in_other(value, whole, slack)
            if index is not None:
                return ValuePlace(other, index)
    return None


def _find_in_other(value: LocalValue, whole: LocalValue, slack: float) -> Tensor | None:
    """Find a parameter in a logical parameter of another name, by metadata or by values."""
    if value.index is None or value.shape != tuple(whole.tensor.shape):
        return find_index(value.tensor, whole.tensor, slack)
    part = whole.tensor.flatten()[value.index]
    return value.index if torch.allclose(part, value.tensor, rtol=0, atol=slack) else None


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements are equal, as in a new bias or norm."""
    if not tensor.numel():
        return True
    first = tensor.flatten()[0]
    return bool((tensor == first).all())


def _place_by_sibling(
    name: str, value: LocalValue, found: Mapping[str, ValuePlace], wholes: Values
) -> ValuePlace | None:
    """Place a constant vector, such as a bias, like dim 0 of a placed matrix of the same module."""
    path, _, leaf = name.rpartition(".")
    for other, place in found.items():
        other_path, _, _ = other.rpartition(".")
        logical_path, _, _ = place.name.rpartition(".")
        logical = f"{logical_path}.{leaf}" if logical_path else leaf
        whole = wholes.get(logical)
        if other_path != path or whole is None:
            continue
        index = place.index
        if value.tensor.ndim != 1 or index.ndim < 2:
            continue
        matrix = wholes[place.name].tensor
        is_row_wise = matrix.ndim > 1 and len(matrix) == len(whole.tensor)
        has_these_rows = len(index) == len(value.tensor) and index.numel() > 0
        if is_row_wise and has_these_rows:
            # element 12 of an (8, 4) matrix is in row 12 // 4 = 3
            rows = index.flatten(1)[:, 0] // matrix[0].numel()
            return ValuePlace(logical, rows)
        if value.tensor.shape == whole.tensor.shape:
            return ValuePlace(logical, torch.arange(whole.tensor.numel()))
    return None


def _place_by_name(name: str, value: LocalValue, wholes: Values) -> ValuePlace | None:
    """Place a parameter in the logical parameter of its name and shape, whatever its values."""
    whole = wholes.get(name)
    if whole is None or whole.tensor.shape != value.tensor.shape:
        return None
    return ValuePlace(name, torch.arange(whole.tensor.numel()).view(whole.tensor.shape))


def _place_by_chunk(
    name: str, value: LocalValue, wholes: Values, *, grid: MeshGrid, rank: int
) -> ValuePlace | None:
    """Place a parameter as this rank's chunk along an axis, if only one axis and dim fit it."""
    whole = wholes.get(name)
    if whole is None or whole.tensor.ndim != value.tensor.ndim:
        return None
    positions = torch.arange(whole.tensor.numel()).view(whole.tensor.shape)
    fitting = list[Tensor]()
    for axis in grid.names:
        for dim in range(whole.tensor.ndim):
            chunks = positions.chunk(grid.size_of((axis,)), dim)
            position = grid.position(rank, axis)
            if len(chunks) < 2 or position >= len(chunks):
                continue
            if chunks[position].shape == value.tensor.shape:
                fitting.append(chunks[position])
    return ValuePlace(name, fitting[0]) if len(fitting) == 1 else None
