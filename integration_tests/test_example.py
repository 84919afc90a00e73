"""Covers: examples/llama/train_llama.py: small runs, and the errors for wrong arguments."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from integration_tests.processes import two_at_a_time

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "llama" / "train_llama.py"
TINY = [
    "--steps=4",
    "--batch=4",
    "--seq=16",
    "--dim=32",
    "--layers=1",
    "--heads=4",
    "--kv-heads=2",
    "--hidden=64",
]


def run(*args: str | Path, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}"]
        if torchrun
        else []
    )
    command = [sys.executable, *launcher, str(SCRIPT), *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=240, check=False
    )


# that need nothing of each other, each with the ranks that torchrun starts
RUNS = {
    "untied": (["--dtype=float64"], 0),  # rounding is below 1e-9 there
    "fully sharded": (["--fsdp", "--tied", "--dtype=float64"], 0),
    "tied": (["--tied", "--mesh=1x2"], 2),
    "too few ranks": (["--mesh=2x2"], 2),
}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Future[subprocess.CompletedProcess[str]]]:
    """Small runs, two of them at a time, in folders of their names."""
    folder = tmp_path_factory.mktemp("runs")

    def start(name: str) -> subprocess.CompletedProcess[str]:
        args, ranks = RUNS[name]
        return run(*TINY, *args, "--out", folder / name, torchrun=ranks)

    return two_at_a_time(start, [(name,) for name in RUNS])


@pytest.fixture(scope="module")
def finished(ended: Any) -> Path:
    """The folder of a small run on a 2x2 mesh, with the two weights of embedding and head apart."""
    done = ended["untied"].result()
    out = Path(done.args[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    (out / "stdout").write_text(done.stdout)
    return out


def test_a_run_agrees_with_one_process_and_leaves_its_results(finished: Path) -> None:
    said = (finished / "stdout").read_text()
    assert "equal bit for bit" in said
    assert "collectives of one step" in said
    assert (finished / "losses.png").stat().st_size > 5_000
    assert (finished / "layout.png").stat().st_size > 5_000
    assert (finished / "checkpoint" / ".metadata").is_file()


def test_weights_are_sharded_over_both_axes(ended: Any) -> None:
    done = ended["fully sharded"].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal bit for bit" in done.stdout


def test_a_run_with_tied_weights_under_torchrun(ended: Any) -> None:
    done = ended["tied"].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal bit for bit" in done.stdout


def test_a_checkpoint_is_resumed_on_another_mesh_under_torchrun(
    finished: Path, tmp_path: Path
) -> None:
    changed = ("--steps=6", "--mesh=1x2", "--dtype=float64")
    done = run(*TINY, *changed, "--resume", finished / "checkpoint", "--out", tmp_path, torchrun=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from step 5" in done.stdout
    assert "equal bit for bit" in done.stdout


BAD = {
    "data that are not there": (["--data=/nowhere"], "there are no data at /nowhere"),
    "data that are too short": (["--data={short}"], "fewer than a sequence"),
    "heads that do not fit": (["--heads=5"], "does not split into 5 heads"),
    "key-value heads that do not fit the heads": (
        ["--kv-heads=3"],
        "cannot share 3 key-value heads",
    ),
    "key-value heads that do not fit the mesh": (["--mesh=1x4"], "do not split over 4 ranks"),
    "a batch that does not fit the mesh": (["--batch=3"], "does not split into 2 equal parts"),
    "no steps": (["--steps=1"], "at least 2, got 1"),
    "a checkpoint that is not there": (["--resume={nowhere}"], "there is no checkpoint at"),
    "a checkpoint of another shape": (
        ["--resume={checkpoint}", "--hidden=96"],
        "holds another model",
    ),
    "steps that were done already": (["--resume={checkpoint}", "--steps=3"], "at least 5, got 3"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_found_before_a_rank_starts(
    args: list[str], message: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    job = importlib.import_module("job")
    (tmp_path / "short").write_text("too short")
    names = {
        "short": tmp_path / "short",
        "nowhere": tmp_path,
        "checkpoint": finished / "checkpoint",
    }
    with pytest.raises(job.JobError, match=re.escape(message)):
        job.read_job([*TINY, *(arg.format(**names) for arg in args)])


def test_bad_input_ends_in_one_line_and_touches_nothing(finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    done = run(*TINY, "--hidden=96", "--resume", finished / "checkpoint", "--out", finished)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("train_llama: the checkpoint at")
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_mesh_that_does_not_fit_the_world_is_refused_by_every_rank(ended: Any) -> None:
    done = ended["too few ranks"].result()
    assert done.returncode != 0
    assert done.stderr.count("train_llama: a mesh of 2x2 has 4 ranks, but torchrun started 2") == 2
    # torchrun's own, about the end of its children
    assert done.stderr.count("Traceback") <= 1
    assert not Path(done.args[-1]).exists()
