"""Lists of plain tensors and DTensors, as optimizers, GradScaler and EMA pass them.

Covers: dispatch/composites.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and some of its functions no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.errors import InPlaceError, MixedTensorError
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
}


def _model(*, mixed: bool) -> Any:
    """Two layers; the weight of the first is sharded, everything else is plain."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    if mixed:
        weight: Any = distribute_tensor(
            model[0].weight.detach().clone(),
            init_device_mesh("cpu", (4,)),
            [Shard(0)],
            src_data_rank=None,
        )
        model[0].weight = nn.Parameter(weight)
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, i + 1.0)
    return model


def _values(model: nn.Module) -> list[Tensor]:
    return [
        p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for p in model.parameters()
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(4)
def test_optimizers_over_plain_and_sharded_parameters(name: str) -> None:
    results = []
    for mixed in (False, True):
        model = _model(mixed=mixed)
        optimizer = OPTIMIZERS[name](model.parameters())
        for _ in range(3):
            optimizer.step()
        results.append(_values(model))
    torch.testing.assert_close(*results)


@on_ranks(4)
def test_grad_scaler_over_both() -> None:
    """An infinity in one rank's shard skips the step of every parameter on every rank."""
    for infinite in (False, True):
        results = []
        for mixed in (False, True):
            model = _model(mixed=mixed)
            weight = next(model.parameters())
            if infinite:
                assert weight.grad is not None
                weight.grad[7:] = torch.inf
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            results.append([*_values(model), torch.tensor(scaler.get_scale())])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@on_ranks(4)
def test_a_fused_step_of_parameters_on_several_meshes(kind: Any) -> None:
    plain, model = _model(mixed=False), _model(mixed=False)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for layer, name, at in (
        (0, "weight", mesh),
        (0, "bias", mesh["data"]),
        (1, "bias", mesh["tensor"]),
    ):
        value = getattr(model[layer], name)
        spread: Any = distribute_tensor(
            value.detach().clone(), at, [Shard(0)] * at.ndim, src_data_rank=None
        )
        setattr(model[layer], name, nn.Parameter(spread))
        getattr(model[layer], name).grad = torch.full_like(spread, value.grad.flatten()[0].item())
    for one in (plain, model):
        optimizer = kind(one.parameters(), lr=0.1, fused=True)
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(_values(model), _values(plain))


AVERAGES: dict[str, Callable[[], Any]] = {
    "ema": lambda: get_ema_multi_avg_fn(0.9),
    "swa": get_swa_multi_avg_fn,
}


@pytest.mark.parametrize("name", AVERAGES)
@on_ranks(4)
def test_averages_over_both(name: str) -> None:
    results = []
    for mixed in (False, True):
        model = _model(mixed=mixed)
        averaged = AveragedModel(model, multi_avg_fn=AVERAGES[name]())
        for _ in range(3):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            averaged.update_parameters(model)
        results.append(_values(averaged))
    torch.testing.assert_close(*results)


def test_results_keep_their_places_and_kinds() -> None:
    with fake_world(2):
        x = distribute_tensor(
            torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        results: Any = torch._foreach_mul([torch.ones(3), x, torch.ones(2)], [2.0, 3.0, 4.0])
        assert [isinstance(result, DTensor) for result in results] == [False, True, False]
        assert [result.shape for result in results] == [(3,), (4,), (2,)]
        assert results[2].tolist() == [4, 4]
        assert results[1].placements == (Shard(0),)


def test_an_element_of_both_kinds_is_refused() -> None:
    with fake_world(2):
        x = distribute_tensor(
            torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None
        )
        plain = torch.ones(4)
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            torch._foreach_add([x, plain], [plain, plain])


def test_a_list_with_a_tensor_and_its_view_has_no_one_history(mesh: DeviceMesh) -> None:
    leaf: Any = distribute_tensor(
        torch.ones(4), mesh, [Shard(0)], src_data_rank=None
    ).requires_grad_()
    moved = distribute_tensor(torch.ones(4), mesh, [Replicate()], src_data_rank=None)
    for pair in (lambda x: [x, x.view(4)], lambda x: [x.view(4), x], lambda x: [x, x]):
        with pytest.raises(InPlaceError, match="twice"):
            torch._foreach_neg_(pair(leaf * 2))
        # one after the other, as some are redistributed
        with pytest.raises(InPlaceError, match="twice"):
            torch._foreach_mul_(pair(leaf * 2), [moved, moved])
        with torch.no_grad():
            torch._foreach_neg_(pair(leaf * 2))
    torch._foreach_neg_([leaf * 2, leaf * 3])


def test_a_plain_tensor_scaled_by_a_dtensor_is_refused_in_every_call(mesh: DeviceMesh) -> None:
    def put(value: Tensor, placement: Shard | Replicate) -> DTensor:
        return distribute_tensor(value, mesh, [placement], src_data_rank=None)

    for _ in range(2):
        values: Any = [put(torch.ones(4), Shard(0)), torch.ones(4)]
        factor = put(torch.tensor(0.5), Replicate())
        with pytest.raises(MixedTensorError, match="together with a plain tensor"):
            torch._foreach_mul_(values, factor)


@on_ranks(4)
def test_powers_of_one_number_reduce_their_partial_exponents() -> None:
    """In `torch._foreach_pow(2.0, exponents)` the list comes after a number."""
    mesh = init_device_mesh("cpu", (4,))
    exponents = [torch.arange(4.0), torch.ones(2, 3)]
    partial: list[Any] = [distribute_tensor(x, mesh, [Partial()]) for x in exponents]
    powers: Any = torch._foreach_pow(2.0, partial)
    for got, x in zip(powers, exponents, strict=True):
        torch.testing.assert_close(got.full_tensor(), 2.0**x)
