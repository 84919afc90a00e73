"""What a step returns on every rank of a group; an error of one rank is raised on all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from .. import _torch
from .._torch import ProcessGroup
from .world import all_gather_objects

R = TypeVar("R")


def agree(
    step: Callable[[], R],
    group: ProcessGroup | None = None,
    error_type: type[Exception] | None = None,
    what: str = "",
) -> list[R]:
    """What a step returns on every rank, by rank in the group; if it raises on some ranks, all of them raise.

    Args:
        step: what this rank checks or does. What it returns is pickled, so only for ranks that trust each other.
        group: the ranks that make the call; by default the world, or this process alone where there is none.
        error_type: the class of what is raised; by default that of the error of the lowest rank.
        what: how the text of the error begins.

    Raises:
        Exception: names the ranks that raised, unless all of them raised the same.

    Example:
        >>> def example() -> list[int]:
        ...     return agree(lambda: 10 * dist.get_rank())
        >>> launch(example, 2)[0]
        [0, 10]
    """
    group = _torch.default_group() if group is None else group
    own: Exception | None = None
    try:
        report = _sendable((step(), None))
    except Exception as error:  # whatever it is, the other ranks wait for a report
        own = error
        if error_type is not None and not isinstance(error, error_type):
            own = error_type(f"{type(error).__name__}: {error}")
        report = _report_of(own)
    reports = [pickle.loads(each) for each in ([report] if group is None else all_gather_objects(group, report))]
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    errors = {rank: error for rank, (_, error) in zip(ranks, reports, strict=True) if error is not None}
    if errors:
        raise _error_of_all(errors, len(ranks), what) from own
    return [value for value, _ in reports]


def _sendable(report: Any) -> bytes:
    data = pickle.dumps(report)
    pickle.loads(data)  # what can be sent may still not come back
    return data


def _report_of(error: Exception) -> bytes:
    try:
        return _sendable((None, error))
    except Exception:  # its class cannot be pickled, or takes other arguments than its text
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))


def _error_of_all(errors: Mapping[int, Exception], size: int, what: str) -> Exception:
    """One error for all ranks, of the class of the lowest one's: `rank 1: OSError: disk full`."""
    first = errors[min(errors)]
    kind = type(first)
    texts = [str(error) if type(error) is kind else f"{type(error).__name__}: {error}" for error in errors.values()]
    alike = len(texts) == size and len(set(texts)) == 1
    if alike and not what:
        return first
    by_rank = [f"rank {rank}: {text}" for rank, text in zip(errors, texts, strict=True)]
    text = ": ".join([*([what] if what else []), texts[0] if alike else "; ".join(by_rank)])
    try:
        return kind(text)
    except TypeError:  # its class takes other arguments than one text
        return RuntimeError(f"{kind.__name__}: {text}")
