"""Inputs of a data-parallel module, as this rank's rows of the batch of one device.

The first plain tensor among the inputs determines the numbers of rows. Tensors with the same
numbers of rows on all ranks are rows of the batch too; other tensors count as equal on all ranks.
For example, 2 ranks have `x` of shapes (3, 8) and (2, 8), `labels` of shapes (3,) and (2,), and a
mask of shape (5, 5): `x` is a shard of (5, 8), `labels` is a shard of (5,), and the mask is equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_mesh import DeviceMesh, all_gather

from ..layout.placements import Shard
from .activation_axes import ActivationAxes
from .layouts import UNSEEN, UNSHARDED, LocalLayout, known_layout, note_layout

# the number of rows of DTensors and of tensors without dims, which are not rows of the batch
_NO_ROWS = -1


def note_batch_rows(axes: ActivationAxes, tensors: Sequence[Tensor], batch: DeviceMesh) -> None:
    """Note the layouts of inputs that are rows of a batch.

    Args:
        axes: the axes on which layouts are described.
        tensors: the tensors among the inputs.
        batch: the axes of data parallelism, along which inputs are shards of a batch.
    """
    counts = [_count_rows(tensor) for tensor in tensors]
    if max(counts, default=_NO_ROWS) == _NO_ROWS:
        return
    counts_by_rank = _gather_counts(counts, batch)
    # for each tensor, its number of rows on each rank
    counts_by_tensor = [list(column) for column in zip(*counts_by_rank, strict=True)]
    first_index = next(index for index, count in enumerate(counts) if count != _NO_ROWS)
    sizes = counts_by_tensor[first_index]
    is_even = len({*sizes}) == 1
    shard = Shard(0, sizes=None if is_even else sizes)
    batch_axes = [mesh for mesh in axes.index if {*mesh.axis_names} <= {*batch.axis_names}]
    is_unknown = not is_even and any(mesh.size() != batch.size() for mesh in batch_axes)
    for tensor, rows_on_ranks in zip(tensors, counts_by_tensor, strict=True):
        if rows_on_ranks != sizes:
            continue
        layout = known_layout(tensor)
        if layout is not UNSEEN and (layout.spec is None or layout.spec.mesh != axes.mesh):
            # The noted layout belongs to another watch.
            note_layout(tensor, UNSHARDED)
        if is_unknown:
            reason = "two axes shard the batch, in shards of different sizes"
            note_layout(tensor, LocalLayout(unknown_reason=reason))
            continue
        for mesh in batch_axes:
            note_layout(tensor, axes.layout_with_shard(tensor, axes.index[mesh], shard, tensor))


def _count_rows(tensor: Tensor) -> int:
    has_rows = tensor.ndim > 0 and type(tensor) is Tensor
    return len(tensor) if has_rows else _NO_ROWS


def _gather_counts(counts: list[int], batch: DeviceMesh) -> list[list[int]]:
    """Return the numbers of rows of tensors on all ranks, gathered in one small collective.

    A batch may be sharded unevenly, so this rank's numbers do not determine the others.
    """
    local = torch.tensor([counts], device=batch.device_type)
    comm = batch.comm(tuple(range(batch.ndim)))
    if "fake" in comm.backend:
        return [counts] * comm.size
    gathered: list[list[int]] = all_gather(local, comm).tolist()
    return gathered
