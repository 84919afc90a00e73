"""What the ranks of a process group check together before data move: an error of one rank is raised on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from shoal_mesh.internal import agree

from ..errors import ArgumentTypeError, RankMismatchError


def agree_on(group: dist.ProcessGroup, check: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The arguments of every rank, in group order; all ranks return, or all raise the same error.

    Args:
        group: The ranks that make the call.
        check: Raises what is wrong with this rank's arguments, else returns values by name that are equal on all ranks.
            A value whose name begins with "~" is exchanged, not compared.

    Raises:
        RankMismatchError: A value differs; names both values and both ranks (ranks in the group).
        ArgumentTypeError: A value of some rank cannot be sent.
        Exception: What ``check`` raised, of the class on the lowest rank on which it did.
    """

    def sendable() -> dict[str, Any]:
        facts = dict(check())
        try:
            pickle.loads(pickle.dumps(facts))
        except Exception as cause:  # noqa: BLE001, RUF100  # pickling runs code of the values' classes, which raises anything
            raise ArgumentTypeError(f"{', '.join(facts)}: a value cannot be sent to other ranks ({cause})") from cause
        return facts

    reports = agree(sendable, group)
    for rank, facts in enumerate(reports):
        for name, value in reports[0].items():
            if not name.startswith("~") and facts.get(name) != value:
                raise RankMismatchError(
                    f"{name}={value} on rank: 0 does not match with {name}={facts.get(name)} on rank: {rank}"
                )
    return reports
