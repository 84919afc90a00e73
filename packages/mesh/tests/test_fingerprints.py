"""Covers: lockstep.py: fingerprints of collectives, without ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shoal_mesh.internal import Event
from shoal_mesh.observers.lockstep import agree, statement


def _event(rank: int, change: str) -> Event:
    differs = rank == 1
    counts = (0, 3) if rank == 0 else (3, 0)
    return Event(
        "broadcast" if change == "op" and differs else "all_reduce",
        SimpleNamespace(rank=rank, size=2),
        (torch.ones(2, dtype=torch.int if change == "dtypes" and differs else torch.float),),
        same={"shape": (2 + (change == "same" and differs),)},
        sends=counts,
        receives=(4, 0) if change == "receives" and differs else counts,
        purpose="b" if change == "purpose" and differs else "a",
    )


@pytest.mark.parametrize("change", ["op", "purpose", "same", "dtypes", "receives", ""])
def test_descriptions_of_two_ranks(change: str) -> None:
    (own, text), (other, _) = [statement(_event(rank, change), call_sites=True) for rank in (0, 1)]
    assert agree([own, other]) == (change == "")
    assert text.startswith(
        "sends [0, 3], receives [0, 3]: all_reduce float32 shape (2,), for a (test_fin"
    )


def test_a_rank_without_blocks_does_not_know_the_dtype() -> None:
    own, _ = statement(_event(0, ""), call_sites=False)
    without_blocks = own._replace(dtypes=0, flow=-own.flow)
    assert agree([own, without_blocks])
    assert not agree([own, without_blocks._replace(dtypes=own.dtypes + 1)])


def test_lines_of_the_program_count_if_wanted() -> None:
    first = [statement(_event(0, ""), call_sites=each)[0].facts for each in (True, False)]
    second = [statement(_event(0, ""), call_sites=each)[0].facts for each in (True, False)]
    assert first[0] != second[0]
    assert first[1] == second[1]
