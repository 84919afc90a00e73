"""Transfers between real ranks: values, deltas, faults.

Covers: running/weight_transfer.py, running/runner.py, running/program.py,
running/memories.py, running/messages.py, running/wires.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, distribute_tensor, full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import parallelize_module
from shoal_transfer import (
    FolderWire,
    GroupWire,
    LocalWire,
    MappingError,
    TransferError,
    WeightMapping,
    WeightTransfer,
    describe,
    describe_rank,
    merge_manifests,
    plan_transfer,
)
from shoal_transfer.running.messages import apply_delta, digest_of, encode_delta


class NamedProjections(nn.Module):
    """Projections with separate or fused names, enough for a mapping."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(6, size, bias=False))


TRAINED = {"q": 8, "k": 4, "v": 4, "o": 6}
SERVED = {"qkv": 16, "o": 6}


def build(sizes: dict[str, int], seed: int) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(NamedProjections(sizes) for _ in range(2))


def fused(shapes: dict[str, tuple[int, ...]], groups: int) -> WeightMapping:
    names = tuple(f"{{}}.{name}.weight" for name in "qkv")
    return WeightMapping.same_names(shapes).fuse({"{}.qkv.weight": names}, groups=groups)


def expected_of(trained: nn.Module, groups: int) -> dict[str, Tensor]:
    values = {}
    state = {name: full_tensor(value) for name, value in trained.state_dict().items()}
    for layer in "01":
        blocks = [state[f"{layer}.{name}.weight"].chunk(groups) for name in "qkv"]
        values[f"{layer}.qkv.weight"] = torch.cat([b[g] for g in range(groups) for b in blocks])
        values[f"{layer}.o.weight"] = state[f"{layer}.o.weight"]
    return values


def transfer_of(**options: Any) -> tuple[nn.Module, nn.Module | None, WeightTransfer]:
    """Four ranks train over data and tensor axes, the last two serve too."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    trained = build(TRAINED, 0)
    colwise = {f"*.{name}": "colwise" for name in "qkv"}
    parallelize_module(trained, grid["tp"], {**colwise, "*.o": "rowwise"})
    rank = dist.get_rank()
    served: nn.Module | None = None
    # all ranks of the world make the mesh
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "tp"))
    if rank >= 2:
        served = parallelize_module(build(SERVED, 1), pairs["tp"], {"*.qkv": "colwise"})
    source = describe(trained)
    target = describe(served, pairs["tp"]) if served is not None else None
    manifests: list[Any] = [None] * 4
    dist.all_gather_object(manifests, target)
    found = next(one for one in manifests if one is not None)
    plan = plan_transfer(source, found, fused(source.shapes, 2), max_bytes=200)
    return trained, served, WeightTransfer(plan, source=trained, target=served, **options)


def assert_served(served: nn.Module | None, expected: dict[str, Tensor]) -> None:
    if served is not None:
        for name, value in served.state_dict().items():
            assert torch.equal(full_tensor(value), expected[name]), name


def step(model: nn.Module, seed: int, share: float = 1.0) -> None:
    """Change a share of the elements, equally on all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            generator = torch.Generator().manual_seed(seed)
            change = torch.rand(parameter.shape, generator=generator)
            change = change * (torch.rand(parameter.shape, generator=generator) < share)
            if isinstance(parameter, DTensor):
                placements = parameter.placements
                shard = distribute_tensor(change, parameter.device_mesh, placements)
                parameter.add_(shard)
            else:
                parameter.add_(change)


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("deltas", [False, True])
def test_three_syncs_with_steps_between(mode: Any, deltas: bool) -> None:
    trained, served, transfer = transfer_of(mode=mode, deltas=deltas)
    for version in (1, 2, 3):
        step(trained, version, share=0.05)
        sync = transfer.run(version)
        assert_served(served, expected_of(trained, 2))
        assert sync.version == version
        assert sync.was_delta == (deltas and version > 1)
        assert (sync.bytes_sent < sync.bytes_whole) == (sync.was_delta and sync.bytes_whole > 0)


