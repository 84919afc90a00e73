"""Gradients of lowered modules are added to `.grad` directly.

If a hook needs them, they go through autograd. The tests run on real ranks.

Covers: lowering/parameters.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal_dtensor import DTensor, Replicate, Shard
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import GradRoute
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    HeadParallel,
    PackedColwiseParallel,
    RowwiseParallel,
    SecondOrderError,
    SequenceParallel,
    parallelize_module,
    unparallelize_module,
)
from shoal_tp_styles.lowering import parameters
from shoal_tp_styles.lowering.parameters import deliver_grad
from shoal_tp_styles.modules import sharded_linear
from small_models import MLP
from tp_checks import global_value

# the module, its style, and the shape of a rank's input
KINDS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "columns": (partial(nn.Linear, 8, 12), ColwiseParallel(), (3, 8)),
    "rows": (partial(nn.Linear, 8, 12), RowwiseParallel(), (3, 2)),
    "overlapped rows": (partial(nn.Linear, 8, 12), RowwiseParallel().overlapped(2), (4, 2)),
    "packed columns": (partial(nn.Linear, 8, 24), PackedColwiseParallel(blocks=3), (3, 8)),
    "vocabulary": (partial(nn.Embedding, 9, 8), RowwiseParallel(), ()),
    "features": (partial(nn.Embedding, 9, 8), ColwiseParallel(), ()),
    "norm": (partial(nn.LayerNorm, 8), SequenceParallel(use_local_output=True), (2, 3, 8)),
    "convolution": (partial(nn.Conv1d, 8, 12, 3), ColwiseParallel(), (2, 8, 5)),
}


def lowered(module: nn.Module, plan: Any) -> nn.Module:
    """The module in parallel, in float64."""
    return parallelize_module(module.double(), all_ranks(), plan)


def mlp() -> nn.Module:
    """Two linear layers."""
    return lowered(MLP("cpu"), {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two sets of gradients agree, bit by bit and in their specs."""
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert type(grad) is DTensor
        assert grad.spec is expected[name].spec, name
        assert torch.equal(grad.to_local(), expected[name].to_local()), name


@contextmanager
def routes_taken() -> Iterator[list[GradRoute]]:
    """What became of each gradient."""
    taken: list[GradRoute] = []

    def deliver(route: GradRoute, param: Any, spec: Any, local: Tensor) -> Any:
        returned = deliver_grad(route, param, spec, local)
        taken.append("accumulate" if returned is None else "return")
        return returned

    with pytest.MonkeyPatch.context() as patch:
        for module in (parameters, sharded_linear):
            patch.setattr(module, "deliver_grad", deliver)
        yield taken


