"""Costs of communication along mesh axes: latency in seconds, bandwidth in bytes per second.

Planners estimate the time of collectives with these numbers. The user sets the numbers of a mesh
with `set_topology`, for instance to the result of `measure`. Otherwise a mesh has defaults, which
depend on the device type, and on whether the axis crosses hosts. All ranks get the same numbers.

May import: accelerator, argument_types, collectives, errors, mesh.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch

from .accelerator import module_of, own_device
from .argument_types import require, require_each, suggests_keywords
from .collectives import even
from .errors import AxisError, MeshError
from .mesh.device_mesh import DeviceMesh
from .mesh.rank_order import fastest


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and bandwidth of one kind of connection.

    Attributes:
        latency: seconds until a collective has started on all ranks.
        bandwidth: bytes per second that one rank can send.

    Raises:
        MeshTypeError: if they are not numbers.
        MeshError: if the latency is negative or the bandwidth not positive.

    Example:
        >>> Link(latency=10e-6, bandwidth=1e9).seconds(1_000_000)
        0.00101
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        require_each(
            (self.latency, self.bandwidth), int | float, "a link has a latency and a bandwidth"
        )
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise MeshError(
                f"a link must have latency >= 0 s and bandwidth > 0 B/s, got {self.latency}, "
                f"{self.bandwidth}"
            )

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to send a number of bytes.

        Raises:
            MeshTypeError: if `nbytes` is not a number.
        """
        if type(nbytes) is not int:
            require(nbytes, int | float, "a number of bytes is a number")
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Topology:
    """The links of a mesh, one per axis.

    Attributes:
        links: one per axis, in the order of the mesh.

    Raises:
        MeshTypeError: if `links` is not a tuple of links.
    """

    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        require(self.links, tuple, "a topology is a tuple with one Link per mesh axis")
        require_each(self.links, Link, "a topology is a tuple with one Link per mesh axis")

    def __getitem__(self, axis: int) -> Link:
        """Return the link of an axis, given by index.

        Raises:
            MeshTypeError: if `axis` is not an integer.
            AxisError: if there is no such axis.
        """
        require(axis, int, "an axis of a topology is an index")
        return self.over((axis,))

    def over(self, axes: Sequence[int]) -> Link:
        """Return the link of a group over several axes: as slow as the slowest of them.

        Raises:
            AxisError: if `axes` is empty or has an axis that does not exist.
        """
        require_each(axes, int, "axes of a topology are indices")
        count = len(self.links)
        if not axes or not all(-count <= axis < count for axis in axes):
            raise AxisError(
                f"a topology of {count} axes does not have a group over axes {axes!r:.80}: pass "
                "indices of axes"
            )
        links = [self.links[axis] for axis in axes]
        latency = max(link.latency for link in links)
        bandwidth = min(link.bandwidth for link in links)
        return Link(latency, bandwidth)


# Defaults: orders of magnitude of loopback TCP, NVLink with nccl, and one 200 Gbit/s adapter per
# GPU.
_LOCAL = {"cpu": Link(60e-6, 1.5e9), "accelerator": Link(12e-6, 180e9)}
_REMOTE = {"cpu": Link(150e-6, 1.0e9), "accelerator": Link(25e-6, 22e9)}
# Accelerators of a host, if neither the launcher nor this host gives their number.
_ON_A_HOST = 8


@dataclass(slots=True)
class UserTopologies:
    """The topologies that users have set.

    Attributes:
        by_mesh: the topology of each mesh that has one; an entry is dropped with its mesh.
        version: the number of calls of `set_topology` so far, for keys of caches.
    """

    by_mesh: WeakKeyDictionary[DeviceMesh, Topology]
    version: int = 0


USER_TOPOLOGIES = UserTopologies(WeakKeyDictionary())


def topology_of(mesh: DeviceMesh) -> Topology:
    """Return the links of a mesh, one per axis: those of `set_topology`, or else defaults.

    Args:
        mesh: a mesh, also an abstract one.

    Raises:
        MeshTypeError: if `mesh` is not a DeviceMesh.

    Example:
        >>> topology_of(abstract_mesh((4,)))[0]
        Link(latency=6e-05, bandwidth=1500000000.0)
    """
    require(mesh, DeviceMesh, "a topology belongs to a DeviceMesh")
    chosen = USER_TOPOLOGIES.by_mesh.get(mesh)
    return chosen if chosen is not None else _default(mesh)


