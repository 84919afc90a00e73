"""`Manifest`: the weights of a model on all its ranks, as data.

A `Holding` is one box in the memory of one rank, a `TensorRecord` is one tensor with all its
holdings, and a `Manifest` has the records of a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

from shoal_dtensor.internal import Box, overlap, volume

from ..errors import ManifestError
from ..mapping.regions import first_gap, region_of_box

_FORMAT = "shoal-manifest"
_VERSION = 1


class Holding(NamedTuple):
    """One box of a tensor in the memory of one rank.

    Element (i, j) of the box, counted from its first element, is `offset + i * strides[0] +
    j * strides[1]` elements behind the first element of the memory.

    Attributes:
        rank: the rank in its world.
        box: (start, stop) per dim of the tensor.
        offset: elements from the beginning of the memory.
        strides: elements from one index of a dim to the next.
        part: index of the memory's name in `TensorRecord.parts`.

    Example:
        >>> Holding(rank=1, box=((4, 8), (0, 2)), offset=0, strides=(2, 1)).box
        ((4, 8), (0, 2))
    """

    rank: int
    box: Box
    offset: int
    strides: tuple[int, ...]
    part: int = 0


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One logical tensor of a model and the ranks that hold it.

    Records of equal layout share one `holdings` tuple, by which a plan finds them and plans
    them once.

    Attributes:
        name: logical name: the name of the plain model.
        shape: global shape.
        dtype: torch's name of the dtype, for example "bfloat16".
        holdings: the boxes of all ranks, none of them empty.
        parts: names of the local tensors that hold the boxes, as the model has them.
        aliases: other names of the same tensor, which is sent once.

    Example:
        >>> rows = Holding(0, ((0, 2),), 0, (1,))
        >>> TensorRecord("bias", (2,), "float32", (rows,), ("bias",)).nbytes
        8
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    holdings: tuple[Holding, ...]
    parts: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, each element once."""
        return prod(self.shape) * self.torch_dtype.itemsize

    @property
    def is_whole(self) -> bool:
        """Tell whether every element is in a box of some rank."""
        boxes = [*{holding.box for holding in self.holdings}]
        if overlap(boxes) is not None:
            return first_gap([region_of_box(box) for box in boxes], self.shape) is None
        return sum(map(volume, boxes)) == prod(self.shape)

    def require_whole(self) -> None:
        """Check that the ranks together hold every element.

        Raises:
            ManifestError: some elements are on no rank.
        """
        if self.is_whole:
            return
        ranks = sorted({holding.rank for holding in self.holdings})
        raise ManifestError(
            f"ranks {ranks} hold only a part of {self.name!r} {self.shape}; call describe on all "
            "ranks of the mesh, with the same model"
        )


