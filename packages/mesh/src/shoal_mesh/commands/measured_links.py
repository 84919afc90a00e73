"""Latency, bandwidth and best order of ranks along the axes of a mesh, measured on local ranks or those of torchrun.

`torchrun --nproc-per-node 8 -m shoal_mesh topology --mesh 2x4` measures the machines that torchrun runs on; without
torchrun, local ranks are started.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.distributed as dist

from ..local_ranks.launch import launch
from ..mesh.create import init_device_mesh, measured_order
from ..mesh.rank_order import RankOrder
from ..topology import Link, measure


def add_options(parser: argparse.ArgumentParser) -> None:
    """The mesh and the size of a message."""
    parser.add_argument("--mesh", type=_shape, default=(2,), help="sizes of the axes, such as 2x4 (default: 2)")
    parser.add_argument("--bytes", type=int, default=1 << 22, help="of the larger message (default: 4 MiB)")


def run(asked: argparse.Namespace) -> int:
    """Measure on all ranks and print one line an axis, on the first rank."""
    shape: tuple[int, ...] = asked.mesh
    links, order = launch(_measure, math.prod(shape), shape, asked.bytes)[0]
    if not dist.is_initialized() or dist.get_rank() == 0:
        sys.stdout.write(f"{'axis':>4} {'ranks':>6} {'latency':>12} {'bandwidth':>14}\n")
        for axis, (size, link) in enumerate(zip(shape, links, strict=True)):
            speed = f"{link.bandwidth / 1e9:.3f} GB/s"
            sys.stdout.write(f"{axis:>4} {size:>6} {link.latency * 1e6:>9.1f} us {speed:>14}\n")
        values = ", ".join(f"Link({link.latency:.3g}, {link.bandwidth:.3g})" for link in links)
        sys.stdout.write(f"set_topology(mesh, [{values}])\norder='topology': {order}\n")
    return 0


def _measure(shape: tuple[int, ...], largest: int) -> tuple[tuple[Link, ...], RankOrder]:
    device = "cuda" if torch.cuda.device_count() >= math.prod(shape) else "cpu"
    return measure(init_device_mesh(device, shape), largest=largest).links, measured_order(shape, device)


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.lower().split("x")
    if not all(size.isdigit() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"a mesh is sizes with x between them, such as 2x4, got {text!r}")
    return tuple(map(int, sizes))
