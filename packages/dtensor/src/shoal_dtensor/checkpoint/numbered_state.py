"""Optimizer state by number, which is saved once although it may be another parameter's elsewhere.

The state dict of an optimizer numbers its parameters. In the stages of a pipeline, number 0 is
another parameter on every rank, but a checkpoint holds one plain tensor of each name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .saved_names import shorten

# by name: shape, dtype, and the sum of the bytes
Digests = dict[str, tuple[tuple[int, ...], str, int]]


def digests_by_number(state: Mapping[Any, Any]) -> Digests:
    """Return digests of the plain tensors that are optimizer state by number."""
    digests: Digests = {}
    for name, tensor in _tensors_by_number(state, ()):
        value = tensor.detach().contiguous().reshape(-1)
        # float32 numbers 1 and 2: bytes 0 0 128 63, 0 0 0 64, sum 255
        total = int(value.view(torch.uint8).sum(dtype=torch.int64))
        digests[name] = (tuple(tensor.shape), str(tensor.dtype), total)
    return digests


def check_digests(of_ranks: Sequence[Digests]) -> None:
    """Raise CheckpointError if ranks have different values under one number."""
    first: Digests = {}
    different: dict[str, None] = {}
    for digests in of_ranks:
        for name, digest in digests.items():
            if first.setdefault(name, digest) != digest:
                different[name] = None
    if different:
        raise CheckpointError(
            f"optimizer state by number differs between ranks ({shorten([*different])}): a number "
            "is another parameter on another rank, as in stages of a pipeline, and only one of "
            "them would be saved. Save the state by name: shoal_dtensor.get_optimizer_state_dict("
            "model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))"
        )


def _tensors_by_number(
    state: Mapping[Any, Any], path: tuple[Any, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors at `state.NUMBER.name`, at any depth."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors_by_number(value, (*path, key))
        elif type(value) is Tensor and value.layout is torch.strided:
            is_numbered = len(path) > 1 and path[-2] == "state" and isinstance(path[-1], int)
            if is_numbered:
                yield ".".join(map(str, (*path, key))), value
