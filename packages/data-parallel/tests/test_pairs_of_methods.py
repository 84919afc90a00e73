"""Methods that change when or how gradients are reduced, alone and in pairs, against one device.

Covers: {fsdp_module,gradient_group,reduction}.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from custom_collectives import Gather, Scatter
from data_parallel_model import same_gradients, two_equal_models
from shoal_data_parallel import DataParallelMeshDims, FSDPModule, fully_shard, replicate
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import on_ranks

BACKWARDS = 3


def nothing(model: Any) -> None:
    pass


@dataclass(frozen=True)
class Method:
    """One use of a method in a step of several backwards.

    Attributes:
        before: called with the model before each forward, and whether the backward is the last one.
        after: called with the model after the last backward.
        around: made from the model for each forward and backward, with the same flag.
        gain: the factor by which gradients change; the loss is divided by it.
    """

    before: Callable[[Any, bool], object] = lambda model, last: None
    after: Callable[[Any], object] = nothing
    around: Callable[[Any, bool], AbstractContextManager[Any]] = lambda model, last: nullcontext()
    gain: float = 1.0


def units_in(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def each(call: Callable[[Any, bool], object]) -> Callable[[Any, bool], None]:
    """Return a call for each unit of a model."""

    def call_all(model: Any, last: bool) -> None:
        for unit in units_in(model):
            call(unit, last)

    return call_all


def divide(model: Any, last: bool) -> None:
    """Halve the divisor, the number of ranks."""
    for unit in units_in(model):
        unit.set_gradient_divide_factor(dist.get_world_size() / 2)


def triple(flat: Tensor) -> None:
    flat.mul_(3)


METHODS: dict[str, Method] = {
    "is last": Method(lambda m, last: m.set_is_last_backward(last)),
    "finalization": Method(
        lambda m, last: m.set_manual_backward_finalization(True),
        after=lambda m: m.finalize_backward(),
    ),
    "async finalization": Method(
        lambda m, last: m.set_manual_backward_finalization(True),
        after=lambda m: m.finalize_backward(async_op=True).wait(),
    ),
    "sync": Method(lambda m, last: m.set_requires_gradient_sync(last)),
    "no_sync": Method(around=lambda m, last: nullcontext() if last else m.no_sync()),
    "reduce_gradients": Method(
        lambda m, last: m.set_requires_gradient_sync(False), after=lambda m: m.reduce_gradients()
    ),
    "all-reduce": Method(lambda m, last: m.set_requires_all_reduce(last)),
    "divisor": Method(divide, gain=2),
    "hook": Method(each(lambda unit, last: unit.set_all_reduce_hook(triple)), gain=3),
    "sums": Method(each(lambda unit, last: unit.set_force_sum_reduction_for_comms(True))),
    "custom reductions": Method(each(lambda unit, last: unit.set_custom_reduce_scatter(Scatter()))),
    "custom gathers": Method(each(lambda unit, last: unit.set_custom_all_gather(Gather()))),
    "separate groups": Method(lambda m, last: m.set_separate_reduce_scatter_group(last)),
    "buffers": Method(lambda m, last: m.set_reduce_scatter_max_input_buffers(1 if last else 3)),
    "unused": Method(lambda m, last: m.set_reduce_scatter_unused_params(last)),
    "reshard after forward": Method(lambda m, last: m.set_reshard_after_forward(last)),
    "reshard after backward": Method(lambda m, last: m.set_reshard_after_backward(last)),
    "unshard in backward": Method(each(lambda unit, last: unit.set_unshard_in_backward(last))),
    "keep storage": Method(lambda m, last: m.set_keep_unsharded_storage(not last)),
}
# replicas alone do not have shards to gather or scatter
OF_SHARDS = ("custom reductions", "custom gathers")


def over_shards(model: Any, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    in_units(model, lambda module: fully_shard(module, mesh))


def over_replicas_and_shards(model: Any, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replica", "data"))
    in_units(model, lambda module: fully_shard(module, mesh))


def over_replicas(model: Any, ranks: int) -> None:
    mesh: DeviceMesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    dims = DataParallelMeshDims(replicate="data")
    in_units(model, lambda module: replicate(module, mesh, dp_mesh_dims=dims))


def in_units(model: Any, make: Callable[[nn.Module], object]) -> None:
    """Make units of the first two layers, and of the rest."""
    make(model[0])
    make(model[2])
    make(model)


AXES: dict[str, Callable[[Any, int], None]] = {
    "shards": over_shards,
    "replicas and shards": over_replicas_and_shards,
    "replicas": over_replicas,
}
# Layers of 8 features are even on 2 and on 4 ranks. Of 5 and 3 features, ranks have different
# numbers, and the last of 4 ranks has none of 3.
FEATURES = {"even": (8, 8, 8, 8), "uneven": (6, 5, 7, 3)}


def model_of(features: tuple[int, ...]) -> nn.Module:
    first, second, third, last = features
    return nn.Sequential(
        nn.Linear(first, second),
        nn.Tanh(),
        nn.Linear(second, third),
        nn.Tanh(),
        nn.Linear(third, last),
    )


def check_pair(names: tuple[str, str], axes: str, features: tuple[int, ...]) -> None:
    """Compare the gradients of two steps with one device's; each step has several backwards."""
    pair = [METHODS[name] for name in dict.fromkeys(names)]
    gain = pair[0].gain if len(pair) == 1 else pair[0].gain * pair[1].gain
    ranks = dist.get_world_size()
    plain, model = two_equal_models(lambda: model_of(features))
    AXES[axes](model, ranks)
    for step in range(2):
        plain.zero_grad()
        model.zero_grad()
        for number in range(BACKWARDS):
            last = number == BACKWARDS - 1
            seed = BACKWARDS * step + number
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(8, features[0], generator=generator, dtype=torch.float64)
            plain(x).square().mean().backward()
            for method in pair:
                method.before(model, last)
            rows = x.chunk(ranks)[dist.get_rank()]
            with pair[0].around(model, last), pair[-1].around(model, last):
                loss = model(rows).square().mean() / gain
                loss.backward()
        for method in pair:
            method.after(model)
        same_gradients(plain, model)


def check_pairs(first: str, seconds: list[str], axes: str, features: str) -> None:
    for second in seconds:
        if axes == "replicas" and {first, second} & {*OF_SHARDS}:
            continue
        try:
            check_pair((first, second), axes, FEATURES[features])
        except Exception as error:
            error.add_note(f"{first} and {second}")
            raise


NAMES = [*METHODS]


@pytest.mark.parametrize("first", NAMES)
@on_ranks(4, timeout=120)
def test_a_method_alone_and_with_two_others(first: str) -> None:
    """A sample of all pairs: the next method and the fifth one after it."""
    at = NAMES.index(first)
    seconds = [first, NAMES[(at + 1) % len(NAMES)], NAMES[(at + 5) % len(NAMES)]]
    check_pairs(first, seconds, "replicas and shards", "uneven")


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("first", NAMES)
@on_ranks(4, timeout=300)
def test_pairs_on_four_ranks(first: str, axes: str, features: str) -> None:
    check_pairs(first, NAMES[NAMES.index(first) :], axes, features)


@pytest.mark.slow
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("first", NAMES)
@on_ranks(2, timeout=300)
def test_pairs_on_two_ranks(first: str, axes: str, features: str) -> None:
    check_pairs(first, NAMES[NAMES.index(first) :], axes, features)
