"""`lab`: run any distributed program on one machine, on ranks that are processes or threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from ..argument_types import FUNCTION, require, require_each
from ..errors import MeshError
from ..local_ranks.pool import ForkServer
from .c10d.backend import NAME, installed
from .c10d.link import RankFacts
from .isolation.process_ranks import RunSettings, run_on_processes
from .isolation.thread_world import RankLink, worlds_of_threads
from .isolation.threads import Conductor, run_on_threads
from .programs import imports_of, loaded_modules, run_program
from .rank_state import RankState, environment_of

T = TypeVar("T")
Isolation = Literal["process", "thread"]


class Lab:
    """Ranks on this machine, which are made again for each run; `lab` creates one.

    Args:
        ranks: number of ranks.
        isolation: `process` or `thread`.
        seed: the seed of the random choices, and of torch's generators. A choice decides which rank
            runs next, and is made each time that several ranks can continue.
        order: the first choices, in place of random ones: the rank that runs next, for one choice
            after the other.
        device: `cpu` to run programs for an accelerator on the CPU, or None.
        show_output: whether ranks that are processes print to the output of this process.

    Attributes:
        choices: the choices of the last run. Another lab with this `order` repeats the run.

    Example:
        >>> ranks = lab(2, isolation="thread")
        >>> ranks.run(dist.get_rank)
        [0, 1]
        >>> lab(2, isolation="thread", order=ranks.choices).run(dist.get_rank)
        [0, 1]
    """

    def __init__(
        self,
        ranks: int,
        isolation: Isolation,
        *,
        seed: int,
        order: Sequence[int],
        device: str | None,
        show_output: bool,
    ) -> None:
        self.ranks = ranks
        self.isolation = isolation
        self.seed = seed
        self.order = tuple(order)
        self.device = device
        self.show_output = show_output
        self.choices: list[int] = []

    def run(
        self, function: Callable[..., T], *args: Any, world: bool = True, **kwargs: Any
    ) -> list[T]:
        """Run a function on every rank, and return the results by rank.

        Args:
            function: the function; ranks that are processes import it by name, or get its code.
            *args: its arguments.
            world: whether the default group is initialized before the call.
            **kwargs: its keyword arguments.

        Returns:
            The results by rank.

        Raises:
            DeadlockError: the ranks wait for each other.
            LockstepError: ranks call different collectives.
            RankError: on ranks that are processes, with the error of a rank as its cause.
            Exception: on ranks that are threads, the error of the first rank that failed.

        Example:
            >>> def total() -> float:
            ...     value = torch.tensor(float(dist.get_rank()))
            ...     dist.all_reduce(value)
            ...     return value.item()
            >>> lab(4, isolation="thread").run(total)
            [6.0, 6.0, 6.0, 6.0]
        """
        allowed = "a lab runs a function"
        require(function, FUNCTION, allowed)
        if self.isolation == "process":
            return self._run_on_processes(function, (args, kwargs), world)
        return self._run_on_threads(lambda: function(*args, **kwargs), world)

    def run_script(
        self, program: str, arguments: Sequence[str] = (), *, is_module: bool = False
    ) -> None:
        """Run a script as torchrun does: each rank is its main program, and the environment is set.

        Args:
            program: the path of the script, or the name of a module.
            arguments: its command-line arguments.
            is_module: whether `program` is the name of a module.

        Raises:
            MeshError: the ranks of this lab are threads, which share the main module; or the script
                has ended with an error status.
            DeadlockError: the ranks wait for each other.
            LockstepError: ranks call different collectives.
            Exception: the exception of the script on a rank.

        Example:
            >>> lab(2).run_script("train.py", ["--steps", "3"])  # doctest: +SKIP
        """
        require(program, str, "a lab runs the script of a path")
        require_each(arguments, str, "the arguments of a script are strings")
        if self.isolation != "process":
            raise MeshError(
                "threads share the main module, so a script needs ranks that are processes: "
                "lab(ranks, isolation='process')"
            )
        ForkServer.get().preload(imports_of(program, is_module=is_module))
        self.run(run_program, program, tuple(arguments), is_module=is_module, world=False)

    def _run_on_processes(
        self, function: Callable[..., T], arguments: tuple[Any, Any], world: bool
    ) -> list[T]:
        ForkServer.get().preload(loaded_modules())
        settings = RunSettings(
            self.ranks,
            self.seed,
            self.order,
            device=self.device,
            world=world,
            environment=dict(os.environ),
        )
        results, self.choices = run_on_processes(
            settings, function, arguments, show_output=self.show_output
        )
        return results

    def _run_on_threads(self, function: Callable[[], T], world: bool) -> list[T]:
        conductor = Conductor(self.ranks, seed=self.seed, order=self.order)
        conductor.capture = RankState.capture
        torch_seed = self.seed

        def run() -> T:
            torch.manual_seed(torch_seed)
            with torch.autograd.set_multithreading_enabled(False):
                return call_in_world(function, world)

        present = RankState.capture()
        links = []
        states = []
        for rank in range(self.ranks):
            suffix = f"@{id(conductor):x}.{rank}"
            facts = RankFacts(rank, self.ranks, self.device, suffix)
            links.append(RankLink(facts, conductor))
            states.append(present.with_environment(environment_of(rank, self.ranks)))
        try:
            with installed(), worlds_of_threads():
                return run_on_threads([run] * self.ranks, links, states)
        finally:
            self.choices = conductor.scheduler.choices

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: ranks end with the run that made them."""

    def __repr__(self) -> str:
        return f"Lab({self.ranks} ranks, isolation={self.isolation!r}, seed={self.seed})"


