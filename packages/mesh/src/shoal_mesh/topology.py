"""What a mesh axis costs: seconds to start a message and bytes per second, for whoever plans communication.

Where the numbers come from, first found: what the user set for the mesh (`set_topology`, for instance what `measure`
gave), else defaults by device type and by whether the axis crosses hosts. Every rank gets the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from . import collectives
from .device_mesh import DeviceMesh
from .errors import MeshError
from .groups import Comm
from .world import device_of

__all__ = ["Link", "Topology", "measure", "set_topology", "topology_of", "topology_version"]


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of connection.

    Attributes:
        latency: seconds until a collective has started on all ranks.
        bandwidth: bytes per second that one rank can send.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise MeshError(
                f"a link has a latency >= 0 s and a bandwidth > 0 B/s, got {self.latency}, {self.bandwidth}"
            )

    def seconds(self, nbytes: float) -> float:
        """Time to send that many bytes."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Topology:
    """A link per mesh axis."""

    links: tuple[Link, ...]

    def __getitem__(self, axis: int) -> Link:
        return self.links[axis]

    def over(self, axes: Sequence[int]) -> Link:
        """The link of a group over several axes: as slow as the slowest of them."""
        links = [self.links[axis] for axis in axes]
        return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


# Defaults: orders of magnitude of loopback TCP, NVLink with nccl, and one 200 Gbit/s adapter per GPU.
_LOCAL = {"cpu": Link(60e-6, 1.5e9), "cuda": Link(12e-6, 180e9)}
_REMOTE = {"cpu": Link(150e-6, 1.0e9), "cuda": Link(25e-6, 22e9)}
_SET: WeakKeyDictionary[DeviceMesh, Topology] = WeakKeyDictionary()  # what users set; goes with the mesh
_CHANGES = [0]  # how often users set something


def topology_of(mesh: DeviceMesh) -> Topology:
    """The link of every axis of a mesh."""
    found = _SET.get(mesh)
    return found if found is not None else _default(mesh)


def set_topology(mesh: DeviceMesh, topology: Topology | Sequence[Link] | None) -> None:
    """Use these links for a mesh (and for equal ones) from now on; None goes back to the defaults.

    Pass the same on every rank: plans are made from it.
    """
    _CHANGES[0] += 1
    if topology is None:
        _SET.pop(mesh, None)
        return
    chosen = topology if isinstance(topology, Topology) else Topology(tuple(topology))
    if len(chosen.links) != mesh.ndim:
        raise MeshError(f"{mesh!r} has {mesh.ndim} axes, the topology {len(chosen.links)} links")
    _SET[mesh] = chosen


def topology_version() -> int:
    """A number that is new after every `set_topology`, so that caches of what follows from a topology can tell."""
    return _CHANGES[0]


def _default(mesh: DeviceMesh) -> Topology:
    kind = "cpu" if mesh.device_type in {"cpu", "meta"} else "cuda"
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or (8 if kind == "cuda" else 1 << 30)
    links = []
    for axis in range(mesh.ndim):
        hosts = {rank // per_host for rank in mesh.ranks_along(axis, (0,) * mesh.ndim)}
        links.append((_REMOTE if len(hosts) > 1 else _LOCAL)[kind])
    return Topology(tuple(links))


def measure(mesh: DeviceMesh, *, largest: int = 1 << 22, repeats: int = 5) -> Topology:
    """The links that all-gathers of two sizes on the real groups give; called by every rank of the mesh.

    Args:
        mesh: a mesh with process groups.
        largest: bytes of the larger message per rank.
        repeats: the fastest of so many counts; the slowest rank of the mesh decides.

    Returns:
        One link per axis, the same on every rank; axes of one rank keep their default.
    """
    defaults = _default(mesh)
    found = []
    for axis in range(mesh.ndim):
        comm = mesh.comm(axis)
        small, large = (_seconds(comm, nbytes, repeats) for nbytes in (64, largest))
        found.append((small, large))
    everyone = mesh.comm(tuple(range(mesh.ndim)))
    worst = collectives.all_reduce(_tensor(found, everyone), everyone, "max").cpu().tolist()
    links = []
    for axis, (small, large) in enumerate(worst):
        steps = mesh.shape[axis] - 1
        if steps == 0:
            links.append(defaults[axis])
            continue
        sent = (largest - 64) * steps  # a rank of a ring sends its own block and passes on the others
        transfer = max(large - small, large / 4)  # on a busy machine the small message may take as long as the large
        links.append(Link(small, sent / transfer))
    return Topology(tuple(links))


def _tensor(rows: list[tuple[float, float]], comm: Comm) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64, device=device_of(comm.group))


def _seconds(comm: Comm, nbytes: int, repeats: int) -> float:
    device = device_of(comm.group)
    block = torch.zeros(nbytes // 4, device=device)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one connects
        begin = time.perf_counter()
        collectives.all_gather(block, comm)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return best
