"""Warnings of data-parallel ranks that read equal rows, in blocks that compare replicas."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor
from shoal_dtensor.internal import in_backward, is_compiling, pytree, replicas_are_compared
from shoal_mesh import Comm, LockstepError, check_distinct


class EqualRowsWarning(UserWarning):
    """Data-parallel ranks train on equal inputs, as with a `DataLoader` without a sampler."""


def warn_of_equal_rows(module: nn.Module, args: Any, kwargs: Any, comm: Comm) -> None:
    """Warn on all ranks if two of them begin a forward that is trained with equal plain inputs.

    Ranks compare their inputs in `lockstep()` and `checked_replicas()`: the mean of equal gradients
    is the gradient of one rank, which no rank can see in its own values.
    """
    if is_compiling() or not replicas_are_compared():
        return
    if in_backward() or not (torch.is_grad_enabled() and module.training):
        return
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(isinstance(leaf, DTensor) for leaf in inputs):
        return
    name = type(module).__name__
    try:
        named = {str(number): leaf for number, leaf in enumerate(inputs)}
        check_distinct(named, comm, f"the input of {name}")
    except LockstepError as error:
        warnings.warn(
            f"{error}: data-parallel ranks that read the same rows train as one rank does. Give "
            "the DataLoader a DistributedSampler with num_replicas and rank of the data axes "
            "(mesh.size(), mesh.get_local_rank())",
            EqualRowsWarning,
            stacklevel=2,
        )
