"""`_mesh_resources`: a name that downstream projects still import from torch.distributed.device_mesh."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..errors import NoGroupError
from .device_mesh import DeviceMesh, current_mesh


class _MeshResources:
    """The enclosing mesh, the root of a mesh, and how many devices and hosts there are."""

    @staticmethod
    def get_current_mesh() -> DeviceMesh:
        mesh = current_mesh()
        if mesh is None:
            raise NoGroupError("no device mesh is current: enter one with `with mesh:`")
        return mesh

    @staticmethod
    def get_root_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
        return device_mesh._get_root_mesh()

    @staticmethod
    def num_devices_per_host(device_type: str) -> int:
        """Devices on this host; for the CPU the ranks that the launcher started here."""
        if device_type == "cpu":
            return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return int(torch.get_device_module(device_type).device_count())

    @classmethod
    def num_hosts(cls, device_type: str) -> int:
        return max(1, dist.get_world_size() // max(1, cls.num_devices_per_host(device_type)))


_mesh_resources = _MeshResources()
