"""Styles on real ranks: values, gradients and counted collectives.

Covers: apply.py, parallelize.py, linear.py, sequence.py, prepare.py, lowering/linear.py, lowering/embedding.py,
lowering/norm.py, lowering/boundary.py, lowering/share.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
    unparallelize_module,
)
from shoal_tp_styles.testing import MLP, ModelArgs, StackedMLP, Transformer, all_ranks, own_part, told

FUNCTIONAL = torch.ops._c10d_functional


def counts(mode: CommDebugMode) -> dict[str, int]:
    """Collectives by short name."""
    names = {
        FUNCTIONAL.all_reduce: "all_reduce",
        FUNCTIONAL.all_gather_into_tensor: "all_gather",
        FUNCTIONAL.reduce_scatter_tensor: "reduce_scatter",
        FUNCTIONAL.all_to_all_single: "all_to_all",
        FUNCTIONAL.broadcast: "broadcast",
    }
    return {names[op]: count for op, count in mode.get_comm_counts().items() if count}


def whole(tensor: Tensor | None) -> Tensor:
    """The global value of a parameter's gradient."""
    assert tensor is not None, "there is a gradient"
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_gradients(parallel: nn.Module, single: nn.Module) -> None:
    """Every parameter has the single module's gradient, and lies as its parameter."""
    expected = dict(single.named_parameters())
    for name, param in parallel.named_parameters():
        if isinstance(param, DTensor):
            assert isinstance(param.grad, DTensor), f"{name}: the gradient is a DTensor"
            assert param.grad.placements == param.placements, name
        torch.testing.assert_close(whole(param.grad), expected[name].grad, msg=told(name))


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {}, {"all_reduce": 1}), (Shard(0), {"all_gather": 1}, {"reduce_scatter": 1})],
)
@pytest.mark.parametrize("local", [True, False])
def test_colwise_linear(layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool) -> None:
    axis, single = all_ranks(), nn.Linear(16, 16).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, ColwiseParallel(input_layouts=layout, use_local_output=local)
    )
    full = torch.randn(8, 16, dtype=torch.double, requires_grad=True)
    x = full.detach().clone() if layout == Replicate() else own_part(full, 0)
    x.requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == forward
    assert isinstance(out, DTensor) is not local
    part = out if local else out.to_local()
    assert part.shape == (8, 16 // axis.size())
    expected = single(full)
    torch.testing.assert_close(part, own_part(expected, 1))
    seed = torch.randn(8, 16, dtype=torch.double)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(own_part(seed, 1))
    assert counts(mode) == backward
    assert full.grad is not None
    torch.testing.assert_close(x.grad, full.grad if layout == Replicate() else own_part(full.grad, 0))
    assert_same_gradients(module, single)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {"all_reduce": 1}, {}), (Shard(0), {"reduce_scatter": 1}, {"all_gather": 1})],
)
@pytest.mark.parametrize("local", [True, False])
def test_rowwise_linear(layout: Any, forward: dict[str, int], backward: dict[str, int], local: bool) -> None:
    axis, single = all_ranks(), nn.Linear(16, 12).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, RowwiseParallel(output_layouts=layout, use_local_output=local)
    )
    full = torch.randn(8, 16, dtype=torch.double, requires_grad=True)
    x = own_part(full, 1).requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == forward
    expected = single(full)
    place = (lambda t: t) if layout == Replicate() else (lambda t: own_part(t, 0))
    part = out if local else out.to_local()
    torch.testing.assert_close(part, place(expected))
    seed = torch.randn(8, 12, dtype=torch.double)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(place(seed))
    assert counts(mode) == backward
    assert full.grad is not None
    torch.testing.assert_close(x.grad, own_part(full.grad, 1))
    assert_same_gradients(module, single)


