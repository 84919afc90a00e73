"""What a bug report needs: versions, devices, backends, memory for ranks, variables that change how ranks meet."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib import metadata

import torch
import torch.distributed as dist

from ..__about__ import __version__

PREFIXES = ("NCCL_", "GLOO_", "SHOAL", "TORCH_", "OMP_", "MKL_", "CUDA_", "SLURM_JOB_NUM")
NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID")


def add_options(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(asked: argparse.Namespace) -> int:
    """Print the facts, one a line."""
    found = facts()
    width = max(map(len, found))
    sys.stdout.writelines(f"{name:{width}}  {value}\n" for name, value in found.items())
    return 0


def facts() -> dict[str, str]:
    """What is known, by name; nothing is measured and no process group is made."""
    found = {"shoal_mesh": __version__}
    for name in ("shoal-dtensor", "shoal-tp-styles", "shoal-shard-api", "numpy"):
        try:
            found[name.replace("-", "_")] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name.replace("-", "_")] = "not installed"
    found |= {"torch": torch.__version__, "python": sys.version.split()[0], "platform": platform.platform()}
    found["cores"] = f"{os.cpu_count()}, {torch.get_num_threads()} threads in torch"
    found["backends"] = ", ".join(name for name in ("gloo", "nccl", "mpi", "xccl") if dist.is_backend_available(name))
    count = torch.cuda.device_count()
    found["GPUs"] = ", ".join(torch.cuda.get_device_name(index) for index in range(count)) or "none"
    if count:
        found["CUDA"] = f"{torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"  # type: ignore[no-untyped-call]  # torch's
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        found["/dev/shm"] = f"{free / 2**20:.0f} MiB free"
    given = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES) or name in NAMES}
    return found | {f"${name}": given[name] for name in sorted(given)}
