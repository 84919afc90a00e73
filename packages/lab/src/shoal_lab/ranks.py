"""Ranks that run a program under observation: the only module that starts processes.

May import: errors, observe, records, script_arguments.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal_mesh.lab import lab

from .errors import CertifyError
from .observe.observer import Observation, ProgramObserver
from .records import RankRecord
from .script_arguments import fill_axes

# the seed that torch's generator has in a new process
_FIRST_SEED = 67280421310721


@dataclass(frozen=True, slots=True)
class RankJob:
    """A program for ranks: a function of the mesh, or a script with arguments.

    Attributes:
        function: a function that is called with the axes and sizes of the mesh; None for a script.
        script: the path of the script; "" for a function.
        arguments: the arguments of the script; `{tp}` stands for the size of the axis tp.
        dtype: the default dtype of the run; "" for torch's.
        sizes: keyword arguments of the function as pairs of a name and an integer, for example
            ("layers", 2). They are the sizes of the program, which shrinking makes smaller.
        takes_mesh: whether the function gets the axes and sizes of the mesh as its first argument.
        device: "cpu" to map accelerators to the CPU.
    """

    function: Callable[..., Any] | None = None
    script: str = ""
    arguments: tuple[str, ...] = ()
    dtype: str = "float64"
    sizes: tuple[tuple[str, int], ...] = ()
    takes_mesh: bool = True
    device: str | None = None


def run_ranks(
    function: Callable[..., Any], count: int, *args: Any, world: bool, device: str | None = None
) -> list[Any]:
    """Run a function on new ranks, and return the results by rank.

    Args:
        function: the function, which runs in one process per rank.
        count: the number of ranks.
        *args: the arguments of the function.
        world: whether the default process group is initialized before the call.
        device: "cpu" to map accelerators to the CPU; None for the devices that the program names.
    """
    # The first optimizer of a rank imports this module, which takes seconds. Ranks are forks of a
    # server process (shoal_mesh/local_ranks/worker.py). The server imports this module before it
    # forks, but only if this process has imported it.
    importlib.import_module("torch._dynamo")
    # A lab runs functions or scripts on ranks that it starts.
    return lab(count, isolation="process", device=device).run(function, *args, world=world)


@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """A program that runs without observation.

    Attributes:
        script: the path of a script, or the name of a module.
        arguments: its arguments, which are passed as they are.
        is_module: whether `script` is the name of a module.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool


def run_script_on_ranks(program: ScriptProgram, choices: tuple[int, str | None]) -> None:
    """Run a program as torchrun does, without observation.

    Args:
        program: the program.
        choices: the number of ranks, and "cpu" to map accelerators to the CPU or None.
    """
    if not program.is_module and not os.path.isfile(program.script):
        raise CertifyError(f"the script {program.script} does not exist")
    count, device = choices
    lab(count, isolation="process", device=device, show_output=True).run_script(
        program.script, program.arguments, is_module=program.is_module
    )


def observe_job(
    job: RankJob, axes: Mapping[str, int], count: int, observation: Observation
) -> list[RankRecord]:
    """Run a job under observation on new ranks.

    Args:
        job: the program.
        axes: the mesh that is passed to a function: sizes of the axes by name.
        count: the number of ranks.
        observation: the choices of the run.

    Returns:
        The record of each rank.
    """
    # A script initializes its process group itself, as under torchrun.
    has_world = job.function is not None
    arguments = (job, dict(axes), observation)
    return run_ranks(_run_observed, count, *arguments, world=has_world, device=job.device)


def _run_observed(job: RankJob, axes: dict[str, int], observation: Observation) -> RankRecord:
    """Run a job on this rank.

    The process ends afterwards, so hooks are not removed and defaults are not restored.
    """
    observer = ProgramObserver(observation)
    observer.install()
    if job.dtype:
        torch.set_default_dtype(getattr(torch, job.dtype))
    torch.manual_seed(_FIRST_SEED)
    if job.function is None:
        _run_script(job.script, fill_axes(job.arguments, axes))
        returned = None
    elif job.takes_mesh:
        returned = job.function(axes, **dict(job.sizes))
    else:
        returned = job.function(**dict(job.sizes))
    return observer.finish(returned)


def _run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script as the main program of a rank.

    The process that forked the rank has set the environment variables of torchrun, such as RANK.
    """
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise CertifyError(f"{script} has ended with the status {end.code}") from end
