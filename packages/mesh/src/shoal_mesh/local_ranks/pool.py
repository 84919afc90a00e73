"""RankPool: local ranks that stay up and run functions, and the process that forks them.

The parent sends a function to all ranks and collects the results. A failure is raised as one error
with every rank's traceback. If a rank does not return in time, it dumps its stack (faulthandler),
the error contains the stack, and the next call starts new ranks. Ports are chosen by the system,
and ranks end when the parent does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections.abc import Callable, Collection
from functools import cache
from itertools import count
from math import inf
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from .._torch import TCPStore
from ..accelerator import default_backend
from ..argument_types import require
from ..errors import MeshError, MeshTypeError, RankError
from .failures import Failure, Outcome, report
from .pickle_functions import dump, dump_function, refuse_while_loading
from .vain_waits import VainWaits
from .worker import Job

R = TypeVar("R")
# numbers of the jobs of this process
_JOBS = count()
# seconds for the ranks to import the modules of the function, before its time limit starts
_LOADING = 120.0
# seconds that the other ranks get once one has failed, because they may wait for it forever
_GRACE = 5.0

# Modules that are slow to import. If the parent has imported one of them, the fork server imports
# it once, before it forks ranks. (The families include vendored packages.)
_SLOW_IMPORTS = ["hypothesis", "transformers", "torch._dynamo", "torch.distributed.checkpoint"]
_SLOW_IMPORTS += ["pytest", "torch.testing._internal.common_methods_invocations"]  # of tests
_LAYERS = (
    "mesh",
    "dtensor",
    "data_parallel",
    "context_parallel",
    "tp_styles",
    "models",
    "lab",
    "same_bits",
    "shard_api",
)
# before the names of the layers; "" where this package is not vendored
_PREFIX = __package__.partition("shoal_")[0]
_SLOW_FAMILIES = (
    "transformers.models.",
    *(f"{_PREFIX}shoal_{layer}" for layer in _LAYERS),
)
# layer -> its function that does a part of its first use, which would take 23 MiB of each rank
_FIRST_USES = {"dtensor": "before_fork:prepare_dispatch"}


class ForkServer:
    """The process that ranks are forked from; one per parent, started with the first pool."""

    _running: ForkServer | None = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self.parent: int = os.getpid()
        self._loaded: set[str] = set()
        python_path = os.pathsep.join(filter(None, sys.path))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
        if sys.platform == "linux":
            # gloo would look up the host name, which need not resolve
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        preload = slow_imports()
        if "pytest" in sys.modules:
            # it imports modules that tests of optimizers and of compiled steps need
            preload.append("torch._inductor.pattern_matcher")
        program = f"from {__package__}.worker import serve_forks; serve_forks({preload!r})"
        # The server has a session of its own, so that Ctrl-C only interrupts the parent.
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            env=env,
            text=True,
            start_new_session=True,
        )
        # the store of the parent, in which the ranks of all its pools make their default groups
        self.store: TCPStore = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        atexit.register(self.close)

    @classmethod
    def get(cls) -> ForkServer:
        """Return the fork server of this process, alive."""
        with cls._lock:
            server = cls._running
            if server is None or server.parent != os.getpid() or server.process.poll() is not None:
                server = cls()
                cls._running = server
            return server

    def preload(self, names: Collection[str]) -> None:
        """Import modules before ranks are forked that need them.

        Args:
            names: the modules; they must start no threads and use no device. `module:function` is
                a function that is called too.
        """
        missing = sorted(set(names) - self._loaded)
        self._loaded.update(missing)
        if missing:
            self.fork(preload=missing)

    def fork(self, **order: object) -> None:
        """Send an order to the server: fork a rank, or import modules.

        Args:
            **order: the arguments of `worker._run_rank`, or `preload` with the names of modules.
        """
        assert self.process.stdin is not None, "opened with a pipe"
        # several threads may have pools
        with self._lock:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the server and its ranks."""
        if self.parent == os.getpid() and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def slow_imports() -> list[str]:
    """Return the slow modules that this process has imported, and functions of first uses."""
    names = [name for name in sys.modules if _is_slow_import(name)]
    for layer, function in _FIRST_USES.items():
        package = f"{_PREFIX}shoal_{layer}"
        if package in sys.modules:
            names.append(f"{package}.{function}")
    return names


