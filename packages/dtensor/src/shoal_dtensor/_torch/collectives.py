"""Collective operators of `torch.distributed` as the dispatcher sees them: their group and reduction."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def group_ranks(group: Any) -> tuple[int, ...]:
    """The global ranks of the group argument of a collective operator: a boxed group, a group or its name."""
    if isinstance(group, str):
        group = torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]  # a name is a str
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def reduction_name(reduction: Any) -> str:
    """The reduction argument of a collective operator in lower case: `sum`, `avg`, ..."""
    if isinstance(reduction, str):
        return reduction.lower()
    return str(dist.ReduceOp.RedOpType(reduction.op()).name).lower()
