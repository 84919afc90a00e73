"""What the ranks of a process group check together before data move: an error of one rank is raised on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shoal_mesh.internal import dataclass

from ..errors import ArgumentTypeError, RankMismatchError
from .process_groups import members


@dataclass(frozen=True, slots=True)
class _Report:
    """What one rank sends to the others before data move."""

    error: Exception | None
    facts: dict[str, Any]


def agree(group: dist.ProcessGroup, facts: Mapping[str, Any], error: Exception | None = None) -> list[dict[str, Any]]:
    """Exchange and compare arguments over the group; all ranks return, or all raise the same error.

    Args:
        group: The ranks that make the call.
        facts: Values by name, equal on all ranks.  A name that begins with "~" is exchanged, not compared.
        error: An error of this rank; it is raised on every rank.

    Returns:
        The facts of every rank, in group order.

    Raises:
        RankMismatchError: A value differs; names both values and both ranks (ranks in the group).
        ArgumentTypeError: A value of some rank cannot be sent.
        Exception: The error of the lowest rank that has one; the message names the ranks unless all have one.
    """
    report = _sendable(error, facts)
    reports: list[Any] = [report]
    if dist.get_world_size(group) > 1:
        reports = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, report, group=group)
    failed = [rank for rank, each in enumerate(reports) if each.error is not None]
    if failed:
        raise _shared_error(reports[failed[0]].error, failed, len(reports)) from error
    for rank, each in enumerate(reports):
        for name, value in reports[0].facts.items():
            if not name.startswith("~") and each.facts.get(name) != value:
                raise RankMismatchError(
                    f"{name}={value} on rank: 0 does not match with {name}={each.facts.get(name)} on rank: {rank}"
                )
    return [each.facts for each in reports]


def _sendable(error: Exception | None, facts: Mapping[str, Any]) -> _Report:
    """This rank's report, or an error in its place if it cannot be pickled: the other ranks wait for one."""
    report = _Report(error, dict(facts) if error is None else {})
    try:
        pickle.loads(pickle.dumps(report))
    except Exception as cause:  # noqa: BLE001, RUF100  # pickling runs code of the values' classes, which raises anything
        if error is not None:
            return _Report(RuntimeError(f"{type(error).__name__}: {error}"), {})
        return _Report(ArgumentTypeError(f"{', '.join(facts)}: a value cannot be sent to other ranks ({cause})"), {})
    return report


def _shared_error(error: Exception, failed: list[int], world: int) -> Exception:
    if len(failed) == world:
        return error
    text = f"on rank(s) {', '.join(map(str, failed))} of the {world} in the process group: {error}"
    try:
        return type(error)(text)
    except TypeError:
        return RuntimeError(f"{type(error).__name__} {text}")


def devices_of_all(group: dist.ProcessGroup, device: torch.device) -> dict[int, torch.device]:
    """Global rank -> the device that it passed; all ranks call it.

    Raises:
        RankMismatchError: The devices are of different types.
    """
    reports = agree(group, {"device type": device.type, "~device": device})
    return {rank: report["~device"] for rank, report in zip(members(group), reports, strict=True)}
