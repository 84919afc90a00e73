"""Norms by tokens and by channels.

Covers: modules/{own_forward,channels}.py, styles/activation.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from one_device import as_one_device
from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ChannelParallel,
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from small_models import own_shard
from tp_checks import assert_same_gradients, counts, global_value


class Norm(nn.Module):
    """A norm as model libraries write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class MyRMSNorm(Norm):
    """Recognised by its name."""


@on_ranks(4)
@pytest.mark.parametrize("kind", ["Norm", "MyRMSNorm"])
def test_norms_of_other_libraries(kind: str) -> None:
    single: Any = {"Norm": Norm, "MyRMSNorm": MyRMSNorm}[kind]()
    style, x = SequenceParallel(use_local_output=True), torch.randn(2, 8, 8, dtype=torch.double)
    run = as_one_device(single, style, all_ranks(), [x], arriving=Shard(1), leaving=Shard(1))
    assert type(run.outputs[0]) is Tensor
    assert isinstance(parallelize_module(single, all_ranks(), style).weight, DTensor)


def scrambled(module: nn.Module) -> Any:
    """The module with parameters that are all in use, in float64."""
    torch.manual_seed(3)
    for param in module.double().parameters():
        nn.init.normal_(param)
    return module


class Shifted(nn.BatchNorm2d):
    """A batch norm with a forward of its own, which runs on DTensors."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


NORMS: list[tuple[str, Any]] = [
    ("even groups", lambda: nn.GroupNorm(4, 12)),
    ("uneven groups", lambda: nn.GroupNorm(6, 12)),
    ("batch", lambda: nn.BatchNorm2d(12)),
    ("own forward", lambda: Shifted(12)),
    ("channels", lambda: nn.PReLU(12)),
    ("one slope", lambda: nn.PReLU()),
    ("no parameters", lambda: nn.GroupNorm(4, 12, affine=False)),
]


@on_ranks(4)
@pytest.mark.parametrize("name", [name for name, _ in NORMS])
def test_norms_between_convolutions(name: str) -> None:
    norm = dict(NORMS)[name]()
    unit = 12 // norm.num_groups if isinstance(norm, nn.GroupNorm) else 1
    single: Any = scrambled(
        nn.Sequential(nn.Conv2d(3, 12, 3), norm, nn.ReLU(), nn.Conv2d(12, 5, 3))
    )
    columns, rows = ColwiseParallel().aligned(unit), RowwiseParallel().aligned(unit)
    plan = {"0": columns, "1": ChannelParallel(), "3": rows}
    run = as_one_device(single, plan, all_ranks(), [torch.randn(4, 3, 7, 7, dtype=torch.double)])
    assert sum(run.forward.values()) == 1  # the rows' reduction


@on_ranks(4)
@pytest.mark.parametrize(
    ("momentum", "compiled"),
    [(0.1, False), (None, False), pytest.param(0.1, True, marks=pytest.mark.slow)],
)
def test_running_statistics_of_batch_norms(momentum: float | None, compiled: bool) -> None:
    """Five channels: two, two, one and none on a rank."""
    single = scrambled(nn.BatchNorm1d(5, momentum=momentum))
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), ChannelParallel())
    run: Any = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for step, batch in enumerate([4, 6, 7, 3]):
        if step == 3:
            single.eval(), module.eval()
        full = torch.randn(batch, 5, 2, dtype=torch.double) + step
        torch.testing.assert_close(run(own_shard(full, 1)), own_shard(single(full), 1))
    for name, buffer in single.named_buffers():
        torch.testing.assert_close(global_value(module.get_buffer(name)), buffer)


@fake_world(4)
def test_shards_through_groups_are_refused() -> None:
    axis = init_device_mesh("cpu", (4,))
    module: Any = nn.Sequential(nn.Conv1d(2, 12, 1), nn.GroupNorm(2, 12))
    parallelize_module(module, axis, {"0": ColwiseParallel(), "1": ChannelParallel()})
    with pytest.raises(LayoutError, match=r"aligned\(6\)"):
        module(torch.randn(2, 2, 5))
    with pytest.raises(UnsupportedModuleError, match="ChannelParallel does not support LayerNorm"):
        parallelize_module(nn.LayerNorm(4), axis, ChannelParallel())
    with pytest.raises(LayoutError, match="expected a tensor as the input, got str"):
        parallelize_module(nn.LayerNorm(4), axis, SequenceParallel())("x")


@on_ranks(4)
@pytest.mark.parametrize(
    ("make", "bias"), [(nn.LayerNorm, True), (nn.LayerNorm, False), (nn.RMSNorm, None)]
)
@pytest.mark.parametrize("kind", ["local", "sharded", "replicated"])
def test_sequence_parallel_norms(make: Any, bias: bool | None, kind: str) -> None:
    axis, single = all_ranks(), make(12, **({} if bias is None else {"bias": bias})).double()
    for param in single.parameters():
        nn.init.normal_(param)
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, SequenceParallel(use_local_output=kind == "local")
    )
    full = torch.randn(2, 8, 12, dtype=torch.double, requires_grad=True)
    placement = Replicate() if kind == "replicated" else Shard(1)
    x: Tensor = distribute_tensor(full.detach(), axis, (placement,)).requires_grad_()
    if kind == "local":
        x = own_shard(full, 1).requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == {}
    part = out if kind == "local" else out.to_local()
    expected = single(full)
    torch.testing.assert_close(part, own_shard(expected, 1))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(own_shard(seed, 1))
    # One reduction for all parameters of the norm; a replicated input gets its complete gradient by
    # a gather.
    assert counts(mode) == (
        {"all_reduce": 1, "all_gather": 1} if kind == "replicated" else {"all_reduce": 1}
    )
    assert full.grad is not None
    torch.testing.assert_close(
        global_value(x.grad) if kind != "local" else x.grad,
        own_shard(full.grad, 1) if kind == "local" else full.grad,
    )
    assert_same_gradients(module, single)
