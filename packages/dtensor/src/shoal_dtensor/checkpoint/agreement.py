"""What a function returns on every rank, or one error on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError

R = TypeVar("R")


def agreed(function: Callable[[], R], group: Any, *, send: bool = True) -> list[R]:
    """What a function returns on every rank; raises on all of them if it did on one."""
    value, failure = None, ""
    try:
        value = function()
    except Exception as error:  # of the file system, mostly
        failure = str(error) if isinstance(error, CheckpointError) else repr(error)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (failure, value if send else None), group=group)
    failures = {rank: text for rank, (text, _) in enumerate(answers) if text}
    if failures:
        raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in failures.items()))
    return [value for _, value in answers]
