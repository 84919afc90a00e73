"""Covers: planning/propose.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal_dtensor import DTensor
from shoal_mesh import abstract_mesh, init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import auto_plan, propose
from shoal_models.planning.propose import activation_bytes
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    parallelize_module,
    preview,
)
from small_gpt import Gpt, gpt_plan

MODEL = Gpt(n_layers=1, tied=False)
TOKENS = torch.zeros(8, 6, dtype=torch.long)
WHOLE = sum(param.numel() * 4 for param in MODEL.parameters())


def test_the_fastest_within_the_bound_comes_first() -> None:
    found = propose(MODEL, 4, 6 * WHOLE, TOKENS)
    assert found.best is not None and found.best.shape[0] * found.best.shape[1] == 4
    assert found.best.seconds == min(each.seconds for each in found.candidates)
    assert {each.shape for each in found.candidates} == {(4, 1), (2, 2), (1, 4)}
    shared = {
        each.data: each.nbytes - each.activation_bytes
        for each in found.candidates
        if each.shape == (4, 1)
    }
    assert shared == {
        "replicate": 4 * WHOLE,
        "replicate(shard_optimizer=True)": round(2.5 * WHOLE),
        "fully_shard": WHOLE,
    }
    (tensor,) = (each for each in found.candidates if each.shape == (1, 4))
    cost = preview(MODEL, found.plan, abstract_mesh((4,)), TOKENS)
    assert (tensor.nbytes - tensor.activation_bytes, tensor.seconds) == (
        4 * cost.parameter_bytes,
        cost.seconds,
    )


def test_a_bound_leaves_what_fits() -> None:
    (least,) = (
        each
        for each in propose(MODEL, 4, WHOLE, TOKENS).candidates
        if (each.shape, each.data) == ((4, 1), "fully_shard")
    )
    found = propose(MODEL, 4, least.nbytes, TOKENS)
    assert found.best == least
    assert (
        "too much" in repr(found).splitlines()[-1] and "too much" not in repr(found).splitlines()[1]
    )
    assert propose(MODEL, 4, 1000, TOKENS).best is None
    own = propose(MODEL, 2, WHOLE, TOKENS, plan={"output": RowwiseParallel()}, state=0.0)
    assert own.plan == {"output": RowwiseParallel()}
    assert max(each.nbytes - each.activation_bytes for each in own.candidates) == 2 * WHOLE
    with pytest.raises(LayoutError, match="got 0 ranks"):
        propose(MODEL, 0, 10)


def build(**options: Any) -> Gpt:
    """A model whose activations are more than its parameters."""
    torch.manual_seed(0)
    return Gpt(n_layers=3, dim=64, vocab_size=128, length=64, tied=False, **options)


LONG = torch.zeros(8, 48, dtype=torch.long)
OPTIONS = pytest.mark.parametrize(
    "options", [{"dropout": 0.0}, {"dropout": 0.1}, {"dropout": 0.0, "checkpointed": True}]
)


def measured(run: Callable[[], object]) -> tuple[int, int]:
    """Bytes beyond those before a call: after it, while its result lives, and at the peak."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        result = run()
    held = most = 0
    profiler: Any = profile.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del result
    return held, most


@OPTIONS
@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_activations_are_those_that_a_rank_is_measured_to_keep(
    options: dict[str, Any], sequence: bool
) -> None:
    plan = gpt_plan(sequence)
    expected = activation_bytes(build(**options), plan, abstract_mesh((2,)), (LONG,), {})
    module = parallelize_module(build(**options), init_device_mesh("cpu", (2,)), plan)
    module(LONG)  # what is made once
    held, _ = measured(lambda: module(LONG))
    # of a checkpoint's random numbers, which no operator makes
    states = 3 * torch.get_rng_state().nbytes
    assert held == expected + states * options.get("checkpointed", False)


class Loss(torch.nn.Module):
    """A model that returns its loss."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.flatten())


@on_ranks(2)
def test_the_memory_of_a_step_is_that_which_is_measured() -> None:
    model = Loss(build(dropout=0.0))
    plan = dict(auto_plan(model))
    (found,) = (
        each for each in propose(model, 2, 1, LONG, plan=plan).candidates if each.shape == (1, 2)
    )
    assert found.activation_bytes > found.nbytes / 2
    module: Any = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.AdamW(module.parameters())

    def step() -> None:
        module(LONG).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    _, most = measured(step)
    there = 3 * sum(
        param.to_local().nbytes if isinstance(param, DTensor) else param.nbytes
        for param in module.parameters()
    )
    assert 0.9 * (most + there) <= found.nbytes <= 1.1 * (most + there)


class DependsOnValues(torch.nn.Module):
    """A forward that depends on values where it is parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if out.shape[-1] == 4 or out.sum().item() > 0 else -out


def test_what_cannot_be_counted_is_said() -> None:
    found = propose(
        DependsOnValues(), 2, 1000, torch.randn(4, 4), plan={"linear": ColwiseParallel()}
    )
    assert "not counted" in repr(found) and found.uncounted
    assert {each.shape for each in found.candidates if not each.activation_bytes} == {(1, 2)}


def test_a_notebook_shows_a_row_for_each_candidate() -> None:
    found = propose(MODEL, 2, WHOLE, TOKENS)
    html = found._replace(uncounted="<no inputs>")._repr_html_()
    assert html.count("<tr>") == 1 + len(found.candidates)
    assert "too much" in html and "not counted: &lt;no inputs&gt;" in html
