"""Covers: lowering/shared_reduction.py: several readers of an activation share one reduction."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import Shard
from shoal_mesh import CommDebugMode, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from small_models import own_shard
from tp_checks import counts, global_value


class NormWithThreeReaders(nn.Module):
    """Three projections of one normalised activation, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.o = nn.Linear(8, 8)

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """Same shape as x."""
        h = self.norm(x)
        q = self.q(h)
        a, b = q.chunk(2, -1)
        if inplace:
            h = h.mul_(2)
        out: Tensor = x + self.o(a * self.k(h) + torch.sigmoid(b) * self.v(h)) + h
        return out


READERS = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "o": RowwiseParallel(),
}


def interleaved(module: NormWithThreeReaders, ways: int) -> NormWithThreeReaders:
    """The single module whose q gives a rank's halves in the order of the parallel one's ranks."""
    order = torch.arange(16).view(ways, 2, 8 // ways).transpose(0, 1).reshape(-1)
    single = copy.deepcopy(module)
    with torch.no_grad():
        single.q.weight.copy_(module.q.weight[order])
        single.q.bias.copy_(module.q.bias[order])
    return single


@on_ranks(4)
@pytest.mark.parametrize("inplace", [False, True])
def test_readers_of_one_activation_share_a_reduction(inplace: bool) -> None:
    axis, start = all_ranks(), NormWithThreeReaders().double()
    single: Any = interleaved(start, axis.size())
    module: Any = parallelize_module(copy.deepcopy(start), axis, READERS)
    # a frozen projection saves no input, so its input may be written to
    if inplace:
        module.q.requires_grad_(False)
        single.q.requires_grad_(False)
    full = torch.randn(5, 8, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    single(x, inplace).square().sum().backward()
    out = module(y, inplace)
    with CommDebugMode() as mode:
        out.square().sum().backward()
    # After a write in between, q read another value than k and v: two reductions.
    assert counts(mode) == {"all_reduce": 2 if inplace else 1}
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(global_value(module.k.weight.grad), single.k.weight.grad)
    torch.testing.assert_close(module.norm.weight.grad, single.norm.weight.grad)


@on_ranks(4)
def test_shared_readers_under_partial_use() -> None:
    axis, start = all_ranks(), NormWithThreeReaders().double()
    module: Any = parallelize_module(copy.deepcopy(start), axis, READERS)
    x = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    h, reference = module.norm(x), start.norm(x)
    q, k, v = module.q(h), module.k(h), module.v(h)
    expected = {name: getattr(start, name)(reference) for name in "qkv"}
    # Only followers, only the leader, twice, and through autograd.grad: each an ordinary use of the
    # graph.
    for name, out in (("k", k), ("q", q), ("v", v), ("k", k)):
        (ours,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected[name].sum(), x, retain_graph=True)
        torch.testing.assert_close(ours, theirs)
    again = module.q(h)
    (ours,) = torch.autograd.grad((again.sum() + q.sum()), x, retain_graph=True)
    (theirs,) = torch.autograd.grad(2 * expected["q"].sum(), x, retain_graph=True)
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        silent = module.k(h)
    torch.testing.assert_close(silent, k)
    assert not silent.requires_grad


@on_ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_readers_under_checkpointing(reentrant: bool) -> None:
    axis, start = all_ranks(), NormWithThreeReaders().double()
    single: Any = interleaved(start, axis.size())
    module: Any = parallelize_module(copy.deepcopy(start), axis, READERS)
    x = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    single(x).square().sum().backward()
    out = torch.utils.checkpoint.checkpoint(module, y, use_reentrant=reentrant)
    out.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    torch.testing.assert_close(module.norm.weight.grad, single.norm.weight.grad)


@on_ranks(4)
def test_readers_in_inference_mode() -> None:
    plan = {name: ColwiseParallel(input_layouts=Shard(0)) for name in ("q", "k")}
    start = NormWithThreeReaders().double()
    module: Any = parallelize_module(copy.deepcopy(start), all_ranks(), plan)
    x = torch.randn(8, 8, dtype=torch.double)
    with torch.inference_mode():
        own = own_shard(x, 0)
        torch.testing.assert_close(module.k(own), own_shard(start.k(x), 1))
        torch.testing.assert_close(module.q(own), own_shard(start.q(x), 1))


@fake_world(2)
@pytest.mark.parametrize("gathered", [False, True])
def test_an_activation_that_was_read_goes_into_a_file_and_back(gathered: bool) -> None:
    style = ColwiseParallel(input_layouts=Shard(0)) if gathered else ColwiseParallel()
    module: Any = parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (2,)), style)
    x = torch.randn(3, 8, requires_grad=not gathered) * 1
    out = module(x)
    assert vars(x), "the reader left its token"
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded, x) and torch.equal(module(loaded), out)


@on_ranks(4)
def test_an_activation_that_gets_other_data_is_read_again() -> None:
    # an empty shard has one address, whatever it is
    axis, sizes = all_ranks(), (2, 1, 1, 0)
    start = nn.Linear(4, 8).double()
    linear = parallelize_module(
        copy.deepcopy(start),
        axis,
        ColwiseParallel(input_layouts=Shard(0, sizes=sizes), use_local_output=False),
    )
    full = torch.randn(4, 4, dtype=torch.double)
    x = full.split_with_sizes(sizes)[axis.get_local_rank()].clone()
    for factor in (1, 2, 3):
        x.data = factor * full.split_with_sizes(sizes)[axis.get_local_rank()]
        torch.testing.assert_close(linear(x).full_tensor(), start(factor * full))
