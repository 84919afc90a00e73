"""Ranks as processes, forked by the fork server of this process."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from ...errors import RankError
from ...local_ranks.pickle_functions import dump, dump_function
from ...local_ranks.pool import RankPool
from ..c10d.backend import NAME, install
from ..c10d.link import RankFacts, enter_process
from ..rank_state import environment_of
from .arena import create_file
from .coordinator import Coordinator
from .cuda_on_cpu import map_cuda_to_cpu
from .process_link import ProcessLink

T = TypeVar("T")


class RunSettings(NamedTuple):
    """The settings of a run, which are sent to all ranks.

    Attributes:
        size: number of ranks.
        seed: the seed of torch's and Python's generators, and of the scheduler.
        order: choices with which the scheduler begins, to replay a run; later choices are random.
        device: the device type that stands for every accelerator. With "cpu", tensors of "cuda" are
            in the memory of the CPU. None leaves devices as they are.
        world: whether the default group is initialized before the call.
        environment: the environment variables of the parent.
        address: the path of the coordinator's socket.
        files: the paths of the files of all ranks.
    """

    size: int
    seed: int
    order: tuple[int, ...]
    device: str | None
    world: bool
    environment: dict[str, str]
    address: str = ""
    files: tuple[str, ...] = ()


class _LabPool(RankPool):
    """Processes for the ranks of one run, without a default group of their own."""

    def __init__(self, size: int, *, show_output: bool) -> None:
        # Without a backend here, the pool would look for the devices of this machine.
        super().__init__(size, backend=NAME, show_output=show_output, once=True)
        # A worker without a backend does not initialize a default group: `_call` does.
        self.backend = ""


def run_on_processes(
    settings: RunSettings,
    function: Callable[..., T],
    arguments: tuple[Any, Any],
    *,
    show_output: bool,
) -> tuple[list[T], list[int]]:
    """Return the results of a function on ranks that are processes, and the scheduler's choices.

    Args:
        settings: the settings of the run, without the address and the files.
        function: the function.
        arguments: its arguments, and its keyword arguments.
        show_output: whether the ranks print to the output of this process.

    Raises:
        RankError: ranks failed by errors that cannot be pickled, or were killed.
        Exception: the error of the first rank that did not fail because of another rank.
    """
    code = dump_function(function)
    payload = dump(arguments)
    folder = tempfile.mkdtemp(prefix="shoal_lab_")
    files = [create_file(folder, rank) for rank in range(settings.size)]
    address = f"{folder}/s"
    coordinator = Coordinator(address, settings.size, seed=settings.seed, order=settings.order)
    settings = settings._replace(address=address, files=tuple(file.path for file in files))
    try:
        with _LabPool(settings.size, show_output=show_output) as pool:
            results = pool.run(run_rank, settings, code, payload, timeout=None)
        return results, coordinator.scheduler.choices
    except RankError as error:
        _raise_cause(error)
    finally:
        coordinator.close()
        shutil.rmtree(folder, ignore_errors=True)
        for file in files:
            os.close(file.descriptor)


def _raise_cause(error: RankError) -> NoReturn:
    """Raise the error that caused the failures of all ranks, with the report as its note."""
    cause = error.__cause__
    if cause is None:
        raise error
    cause.add_note(str(error))
    raise cause from None


def run_rank(settings: RunSettings, code: bytes, payload: bytes) -> Any:
    """Run a function on this process as a rank of a lab, and return its result.

    Args:
        settings: the settings of the run.
        code: the pickled function.
        payload: the pickled arguments.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(settings.environment | environment_of(rank, settings.size))
    if settings.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        map_cuda_to_cpu(rank, settings.size)
    facts = RankFacts(rank, settings.size, settings.device)
    link = ProcessLink(facts, settings.address, settings.files)
    # All threads of this process communicate by `link`, and groups get the backend of the lab.
    enter_process(link)
    install()
    try:
        result = _call(settings, code, payload)
    except BaseException as error:
        link.leave(f"raised {type(error).__name__}: {str(error)[:200]}", failed=True)
        raise
    link.leave("has returned", failed=False)
    return result


def _call(settings: RunSettings, code: bytes, payload: bytes) -> Any:
    """Seed the generators, and call the function with its arguments in a world if requested."""
    function = pickle.loads(code)
    args, kwargs = pickle.loads(payload)
    torch.manual_seed(settings.seed)
    random.seed(settings.seed)
    if settings.world:
        dist.init_process_group(NAME)
    result = function(*args, **kwargs)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
