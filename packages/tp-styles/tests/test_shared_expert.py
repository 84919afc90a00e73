"""A shared expert that runs while tokens are in flight to routed experts.

Covers: expert_forward.py, token_route.py.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_checks import assert_same_on_shards
from moe_models import WIDTH, Mixture, PackedExperts, mixture
from shoal_dtensor import Replicate
from shoal_mesh import CommDebugMode, all_reduce, all_to_all_v
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import (
    ExpertParallel,
    LayoutError,
    SharedExpertOverlap,
    parallelize_module,
    preview,
    unparallelize_module,
)
from shoal_tp_styles.experts import token_route
from tp_checks import assert_same_gradients, counts

PLAN = {"": SharedExpertOverlap(shared="shared"), "experts": ExpertParallel()}


@on_ranks(4)
@pytest.mark.parametrize("kind", ["packed", "listed", "sorted"])
def test_values_and_gradients_are_those_of_one_device(kind: str) -> None:
    single = mixture(kind, 6)
    module = parallelize_module(copy.deepcopy(single), all_ranks(), PLAN)
    rank = torch.distributed.get_rank()
    assert_same_on_shards(module, single, (5, 0, 3, 4), rank, all_ranks().comm(0))
    x = torch.randn(3, WIDTH, dtype=torch.double)
    with torch.no_grad():
        expected = parallelize_module(mixture(kind, 6), all_ranks(), {"experts": ExpertParallel()})(
            x
        )
        assert torch.equal(copy.deepcopy(module)(x), expected)
        assert torch.equal(unparallelize_module(module)(x), single(x))


@on_ranks(2)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_shared_expert_runs_while_tokens_and_their_gradients_travel(checkpointed: bool) -> None:
    events: list[str] = []

    class Recorded:
        def __init__(self, pending: Any) -> None:
            self.pending = pending

        def then(self, function: Any) -> Recorded:
            return Recorded(self.pending.then(function))

        def wait(self) -> Any:
            events.append("awaited")
            return self.pending.wait()

    def recorded(*args: Any, **kwargs: Any) -> Any:
        events.append("sent")
        return Recorded(all_to_all_v(*args, **kwargs))

    module: Any = mixture("packed", 4)
    module.shared.register_forward_hook(lambda *_: events.append("shared"))
    module.shared.register_full_backward_hook(lambda *_: events.append("shared backward"))
    parallelize_module(module, all_ranks(), PLAN)
    x = torch.randn(6, WIDTH, dtype=torch.double, requires_grad=True)
    with patch.object(token_route, "all_to_all_v", recorded):
        out = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
        forward = ["sent", "shared", "awaited"]
        assert events == forward
        events.clear()
        out.sum().backward()
    assert events == forward * checkpointed + ["sent", "shared backward", "awaited"]


class Recomputed(Mixture):
    """A block that recomputes a part of itself, or all, in backward."""

    def __init__(self, part: str, *, reentrant: bool) -> None:
        torch.manual_seed(3)
        super().__init__(PackedExperts(6), 6)
        self.part, self.reentrant = part, reentrant
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        def again(function: Any) -> Any:
            return lambda *inputs: checkpoint(function, *inputs, use_reentrant=self.reentrant)

        weights, chosen = self.router(x).softmax(-1).topk(self.choices, -1)
        experts = again(self.experts) if self.part == "experts" else self.experts
        shared = again(self.shared) if self.part == "shared" else self.shared
        out = experts(x, chosen, weights)
        made: Tensor = out + shared(x)
        return made


@on_ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["experts", "shared", "block"])
def test_parts_that_are_computed_again_in_backward(part: str, reentrant: bool) -> None:
    single = Recomputed(part, reentrant=reentrant)
    module: Any = parallelize_module(copy.deepcopy(single), all_ranks(), PLAN)
    run = module if part != "block" else lambda x: checkpoint(module, x, use_reentrant=reentrant)
    rank = torch.distributed.get_rank()
    x = torch.randn(12, WIDTH, dtype=torch.double, requires_grad=True)
    out = single(x)
    out.square().sum().backward()
    own = slice(*((0, 5), (5, 5), (5, 8), (8, 12))[rank])
    mine = x.detach()[own].clone().requires_grad_()
    got = run(mine)
    torch.testing.assert_close(got, out[own])
    got.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(mine.grad, x.grad[own])
    for name, param in module.named_parameters():
        if "experts" not in name:
            param.grad = all_reduce(
                param.grad if param.grad is not None else torch.zeros_like(param),
                all_ranks().comm(0),
            )
    assert_same_gradients(module, single)


@on_ranks(2)
def test_collectives_are_those_without_overlap() -> None:
    x = torch.randn(5, WIDTH, dtype=torch.double, requires_grad=True)
    costs = preview(mixture("packed", 4), PLAN, all_ranks(), x)
    module = parallelize_module(mixture("packed", 4), all_ranks(), PLAN)
    with CommDebugMode() as mode:
        out = module(x)
    assert (counts(mode)["all_gather"], counts(mode)["all_to_all"]) == (1, 2)
    with CommDebugMode() as mode:
        out.sum().backward()
    assert counts(mode)["all_to_all"] == 2
    assert costs.count("all_to_all") == (2, 2)


class SharedFirst(Mixture):
    """Calls its shared expert before the experts."""

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + super().forward(x)  # type: ignore[no-any-return]  # untyped


class Halved(Mixture):
    """Gives its shared expert other values, or another gradient."""

    detached = False

    def forward(self, x: Tensor) -> Tensor:
        other = x.detach() if self.detached else x * 2
        return super().forward(x) + self.shared(other)  # type: ignore[no-any-return]  # untyped


@on_ranks(2)
@pytest.mark.parametrize("detached", [None, False, True])
def test_blocks_that_do_something_else_are_refused(detached: bool | None) -> None:
    module: Any = mixture("packed", 4)
    module.__class__ = SharedFirst if detached is None else Halved
    module.detached = detached
    parallelize_module(module, all_ranks(), PLAN)
    x = torch.randn(3, WIDTH, dtype=torch.double, requires_grad=True)
    with pytest.raises(
        LayoutError,
        match="before the experts"
        if detached is None
        else "a tensor that is not the block's input",
    ):
        module(x)


@on_ranks(2)
def test_experts_that_dispatch_nothing_are_refused() -> None:
    with pytest.raises(
        LayoutError,
        match="does not have a module 'shared_experts'; its modules are router, experts, shared",
    ):
        parallelize_module(mixture("packed", 4), all_ranks(), SharedExpertOverlap())
    plan = {**PLAN, "experts": ExpertParallel(input_layouts=Replicate())}
    module: nn.Module = parallelize_module(mixture("packed", 4), all_ranks(), plan)
    with pytest.raises(LayoutError, match="does not dispatch tokens"):
        module(torch.randn(3, WIDTH, dtype=torch.double))
