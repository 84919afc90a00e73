"""Operations by way of DTensors against the plain tensor.  Covers: ops/via_dtensor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sharding_cases import BRICKS, SPECS, backward, chunk, full_of
from shoal_mesh.testing import on_ranks
from shoal_shard_api import NotExpressibleError, ShardedTensor, _shard_tensor, implicit_reshard
from shoal_shard_api.errors import UnsupportedOpError

FULL = torch.linspace(-2, 2, 48).reshape(8, 6)


WEIGHT = torch.linspace(-1, 1, 30).reshape(5, 6)


OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: t + t,
    "scalar": lambda t: 3 - t * 2.5,
    "plain": lambda t: t * FULL + FULL[0],
    "compare": lambda t: (t > 0) & (t < FULL.abs().mean()),
    "unary": lambda t: torch.tanh(t).exp(),
    "gelu": F.gelu,
    "where": lambda t: torch.where(t > 0, t, t * 0.1),
    "clamp": lambda t: t.clamp(-1, 1),
    "sum": lambda t: t.sum(),
    "sum of rows": lambda t: t.sum(0),
    "sum of columns": lambda t: t.sum(1, keepdim=True),
    "mean": lambda t: t.mean(dim=1),
    "var": lambda t: t.var(),
    "max": lambda t: t.max(),
    "amax": lambda t: t.amax(0),
    "softmax 0": lambda t: t.softmax(0),
    "softmax 1": lambda t: F.softmax(t, 1),
    "log_softmax": lambda t: F.log_softmax(t, -1),
    "matmul": lambda t: t @ FULL.t(),
    "matmul right": lambda t: FULL.t() @ t,
    "matmul both": lambda t: t.t() @ t,
    "linear": lambda t: F.linear(t, WEIGHT, WEIGHT[:, 0]),
    "linear weight": lambda t: F.linear(FULL[:3], t),
    "transpose": lambda t: t.t(),
    "layer_norm": lambda t: F.layer_norm(t, (6,)),
    "mse": lambda t: F.mse_loss(t, FULL + 1),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "to": lambda t: t.double(),
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 3.0, dtype=torch.float64),
}


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("op", OPS)
def test_an_op_equals_the_plain_one(op: str, spec: str) -> None:
    got = OPS[op](_shard_tensor(FULL, SPECS[spec]))
    wanted = OPS[op](FULL)
    assert isinstance(got, ShardedTensor) is (wanted.dim() > 0)
    torch.testing.assert_close(full_of(got), wanted)


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_gradients(spec: str) -> None:
    for name in (
        "scalar",
        "plain",
        "unary",
        "matmul",
        "matmul both",
        "linear weight",
        "softmax 0",
        "softmax 1",
        "mse",
        "sum of rows",
    ):
        tensor = _shard_tensor(FULL.clone().requires_grad_(), SPECS[spec])
        plain = FULL.clone().requires_grad_()
        for leaf in (tensor, plain):
            result = OPS[name](leaf)
            backward((result * result).sum())
        assert plain.grad is not None
        torch.testing.assert_close(full_of(tensor.grad), plain.grad, msg=name)


@on_ranks(4)
def test_gradients_of_plain_arguments_count_every_rank() -> None:
    weight, tensor = WEIGHT.clone().requires_grad_(), _shard_tensor(FULL, chunk(0))
    expected = WEIGHT.clone().requires_grad_()
    backward(F.linear(tensor, weight).square().sum())
    backward(F.linear(FULL, expected).square().sum())
    torch.testing.assert_close(weight.grad, expected.grad)


@on_ranks(4)
def test_autograd_grad_of_a_sharded_input() -> None:
    tensor = _shard_tensor(FULL.clone().requires_grad_(), chunk(0, (1, 2)))
    (gradient,) = torch.autograd.grad((tensor * FULL).sum(), [tensor])
    assert isinstance(gradient, ShardedTensor)
    assert torch.equal(gradient, FULL)
    result = tensor * 2
    (gradient,) = torch.autograd.grad(result, tensor, grad_outputs=result.detach())
    assert torch.equal(gradient, FULL * 4)


@on_ranks(4)
def test_results_of_one_shape_keep_the_layout() -> None:
    for spec in SPECS.values():
        tensor = _shard_tensor(FULL, spec)
        for name in ("add", "unary", "softmax 0", "softmax 1"):
            assert OPS[name](tensor)._layout == tensor._layout


@on_ranks(4)
def test_tensors_in_different_layouts_are_brought_together() -> None:
    for left in SPECS.values():
        for right in SPECS.values():
            a, b = _shard_tensor(FULL, left), _shard_tensor(FULL.exp(), right)
            torch.testing.assert_close(full_of(a + b), FULL + FULL.exp())
            torch.testing.assert_close(full_of(a @ b.t()), FULL @ FULL.exp().t())


@on_ranks(4)
def test_writing_in_place() -> None:
    for left in SPECS.values():
        for right in SPECS.values():
            a, b = _shard_tensor(FULL, left), _shard_tensor(FULL.exp(), right)
            pointer = a._local_tensors[0].data_ptr()
            assert a.add_(b) is a
            torch.testing.assert_close(full_of(a), FULL + FULL.exp())
            assert a._local_tensors[0].data_ptr() == pointer
    tensor, plain = _shard_tensor(FULL, chunk(0)), FULL.clone()
    for each in (tensor, plain):
        each[2:4] = 7
        each[:, 1] *= 2
        each.mul_(0.5).relu_()
    torch.testing.assert_close(full_of(tensor), plain)


@on_ranks(4)
def test_in_place_ops_keep_the_history() -> None:
    tensor, plain = (
        _shard_tensor(FULL.clone().requires_grad_(), chunk(0)),
        FULL.clone().requires_grad_(),
    )
    for leaf in (tensor, plain):
        value = leaf * 1
        value.mul_(leaf).add_(1)
        backward(value.sum())
    torch.testing.assert_close(full_of(tensor.grad), plain.grad)
    with pytest.raises(UnsupportedOpError, match=r"mul_: a leaf ShardedTensor that requires grad"):
        tensor.mul_(2)
    with torch.no_grad():
        tensor.mul_(2)
    torch.testing.assert_close(full_of(tensor.detach()), FULL * 2)


@on_ranks(4)
def test_optimizers_step_sharded_parameters() -> None:
    for make in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad):
        sharded = [torch.nn.Parameter(_shard_tensor(FULL, spec)) for spec in SPECS.values()]
        plain = [torch.nn.Parameter(FULL.clone()) for _ in SPECS]
        for parameters in (sharded, plain):
            optimizer = make(parameters, lr=0.1)
            for _ in range(2):
                backward(sum(((p * p).sum() for p in parameters), torch.zeros(())))
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(sharded, plain, strict=True):
            torch.testing.assert_close(full_of(a.detach()), b.detach())


@on_ranks(4)
def test_clip_grad_norm() -> None:
    sharded, plain = (
        torch.nn.Parameter(_shard_tensor(FULL, chunk(0))),
        torch.nn.Parameter(FULL.clone()),
    )
    norms = []
    for parameter in (sharded, plain):
        backward((parameter * parameter).sum())
        norms.append(torch.nn.utils.clip_grad_norm_([parameter], 1.0))
    torch.testing.assert_close(full_of(norms[0]), norms[1])
    torch.testing.assert_close(full_of(sharded.grad), plain.grad)


@on_ranks(4)
def test_other_functions_are_refused_there_unless_moving_is_allowed() -> None:
    tensor = _shard_tensor(FULL, BRICKS)
    for name in ("sum", "matmul", "softmax 0", "linear weight", "transpose"):
        with pytest.raises(
            NotExpressibleError, match=r"ranks \[3\] hold several shards.*ChunkShardingSpec"
        ):
            OPS[name](tensor)
        with implicit_reshard():
            torch.testing.assert_close(full_of(OPS[name](tensor)), OPS[name](FULL))
    with implicit_reshard():
        torch.nn.init.normal_(tensor)
        a = full_of(tensor)
        torch.manual_seed(3)
        torch.nn.init.normal_(tensor)
    torch.manual_seed(3)
    assert torch.equal(full_of(tensor), torch.empty(8, 6).normal_())
    assert not torch.equal(a, full_of(tensor))


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_initializers_draw_what_one_device_draws(spec: str) -> None:
    for init in (
        torch.nn.init.normal_,
        torch.nn.init.uniform_,
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.xavier_uniform_,
        lambda t: torch.nn.init.constant_(t, 3.0),
        torch.nn.init.zeros_,
        torch.nn.init.trunc_normal_,
    ):
        tensor, plain = torch.nn.Parameter(_shard_tensor(FULL, SPECS[spec])), FULL.clone()
        torch.manual_seed(1)
        init(plain)
        torch.manual_seed(1)
        assert init(tensor) is tensor
        assert torch.equal(full_of(tensor.detach()), plain)
