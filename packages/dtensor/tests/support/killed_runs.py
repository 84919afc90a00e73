"""Runs that save each step and are killed, for tests of checkpoints.

Run: ``python killed_runs.py FOLDER KILLS``.

A run resumes, sees that nothing that was saved is lost or mixed, and goes on until its kill: of one
rank or both, at the n-th event of its files or after some milliseconds. Ranks are forked from this
process, which has imported all.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal_dtensor import DTensor, Replicate, Shard, zeros
from shoal_dtensor.checkpoint import Checkpointer
from shoal_mesh import init_device_mesh

_EVENTS = {
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "os.scandir",
    "os.listdir",
}


def state_of(step: int) -> dict[str, Any]:
    """The state after a step: a sharded and a replicated tensor, a plain one, a number."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "weight": zeros(7, 3, device_mesh=mesh, placements=[Shard(0)]) + step,
        "moments": {"mean": zeros(5, device_mesh=mesh, placements=[Replicate()]) - step},
        "plain": torch.full((2,), float(step)),
        "step": step,
    }


def require_state(state: dict[str, Any], step: int) -> None:
    """Every value is that of the step: nothing is mixed."""
    weight, mean = state["weight"], state["moments"]["mean"]
    assert isinstance(weight, DTensor)
    assert weight.to_local().eq(step).all(), (step, weight)
    assert mean.to_local().eq(-step).all(), (step, mean)
    assert state["plain"].eq(step).all()
    assert state["step"] == step


def run_until_killed(
    folder: str, steps: int, culprit: int, event: int, seconds: float, background: bool
) -> int:
    """Resume, check, and save steps.

    The culprit (or all ranks, -1) is killed at an event of its files or after a time.

    Returns:
        How many events there were, if it lives.
    """
    counted = 0
    armed = culprit in (-1, dist.get_rank())

    def hook(name: str, arguments: tuple[object, ...]) -> None:
        nonlocal counted
        if name in _EVENTS and arguments and str(arguments[0]).startswith(folder):
            counted += 1
            if counted == event and armed:
                os.kill(os.getpid(), signal.SIGKILL)

    log = Path(folder).parent / "acknowledged"
    state, checkpoints = state_of(0), Checkpointer(folder, keep=2)
    at = checkpoints.load(state) or 0
    require_state(state, at)
    acknowledged = int(log.read_text() or 0) if log.exists() else 0
    assert at >= acknowledged, f"step {acknowledged} was saved, and {at} is what is left"
    sys.addaudithook(hook)
    if seconds and armed:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(at + 1, at + 1 + steps):
        checkpoints.save(step, state_of(step), background=background)
        if dist.get_rank() == 0 and not background:
            with open(log, "w") as file:
                file.write(str(step))
    checkpoints.close()
    return counted


def _run(*arguments: Any) -> tuple[list[int], int]:
    """Two ranks: their exit statuses, and their events if both lived.

    A status is -9 of a killed rank, 0, 1 of one that lost the other, 3 for lost data, 4 for a hang.
    """
    pids = []
    with tempfile.TemporaryDirectory() as meeting:
        for rank in range(2):
            pid = os.fork()
            if pid:
                pids.append(pid)
                continue
            status = 0
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{meeting}/store", rank=rank, world_size=2
                )
                events = run_until_killed(*arguments)
                Path(meeting, f"events{rank}").write_text(str(events))
            except AssertionError:
                traceback.print_exc()
                status = 3
            except BaseException as error:
                status = 1
                if os.environ.get("SHOW"):
                    print(rank, repr(error)[:200], flush=True)
            os._exit(status)
        deadline = time.monotonic() + 60
        statuses = [_wait(pid, deadline) for pid in pids]
        events = int(Path(meeting, "events0").read_text()) if statuses == [0, 0] else 0
    return statuses, events


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 4  # it hung


def main(folder: str, kills: int) -> None:
    """Kill runs in one folder; raises if anything was lost, mixed, or left behind."""
    draw, killed, failures = random.Random(0), 0, []
    statuses, events = _run(folder, 3, -2, 0, 0.0, False)
    assert statuses == [0, 0]
    for kill in range(kills):
        by_time = kill % 4 == 3
        event = 0 if by_time else 1 + kill * events // kills
        seconds = draw.random() / 10 + 0.001 if by_time else 0.0
        statuses, _ = _run(folder, 3, kill % 3 - 1, event, seconds, kill % 7 == 6)
        killed += -9 in statuses
        if set(statuses) - {-9, 0, 1}:
            failures.append((kill, statuses))
        if kill % 5 == 4:
            assert _run(folder, 1, -2, 0, 0.0, False)[0] == [0, 0], kill
            names = sorted(os.listdir(folder))
            assert len(names) <= 2, names
            assert all(name.startswith("step_") for name in names), names
    print(
        f"{kills} runs, {killed} killed, {len(failures)} that lost or mixed something or hung "
        f"{failures[:5]}"
    )
    assert not failures


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]))
