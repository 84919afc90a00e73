"""Commands of `python -m shoal_mesh`: facts for bug reports, postmortems and costs of links.

`torchrun --nproc-per-node 8 -m shoal_mesh topology --mesh 2x4` measures the machines that torchrun
runs on; without torchrun, local ranks are started.

May import: __about__, accelerator, local_ranks, mesh, topology, watch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .__about__ import __version__
from .accelerator import accelerator, device_count, module_of
from .local_ranks.launch import launch
from .mesh.create import init_device_mesh, measured_order
from .mesh.rank_order import RankOrder
from .topology import Link, measure
from .watch.recorder import LIBRARIES, folder

PREFIXES = ("NCCL_", "GLOO_", "SHOAL", "TORCH_", "OMP_", "MKL_", "CUDA_", "SLURM_JOB_NUM")
NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
Dumps = Mapping[int, Mapping[str, Any]]
_LIBRARY = re.compile(f"/{LIBRARIES}/")


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shoal_mesh", description="Facts about this machine and its ranks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = {}
    for run in (env, postmortem, topology):
        options[run.__name__] = commands.add_parser(
            run.__name__, help=run.__doc__, description=run.__doc__
        )
        options[run.__name__].set_defaults(run=run)
    add = options["postmortem"].add_argument
    add(
        "folder",
        nargs="?",
        default=folder(),
        help="the folder that error messages name (default: %(default)s)",
    )
    add("--last", type=int, default=3, help="collectives of each rank (default: %(default)s)")
    add = options["topology"].add_argument
    add("--mesh", type=_shape, default=(2,), help="sizes of the axes, such as 2x4 (default: 2)")
    add("--bytes", type=int, default=1 << 22, help="of the larger message (default: 4 MiB)")
    asked = parser.parse_args(argv)
    said: tuple[list[str], int] = asked.run(asked)  # lines, and the exit status
    sys.stdout.writelines(f"{line}\n" for line in said[0])
    return said[1]


def env(asked: argparse.Namespace) -> tuple[list[str], int]:
    """Report versions, devices, backends, memory and environment variables for a bug report."""
    values = {"shoal_mesh": __version__}
    for name in ("shoal-dtensor", "shoal-tp-styles", "shoal-shard-api", "numpy"):
        try:
            values[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            values[name.replace("-", "_")] = "not installed"
    values |= {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }
    values["cores"] = f"{os.cpu_count()}, {torch.get_num_threads()} threads in torch"
    backends = (name for name in dist.Backend.backend_list if name != "undefined")
    values["backends"] = ", ".join(name for name in backends if dist.is_backend_available(name))
    kind = accelerator()
    name_of = getattr(module_of(kind or "cpu"), "get_device_name", lambda index: f"{kind} {index}")
    values["GPUs"] = ", ".join(name_of(index) for index in range(device_count())) or "none"
    if kind == "cuda":
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch's
        values["CUDA"] = f"{torch.version.cuda}, NCCL {'.'.join(map(str, version))}"
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        values["/dev/shm"] = f"{free / 2**20:.0f} MiB free"
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            values[f"${name}"] = os.environ[name]
    width = max(map(len, values))
    return [f"{name:{width}}  {value}" for name, value in values.items()], 0


def postmortem(asked: argparse.Namespace) -> tuple[list[str], int]:
    """Report where ranks stopped, from the files that they wrote when a rank was lost."""
    dumps = {}
    lines = []
    for path in sorted(Path(asked.folder).glob("rank*.json")):
        try:
            dump = json.loads(path.read_text())
            dumps[int(dump["rank"])] = dump
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines.append(f"{path.name} cannot be read: {error!r}")
    if not dumps:  # there is nothing to read: status 1
        return [*lines, f"no files of ranks found in {asked.folder or 'no folder'}"], 1
    return [*lines, *report(dumps, asked.last)], 0


def report(dumps: Dumps, last: int = 3) -> list[str]:
    """Return the lines of a report about lost ranks.

    It names the ranks that other ranks hold at fault, the ranks without a file, and the line and
    collective at which each rank stopped.
    """
    world = max(dump["world"] for dump in dumps.values())
    silent = [rank for rank in range(world) if rank not in dumps]
    votes = Counter(rank for dump in dumps.values() for rank in dump["culprits"])
    lines = [f"{len(dumps)} of {world} ranks have written"]
    for rank, count in votes.most_common(5):
        silence = "; it has written nothing" if rank in silent else ""
        lines.append(f"rank {rank} was named by other ranks {count} times{silence}")
    for rank in silent:
        seen = {dump["seen"][str(rank)] for dump in dumps.values() if str(rank) in dump["seen"]}
        last_seen = "; ".join(sorted(seen)) or "by nobody"
        lines.append(f"rank {rank} has written nothing; last seen: {last_seen}")
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} (process {dump['process']} on {dump['host']}): {dump['error']}")
        for seconds, group, collective, purpose in dump["collectives"][-last:]:
            suffix = f", for {purpose}" if purpose else ""
            lines.append(f"  {seconds:8.3f} s before, group {group}: {collective}{suffix}")
        frames = [frame for frame in dump["stack"] if not _LIBRARY.search(frame)]
        lines.append(f"  at {frames[-1] if frames else 'no line of the program'}")
    return lines


def topology(asked: argparse.Namespace) -> tuple[list[str], int]:
    """Measure latency, bandwidth and the best order of ranks along the axes of a mesh."""
    shape: tuple[int, ...] = asked.mesh
    links, order = launch(_measure, math.prod(shape), shape, asked.bytes)[0]
    if dist.is_initialized() and dist.get_rank() > 0:
        return [], 0
    lines = [f"{'axis':>4} {'ranks':>6} {'latency':>12} {'bandwidth':>14}"]
    for axis, (size, link) in enumerate(zip(shape, links, strict=True)):
        speed = f"{link.bandwidth / 1e9:.3f} GB/s"
        lines.append(f"{axis:>4} {size:>6} {link.latency * 1e6:>9.1f} us {speed:>14}")
    values = ", ".join(f"Link({link.latency:.3g}, {link.bandwidth:.3g})" for link in links)
    return [*lines, f"set_topology(mesh, [{values}])", f"order='topology': {order}"], 0


def _measure(shape: tuple[int, ...], largest: int) -> tuple[tuple[Link, ...], RankOrder]:
    has_devices = device_count() >= math.prod(shape)
    device = (accelerator() if has_devices else None) or "cpu"
    measured = measure(init_device_mesh(device, shape), largest=largest)
    return measured.links, measured_order(shape, device)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"expected the sizes of a mesh separated by x, such as 2x4, got {text!r}"
        )
    return tuple(map(int, sizes))
