"""`load_sharded`: fill a parallel model from files or a state dict.

Each rank reads only its own shards.

Build the model on the meta device, parallelize it (parameters become DTensors without storage),
then load: no rank ever holds a sharded parameter in full. Loading needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.errors import PlanError
from shoal_dtensor.internal import check_types, local_of, slices_of
from shoal_tp_styles.internal import make_adjacent, progress
from shoal_transfer.internal import Entry, entries_of, find_split_parameters, local_boxes

Slices = tuple[slice, ...]


@dataclass(slots=True)
class Loaded:
    """The result of loading.

    Attributes:
        missing: parameters and persistent buffers that the source does not have.
        unexpected: entries of the source that the model does not have.
        bytes_read: bytes that this rank took from the source.

    Example:
        >>> load_sharded(nn.Linear(4, 8), {"weight": torch.zeros(8, 4)}, strict=False)
        Loaded(missing=['bias'], unexpected=[], bytes_read=128)
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0


class Stored(Protocol):
    """A tensor of a source, from which a rank reads its own slices."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, slices: Slices, /) -> Tensor: ...


Source = Mapping[str, Stored] | str | PathLike[str] | Iterable[str | PathLike[str]]


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is read, or made, when it is indexed.

    Attributes:
        shape: shape of the tensor.
        read: returns the given slices of the tensor.
    """

    shape: tuple[int, ...]
    read: Callable[[Slices], Tensor]

    def __getitem__(self, slices: Slices) -> Tensor:
        return self.read(slices)


@check_types(module=nn.Module)
def load_sharded(module: nn.Module, source: Source, *, strict: bool = True) -> Loaded:
    """Fill a parallel model in place.

    Parameters on the meta device get storage on their mesh's device.

    Args:
        module: a model, parallel or plain.
        source: a state dict of unsharded tensors, or one or several safetensors files. It has the
            names and shapes of the plain model. A style may have split a fused parameter, such as
            `qkv.weight`, into several; these are read from the one entry `qkv.weight`. A shared
            parameter is read from any of its names that the source has.
        strict: raise if the model or the source has entries that the other lacks.

    Returns:
        The missing and the unexpected entries, and the number of bytes that this rank read.

    Raises:
        PlanError: if a shape differs, or if entries differ under `strict`. It is raised before
            anything is written.

    Example:
        >>> from shoal_mesh import init_device_mesh
        >>> from shoal_mesh.testing import fake_world
        >>> from shoal_tp_styles import parallelize_module
        >>> files = {"weight": torch.zeros(8, 4), "bias": torch.zeros(8)}
        >>> with fake_world(4):
        ...     mesh = init_device_mesh("cpu", (4,))
        ...     linear = parallelize_module(nn.Linear(4, 8, device="meta"), mesh, "colwise")
        ...     load_sharded(linear, files).bytes_read
        40
    """
    with ExitStack() as stack:
        stored = stored_in(source, stack)
        entries = list(entries_of(module))
        loaded = compare_entries(entries, stored, strict=strict)
        # `entry.source` is the name that the source has for the tensor.
        present = [entry for entry in entries if entry.source in stored]
        filled: dict[int, Tensor] = {}
        for entry in progress(present, "loading parameters"):
            _fill(entry, stored[entry.source], loaded, filled)
        # Give the filled tensors to the other names of shared parameters. `table` is a module's
        # dict of parameters or buffers.
        for entry in entries:
            if id(entry.tensor) in filled:
                entry.table[entry.name] = filled[id(entry.tensor)]
    # A style keeps the parts of a split parameter next to each other in memory, so that one matrix
    # product reads them all. Loading has replaced the parts that were on the meta device.
    for owner in module.modules():
        for fused in find_split_parameters(owner):
            make_adjacent(owner, fused)
    return loaded