def call_in_world(function: Callable[[], T], world: bool) -> T:
    """Call a function on a rank, with a default group if asked, and destroy its groups.

    Args:
        function: the function.
        world: whether to initialize the default group.
    """
    if world:
        dist.init_process_group(NAME)
    try:
        return function()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lab(
    ranks: int,
    isolation: Isolation = "process",
    seed: int = 0,
    *,
    order: Sequence[int] = (),
    device: str | None = None,
    show_output: bool = False,
) -> Lab:
    """Return a lab: ranks on this machine that run distributed programs unchanged.

    Every collective, message and store of c10d works, whatever backend the program asks for. A
    deadlock or a mismatched collective is raised at once, with the place of every rank.

    Args:
        ranks: number of ranks.
        isolation: `process` for any program; `thread` for programs without state per rank in
            modules and without threads of their own, in which one rank runs at a time.
        seed: the seed of the random choices, and of torch's generators on every rank. A choice
            decides which rank runs next, and is made each time that several ranks can continue.
        order: the first choices, in place of random ones: the rank that runs next, for one choice
            after the other. Ranks then run one at a time. The `choices` of a run repeat it.
        device: `cpu` to run programs for CUDA on the CPU; None for the devices that the program
            names. On ranks that are processes everything that names CUDA is mapped to the CPU, also
            `torch.cuda`. On threads, which share torch with this process, only the backends of
            groups are mapped.
        show_output: whether ranks that are processes print to the output of this process.

    Raises:
        MeshTypeError: an argument of a wrong type.
        MeshError: no positive number of ranks, or no such isolation, rank or device.

    Example:
        >>> with lab(2, isolation="thread") as ranks:
        ...     ranks.run(dist.get_rank)
        [0, 1]
    """
    require(ranks, int, "a lab has a number of ranks")
    require(seed, int, "the seed of a lab is an integer")
    require_each(order, int, "the order of a lab is a sequence of ranks")
    require(device, str | None, "the device of a lab is 'cpu' or None")
    if ranks < 1:
        raise MeshError(f"a lab needs at least one rank, got {ranks}")
    if isolation not in ("process", "thread"):
        raise MeshError(f"the isolation of a lab is 'process' or 'thread', got {isolation!r}")
    if device not in (None, "cpu"):
        raise MeshError(f"the device of a lab is 'cpu' or None, got {device!r}")
    if any(not 0 <= rank < ranks for rank in order):
        raise MeshError(f"the order of a lab of {ranks} ranks has ranks below, got {list(order)}")
    return Lab(ranks, isolation, seed=seed, order=order, device=device, show_output=show_output)
