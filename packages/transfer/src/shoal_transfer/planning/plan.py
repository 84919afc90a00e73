"""`plan_transfer`: the proven plan that moves the weights of a source to a target.

Each target tensor gets a table of routes; tensors of equal layouts share one. The plan is then
compared with the mapping: each element of each target box must be written once, from the right
source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

from shoal_dtensor.internal import check_types

from ..errors import MappingError
from ..manifest.records import Manifest, TensorRecord
from ..mapping.assignment import Assignment
from ..mapping.weight_mapping import WeightMapping
from .copies import TensorPlan
from .proof import prove
from .routes import Loads, RouteTable, Sides
from .transfer_plan import TransferPlan


@check_types(source=Manifest, target=Manifest, mapping=(WeightMapping, NoneType))
def plan_transfer(
    source: Manifest,
    target: Manifest,
    mapping: WeightMapping | None = None,
    *,
    max_bytes: int = 64 * 2**20,
) -> TransferPlan:
    """Plan, and prove, a transfer of weights between two layouts.

    The plan depends on the arguments alone, so ranks that share no process group compute equal
    plans from equal manifests. Each element of each target box is written once. An element comes
    from a rank of the receiver's host if one holds it, otherwise from the holder that has least to
    send. If several ranks of a host need an element that no source rank of the host holds, one of
    them receives it and forwards it to the others.

    Args:
        source: the weights as the trainer holds them.
        target: the weights as the server holds them. If it has the world of the source, equal ranks
            are one process, which copies its elements locally.
        mapping: the elements of the targets as elements of the sources; by default the tensors of
            the same names.
        max_bytes: most bytes that one rank sends and receives in one message round.

    Returns:
        A plan that is proven to carry out the mapping. The proof cannot find an error in the
        mapping itself: `plan.is_verified` tells whether the mapping has a witness.

    Raises:
        StyleTypeError: an argument of a wrong type.
        MappingError: the mapping does not fit the manifests, or does not define each target
            element once; the message names the tensor and the region.
        ProofError: the plan does not carry out the mapping, which is a defect of this package.

    Example:
        >>> from shoal_transfer import describe
        >>> source = describe({"q": torch.zeros(4, 2), "k": torch.zeros(2, 2)}, world="trainer")
        >>> target = describe({"qk": torch.zeros(6, 2)}, world="server")
        >>> fused = WeightMapping.same_names(source.shapes).fuse({"qk": ("q", "k")})
        >>> plan = plan_transfer(source, target, fused)
        >>> [(copy.source, copy.nbytes) for copy in plan.regions()]
        [('q', 32), ('k', 16)]
    """
    if mapping is None:
        mapping = WeightMapping.same_names(target.shapes)
    _check_shapes(source, target, mapping)
    mapping.check()
    by_target = _by_record(source, target, mapping)
    sides = Sides(source, target)
    loads = Loads()
    tables = dict[Any, RouteTable]()
    instances = dict[Any, int]()
    tensors = []
    for record in target.tensors.values():
        parts = by_target[record.name]
        sources = _source_records(source, record, parts)
        key = _layout_key(record, sources, parts)
        if key not in tables:
            table = RouteTable(record, sources, parts, sides, loads=loads, most_bytes=max_bytes)
            prove(table)
            tables[key] = table
        number = instances.get(key, 0)
        instances[key] = number + 1
        names = tuple(one.name for one in sources.values())
        source_parts = tuple(one.parts for one in sources.values())
        tensor = TensorPlan(
            record.name, names, record.parts, source_parts, table=tables[key], instance=number
        )
        tensors.append(tensor)
    return TransferPlan(source, target, mapping, tuple(tensors), max_bytes=max_bytes)


def _check_shapes(source: Manifest, target: Manifest, mapping: WeightMapping) -> None:
    """Check that the mapping is about the tensors of the manifests."""
    for name, record in target.tensors.items():
        names = [one for one in (name, *record.aliases) if one in mapping.targets]
        if not names:
            raise MappingError(
                f"the mapping does not have the target {name!r} {record.shape}; add it with a "
                "source, a fill value, or keep"
            )
        for one in names:
            if mapping.targets[one] != record.shape:
                raise MappingError(
                    f"{one!r} is {record.shape} in the target, but {mapping.targets[one]} in the "
                    "mapping"
                )
    for name in mapping.targets:
        if name not in target.names:
            raise MappingError(
                f"the target does not have a tensor {name!r}; drop it from the mapping"
            )
    used = dict.fromkeys(part.source for part in mapping.assignments if part.source is not None)
    for name in used:
        has = source.record(name).shape if name in source.names else "no such tensor"
        if mapping.sources.get(name) != has:
            raise MappingError(
                f"{name!r} is {mapping.sources.get(name)} in the mapping, but the source has {has}"
            )


def _by_record(
    source: Manifest, target: Manifest, mapping: WeightMapping
) -> dict[str, tuple[Assignment, ...]]:
    """Return the assignments of each target tensor; aliases on both sides get the tensor's name."""
    found = dict[str, tuple[Assignment, ...]]()
    functions = dict[str, str | None]()
    for name in mapping.targets:
        record_name = target.names[name]
        parts = []
        for part in mapping.by_target.get(name, ()):
            read = None if part.source is None else source.names[part.source]
            parts.append(replace(part, target=record_name, source=read))
        known = found.setdefault(record_name, tuple(parts))
        function = mapping.computed.get(name)
        is_same = functions.setdefault(record_name, function) == function
        if known != tuple(parts) or not is_same:
            aliases = ", ".join(map(repr, target.tensors[record_name].aliases))
            raise MappingError(
                f"{record_name!r} and {aliases} are one tensor in the target, with different "
                f"sources: {known[:1]} and {tuple(parts[:1])}"
            )
    return found


def _source_records(
    source: Manifest, record: TensorRecord, parts: tuple[Assignment, ...]
) -> dict[str, TensorRecord]:
    """Return the source tensors that assignments read, by the names that they use."""
    records = dict[str, TensorRecord]()
    for part in parts:
        if part.source is None:
            continue
        found = source.record(part.source)
        if found.dtype != record.dtype and not part.casts:
            raise MappingError(
                f"{part}: the source is {found.dtype}, but the target is {record.dtype}; use "
                "mapping.with_casts(), which casts elements before they are sent"
            )
        records[part.source] = found
    return records


def _layout_key(
    record: TensorRecord, sources: Mapping[str, TensorRecord], parts: tuple[Assignment, ...]
) -> tuple[Any, ...]:
    """Return a key that is equal for target tensors whose routes differ in names only."""
    numbers = {name: number for number, name in enumerate(sources)}
    nameless = []
    for part in parts:
        number = -1 if part.source is None else numbers[part.source]
        nameless.append((number, part.region, part.source_region, part.dims, part.fill))
    layouts = tuple((id(one.holdings), one.shape) for one in sources.values())
    return id(record.holdings), record.shape, record.dtype, layouts, tuple(nameless)
