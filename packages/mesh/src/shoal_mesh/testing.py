"""Tools for tests of distributed code: ranks that stay up, a fake world, skip decorators.

Four gloo ranks start once per session in about two seconds; then a test takes milliseconds.

May import: _torch, accelerator, argument_types, errors, events, groups, lab, local_ranks, mesh,
observers.
"""

from __future__ import annotations

import pickle
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from typing import Any, TypeVar

import torch.distributed as dist

from . import _torch
from .accelerator import accelerator, device_count
from .argument_types import FUNCTION, require, require_each
from .errors import MeshError
from .events import Event, observing
from .groups.world import ensure_world, require_world
from .lab.run import Lab, lab
from .local_ranks.pool import RankPool, kept_pool
from .mesh.create import init_device_mesh
from .mesh.device_mesh import DeviceMesh
from .observers.comm_debug import CommDebugMode

__all__ = [
    "Lab",
    "RankPool",
    "RankTestCase",
    "all_ranks",
    "counts",
    "default_world_size",
    "device_type",
    "fake_world",
    "lab",
    "observed",
    "on_ranks",
    "rank_pool",
    "skip_unless_backend",
    "skip_unless_gpus",
    "with_comms",
]

F = TypeVar("F", bound=Callable[..., Any])


def rank_pool(size: int = 4) -> RankPool:
    """Return the session's pool of a number of ranks.

    The ranks start with its first `run` and stay up.

    Args:
        size: number of ranks, at least 1.

    Raises:
        MeshTypeError: the size is not an integer.
        MeshError: the size is not positive.

    Example:
        >>> rank_pool(2).run(dist.get_rank)
        [0, 1]
    """
    require(size, int, "rank_pool: size must be a number of ranks")
    return kept_pool(size, backend=None, show_output=False)


def on_ranks(size: int = 4, *, timeout: float | None = 60.0) -> Callable[[F], F]:
    """Run the decorated test on each of `size` ranks of the pool instead of in this process.

    A failure on any rank fails the test with every rank's traceback. Arguments (of `parametrize`,
    of fixtures) are sent by value. A method of a test class gets an instance that has those
    attributes of this process's instance that can be pickled. Random numbers start from
    `torch.manual_seed(0)`.

    Args:
        size: number of ranks.
        timeout: seconds until a rank that has not returned counts as hung; None waits.

    Returns:
        A decorator for tests.

    Raises:
        MeshTypeError: used without a number of ranks, or with another argument of a wrong type.
        MeshError: no positive number of ranks.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> @on_ranks(2)
        ... def test_sum() -> None:
        ...     assert all_reduce(torch.ones(()), (all_ranks(), 0)).item() == 2
        >>> test_sum()
    """
    require(size, int, "on_ranks: size must be a number of ranks, as in @on_ranks(4)")
    require(timeout, int | float | None, "on_ranks: timeout must be a number of seconds, or None")
    # nan is not a timeout: `nan > 0` is false
    is_timeout = timeout is None or timeout > 0
    if size < 1 or not is_timeout:
        raise MeshError(
            f"on_ranks takes a positive number of ranks and of seconds, got {size} and {timeout}"
        )

    def mark(body: F) -> F:
        @wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            state = None
            # The qualified name of a method is `TestSums.test_mean`. A function that is defined in
            # the function `test_sums` has a dot in its name too: `test_sums.<locals>.test_mean`.
            is_method = "." in body.__qualname__ and "<locals>" not in body.__qualname__
            if is_method and args:
                instance, *rest = args
                state = _attributes(instance)
                args = tuple(rest)
            # Each rank imports the test by its name, and so finds this wrapper. The rank calls the
            # attribute `__shoal_body__` (`local_ranks.worker`): to call the wrapper would start
            # ranks again.
            rank_pool(size)._run_on_ranks(run, args, kwargs, state=state, timeout=timeout)

        run.__shoal_body__ = body  # type: ignore[attr-defined]  # what the ranks call
        return run  # type: ignore[return-value]  # same signature, returns None

    return mark


