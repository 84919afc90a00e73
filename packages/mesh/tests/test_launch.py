"""Covers: launch.py: from programs, scripts, under torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal_mesh import MeshError, all_reduce, init_device_mesh, launch
from shoal_mesh.errors import RankError
from shoal_mesh.testing import fake_world, on_ranks
from started_scripts import SCRIPT, run_script


def _total(start: float, *, scale: float = 1.0) -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return float(all_reduce(torch.tensor(start + mesh.get_rank()), (mesh, 0))) * scale


def _all_refuse(text: str) -> None:
    raise ValueError(text)


def _one_refuses() -> None:
    raise ValueError(f"rank {dist.get_rank()}")


def test_from_a_program() -> None:
    assert launch(_total, 2, 1.0, scale=2.0) == [6.0, 6.0]
    with pytest.raises(ValueError, match="no such file") as caught:
        launch(_all_refuse, 2, "no such file")
    assert "failed on ranks 0, 1" in caught.value.__notes__[0]
    with pytest.raises(RankError, match="rank 1"):
        launch(_one_refuses, 2)
    with pytest.raises(MeshError, match="number of ranks"):
        launch(_total)  # type: ignore[call-overload]  # arguments are checked against the function


def _nested(wrong: bool) -> list[int]:
    return launch(dist.get_rank, 3 if wrong else None)


@on_ranks(2)
def test_where_ranks_are_there_already() -> None:
    assert _nested(wrong=False) == [0, 1]
    with pytest.raises(MeshError, match="asked for 3 ranks"):
        _nested(wrong=True)


def test_from_a_script(tmp_path: Path) -> None:
    out = run_script(tmp_path, SCRIPT)
    assert "[20, 20]" in out
    assert "printed on 0" in out
    assert "printed on 1" in out


def test_under_torchrun(tmp_path: Path) -> None:
    out = run_script(tmp_path, SCRIPT, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert out.count("[20, 20]") == 2


def test_the_fake_world_is_a_world_of_present_ranks() -> None:
    with fake_world(1):
        assert launch(len, 1, "abc") == [3]
