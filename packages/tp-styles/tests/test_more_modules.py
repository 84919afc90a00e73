"""Channel norms, embedding bags by rows, recurrent modules; every lowering under autocast and checkpointing.

Covers: channel.py, lowering/groups.py, lowering/bags.py, lowering/recurrent.py, lowering/channels.py,
lowering/ports.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    HeadParallel,
    Heads,
    LayoutError,
    LoRA,
    PackedColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    parallelize_module,
    unparallelize_module,
)
from shoal_tp_styles.testing import all_ranks, assert_same_parameters, own_part


def scrambled(module: nn.Module) -> Any:
    """The module with parameters that are all in use, in float64."""
    torch.manual_seed(3)
    for param in module.double().parameters():
        nn.init.normal_(param)
    return module


NORMS: list[tuple[str, Any]] = [
    ("even groups", lambda: nn.GroupNorm(4, 12)),
    ("uneven groups", lambda: nn.GroupNorm(6, 12)),
    ("batch", lambda: nn.BatchNorm2d(12)),
    ("channels", lambda: nn.PReLU(12)),
    ("one slope", lambda: nn.PReLU()),
    ("no parameters", lambda: nn.GroupNorm(4, 12, affine=False)),
]


@on_ranks(4)
@pytest.mark.parametrize("name", [name for name, _ in NORMS])
def test_norms_between_convolutions(name: str) -> None:
    norm = dict(NORMS)[name]()
    unit = 12 // norm.num_groups if isinstance(norm, nn.GroupNorm) else 1
    single: Any = scrambled(nn.Sequential(nn.Conv2d(3, 12, 3), norm, nn.ReLU(), nn.Conv2d(12, 5, 3)))
    module: Any = copy.deepcopy(single)
    columns, rows = ColwiseParallel().aligned(unit), RowwiseParallel().aligned(unit)
    parallelize_module(module, all_ranks(), {"0": columns, "1": ChannelParallel(), "3": rows})
    full = torch.randn(4, 3, 7, 7, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    expected = single(x)
    with CommDebugMode() as mode:
        got = module(y)
    assert mode.get_total_counts() == 1  # the rows' reduction
    torch.testing.assert_close(got, expected)
    expected.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_parameters(module, single)


@on_ranks(4)
def test_groups_that_the_cut_would_split_are_refused() -> None:
    module: Any = nn.Sequential(nn.Conv1d(2, 12, 1), nn.GroupNorm(2, 12))
    parallelize_module(module, all_ranks(), {"0": ColwiseParallel(), "1": ChannelParallel()})
    with pytest.raises(LayoutError, match=r"aligned\(6\)"):
        module(torch.randn(2, 2, 5))
    with pytest.raises(UnsupportedModuleError, match="ChannelParallel has no sharding for LayerNorm"):
        parallelize_module(nn.LayerNorm(4), all_ranks(), ChannelParallel())


@on_ranks(4)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_embedding_bag_by_rows(mode: str, padding: int | None, layout: Any) -> None:
    single: Any = nn.EmbeddingBag(9, 5, mode=mode, padding_idx=padding).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    tokens, offsets = torch.randint(9, (12,)), torch.tensor([0, 5, 5, 9])
    weights = torch.rand(12, dtype=torch.double) if mode == "sum" else None
    for how in ((tokens, offsets, weights), (tokens.view(4, 3), None, None)):
        expected, got = single(*how), module(*how)
        torch.testing.assert_close(got, expected if layout == Replicate() else own_part(expected, 0))
        seed = torch.randn_like(expected)
        expected.backward(seed)
        got.backward(seed if layout == Replicate() else own_part(seed, 0))
    assert_same_parameters(module, single)


@on_ranks(2)
def test_what_bags_and_recurrent_modules_cannot_do_is_refused() -> None:
    axis = all_ranks()
    whole = RowwiseParallel(input_layouts=Replicate())
    with pytest.raises(UnsupportedModuleError, match="mode='max'"):
        parallelize_module(nn.EmbeddingBag(4, 4, mode="max"), axis, whole)
    with pytest.raises(UnsupportedModuleError, match=r"its batch can: SequenceParallel\(sequence_dim=0\)"):
        parallelize_module(nn.LSTM(4, 4, batch_first=True), axis, SequenceParallel())
    with pytest.raises(UnsupportedModuleError, match="ColwiseParallel has no sharding for GRU"):
        parallelize_module(nn.GRU(4, 4), axis, ColwiseParallel())
    dropping: Any = parallelize_module(nn.GRU(4, 4, num_layers=2, dropout=0.5), axis, SequenceParallel())
    with pytest.raises(UnsupportedModuleError, match="between its layers"):
        dropping(torch.randn(3, 2, 4))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("local", [True, False])
def test_recurrent_modules_on_parts_of_the_batch(kind: str, batch_first: bool, local: bool) -> None:
    make = getattr(nn, kind)
    single: Any = make(3, 5, num_layers=2, bidirectional=True, batch_first=batch_first).double()
    batch = 0 if batch_first else 1
    style = SequenceParallel(sequence_dim=batch, use_local_output=local)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    full = torch.randn((8, 4, 3) if batch_first else (4, 8, 3), dtype=torch.double)
    start = torch.randn(4, 8, 5, dtype=torch.double)
    x, y = full.clone().requires_grad_(), own_part(full, batch).requires_grad_()
    hx, own = (start, start) if kind == "LSTM" else start, own_part(start, 1)
    expected, states = single(x, hx)
    got, ours = module(y, (own, own) if kind == "LSTM" else own)
    assert isinstance(got, DTensor) is not local
    got_local = got if local else got.to_local()
    torch.testing.assert_close(got_local, own_part(expected, batch))
    for theirs, mine in zip(states, ours, strict=True) if kind == "LSTM" else [(states, ours)]:
        torch.testing.assert_close(mine if local else mine.to_local(), own_part(theirs, 1))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        got_local.backward(own_part(seed, batch))
    assert mode.get_total_counts() == 1  # all parameters together
    assert x.grad is not None
    torch.testing.assert_close(y.grad, own_part(x.grad, batch))
    assert_same_parameters(module, single)
    torch.testing.assert_close(module(full)[0], single(full)[0])  # plain again, with its own weights


class Turned(nn.Module):
    """A Linear that lies as (in, out)."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        """`(..., nf)`."""
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.nf)


class Alone(nn.Module):
    """Self-attention of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        out: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return out


