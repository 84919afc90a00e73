"""Ranks that run a program under observation: the only module that starts processes."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shoal_mesh import launch

from .observe.observer import Observation, Observer
from .records import RankRecord

# The state of torch's generator in a new process.
_FIRST_SEED = 67280421310721


@dataclass(frozen=True, slots=True)
class Job:
    """A program for ranks: a function of the mesh, or a script with arguments.

    Attributes:
        function: called with the axes and sizes of the mesh; None for a script.
        script: the path of the script.
        arguments: of the script.
        dtype: of floating tensors that the program makes without saying a dtype; "" for torch's.
        sizes: keyword arguments of the function.
        takes_mesh: whether the function takes the mesh.
    """

    function: Callable[..., Any] | None = None
    script: str = ""
    arguments: tuple[str, ...] = ()
    dtype: str = "float64"
    sizes: tuple[tuple[str, int], ...] = ()
    takes_mesh: bool = True


def run_ranks(function: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """Run a function on new ranks, and return the results by rank."""
    return launch(function, count, *args)


def observe_job(
    job: Job, axes: Mapping[str, int], count: int, observation: Observation
) -> list[RankRecord]:
    """Run a job under observation on new ranks.

    Args:
        job: the program.
        axes: the mesh that a function gets.
        count: the number of ranks.
        observation: choices of the run.

    Returns:
        The record of each rank.
    """
    port = _free_port()
    return run_ranks(_run_observed, count, job, dict(axes), port, observation)


def _run_observed(
    job: Job, axes: dict[str, int], port: int, observation: Observation
) -> RankRecord:
    """Run a job on this rank; the process ends afterwards, so hooks and defaults stay."""
    observer = Observer(observation)
    observer.install()
    if job.dtype:
        torch.set_default_dtype(getattr(torch, job.dtype))
    torch.manual_seed(_FIRST_SEED)
    if job.function is None:
        _run_script(job.script, job.arguments, port)
        returned = None
    elif job.takes_mesh:
        returned = job.function(axes, **dict(job.sizes))
    else:
        returned = job.function(**dict(job.sizes))
    return observer.finish(returned)


def _run_script(script: str, arguments: Sequence[str], port: int) -> None:
    """Run a script as torchrun does: no default group, and the environment of a rank."""
    rank = dist.get_rank()
    count = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def _free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
