"""Process groups of c10d: their ranks and the names that users gave to them."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import ProcessGroup as ProcessGroup


def group_ranks(group: ProcessGroup) -> list[int]:
    """Return the global ranks of a group, ascending."""
    return list(dist.get_process_group_ranks(group))


def group_name(group: ProcessGroup) -> str:
    """Return the description that a group was created with; empty if there is none."""
    description = str(getattr(group, "group_desc", "") or "")
    return "" if description in ("default_pg", "undefined") else description.removeprefix("mesh_")
