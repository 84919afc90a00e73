"""Fused projections, shared heads and adapters on real ranks, in float64.

Covers: fused.py, blocks.py, lora.py, reshard.py, lowering/packed.py, lowering/adapter.py, lowering/enter.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    Heads,
    LayoutError,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    adapter_parameters,
    input_reshard,
    merge_adapters,
    parallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, told

ALL_REDUCE = torch.ops._c10d_functional.all_reduce


class Attention(nn.Module):
    """Grouped-query attention over whatever heads the projections give, separate or fused."""

    def __init__(self, dim: int, heads: int, kv_heads: int, head: int, fused: bool) -> None:
        super().__init__()
        self.head, self.group = head, heads // kv_heads
        self.widths = [heads * head, kv_heads * head, kv_heads * head]
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.widths)) if fused else None
        if not fused:
            self.q, self.k, self.v = (nn.Linear(dim, width) for width in self.widths)
        self.o = nn.Linear(heads * head, dim)

    def forward(self, x: Tensor) -> Tensor:
        """`(batch, sequence, dim)` in and out."""
        h = self.norm(x)
        if self.qkv is not None:
            packed = self.qkv(h)
            kv = packed.shape[-1] // (self.group + 2) if packed.shape[-1] % (self.group + 2) == 0 else self.head
            q, k, v = packed.split([packed.shape[-1] - 2 * kv, kv, kv], -1)
        else:
            q, k, v = self.q(h), self.k(h), self.v(h)
        q, k, v = (t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (q, k, v))
        repeats = q.shape[1] // k.shape[1] if k.shape[1] else 1
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.o(out.transpose(1, 2).flatten(-2))
        return result


# (query heads, kv heads): enough of both, fewer kv heads than ranks, uneven.
GROUPS = [(8, 4), (8, 2), (8, 1), (12, 6)]


@on_ranks(4)
@pytest.mark.parametrize(("heads", "kv"), GROUPS)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_grouped_query_attention(heads: int, kv: int, fused: bool, sequence: bool) -> None:
    single: Any = Attention(16, heads, kv, 4, fused).double()
    module: Any = copy.deepcopy(single)
    arriving = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {"o": RowwiseParallel(output_layouts=arriving)}
    q = Heads(heads, 4)
    if kv == 6:  # six groups on four ranks: whole groups, unevenly
        q = Heads(6, 8)
        plan["o"] = plan["o"].heads(6, 8)
    if fused:
        blocks = {"q": q, "k": Heads(kv, 4), "v": Heads(kv, 4)}
        plan["qkv"] = PackedColwiseParallel(blocks=blocks, input_layouts=arriving)
    else:
        plan["q"] = ColwiseParallel(input_layouts=arriving).heads(q.count, q.size)
        plan["k"] = plan["v"] = ColwiseParallel(input_layouts=arriving).heads(kv, 4)
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
    axis = all_ranks()
    parallelize_module(module, axis, plan)
    full = torch.randn(2, 8, 16, dtype=torch.double)
    x = full.clone().requires_grad_()
    y = (full.chunk(4, 1)[axis.get_local_rank()] if sequence else full).clone().requires_grad_()
    seed = torch.randn_like(full)
    expected, got = single(x), module(y)
    torch.testing.assert_close(got, expected.chunk(4, 1)[axis.get_local_rank()] if sequence else expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        got.backward(seed.chunk(4, 1)[axis.get_local_rank()] if sequence else seed)
    assert x.grad is not None
    torch.testing.assert_close(y.grad, x.grad.chunk(4, 1)[axis.get_local_rank()] if sequence else x.grad)
    if not sequence and kv >= 4:
        assert mode.get_comm_counts()[ALL_REDUCE] == 1  # one reduction for q, k and v
    assert_same_parameters(module, single)


@on_ranks(4)
def test_gate_and_up_in_one_matrix_train_load_and_copy() -> None:
    axis = all_ranks()
    single: Any = nn.Linear(8, 24).double()
    module: Any = parallelize_module(copy.deepcopy(single), axis, PackedColwiseParallel(blocks={"gate": 12, "up": 12}))
    names = [name for name, _ in module.named_parameters()]
    assert names == ["weight_gate", "weight_up", "bias_gate", "bias_up"]
    x = torch.randn(3, 8, dtype=torch.double)
    rows = torch.cat([half.chunk(4)[axis.get_local_rank()] for half in torch.arange(24).chunk(2)])
    torch.testing.assert_close(module(x), single(x)[:, rows])
    for model in (single, module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(module(x), single(x)[:, rows])
    # The buffer is still one: the product reads the optimizer's result without a copy.
    assert module.weight_up.to_local().data_ptr() > module.weight_gate.to_local().data_ptr()
    torch.testing.assert_close(copy.deepcopy(module)(x), single(x)[:, rows])
    other = nn.Linear(8, 24).double()
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(module(x), other(x)[:, rows])
    with pytest.raises(LayoutError, match="have 20 features, the module 24"):
        parallelize_module(nn.Linear(8, 24), axis, PackedColwiseParallel(blocks={"a": 10, "b": 10}))
    with pytest.raises(LayoutError, match="3 heads cannot be cut over 4 ranks"):
        parallelize_module(nn.Linear(8, 24), axis, ColwiseParallel().heads(3, 8))
    with pytest.raises(UnsupportedModuleError, match="supports Linear"):
        parallelize_module(nn.Embedding(8, 24), axis, PackedColwiseParallel(blocks=2))


@on_ranks(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("base", [False, True])
def test_adapters(sequence: bool, base: bool) -> None:
    axis = all_ranks()
    start: Any = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
    arriving = Shard(0) if sequence else Replicate()
    plan = {
        "0": LoRA(base=ColwiseParallel(input_layouts=arriving), rank=3, alpha=6.0, train_base=base),
        "2": LoRA(base=RowwiseParallel(output_layouts=arriving), rank=3, alpha=6.0, train_base=base),
    }
    torch.manual_seed(1)
    module: Any = parallelize_module(copy.deepcopy(start), axis, plan)
    adapters: dict[str, Any] = dict(adapter_parameters(module))
    assert sorted(adapters) == ["0.lora_A", "0.lora_B", "2.lora_A", "2.lora_B"]
    trained = dict(module.named_parameters()) if base else adapters
    assert [name for name, param in module.named_parameters() if param.requires_grad] == list(trained)
    with torch.no_grad():
        for name, param in adapters.items():
            if name.endswith("B"):
                param.add_(0.3)
    whole = {name: param.detach().full_tensor().requires_grad_() for name, param in adapters.items()}
    full = torch.randn(4, 8, dtype=torch.double)
    x = full.clone().requires_grad_()
    h = functional.gelu(start[0](x) + 2 * x @ whole["0.lora_A"].T @ whole["0.lora_B"].T)
    expected = start[2](h) + 2 * h @ whole["2.lora_A"].T @ whole["2.lora_B"].T
    rank = axis.get_local_rank()
    y = (full[rank : rank + 1] if sequence else full).clone().requires_grad_()
    got = module(y)
    torch.testing.assert_close(got, expected[rank : rank + 1] if sequence else expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(y.grad, x.grad[rank : rank + 1] if sequence else x.grad)
    for name, param in adapters.items():
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), whole[name].grad, msg=told(name))
    for name, param in start.named_parameters() if base else ():
        torch.testing.assert_close(trained[name].grad.full_tensor(), param.grad, msg=told(name))
    merge_adapters(module)
    torch.testing.assert_close(module(y), got)


@on_ranks(4)
def test_input_reshard_keeps_a_part_and_gives_the_same_gradients() -> None:
    axis = all_ranks()
    single: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)).double()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, axis, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    input_reshard(module, axis, 0)
    for rows in (8, 6):
        full = torch.randn(rows, 8, dtype=torch.double)
        x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
        single.zero_grad()
        module.zero_grad()
        single(x).square().sum().backward()
        out = module(y)
        with CommDebugMode() as mode:
            out.square().sum().backward()
        assert mode.get_comm_counts()[torch.ops._c10d_functional.all_gather_into_tensor] == 1
        torch.testing.assert_close(y.grad, x.grad)
        for param, expected in zip(module.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    assert input_reshard(single, axis) is single and not single._forward_pre_hooks