def compare_entries(entries: list[Entry], stored: Mapping[str, Stored], *, strict: bool) -> Loaded:
    """Return the entries that only the model or only the source has.

    Raise PlanError if shapes differ, or if `strict` is true and entries differ.
    """
    common = {entry.source for entry in entries} & stored.keys()
    # A shared parameter has several entries. One of them in the source is enough.
    found_tensors = {id(entry.tensor) for entry in entries if entry.source in common}
    missing = {entry.source for entry in entries if id(entry.tensor) not in found_tensors}
    loaded = Loaded(sorted(missing), sorted(stored.keys() - common))
    if strict and (loaded.missing or loaded.unexpected):
        raise PlanError(f"load_sharded: missing {loaded.missing}, unexpected {loaded.unexpected}")
    for entry in entries:
        if entry.source not in common:
            continue
        shape = tuple(stored[entry.source].shape)
        if entry.source_shape != shape:
            raise PlanError(
                f"load_sharded: {entry.source!r} has the shape {shape} in the source, but the "
                f"model needs {entry.source_shape}"
            )
    return loaded


def stored_in(source: Source, stack: ExitStack) -> Mapping[str, Stored]:
    """Return the tensors of a source by name.

    Files stay open until the stack is closed, because their tensors are read later.
    """
    if isinstance(source, Mapping):
        return source
    # an optional dependency, needed for files only
    from safetensors import safe_open

    tensors: dict[str, Stored] = {}
    for path in [source] if isinstance(source, str | PathLike) else source:
        file = stack.enter_context(safe_open(fspath(path), framework="pt"))
        names: list[str] = file.keys()
        for name in names:
            shape = file.get_slice(name).get_shape()
            tensors[name] = Lazy(tuple(shape), partial(_read, file, name))
    return tensors


def _read(file: Any, name: str, slices: Slices) -> Tensor:
    """Read slices of a tensor in a safetensors file; a 0-d tensor does not have slices."""
    if not slices:
        scalar: Tensor = file.get_tensor(name)
        return scalar
    part: Tensor = file.get_slice(name)[slices]
    return part


def _fill(entry: Entry, stored: Stored, loaded: Loaded, filled: dict[int, Tensor]) -> None:
    """Read this rank's shard of an entry.

    A tensor on the meta device is replaced in its module, and added to `filled`. If it is shared,
    it is read once. A shared tensor with storage is read for each of its names.

    Args:
        entry: the entry of the model.
        stored: the tensor of the source.
        loaded: the report, which counts the bytes that are read.
        filled: id of a tensor on the meta device -> the tensor that replaces it.
    """
    tensor = entry.tensor
    if id(tensor) in filled:
        return
    local = local_of(tensor)
    with torch.no_grad():
        target = _with_storage(tensor) if local.is_meta else local
        for slices, place in boxes_of(tensor, entry.first_row):
            if entry.transposed:
                # a matrix: columns of the source are rows of the model
                values = stored[slices[::-1]].t()
            else:
                values = stored[slices]
            loaded.bytes_read += values.numel() * values.element_size()
            target[place].copy_(values)
        if not local.is_meta:
            return
        value = target
        if isinstance(tensor, DTensor):
            # `target` is the shard that this rank has in the layout of `tensor`.
            value = DTensor(target, tensor.spec)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    filled[id(tensor)] = value
    entry.table[entry.name] = value


def _with_storage(tensor: Tensor) -> Tensor:
    """Return an empty local tensor for a tensor on the meta device.

    It is on the device of the mesh. A plain tensor does not have a mesh; it gets memory on the CPU.
    """
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    return torch.empty(local_of(tensor).shape, dtype=tensor.dtype, device=device)


def boxes_of(tensor: Tensor, first_row: int) -> Iterator[tuple[Slices, Slices]]:
    """Yield this rank's boxes, as slices of the source's entry and of the local tensor.

    Args:
        tensor: a tensor of the model.
        first_row: the row of the source's entry at which the tensor begins. It is not 0 for
            parts of a fused parameter.
    """
    # The name is for an error about pending sums, which parameters and buffers are not.
    for held in local_boxes("", tensor):
        box = held.box
        # The box of a 0-d tensor is empty.
        if box:
            start, stop = box[0]
            box = ((start + first_row, stop + first_row), *box[1:])
        yield slices_of(box), slices_of(held.place)
