"""Entries of a model: its parameters and persistent buffers under the names of the plain model.

The plain model is the model before styles were applied, whose names checkpoint files have. A style
may have split a fused parameter of the plain model into blocks, each a parameter of its own. The
entry of a block has the name of the fused parameter, and the row at which the block begins there:

    tensor           shape   source       source_shape   first_row
    attn.query       (8, 4)  attn.qkv     (24, 4)        0
    attn.key         (8, 4)  attn.qkv     (24, 4)        8
    attn.value       (8, 4)  attn.qkv     (24, 4)        16
    norm.weight      (4,)    norm.weight  (4,)           0
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
        transposed: whether the rows of the tensor are columns of `source`, as for blocks of GPT-2's
            `Conv1D`, whose weight of shape (inputs, outputs) is split along the outputs.
        part: path of the tensor in the model as it is; differs from `source` for a block.
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
    """Yield every parameter and persistent buffer of a module, with its place in the plain module.

    The module is parallel or plain.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        blocks: dict[str, _Block] = {}
        for fused in find_split_parameters(owner):
            for name, rows in block_rows(fused):
                blocks[name] = _Block(*rows, fused.transposed)
        tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is None or name in owner._non_persistent_buffers_set:
                    continue
                path = dot + name
                if name in blocks:
                    yield _entry_of_block(table, name, blocks[name], dot=dot)
                else:
                    yield _entry_of_whole(table, name, tensor, path)


class _Block(NamedTuple):
    """The place of a block in a fused parameter.

    Attributes:
        source: name of the fused parameter in its module.
        first_row: its row at which the block begins.
        rows: number of rows of the fused parameter.
        transposed: whether these rows are columns of the plain model's tensor.
    """

    source: str
    first_row: int
    rows: int
    transposed: bool


def _entry_of_block(table: dict[str, Any], name: str, block: _Block, *, dot: str) -> Entry:
    """Return the entry of a block; `dot` is the path of its module with a dot, or ""."""
    tensor = table[name]
    shape = (block.rows, *tensor.shape[1:])
    # A bias has no columns.
    transposed = block.transposed and len(shape) == 2
    return Entry(
        table,
        name,
        tensor,
        dot + block.source,
        first_row=block.first_row,
        source_shape=shape[::-1] if transposed else shape,
        transposed=transposed,
        part=dot + name,
    )


def _entry_of_whole(table: dict[str, Any], name: str, tensor: Tensor, path: str) -> Entry:
    """Return the entry of a tensor that the plain model has, too, at the same path."""
    return Entry(
        table,
        name,
        tensor,
        path,
        first_row=0,
        source_shape=tuple(tensor.size()),
        transposed=False,
        part=path,
    )


def find_split_parameters(owner: nn.Module) -> Iterator[Any]:
    """Yield the fused parameters of a module that its styles have split into blocks.

    Each is a `FusedBlocks` of shoal_tp_styles.
    """
    for sharding, mesh in shardings_of(owner):
        if sharding.fused is not None and sharding.fused.splits(mesh.size()):
            yield sharding.fused


def entries_of_state(state: Mapping[str, Tensor]) -> Iterator[Entry]:
    """Yield every tensor of a state dict as an entry."""
    for name, tensor in state.items():
        # A copy of the dict, so that a tensor that is stored in it is not stored in `state`.
        yield _entry_of_whole(dict(state), name, tensor, name)