@dataclass(frozen=True)
class Manifest:
    """The weights of a model on all its ranks.

    A manifest is data: JSON with a version, without tensors. A trainer and a server exchange it
    without sharing a process group.

    Args:
        tensors: the tensors by logical name, in the model's order.
        hosts: the host of each rank of the model.
        world: name of the world of these ranks. In two manifests of one world, equal ranks are the
            same process.
        rename: the replacements in names that `describe` got.
        per_rank: whether `describe` described each rank's local tensors by themselves.

    Example:
        >>> import torch
        >>> from shoal_transfer import describe
        >>> manifest = describe(torch.nn.Linear(4, 2))
        >>> manifest.tensors["weight"].holdings
        (Holding(rank=0, box=((0, 2), (0, 4)), offset=0, strides=(4, 1), part=0),)
        >>> Manifest.from_json(manifest.to_json()) == manifest
        True
    """

    tensors: Mapping[str, TensorRecord]
    hosts: Mapping[int, str]
    world: str = "world"
    rename: Mapping[str, str] = field(default_factory=dict)
    per_rank: bool = False
    names: Mapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = {}
        for name, record in self.tensors.items():
            names[name] = name
            names.update(dict.fromkeys(record.aliases, name))
        object.__setattr__(self, "names", names)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shapes by name, aliases left out."""
        return {name: record.shape for name, record in self.tensors.items()}

    def record(self, name: str) -> TensorRecord:
        """Return the record of a tensor by its name or one of its aliases.

        Args:
            name: the name.

        Raises:
            ManifestError: the model has no such tensor.
        """
        if name not in self.names:
            raise ManifestError(f"the manifest of {self.world!r} does not have a tensor {name!r}")
        return self.tensors[self.names[name]]

    def to_json(self) -> str:
        """Return the manifest as a JSON text; layouts that tensors share are written once."""
        numbers = dict[tuple[Holding, ...], int]()
        tensors = []
        for record in self.tensors.values():
            number = numbers.setdefault(record.holdings, len(numbers))
            tensor: dict[str, Any] = {"name": record.name, "shape": record.shape}
            tensor["dtype"] = record.dtype
            tensor["layout"] = number
            tensor["parts"] = record.parts
            if record.aliases:
                tensor["aliases"] = record.aliases
            tensors.append(tensor)
        value: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "world": self.world}
        value["rename"] = dict(self.rename)
        value["per_rank"] = self.per_rank
        value["hosts"] = {str(rank): host for rank, host in self.hosts.items()}
        # a holding is a list of its fields, in order
        value["layouts"] = list(numbers)
        value["tensors"] = tensors
        return json.dumps(value)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Return the manifest that `to_json` has written.

        Args:
            text: the JSON text.

        Raises:
            ManifestError: the text is not a manifest, has another version, lacks a part, or has a
                box outside of its tensor.
        """
        try:
            return cls._from_value(json.loads(text))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            if isinstance(error, ManifestError):
                raise
            raise ManifestError(f"not a manifest: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_value(cls, value: Any) -> Manifest:
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise ManifestError(f"expected JSON of format {_FORMAT!r}")
        if value["version"] != _VERSION:
            raise ManifestError(
                f"cannot read version {value['version']} of a manifest; this release reads "
                f"version {_VERSION}"
            )
        layouts = [tuple(map(_holding_from_json, layout)) for layout in value["layouts"]]
        records = [_record_from_json(one, layouts[one["layout"]]) for one in value["tensors"]]
        hosts = {int(rank): host for rank, host in value["hosts"].items()}
        tensors = {record.name: record for record in records}
        return cls(
            tensors, hosts, value["world"], rename=value["rename"], per_rank=value["per_rank"]
        )


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name: "bfloat16".

    Raises:
        ManifestError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ManifestError(f"{name!r} is not a dtype of torch")
    return dtype


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: (2, 3) gives (3, 1)."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def merge_manifests(manifests: Iterable[Manifest]) -> Manifest:
    """Merge the manifests of several ranks, or of stages of a pipeline, of one world.

    Args:
        manifests: the manifests, each with the tensors that its ranks hold; a rank is in one
            manifest only.

    Returns:
        One manifest of all ranks. Tensors of equal layout share their holdings.

    Raises:
        ManifestError: two ranks have different shapes or dtypes of a tensor, or the worlds differ.

    Example:
        >>> one = Manifest({}, {0: "a"})
        >>> merge_manifests([one, Manifest({}, {1: "b"})]).hosts
        {0: 'a', 1: 'b'}
    """
    every = list(manifests)
    hosts = dict[int, str]()
    by_name = dict[str, list[TensorRecord]]()
    for manifest in every:
        if manifest.world != every[0].world:
            raise ManifestError(
                f"manifests of different worlds cannot be merged, got {every[0].world!r} and "
                f"{manifest.world!r}"
            )
        hosts.update(manifest.hosts)
        for name, record in manifest.tensors.items():
            by_name.setdefault(name, []).append(record)
    shared = dict[tuple[Holding, ...], tuple[Holding, ...]]()
    aliases = {name for records in by_name.values() for one in records for name in one.aliases}
    tensors = {}
    for name, records in by_name.items():
        holds_nothing = not any(record.holdings for record in records)
        # a rank with empty shards of tied weights cannot see that they are tied
        if name in aliases and holds_nothing:
            continue
        tensors[name] = _merge_records(records, shared)
    if not every:
        return Manifest(tensors, hosts)
    return replace(every[0], tensors=tensors, hosts=hosts)


def _merge_records(
    records: Sequence[TensorRecord], shared: dict[tuple[Holding, ...], tuple[Holding, ...]]
) -> TensorRecord:
    first = records[0]
    parts = dict[str, int]()
    holdings = list[Holding]()
    for record in records:
        if (record.shape, record.dtype) != (first.shape, first.dtype):
            ranks = sorted({holding.rank for holding in record.holdings})
            raise ManifestError(
                f"ranks {ranks} have {record.name!r} as {record.shape} {record.dtype}, but other "
                f"ranks as {first.shape} {first.dtype}"
            )
        for holding in record.holdings:
            number = parts.setdefault(record.parts[holding.part], len(parts))
            holdings.append(holding._replace(part=number))
    layout = tuple(holdings)
    layout = shared.setdefault(layout, layout)
    aliases = tuple(dict.fromkeys(name for record in records for name in record.aliases))
    return TensorRecord(
        first.name, first.shape, first.dtype, layout, parts=tuple(parts), aliases=aliases
    )


def _holding_from_json(value: list[Any]) -> Holding:
    rank, box, offset, strides, part = value
    bounds = tuple((start, stop) for start, stop in box)
    return Holding(rank, bounds, offset, tuple(strides), part=part)


def _record_from_json(value: dict[str, Any], holdings: tuple[Holding, ...]) -> TensorRecord:
    shape = tuple(value["shape"])
    for holding in holdings:
        for size, (start, stop) in zip(shape, holding.box, strict=True):
            if not 0 <= start < stop <= size:
                raise ManifestError(
                    f"{value['name']!r} {shape}: rank {holding.rank} has a box outside of it, "
                    f"{holding.box}"
                )
    parts = tuple(value["parts"])
    aliases = tuple(value.get("aliases", ()))
    return TensorRecord(
        value["name"], shape, value["dtype"], holdings, parts=parts, aliases=aliases
    )