@on_ranks(4)
def test_colwise_embedding() -> None:
    axis, single = all_ranks(), nn.Embedding(8, 16, padding_idx=3).double()
    module: Any = parallelize_module(copy.deepcopy(single), axis, ColwiseParallel())
    tokens = torch.randint(8, (4, 2))
    with CommDebugMode() as mode:
        out = module(tokens)
        out.backward(own_part(torch.ones(4, 2, 16, dtype=torch.double), -1))
    single(tokens).sum().backward()
    assert counts(mode) == {}
    assert out.shape == (4, 2, 16 // axis.size())
    torch.testing.assert_close(out, own_part(single(tokens), -1))
    assert_same_gradients(module, single)


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {"all_reduce": 1}, {}), (Shard(1), {"reduce_scatter": 1}, {"all_gather": 1})],
)
@pytest.mark.parametrize("vocab", [8, 10, 3])
@pytest.mark.parametrize("scale", [True, False])
def test_rowwise_embedding(
    layout: Any, forward: dict[str, int], backward: dict[str, int], vocab: int, scale: bool
) -> None:
    single: Any = nn.Embedding(vocab, 12, padding_idx=2, scale_grad_by_freq=scale).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), style)
    tokens = torch.randint(vocab, (3, 8))
    with CommDebugMode() as mode:
        out = module(tokens)
    assert counts(mode) == forward
    expected = single(tokens)
    place = (lambda t: t) if layout == Replicate() else (lambda t: own_part(t, 1))
    torch.testing.assert_close(out, place(expected))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        out.backward(place(seed))
    assert counts(mode) == backward
    assert_same_gradients(module, single)


@on_ranks(4)
@pytest.mark.parametrize(("make", "bias"), [(nn.LayerNorm, True), (nn.LayerNorm, False), (nn.RMSNorm, None)])
@pytest.mark.parametrize("kind", ["local", "sharded", "replicated"])
def test_sequence_parallel_norms(make: Any, bias: bool | None, kind: str) -> None:
    axis, single = all_ranks(), make(12, **({} if bias is None else {"bias": bias})).double()
    for param in single.parameters():
        nn.init.normal_(param)
    module: Any = parallelize_module(copy.deepcopy(single), axis, SequenceParallel(use_local_output=kind == "local"))
    full = torch.randn(2, 8, 12, dtype=torch.double, requires_grad=True)
    placement = Replicate() if kind == "replicated" else Shard(1)
    x: Tensor = distribute_tensor(full.detach(), axis, (placement,)).requires_grad_()
    if kind == "local":
        x = own_part(full, 1).requires_grad_()
    with CommDebugMode() as mode:
        out = module(x)
    assert counts(mode) == {}
    part = out if kind == "local" else out.to_local()
    expected = single(full)
    torch.testing.assert_close(part, own_part(expected, 1))
    seed = torch.randn_like(expected)
    expected.backward(seed)
    with CommDebugMode() as mode:
        part.backward(own_part(seed, 1))
    # One reduction for all parameters of the norm; a replicated input gets its whole gradient by a gather.
    assert counts(mode) == ({"all_reduce": 1, "all_gather": 1} if kind == "replicated" else {"all_reduce": 1})
    assert full.grad is not None
    torch.testing.assert_close(
        whole(x.grad) if kind != "local" else x.grad, own_part(full.grad, 1) if kind == "local" else full.grad
    )
    assert_same_gradients(module, single)


@on_ranks(4)
def test_prepare_module_input() -> None:
    axis = all_ranks()
    style = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    module: Any = parallelize_module(nn.Identity(), axis, style)
    full = torch.randn(8, 3)
    with CommDebugMode() as mode:
        out = module(own_part(full, 0))
    assert counts(mode) == {"all_gather": 1}
    torch.testing.assert_close(out.full_tensor(), full)


class Several(nn.Module):
    """Takes whatever it is given and gives it back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inputs."""
        return (*args, *kwargs.values())


@on_ranks(4)
def test_prepare_several_inputs() -> None:
    axis, full = all_ranks(), torch.randn(8, 3)
    style = PrepareModuleInput(
        input_layouts=(Shard(0), None, Shard(0)),
        desired_input_layouts=(Replicate(), None, Replicate()),
        input_kwarg_layouts={"mask": Shard(0)},
        desired_input_kwarg_layouts={"mask": Replicate()},
        use_local_output=True,
    )
    module: Any = parallelize_module(Several(), axis, style)
    arrived = distribute_tensor(full, axis, (Shard(0),))
    a, b, c, d = module(own_part(full, 0), "as it is", arrived, mask=own_part(full, 0))
    assert b == "as it is"
    for value in (a, c, d):
        torch.testing.assert_close(value, full)
    with pytest.raises(LayoutError, match="the module has 1 inputs, but layouts for 3"):
        module(full)


