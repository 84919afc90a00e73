"""launch: run a function on N local ranks from a script or a notebook; under torchrun, on the ranks that are there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .errors import MeshError, RankError
from .pool import RankPool
from .world import ensure_world

__all__ = ["launch"]

R = TypeVar("R")


def launch(
    fn: Callable[..., R],
    nprocs: int | None = None,
    *args: Any,
    backend: str | None = None,
    timeout: float | None = None,
    **kwargs: Any,
) -> list[R]:
    """What a function returns on every rank, by rank.

    Args:
        fn: runs on each rank with the default process group up. Found by module (or script) and name; functions of a
            notebook travel as code.
        nprocs: number of local ranks. Under torchrun, or where a default group is up, the ranks are there already: then
            it may be None, and else must be their number.
        *args: for `fn`, pickled.
        backend: of the default group; `cpu:gloo,cuda:nccl` when there is a GPU per rank, else `gloo`.
        timeout: seconds until ranks that have not returned count as hung; None waits.
        **kwargs: for `fn`, pickled.

    Raises:
        MeshError: `nprocs` is missing, or not the number of ranks that are there.
        RankError: ranks failed differently or did not return. If all failed with one error, that error is raised.
    """
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return _on_present_ranks(fn, nprocs, args, kwargs)
    if nprocs is None:
        raise MeshError("launch needs a number of ranks, except under torchrun")
    with RankPool(nprocs, backend=backend, show_output=True) as pool:
        try:
            return pool._run(fn, args, kwargs, None, timeout)
        except RankError as error:
            cause = error.__cause__
            if cause is None or error.hung or len(error.failures) < nprocs or len(set(error.failures.values())) > 1:
                raise
            cause.add_note(str(error))
            raise cause from None


def _on_present_ranks(
    fn: Callable[..., R], nprocs: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[R]:
    world = ensure_world("cuda" if _has_gpus() else "cpu")
    if nprocs is not None and nprocs != world.size():
        raise MeshError(f"launch asked for {nprocs} ranks, but the {world.size()} of this run are there already")
    own = fn(*args, **kwargs)
    results: list[Any] = [None] * world.size()
    dist.all_gather_object(results, own)
    return results


def _has_gpus() -> bool:
    import torch

    return torch.cuda.is_available()
