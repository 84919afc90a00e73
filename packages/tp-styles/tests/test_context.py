"""Covers: styles/activation.py, modules/own_forward.py: attention of a sharded sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal_context_parallel import Documents, SequenceLayout
from shoal_context_parallel.internal import Method
from shoal_mesh import CommDebugMode, DeviceMesh, abstract_mesh, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    ContextParallel,
    HeadParallel,
    LayoutError,
    PlanError,
    RowwiseParallel,
    parallelize_module,
    preview,
    unparallelize_module,
    verify,
)
from small_models import assert_same_parameters
from tp_checks import counts


class RotaryBlock(nn.Module):
    """Norm, causal attention with grouped heads, and a projection.

    The attention has rotary embeddings of given positions.
    """

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.reentrant = reentrant
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (
            nn.Linear(16, n, dtype=torch.double) for n in (16, 8, 8, 16)
        )
        self.double()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        run, inputs = self.attend, (self.norm(x), positions)
        out = (
            run(*inputs)
            if self.reentrant is None
            else checkpoint(run, *inputs, use_reentrant=self.reentrant)
        )
        return x + cast(Tensor, out)

    def attend(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        angles = (positions / 10).unsqueeze(-1)
        q, k = (x * angles.cos() + x.roll(2, -1) * angles.sin() for x in (q, k))
        mixed = self.mix(q, k, v)
        return cast(Tensor, self.o(mixed.transpose(1, 2).flatten(-2)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Packed(RotaryBlock):
    """Two documents behind each other, each by itself."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        each = [
            super(Packed, self).forward(*part)
            for part in zip(x.tensor_split([4], 1), positions.tensor_split([4]), strict=True)
        ]
        return torch.cat(each, 1)


class Windowed(RotaryBlock):
    """Each query reads its own key and the three keys before it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        reads = torch.ones(length, length, dtype=torch.bool).tril().triu(-3)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=reads, enable_gqa=True)


TENSOR = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(),
}


def assert_as_one_device(
    module: Any,
    mesh: DeviceMesh,
    layout: SequenceLayout,
    single: RotaryBlock,
    run: Callable[..., Any] | None = None,
) -> None:
    """Outputs, and gradients summed over the axis of the sequence."""
    x = torch.randn(
        2, layout.length, 16, dtype=torch.double, generator=torch.Generator().manual_seed(0)
    )
    positions = torch.arange(layout.length)
    expected = single(x, positions)
    expected.square().sum().backward()
    rank = mesh.get_local_rank()
    out = (run or module)(layout.shard(x, 1, rank), layout.positions(rank))
    torch.testing.assert_close(out, layout.shard(expected.detach(), 1, rank))
    out.square().sum().backward()
    unparallelize_module(module)
    for param in module.parameters():
        torch.distributed.all_reduce(param.grad, group=mesh.get_group())
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_a_block_over_four_ranks_and_times_tensor_parallelism(method: Method) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    for length in (16, 11):
        layout = SequenceLayout.head_tail(length, 4)
        single = RotaryBlock()
        module = parallelize_module(
            copy.deepcopy(single), all_ranks(), ContextParallel(method=method, layout=layout)
        )
        assert_as_one_device(module, all_ranks(), layout, single)
        layout = SequenceLayout.head_tail(length, 2)
        single = RotaryBlock()
        style = ContextParallel(method=method, layout=layout).on("context")
        plan = {"": style} | {name: style.on("tensor") for name, style in TENSOR.items()}
        module = parallelize_module(copy.deepcopy(single), mesh, plan)
        assert_as_one_device(module, mesh["context"], layout, single)


@on_ranks(4)
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_packed_documents_times_tensor_parallelism(method: Method) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    layout, documents = (
        SequenceLayout.head_tail(11, 2),
        Documents.from_ids(torch.tensor([0] * 4 + [1] * 7)),
    )
    style = ContextParallel(method=method, layout=layout, documents=documents).on("context")
    plan = {"": style} | {name: each.on("tensor") for name, each in TENSOR.items()}
    assert_as_one_device(
        parallelize_module(RotaryBlock(), mesh, plan), mesh["context"], layout, Packed()
    )


@on_ranks(2)
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_queries_read_the_keys_of_a_window(method: Method) -> None:
    layout = SequenceLayout.head_tail(11, 2)
    style = ContextParallel(method=method, layout=layout, window=(3, None))
    module = parallelize_module(RotaryBlock(), all_ranks(), style)
    assert_as_one_device(module, all_ranks(), layout, Windowed())


@on_ranks(2)
def test_by_name_contiguous_checkpointed_and_compiled() -> None:
    layout = SequenceLayout.contiguous(8, 2)
    single = RotaryBlock()
    module = parallelize_module(RotaryBlock(), all_ranks(), ContextParallel())

    def checkpointed(*inputs: Tensor) -> Any:
        return checkpoint(module, *inputs, use_reentrant=False)

    assert_as_one_device(module, all_ranks(), layout, single, checkpointed)
    # what is run again is so outside of the module's forward
    for reentrant in (False, True):
        module = parallelize_module(RotaryBlock(reentrant), all_ranks(), ContextParallel())
        assert_as_one_device(module, all_ranks(), layout, RotaryBlock())
    x = torch.randn(1, 4, 16, dtype=torch.double)
    module = parallelize_module(RotaryBlock(), all_ranks(), ContextParallel())
    compiled = torch.compile(module, backend="eager")
    positions = layout.positions(get_rank())
    torch.testing.assert_close(compiled(x, positions), module(x, positions))


@on_ranks(4)
@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_preview_declares_what_runs(method: Method) -> None:
    x, positions = torch.randn(2, 16, 16, dtype=torch.double), torch.arange(16)
    module = RotaryBlock()
    costs = preview(module, {"": ContextParallel(method=method)}, abstract_mesh((4,)), x, positions)
    parallelize_module(module, all_ranks(), ContextParallel(method=method))
    layout = SequenceLayout.contiguous(16, 4)
    with CommDebugMode() as forward:
        out = module(layout.shard(x, 1, get_rank()), layout.positions(get_rank()))
    with CommDebugMode() as backward:
        out.sum().backward()
    for op in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
        assert costs.count(op) == (counts(forward).get(op, 0), counts(backward).get(op, 0)), op
    sent = sum(cost.nbytes for row in costs.rows for cost in row.forward)
    q, k = 2 * 16 * 16 * 8, 2 * 16 * 8 * 8
    assert (
        sent - 4 * 4
        == {"ring": 2 * k // 3 * 3, "allgather": 2 * k, "ulysses": 2 * k + 2 * q}[method]
    )


def test_verify_does_not_judge_whole_inputs() -> None:
    plan = {"": ContextParallel()}
    found = verify(RotaryBlock(), plan, abstract_mesh((2,)), torch.randn(1, 4, 16), torch.arange(4))
    assert not found.wrong and "takes a rank's positions" in found.unproven[0]


@fake_world(2)
def test_beside_other_styles_on_one_module() -> None:
    axis = init_device_mesh("cpu", (2,))
    module = parallelize_module(nn.MultiheadAttention(8, 2, batch_first=True), axis, HeadParallel())
    parallelize_module(module, axis, ContextParallel())
    # a mask of local columns, not attention of local positions
    with pytest.raises(LayoutError, match="this rank's"):
        x = torch.randn(1, 4, 8)
        module(x, x, x, need_weights=False, attn_mask=torch.zeros(4, 4, dtype=torch.bool))
    with pytest.raises(PlanError, match="already has the style ContextParallel"):
        parallelize_module(module, axis, ContextParallel())