@on_ranks(4, timeout=200)
def test_a_transfer_in_the_background_is_committed_by_wait() -> None:
    trained, served, transfer = transfer_of()
    before = {n: full_tensor(v).clone() for n, v in served.state_dict().items()} if served else {}
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    transfer.guard(optimizer)
    expected = expected_of(trained, 2)
    transfer.start(1)
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert_served(served, before)
    sync = transfer.wait()
    assert sync is not None
    assert sync.version == 1
    assert transfer.wait() is None
    assert_served(served, expected)


class FaultyWire(GroupWire):
    """A wire that breaks, or changes an element, in its n-th exchange of elements."""

    def __init__(self, *, breaks: int = -1, flips: int = -1) -> None:
        super().__init__(range(4))
        self.breaks = breaks
        self.flips = flips
        self.count = 0

    def fail(self, value: Any) -> list[Any]:
        raise ConnectionError("a rank died")

    def exchange(self, sends: Any, receives: Any) -> None:
        super().exchange(sends, receives)
        self.count += 1
        if self.count == self.breaks:
            raise ConnectionError("a rank died")
        received = [one for one in receives if one.numel()]
        if self.count == self.flips and received:
            received[0][0] += 1


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("fault", ["breaks", "flips"])
def test_a_torn_version_leaves_staged_weights_whole(fault: str) -> None:
    wire = FaultyWire()
    trained, served, transfer = transfer_of(wire=wire, deltas=True)
    transfer.run(1)
    old = expected_of(trained, 2)
    step(trained, 5)
    setattr(wire, fault, wire.count + 2)
    message = r"version 2 did not arrive .* the target keeps the complete version 1"
    with pytest.raises(TransferError, match=message):
        transfer.run(2)
    assert_served(served, old)
    assert transfer.is_valid
    assert not transfer.run(3).was_delta, "after a fault all elements are sent"
    assert_served(served, expected_of(trained, 2))


@on_ranks(4, timeout=200)
def test_a_torn_version_in_place_is_invalid_until_the_next() -> None:
    wire = FaultyWire(flips=1)
    trained, served, transfer = transfer_of(wire=wire, mode="in_place")
    message = "arrived with a different digest; the tensors are .*invalid until a transfer succeeds"
    with pytest.raises(TransferError, match=message):
        transfer.run(1)
    assert transfer.is_valid is False
    transfer.run(1)
    valid: bool = transfer.is_valid
    assert valid
    assert_served(served, expected_of(trained, 2))


@on_ranks(4, timeout=200)
def test_versions_and_plans_that_differ_are_refused_before_bytes_move() -> None:
    wire = FaultyWire()
    _, _, transfer = transfer_of(wire=wire)
    transfer.run(7)
    moved = wire.count
    with pytest.raises(
        TransferError,
        match="version 6 is older than version 7; pass an increasing version; "
        "no data was transferred",
    ):
        transfer.run(6)
    with pytest.raises(TransferError, match="ranks of the source must pass a version"):
        transfer.run()
    with pytest.raises(TransferError, match=r"must send one version, got \[8, 9\]"):
        transfer.run(8 + dist.get_rank() % 2)
    if dist.get_rank() == 3:
        plan = transfer.plan
        transfer.plan = plan_transfer(plan.source, plan.target, plan.mapping, max_bytes=999)
    with pytest.raises(TransferError, match="different plans"):
        transfer.run(10)
    wire.gather = wire.fail  # type: ignore[method-assign]  # from now on
    with pytest.raises(
        TransferError, match=r"does not answer \(a rank died\); no data was transferred"
    ):
        transfer.run(11)
    assert wire.count == moved


@on_ranks(4, timeout=200)
def test_version_zero_is_a_witness() -> None:
    trained, served, transfer = transfer_of()
    before = transfer.plan
    assert not before.is_verified
    with pytest.raises(
        MappingError, match=r"'0.qkv.weight' in \d+ of \d+ elements on target rank 2"
    ):
        transfer.witness()
    expected = expected_of(trained, 2)
    if served is not None:
        for name, value in served.state_dict().items():
            mesh = value.device_mesh if isinstance(value, DTensor) else None
            loaded = expected[name]
            if mesh is not None:
                loaded = distribute_tensor(loaded, mesh, value.placements, src_data_rank=None)
            value.copy_(loaded)
    transfer.witness()
    assert transfer.plan.is_verified
    assert transfer.plan.mapping.witness == "version 0"


