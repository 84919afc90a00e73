"""`load_sharded`: a parallel model filled from files or a state dict, each rank reading only its own parts.

Build the model on the meta device, parallelize it (parameters become DTensors without storage), then load:
no rank ever holds a whole parameter that is cut.  Without communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor

from .apply import shardings_of
from .blocks import block_rows, is_turned, lay_side_by_side
from .errors import PlanError

__all__ = ["Loaded", "load_sharded"]

Source = Mapping[str, Tensor] | str | PathLike[str] | Iterable[str | PathLike[str]]
Box = tuple[slice, ...]


@dataclass(slots=True)
class Loaded:
    """What was read.

    Attributes:
        missing: parameters and persistent buffers that the source does not have.
        unexpected: entries of the source that the model does not have.
        bytes_read: bytes that this rank took from the source.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    bytes_read: int = 0


class _Reader(Protocol):
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, box: Box) -> Tensor: ...


class _Dict:
    """Tensors in memory (or mapped from a file)."""

    def __init__(self, source: Mapping[str, Tensor]) -> None:
        self.source = source

    def names(self) -> set[str]:
        return set(self.source)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.source[name].shape)

    def read(self, name: str, box: Box) -> Tensor:
        return self.source[name].detach()[box]


class _Files:
    """safetensors files, read by slices."""

    def __init__(self, paths: Iterable[str | PathLike[str]], stack: ExitStack) -> None:
        from safetensors import safe_open  # an extra: only who loads files needs it

        self.files: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(fspath(path), framework="pt"))
            self.files.update(dict.fromkeys(file.keys(), file))

    def names(self) -> set[str]:
        return set(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def read(self, name: str, box: Box) -> Tensor:
        part: Tensor = self.files[name].get_slice(name)[box] if box else self.files[name].get_tensor(name)
        return part


def load_sharded(module: nn.Module, source: Source, *, strict: bool = True) -> Loaded:
    """Fill a parallel model in place; parameters on the meta device get storage on their mesh's device.

    Args:
        module: after `parallelize_module`; fused parameters that a style split are read from their fused entries,
            shared ones from whichever of their names the source has.
        source: a state dict of whole tensors, or one or several safetensors files.
        strict: raise if the model or the source has entries that the other has not.

    Raises:
        PlanError: if a shape differs (before anything is written), or entries differ under `strict`.
    """
    with ExitStack() as stack:
        reader = _reader(source, stack)
        wants = list(_wanted(module))
        loaded = _compared(wants, reader, strict=strict)
        present = [want for want in wants if want.source in reader.names()]
        done: dict[int, Tensor] = {}
        for want in present:
            _fill(want, reader, loaded, done)
        for want in wants:  # the other names of shared parameters
            if id(want.tensor) in done:
                want.table[want.name] = done[id(want.tensor)]
    for owner in module.modules():
        for sharding, _ in shardings_of(owner):
            if "blocks" in sharding.options:
                lay_side_by_side(owner, sharding)
    return loaded


def _compared(wants: list[_Wanted], reader: _Reader, *, strict: bool) -> Loaded:
    """What the model and the source do not have in common; raises before anything is written."""
    found = {want.source for want in wants} & reader.names()
    loaded = Loaded(sorted(_missing(wants, found)), sorted(reader.names() - found))
    if strict and (loaded.missing or loaded.unexpected):
        raise PlanError(f"load_sharded: missing {loaded.missing}, unexpected {loaded.unexpected}")
    for want in wants:
        if want.source in found and want.whole_shape != reader.shape(want.source):
            raise PlanError(
                f"load_sharded: {want.source!r} is {reader.shape(want.source)} in the source, the model needs "
                f"{want.whole_shape}"
            )
    return loaded


def _reader(source: Source, stack: ExitStack) -> _Reader:
    if isinstance(source, Mapping):
        return _Dict(source)
    return _Files([source] if isinstance(source, str | PathLike) else source, stack)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A parameter or buffer: where it hangs, and which rows of which entry it is."""

    table: dict[str, Any]
    name: str
    tensor: Tensor
    source: str
    first_row: int
    whole_shape: tuple[int, ...]
    turn: bool


def _wanted(module: nn.Module) -> Iterator[_Wanted]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        fused = dict(_fused(owner))
        tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or name in owner._non_persistent_buffers_set:
                    continue
                source, first, rows, turn = fused.get(name, (name, 0, 0, False))
                shape = (rows, *tensor.shape[1:]) if rows else tuple(tensor.shape)
                turn = turn and len(shape) == 2
                yield _Wanted(table, name, tensor, dot + source, first, shape[::-1] if turn else shape, turn)


def _fused(owner: nn.Module) -> Iterator[tuple[str, tuple[str, int, int, bool]]]:
    """Parameter of a block -> (fused name, first row, rows of the fused whole, whether the whole is turned)."""
    for sharding, _ in shardings_of(owner):
        if "blocks" in sharding.options:
            for name, where in block_rows(sharding):
                yield name, (*where, is_turned(sharding))


def _missing(wants: list[_Wanted], found: set[str]) -> set[str]:
    reached = {id(want.tensor) for want in wants if want.source in found}
    return {want.source for want in wants if id(want.tensor) not in reached}


def _fill(want: _Wanted, reader: _Reader, loaded: Loaded, done: dict[int, Tensor]) -> None:
    if id(want.tensor) in done:
        return
    tensor = want.tensor
    box = _box(tensor, want.first_row)
    part = reader.read(want.source, box[::-1]).t() if want.turn else reader.read(want.source, box)
    loaded.bytes_read += part.numel() * part.element_size()
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        if not local.is_meta:
            local.copy_(part)
            return
        device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
        fresh = part.to(device=device, dtype=tensor.dtype, copy=True).contiguous()
        made: Tensor = DTensor(fresh, tensor._spec) if isinstance(tensor, DTensor) else fresh
    filled = nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    done[id(tensor)] = want.table[want.name] = filled


def _box(tensor: Tensor, first_row: int) -> Box:
    """This rank's part, as slices of the source's entry."""
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        assert spec.coordinate is not None, "only ranks of the mesh load"
        bounds = list(spec.box(spec.coordinate))
    else:
        bounds = [(0, size) for size in tensor.shape]
    if first_row and bounds:
        bounds[0] = (bounds[0][0] + first_row, bounds[0][1] + first_row)
    return tuple(slice(start, stop) for start, stop in bounds)