@on_ranks(4)
def test_prepare_output_and_both() -> None:
    axis, full = all_ranks(), torch.randn(8, 3)
    out = parallelize_module(
        nn.Identity(), axis, PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    )
    torch.testing.assert_close(out(full), own_part(full, 0))
    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(0),
    )
    module: Any = parallelize_module(nn.Identity(), axis, both)
    x = own_part(full, 0).requires_grad_()
    with CommDebugMode() as mode:
        torch.testing.assert_close(module(x), own_part(full, 0))
    assert counts(mode) == {"all_gather": 1}
    module(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


@on_ranks(4)
@pytest.mark.parametrize("make", [MLP, StackedMLP])
@pytest.mark.parametrize("lower", [True, False])
def test_mlps(make: Any, lower: bool) -> None:
    single: Any = make().double()
    module: Any = copy.deepcopy(single)
    parallelize_module(module, all_ranks(), module.plan, lower=lower)
    full = torch.randn(6, 10, dtype=torch.double)
    x, y = full.clone().requires_grad_(), full.clone().requires_grad_()
    single(x).square().sum().backward()
    module(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert_same_gradients(module, single)


class Readers(nn.Module):
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


READERS = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "o": RowwiseParallel()}


def interleaved(module: Readers, ways: int) -> Readers:
    """The single module whose q gives each rank's two halves in the order that the parallel one's ranks see."""
    order = torch.arange(16).view(ways, 2, 8 // ways).transpose(0, 1).reshape(-1)
    single = copy.deepcopy(module)
    with torch.no_grad():
        single.q.weight.copy_(module.q.weight[order])
        single.q.bias.copy_(module.q.bias[order])
    return single


@on_ranks(4)
@pytest.mark.parametrize("inplace", [False, True])
def test_readers_of_one_activation_share_a_reduction(inplace: bool) -> None:
    axis, start = all_ranks(), Readers().double()
    single: Any = interleaved(start, axis.size())
    module: Any = parallelize_module(copy.deepcopy(start), axis, READERS)
    if inplace:  # a frozen projection saves no input, so its input may be written to
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
    torch.testing.assert_close(whole(module.k.weight.grad), single.k.weight.grad)
    torch.testing.assert_close(module.norm.weight.grad, single.norm.weight.grad)


@on_ranks(4)
def test_shared_readers_under_partial_use() -> None:
    axis, start = all_ranks(), Readers().double()
    module: Any = parallelize_module(copy.deepcopy(start), axis, READERS)
    x = torch.randn(5, 8, dtype=torch.double, requires_grad=True)
    h, reference = module.norm(x), start.norm(x)
    q, k, v = module.q(h), module.k(h), module.v(h)
    expected = {name: getattr(start, name)(reference) for name in "qkv"}
    # Only followers, only the leader, twice, and through autograd.grad: each an ordinary use of the graph.
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
    axis, start = all_ranks(), Readers().double()
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
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_transformer(sequence: bool, checkpointed: bool, tied: bool) -> None:
    args = ModelArgs(dropout_p=0.0, vocab_size=10, weight_tying=tied, checkpoint_activations=checkpointed)
    single: Any = Transformer(args).double()
    module: Any = copy.deepcopy(single)
    Transformer.parallelize(module, all_ranks(), use_seq_parallel=sequence)
    assert (module.output.weight is module.tok_embeddings.weight) is tied
    tokens = torch.randint(10, (3, 8))
    expected, got = single(tokens), module(tokens)
    torch.testing.assert_close(got, expected)
    expected.square().mean().backward()
    got.square().mean().backward()
    assert_same_gradients(module, single)


@on_ranks(4)
def test_uneven_features_and_unparallelize() -> None:
    single: Any = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 5)).double()
    module: Any = copy.deepcopy(single)
    axis = all_ranks()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(module, axis, plan)
    x = torch.randn(3, 7, dtype=torch.double)
    torch.testing.assert_close(module(x), single(x))
    single(x).square().sum().backward()
    module(x).square().sum().backward()
    assert_same_gradients(module, single)
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(x), single(x))
    assert copied[0].weight is not module[0].weight
    unparallelize_module(module)
    assert type(module[0].weight) is nn.Parameter
    for mine, theirs in zip(module.parameters(), single.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(module(x), single(x), rtol=0, atol=0)
    parallelize_module(module, axis, plan)
    torch.testing.assert_close(module(x), single(x))