@on_ranks(4, timeout=200)
def test_weights_at_other_addresses_and_of_other_strides() -> None:
    trained, served, transfer = transfer_of(mode="in_place", deltas=True)
    transfer.run(1)
    plan = transfer.plan
    if served is not None:
        for layer in served:  # type: ignore[attr-defined]  # a ModuleList
            layer.o.weight.data = layer.o.weight.data.clone()
    step(trained, 2)
    assert not transfer.run(2).was_delta
    assert_served(served, expected_of(trained, 2))
    assert transfer.plan is plan
    if served is not None:
        for layer in served:  # type: ignore[attr-defined]  # a ModuleList
            layer.o.weight.data = layer.o.weight.data.t().contiguous().t()
    step(trained, 3)
    transfer.run(3)
    assert_served(served, expected_of(trained, 2))
    assert transfer.plan is not plan


@on_ranks(2, timeout=200)
def test_a_server_that_shards_plain_tensors_by_itself() -> None:
    rank = dist.get_rank()
    trained = build(TRAINED, 0)
    served: Any = nn.ModuleDict({"qkv": nn.Linear(6, 8, bias=False)})
    source = describe(trained)
    target = describe(served, per_rank=True)
    assert target.shapes == {"qkv.weight@0": (8, 6), "qkv.weight@1": (8, 6)}
    # each rank has its heads of q, k and v of the first layer
    halves = {}
    for name in "qkv":
        size = TRAINED[name] // 2
        halves[f"0.{name}.weight"] = {f"{name}@0": size, f"{name}@1": size}
    mapping = WeightMapping.same_names(source.shapes).drop(["1.{}.weight", "0.o.weight"])
    mapping = mapping.split(halves)
    for one in (0, 1):
        mapping = mapping.fuse({f"qkv.weight@{one}": [f"{name}@{one}" for name in "qkv"]})
    transfer = WeightTransfer(plan_transfer(source, target, mapping), source=trained, target=served)
    transfer.run(1)
    expected = expected_of(trained, 2)["0.qkv.weight"]
    assert torch.equal(served["qkv"].weight, expected[8 * rank : 8 * rank + 8])


@on_ranks(2, timeout=200)
def test_tensors_of_each_rank_that_change_their_strides_are_planned_again() -> None:
    rank = dist.get_rank()
    trained = {"w": torch.arange(12.0).reshape(4, 3)}
    served = {"server.w": torch.zeros(2, 3)}
    source = describe(trained, rename={"^": "hub."})
    target = describe(served, per_rank=True)
    rows = {"server.w@0": 2, "server.w@1": 2}
    mapping = WeightMapping.same_names(source.shapes).split({"hub.w": rows})
    transfer = WeightTransfer(plan_transfer(source, target, mapping), source=trained, target=served)
    for version in (1, 2):
        served["server.w"] = torch.zeros(3, 2).t() if version == 2 else served["server.w"]
        transfer.run(version)
        assert torch.equal(served["server.w"], trained["w"][2 * rank : 2 * rank + 2])


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("deltas", [False, True])
def test_replicas_on_another_host_forward_to_each_other(deltas: bool) -> None:
    rank = dist.get_rank()
    trains = rank < 2
    state = {"w": torch.zeros(4, 6)}
    own = describe_rank(state)
    manifests: list[Any] = [None] * 4
    dist.all_gather_object(manifests, own)
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    source = replace(merge_manifests(manifests[:2]), hosts=hosts)
    target = replace(merge_manifests(manifests[2:]), hosts=hosts)
    mapping = WeightMapping.same_names(source.shapes)
    plan = plan_transfer(source, target, mapping)
    assert {copy.stage for copy in plan.regions()} == {0, 1}
    assert plan.traffic().between_hosts == state["w"].nbytes
    transfer = WeightTransfer(
        plan,
        source=state if trains else None,
        target=None if trains else state,
        deltas=deltas,
    )
    for version in (1, 2, 3):
        if trains:
            state["w"][version] += version
        sync = transfer.run(version if trains else None)
        assert sync.was_delta == (deltas and version > 1)
        expected = torch.zeros(4, 6)
        for step_number in range(1, version + 1):
            expected[step_number] += step_number
        assert torch.equal(state["w"], expected)


