"""What a project needs to test its distributed code: a warm pool of ranks, a fake world, skip helpers.

    @on_ranks(4)
    def test_sum() -> None:
        mesh = init_device_mesh("cpu", (4,))
        assert all_reduce(torch.ones(()), (mesh, 0)).item() == 4

Four gloo ranks start once per session in about two seconds; then a test costs milliseconds.
"""

from __future__ import annotations

import pickle
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import _torch
from .create import init_device_mesh
from .device_mesh import DeviceMesh
from .errors import MeshError
from .pool import RankPool
from .world import ensure_world

__all__ = [
    "RankPool",
    "RankTestCase",
    "default_world_size",
    "device_type",
    "fake_world",
    "on_ranks",
    "rank_pool",
    "skip_unless_backend",
    "skip_unless_gpus",
    "with_comms",
]

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


def device_type() -> str:
    """`cuda` where there are GPUs, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_world_size() -> int:
    """Four ranks, or as many as there are GPUs if that is two or three."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return gpus if 1 < gpus < 4 else 4


def skip_unless_gpus(count: int = 1) -> Callable[[Any], Any]:
    """Skip a test or a class, saying why, where there are fewer GPUs."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return unittest.skipUnless(there >= count, f"needs {count} GPU(s), there are {there}")


def skip_unless_backend(name: str) -> Callable[[Any], Any]:
    """Skip a test or a class, saying why, where torch was built without a backend (`nccl`, `gloo`, ...)."""
    return unittest.skipUnless(dist.is_backend_available(name), f"torch has no backend {name!r} here")


def with_comms(body: F) -> F:
    """Have a function run with a default process group: the one that is up, else one from the environment (torchrun).

    A group that was made for it is destroyed afterwards, also after a failure.
    """

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        if dist.is_initialized():
            return body(*args, **kwargs)
        ensure_world(device_type())
        try:
            return body(*args, **kwargs)
        finally:
            dist.destroy_process_group()

    return run  # type: ignore[return-value]  # the same signature


class RankTestCase(unittest.TestCase):
    """A unittest base whose test methods run on `world_size` ranks of the session's pool.

    `setUp` and `tearDown` run here, once; `set_up_rank` and `tear_down_rank` run around the method on every rank.

    Attributes:
        world_size: number of ranks; set it in the class body.
        timeout: seconds until a rank that has not returned counts as hung.
    """

    world_size: int = default_world_size()
    timeout: float = 60.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in list(vars(cls).items()):
            if name.startswith("test") and callable(method) and not hasattr(method, "__shoal_body__"):
                setattr(cls, name, on_ranks(cls.world_size, timeout=cls.timeout)(method))

    def set_up_rank(self) -> None:
        """Runs on every rank before the test method."""

    def tear_down_rank(self) -> None:
        """Runs on every rank after the test method, also after a failure."""

    def build_mesh(self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh over all ranks (on a rank)."""
        return init_device_mesh(device_type(), shape or (dist.get_world_size(),), mesh_dim_names=names)
