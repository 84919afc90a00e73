"""The files that ranks of torchrun write when one of them is lost.

Covers: commands/mesh_commands.py.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from shoal_mesh import PeerError, all_reduce, init_device_mesh, purpose, restart_world
from shoal_mesh.commands.mesh_commands import main, report
from shoal_mesh.errors import RankError
from shoal_mesh.testing import RankPool
from shoal_mesh.watch.recorder import ENTRIES


def _lose_one(kept: str, transport: str, fault: str) -> None:
    os.environ["SHOAL_POSTMORTEM"] = kept
    os.environ["SHOAL_SHARED_MEMORY"] = str(int(transport == "shared memory"))
    restart_world(timeout=2)
    comm = init_device_mesh("cpu", (3,)).comm(0)
    for step in range(300):
        with purpose(f"step {step}"):
            all_reduce(torch.ones(8), comm)
    if comm.rank == 1 and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 1 and fault == "away":
        # until the others have given up on this rank
        while len([*Path(kept).glob("rank*.json")]) < 2:
            time.sleep(0.01)
        return
    with purpose(lambda: "the last sum"), pytest.raises(PeerError, match="postmortem") as caught:
        all_reduce(torch.ones(4), comm)
    assert kept in str(caught.value)
    assert len(ENTRIES) > 255
    time.sleep(1)


@pytest.mark.parametrize("fault", ["killed", "away"])
@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_the_report_names_the_rank_that_is_lost(
    transport: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as kept:
        with RankPool(3) as pool, suppress(RankError):
            pool.run(_lose_one, kept, transport, fault, timeout=25)
        assert {path.name for path in Path(kept).iterdir()} == {"rank0.json", "rank2.json"}
        assert main(["postmortem", kept, "--last", "2"]) == 0
        Path(kept, "rank2.json").write_text("{")
        assert main(["postmortem", kept]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert lines[:2] == [
        "2 of 3 ranks have written",
        "rank 1 was named by other ranks 2 times; it has written nothing",
    ]
    assert lines[2].startswith("rank 1 has written nothing; last seen: ")
    assert ("round 300 of group 0: all_reduce sum of 8 x float32" in lines[2]) == (
        transport == "shared memory"
    )
    # how gloo takes small sums
    op = "all_reduce sum of" if transport == "shared memory" else "all_to_all of"
    assert sum(f": {op} " in line and "x float32, for the last sum" in line for line in lines) == 3
    assert sum(f": {op} " in line and "x float32, for step 299" in line for line in lines) == 3
    assert any(line.startswith("  at ") and "test_postmortem.py:" in line for line in lines)
    assert "rank2.json cannot be read: JSONDecodeError" in "\n".join(lines)


def test_a_folder_without_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["postmortem", str(tmp_path)]) == 1
    assert "no files of ranks" in capsys.readouterr().out


def test_ranks_that_nobody_has_seen() -> None:
    dump = {
        "world": 3,
        "culprits": [],
        "seen": {},
        "process": 1,
        "host": "h",
        "error": "e",
        "stack": [],
    }
    lines = report({0: {**dump, "collectives": [[0.5, "g", "all_gather of 1 x float32", ""]]}})
    assert "rank 2 has written nothing; last seen: by nobody" in lines
    assert lines[-2:] == [
        "     0.500 s before, group g: all_gather of 1 x float32",
        "  at no line of the program",
    ]


def test_a_program_in_a_folder_whose_name_begins_as_ours() -> None:
    stack = [
        "/home/me/shoal_mesh-0.1.0/train.py:3 main",
        "/lib/shoal_dtensor/tensor/dtensor.py:9 redistribute",
    ]
    dump = {
        "world": 1,
        "culprits": [],
        "seen": {},
        "process": 1,
        "host": "h",
        "error": "e",
        "stack": stack,
    }
    assert report({0: {**dump, "collectives": []}})[-1] == f"  at {stack[0]}"