def _attributes(instance: object) -> dict[str, Any]:
    """Return the attributes of a test instance that can be sent."""
    attributes = {}
    for name, value in vars(instance).items():
        with suppress(Exception):  # whatever cannot be pickled stays here
            pickle.dumps(value)
            attributes[name] = value
    return attributes


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Open a default process group of `size` ranks in this process alone.

    Groups and meshes are real, but collectives send nothing.

    Args:
        size: number of ranks.
        rank: the rank of this process.

    Raises:
        MeshTypeError: not integers.
        MeshError: there is a default group already, or no such rank.

    Example:
        >>> with fake_world(4, rank=3):
        ...     init_device_mesh("cpu", (2, 2)).get_coordinate()
        (1, 1)
    """
    require_each((size, rank), int, "fake_world: size and rank must be integers")
    if not 0 <= rank < size:
        raise MeshError(f"fake_world of {size} ranks does not have a rank {rank}")
    if _torch.default_group() is not None:
        raise MeshError("fake_world cannot be used in a process that has a default process group")
    dist.init_process_group("fake", store=_torch.fake_store(), rank=rank, world_size=size)
    try:
        yield require_world()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def all_ranks() -> DeviceMesh:
    """Return a mesh of all ranks on one axis, the same mesh in every call of one world.

    A process that destroys its default group and opens another one gets a mesh of the new world.
    """
    return _mesh_of_ranks(dist.get_world_size(), dist.get_rank())


@cache
def _mesh_of_ranks(size: int, own_rank: int) -> DeviceMesh:
    """Return the mesh of a world; another world of this size has the same mesh for this rank."""
    del own_rank
    return init_device_mesh("cpu", (size,))


def device_type() -> str:
    """Return the device type of the accelerator (`cuda`, `xpu`, ...), or else `cpu`."""
    return accelerator() or "cpu"


def default_world_size() -> int:
    """Return 4, or the number of accelerators if that is two or three."""
    count = device_count()
    return count if 1 < count < 4 else 4


def skip_unless_gpus(count: int = 1) -> Callable[[Any], Any]:
    """Skip a test or a class, with the reason, if there are fewer GPUs or other accelerators.

    Args:
        count: the GPUs, or other accelerators, that the test needs on this machine.

    Raises:
        MeshTypeError: the count is not an integer.
    """
    require(count, int, "skip_unless_gpus: count must be a number of GPUs")
    available = device_count()
    return unittest.skipUnless(available >= count, f"needs {count} GPU(s), found {available}")


@contextmanager
def observed() -> Iterator[list[Event]]:
    """Record the collectives inside the block, in order.

    Example:
        >>> from shoal_mesh import all_reduce
        >>> with fake_world(2):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with observed() as events:
        ...         _ = all_reduce(torch.ones(2), (mesh, 0), "max")
        >>> [(event.op, event.reduce_op) for event in events]
        [('all_reduce', 'max')]
    """
    events: list[Event] = []
    with observing(after=events.append):
        yield events


def counts(mode: CommDebugMode) -> dict[str, int]:
    """Return the counts of collectives that ran under a mode, by short name.

    Names are `all_gather`, `all_reduce`, `all_to_all`, ...

    Args:
        mode: a `CommDebugMode`, in its block or after it.

    Raises:
        MeshTypeError: `mode` is not a `CommDebugMode`.

    Example:
        >>> from shoal_mesh import all_gather
        >>> with fake_world(2), CommDebugMode() as mode:
        ...     _ = all_gather(torch.ones(2), (init_device_mesh("cpu", (2,)), 0))
        >>> counts(mode)
        {'all_gather': 1}
    """
    require(mode, CommDebugMode, "counts: mode must be a CommDebugMode")
    counts_by_name = {}
    for packet, count in mode.get_comm_counts().items():
        if not count:
            continue
        # `_c10d_functional.all_gather_into_tensor` becomes `all_gather`,
        # `_c10d_functional.reduce_scatter_tensor` becomes `reduce_scatter`, and
        # `_c10d_functional.all_to_all_single` becomes `all_to_all`.
        name = str(packet).rpartition(".")[2]
        name = name.removesuffix("_single").removesuffix("_tensor").removesuffix("_into")
        counts_by_name[name] = count
    return counts_by_name


def skip_unless_backend(name: str) -> Callable[[Any], Any]:
    """Skip a test or a class, with the reason, if torch was built without a backend.

    Backends are `nccl`, `gloo`, ...

    Args:
        name: the name of a backend of torch.distributed.

    Raises:
        MeshTypeError: the name is not a string.
    """
    require(name, str, "skip_unless_backend: name must be a string, such as 'gloo'")
    return unittest.skipUnless(
        dist.is_backend_available(name),
        f"the backend {name!r} is not available in this build of torch",
    )


def with_comms(body: F) -> F:
    """Run the decorated function with a default process group.

    It is the present group, or else one from the environment (torchrun). A group that is
    initialized for the function is destroyed afterwards, also after a failure.

    Args:
        body: the function, called with the arguments of the call.

    Returns:
        A function with the signature of `body`.

    Raises:
        MeshTypeError: `body` is not callable.
    """
    require(body, FUNCTION, "with_comms: body must be a function")

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

    `setUp` and `tearDown` run in this process. Each rank calls `set_up_rank` and `tear_down_rank`
    around the method (`local_ranks.worker`).
    """

    # number of ranks; set it in the class body
    world_size: int = default_world_size()
    # seconds until a rank that has not returned counts as hung
    timeout: float = 60.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        run_on_ranks = on_ranks(cls.world_size, timeout=cls.timeout)
        for name, method in list(vars(cls).items()):
            is_test = name.startswith("test") and callable(method)
            if is_test and not hasattr(method, "__shoal_body__"):
                setattr(cls, name, run_on_ranks(method))

    def set_up_rank(self) -> None:
        """Prepare a rank; runs on every rank before the test method."""

    def tear_down_rank(self) -> None:
        """Clean up a rank; runs on every rank after the test method, also after a failure."""

    def build_mesh(
        self, shape: tuple[int, ...] | None = None, names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """Create a mesh over all ranks (on a rank)."""
        return init_device_mesh(
            device_type(), shape or (dist.get_world_size(),), mesh_dim_names=names
        )
