"""Rows of docs/how-to/divide-gradients.md on real gloo ranks, against one process.

Covers: {global_losses,reducer}.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from data_parallel_model import same_gradients
from shoal_data_parallel import StyleError, fully_shard, replicate
from shoal_dtensor import DTensor, Partial, Replicate, Shard, implicit_replication
from shoal_mesh import DeviceMesh, differentiable, init_device_mesh
from shoal_mesh.testing import on_ranks

ROWS = 8


class Pairs(nn.Module):
    """Two encoders and a temperature, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)
        self.logit_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(x), dim=-1)
        text = F.normalize(self.text(y), dim=-1)
        return image, text, self.logit_scale.exp()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return x, y


def rows_of(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, y = inputs()
    comm = mesh.comm(tuple(range(mesh.ndim)))
    return x.chunk(comm.size)[comm.rank], y.chunk(comm.size)[comm.rank]


def contrast(pairs: Any, targets: Any) -> Any:
    image, text, scale = pairs
    return F.cross_entropy(scale * (image @ text.T), targets)


def over_data(how: str) -> tuple[DeviceMesh, Any, Any]:
    """The data axes, a model on one device, and the same model made parallel."""
    torch.manual_seed(0)
    plain = Pairs().double()
    model: Any = copy.deepcopy(plain)
    shape = (2, 2) if how == "hybrid" else (4,)
    mesh = init_device_mesh("cpu", shape)
    if how in ("hybrid", "units"):
        fully_shard(model.image, mesh)
        fully_shard(model, mesh)
    else:
        replicate(model, mesh, shard_optimizer=how == "optimizer")
    return mesh, plain, model


def set_factor(model: nn.Module, factor: float | None) -> None:
    for module in model.modules():
        if factor is not None and hasattr(module, "set_gradient_divide_factor"):
            cast(Any, module).set_gradient_divide_factor(factor)


def flat(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else init_device_mesh("cpu", (4,))


def global_contrast(model: Any, mesh: DeviceMesh, *, explicit: bool = False) -> Any:
    """The loss of all pairs as a DTensor.

    The temperature meets it as a plain tensor, or as a DTensor.
    """
    ranks = flat(mesh)
    image, text, scale = model(*rows_of(mesh))
    image, text = (DTensor.from_local(rows, ranks, [Shard(0)]) for rows in (image, text))
    targets = DTensor.from_local(torch.arange(ROWS), ranks, [Replicate()])
    if explicit:
        scale = DTensor.from_local(scale, ranks, [Replicate()])
    with implicit_replication():
        return contrast((image, text, scale), targets)


HOWS = pytest.mark.parametrize("how", ["replicas", "optimizer", "units", "hybrid"])


@HOWS
@pytest.mark.parametrize("factor", [None, 1])
@pytest.mark.parametrize("explicit", [False, True])
@on_ranks(4)
def test_a_dtensor_loss_counts_once(how: str, factor: float | None, explicit: bool) -> None:
    """The gradient of `logit_scale` was n times the others', which are shares of the ranks."""
    mesh, plain, model = over_data(how)
    set_factor(model, factor)
    for _ in range(2):
        contrast(plain(*inputs()), torch.arange(ROWS)).backward()
        global_contrast(model, mesh, explicit=explicit).backward()
        same_gradients(plain, model)


@HOWS
@on_ranks(4)
def test_gradients_of_a_dtensor_loss_are_kept(how: str) -> None:
    mesh, plain, model = over_data(how)
    contrast(plain(*inputs()), torch.arange(ROWS)).backward()
    (contrast(plain(*inputs()), torch.arange(ROWS)) * 0.5).backward()
    with model.no_sync():
        global_contrast(model, mesh).backward()
    (global_contrast(model, mesh) * 0.5).backward()
    same_gradients(plain, model)


@pytest.mark.parametrize("how", ["replicas", "units"])
@on_ranks(4)
def test_kept_gradients_of_another_kind_of_loss_are_an_error(how: str) -> None:
    mesh, _, model = over_data(how)
    with model.no_sync():
        global_contrast(model, mesh).backward()
    with pytest.raises(
        StyleError,
        match="shared by 4 data-parallel ranks, and the gradients of this backward to a loss "
        "shared by 1",
    ):
        sum(out.sum() for out in model(*rows_of(mesh))).backward()
    model.zero_grad()


@pytest.mark.parametrize("how", ["replicas", "units"])
@on_ranks(4)
def test_a_plain_loss_of_unknown_kind_is_an_error(how: str) -> None:
    """`full_tensor().backward()` may be added to a loss of this rank's own rows.

    The sum was n times too small.
    """
    mesh, plain, model = over_data(how)
    loss = global_contrast(model, mesh).full_tensor()
    with pytest.raises(StyleError, match=r"set_gradient_divide_factor\(1\) where"):
        loss.backward()
    assert all(param.grad is None for param in model.parameters())
    set_factor(model, 1)
    contrast(plain(*inputs()), torch.arange(ROWS)).backward()
    global_contrast(model, mesh).full_tensor().backward()
    same_gradients(plain, model)


@HOWS
@on_ranks(4)
def test_a_dtensor_loss_beside_a_loss_of_each_rank(how: str) -> None:
    """With `grad_placements=[Partial()]` the ranks' losses are what is averaged."""
    mesh, plain, model = over_data(how)
    image, text, scale = plain(*inputs())
    (contrast((image, text, scale), torch.arange(ROWS)) + image.square().mean()).backward()
    loss = global_contrast(model, mesh, explicit=True)
    own = model.image(rows_of(mesh)[0]) if how == "replicas" else None
    if own is None:
        own = model(*rows_of(mesh))[0]
    own = F.normalize(own, dim=-1)
    shared = loss.full_tensor(grad_placements=[Partial()])
    (shared + own.square().mean()).backward()
    same_gradients(plain, model)


LOSSES: dict[str, tuple[float | None, Callable[[Tensor, int], Tensor]]] = {
    "mean of means": (None, lambda out, _: out.square().mean()),
    "sum over the global number": (1, lambda out, count: out.square().sum() / count),
}


@HOWS
@pytest.mark.parametrize("loss", LOSSES)
@on_ranks(4)
def test_losses_of_each_rank(how: str, loss: str) -> None:
    mesh, plain, model = over_data(how)
    factor, loss_of = LOSSES[loss]
    set_factor(model, factor)
    for module, pairs in (plain, inputs()), (model, rows_of(mesh)):
        image, _, scale = module(*pairs)
        one: Any = loss_of(image * scale, ROWS * 3)
        one.backward()
    same_gradients(plain, model)


@HOWS
@pytest.mark.parametrize("factor", [None, 1])
@on_ranks(4)
def test_an_auxiliary_loss_of_all_ranks(how: str, factor: float | None) -> None:
    """Its gradient is the gradient of the sum of the ranks' values.

    With a factor of 1 it is divided by the number of ranks.
    """
    mesh, plain, model = over_data(how)
    set_factor(model, factor)
    plain(*inputs())[0].mean(0).square().sum().backward()
    total = model(*rows_of(mesh))[0].sum(0)
    total = differentiable.all_reduce(total, mesh.comm(tuple(range(mesh.ndim))))
    loss: Any = (total / ROWS).square().sum()
    (loss if factor is None else loss / 4).backward()
    same_gradients(plain, model)


# --- parameters outside of a forward --------------------------------------------------------------


def values_of(weight: Any, way: str) -> Any:
    if way == "full_tensor":
        return weight.full_tensor()
    if way == "redistribute":
        return weight.redistribute(placements=[Replicate()] * weight.device_mesh.ndim).to_local()
    return weight.t().to(torch.float64).full_tensor().t()


@pytest.mark.parametrize("how", ["optimizer", "units", "hybrid"])
@pytest.mark.parametrize("factor", [None, 1])
@pytest.mark.parametrize("way", ["full_tensor", "redistribute", "transposed"])
@on_ranks(4)
def test_values_of_a_parameter_outside_of_a_forward(
    how: str, factor: float | None, way: str
) -> None:
    """A chunked head: the gradient of one rank's rows was taken for all ranks'."""
    mesh, plain, model = over_data(how)
    set_factor(model, factor)
    x, rows = inputs()[0], rows_of(mesh)[0]
    pairs = (plain.image.weight, x), (values_of(model.image.weight, way), rows)
    for weight, tokens in pairs:
        out = F.linear(tokens, weight).square()
        loss: Any = out.mean() if factor is None else out.sum() / (ROWS * 3)
        loss.backward()
    grad = model.image.weight.grad
    assert grad.placements == model.image.weight.placements
    torch.testing.assert_close(grad.full_tensor(), plain.image.weight.grad)


@on_ranks(4)
def test_gradient_placements_of_values_that_are_given_are_taken() -> None:
    _, plain, model = over_data("units")
    for placement, scale in (Partial("avg"), 1.0), (Partial(), 4.0), (Replicate(), 1.0):
        plain.image.weight.square().sum().backward()
        model.image.weight.full_tensor(grad_placements=[placement]).square().sum().backward()
        got = model.image.weight.grad.full_tensor()
        torch.testing.assert_close(got, plain.image.weight.grad * scale)
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("how", ["units", "hybrid"])
@pytest.mark.parametrize("factor", [None, 1])
@on_ranks(4)
def test_a_penalty_on_shards_counts_once(how: str, factor: float | None) -> None:
    _, plain, model = over_data(how)
    set_factor(model, factor)
    plain.image.weight.square().sum().backward()
    model.image.weight.square().sum().full_tensor().backward()
    same_gradients(plain, model)


@on_ranks(4)
def test_whole_gradients_of_parameters_that_nobody_reduces_stay() -> None:
    mesh, plain, model = over_data("replicas")
    bias = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    mine = nn.Parameter(bias.detach().clone())
    image, text, scale = plain(*inputs())
    contrast((image, text, scale + bias), torch.arange(ROWS)).backward()
    image, text, scale = model(*rows_of(mesh))
    image, text = (DTensor.from_local(rows, mesh, [Shard(0)]) for rows in (image, text))
    targets = DTensor.from_local(torch.arange(ROWS), mesh, [Replicate()])
    with implicit_replication(), pytest.raises(StyleError, match="in different ways"):
        contrast((image, text, scale + mine), targets).backward()
    with implicit_replication():
        image, text, scale = model(*rows_of(mesh))
        image, text = (DTensor.from_local(rows, mesh, [Shard(0)]) for rows in (image, text))
        offset = DTensor.from_local(mine, mesh, [Replicate()])
        contrast((image, text, offset + scale), targets).backward()
    same_gradients(plain, model)
    torch.testing.assert_close(mine.grad, bias.grad)


@pytest.mark.parametrize("parallel", [replicate, fully_shard])
@on_ranks(4)
def test_the_data_axes_of_another_model_tell_nothing(parallel: Callable[..., Any]) -> None:
    # The ranks of an axis of tensors, such as 0 and 1, lie inside this model's data axes.
    other = replicate(nn.Linear(4, 3), init_device_mesh("cpu", (4,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    model = parallel(copy.deepcopy(plain), mesh["data"])
    x, _ = inputs()
    plain(x).square().mean().backward()

    hidden = model(x.chunk(2)[mesh.get_local_rank("data")])
    hidden = DTensor.from_local(hidden, mesh, [Shard(0), Replicate()]).to_local()
    hidden = DTensor.from_local(hidden, mesh["tensor"], [Replicate()])
    hidden.square().mean().backward()  # type: ignore[no-untyped-call]  # torch
    same_gradients(plain, model)
    del other


@pytest.mark.parametrize("how", ["each rank's loss", "a loss of the number"])
@on_ranks(4)
def test_values_of_a_parameter_that_is_a_number(how: str) -> None:
    """Each rank kept the gradient of its own rows: a number is not sharded, so none was reduced."""
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    plain: Any = Pairs().double()
    model: Any = fully_shard(copy.deepcopy(plain), mesh)

    def loss_of(owner: Any, scale: Tensor, x: Tensor, y: Tensor) -> Any:
        image, text, _ = owner(x, y)
        return scale.square() if "number" in how else ((image * text).sum(-1) * scale).mean()

    loss_of(plain, plain.logit_scale, *inputs()).backward()
    loss_of(model, model.logit_scale.full_tensor(), *rows_of(mesh)).backward()
    expected = plain.logit_scale.grad
    assert expected is not None
    torch.testing.assert_close(model.logit_scale.grad.full_tensor(), expected)
