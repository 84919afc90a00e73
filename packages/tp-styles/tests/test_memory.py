"""Memory of lowered modules between forward and backward, and at its peak.

It is compared with code by hand.

Covers: lowering/parameters.py, and the memory of the layer as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from by_hand import HandCopy, HandReduce
from shoal_dtensor import Replicate, Shard
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, TOKENS = 256, 64


class GateOfTwoReaders(nn.Module):
    """Two readers of one activation, and a layer by rows behind their product."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        out: Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return out


def by_hand(x: Tensor, w: dict[str, nn.Parameter]) -> Tensor:
    """`GateOfTwoReaders` on this rank's shards of the parameters, as one would write it."""
    x = x * 1
    both: Tensor = HandCopy.apply(x)  # type: ignore[no-untyped-call]  # torch
    hidden = linear(both, w["gate.weight"], w["gate.bias"]).sigmoid() * linear(
        both, w["up.weight"], w["up.bias"]
    )
    product = linear(hidden, w["down.weight"])
    partial: Tensor = HandReduce.apply(product)  # type: ignore[no-untyped-call]  # torch
    return partial + w["down.bias"]


def parallel(row_output: Any = None, column_input: Any = None) -> nn.Module:
    """`GateOfTwoReaders`, lowered."""
    columns, rows = (
        ColwiseParallel(input_layouts=column_input),
        RowwiseParallel(output_layouts=row_output),
    )
    return parallelize_module(
        GateOfTwoReaders(), all_ranks(), {"gate": columns, "up": columns, "down": rows}
    )


def locals_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Plain parameters of this rank's shards."""
    params: dict[str, Any] = dict(module.named_parameters())
    return {name: nn.Parameter(param.to_local().detach().clone()) for name, param in params.items()}


def saved(run: Callable[[], Tensor], params: list[Any]) -> int:
    """Bytes of the distinct storages that a forward keeps, parameters left out."""
    known = {getattr(p, "_local_tensor", p).untyped_storage().data_ptr() for p in params}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        local: Tensor = getattr(tensor, "_local_tensor", tensor)
        if local.untyped_storage().data_ptr() not in known:
            kept[local.untyped_storage().data_ptr()] = local
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return found


def peak(run: Callable[[], Tensor], params: list[Any]) -> int:
    """The most that a forward and backward into fresh gradients hold beyond the memory before."""
    found = []
    for _ in range(3):  # what gloo's threads still hold differs
        for param in params:
            param.grad = None
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            run().sum().backward()  # type: ignore[no-untyped-call]  # torch
        profiler: Any = profile.profiler
        events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        found.append(most)
    return min(found)


@on_ranks(2)
def test_a_step_saves_and_allocates_no_more_than_by_hand() -> None:
    module = parallel()
    ours, theirs = list(module.parameters()), locals_of(module)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    torch.testing.assert_close(module(x), by_hand(x, theirs))
    assert saved(lambda: module(x), ours) == saved(
        lambda: by_hand(x, theirs), list(theirs.values())
    )
    assert peak(lambda: module(x), ours) <= 1.02 * peak(
        lambda: by_hand(x, theirs), list(theirs.values())
    )


@on_ranks(2)
def test_a_gathered_activation_is_kept_once_for_all_readers() -> None:
    module = parallel(row_output=Shard(0), column_input=Shard(0))
    x = torch.randn(TOKENS // 2, WIDTH, requires_grad=True)
    full, hidden = TOKENS * WIDTH * 4, TOKENS * 4 * WIDTH // 2 * 4
    # The gathered input; the sigmoid, the other factor and the product.
    assert saved(lambda: module(x), list(module.parameters())) == full + 3 * hidden


@pytest.mark.parametrize("frozen", ["weights", "input"])
@on_ranks(2)
def test_frozen_operands_are_not_saved(frozen: str) -> None:
    layer = parallelize_module(
        nn.Linear(WIDTH, WIDTH), all_ranks(), ColwiseParallel(input_layouts=Replicate())
    )
    x = torch.randn(TOKENS, WIDTH, requires_grad=frozen != "input")
    if frozen == "weights":
        layer.requires_grad_(False)
    kept = saved(lambda: layer(x), list(layer.parameters()))
    assert kept == (0 if frozen == "weights" else TOKENS * WIDTH * 4)
