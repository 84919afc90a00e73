"""Members of a transfer in processes of their own, which import this file.

Rows of w are on two ranks of a trainer, its transposed columns on two ranks of a server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # the documented dist.FileStore, with its type

from shoal_transfer import (
    FolderWire,
    Holding,
    JointWire,
    Manifest,
    TensorRecord,
    TransferError,
    TransferPlan,
    WeightMapping,
    WeightTransfer,
    Wire,
    plan_transfer,
)

Mode = Literal["staged", "in_place"]
HALVES = (Holding(0, ((0, 3), (0, 4)), 0, (4, 1)), Holding(1, ((3, 6), (0, 4)), 0, (4, 1)))
COLUMNS = (Holding(0, ((0, 4), (0, 2)), 0, (2, 1)), Holding(1, ((0, 4), (2, 6)), 0, (4, 1)))


def plan() -> TransferPlan:
    """Rows of w on two ranks, transposed into columns on two ranks of another world."""
    rows = TensorRecord("w", (6, 4), "float32", HALVES, ("w",))
    columns = TensorRecord("w", (4, 6), "float32", COLUMNS, ("w",))
    hosts = {0: "host", 1: "host"}
    source = Manifest({"w": rows}, hosts, "trainer")
    mapping = WeightMapping.same_names({"w": (6, 4)}).transpose(["w"])
    return plan_transfer(source, Manifest({"w": columns}, hosts, "server"), mapping)


def whole(version: int) -> torch.Tensor:
    return torch.arange(24.0).reshape(6, 4) + version


def member_of_transfer(member: int, kind: str, home: str) -> None:
    """Members 0 and 1 train, 2 and 3 serve; each checks its own values."""
    torch.set_num_threads(1)
    wire = wire_of(member, kind, home)
    source = {"w": whole(0)[3 * member : 3 * member + 3].clone()} if member < 2 else None
    columns = slice(0, 2) if member == 2 else slice(2, 6)
    target = {"w": torch.zeros(4, columns.stop - columns.start)} if member >= 2 else None
    transfer = WeightTransfer(plan(), source=source, target=target, wire=wire, deltas=True)
    for version in (1, 2):
        if source is not None:
            source["w"].copy_(whole(version)[3 * member : 3 * member + 3])
        transfer.run(version if member < 2 else None)
        if target is not None:
            assert torch.equal(target["w"], whole(version).t()[:, columns])
    assert transfer.version == 2


def wire_of(member: int, kind: str, home: str, *, size: int = 4) -> Wire:
    if kind == "folder":
        return FolderWire(f"{home}/messages", member, size, timeout=60)
    store = FileStore(f"{home}/store", size)
    return JointWire(dist.ProcessGroupGloo(store, member, size, timedelta(seconds=60)))


def trainer_that_dies(home: str) -> None:
    """Send version 1, and die while version 2 is sent."""
    torch.set_num_threads(1)
    source = {"w": whole(1)}
    wire = FolderWire(home, 0, 2, timeout=60)
    die_in_exchange(wire, number=2)
    transfer = WeightTransfer(one_to_one(), source=source, wire=wire)
    transfer.run(1)
    source["w"].copy_(whole(2))
    transfer.run(2)


def member_of_three(member: int, kind: str, mode: Mode, home: str) -> None:
    """Member 0 trains; 1 and 2 serve.

    Member 2 dies while version 2 arrives, and 1 writes what it has.
    """
    torch.set_num_threads(1)
    wire = wire_of(member, kind, home, size=3)
    if member == 2:
        die_in_exchange(wire, number=2)
    state = {"w": torch.zeros(6, 4)}
    transfer = WeightTransfer(
        one_to_two(),
        source=None if member else state,
        target=state if member else None,
        wire=wire,
        mode=mode,
    )
    for version in (1, 2):
        if version == 2 and isinstance(wire, FolderWire):
            # the sockets of a group report a death, a folder does not
            wire.timeout = 3
        if not member:
            state["w"].copy_(whole(version))
        try:
            transfer.run(None if member else version)
        except TransferError as error:
            message = str(error)
    is_old = torch.equal(state["w"], whole(1))
    report = {"message": message, "is_old": is_old, "is_valid": transfer.is_valid}
    Path(home, f"report-{member}").write_text(json.dumps(report))


def die_in_exchange(wire: Wire, number: int) -> None:
    """Let the process end in the n-th exchange of elements."""
    exchange = wire.exchange
    left = number

    def exchange_or_die(sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        nonlocal left
        is_of_elements = any(one.is_floating_point() for one in receives)
        left -= is_of_elements
        if not left:
            os._exit(9)
        exchange(sends, receives)

    wire.exchange = exchange_or_die  # type: ignore[method-assign]  # of this wire only


def one_to_two() -> TransferPlan:
    """All of w from a trainer to each of two servers."""
    box = ((0, 6), (0, 4))
    holdings = tuple(Holding(rank, box, 0, (4, 1)) for rank in range(2))
    trained = TensorRecord("w", (6, 4), "float32", holdings[:1], ("w",))
    served = TensorRecord("w", (6, 4), "float32", holdings, ("w",))
    source = Manifest({"w": trained}, {0: "one"}, "trainer")
    return plan_transfer(source, Manifest({"w": served}, {0: "two", 1: "three"}, "server"))


def one_to_one() -> TransferPlan:
    """All of w from a trainer to a server."""
    holding = Holding(0, ((0, 6), (0, 4)), 0, (4, 1))
    record = TensorRecord("w", (6, 4), "float32", (holding,), ("w",))
    sides = [Manifest({"w": record}, {0: "host"}, world) for world in ("trainer", "server")]
    return plan_transfer(sides[0], sides[1])
