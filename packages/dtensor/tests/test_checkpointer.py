"""Kills at every stage of a save, damage, elastic loading, saving in the background.

Covers: checkpointer.py, numbered_state.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from killed_runs import require_state, state_of
from shoal_dtensor import Shard, distribute_tensor
from shoal_dtensor.checkpoint import Checkpointer, checkpointer
from shoal_dtensor.errors import CheckpointError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks, rank_pool


def _killed(folder: Path, kills: int) -> str:
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parent / "support" / "killed_runs.py"),
            str(folder),
            str(kills),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert not done.returncode, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_kill_at_any_stage_loses_nothing(tmp_path: Path) -> None:
    assert "0 that lost or mixed" in _killed(tmp_path / "run", 5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_kills(tmp_path: Path) -> None:
    assert "0 that lost or mixed" in _killed(tmp_path / "run", 200)


@on_ranks(2)
def test_the_last_ones_are_kept_and_the_newest_whole_one_is_loaded(folder: str) -> None:
    checkpoints = Checkpointer(folder, keep=3)
    assert checkpoints.load(state_of(0)) is None
    for step in (1, 4, 5, 9):
        checkpoints.save(step, state_of(step))
    assert checkpoints.steps() == [9, 5, 4]
    with pytest.raises(CheckpointError, match=r"^step 5 is not newer than step 9"):
        checkpoints.save(5, state_of(5))
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "step_9" / "__1_0.distcp").write_bytes(b"damaged")
        (Path(folder) / "step_5" / "manifest.json").unlink()
    dist.barrier()
    state = state_of(0)
    with pytest.warns(UserWarning, match="step . is skipped"):
        assert checkpoints.load(state) == 4
    require_state(state, 4)
    with pytest.raises(CheckpointError, match="was changed after it was written: it has 7 bytes"):
        checkpoints.load(state, 9)
    with pytest.raises(CheckpointError, match="the manifest of step 2 cannot be read"):
        checkpoints.load(state, 2)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@on_ranks(2)
def test_a_save_that_one_rank_cannot_write_raises_on_all_and_removes_nothing(folder: str) -> None:
    checkpoints = Checkpointer(folder, keep=1)
    checkpoints.save(1, state_of(1))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpointer, "digest_of", lambda path: 1 / 0)
        with pytest.raises(CheckpointError, match="rank 1: ZeroDivisionError"):
            checkpoints.save(2, state_of(2))
    assert checkpoints.steps() == [1]
    checkpoints.save(3, state_of(3))
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step_3"]


@on_ranks(2)
def test_what_went_wrong_is_said_without_stacks(folder: str) -> None:
    checkpoints = Checkpointer(folder)
    checkpoints.save(1, {"weight": torch.ones(2)})
    with pytest.raises(
        CheckpointError, match=r"was not loaded: rank 0: [A-Za-z]+: Size mismatch .*weight"
    ) as caught:
        checkpoints.load({"weight": torch.ones(3)})
    assert "FrameSummary" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@on_ranks(2)
def test_a_save_in_the_background_has_the_values_of_its_moment(folder: str) -> None:
    state = state_of(1)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state, background=True)
        state["weight"].to_local().fill_(50)
        state["plain"].fill_(50)
        checkpoints.save(2, state_of(2), background=True)  # waits for the first
        assert 1 in checkpoints.steps()
        assert sum("checkpoint" in thread.name for thread in threading.enumerate()) <= 1
        checkpoints.wait()
        checkpoints.save(2, state_of(2), background=True)
        with pytest.raises(
            CheckpointError, match=r"not saved in the background: .*not newer than step 2"
        ):
            checkpoints.wait()
        assert checkpoints.load(state, 1) == 1
    require_state(state, 1)


class NotCopied:
    """A value that one rank cannot copy."""

    def __deepcopy__(self, memo: dict[int, object]) -> NotCopied:
        if dist.get_rank() == 1:
            raise MemoryError("no memory of the host")
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


@on_ranks(2)
def test_a_copy_that_fails_on_one_rank_is_an_error_on_all(folder: str) -> None:
    # untyped there, and the others waited for the time-out of their group
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state_of(1))
        checkpoints.save(2, {**state_of(2), "value": NotCopied()}, background=True)
        failed = r"not saved in the background: rank 1: MemoryError: no memory of the host"
        with pytest.raises(CheckpointError, match=failed):
            checkpoints.wait()
        checkpoints.save(3, {**state_of(3), "value": NotCopied()}, background=True)
        with pytest.raises(CheckpointError, match=failed):
            checkpoints.save(4, state_of(4), background=True)
        assert checkpoints.steps() == [1]
        checkpoints.save(5, state_of(5), background=True)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 1]


def test_any_number_of_ranks_loads_any_layout(folder: str) -> None:
    rank_pool(4).run(_save_four, folder)
    rank_pool(2).run(_load_two, folder)


def _save_four(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = distribute_tensor(torch.arange(30.0).view(6, 5), mesh, [Shard(1), Shard(0)])
    Checkpointer(folder).save(3, {"weight": weight})


def _load_two(folder: str) -> None:
    weight = distribute_tensor(torch.zeros(6, 5), init_device_mesh("cpu", (2,)), [Shard(1)])
    assert Checkpointer(folder).load({"weight": weight}) == 3
    assert weight.full_tensor().equal(torch.arange(30.0).view(6, 5))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder + "/step_3")


def test_arguments(folder: str) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        Checkpointer(folder, keep=0)
    with pytest.raises(TypeError, match="keep"):
        Checkpointer(folder, keep="2")  # type: ignore[arg-type]  # on purpose


# each rank's state by number was replaced by that of one rank when it was loaded
@pytest.mark.parametrize("form", ["object", "dict"])
@on_ranks(2)
def test_state_by_number_of_other_parameters_is_refused(form: str, tmp_path: Path) -> None:
    torch.manual_seed(dist.get_rank())
    stage = torch.nn.ModuleDict({f"stage{dist.get_rank()}": torch.nn.Linear(4, 4)})
    optimizer = torch.optim.AdamW(stage.parameters())
    for layer in stage.values():
        layer(torch.ones(1, 4) * (1 + dist.get_rank())).sum().backward()
    optimizer.step()
    state: dict[str, Any] = {"model": stage, "optimizer": optimizer}
    if form == "dict":
        state = {name: value.state_dict() for name, value in state.items()}
    with (
        Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.exp_avg.*flatten_optimizer"),
    ):
        checkpoints.save(1, state)