def test_repeated_heads_are_copied_in_the_rank_that_has_them() -> None:
    trained = {"k": torch.arange(8.0).reshape(4, 2)}
    served = {"k": torch.zeros(8, 2)}
    source = describe(trained, world="trainer")
    mapping = WeightMapping.same_names(source.shapes).repeat(["k"], times=2, block=2)
    plan = plan_transfer(source, describe(served, world="server"), mapping)
    assert plan.traffic().total == trained["k"].nbytes, "each element is sent once"
    assert [copy.stage for copy in plan.regions()] == [0, 2, 0, 2]
    here = plan_transfer(replace(source, world="one"), replace(plan.target, world="one"), mapping)
    WeightTransfer(here, source=trained, target=served).run(1)
    expected = trained["k"].reshape(2, 2, 2).repeat_interleave(2, 0).reshape(8, 2)
    assert torch.equal(served["k"], expected)


def test_elements_that_a_target_keeps_are_its_own() -> None:
    trained = {"w": torch.ones(2)}
    served = {"w": torch.zeros(3), "scale": torch.zeros(1)}
    source = describe(trained)
    mapping = WeightMapping.same_names(source.shapes).pad({"w": 3}, fill=None)
    mapping = mapping.add_filled({"scale": (1,)})
    transfer = WeightTransfer(
        plan_transfer(source, describe(served), mapping), source=trained, target=served
    )
    for version in (1, 2):
        served["w"][2] = version
        served["scale"].fill_(version)
        transfer.run(version)
        assert served["w"].tolist() == [1, 1, version]
        assert served["scale"].item() == version


def test_a_rank_without_its_model_is_named_before_bytes_move() -> None:
    state = {"w": torch.ones(2)}
    plan = plan_transfer(describe(state), describe(state))
    with pytest.raises(
        TransferError, match="by the plan, source holds 'w' on this rank; pass its model as source="
    ):
        WeightTransfer(plan, target=state).run(1)
    with pytest.raises(
        TransferError, match="by the plan, target holds 'w' on this rank; pass its model as target="
    ):
        WeightTransfer(plan, source=state).run(1)


def put_to_sleep(model: nn.Linear) -> None:
    model.weight.untyped_storage().resize_(0)


def put_on_meta(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.to("meta"))


def expand(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(3).expand(4, 3), requires_grad=False)


DEFECTS: list[tuple[Callable[[nn.Linear], None], str]] = [
    (put_to_sleep, "target: the memory of 'weight' is freed, as of a model that sleeps"),
    (put_on_meta, "target: 'weight' is on the meta device"),
    (expand, "target: elements of 'weight' share memory, by strides of 0"),
]


@on_ranks(2, timeout=200)
@pytest.mark.parametrize(("spoil", "message"), DEFECTS)
def test_memory_that_cannot_be_written_is_named_on_all_ranks(
    spoil: Callable[[nn.Linear], None], message: str
) -> None:
    source, target = nn.Linear(3, 4), nn.Linear(3, 4)
    plan = plan_transfer(describe(source), describe(target))
    if dist.get_rank() == 1:
        spoil(target)
    transfer = WeightTransfer(plan, source=source, target=target)
    with pytest.raises(TransferError, match=f"member 1: {message}.*; no data was transferred"):
        transfer.run(1)
    if dist.get_rank() == 1:
        target.weight = nn.Parameter(torch.zeros(4, 3))
    transfer.run(1)
    assert torch.equal(target.weight, source.weight)


def test_memory_of_both_sides_is_only_written_from_a_second_copy() -> None:
    first, second = torch.zeros(3), torch.ones(3)
    source = {"x": first, "y": second}
    # each is written where the other one is read
    target = {"x": second, "y": first}
    plan = plan_transfer(describe(source), describe(target))
    with pytest.raises(
        TransferError, match=r"'x' shares memory with the source.*use mode 'staged'"
    ):
        WeightTransfer(plan, source=source, target=target, mode="in_place").run(1)
    WeightTransfer(plan, source=source, target=target).run(1)
    assert (first.tolist(), second.tolist()) == ([1, 1, 1], [0, 0, 0])


