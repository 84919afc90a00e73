"""Covers: dispatcher.py: attention of DTensors that are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dense_attention import dense_mask, sample
from shoal_context_parallel import (
    LayoutError,
    LayoutTypeError,
    SequenceLayout,
    UnsupportedAttentionError,
    context_parallel_shard,
    context_parallel_unshard,
    disable_context_parallel_dispatcher,
    enable_context_parallel_dispatcher,
    head_tail_layout,
    set_rotate_method,
)
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, counts, fake_world, on_ranks

# imported by name, before the dispatcher is enabled
attend_by_name: Any = scaled_dot_product_attention


def attend(*args: Any, **kwargs: Any) -> Any:
    """Call attention through its module."""
    return functional.scaled_dot_product_attention(*args, **kwargs)


@contextmanager
def enabled() -> Iterator[None]:
    """Enable the dispatcher on a rank, which other tests use too."""
    enable_context_parallel_dispatcher()
    try:
        yield
    finally:
        disable_context_parallel_dispatcher()


def as_dtensors(tensors: Any, mesh: Any = None, **options: Any) -> list[Any]:
    """DTensors of local shards of (rows, heads, positions, features), which require gradients."""
    made = []
    for tensor in tensors:
        local = tensor.detach().requires_grad_()
        made.append(DTensor.from_local(local, mesh or all_ranks(), [Shard(2)], **options))
    return made


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@on_ranks(4)
def test_attention_of_the_whole_sequence(balanced: bool, method: str) -> None:
    length = 16
    whole = sample(length, dense_mask(length, True, (None, None), None))
    layout = head_tail_layout(length, 4, "cpu") if balanced else None
    mesh = all_ranks()
    set_rotate_method(method)
    try:
        *qkv, seed = context_parallel_shard(mesh, [*whole.tensors, whole.seed], [2] * 4, layout)
    finally:
        set_rotate_method("allgather")
    with enabled():
        for function in (attend, attend_by_name):
            leaves = [x.detach().requires_grad_() for x in qkv]
            dtensors = [DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves]
            with CommDebugMode() as counted:
                out = function(*dtensors, is_causal=True, enable_gqa=True)
            assert out.placements == (Shard(2),)
            assert ("all_to_all" in counts(counted)) == (method == "alltoall")
            grads = torch.autograd.grad(out.to_local(), leaves, seed)
            used = layout or SequenceLayout.contiguous(length, 4)
            full = context_parallel_unshard(mesh, [out.to_local(), *grads], [2] * 4, used)
            for got, expected in zip(full, (whole.out, *whole.grads), strict=True):
                torch.testing.assert_close(got, expected)
        # tensors that are not sharded along the sequence are as they were
        replicated = [DTensor.from_local(x, mesh, [Replicate()]) for x in whole.tensors]
        dense = attend(*replicated, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(dense.to_local(), whole.out)


class AttentionOnDTensors(nn.Module):
    """Attention that makes DTensors of its queries, keys and values, as torchtitan does."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 24, dtype=torch.double))
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        parts = (x @ self.weight).chunk(3, -1)
        qkv: list[Any] = [part.view(*part.shape[:-1], 2, 4) for part in parts]
        if self.mesh is not None:
            qkv = [DTensor.from_local(part, self.mesh, [Shard(1)]) for part in qkv]
        q, k, v = (part.transpose(1, 2) for part in qkv)
        out = attend(q, k, v, is_causal=True).transpose(1, 2)
        local: Tensor = out if self.mesh is None else out.to_local()
        return local.flatten(2)


@pytest.mark.parametrize("recomputes", [False, True])
@on_ranks(4)
def test_a_module_over_one_axis_of_two(recomputes: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    context = mesh["context"]
    x = torch.randn(2, 12, 8, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    single, module = AttentionOnDTensors(None), AttentionOnDTensors(context)
    layout = head_tail_layout(12, 2)
    with enabled():
        expected = single(x)
        expected.square().sum().backward()
        shards = context_parallel_shard(context, {"x": x}, {"x": 1}, layout)
        out = (
            checkpoint(module, shards["x"], use_reentrant=False)
            if recomputes
            else module(shards["x"])
        )
        out.square().sum().backward()
        rank = context.get_local_rank()
        torch.testing.assert_close(out, layout.shard(expected, 1, rank))
        gradient: Any = module.weight.grad
        total = gradient.clone()
        torch.distributed.all_reduce(total, group=context.get_group())
        torch.testing.assert_close(total, single.weight.grad)


@on_ranks(2)
def test_layouts_that_are_not_known_are_refused() -> None:
    mesh = all_ranks()
    with enabled():
        q, k, v = as_dtensors(torch.randn(3, 1, 2, 4, 4))
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        with pytest.raises(
            LayoutError, match="context_parallel_shard was not called with this axis"
        ):
            attend(*as_dtensors(torch.randn(3, 1, 2, 4, 4), other))
        context_parallel_shard(mesh, [torch.arange(8)], [0])
        attend(q, k, v)
        replicated = DTensor.from_local(torch.randn(1, 2, 8, 4), mesh, [Replicate()])
        with pytest.raises(LayoutError, match="must be DTensors of one layout"):
            attend(q, replicated, replicated)
        # The same placements on another mesh were taken for one layout.
        _, k_of_other, v_of_other = as_dtensors(torch.randn(3, 1, 2, 4, 4), other)
        with pytest.raises(LayoutError, match="must be DTensors of one layout"):
            attend(q, k_of_other, v_of_other)
        context_parallel_shard(mesh, [torch.arange(12)], [0])
        with pytest.raises(LayoutError, match="this rank holds 6 positions, but got 4 queries"):
            attend(q, k, v)


def test_arguments_of_shards() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        tokens = torch.arange(8).view(1, 8)
        assert context_parallel_shard(mesh, (tokens,), (1,))[0].tolist() == [[0, 1]]
        assert context_parallel_shard(mesh, (), ()) == ()
        with pytest.raises(LayoutError, match="one entry for each buffer"):
            context_parallel_shard(mesh, [tokens], [1, 1])
        with pytest.raises(LayoutError, match="one entry for each buffer"):
            context_parallel_shard(mesh, {"x": tokens}, [1])
        with pytest.raises(LayoutError, match="layout is for 2 ranks, but the axis has 4"):
            context_parallel_shard(mesh, [tokens], [1], head_tail_layout(8, 2))
        with pytest.raises(LayoutTypeError, match=r"must be a SequenceLayout, .* got object"):
            context_parallel_shard(mesh, [tokens], [1], object())  # type: ignore[arg-type]  # wrong
        with pytest.raises(UnsupportedAttentionError, match=r"got str; for flex attention"):
            context_parallel_shard(mesh, ["mask"], [1])  # type: ignore[list-item]  # wrong
        with pytest.raises(LayoutError, match="mesh of one axis"):
            grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
            context_parallel_shard(grid, [tokens], [1])
