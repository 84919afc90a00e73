"""Every scope ends in any order, and each task has its own.

Covers: scopes.py, rng/state.py, redistribute/shards_in_flight.py, modules/forwards.py,
    overlays of rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from shoal_dtensor import (
    DTensor,
    Replicate,
    checked_replicas,
    coalesce,
    communication,
    implicit_replication,
    random_mode,
    unknown_ops,
)
from shoal_dtensor.errors import MixedTensorError
from shoal_dtensor.modules.forwards import arithmetic, current_arithmetic
from shoal_dtensor.redistribute.shards_in_flight import ENCLOSING_BATCH
from shoal_dtensor.rng.state import get_random_mode
from shoal_dtensor.rules import overlay
from shoal_dtensor.scopes import DEFAULT, current
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world

MODE: Any = object()
# a block, and whether its setting holds
SCOPES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = {
    "unknown_ops": (partial(unknown_ops, "error"), lambda: current().unknown == "error"),
    "communication": (
        partial(communication, "forbid"),
        lambda: current().communication == "forbid",
    ),
    "implicit_replication": (implicit_replication, lambda: current().plain_is_replicated),
    "checked_replicas": (checked_replicas, lambda: current().replicas_checked),
    "overlay": (partial(overlay, {}), lambda: len(current().overlays) > 0),
    "random_mode": (partial(random_mode, "local"), lambda: get_random_mode() == "local"),
    "coalesce": (coalesce, lambda: ENCLOSING_BATCH.get() is not None),
    "arithmetic": (partial(arithmetic, MODE), lambda: current_arithmetic() is MODE),
}


@pytest.mark.parametrize("name", SCOPES)
def test_tasks_do_not_see_the_scopes_of_others(name: str) -> None:
    block, holds = SCOPES[name]

    async def task(inside: bool) -> list[bool]:
        with block() if inside else nullcontext():
            seen = [holds()]
            await asyncio.sleep(0)
            seen.append(holds())
        await asyncio.sleep(0)
        return [*seen, holds()]

    async def all_tasks() -> list[list[bool]]:
        tasks = (task(False), task(True), task(False), task(True))
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(all_tasks()) == [[False] * 3, [True, True, False]] * 2
    assert not holds() and current() is DEFAULT


@pytest.mark.parametrize("first", SCOPES)
@pytest.mark.parametrize("second", ["communication", "implicit_replication", "overlay"])
def test_scopes_end_in_any_order(first: str, second: str) -> None:
    # once the setting of the one that ended first came back as the other ended, for good
    (one, one_holds), (other, other_holds) = SCOPES[first], SCOPES[second]
    a, b = one(), other()
    a.__enter__()
    b.__enter__()
    assert one_holds() and other_holds()
    a.__exit__(None, None, None)
    assert other_holds() and (one_holds() == (first == second))
    b.__exit__(None, None, None)
    assert not one_holds() and not other_holds() and current() is DEFAULT


def test_an_operator_of_a_task_outside_of_any_block_is_refused() -> None:
    async def task(inside: bool, mesh: Any) -> Any:
        local = torch.ones(2)
        with implicit_replication() if inside else nullcontext():
            await asyncio.sleep(0)
            try:
                total: Any = DTensor.from_local(local, mesh, [Replicate()]) + torch.ones(2)
                return total.placements
            except MixedTensorError as error:
                return type(error)

    async def both(mesh: Any) -> list[Any]:
        return list(await asyncio.gather(task(False, mesh), task(True, mesh)))

    with fake_world(2):
        outcomes = asyncio.run(both(init_device_mesh("cpu", (2,))))
    assert outcomes == [MixedTensorError, (Replicate(),)]
