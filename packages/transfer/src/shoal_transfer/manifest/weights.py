"""The weights of a model on this rank: each tensor once, under its logical name.

A `Weight` is a tensor, or one block of a fused parameter that a style has split. `weights_of` lists
tied weights once, with their other names as aliases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor.internal import Box, local_of

from ..errors import ManifestError
from .entries import Entry, entries_of, entries_of_state
from .local_boxes import local_boxes

Model = nn.Module | Mapping[str, Tensor]


class NamedBox(NamedTuple):
    """A box of a logical tensor that this rank holds.

    Attributes:
        box: (start, stop) per dim of the logical tensor.
        view: the elements of the box, with the dims of the logical tensor.
        part: name of the local tensor.
        memory: the local tensor that `view` is a view of.
    """

    box: Box
    view: Tensor
    part: str
    memory: Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a model, or one block of a fused parameter that a style has split."""

    name: str
    aliases: tuple[str, ...]
    entry: Entry

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logical tensor."""
        return self.entry.source_shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the elements."""
        return self.entry.tensor.dtype

    def boxes(self) -> Iterator[NamedBox]:
        """Yield the boxes that this rank holds; empty ones too."""
        entry = self.entry
        for held in local_boxes(entry.source, entry.tensor):
            first = entry.first_row
            rows = [(start + first, stop + first) for start, stop in held.box[:1]]
            box = (*rows, *held.box[1:])
            view = held.view
            if entry.transposed:
                box = box[::-1]
                view = view.t()
            part = f"{entry.part}#{held.number}" if held.number else entry.part
            yield NamedBox(box, view, part, held.memory)


def own_rank() -> int:
    """Return this process's rank in the world; 0 for a single process."""
    return dist.get_rank() if dist.is_initialized() else 0


def weights_of(
    model: Model, *, rename: Mapping[str, str] | None = None, per_rank: bool = False
) -> list[Weight]:
    """Return the weights of a model; tied weights have one name and aliases."""
    _refuse_extra_state(model)
    entries = entries_of(model) if isinstance(model, nn.Module) else entries_of_state(model)
    if per_rank:
        entries = map(_as_local, entries)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    groups = dict[tuple[Any, ...], list[Entry]]()
    for entry in entries:
        groups.setdefault((*_identity(model, entry), entry.first_row), []).append(entry)
    weights = []
    for group in groups.values():
        # files have tied weights under the name that is not among the model's tied keys
        ordered = sorted(group, key=lambda entry: entry.source in tied)
        names = list(dict.fromkeys(_rename(entry.source, rename) for entry in ordered))
        weights.append(Weight(names[0], tuple(names[1:]), ordered[0]))
    return weights


def memories_of(weights: Sequence[Weight]) -> dict[str, Tensor]:
    """Return the local tensors of a model by the names that manifests have for them."""
    return {held.part: held.memory for weight in weights for held in weight.boxes()}


def _identity(model: Model, entry: Entry) -> tuple[Any, ...]:
    """Return a key that is equal for tied weights."""
    if isinstance(model, nn.Module):
        return (id(entry.tensor),)
    # A state dict has one tensor object per name; tied ones have the same memory.
    if hasattr(entry.tensor, "local_shards"):
        return (id(entry.tensor),)
    local = local_of(entry.tensor)
    if local.is_meta or not local.numel():
        return (id(entry.tensor),)
    return (local.data_ptr(), local.dtype, tuple(local.shape), local.stride())


def _as_local(entry: Entry) -> Entry:
    """Return the entry of this rank's local tensor, as a tensor of its own."""
    local = local_of(entry.tensor)
    return entry._replace(
        tensor=local,
        source=f"{entry.part}@{own_rank()}",
        first_row=0,
        source_shape=tuple(local.shape),
        transposed=False,
    )


def _rename(name: str, rename: Mapping[str, str] | None) -> str:
    for pattern, replacement in (rename or {}).items():
        name = re.sub(pattern, replacement, name)
    return name


def _refuse_extra_state(model: Model) -> None:
    if not isinstance(model, nn.Module):
        return
    plain = nn.Module.get_extra_state
    stateful = [
        name for name, module in model.named_modules() if type(module).get_extra_state is not plain
    ]
    if stateful:
        raise ManifestError(
            f"{stateful} have extra state that is not a tensor; save it separately, with "
            "get_extra_state()"
        )
