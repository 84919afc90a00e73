"""Parameters that a loss reads between a forward and its backward, on real gloo ranks.

Covers: units/lent_values.py, gradients/global_losses.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh as init_mesh_of_torch
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.utils.checkpoint import checkpoint

from data_parallel_model import same_gradients
from shoal_data_parallel import StyleError, fully_shard, replicate
from shoal_dtensor import DTensor, distribute_module
from shoal_dtensor.errors import MixedTensorError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks

RANKS = 4


class Encoders(nn.Module):
    """Two encoders, and parameters that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.logit_scale = nn.Parameter(torch.tensor([0.7]))
        self.head = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)


def scaled(model: Any, x: Tensor, y: Tensor) -> Any:
    image, text = model(x, y)
    return (image @ text.T * model.logit_scale.exp()).logsumexp(-1).mean()


def weighted(model: Any, x: Tensor, y: Tensor) -> Any:
    """A plain number times a number of the parameter: an operator takes both without a question."""
    image, text = model(x, y)
    loss = (image * text).sum(-1).square().mean()
    return loss * (-model.logit_scale).exp().sum() + model.logit_scale.sum()


def with_a_head(model: Any, x: Tensor, y: Tensor) -> Any:
    image, text = model(x, y)
    return F.linear(image * text, model.head).square().mean()


LOSSES = scaled, weighted, with_a_head