OVERLAPS: list[tuple[list[int], list[int], bool]] = [
    ([1, 2, 3, 4], [3, 4, 5, 6], True),
    ([1, 2, 3, 4], [3, 9, 5, 6], False),
]


@on_ranks(2, timeout=200)
@pytest.mark.parametrize(("first", "second", "agree"), OVERLAPS)
@pytest.mark.parametrize("mode", ["staged", "in_place"])
@pytest.mark.parametrize("receiver", [0, 1])
def test_targets_that_share_memory_get_equal_elements_or_an_error(
    first: list[int], second: list[int], agree: bool, mode: Any, receiver: int
) -> None:
    memory = torch.zeros(6)
    source = {"x": torch.tensor(first).float(), "y": torch.tensor(second).float()}
    target = {"x": memory[:4], "y": memory[2:]}
    rank = dist.get_rank()
    described: list[Any] = [None, None]
    dist.all_gather_object(described, (describe_rank(source), describe_rank(target)))
    plan = plan_transfer(
        merge_manifests([described[0][0]]), merge_manifests([described[receiver][1]])
    )
    if rank > receiver:
        return
    transfer = WeightTransfer(
        plan,
        source=source if rank == 0 else None,
        target=target if rank == receiver else None,
        mode=mode,
    )
    version = 1 if rank == 0 else None
    if agree:
        transfer.run(version)
        if rank == receiver:
            assert memory.tolist() == [1, 2, 3, 4, 5, 6]
        return
    with pytest.raises(TransferError, match=r"different (digest|elements).*(x|y)"):
        transfer.run(version)
    assert transfer.is_valid == (mode == "staged")
    if mode == "staged":
        assert memory.tolist() == [0] * 6


def test_elements_that_are_kept_may_share_memory_with_others() -> None:
    memory = torch.zeros(4)
    served = {"w": memory[:3], "all": memory}
    source = {"w": torch.ones(3)}
    mapping = WeightMapping.same_names({"w": (3,)}).add_filled({"all": (4,)})
    plan = plan_transfer(describe(source), describe(served), mapping)
    WeightTransfer(plan, source=source, target=served).run(1)
    assert memory.tolist() == [1, 1, 1, 0]


@on_ranks(2, timeout=200)
def test_a_second_copy_without_memory_is_named_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = nn.Linear(3, 4), nn.Linear(3, 4)
    plan = plan_transfer(describe(source), describe(target))
    transfer = WeightTransfer(plan, source=source, target=target)

    def fail(*_: Any) -> dict[str, Tensor]:
        raise MemoryError("no memory")

    if dist.get_rank() == 1:
        monkeypatch.setattr("shoal_transfer.running.weight_transfer.second_copy", fail)
    with pytest.raises(TransferError, match="member 1: MemoryError: no memory; no data"):
        transfer.run(1)
    monkeypatch.undo()
    assert transfer.run(1).version == 1


@on_ranks(2, timeout=200)
def test_a_model_that_cannot_be_described_again_is_named_on_all_ranks() -> None:
    source, target = {"w": torch.ones(4, 3)}, {"w": torch.zeros(4, 3)}
    transfer = WeightTransfer(
        plan_transfer(describe(source), describe(target)), source=source, target=target
    )
    transfer.run(1)
    target["w"] = torch.zeros(3, 4).t()
    if dist.get_rank() == 1:
        target["w"] = target["w"].to_sparse()
    with pytest.raises(TransferError, match="member 1: "):
        transfer.run(2)


def test_weights_are_invalid_after_a_finish_that_raised() -> None:
    source, target = nn.Linear(3, 4), nn.Linear(3, 4)
    broken = True

    def finish(names: list[str]) -> None:
        if broken:
            raise RuntimeError(f"cannot quantize {names[0]}")

    transfer = WeightTransfer(
        plan_transfer(describe(source), describe(target)),
        source=source,
        target=target,
        finish=finish,
    )
    with pytest.raises(RuntimeError, match="cannot quantize weight"):
        transfer.run(1)
    assert not transfer.is_valid
    assert transfer.version is None
    broken = False
    transfer.run(1)
    assert transfer.is_valid


