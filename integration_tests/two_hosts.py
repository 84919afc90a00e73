"""Two hosts on this machine, and a link that may be slow or lost.

They have network, process and host-name spaces of their own.

    python integration_tests/two_hosts.py [--per-host N] [--rate 1gbit] [KIB ...]

Prints times of collectives of all ranks of both hosts, as they are and by gloo alone. Needs Linux,
root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PORT = "29517"


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Two hosts that are connected.

    Attributes:
        names: of their network namespaces.
    """

    names: tuple[str, str]

    def disconnect(self) -> None:
        """Take the link away."""
        _do("ip", "-n", self.names[0], "link", "set", "eth0", "down")

    @contextmanager
    def running(
        self, job: str, per_host: int, *arguments: str
    ) -> Iterator[list[subprocess.Popen[str]]]:
        """One process a host, each with `per_host` ranks that run a job.

        The job is `run(*arguments)` of a module.
        """
        inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts")
        ranks = (
            sys.executable,
            "-m",
            "integration_tests.two_hosts",
            "--job",
            job,
            "--per-host",
            str(per_host),
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        with ExitStack() as stack:
            processes = []
            for host, name in enumerate(self.names):
                command = (
                    "ip",
                    "netns",
                    "exec",
                    name,
                    *inside,
                    *ranks,
                    "--host",
                    str(host),
                    *arguments,
                )
                into = subprocess.PIPE
                process = subprocess.Popen(
                    command, stdout=into, stderr=subprocess.STDOUT, text=True, env=env
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
            yield processes

    def run(self, job: str, per_host: int, *arguments: str, timeout: float = 120) -> str:
        """What the ranks of both hosts print."""
        with self.running(job, per_host, *arguments) as processes:
            return "".join(process.communicate(timeout=timeout)[0] for process in processes)


@contextmanager
def two_hosts(rate: str = "") -> Iterator[Hosts]:
    """Two hosts, 10.99.0.1 and 10.99.0.2, which are gone afterwards.

    Args:
        rate: of the link, such as "1gbit"; by default as fast as memory.

    Raises:
        OSError, subprocess.CalledProcessError: this machine has no namespaces for us.
    """
    names = (f"shoal_a{os.getpid()}", f"shoal_b{os.getpid()}")
    with ExitStack() as stack:
        for name in names:
            _do("ip", "netns", "add", name)
            stack.callback(_do, "ip", "netns", "del", name)
        _do(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for i, name in enumerate(names):
            _do("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do("ip", "-n", name, "link", "set", device, "up")
            if rate:
                shape = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
                _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape)
        _do(
            "ip",
            "netns",
            "exec",
            names[0],
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--uts",
            "true",
        )
        yield Hosts(names)


def _start_ranks(host: int, job: str, per_host: int, arguments: list[str]) -> None:
    """On a host: one process per rank, until all have ended.

    They are forked, so the host imports the job once.
    """
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(per_host),
        "WORLD_SIZE": str(2 * per_host),
        "OMP_NUM_THREADS": "1",
    }
    os.environ |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
    module = importlib.import_module(job)
    for local in range(per_host):
        if os.fork() == 0:
            os.environ |= {"RANK": str(host * per_host + local), "LOCAL_RANK": str(local)}
            try:
                module.run(*arguments)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    for _ in range(per_host):
        os.wait()


def begin(timeout: float) -> int:
    """Begin the world of a rank; returns its number."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return dist.get_rank()


def run(*sizes: str) -> None:
    """The job that takes times of messages of so many KiB.

    A time is the fastest of some runs on the slowest rank.
    """
    import torch
    import torch.distributed as dist

    from shoal_mesh import all_gather, all_reduce, broadcast, comm_over, reduce_scatter
    from shoal_mesh.collectives import c10d_transport

    rank, least = begin(60), (0, 1 << 62)
    comm = comm_over(tuple(range(dist.get_world_size())))
    runs: dict[str, Callable[[Any], object]] = {
        "all_reduce": lambda x: all_reduce(x, comm),
        "reduce_scatter": lambda x: reduce_scatter(x, comm),
        "all_gather": lambda x: all_gather(x[: x.numel() // comm.size], comm),
        "broadcast": lambda x: broadcast(x, comm, 1),
    }
    for kib in map(int, sizes):
        x, times = torch.zeros(kib << 8), {}
        for name, collective in runs.items():
            best = [float("inf"), float("inf")]
            for i in range(40 if kib < 4096 else 16):
                c10d_transport.LEAST_BYTES = least[i % 2]
                dist.barrier()
                start = time.perf_counter()
                collective(x)
                seconds = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                best[i % 2] = min(best[i % 2], seconds.item())
            times[name] = [round(1000 * seconds, 2) for seconds in best]
        if rank == 0:
            print(f"{kib} KiB, ms combined and by gloo alone: {json.dumps(times)}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    """The command, and what it starts on each host."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--per-host", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", default="integration_tests.two_hosts", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", default=["64", "1024", "16384"], metavar="KIB")
    given = parser.parse_args()
    if given.host is not None:
        _start_ranks(given.host, given.job, given.per_host, given.arguments)
        return
    with two_hosts(given.rate) as hosts:
        print(hosts.run(given.job, given.per_host, *given.arguments, timeout=600))


if __name__ == "__main__":
    main()
