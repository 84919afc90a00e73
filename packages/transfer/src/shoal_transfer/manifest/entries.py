"""Entries of a model: its parameters and persistent buffers under the names of the plain model.

An entry has the name of the plain model's tensor, and the place in it: a style may have split a
fused parameter into blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from shoal_tp_styles.internal import block_rows, shardings_of


class Entry(NamedTuple):
    """A parameter or buffer of a model, and its place in a tensor of the plain model.

    Attributes:
        table: the dict of a module that holds the tensor.
        name: the tensor's key in `table`.
        tensor: the parameter or buffer.
        source: name of the plain model's tensor. A block of a split fused parameter is a part of
            it; other tensors are the whole of it.
        first_row: the row of `source` at which the tensor begins.
        source_shape: shape of `source`.
        transposed: whether the rows of the tensor are columns of `source`.
        part: path of the tensor in the model as it is.
    """

    table: dict[str, Any]
    name: str
    tensor: Tensor
    source: str
    first_row: int
    source_shape: tuple[int, ...]
    transposed: bool
    part: str


def entries_of(module: nn.Module) -> Iterator[Entry]:
    """Yield every parameter and persistent buffer of a module, with its entry in the files.

    The module is parallel or plain; the files are the files of the plain module.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        blocks = {
            name: (*rows, fused.transposed)
            for fused in split_parameters(owner)
            for name, rows in block_rows(fused)
        }
        tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or name in owner._non_persistent_buffers_set:
                    continue
                source, first, rows, transposed = blocks.get(name, (name, 0, 0, False))
                shape = (rows, *tensor.shape[1:]) if rows else tuple(tensor.shape)
                transposed = transposed and len(shape) == 2
                in_source = shape[::-1] if transposed else shape
                yield Entry(
                    table,
                    name,
                    tensor,
                    dot + source,
                    first_row=first,
                    source_shape=in_source,
                    transposed=transposed,
                    part=dot + name,
                )


def split_parameters(owner: nn.Module) -> Iterator[Any]:
    """Yield the fused parameters of a module that its styles have split into blocks."""
    for sharding, mesh in shardings_of(owner):
        if sharding.fused is not None and sharding.fused.splits(mesh.size()):
            yield sharding.fused


def entries_of_state(state: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Yield every tensor of a state dict as an entry."""
    for name, tensor in state.items():
        shape = tuple(tensor.size())
        yield Entry(
            dict(state),
            name,
            tensor,
            name,
            first_row=0,
            source_shape=shape,
            transposed=False,
            part=name,
        )