@suggests_keywords()
def set_topology(mesh: DeviceMesh, topology: Topology | Sequence[Link] | None) -> None:
    """Use these links for a mesh, and for meshes equal to it, from now on.

    Args:
        mesh: the mesh.
        topology: a Topology, or one link per axis; None restores the defaults. It must be the same
            on all ranks, because ranks derive their plans from it.

    Raises:
        MeshTypeError: if an argument has a wrong type.
        MeshError: if there is not one link per axis.

    Example:
        >>> mesh = abstract_mesh((2, 4))
        >>> set_topology(mesh, [Link(25e-6, 22e9), Link(12e-6, 180e9)])
        >>> topology_of(mesh).over((0, 1))
        Link(latency=2.5e-05, bandwidth=22000000000.0)
    """
    require(mesh, DeviceMesh, "a topology belongs to a DeviceMesh")
    require(
        topology, Topology | Sequence | None, "set_topology takes a Topology, or one Link per axis"
    )
    USER_TOPOLOGIES.version += 1
    if topology is None:
        USER_TOPOLOGIES.by_mesh.pop(mesh, None)
        return
    chosen = topology if isinstance(topology, Topology) else Topology(tuple(topology))
    if len(chosen.links) != mesh.ndim:
        raise MeshError(
            f"{mesh!r} has {mesh.ndim} axes, but the topology has {len(chosen.links)} links"
        )
    USER_TOPOLOGIES.by_mesh[mesh] = chosen


def _default(mesh: DeviceMesh) -> Topology:
    link_name = "cpu" if mesh.device_type in {"cpu", "meta"} else "accelerator"
    per_host = _ranks_per_host(mesh.device_type, link_name)
    links = []
    for axis in range(mesh.ndim):
        hosts = {rank // per_host for rank in mesh.ranks_along(axis, (0,) * mesh.ndim)}
        by_kind = _REMOTE if len(hosts) > 1 else _LOCAL
        links.append(by_kind[link_name])
    return Topology(tuple(links))


def _ranks_per_host(device_type: str, kind: str) -> int:
    """Return the number of ranks on a host: the launcher's, or else one for each accelerator.

    Without a launcher all ranks of a CPU mesh are on this host.
    """
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if launched:
        return launched
    if kind == "cpu":
        # more than any world has
        return 1 << 30
    module = module_of(device_type)
    if module is None or not module.is_available():
        return _ON_A_HOST
    return int(module.device_count()) or _ON_A_HOST


@suggests_keywords()
def measure(mesh: DeviceMesh, *, largest: int = 1 << 22, repeats: int = 5) -> Topology:
    """Derive the links from the times of all-gathers of two sizes; all ranks of the mesh call it.

    Args:
        mesh: a mesh with process groups.
        largest: bytes of the larger message per rank, more than 64.
        repeats: timed runs of each all-gather. The fastest run is the time of a rank, and the time
            of the slowest rank is taken.

    Returns:
        One link per axis, the same on all ranks; axes of one rank keep their default.

    Raises:
        MeshTypeError: if an argument has a wrong type.
        MeshError: if `largest` or `repeats` is too small.
        NoGroupError: if the mesh is abstract, or this rank is not in it.

    Example:
        >>> launch(lambda: len(measure_topology(init_device_mesh("cpu", (2,)), repeats=1).links), 2)
        [1, 1]
    """
    require(mesh, DeviceMesh, "a topology belongs to a DeviceMesh")
    require_each((largest, repeats), int, "measure takes a number of bytes and a number of repeats")
    if largest <= 64 or repeats < 1:
        raise MeshError(
            f"measure needs largest > 64 bytes and repeats >= 1, got {largest} and {repeats}"
        )
    defaults = _default(mesh)
    device = own_device(mesh.device_type)
    # 4 bytes for each float32
    blocks = [torch.zeros(nbytes // 4, device=device) for nbytes in (64, largest)]
    times = []
    for axis in range(mesh.ndim):
        gathers = [partial(even.all_gather, block, mesh.comm(axis)) for block in blocks]
        # one run more, because the first one also connects the ranks
        times.append([fastest(gather, repeats + 1, device) for gather in gathers])
    everyone = mesh.comm(tuple(range(mesh.ndim)))
    # The default dtype, float32: some devices do not have float64.
    worst = even.all_reduce(torch.tensor(times, device=device), everyone, "max").tolist()
    links = []
    for axis, (small, large) in enumerate(worst):
        steps = mesh.shape[axis] - 1
        if not steps:
            links.append(defaults[axis])
            continue
        # A rank of a ring sends its own block and forwards the others.
        sent = (largest - 64) * steps
        # On a busy machine the small message may take as long as the large one.
        transfer = max(large - small, large / 4)
        links.append(Link(small, sent / transfer))
    return Topology(tuple(links))
