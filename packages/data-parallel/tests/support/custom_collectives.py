"""Collectives as users write them for `set_custom_all_gather` and `set_custom_reduce_scatter`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_data_parallel import AllGather, ReduceScatter

__all__ = ["Gather", "Scatter"]


class Gather(AllGather):
    """An all-gather that keeps count, also of the calls that must not wait."""

    def __init__(self) -> None:
        self.calls = 0
        self.asynchronous_calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        self.asynchronous_calls += async_op
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor.clone(), group=group, async_op=async_op
        )


class Scatter(ReduceScatter):
    """A reduce-scatter of an all-reduce that knows its reductions."""

    def __init__(self) -> None:
        self.ops: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.ops.append(op)
        dist.all_reduce(input_tensor, group=group)
        if op == dist.ReduceOp.AVG:
            input_tensor /= group.size()
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
