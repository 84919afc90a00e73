"""Tensors that a loader computes one by one: moved as elements, computed where they arrive.

Covers: learn/computations.py, learn/numberings.py, running/computed_elements.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_mesh.testing import on_ranks
from shoal_transfer import (
    LoaderComputesError,
    MappingError,
    TransferError,
    WeightMapping,
    WeightTransfer,
    describe,
    describe_rank,
    learn_mapping,
    merge_manifests,
    plan_transfer,
    verify_mapping,
)

Functions = dict[str, Callable[[Tensor], Tensor]]


def add_one(moved: Tensor) -> Tensor:
    return moved + 1


def decay(moved: Tensor) -> Tensor:
    return -torch.exp(moved.float())


COMPUTE: Functions = {"*norm": add_one, "decay": decay}


class ComputingServer(nn.Module):
    """One rank's half of the features: norms get 1 added, decays are exponentials in reverse."""

    weight: nn.Parameter

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        shapes = {"norm": (8 // size,), "decay": (4,), "weight": (8 // size, 3)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, device=device)))
        self.register_buffer("steps", torch.zeros((), device=device))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        params = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            if name == "norm":
                # engines write to the tensor of the checkpoint
                tensor += 1.0
            if name == "log":
                params["decay"].data.copy_(-torch.exp(tensor.float().flip(0)))
            elif name == "steps":
                params[name].data.copy_(tensor)
            else:
                params[name].data.copy_(tensor.chunk(self.size)[self.rank])


def checkpoint(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "norm": torch.randn(8, generator=generator),
        "log": torch.randn(4, generator=generator).bfloat16(),
        "weight": torch.randn(8, 3, generator=generator),
        "steps": torch.tensor(3.0 + seed),
    }


def learn(compute: Functions, server: ComputingServer | None = None) -> WeightMapping:
    server = server or ComputingServer(device="meta")
    return learn_mapping(server, server.load_weights, checkpoint(), compute=compute)


def assert_loaded(server: ComputingServer, seed: int) -> None:
    """The server has the bytes of one that loaded the checkpoint."""
    fresh = ComputingServer(server.rank, server.size)
    fresh.load_weights(iter(checkpoint(seed).items()))
    for name, value in fresh.state_dict().items():
        assert torch.equal(server.state_dict()[name], value), name


@on_ranks(4, timeout=200)
@pytest.mark.parametrize(("mode", "deltas"), [("staged", True), ("in_place", False)])
def test_servers_have_the_bytes_of_a_direct_load_after_each_transfer(
    mode: Any, deltas: bool
) -> None:
    rank = dist.get_rank()
    trains = rank < 2
    source = checkpoint()
    server = ComputingServer(rank % 2, 2)
    learned = learn_mapping(server, server.load_weights, checkpoint(), compute=COMPUTE)
    manifests: list[Any] = [None] * 4
    own = describe_rank(source) if trains else describe_rank(server, per_rank=True)
    dist.all_gather_object(manifests, own)
    # learned on all ranks, of which the last two serve
    unused = [name for name in learned.targets if name[-1] in "01"]
    mapping = WeightMapping.from_json(learned.drop(unused).to_json()).witnessed_by(learned.witness)
    target = merge_manifests(manifests[2:])
    plan = plan_transfer(merge_manifests(manifests[:2]), target, mapping)
    assert "4 tensors are computed on arrival: '*norm', 'decay'" in plan.explain()
    transfer = WeightTransfer(
        plan,
        source=source if trains else None,
        target=None if trains else server,
        compute={} if trains else COMPUTE,
        mode=mode,
        deltas=deltas,
    )
    if mode == "staged":
        server.load_weights(iter(checkpoint().items()))
        transfer.witness()
    for version in (1, 2, 3):
        for name, value in checkpoint(version).items():
            source[name].copy_(value)
        transfer.run(version if trains else None)
        if not trains:
            assert_loaded(server, version)


REFUSED: dict[str, tuple[Functions, str]] = {
    "no function": ({"decay": decay}, r"'norm@0': the loader .* pass compute=\{"),
    "another function": ({**COMPUTE, "*norm": lambda moved: moved + 2}, "8 of 8 values differ"),
    "another order": (
        {**COMPUTE, "decay": lambda moved: decay(moved.roll(1))},
        "does not compute elements one by one",
    ),
    "sums": ({**COMPUTE, "*norm": lambda moved: moved.cumsum(0)}, "one by one"),
    "another sign": ({**COMPUTE, "*norm": lambda moved: moved.abs() + 1}, "8 of 8 values"),
    "a plain copy": ({**COMPUTE, "weight": add_one}, "24 of 24 values differ"),
    "a function of nothing": ({**COMPUTE, "*norm": torch.zeros_like}, "one value for two elements"),
    "another shape": (
        {**COMPUTE, "*norm": lambda moved: moved[:2]},
        r"the function makes \(2,\) of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_loader_does_not_compute_is_refused(name: str) -> None:
    compute, message = REFUSED[name]
    with pytest.raises(LoaderComputesError, match=message):
        learn(compute)


def test_a_function_that_is_missing_or_computes_on_deltas_is_refused_before_bytes_move() -> None:
    server = ComputingServer()
    plan = plan_transfer(describe(checkpoint()), describe(server, per_rank=True), learn(COMPUTE))
    transfer = WeightTransfer(plan, source=checkpoint(), target=server, compute={"*norm": add_one})
    with pytest.raises(
        TransferError,
        match=r"'decay@0' is computed by 'decay'; pass compute=.*no data was transferred",
    ):
        transfer.run(1)
    transfer = WeightTransfer(
        plan, source=checkpoint(), target=server, compute=COMPUTE, mode="in_place", deltas=True
    )
    with pytest.raises(
        TransferError, match=r"deltas need the elements as they arrived.*no data was transferred"
    ):
        transfer.run(1)
    assert not server.weight.any()
    wrong: Functions = {**COMPUTE, "*norm": lambda moved: moved[:2]}
    transfer = WeightTransfer(plan, source=checkpoint(), target=server, compute=wrong)
    with pytest.raises(TransferError, match=r"'\*norm' makes \(2,\) of \(8,\) for 'norm@0'"):
        transfer.run(1)


def test_edits_keep_computations_and_refuse_to_mix_them() -> None:
    learned = learn(COMPUTE)
    halves = learned.split({"norm@0": {"a@0": 4, "b@0": 4}}).rename({"^a": "first"})
    assert halves.computed == {"decay@0": "decay", "first@0": "*norm", "b@0": "*norm"}
    with pytest.raises(MappingError, match=r"'both' is made of .* different computations"):
        learned.fuse({"both": ("norm@0", "decay@0")})
    with pytest.raises(MappingError, match=r"'norm@0' is made of .* different computations"):
        learned.pad({"norm@0": 16})
    with pytest.raises(MappingError, match="need a source"):
        WeightMapping.same_names({"w": (2,)}).pad({"w": 3}).with_computed({"w": "f"}).check()
    before = WeightMapping.same_names({"norm": (8,)}).with_computed({"norm": "f"})
    with pytest.raises(MappingError, match="different computations"):
        before.then(WeightMapping.same_names({"norm": (8,)}).with_computed({"norm": "g"}))


def test_a_declared_mapping_is_compared_in_its_computations_too() -> None:
    shapes = {name: tuple(value.shape) for name, value in checkpoint().items()}
    plain = WeightMapping.same_names(shapes).rename({"log": "decay", "$": "@0"})
    assert isinstance(plain, WeightMapping)
    with pytest.raises(
        MappingError, match=r"'norm@0' is computed by None in the mapping, by '\*norm'"
    ):
        verify_mapping(plain, learn(COMPUTE))
    both = plain.with_computed({"norm@0": "*norm", "decay@0": "decay"})
    with pytest.raises(MappingError, match=r"'decay@0'\[0:1\] is 'log'\[0:1\] in the mapping"):
        verify_mapping(both, learn(COMPUTE))


def test_tied_targets_have_one_computation() -> None:
    state = {"a": torch.zeros(2)}
    state["b"] = state["a"]
    mapping = WeightMapping.same_names({"a": (2,)}).add_copies({"b": "a"})
    manifest = describe(state)
    plan_transfer(manifest, manifest, mapping.with_computed({"a": "f", "b": "f"}))
    with pytest.raises(MappingError, match="'a' and 'b' are one tensor in the target"):
        plan_transfer(manifest, manifest, mapping.with_computed({"b": "f"}))