class Blocks(nn.Module):
    """A fused product whose blocks meet."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.rows = nn.Linear(12, 14), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        a, b = self.fused(x).chunk(2, -1)
        out: Tensor = self.rows(a * b)
        return out


def pair(first: nn.Module, second: nn.Module) -> nn.Module:
    """Columns, an activation, rows."""
    return nn.Sequential(first, nn.Tanh(), second)


COLUMNS_ROWS: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}
ADAPTERS = {name: LoRA(base=style, rank=2, train_base=True) for name, style in COLUMNS_ROWS.items()}
FUSED = {
    "fused": PackedColwiseParallel(blocks={"a": Heads(7, 1), "b": Heads(7, 1)}),
    "rows": RowwiseParallel().heads(7, 1),
}
# Name -> how it is built, its plan; all take and give (4, 6, 12), and no width divides by the ranks.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "linear": (lambda: pair(nn.Linear(12, 7), nn.Linear(7, 12)), COLUMNS_ROWS),
    "overlapped": (
        lambda: pair(nn.Linear(12, 7), nn.Linear(7, 12)),
        {"0": ColwiseParallel(), "2": RowwiseParallel().overlapped(2)},
    ),
    "turned": (lambda: pair(Turned(12, 7), Turned(7, 12)), COLUMNS_ROWS),
    "convolution": (lambda: pair(nn.Conv1d(6, 7, 3, padding=1), nn.Conv1d(7, 6, 1)), COLUMNS_ROWS),
    "groups": (
        lambda: nn.Sequential(nn.Conv1d(6, 15, 1), nn.GroupNorm(3, 15), nn.Conv1d(15, 6, 1)),
        {"0": ColwiseParallel().aligned(5), "1": ChannelParallel(), "2": RowwiseParallel().aligned(5)},
    ),
    "adapters": (lambda: pair(nn.Linear(12, 7), nn.Linear(7, 12)), ADAPTERS),
    "attention": (Alone, {"inner": HeadParallel()}),
    "fused": (Blocks, FUSED),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_autocast_and_checkpointing(name: str, dtype: torch.dtype | None, reentrant: bool | None) -> None:
    make, plan = CASES[name]
    torch.manual_seed(5)
    start = make()
    kind = torch.double if dtype is None else torch.float32
    module: Any = parallelize_module(copy.deepcopy(start).to(kind), all_ranks(), plan)
    single: Any = unparallelize_module(copy.deepcopy(module)) if name == "adapters" else start.to(kind)
    full = torch.randn(4, 6, 12, dtype=kind)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected = single(x)
        got = module(y) if reentrant is None else checkpoint(module, y, use_reentrant=reentrant)
    assert got.dtype == expected.dtype == (dtype or kind)
    close: dict[str, Any] = {} if dtype is None else {"rtol": 0.1, "atol": 0.1}
    torch.testing.assert_close(got, expected, **close)
    seed = torch.randn_like(expected)
    expected.backward(seed)
    got.backward(seed)
    assert x.grad is not None and y.grad is not None and y.grad.dtype == kind
    torch.testing.assert_close(y.grad, x.grad, **close)
    if name == "adapters":
        for param in module.parameters():
            assert param.grad is not None and param.grad.dtype == kind
        return
    for param in module.parameters():
        assert param.grad is not None and param.grad.dtype == kind
    assert_same_parameters(module, single, **close)
