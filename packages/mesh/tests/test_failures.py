"""Covers: failures.py: the error of a failed launch is short, and ends with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import all_reduce, comm_over, launch
from shoal_mesh.errors import RankError


def _all_refuse(text: str) -> None:
    raise ValueError(text)


def _fails_on_rank_two(width: int) -> None:
    batch, names = torch.ones(width), {f"parameter {i}": torch.ones(width) for i in range(width)}
    all_reduce(batch, comm_over(range(4)))
    if dist.get_rank() == 2:
        raise ValueError("the batch of rank 2 is bad\n" + "\n".join(names))
    all_reduce(batch, comm_over(range(4)))


# it printed 20,227 characters, with the reason in line 19
def test_a_failure_is_short_and_ends_with_the_reason() -> None:
    with pytest.raises(RankError) as caught:
        launch(_fails_on_rank_two, 4, 30)
    heading, *rest = str(caught.value).split("\n--- ")
    named = re.search(r"output: (\S+)\)", heading)
    assert heading.startswith("_fails_on_rank_two failed on ranks 0-3 of 4") and named
    assert [paragraph.partition(" ---\n")[0] for paragraph in rest] == ["ranks 0, 1, 3", "rank 2"]
    assert all(len(paragraph.splitlines()) <= 10 for paragraph in rest)
    assert "rank 2 raised ValueError: the batch of rank 2 is bad" in rest[0]
    assert "the batch of rank 2 is bad" in rest[1] and rest[1].endswith(" more lines")
    assert isinstance(caught.value.__cause__, ValueError)
    whole = Path(named[1]).read_text()
    assert "parameter 29" in whole and "variables of _fails_on_rank_two" in whole
    assert Path(named[1]).stat().st_mode & 0o77 == 0
    with pytest.raises(ValueError, match="no such file") as alike:
        launch(_all_refuse, 3, "no such file")
    (note,) = alike.value.__notes__
    assert note.endswith("ValueError: no such file") and note.count("raise ValueError") == 1
    # of the last failure only
    assert not Path(named[1]).exists()
