"""Covers: tiles.py: the tiles that a mask leaves to compute."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dense_attention import Window, dense_mask
from shoal_context_parallel import Documents, LayoutError, SequenceLayout
from shoal_context_parallel.attention.tiles import TileKind, tiles
from shoal_context_parallel.sequence_layout import AttentionMask

WINDOWS: list[Window] = [(None, None), (3, None), (0, 0), (2, 1), (None, 4)]


def union(layout: SequenceLayout, mask: AttentionMask) -> Tensor:
    """Count the tiles in which a query reads a key, for each query and key of global order."""
    length, (left, right) = layout.length, mask.reach
    rows = len(mask.documents.rows) if mask.documents is not None else 1
    count = torch.zeros(rows, length, length, dtype=torch.long)
    for rank, owner in product(range(layout.ranks), repeat=2):
        for tile in tiles(layout, rank, owner, mask):
            queries, keys = layout.positions(rank)[tile.queries], layout.positions(owner)[tile.keys]
            assert len(queries) and len(keys), "no tile is empty"
            assert tile.offset == queries[0] - keys[0] and tile.first_key == keys[0]
            read = torch.ones(len(queries), len(keys), dtype=torch.bool)
            if tile.kind is TileKind.CAUSAL:
                read = read.tril()
            if tile.kind is TileKind.BAND:
                behind = queries.unsqueeze(-1) - keys
                read &= (behind <= left) & (behind >= -right)
            assert read.any(-1).all(), "every query of a tile has a key"
            for row in range(rows) if tile.row is None else [tile.row]:
                count[row][queries.unsqueeze(-1), keys] += read
    return count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_are_the_mask(causal: bool, window: Window) -> None:
    for length, ranks, rows in product((7, 24), (1, 3), (0, 1, 2)):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, 3, (rows, length), generator=generator) if rows else None
        documents = None if ids is None else Documents.from_ids(ids)
        mask = AttentionMask(causal, window, documents)
        for layout in (
            SequenceLayout.contiguous(length, ranks),
            SequenceLayout.head_tail(length, ranks),
        ):
            assert torch.equal(
                union(layout, mask), dense_mask(length, causal, window, ids)[:, 0].long()
            )


def test_causal_tiles_need_no_mask() -> None:
    layout = SequenceLayout.head_tail(64, 4)
    kinds = {
        t.kind
        for r in range(4)
        for o in range(4)
        for t in tiles(layout, r, o, AttentionMask(causal=True))
    }
    assert kinds == {TileKind.FULL, TileKind.CAUSAL}
    assert tiles(SequenceLayout.contiguous(64, 4), 0, 3, AttentionMask(causal=True)) == ()


def test_documents_by_lengths_and_by_ids() -> None:
    by_lengths = Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 6]))
    assert (
        by_lengths == Documents.from_ids(torch.tensor([[0, 0, 2, 2, 2, 2]]))
        and by_lengths.length == 6
    )
    assert Documents.from_ids([1, 2, 1]).rows[0][2].document == 0  # a document may come back
    for wrong in ([], [1, 4], [0, 4, 3]):
        with pytest.raises(LayoutError, match="cumulative lengths"):
            Documents.from_cu_seqlens(wrong)
    with pytest.raises(LayoutError, match=r"\(batch, length\)"):
        Documents.from_ids(torch.zeros(2, 2, 2))
    with pytest.raises(LayoutError, match="window"):
        AttentionMask(window=(-1, 0))