def test_a_step_waits_for_sends_that_still_read_the_weights(tmp_path: Path) -> None:
    """The server is late: the trainer computes its next gradients, and its step waits."""
    trained, served = build(TRAINED, 0), build(TRAINED, 1)
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    target = describe(served, world="server")
    # several rounds, of which the last is read last
    plan = plan_transfer(describe(trained, world="trainer"), target, max_bytes=100)
    sends, receives = (FolderWire(tmp_path, member, 2, timeout=60) for member in range(2))
    transfer = WeightTransfer(plan, source=trained, wire=sends)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
    transfer.guard(optimizer)
    transfer.start(1)
    output = torch.zeros(())
    for layer in trained:
        output = output + layer.get_submodule("q")(torch.ones(6)).sum()
    output.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
    stepped = threading.Thread(target=optimizer.step)
    stepped.start()
    stepped.join(0.3)
    assert stepped.is_alive(), "the weights have not been read"
    WeightTransfer(plan, target=served, wire=receives).run()
    stepped.join(60)
    assert not stepped.is_alive()
    transfer.wait()
    for name, value in served.state_dict().items():
        assert torch.equal(value, before[name]), name
    changed = [
        name for name, value in trained.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert changed == ["0.q.weight", "1.q.weight"]


def test_finish_is_called_once_for_each_layer() -> None:
    trained: Any = build(TRAINED, 0)
    served: Any = nn.ModuleDict({"model": build(TRAINED, 1), "norm": nn.LayerNorm(2)})
    source = describe(trained)
    mapping = WeightMapping.same_names(source.shapes).rename({"^": "model."})
    mapping = mapping.add_filled({"norm.weight": (2,)}, fill=3.0).add_filled({"norm.bias": (2,)})
    calls: list[list[str]] = []
    plan = plan_transfer(source, describe(served), mapping)
    transfer = WeightTransfer(plan, source=trained, target=served, finish=calls.append)
    transfer.run(1)
    assert [len(names) for names in calls] == [4, 4, 1, 1]
    assert torch.equal(served["model"][1].v.weight, trained[1].v.weight)
    assert served["norm"].weight.tolist() == [3.0, 3.0]
    with pytest.raises(TransferError, match="mode must be 'staged' or 'in_place'"):
        WeightTransfer(plan, source=trained, mode="other")  # type: ignore[arg-type]  # refused


DTYPES = [
    torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.float8_e4m3fn, torch.int8,
    torch.uint16, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_deltas_are_bitwise(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = 100 * torch.rand(2, 1000) * torch.randint(0, 2, (2, 1000))
    last, others = values.to(dtype)
    new = last.clone()
    changed = others[:11]
    if dtype.is_complex:
        changed = changed * 1j
    new.view(1000, 1)[::97].copy_(changed.view(11, 1))
    if dtype.is_floating_point:
        last[5] = -0.0
        new[5] = 0.0
        last[6] = float("nan")
        new[6] = float("nan")
    encoded = encode_delta(new, last)
    assert encoded is not None
    assert encoded.numel() < new.nbytes / 4
    after = apply_delta(encoded, last.clone())
    assert torch.equal(after.view(torch.uint8), new.view(torch.uint8))
    other = (new.view(torch.uint8) ^ 1).view(dtype)
    assert encode_delta(new, other) is None


def test_a_digest_sees_exchanged_elements() -> None:
    values = torch.randn(64, dtype=torch.bfloat16)
    assert digest_of(values) == digest_of(values.clone())
    # at an address that is not a multiple of 8 bytes
    assert digest_of(torch.cat([values[:1], values])[1:]) == digest_of(values)
    assert digest_of(values[:63]) != digest_of(values[1:])
    swapped = values.clone()
    # two words of eight bytes
    swapped[0:4] = values[8:12]
    swapped[8:12] = values[0:4]
    assert digest_of(swapped) != digest_of(values)
    assert LocalWire().gather(1) == [1]
