"""Transfers between processes that share no group.

Covers: running/folder_wire.py, running/wires.py.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal_transfer import FolderWire, JointWire, TransferError, WeightTransfer
from transfer_members import (
    member_of_three,
    member_of_transfer,
    one_to_one,
    plan,
    trainer_that_dies,
    whole,
)

# The process that members are forked from imports torch once for all of them.
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(["shoal_transfer"])


def run_members(
    function: Callable[..., None], arguments: Sequence[tuple[Any, ...]]
) -> list[int | None]:
    """Run a function in one process for each tuple of arguments, and return the exit codes."""
    processes = [start_member(function, *one) for one in arguments]
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def start_member(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    process = FORK_SERVER.Process(target=function, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("kind", ["folder", "joint"])
def test_four_processes_without_a_common_world(kind: str, tmp_path: Path) -> None:
    arguments = [(member, kind, str(tmp_path)) for member in range(4)]
    assert run_members(member_of_transfer, arguments) == [0] * 4
    left = [*(tmp_path / "messages").glob("*")] if kind == "folder" else []
    assert left == [], "messages are removed"


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_trainer_that_dies_leaves_the_server_on_its_version(mode: Any, tmp_path: Path) -> None:
    process = start_member(trainer_that_dies, str(tmp_path))
    target = {"w": torch.zeros(6, 4)}
    wire = FolderWire(tmp_path, 1, 2, timeout=30)
    transfer = WeightTransfer(one_to_one(), target=target, wire=wire, mode=mode)
    assert transfer.run().version == 1
    wire.timeout = 3.0
    with pytest.raises(
        TransferError, match=r"version 2 did not arrive .* its sender may have died"
    ):
        transfer.run()
    process.join(60)
    assert process.exitcode == 9
    assert transfer.version == 1
    assert transfer.is_valid == (mode == "staged")
    assert torch.equal(target["w"], whole(1))


@pytest.mark.parametrize("kind", ["folder", "joint"])
@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_server_that_dies_leaves_the_others_on_their_version(
    mode: Any, kind: str, tmp_path: Path
) -> None:
    arguments = [(member, kind, mode, str(tmp_path)) for member in range(3)]
    assert run_members(member_of_three, arguments) == [0, 0, 9]
    reports = [json.loads((tmp_path / f"report-{one}").read_text()) for one in (0, 1)]
    assert all("version 2 did not arrive" in report["message"] for report in reports)
    assert reports[1]["is_valid"] == (mode == "staged")
    if mode == "staged":
        assert reports[1]["is_old"], "the server that lives has its old weights, whole"


def test_a_folder_of_an_earlier_run_and_a_lost_message(tmp_path: Path) -> None:
    wire = FolderWire(tmp_path, 0, 2, timeout=0.05)
    with pytest.raises(
        TransferError, match=r"did not appear within 0\.05 s; its sender may have died"
    ):
        wire.gather(1)
    with pytest.raises(TransferError, match="was written by an earlier run; use a new folder"):
        FolderWire(tmp_path, 0, 2)


def test_a_message_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wire: Any = FolderWire(tmp_path, 0, 2, timeout=0.05)
    nothing = torch.empty(0, dtype=torch.bfloat16)
    elements = torch.arange(3.0).bfloat16()
    wire.exchange([nothing, elements], [nothing, nothing])
    (message,) = tmp_path.glob("*-0-1")
    assert torch.equal(load_file(message)["elements"], elements)
    other = FolderWire(tmp_path, 1, 2, timeout=1)
    with pytest.raises(TransferError, match="has 3 elements, but the plan has 4"):
        other.exchange([nothing, nothing], [elements.new_empty(4), nothing])


def test_a_joint_group_gathers_on_its_device() -> None:
    torch_distributed: Any = dist
    group = torch_distributed.ProcessGroupGloo(torch_distributed.HashStore(), 0, 1)
    assert JointWire(group).gather({"a": 1}) == [{"a": 1}]
    with pytest.raises(RuntimeError, match="meta"):
        JointWire(group, device="meta").gather(1)


def test_two_worlds_need_a_wire_of_the_right_size(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match="'trainer' and 'server' do not share a process group"):
        WeightTransfer(plan(), source={"w": torch.zeros(3, 4)})
    with pytest.raises(TransferError, match="the plan has 4 members, but the wire has 2"):
        WeightTransfer(plan(), source={}, wire=FolderWire(tmp_path, 0, 2))
