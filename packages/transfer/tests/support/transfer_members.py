"""Members of a transfer in processes of their own, which import this file.

Rows of w are on two ranks of a trainer, its transposed columns on two ranks of a server.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore  # the documented dist.FileStore, with its type

from shoal_transfer import (
    FolderWire,
    Holding,
    JointWire,
    Manifest,
    TensorRecord,
    TransferPlan,
    WeightMapping,
    WeightTransfer,
    Wire,
    plan_transfer,
)

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


def wire_of(member: int, kind: str, home: str) -> Wire:
    if kind == "folder":
        return FolderWire(f"{home}/messages", member, 4, timeout=60)
    store = FileStore(f"{home}/store", 4)
    return JointWire(dist.ProcessGroupGloo(store, member, 4, timedelta(seconds=60)))


class DyingWire(FolderWire):
    """A wire whose process ends in its n-th exchange."""

    deaths_in = 2

    def exchange(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> None:
        self.deaths_in -= 1
        if not self.deaths_in:
            os._exit(9)
        super().exchange(sends, receives)


def trainer_that_dies(home: str) -> None:
    """Send version 1, and die while version 2 is sent."""
    torch.set_num_threads(1)
    source = {"w": whole(1)}
    wire = DyingWire(home, 0, 2, timeout=60)
    transfer = WeightTransfer(one_to_one(), source=source, wire=wire)
    transfer.run(1)
    source["w"].copy_(whole(2))
    transfer.run(2)


def one_to_one() -> TransferPlan:
    """All of w from a trainer to a server."""
    holding = Holding(0, ((0, 6), (0, 4)), 0, (4, 1))
    record = TensorRecord("w", (6, 4), "float32", (holding,), ("w",))
    sides = [Manifest({"w": record}, {0: "host"}, world) for world in ("trainer", "server")]
    return plan_transfer(sides[0], sides[1])