def _is_slow_import(name: str) -> bool:
    """Return whether a module is one that is imported once, before ranks are forked."""
    return name in _SLOW_IMPORTS or name.startswith(_SLOW_FAMILIES)


class RankAnswer(NamedTuple):
    """The answer of a rank to a job.

    Attributes:
        is_result: whether the function has returned.
        value: its result, or the `Failure`.
    """

    is_result: bool
    value: Any


class JobAnswers(NamedTuple):
    """The answers to a job.

    Attributes:
        by_rank: the answers, by rank.
        hung: the ranks that did not answer.
        limit: their time limit in words.
    """

    by_rank: dict[int, RankAnswer]
    hung: tuple[int, ...]
    limit: str


class RankPool:
    """A number of ranks on this machine, with a default process group.

    Args:
        size: number of ranks.
        backend: the backend of the default group. By default it is `gloo` for the CPU, and the
            backend of the accelerator if every rank has a device: `cpu:gloo,cuda:nccl` with GPUs.
        show_output: whether the ranks print to the output of the parent; otherwise their output is
            shown with a failure.
        once: whether a rank ends when it has returned, as under torchrun, so that ranks that wait
            for it raise.

    Raises:
        MeshTypeError: the size is not an integer.
        MeshError: the size is not positive.

    Example:
        >>> with RankPool(2) as pool:
        ...     pool.run(max, 1, 2)
        [2, 2]
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str | None = None,
        show_output: bool = False,
        once: bool = False,
    ) -> None:
        require(size, int, "a pool has a number of ranks")
        require(backend, str | None, "a backend is named by a string, such as 'gloo'")
        if size < 1:
            raise MeshError(f"a pool needs at least one rank, got {size}")
        # an int for the environment variables of the ranks, also for True
        self.size = int(size)
        self.backend: str = backend or default_backend(size)
        self._show_output = show_output
        self._once = once
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._folder: Path | None = None
        # bytes that each rank had printed before this job
        self._printed: dict[int, int] = {}
        self._lock = threading.RLock()
        self._parent = os.getpid()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, timeout: float = 120.0) -> None:
        """Start the ranks if they are not up; `run` does it too.

        Raises:
            RankError: the ranks did not come up in time, or a rank would start ranks because it
                imports the main script.
        """
        if self._connections and self._parent == os.getpid():
            return
        refuse_while_loading()
        self._parent = os.getpid()
        self._folder = Path(tempfile.mkdtemp(prefix="shoal_"))
        server = ForkServer.get()
        atexit.unregister(self.close)
        # Registered after the server's `close`, so that it runs before it: idle ranks then leave by
        # themselves.
        atexit.register(self.close)
        connections: dict[int, Connection] = {}
        pids: dict[int, int] = {}
        with Listener(str(self._folder / "s"), family="AF_UNIX", backlog=self.size) as listener:
            for rank in range(self.size):
                server.fork(
                    rank=rank,
                    size=self.size,
                    folder=str(self._folder),
                    show_output=self._show_output,
                )
            # `accept` of a Listener has no timeout
            socket: Any = listener._listener._socket  # type: ignore[attr-defined]  # private
            socket.settimeout(timeout)
            while len(connections) < self.size:
                try:
                    connection = listener.accept()
                except TimeoutError as error:
                    late = [rank for rank in range(self.size) if rank not in connections]
                    raise RankError(
                        f"ranks {late} of {self.size} did not start in {timeout:.0f} s"
                    ) from error
                rank, pid = connection.recv()
                connections[rank] = connection
                pids[rank] = pid
        self._connections = [connections[rank] for rank in range(self.size)]
        self._pids = [pids[rank] for rank in range(self.size)]

    def run(
        self, function: Callable[..., R], *args: Any, timeout: float | None = 60.0, **kwargs: Any
    ) -> list[R]:
        """Run a function on every rank, and return the results by rank.

        Args:
            function: imported on the ranks by module (or file) and name; lambdas and inner
                functions are sent as code.
            *args: the arguments of `function`, pickled.
            timeout: seconds until ranks that have not returned count as hung; None waits.
            **kwargs: the keyword arguments of `function`, pickled.

        Raises:
            MeshTypeError: `function` is not a function, or arguments cannot be pickled.
            RankError: `function` failed or did not return on some rank.
            unittest.SkipTest: `function` asked to be skipped on every rank.
        """
        return self._run_on_ranks(function, args, kwargs, state=None, timeout=timeout)

    def _run_on_ranks(
        self,
        function: Callable[..., R],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        state: dict[str, Any] | None,
        timeout: float | None,
    ) -> list[R]:
        """Run a function on every rank, as `run` does.

        Args:
            function: the function.
            args: the arguments of `function`.
            kwargs: the keyword arguments of `function`.
            state: if `function` is a test method, the attributes of its instance; None otherwise.
            timeout: seconds until ranks that have not returned count as hung; None waits.
        """
        code = dump_function(function)
        try:
            payload = dump((args, kwargs))
        except MeshTypeError as error:
            raise MeshTypeError(
                f"arguments of {function.__qualname__} cannot be sent to ranks: {error}"
            ) from error
        with self._lock:
            self.start()
            self._printed = {}
            for rank in range(self.size):
                log = self._file("log", rank)
                if log.exists():
                    self._printed[rank] = log.stat().st_size
            job = Job(
                function=code,
                payload=payload,
                state=state,
                path=list(sys.path),
                argv=list(sys.argv),
                cwd=os.getcwd(),
                store=(ForkServer.get().store.port, f"job{os.getpid()}_{next(_JOBS)}"),
                backend=self.backend,
                pids=tuple(self._pids),
                last=self._once,
            )
            try:
                answers, hung, limit = self._collect(pickle.dumps(job), timeout)
            except BaseException:
                # an interrupt by Ctrl-C, for example: the ranks may be inside of a collective
                self._kill()
                raise
            failures = {
                rank: answer.value for rank, answer in answers.items() if not answer.is_result
            }
        if failures or hung:
            self._raise(function.__qualname__, failures, hung, limit)
        if self._once:
            self._kill()
        return [answers[rank].value for rank in range(self.size)]

    def _collect(self, job: bytes, timeout: float | None) -> JobAnswers:
        """Send a job to all ranks, and collect their answers."""
        answers = self._send(job)
        pairs = zip(self._connections, range(self.size), strict=True)
        waiting = {connection: rank for connection, rank in pairs if rank not in answers}
        starting = set(waiting.values())
        deadline = time.monotonic() + _LOADING
        vain_waits = VainWaits(self._stacks)
        limit = f"in {timeout:g} s" if timeout is not None else "in time"
        while waiting:
            has_failure = not all(answer.is_result for answer in answers.values())
            if has_failure:
                limit = f"within {_GRACE:.0f} s of that"
                deadline = min(deadline, time.monotonic() + _GRACE)
            seconds = max(0.0, deadline - time.monotonic())
            if answers:
                seconds = min(seconds, vain_waits.seconds_to_next())
            ready = wait(list(waiting), None if seconds == inf else seconds)
            if not ready:
                if time.monotonic() >= deadline:
                    break
                pids = {rank: self._pids[rank] for rank in waiting.values()}
                if vain_waits.are_seen(pids):
                    limit = "and waited in a collective for ranks that had"
                    break
                continue
            was_starting = bool(starting)
            starting -= self._receive_all(ready, waiting, answers)
            if was_starting and not starting:
                # the time of the function begins when all ranks have loaded it
                deadline = time.monotonic() + (inf if timeout is None else timeout)
        return JobAnswers(answers, tuple(sorted(waiting.values())), limit)

    def _send(self, job: bytes) -> dict[int, RankAnswer]:
        """Send a job to all ranks; return the answers of ranks whose processes have ended."""
        answers: dict[int, RankAnswer] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(job)
            except OSError:
                answers[rank] = RankAnswer(False, self._death(rank))
        return answers

    def _receive_all(
        self,
        ready: Collection[object],
        waiting: dict[Connection, int],
        answers: dict[int, RankAnswer],
    ) -> set[int]:
        """Read one message of each rank that has sent one; return these ranks.

        Answers are moved from `waiting` to `answers`.
        """
        received: set[int] = set()
        for connection, rank in list(waiting.items()):
            if connection not in ready:
                continue
            received.add(rank)
            answer = self._receive(connection, rank)
            if answer is not None:
                del waiting[connection]
                answers[rank] = answer
        return received

    def _receive(self, connection: Connection, rank: int) -> RankAnswer | None:
        """Return the answer of a rank.

        Returns None if the rank reports that it has loaded the function and begins.
        """
        try:
            data = connection.recv_bytes()
            if not data:
                return None
            is_result, value = pickle.loads(data)
            return RankAnswer(is_result, value)
        except (EOFError, OSError):
            return RankAnswer(False, self._death(rank))
        except Exception as error:
            # a result whose class this process cannot load
            message = f"cannot read the result: {error}"
            return RankAnswer(False, Failure(type(error).__name__, message, f"{error!r}\n"))

    def _death(self, rank: int) -> Failure:
        """Return the failure of a rank whose process has ended."""
        trace = f"the process of rank {rank} (pid {self._pids[rank]}) ended\n"
        return Failure("RankDied", "the process ended", trace)

    def _raise(
        self, name: str, failures: dict[int, Failure], hung: tuple[int, ...], limit: str
    ) -> NoReturn:
        """Raise the failures of the ranks as one error; the next run starts new ranks."""
        if len(failures) == self.size and all(failure.skip for failure in failures.values()):
            raise unittest.SkipTest(failures[0].message)
        stacks = self._stacks(hung)
        printed = {rank: self._read("log", rank)[-4000:] for rank in sorted({*failures, *hung})}
        self._kill()
        outcome = Outcome(name, self.size, failures, stacks, printed=printed, limit=limit)
        messages = {rank: failure.message for rank, failure in failures.items()}
        cause = _first_error(failures.values())
        raise RankError(report(outcome), messages, hung) from cause

    def _stacks(self, hung: tuple[int, ...]) -> dict[int, str]:
        """Return the stack of each hung rank, as faulthandler dumps it."""
        if not hung:
            return {}
        before = {rank: len(self._read("trace", rank)) for rank in hung}
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], signal.SIGUSR1)

        def read() -> dict[int, str]:
            return {rank: self._read("trace", rank)[before[rank] :] for rank in hung}

        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(read().values()):
            time.sleep(0.02)
        # time for the last rank to write the rest of its stack
        time.sleep(0.05)
        return read()

    def _file(self, kind: str, rank: int) -> Path:
        """Return the path of a rank's file: its `log` or its `trace`."""
        return (self._folder or Path()) / f"{kind}{rank}"

    def _read(self, kind: str, rank: int) -> str:
        """Return the text of a rank's file; '' if there is none.

        The text of a log begins with the present job.
        """
        start = self._printed.get(rank, 0) if kind == "log" else 0
        try:
            data = self._file(kind, rank).read_bytes()
        except OSError:
            return ""
        return data[start:].decode(errors="replace")

    def close(self) -> None:
        """End the ranks; the next `run` starts new ones."""
        # a forked copy of the parent does not own the ranks
        if self._parent == os.getpid():
            with contextlib.suppress(OSError):
                for connection in self._connections:
                    # idle ranks leave by themselves
                    connection.send_bytes(b"")
                # ranks end in milliseconds, except under a coverage tool
                deadline = time.monotonic() + 10.0
                for connection in self._connections:
                    connection.poll(max(0.0, deadline - time.monotonic()))
            self._kill()

    def _kill(self) -> None:
        """End the ranks at once, whatever they are doing."""
        for connection in self._connections:
            connection.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._connections = []
        self._pids = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _first_error(failures: Collection[Failure]) -> Exception | None:
    """Return the first error that can be unpickled, of a rank that failed by itself if possible."""
    victims_last = sorted(failures, key=lambda failure: failure.is_victim)
    for failure in victims_last:
        if failure.error is not None:
            error: Exception = pickle.loads(failure.error)
            return error
    return None


@cache
def kept_pool(size: int, *, backend: str | None, show_output: bool) -> RankPool:
    """Return the pool of some number of ranks that this process keeps until it ends."""
    return RankPool(size, backend=backend, show_output=show_output)
