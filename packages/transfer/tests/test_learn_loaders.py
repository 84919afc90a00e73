"""Mappings learned from loaders give the results of the loaders for real tensors.

Covers: learn/loaders.py, learn/recordings.py, learn/recorder.py, learn/replay.py,
learn/tape.py, learn/twins.py, learn/definitions.py, learn/_torch.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from loaders import Load, Server, Shapes, Weights, loaded_values, mapped_values
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import parallelize_module
from shoal_transfer import LoaderComputesError, MappingError, WeightMapping, learn_mapping
from shoal_transfer.learn.definitions import Definitions
from shoal_transfer.learn.recorder import Recorder

LOADERS: dict[str, tuple[Shapes, Shapes, Load]] = {}


def loader(targets: Shapes, sources: Shapes) -> Callable[[Load], Load]:
    """Adds a loader to the table."""

    def add(load: Load) -> Load:
        LOADERS[load.__name__] = (targets, sources, load)
        return load

    return add


QKV: Shapes = {"q": (8, 6), "k": (4, 6), "v": (4, 6)}


@loader({"p": (16, 6)}, QKV)
def narrow_then_copy(server: Server, weights: Weights) -> None:
    first = 0
    for name in ("q", "k", "v"):
        rows = len(weights[name])
        server.p.data.narrow(0, first, rows).copy_(weights[name])
        first += rows


@loader({"p": (8, 3)}, {"w": (12, 6)})
def chunk_of_both(server: Server, weights: Weights) -> None:
    server.p.data[2:8] = weights["w"].chunk(2, 1)[1][6:]
    server.p.data[:2].copy_(weights["w"][0:4:2, 0:6:2])


@loader({"p": (6, 8), "s": (2, 3, 4)}, {"w": (8, 6), "a": (4, 3), "b": (4, 3)})
def transpose(server: Server, weights: Weights) -> None:
    server.p.data.copy_(weights["w"].t())
    server.s.data[0].copy_(weights["a"].t())
    server.s.data[1].copy_(weights["b"].transpose(0, 1))


@loader({"p": (8, 6)}, {"w": (4, 2, 6)})
def view_of_target(server: Server, weights: Weights) -> None:
    server.p.data.view(4, 2, 6).copy_(weights["w"])


@loader({"p": (24,)}, {"w": (4, 6)})
def flat_target(server: Server, weights: Weights) -> None:
    server.p.data.copy_(weights["w"].view(-1))


@loader({"p": (12, 6)}, {"w": (4, 6)})
def repeat_heads(server: Server, weights: Weights) -> None:
    heads = weights["w"].view(2, 2, 6)
    server.p.data.view(2, 3, 2, 6).copy_(heads.unsqueeze(1).expand(2, 3, 2, 6))


@loader({"p": (3, 4)}, {"w": (4,)})
def broadcast(server: Server, weights: Weights) -> None:
    server.p.data.copy_(weights["w"])


@loader({"p": (16, 6)}, QKV)
def concatenate(server: Server, weights: Weights) -> None:
    server.p.data.copy_(torch.cat([weights["q"], weights["k"], weights["v"]]))


@loader({"p": (12, 6)}, {"q": (8, 6), "k": (2, 6), "v": (2, 6)})
def interleave_by_group(server: Server, weights: Weights) -> None:
    groups = [
        torch.cat([weights["q"][4 * group : 4 * group + 4], weights["k"][group : group + 1],
                   weights["v"][group : group + 1]])
        for group in range(2)
    ]  # fmt: skip
    server.p.data.copy_(torch.cat(groups))


@loader({"p": (3, 12)}, {"g": (3, 6), "u": (3, 6)})
def interleave_columns(server: Server, weights: Weights) -> None:
    both = torch.stack([weights["g"], weights["u"]], dim=-1)
    server.p.data.copy_(both.flatten(-2).contiguous())


@loader({"p": (3, 4, 6)}, {"e0": (4, 6), "e1": (4, 6), "e2": (4, 6)})
def stack_experts(server: Server, weights: Weights) -> None:
    server.p.data.copy_(torch.stack([weights[f"e{expert}"] for expert in range(3)]))


@loader({"p": (6, 4)}, {"w": (2, 4), "v": (2, 4)})
def repeat_rows(server: Server, weights: Weights) -> None:
    stacked = torch.stack([weights["w"], weights["v"]], dim=1).clone()
    joined = torch.cat([stacked[:, 0], stacked[:, 1], weights["w"]])
    server.p.data.copy_(joined)


@loader({"p": (4, 6)}, {"w": (4, 6)})
def copy_over_devices(server: Server, weights: Weights) -> None:
    server.p.data.copy_(weights["w"].to("cpu").contiguous().clone())


@loader({"p": (1,), "x": (2, 2)}, {"s": (), "w": (2, 2)})
def read_a_number(server: Server, weights: Weights) -> None:
    server.p.data.fill_(weights["s"].item())
    server.x.data.copy_(weights["w"])
    server.x.data[1, 1] = weights["w"][0, 0].item()


@loader({"p": (10, 4)}, {"w": (7, 4)})
def pad_with_zeros(server: Server, weights: Weights) -> None:
    server.p.data[:7].copy_(weights["w"])
    server.p.data[7:].fill_(0)


@loader({"p": (10, 4)}, {"w": (7, 4)})
def zero_then_copy(server: Server, weights: Weights) -> None:
    server.p.data.zero_()
    server.p.data[:7].copy_(weights["w"])


@loader({"p": (10, 4)}, {"w": (7, 4)})
def pad_a_copy(server: Server, weights: Weights) -> None:
    server.p.data.copy_(nn.functional.pad(weights["w"], (0, 0, 0, 3)))


@loader({"p": (10, 4)}, {"w": (7, 4)})
def fill_a_buffer(server: Server, weights: Weights) -> None:
    buffer = torch.zeros(10, 4, dtype=torch.float64)
    buffer[:7] = weights["w"]
    buffer[7:] = 3.0
    server.p.data.copy_(buffer)


@loader({"p": (4, 6)}, {"w": (4, 6)})
def replace_data(server: Server, weights: Weights) -> None:
    server.p.data = weights["w"]


@loader({"p": (4, 3)}, {"w": (4, 6)})
def replace_data_by_a_copy(server: Server, weights: Weights) -> None:
    server.p.data = weights["w"][:, 3:].contiguous()


@loader({"p": (4, 3)}, {"w": (6, 4)})
def replace_the_parameter(server: Server, weights: Weights) -> None:
    server.p = nn.Parameter(weights["w"].t()[:, ::2])


@loader({"p": (4, 6)}, {"w": (4, 6)})
def set_storage(server: Server, weights: Weights) -> None:
    storage = weights["w"].untyped_storage()
    server.p.set_(storage, 0, (4, 6), (6, 1))


@loader({"p": (4, 6)}, {"w": (4, 6)})
def index_rows(server: Server, weights: Weights) -> None:
    server.p[torch.tensor([2, 0, 3, 1])] = weights["w"]


@loader({"p": (4, 6)}, {"w": (4, 6)})
def index_of_the_source(server: Server, weights: Weights) -> None:
    order = torch.arange(4).view(2, 2).t().reshape(-1)
    server.p.copy_(weights["w"][order])


@loader({"p": (4, 6)}, {"w": (4, 6)})
def masked_rows(server: Server, weights: Weights) -> None:
    mask = torch.tensor([True, False, True, True])
    server.p[mask] = weights["w"][mask]
    server.p[1].zero_()


@loader({"p": (4, 6)}, {"w": (4, 6)})
def flip(server: Server, weights: Weights) -> None:
    server.p.copy_(weights["w"].flip(0).roll(1, 1))


@loader({"p": (4, 6)}, {"w": (4, 6)})
def arithmetic_without_effect(server: Server, weights: Weights) -> None:
    server.p.copy_(weights["w"] * 1.0 + 0)


@loader({"p": (4, 6), "t": (4, 6)}, {"w": (4, 6)})
def from_another_parameter(server: Server, weights: Weights) -> None:
    server.p.copy_(weights["w"])
    server.t.copy_(server.p)


@loader({"p": (4, 6)}, {"w": (4, 6), "v": (2, 6)})
def write_twice(server: Server, weights: Weights) -> None:
    server.p.copy_(weights["w"])
    server.p[1:3].copy_(weights["v"])


@loader({"p": (2, 6), "t": (2, 6)}, {"w": (2, 6), "v": (2, 6)})
def reuse_a_buffer(server: Server, weights: Weights) -> None:
    buffer = torch.empty(2, 6, dtype=torch.float64)
    buffer.copy_(weights["w"])
    server.p.copy_(buffer)
    buffer.copy_(weights["v"])
    server.t.copy_(buffer)


@loader({"p": (2, 6)}, {"w": (2, 6), "v": (1, 6)})
def change_a_clone(server: Server, weights: Weights) -> None:
    changed = weights["w"].clone()
    changed[1:].copy_(weights["v"])
    server.p.copy_(changed)


@loader({"p": (2, 6)}, {"w": (2, 6), "v": (1, 6)})
def write_to_the_source(server: Server, weights: Weights) -> None:
    weights["w"][1:].copy_(weights["v"])
    server.p.copy_(weights["w"])


@loader({"p": (0, 6), "s": ()}, {"w": (0, 6), "s": ()})
def empty_and_scalar(server: Server, weights: Weights) -> None:
    server.p.copy_(weights["w"])
    server.s.copy_(weights["s"])


@loader({"p": (4, 6), "t": (2, 6)}, {"w": (4, 6), "v": (2, 6)})
def write_by_list(server: Server, weights: Weights) -> None:
    torch._foreach_copy_([server.p, server.t], [weights["w"], weights["v"]])


@loader({"p": (4, 6)}, {"w": (4, 6)})
def write_to_out(server: Server, weights: Weights) -> None:
    torch.cat([weights["w"][2:], weights["w"][:2]], out=server.p.data)


def learned(name: str) -> WeightMapping:
    targets, sources, load = LOADERS[name]
    server = Server(targets, load)
    checkpoint = {
        source: torch.empty(shape, dtype=torch.float64, device="meta")
        for source, shape in sources.items()
    }
    return learn_mapping(server, server.load_weights, checkpoint)


@pytest.mark.parametrize("name", LOADERS)
def test_a_learned_mapping_is_what_the_loader_does(name: str) -> None:
    targets, sources, load = LOADERS[name]
    mapping = learned(name)
    expected = loaded_values(targets, load, sources)
    found = mapped_values(WeightMapping.from_json(mapping.to_json()))
    assert found.keys() == expected.keys()
    for target, value in expected.items():
        assert torch.equal(found[target], value), f"{target}: {mapping.by_target}"


@pytest.mark.parametrize("name", LOADERS)
def test_replay_finds_what_algebra_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Definitions, "copy", lambda *_: None)
    targets, sources, load = LOADERS[name]
    expected = loaded_values(targets, load, sources)
    found = mapped_values(learned(name))
    for target, value in expected.items():
        assert torch.equal(found[target], value), target


@pytest.mark.parametrize(
    "name",
    ["concatenate", "stack_experts", "copy_over_devices", "replace_data_by_a_copy", "repeat_rows"],
)
def test_copies_on_the_way_need_no_replay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = learned(name)

    def replay(*_: Any) -> None:
        raise AssertionError("labels were made")

    monkeypatch.setattr(Recorder, "elements_of", replay)
    assert learned(name) == expected


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("narrow_then_copy", 3),
        ("concatenate", 3),
        ("interleave_by_group", 6),
        ("interleave_columns", 2),
        ("stack_experts", 3),
        ("repeat_heads", 5),
        ("pad_a_copy", 2),
        ("zero_then_copy", 2),
        ("broadcast", 1),
        ("replace_the_parameter", 1),
    ],
)
def test_a_learned_mapping_is_short(name: str, count: int) -> None:
    assert len(learned(name).assignments) == count


REFUSED: dict[str, tuple[Load, str]] = {
    "quantize": (lambda s, w: s.p.copy_((w["w"] / w["w"].abs().max()).round()), "aten::abs"),
    "scale": (lambda s, w: s.p.copy_(w["w"] * 0.125), "aten::mul"),
    "scale and back": (lambda s, w: s.p.copy_(w["w"] * 0.5 * 2), "aten::mul"),
    "add": (lambda s, w: s.p.copy_(w["w"] + 1), "aten::add"),
    "add in place": (lambda s, w: s.p.copy_(w["w"]).add_(1), "aten::add_"),
    "average": (lambda s, w: s.p.copy_((w["w"] + w["v"]) / 2), "aten::add"),
    "difference": (lambda s, w: s.p.copy_(w["w"] + w["v"] - w["v"]), "aten::add"),
    "round": (lambda s, w: s.p.copy_(w["w"].round()), "aten::round"),
    "clamp": (lambda s, w: s.p.copy_(w["w"].clamp(min=0)), "aten::clamp"),
    "sort": (lambda s, w: s.p.copy_(w["w"].sort().values), "aten::sort"),
    "compare": (lambda s, w: s.p.copy_((w["w"] != 0).double()), "branches on values"),
    "number": (lambda s, w: s.p.copy_(w["w"]).fill_(w["w"][0, 0].item() / 2), "item"),
    "decide": (
        lambda s, w: s.p.copy_(w["w"] if (w["w"] > 0).any().item() else w["v"]),
        "aten::gt",
    ),
    "matrix product": (lambda s, w: s.p.copy_(w["w"] @ torch.eye(2).double() * 2), "aten::mul"),
    "unloaded": (lambda s, w: s.p.copy_(s.t), "before it loads them"),
    "reinterpret": (lambda s, w: s.p.copy_(w["w"].view(torch.int64)), "torch.int64"),
    "round twice": (lambda s, w: s.p.copy_(w["w"].half()), "rounds twice"),
    "complex": (lambda s, w: s.p.copy_(torch.complex(w["w"], w["v"]).real), "complex"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_computes_is_refused_by_name(name: str) -> None:
    load, reason = REFUSED[name]
    server = Server({"p": (2, 2), "t": (2, 2)}, load)
    checkpoint = {
        source: torch.empty(2, 2, dtype=torch.float64, device="meta") for source in ("w", "v")
    }
    with pytest.raises(LoaderComputesError) as refusal:
        learn_mapping(server, server.load_weights, checkpoint, keep=["t"])
    text = str(refusal.value)
    assert reason in text
    assert "finish" in text
    if name != "decide":
        assert "'p@0'" in text


def test_a_cast_before_a_second_cast_to_the_same_dtype_is_one_cast() -> None:
    class CastsTwice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.empty(4, dtype=torch.bfloat16))

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            (_, tensor), *_ = weights
            self.p.data.copy_(tensor.double().to(torch.bfloat16))

    server = CastsTwice()
    mapping = learn_mapping(server, server.load_weights, {"w": torch.empty(4)})
    assert mapping.assignments[0].casts
    assert mapping.assignments[0].source == "w"


def test_the_server_is_unchanged() -> None:
    for load in (LOADERS["replace_the_parameter"][2], LOADERS["concatenate"][2]):
        targets, sources, _ = next(entry for entry in LOADERS.values() if entry[2] is load)
        server = Server(targets, load, device="cpu")
        server.register_buffer("steps", torch.arange(3), persistent=False)
        before = dict(server.named_parameters())
        checkpoint = {name: torch.zeros(shape).double() for name, shape in sources.items()}
        learn_mapping(server, server.load_weights, checkpoint)
        after = dict(server.named_parameters())
        assert all(after[name] is value for name, value in before.items())
        assert all(torch.equal(value, torch.full_like(value, -1)) for value in after.values())
        assert server.steps.tolist() == [0, 1, 2]


def test_a_loader_that_raises_leaves_the_server_unchanged() -> None:
    def fail(server: Server, weights: Weights) -> None:
        server.p.data = weights["w"]
        raise KeyError("no such layer")

    server = Server({"p": (2,)}, fail, device="cpu")
    before = server.p
    with pytest.raises(KeyError, match="no such layer"):
        learn_mapping(server, server.load_weights, {"w": torch.zeros(2).double()})
    assert server.p is before
    assert server.p.tolist() == [-1, -1]


def test_elements_without_a_source_are_refused_unless_they_are_kept() -> None:
    def load(server: Server, weights: Weights) -> None:
        server.p.data[:3].copy_(weights["w"])

    server = Server({"p": (5,), "scale": (2,)}, load)
    checkpoint = {"w": torch.zeros(3).double()}
    with pytest.raises(MappingError, match=r"'p@0'\[3:5\].*keep="):
        learn_mapping(server, server.load_weights, checkpoint, keep=["scale"])
    with pytest.raises(MappingError, match=r"'scale@0'\[0:2\]"):
        learn_mapping(server, server.load_weights, checkpoint, keep=["p"])
    mapping = learn_mapping(server, server.load_weights, checkpoint, keep=["p", "sc*"])
    assert mapping.witness == "recorded loader"
    values = mapped_values(mapping)
    assert values["p"].tolist() == [1, 2, 3, -1, -1]
    assert values["scale"].tolist() == [-1, -1]


def test_the_last_write_counts_even_if_the_counts_fit() -> None:
    """Rows 0:2 are written twice and rows 2:4 never: as many elements as the tensor has."""

    def load(server: Server, weights: Weights) -> None:
        server.p.data[:2].copy_(weights["w"])
        server.p.data[:2].copy_(weights["v"])

    server = Server({"p": (4, 3)}, load)
    checkpoint = {name: torch.zeros(2, 3).double() for name in ("w", "v")}
    mapping = learn_mapping(server, server.load_weights, checkpoint, keep=["p"])
    values = mapped_values(mapping)["p"]
    assert values[:2].flatten().tolist() == [7, 8, 9, 10, 11, 12]
    assert (values[2:] == -1).all()


def test_memory_of_a_buffer_that_was_never_written_counts_as_zero() -> None:
    def load(server: Server, weights: Weights) -> None:
        buffer = torch.empty(3, dtype=torch.float64)
        buffer[:2].copy_(weights["w"])
        server.p.data.copy_(buffer)

    server = Server({"p": (3,)}, load)
    # torch then fills new memory with NaN
    torch.use_deterministic_algorithms(True)
    try:
        mapping = learn_mapping(server, server.load_weights, {"w": torch.zeros(2).double()})
    finally:
        torch.use_deterministic_algorithms(False)
    assert [part.fill for part in mapping.assignments] == [None, 0.0]


def test_attributes_and_values_that_a_loader_reads_are_there() -> None:
    class LoadsByLocalNumbers(nn.Module):
        """Loads the experts of rank 1 of 2 by a buffer with their local numbers."""

        def __init__(self) -> None:
            super().__init__()
            parameter: Any = nn.Parameter(torch.empty(2, 3, device="meta"))
            parameter.weight_loader = self.load_expert
            self.p = parameter
            local = torch.tensor([-1, -1, 1, 0])
            self.register_buffer("local_numbers", local, persistent=False)

        def load_expert(self, param: nn.Parameter, tensor: Tensor, expert: int) -> None:
            numbers: Any = self.local_numbers
            number = int(numbers[expert].item())
            if number >= 0:
                param.data[number].copy_(tensor)

        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            params: dict[str, Any] = dict(self.named_parameters())
            for expert, (_, tensor) in enumerate(weights):
                params["p"].weight_loader(params["p"], tensor, expert)

    server = LoadsByLocalNumbers()
    checkpoint = {f"e{expert}": torch.zeros(3) for expert in range(4)}
    mapping = learn_mapping(server, server.load_weights, checkpoint)
    assert [part.source for part in mapping.by_target["p@0"]] == ["e2", "e3"]
    assert [part.region[0].start for part in mapping.by_target["p@0"]] == [1, 0]


def test_tied_parameters_are_one_target() -> None:
    def load(server: Server, weights: Weights) -> None:
        server.p.data.copy_(weights["w"])

    server = Server({"p": (3, 2), "head": (3, 2)}, load)
    server.head = server.p
    mapping = learn_mapping(server, server.load_weights, {"w": torch.zeros(3, 2).double()})
    assert list(mapping.targets) == ["p@0"]


def learn_rows_of_rank(wrong_rank: int | None = None) -> WeightMapping:
    rank = dist.get_rank()

    def load(server: Server, weights: Weights) -> None:
        rows = weights["w"].chunk(dist.get_world_size())[rank]
        server.p.data.copy_(rows * 2 if rank == wrong_rank else rows)

    server = Server({"p": (3, 2)}, load)
    checkpoint = {"w": torch.zeros(3 * dist.get_world_size(), 2).double()}
    return learn_mapping(server, server.load_weights, checkpoint)


@on_ranks(2)
def test_ranks_learn_their_own_tensors_and_get_one_mapping() -> None:
    parts = learn_rows_of_rank().by_target
    assert list(parts) == ["p@0", "p@1"]
    assert parts["p@0"][0].source_region == (range(3), range(2))
    assert parts["p@1"][0].source_region == (range(3, 6), range(2))


@on_ranks(2)
def test_one_rank_that_computes_is_an_error_of_all() -> None:
    with pytest.raises(LoaderComputesError, match="'p@1'"):
        learn_rows_of_rank(wrong_rank=1)


@on_ranks(2)
def test_a_server_of_dtensors_is_described_instead() -> None:
    server: Any = nn.Linear(4, 2)
    parallelize_module(server, init_device_mesh("cpu", (2,)), "colwise")
    with pytest.raises(MappingError, match=r"'weight' is a DTensor; describe"):
        learn_mapping(server, server.load_state_dict, {"weight": torch.empty(2, 4)})


def test_a_meta_tensor_of_unknown_values_is_refused() -> None:
    unknown = torch.empty(2, dtype=torch.float64, device="meta")
    server = Server({"p": (2,)}, lambda server, weights: server.p.copy_(unknown))
    with pytest.raises(LoaderComputesError, match=r"'p@0'.*does not belong to the checkpoint"):
        learn_mapping(server, server.load_weights, {"w": torch.zeros(2).double()})


@pytest.mark.parametrize("seed", range(30))
def test_random_loaders(seed: int) -> None:
    """Programs of random moves: each step writes a random view by a random operator."""
    draw = random.Random(seed)
    steps = [(draw.randrange(6), draw.randrange(10**6)) for _ in range(draw.randrange(1, 7))]

    def load(server: Server, weights: Weights) -> None:
        server.p.copy_(weights["a"])
        for kind, number in steps:
            rows = slice(number % 4, 6, 1 + number % 2)
            columns = slice(number % 3, number % 3 + 4)
            target = server.p[rows, columns]
            source = weights["b"][: target.shape[0], : target.shape[1]]
            if kind == 0:
                target.copy_(source)
            elif kind == 1:
                target.fill_(number % 5)
            elif kind == 2:
                target.copy_(torch.cat([source[1:], source[:1]]))
            elif kind == 3:
                target.copy_(server.p[rows, columns].flip(1))
            elif kind == 4:
                order = torch.randperm(len(target), generator=torch.Generator().manual_seed(number))
                target.copy_(source[order].contiguous())
            else:
                server.p.copy_(server.p.roll(number % 3, 0))

    shapes: Shapes = {"a": (6, 8), "b": (6, 8)}
    server = Server({"p": (6, 8)}, load)
    checkpoint = {name: torch.zeros(shape).double() for name, shape in shapes.items()}
    mapping = learn_mapping(server, server.load_weights, checkpoint)
    expected = loaded_values({"p": (6, 8)}, load, shapes)
    assert torch.equal(mapped_values(mapping)["p"], expected["p"])
