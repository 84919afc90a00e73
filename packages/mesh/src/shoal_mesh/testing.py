"""What a project needs to test its distributed code: a warm pool of ranks, a fake world, skip helpers.

    @on_ranks(4)
    def test_sum() -> None:
        mesh = init_device_mesh("cpu", (4,))
        assert all_reduce(torch.ones(()), (mesh, 0)).item() == 4

Four gloo ranks start once per session in about two seconds; then a test costs milliseconds.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

from . import _torch
from .errors import MeshError
from .pool import RankPool

__all__ = ["RankPool", "fake_world", "on_ranks", "rank_pool"]

F = TypeVar("F", bound=Callable[..., Any])
_POOLS: dict[int, RankPool] = {}  # the pools of this process by size, for the whole session


def rank_pool(size: int = 4) -> RankPool:
    """The session's pool of that many ranks; its ranks start with its first `run` and stay."""
    pool = _POOLS.get(size)
    if pool is None:
        pool = _POOLS[size] = RankPool(size)
    return pool


def on_ranks(size: int = 4, *, timeout: float = 60.0) -> Callable[[F], F]:
    """Have a test run on each of `size` ranks of the pool instead of here.

    A failure on any rank fails the test with every rank's traceback. Arguments (of `parametrize`, of fixtures) are sent
    by value. In a class, the body gets an instance with the attributes that this one has here. Random numbers start
    from `torch.manual_seed(0)`.

    Args:
        size: number of ranks.
        timeout: seconds until a rank that has not returned counts as hung.
    """

    def mark(body: F) -> F:
        @wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            state = None
            if "." in body.__qualname__ and "<locals>" not in body.__qualname__ and args:
                state, args = _attributes(args[0]), args[1:]
            rank_pool(size)._run(run, args, kwargs, state, timeout)

        run.__shoal_body__ = body  # type: ignore[attr-defined]  # what the ranks call
        return run  # type: ignore[return-value]  # same signature, returns None

    return mark


def _attributes(instance: object) -> dict[str, Any]:
    """The attributes of a test instance that can be sent."""
    found = {}
    for name, value in vars(instance).items():
        try:
            pickle.dumps(value)
        except Exception:  # whatever cannot be pickled stays here
            continue
        found[name] = value
    return found


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A default process group of `size` ranks in this process alone: groups and meshes are real, data do not move.

    Raises:
        MeshError: there is a default group already.
    """
    if _torch.default_group() is not None:
        raise MeshError("fake_world inside of a process that has a default process group")
    dist.init_process_group("fake", store=_torch.fake_store(), rank=rank, world_size=size)
    try:
        world = _torch.default_group()
        assert world is not None, "just made"
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
