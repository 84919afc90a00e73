"""Commands of `python -m shoal_mesh`: facts for bug reports, postmortems and costs of links.

`torchrun --nproc-per-node 8 -m shoal_mesh topology --mesh 2x4` measures the machines that torchrun
runs on; without torchrun, local ranks are started.
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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..__about__ import __version__
from ..accelerator import accelerator, device_count, module_of
from ..local_ranks.launch import launch
from ..mesh.create import init_device_mesh, measured_order
from ..mesh.rank_order import RankOrder
from ..topology import Link, measure
from ..watch.recorder import LIBRARIES, folder

# the environment variables that `env` prints, by prefix and by name
PREFIXES = ("NCCL_", "GLOO_", "SHOAL", "TORCH_", "OMP_", "MKL_", "CUDA_", "SLURM_JOB_NUM")
NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")
# rank -> the content of the file that it wrote (`watch.recorder`)
Dumps = Mapping[int, Mapping[str, Any]]
_LIBRARY = re.compile(f"/{LIBRARIES}/")


class CommandReport(NamedTuple):
    """The output of a command.

    Attributes:
        lines: the lines to print.
        status: the exit status.
    """

    lines: list[str]
    status: int = 0


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m shoal_mesh", description="Facts about this machine and its ranks."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands_by_name = {}
    for run in (env, postmortem, topology):
        text = run.__doc__
        command = commands.add_parser(run.__name__, help=text, description=text)
        command.set_defaults(run=run)
        commands_by_name[run.__name__] = command
    add = commands_by_name["postmortem"].add_argument
    add(
        "folder",
        nargs="?",
        default=folder(),
        help="the folder that error messages name (default: %(default)s)",
    )
    add("--last", type=int, default=3, help="collectives of each rank (default: %(default)s)")
    add = commands_by_name["topology"].add_argument
    add("--mesh", type=_shape, default=(2,), help="sizes of the axes, such as 2x4 (default: 2)")
    add("--bytes", type=int, default=1 << 22, help="of the larger message (default: 4 MiB)")
    options = parser.parse_args(argv)
    printed: CommandReport = options.run(options)
    for line in printed.lines:
        sys.stdout.write(f"{line}\n")
    return printed.status


def env(options: argparse.Namespace) -> CommandReport:
    """Report versions, devices, backends, memory and environment variables for a bug report."""
    values = {"shoal_mesh": __version__}
    for name in ("shoal-dtensor", "shoal-tp-styles", "shoal-shard-api", "numpy"):
        module = name.replace("-", "_")
        try:
            values[module] = metadata.version(name)
        except metadata.PackageNotFoundError:
            values[module] = "not installed"
    values["torch"] = torch.__version__
    values["python"] = sys.version.split()[0]
    values["platform"] = platform.platform()
    values["cores"] = f"{os.cpu_count()}, {torch.get_num_threads()} threads in torch"
    backends = [name for name in dist.Backend.backend_list if name != "undefined"]
    values["backends"] = ", ".join(filter(dist.is_backend_available, backends))
    device_type = accelerator()
    values["GPUs"] = ", ".join(map(_device_name, range(device_count()))) or "none"
    if device_type == "cuda":
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # of torch
        version = ".".join(map(str, numbers))
        values["CUDA"] = f"{torch.version.cuda}, NCCL {version}"
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        values["/dev/shm"] = f"{free / 2**20:.0f} MiB free"
    for name in sorted(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            values[f"${name}"] = os.environ[name]
    width = max(map(len, values))
    return CommandReport([f"{name:{width}}  {value}" for name, value in values.items()])


def _device_name(index: int) -> str:
    """Return the name of an accelerator: its product name if torch has it."""
    device_type = accelerator() or "cpu"
    name_of: Any = getattr(module_of(device_type), "get_device_name", None)
    return f"{device_type} {index}" if name_of is None else str(name_of(index))


def postmortem(options: argparse.Namespace) -> CommandReport:
    """Report where ranks stopped, from the files that they wrote when a rank was lost."""
    dumps = {}
    lines = []
    for path in sorted(Path(options.folder).glob("rank*.json")):
        try:
            dump = json.loads(path.read_text())
            dumps[int(dump["rank"])] = dump
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines.append(f"{path.name} cannot be read: {error!r}")
    if not dumps:
        searched = options.folder or "no folder"
        return CommandReport([*lines, f"no files of ranks found in {searched}"], status=1)
    return CommandReport([*lines, *report(dumps, options.last)])


def report(dumps: Dumps, last: int = 3) -> list[str]:
    """Return the lines of a report about lost ranks.

    The report names the ranks that other ranks hold at fault, the ranks without a file, and, for
    each rank with a file, its last collectives and the line at which it stopped.
    """
    world = max(dump["world"] for dump in dumps.values())
    silent = [rank for rank in range(world) if rank not in dumps]
    votes = Counter(rank for dump in dumps.values() for rank in dump["culprits"])
    lines = [f"{len(dumps)} of {world} ranks have written"]
    for rank, count in votes.most_common(5):
        silence = "; it has written nothing" if rank in silent else ""
        lines.append(f"rank {rank} was named by other ranks {count} times{silence}")
    for rank in silent:
        seen = set()
        for dump in dumps.values():
            if str(rank) in dump["seen"]:
                seen.add(dump["seen"][str(rank)])
        last_seen = "; ".join(sorted(seen)) or "by nobody"
        lines.append(f"rank {rank} has written nothing; last seen: {last_seen}")
    for rank, dump in sorted(dumps.items()):
        lines.append(f"rank {rank} (process {dump['process']} on {dump['host']}): {dump['error']}")
        for seconds, group, collective, purpose in dump["collectives"][-last:]:
            suffix = f", for {purpose}" if purpose else ""
            lines.append(f"  {seconds:8.3f} s before, group {group}: {collective}{suffix}")
        frames = [frame for frame in dump["stack"] if not _LIBRARY.search(frame)]
        line = frames[-1] if frames else "no line of the program"
        lines.append(f"  at {line}")
    return lines


def topology(options: argparse.Namespace) -> CommandReport:
    """Measure latency, bandwidth and the best order of ranks along the axes of a mesh."""
    shape: tuple[int, ...] = options.mesh
    links, order = launch(_measure, math.prod(shape), shape, options.bytes)[0]
    if dist.is_initialized() and dist.get_rank() > 0:
        return CommandReport([])
    lines = [f"{'axis':>4} {'ranks':>6} {'latency':>12} {'bandwidth':>14}"]
    for axis, (size, link) in enumerate(zip(shape, links, strict=True)):
        latency = f"{link.latency * 1e6:.1f} us"
        bandwidth = f"{link.bandwidth / 1e9:.3f} GB/s"
        lines.append(f"{axis:>4} {size:>6} {latency:>12} {bandwidth:>14}")
    values = ", ".join([f"Link({link.latency:.3g}, {link.bandwidth:.3g})" for link in links])
    lines += [f"set_topology(mesh, [{values}])", f"order='topology': {order}"]
    return CommandReport(lines)


def _measure(shape: tuple[int, ...], largest: int) -> tuple[tuple[Link, ...], RankOrder]:
    """Return the links of a mesh over local ranks, and the order of ranks that suits them best."""
    device = "cpu"
    if device_count() >= math.prod(shape):
        device = accelerator() or "cpu"
    measured = measure(init_device_mesh(device, shape), largest=largest)
    return measured.links, measured_order(shape, device)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(
            f"expected the sizes of a mesh separated by x, such as 2x4, got {text!r}"
        )
    return tuple(map(int, sizes))
