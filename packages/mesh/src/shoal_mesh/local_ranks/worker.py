"""The processes of a rank pool: the fork server, which has torch imported, and its forked ranks.

A fork of a process that has torch imported starts in milliseconds, and a new interpreter in
seconds, so a pool that has lost a rank gets new ranks at once. The fork server starts no threads
and uses no device, so that forking it is safe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import signal
import sys
import traceback
from itertools import count
from multiprocessing.connection import Client, Connection
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._torch import PrefixStore, TCPStore
from ..accelerator import set_own_device
from ..groups.world import meet
from ..shared_memory.channel import give_up
from ..watch.processes import name_process, note_job
from .failures import Failure, failure_of
from .pickle_functions import dump

# option of prctl
_SET_PARENT_DEATH_SIGNAL = 1


class Job(NamedTuple):
    """One call, sent to all ranks.

    Attributes:
        function: the function, pickled by name or as code (`dump_function`).
        payload: pickled (args, kwargs), read when there is a default group.
        state: attributes of the test instance when the function is a method, None otherwise.
        path: `sys.path` of the parent.
        argv: `sys.argv` of the parent.
        cwd: working directory of the parent.
        store: port of the parent's store, and a prefix that no other job has.
        backend: backend of the default group; "" for none.
        pids: the process ids of all ranks, by rank.
        last: whether a rank ends when it has answered.
    """

    function: bytes
    payload: bytes
    state: dict[str, Any] | None
    path: list[str]
    argv: list[str]
    cwd: str
    store: tuple[int, str]
    backend: str
    pids: tuple[int, ...]
    last: bool


def serve_forks(preload: list[str]) -> None:
    """Import the modules that ranks need, then carry out every line of JSON on stdin.

    A line has the arguments of a rank to fork, or more modules to import. `module:function` in the
    place of a module is a function to call.

    Stdin closes when the parent ends; then the server ends its ranks and itself. The kernel's
    parent-death signal would not do, because it is sent at the end of the thread that has started
    this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_modules(preload)
    # discards the exit status of a rank, so that the rank does not stay as a zombie
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        if "preload" in order:
            _import_modules(order["preload"])
        elif os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run_rank(**order)
    # on Linux, the parent-death signal ends the ranks when this process ends
    if sys.platform != "linux":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # all processes of the server's session
        os.killpg(0, signal.SIGTERM)


def _import_modules(names: list[str]) -> None:
    for name in names:
        module_name, _, function_name = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            # a module that the program has made at run time cannot be imported
            continue
        if function_name:
            getattr(module, function_name)()
    # Otherwise a garbage collection in a rank would visit half a million objects of the server,
    # which takes 0.3 s and copies the pages of memory that ranks share with it.
    gc.freeze()


def _run_rank(rank: int, size: int, folder: str, show_output: bool) -> None:
    """Run one rank until the parent closes the connection in the folder; never return."""
    code = 1
    try:
        # on other systems the server ends its ranks when its stdin closes
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if not show_output:
            log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
        with open(f"{folder}/trace{rank}", "w") as stacks:
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            # no postmortem files: the pool reports the failure of every rank
            os.environ.setdefault("SHOAL_POSTMORTEM", "0")
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(size),
            )
            # The kernel closes the connection when this process ends, and the parent notices it.
            connection = Client(f"{folder}/s", family="AF_UNIX")
            connection.send((rank, os.getpid()))
            _serve(connection, rank, size)
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # without destructors, which would wait for other ranks that are gone
        os._exit(code)


def _serve(connection: Connection, rank: int, size: int) -> None:
    """Run the jobs that the parent sends, and send the answers."""
    torch.set_num_threads(1)
    for number in count(1):
        order = connection.recv_bytes()
        if not order:
            # the pool closes
            return
        name_process(number, returned=False)
        job = pickle.loads(order)
        note_job(job.pids)
        try:
            answer = dump((True, _run_job(job, rank, size, connection)))
        except BaseException as error:
            failure: Failure = failure_of(error)
            answer = pickle.dumps((False, failure))
            if not failure.skip:
                give_up(f"raised {failure.kind}: {failure.message[:200]}")
        sys.stdout.flush()
        sys.stderr.flush()
        name_process(number, returned=True)
        connection.send_bytes(answer)
        if job.last:
            return


def _run_job(job: Job, rank: int, size: int, connection: Connection) -> Any:
    """Run one job, and return its result."""
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    if os.getcwd() != job.cwd:
        os.chdir(job.cwd)
    # before the default group is made, because a program runs its imports before it communicates
    function = pickle.loads(job.function)
    # the first job of this rank, or the last job has destroyed the default group
    if job.backend and not dist.is_initialized():
        port, prefix = job.store
        store = TCPStore("127.0.0.1", port, is_master=False)
        set_own_device(rank, job.backend)
        dist.init_process_group(
            job.backend, store=PrefixStore(prefix, store), rank=rank, world_size=size
        )
        # The job may destroy the group at once, so wait until all ranks have made it.
        meeting = PrefixStore(f"{prefix}_met", store)
        meet(meeting, range(size), rank, None, where="the start of a job")
    torch.manual_seed(0)
    random.seed(0)
    # hypothesis: a function with @given around @on_ranks holds the inner test
    function = getattr(getattr(function, "hypothesis", None), "inner_test", function)
    body = getattr(function, "__shoal_body__", function)
    args, kwargs = pickle.loads(job.payload)
    # an empty message: the function is loaded, and the time limit of the parent starts
    connection.send_bytes(b"")
    if job.state is not None:
        return _call_method(job, body, args, kwargs)
    return body(*args, **kwargs)


def _call_method(job: Job, body: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a test method on an instance like the parent's."""
    name_of_class = body.__qualname__.rpartition(".")[0]
    owner = attrgetter(name_of_class)(sys.modules[body.__module__])
    instance = object.__new__(owner)
    instance.__dict__.update(job.state or {})
    # `subTest` of unittest reads this attribute
    instance.__dict__.setdefault("_outcome", None)
    getattr(instance, "set_up_rank", lambda: None)()
    try:
        return body(instance, *args, **kwargs)
    finally:
        getattr(instance, "tear_down_rank", lambda: None)()
