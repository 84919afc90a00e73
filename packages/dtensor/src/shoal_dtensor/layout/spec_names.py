"""What a `Spec` is called: by torch's names, in one line of text, and as a table of ranks and their elements."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoal_mesh import DeviceMesh

from ..errors import PlacementError
from .boxes import Box, volume
from .placements import Partial, Placement, Replicate, Shard

if TYPE_CHECKING:
    from .strided_dim import AnyDimSharding


class SpecNames:
    """What downstream code reads of torch's `DTensorSpec`, derived from a `Spec`; and its text.

    Attributes:
        dim_map: for each tensor dim the mesh axis that shards it first, -1 where none does.
        num_shards_map: for each tensor dim into how many parts it is divided.
        num_shards: number of different parts of the tensor.
        sums: mesh axes over which the values are still to be reduced.
    """

    __slots__ = ()

    mesh: DeviceMesh
    shape: torch.Size
    dtype: torch.dtype
    dim_shardings: tuple[AnyDimSharding, ...]
    partials: tuple[tuple[int, str], ...]
    replicated: bool

    @property
    def dim_map(self) -> list[int]:
        return [sharding.axes[0] if sharding.axes else -1 for sharding in self.dim_shardings]

    @property
    def num_shards_map(self) -> list[int]:
        return [prod(self.mesh.shape[axis] for axis in sharding.axes) for sharding in self.dim_shardings]

    @property
    def num_shards(self) -> int:
        return prod(self.num_shards_map)

    @property
    def sums(self) -> list[int]:
        return [axis for axis, _ in self.partials]

    def is_replicated(self) -> bool:
        """Whether every rank of the mesh holds all of the tensor."""
        return self.replicated

    def is_sharded(self) -> bool:
        """Whether some mesh axis shards the tensor."""
        return any(sharding.axes for sharding in self.dim_shardings)

    def shallow_copy_with_tensor_meta(self, tensor_meta: Any) -> Any:
        """The same layout of a tensor of another shape, stride and dtype."""
        shape, stride, dtype = tensor_meta
        return self.with_(shape=shape, stride=stride, dtype=dtype)  # type: ignore[attr-defined]  # a Spec has it

    @classmethod
    def from_dim_map(cls, mesh: DeviceMesh, dim_map: Sequence[int], sums: Sequence[int], tensor_meta: Any) -> Any:
        """The spec whose tensor dims are sharded by these mesh axes (-1: by none), partial sums over `sums`."""
        placements: list[Placement] = [Partial() if axis in sums else Replicate() for axis in range(mesh.ndim)]
        for dim, axis in enumerate(dim_map):
            if axis >= 0 and axis not in sums:
                placements[axis] = Shard(dim)
        shape, stride, dtype = tensor_meta
        return cls(mesh, placements, shape, stride, dtype)  # type: ignore[call-arg]  # the arguments of Spec

    def __repr__(self) -> str:
        """One line: dtype, sizes with the mesh axes that shard them, and what is still to be reduced.

        Example:
            >>> from shoal_mesh import abstract_mesh
            >>> from shoal_dtensor import Spec
            >>> Spec(abstract_mesh((2, 2), ("dp", "tp")), (Shard(0), Partial()), (5, 4), dtype=torch.bfloat16)
            Spec(bf16[5@(dp)=[3, 2], 4], partial sum over tp on (dp=2, tp=2))
        """
        names = self.mesh.axis_names
        dims = [
            f"{n}@({','.join(names[a] for a in sharding.axes)}){_sizes(sharding)}" if sharding.axes else str(n)
            for n, sharding in zip(self.shape, self.dim_shardings, strict=True)
        ]
        partial = "".join(f", partial {op} over {names[axis]}" for axis, op in self.partials)
        mesh = ", ".join(f"{name}={size}" for name, size in zip(names, self.mesh.shape, strict=True))
        # bfloat16 -> bf16, float32 -> f32, uint8 -> u8, bool -> bool
        dtype = re.sub(r"^(bf|f|u|i|c)[a-z]+", r"\1", str(self.dtype).removeprefix("torch."))
        return f"Spec({dtype}[{', '.join(dims)}]{partial} on ({mesh}))"


def _sizes(sharding: Any) -> str:
    """How a sharding differs from an even one."""
    if hasattr(sharding, "levels"):  # a StridedDimSharding
        return f" strided of {list(sharding.shape)}"
    if sharding.even:
        return ""
    if sharding.ragged is None and sharding.shards > 16:  # all is said by the first, and there may be thousands
        return f"=[{sharding.step}, ...]"
    return f"={list(sharding.sizes)}"


# --- which ranks hold which elements ----------------------------------------------------------------------------------

COLORS = ("#8dd3c7", "#fdb462", "#bebada", "#fb8072", "#b3de69", "#80b1d3", "#fccde5", "#d9d9d9")
_LARGEST = 1024  # ranks that a notebook shows as a table


class RankTable(NamedTuple):
    """A table of ranks."""

    rows: Sequence[str]  # element ranges of the first dim, as `0:4`
    columns: Sequence[str]  # of the second
    cells: Sequence[Sequence[str]]  # the ranks that hold them, as `0,1`

    def color(self, cell: str) -> str:
        """One colour for each set of ranks; none for a cell that no rank holds."""
        sets = list(dict.fromkeys(text for line in self.cells for text in line if text))
        return COLORS[sets.index(cell) % len(COLORS)] if cell else "none"

    def text(self) -> str:
        """Rows and columns of element ranges, ranks in the cells."""
        lines = [["", *self.columns], *([name, *cells] for name, cells in zip(self.rows, self.cells, strict=True))]
        widths = [max(6, *(len(cell) + 1 for cell in column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def holders(spec: Any) -> dict[Box, list[int]]:
    """The ranks that hold each box of the tensor, boxes in order; empty ones are left out."""
    ranks: dict[Box, list[int]] = {}
    for coordinate in product(*map(range, spec.mesh.shape)):
        for box, _ in spec.boxes(coordinate):
            if volume(box):
                ranks.setdefault(box, []).append(spec.mesh.rank_at(coordinate))
    return dict(sorted(ranks.items()))


def rank_table(spec: Any) -> RankTable:
    """The table of a tensor of one or two dims.

    Raises:
        PlacementError: if the tensor has more than two dims.
    """
    if spec.ndim > 2:
        raise PlacementError(f"visualize_sharding: expected a tensor of one or two dims, got shape {tuple(spec.shape)}")
    ranks_of = {((0, 1), (0, 1), *box)[-2:]: ranks for box, ranks in holders(spec).items()}
    rows, columns = (sorted({box[dim] for box in ranks_of}) for dim in (0, 1))
    cells = [[",".join(map(str, ranks_of.get((row, column), []))) for column in columns] for row in rows]
    return RankTable([f"{a}:{b}" for a, b in rows], [f"{a}:{b}" for a, b in columns], cells)


def spec_html(spec: Any) -> str:
    """What notebooks show: the spec in words, and of one or two dims a table of the ranks that hold each part."""
    from html import escape  # 2 ms, for notebooks only

    head = f"<code>{escape(repr(spec))}</code>"
    if spec.ndim > 2 or spec.mesh.size() > _LARGEST:
        return head
    table = rank_table(spec)
    lines = ["<tr><th></th>" + "".join(f"<th>{name}</th>" for name in table.columns) + "</tr>"]
    for name, cells in zip(table.rows, table.cells, strict=True):
        style = "color:#222;text-align:center;padding:0.4em 1em;background:"
        line = "".join(f'<td style="{style}{table.color(cell)}">{cell}</td>' for cell in cells)
        lines.append(f"<tr><th>{name}</th>{line}</tr>")
    sums = any(isinstance(placement, Partial) for placement in spec.placements)
    note = "ranks hold summands of these elements" if sums else "elements, and the ranks that hold them"
    return f"{head}<table><caption>{note}</caption>{''.join(lines)}</table>"