def grads(module: nn.Module) -> dict[str, Any]:
    """The gradients by name."""
    return {name: param.grad for name, param in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_straight_gradients_are_those_of_autograd(kind: str) -> None:
    make, style, shape = KINDS[kind]
    module = lowered(make(), style)
    x = torch.randn(shape, dtype=torch.float64) if shape else torch.arange(6) % 9
    params = dict(module.named_parameters())
    with routes_taken() as taken:
        module(x).square().sum().backward()
    assert taken == ["accumulate"] * len(params)
    found = grads(module)
    with routes_taken() as taken:
        expected = torch.autograd.grad(module(x).square().sum(), list(params.values()))
    assert taken == ["return"] * len(params)
    same(found, dict(zip(params, expected, strict=True)))


@on_ranks(4)
def test_gradients_accumulate_over_passes_and_over_uses() -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    module(x).square().sum().backward()
    once = {name: grad.to_local().clone() for name, grad in grads(module).items()}
    held = grads(module)
    module(x).square().sum().backward()
    for name, grad in grads(module).items():
        assert grad is held[name], "a gradient that is there is added to"
        assert torch.equal(grad.to_local(), 2 * once[name])
    module.zero_grad()
    (module(x).square().sum() + module(x).square().sum()).backward()
    for name, grad in grads(module).items():
        assert torch.equal(grad.to_local(), 2 * once[name])


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """The most elements that a product has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and type(out) is Tensor:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_gradients_accumulate_in_the_dtype_that_is_chosen(kind: str) -> None:
    make, style, shape = KINDS[kind]
    single = make().bfloat16()
    module = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    plain = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    for param in module.parameters():
        param.grad_dtype = torch.float32
    sums: dict[str, Any] = {}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(shape, dtype=torch.bfloat16) if shape else torch.arange(6) % 9
        for each in (module, plain):
            each(x).square().sum().backward()
        for name, param in plain.named_parameters():
            sums[name] = sums.get(name, 0) + param.grad.to_local().float()
            param.grad = None
    for name, param in module.named_parameters():
        assert param.grad.dtype is torch.float32
        assert torch.equal(param.grad.to_local(), sums[name])


@on_ranks(2)
def test_a_gradient_of_another_dtype_needs_no_product_of_its_size() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "_BLOCK_BYTES", 2**10)
        module = parallelize_module(nn.Linear(64, 128).bfloat16(), all_ranks(), ColwiseParallel())
        module.weight.grad_dtype = torch.float32
        for _ in range(2):
            out = module(torch.ones(3, 64, dtype=torch.bfloat16)).sum()
            with Products() as products:  # type: ignore[no-untyped-call]  # as above
                out.backward()
            assert products.most == 2**10 // 2
    grad: Any = module.weight.grad
    assert torch.equal(grad.to_local(), torch.full((64, 64), 6.0))


@on_ranks(2)
def test_the_chosen_dtype_and_the_gradient_stay_when_a_plan_comes_and_goes() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(6, 2)).bfloat16()
    for param in model.parameters():
        param.grad_dtype, param.grad = torch.float32, torch.ones_like(param, dtype=torch.float32)
    plan = {"0": ColwiseParallel(), "1": HeadParallel()}
    for change in (
        lambda: parallelize_module(model, all_ranks(), plan),
        lambda: unparallelize_module(model),
    ):
        changed: Any = change()
        for param in changed.parameters():
            assert param.grad_dtype is param.grad.dtype is torch.float32
            assert (global_value(param.grad) == 1).all()


@pytest.mark.parametrize("after", [False, True])
@on_ranks(4)
def test_hooks_see_the_complete_gradient(after: bool) -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = grads(module)
    module.zero_grad()
    seen: dict[str, Any] = {}
    for name, param in module.named_parameters():
        hooked: Any = param
        if after:
            hooked.register_post_accumulate_grad_hook(lambda p, n=name: seen.update({n: p.grad}))
        else:
            hooked.register_hook(lambda grad, n=name: seen.update({n: grad}))
    module(x).square().sum().backward()
    same(seen, expected)
    same(grads(module), expected)


@on_ranks(4)
def test_the_node_of_the_leaf_runs_after_its_gradient_is_complete() -> None:
    # What DistributedDataParallel hooks to.
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    seen: dict[str, Any] = {}
    nodes = []
    for name, param in module.named_parameters():
        expanded: Any = param.expand_as(param)
        node = expanded.grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, n=name, p=param: seen.update({n: p.grad.clone()}))
        nodes.append(node)
    module(x).square().sum().backward()
    same(seen, grads(module))


@on_ranks(4)
def test_a_hook_may_change_the_gradient() -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    module(x).square().sum().backward()
    weight: Any = dict(module.named_parameters())["net1.weight"]
    expected = weight.grad
    module.zero_grad()
    weight.register_hook(lambda grad: grad * 2)
    module(x).square().sum().backward()
    assert torch.equal(weight.grad.to_local(), 2 * expected.to_local())


@on_ranks(4)
def test_gradients_that_are_not_asked_for_are_not_computed() -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    weight: Any = dict(module.named_parameters())["net1.weight"]
    with routes_taken() as taken:
        module(x).square().sum().backward(inputs=[weight])
    assert taken == ["accumulate"]
    assert [name for name, grad in grads(module).items() if grad is not None] == ["net1.weight"]
    with routes_taken() as taken:
        torch.autograd.grad(module(x).square().sum(), x)
    assert taken == []


@on_ranks(4)
def test_a_gradient_with_another_layout_is_added_to() -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    module(x).square().sum().backward()
    expected = grads(module)
    weight: Any = dict(module.named_parameters())["net1.weight"]
    module.zero_grad()
    zeros: Any = torch.zeros_like(weight)
    weight.grad = zeros.redistribute(placements=[expected["net2.bias"].placements[0]])
    module(x).square().sum().backward()
    assert torch.equal(weight.grad.full_tensor(), expected["net1.weight"].full_tensor())


@on_ranks(4)
def test_a_parameter_in_lowered_and_dispatched_computation() -> None:
    module, x = mlp(), torch.randn(3, 10, dtype=torch.float64)
    weight: Any = dict(module.named_parameters())["net1.weight"]
    module(x).square().sum().backward()
    expected = weight.grad.full_tensor() + 2 * weight.detach().full_tensor()
    module.zero_grad()
    (module(x).square().sum() + weight.square().sum().full_tensor()).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected)


@on_ranks(4)
def test_second_derivatives_through_a_norm_are_refused() -> None:
    norm = lowered(nn.Sequential(nn.LayerNorm(8)), {"0": SequenceParallel()})
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(SecondOrderError, match="lower=False"):
        torch.autograd.grad(norm(x).square().sum(), list(norm.parameters()), create_graph=True)


@on_ranks(4)
def test_a_reader_whose_output_is_unused_leaves_its_gradient_alone() -> None:
    class UnusedReader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.first(x)
            out: Tensor = self.second(x)
            return out

    pair = lowered(UnusedReader(), {"first": ColwiseParallel(), "second": ColwiseParallel()})
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    pair(x * 1).square().sum().backward()
    found = grads(pair)
    assert found["first.weight"] is None
    assert found["second.weight"] is not None
    assert x.grad is not None


@pytest.mark.parametrize("where", ["replicated", "sequence"])
@on_ranks(2)
def test_the_reduction_runs_beside_a_weight_gradient_that_takes_long(where: str) -> None:
    style = ColwiseParallel(input_layouts=Replicate() if where == "replicated" else Shard(0))
    name = "all_reduce_" if where == "replicated" else "reduce_scatter_dim"
    for width, beside in ((4, False), (1024, True)):
        module = lowered(nn.Linear(width, 128), style)
        x = torch.randn(16, width, dtype=torch.float64, requires_grad=True)
        seen: list[bool] = []
        reduce = getattr(sharded_linear, name)

        def recorded(*args: Any, seen: list[bool] = seen, reduce: Any = reduce, **how: Any) -> Any:
            seen.append(how.get("async_op", False))
            return reduce(*args, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sharded_linear, name, recorded)
            module(x).square().sum().backward()
        assert seen == [beside]
        full = x.detach().clone()
        if where == "sequence":
            shards = [torch.empty_like(full) for _ in range(2)]
            torch.distributed.all_gather(shards, full)
            full = torch.cat(shards)
        params: list[Any] = list(module.parameters())
        weight, bias = (param.full_tensor() for param in params)
        expected = torch.autograd.grad(
            nn.functional.linear(full.requires_grad_(), weight, bias).square().sum(), full
        )[0]
        rank = torch.distributed.get_rank()
        torch.testing.assert_close(
            x.grad, expected.chunk(2)[rank] if where == "sequence" else expected
        )


@pytest.mark.parametrize("name", ["weight", "bias"])
@on_ranks(2)
def test_a_parameter_that_was_replaced_by_a_plain_tensor_is_named(name: str) -> None:
    """The forward ended in an AttributeError: a Parameter has no `spec`."""
    module = parallelize_module(nn.Linear(4, 4), all_ranks(), ColwiseParallel())
    setattr(module, name, nn.Parameter(torch.ones(4, 4) if name == "weight" else torch.ones(4)))
    with pytest.raises(LayoutError, match=f"'{name}' of a parallel module is a plain Parameter"):
        module(torch.ones(2, 4))