def rows(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    return [*zip(x.chunk(count), y.chunk(count), strict=True)]


def plain_model() -> Any:
    torch.manual_seed(0)
    return Encoders().double()


def as_units(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.image, mesh)
    return fully_shard(model, mesh)


def as_hybrid(model: Any) -> Any:
    return fully_shard(model, init_device_mesh("cpu", (2, RANKS // 2)))


def with_sharded_optimizer(model: Any) -> Any:
    return replicate(model, init_device_mesh("cpu", (RANKS,)), shard_optimizer=True)


def as_units_of_torch(model: Any) -> Any:
    return fully_shard_of_torch(model, mesh=init_mesh_of_torch("cpu", (RANKS,)))


def whole(grad: Any) -> Any:
    """Return all values of a gradient, which may be a DTensor of torch."""
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


@pytest.mark.parametrize("parallel", [as_units, as_hybrid, with_sharded_optimizer])
@on_ranks(RANKS)
def test_hooks_on_values_between_forward_and_backward(parallel: Callable[[Any], Any]) -> None:
    """They were dropped, because each read of the parameter made another tensor."""
    plain = plain_model()
    model = parallel(copy.deepcopy(plain))
    mine = rows(RANKS)[torch.distributed.get_rank()]
    for pair in rows(RANKS):
        (scaled(plain, *pair) / RANKS).backward()
    plain.logit_scale.grad *= 2
    image, text = model(*mine)
    model.logit_scale.register_hook(lambda grad: grad * 2)
    (image @ text.T * model.logit_scale.exp()).logsumexp(-1).mean().backward()
    same_gradients(plain, model)


@pytest.mark.parametrize(
    "parallel", [as_units, as_hybrid, with_sharded_optimizer, as_units_of_torch]
)
@on_ranks(RANKS)
def test_losses_that_use_parameters_of_the_module(parallel: Callable[[Any], Any]) -> None:
    """They raised MixedTensorError; the weighted one took one rank's gradient for all ranks'."""
    for loss_of in LOSSES:
        plain = plain_model()
        model = parallel(copy.deepcopy(plain))
        mine = rows(RANKS)[torch.distributed.get_rank()]
        for _ in range(2):
            for pair in rows(RANKS):
                (loss_of(plain, *pair) / RANKS).backward()
            loss_of(model, *mine).backward()
            for param, of_ranks in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(whole(of_ranks.grad), param.grad)


@pytest.mark.parametrize("parallel", [as_units, with_sharded_optimizer])
@on_ranks(RANKS)
def test_shards_are_seen_by_all_other_code(parallel: Callable[[Any], Any]) -> None:
    model = parallel(plain_model())
    model(*rows(RANKS)[0])
    assert not isinstance(model.logit_scale, DTensor)
    assert torch.equal(model.logit_scale.full_tensor(), model.logit_scale)
    assert model.logit_scale.placements == dict(model.named_parameters())["logit_scale"].placements
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert isinstance(copy.deepcopy(model).logit_scale, DTensor)
    with torch.no_grad():
        model.logit_scale.fill_(0.5)
    assert torch.equal(model.logit_scale.full_tensor(), torch.tensor([0.5]).double())
    scaled(model, *rows(RANKS)[0]).backward()
    assert isinstance(model.logit_scale, DTensor)
    assert isinstance(model.logit_scale.grad, DTensor)


@on_ranks(RANKS)
def test_copies_of_gathered_values_outlive_the_gathered_memory() -> None:
    plain = plain_model()
    model = as_units(copy.deepcopy(plain))
    pairs = (plain, rows(1)[0]), (model, rows(1)[0])
    for module, pair in pairs:
        loss = with_a_head(module, *pair)
        loss.backward(retain_graph=True)
        loss.backward()
    same_gradients(plain, model)


@pytest.mark.parametrize("then", ["a forward", "a backward"])
@on_ranks(2)
def test_a_write_to_a_copy_is_an_error(then: str) -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)))
    out = model(torch.ones(2, 4))
    model.bias.data.clamp_(max=-1.0)
    with pytest.raises(StyleError, match="were written to; the written values are lost"):
        (model(torch.ones(2, 4)) if then == "a forward" else out).sum().backward()
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_where_nothing_is_gathered_the_error_names_the_way_out() -> None:
    torch.manual_seed(0)
    model: Any = fully_shard(
        nn.Linear(4, 4), init_device_mesh("cpu", (2,)), reshard_after_forward=True
    )
    out = model(torch.ones(2, 4))
    with pytest.raises(MixedTensorError, match=r"full_tensor\(\) returns its values"):
        out * model.bias


class Criterion(nn.Module):
    """A child of a model without a forward, whose parameters a loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.log_sigma = nn.Parameter(torch.tensor(0.3))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.criterion = nn.Linear(4, 3), Criterion()
        self.scale = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def times_a_child(model: Any, x: Tensor, values: Callable[[Any], Any]) -> Any:
    return model(x).square().mean() * values(model.criterion.log_sigma).exp()


def divided_by_a_power(model: Any, x: Tensor, values: Callable[[Any], Any]) -> Any:
    return model(x).square().mean() / (values(model.criterion.log_sigma) + 2) ** 2


def of_a_checkpoint(model: Any, x: Tensor, values: Callable[[Any], Any]) -> Any:
    """A reentrant checkpoint runs the forward without a graph, so the unit is free behind it."""
    out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
    return (out.square().mean() * values(model.criterion.log_sigma).exp()).sum()


def read_before_the_forward(model: Any, x: Tensor, values: Callable[[Any], Any]) -> Any:
    factor = values(model.scale).exp()
    return (model(x).square().mean() * factor).sum()


def as_units_of_the_body(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model.body, mesh)
    return fully_shard(model, mesh)


FACTORS = times_a_child, divided_by_a_power, of_a_checkpoint, read_before_the_forward


def freed_after_the_forward(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    return fully_shard(model, mesh, reshard_after_forward=True)


@pytest.mark.parametrize(
    "parallel", [as_units_of_the_body, as_hybrid, freed_after_the_forward, with_sharded_optimizer]
)
@on_ranks(RANKS)
def test_a_loss_of_each_rank_is_no_factor_of_shards(parallel: Callable[[Any], Any]) -> None:
    """Each rank took the gradient of its own loss for the gradient of the mean, in silence."""
    x = rows(1)[0][0]
    for loss_of in FACTORS:
        torch.manual_seed(0)
        plain = Regression().double()
        model = parallel(copy.deepcopy(plain))
        mine = x.chunk(RANKS)[torch.distributed.get_rank()]
        with pytest.raises(StyleError, match=r"equal on all ranks.*full_tensor\(\)\.exp\(\)"):
            loss_of(model, mine, lambda param: param).backward()
        model.zero_grad()
        # the way out
        loss_of(model, mine, lambda param: param.full_tensor()).backward()
        for part in x.chunk(RANKS):
            (loss_of(plain, part, lambda param: param) / RANKS).backward()
        same_gradients(plain, model)


def decayed(model: Any, x: Tensor) -> Any:
    """The gradient of a term does not depend on the others."""
    return model(x).square().mean() + sum(param.square().sum() for param in model.parameters())


def regularized(model: Any, x: Tensor) -> Any:
    """The factor of the penalty is equal on all ranks."""
    strength = model.scale
    strength = strength.full_tensor() if isinstance(strength, DTensor) else strength
    return model(x).square().mean() + strength.exp().sum() * model.body.weight.square().sum()


@on_ranks(2)
def test_numbers_that_are_equal_on_all_ranks_are_factors() -> None:
    x = rows(1)[0][0]
    for loss_of in (decayed, regularized):
        torch.manual_seed(0)
        plain = Regression().double()
        model: Any = fully_shard(copy.deepcopy(plain), init_device_mesh("cpu", (2,)))
        loss_of(model, x).backward()
        loss_of(plain, x).backward()
        same_gradients(plain, model)


@on_ranks(4)
def test_tensor_parallel_parameters_take_the_loss_of_their_replica() -> None:
    """Their mesh has no data axes: the loss is equal on all of its ranks."""
    x = rows(1)[0][0]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = Regression().double()
    model: Any = copy.deepcopy(plain)
    distribute_module(model.criterion, mesh["tensor"])
    replicate(model, mesh["data"])
    mine = x.chunk(2)[mesh.get_local_rank("data")]
    times_a_child(model, mine, lambda param: param).backward()
    for part in x.chunk(2):
        (times_a_child(plain, part, lambda param: param) / 2).backward()
    same_gradients(plain, model)
