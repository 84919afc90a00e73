"""Scopes end in any order, and each task, thread and context has its own.

Covers: scoped_value.py.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from shoal_mesh import abstract_mesh, current_mesh, purpose, sums_in_tree
from shoal_mesh.events import _current_purpose
from shoal_mesh.internal import ScopedValue, sums_are_in_tree
from shoal_mesh.lab.c10d.link import enter_thread

MESH = abstract_mesh((2,))
VALUE = ScopedValue("shoal_mesh_test_of_tasks", 0)


@contextmanager
def raised(by: int) -> Iterator[None]:
    with VALUE.change(lambda value: value + by):
        yield


# a block, and whether its setting holds
BLOCKS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = {
    "scoped value": (partial(raised, 1), lambda: VALUE.get() > 0),
    "sums_in_tree": (sums_in_tree, sums_are_in_tree),
    "with mesh": (lambda: MESH, lambda: current_mesh() is MESH),
    "purpose": (partial(purpose, "of the block"), lambda: "of the block" in _current_purpose()),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_tasks_do_not_see_the_blocks_of_others(name: str) -> None:
    # once a task outside of any block ran as if inside of the other's
    block, holds = BLOCKS[name]

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

    seen = asyncio.run(all_tasks())
    assert seen == [[False] * 3, [True, True, False]] * 2 and not holds()


@pytest.mark.parametrize("name", BLOCKS)
def test_threads_do_not_see_the_blocks_of_others(name: str) -> None:
    block, holds = BLOCKS[name]
    seen = []
    with block():
        thread = threading.Thread(target=lambda: seen.append(holds()))
        thread.start()
        thread.join()
        assert holds()
    assert seen == [False] and not holds()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_end_in_any_order(name: str) -> None:
    # once the block that ended last left the setting of the one that ended first
    block, holds = BLOCKS[name]
    first, second = block(), block()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert holds()
    second.__exit__(None, None, None)
    assert not holds()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_another_context_ends(name: str) -> None:
    block, holds = BLOCKS[name]
    one = block()
    context = contextvars.Context()
    context.run(one.__enter__)
    assert context.run(holds) and not holds()
    one.__exit__(None, None, None)
    assert not holds()
    if name in ("scoped value", "sums_in_tree"):
        assert not context.run(holds)


def test_each_block_takes_back_its_own_change() -> None:
    ones, tens, hundreds = raised(1), raised(10), raised(100)
    for block in (ones, tens, hundreds):
        block.__enter__()
    seen = [VALUE.get()]
    for block in (tens, ones, hundreds):
        block.__exit__(None, None, None)
        seen.append(VALUE.get())
    assert seen == [111, 101, 100, 0] and VALUE.context_value() == 0


def test_a_task_keeps_the_value_with_which_it_was_started() -> None:
    async def child() -> list[int]:
        seen = [VALUE.get()]
        await asyncio.sleep(0)
        return [*seen, VALUE.get()]

    async def parent() -> list[int]:
        with raised(5):
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        assert VALUE.get() == 0
        return await task

    assert asyncio.run(parent()) == [5, 5] and VALUE.get() == 0


def test_a_block_of_an_asynchronous_generator_that_is_closed_elsewhere() -> None:
    async def generator() -> Any:
        with raised(7):
            yield VALUE.get()

    async def program() -> list[int]:
        values = generator()
        seen = [await anext(values)]
        # the loop closes it in a task of its own
        await asyncio.create_task(values.aclose())
        return [*seen, VALUE.get()]

    assert asyncio.run(program()) == [7, 0]


def test_a_value_that_is_set_holds_until_the_block_ends() -> None:
    def program() -> list[int]:
        seen = []
        VALUE.set(3)
        with raised(1):
            seen.append(VALUE.get())
            VALUE.set(9)
            seen.append(VALUE.get())
        return [*seen, VALUE.get()]

    assert contextvars.Context().run(program) == [4, 9, 3] and VALUE.get() == 0


@pytest.mark.skipif(
    not hasattr(torch._C, "_remove_obj_from_tls"), reason="torch before 2.13 cannot remove objects"
)
@pytest.mark.parametrize("block", ["changed", "entered"])
def test_a_thread_ends_without_objects(block: str) -> None:
    """A thread that ended with one while the interpreter ended aborted the process."""
    key = f"shoal_mesh_test_of_threads_{block}"
    value = ScopedValue(key, 0)
    held = []

    def in_block() -> None:
        opened = value.entered(1) if block == "entered" else value.change(lambda _: 1)
        with opened:
            held.append(torch._C._is_key_in_tls(key))
        value.get()
        enter_thread(None)
        keys = (key, "shoal_mesh.lab", "shoal_mesh.probe")
        held.append(any(map(torch._C._is_key_in_tls, keys)))

    thread = threading.Thread(target=in_block)
    thread.start()
    thread.join()
    assert held == [True, False]
