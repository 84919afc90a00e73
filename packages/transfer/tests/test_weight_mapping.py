"""Edits and their composition against the same operations of torch on numbered tensors.

Covers: mapping/weight_mapping.py, mapping/edits.py, mapping/assignment.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from index_tensors import apply_mapping, numbered
from shoal_transfer import Assignment, MappingError, Strided, WeightMapping, assign_strided


def values(mapping: WeightMapping) -> dict[str, Tensor]:
    mapping.check()
    again = WeightMapping.from_json(mapping.to_json())
    assert again == mapping
    return apply_mapping(again, numbered(mapping.sources))


def test_fuse_in_groups_interleaves_by_head() -> None:
    shapes = {"0.q": (8, 3), "0.k": (4, 3), "0.v": (4, 3)}
    before = numbered(shapes)
    mapping = WeightMapping.same_names(shapes).fuse({"{}.qkv": ("{}.q", "{}.k", "{}.v")}, groups=2)
    blocks = [before[name].chunk(2) for name in shapes]
    expected = torch.cat([block[group] for group in range(2) for block in blocks])
    assert torch.equal(values(mapping)["0.qkv"], expected)


def test_fuse_along_another_dim() -> None:
    shapes = {"a": (3, 2), "b": (3, 4)}
    before = numbered(shapes)
    mapping = WeightMapping.same_names(shapes).fuse({"ab": ("a", "b")}, dim=1)
    assert torch.equal(values(mapping)["ab"], torch.cat([before["a"], before["b"]], dim=1))


def test_split_undoes_fuse() -> None:
    shapes = {"q": (8, 3), "k": (4, 3)}
    fused = WeightMapping.same_names(shapes).fuse({"qk": ("q", "k")}, groups=4)
    back = fused.split({"qk": {"q": 8, "k": 4}}, groups=4)
    assert all(torch.equal(values(back)[name], value) for name, value in numbered(shapes).items())


def test_stack_and_unstack_experts() -> None:
    shapes = {f"layers.{n}.e.{e}.w": (2, 3) for n in range(2) for e in range(3)}
    before = numbered(shapes)
    stacked = WeightMapping.same_names(shapes).stack({"layers.{}.w": "layers.{}.e.{index}.w"})
    expected = torch.stack([before[f"layers.1.e.{e}.w"] for e in range(3)])
    assert torch.equal(values(stacked)["layers.1.w"], expected)
    back = stacked.unstack({"layers.{}.w": "layers.{}.e.{index}.w"})
    assert all(torch.equal(values(back)[name], value) for name, value in before.items())


def test_transpose_pad_repeat_and_copies() -> None:
    shapes = {"w": (4, 6), "k": (4, 2), "unused": (1,)}
    before = numbered(shapes)
    mapping = (
        WeightMapping.same_names(shapes)
        .drop(["unused"])
        .transpose(["w"])
        .pad({"w": 8}, fill=0.0)
        .pad({"w": 9}, fill=None)
        .repeat(["k"], times=3, block=2)
        .add_copies({"head": "w"})
        .add_filled({"scale": (2,)}, fill=7.0)
        .rename({"^k$": "kv"})
    )
    after = values(mapping)
    expected = torch.cat([before["w"].t(), torch.zeros(2, 4).long(), torch.full((1, 4), -1)])
    assert torch.equal(after["w"], expected)
    assert torch.equal(after["head"], expected)
    heads = before["k"].reshape(2, 2, 2).repeat_interleave(3, 0).reshape(12, 2)
    assert torch.equal(after["kv"], heads)
    assert after["scale"].tolist() == [7, 7]
    assert after.keys() == {"w", "kv", "head", "scale"}


def test_every_other_column_composes_with_transposed_slices() -> None:
    columns = Assignment("gate", (range(4), range(3)), "both", (range(4), range(0, 6, 2)), (0, 1))
    gate = WeightMapping({"both": (4, 6)}, {"gate": (4, 3)}, (columns,))
    mapping = gate.transpose(["gate"]).split({"gate": {"one": 1, "two": 2}})
    before = numbered(gate.sources)["both"]
    assert torch.equal(values(mapping)["two"], before[:, ::2].t()[1:])


REFUSED: dict[str, tuple[Callable[[WeightMapping], WeightMapping], str]] = {
    "fuse an unknown tensor": (
        lambda m: m.fuse({"ab": ("a", "c")}),
        "'ab': the tensor 'c' does not exist",
    ),
    "fuse in too many groups": (
        lambda m: m.fuse({"ab": ("a", "b")}, groups=3),
        "cannot be divided into 3 equal groups",
    ),
    "split off a part": (lambda m: m.split({"a": {"x": 1}}), "cannot be split into blocks of"),
    "one name for two": (lambda m: m.rename({"a|b": "c"}), "both become 'c'"),
    "pad to less": (lambda m: m.pad({"a": 1}), "is longer than 1"),
    "repeat uneven blocks": (
        lambda m: m.repeat(["a"], times=2, block=3),
        "cannot be divided into blocks of 3",
    ),
    "drop an unknown tensor": (lambda m: m.drop(["z.{}"]), "no tensor is named 'z.{}'"),
    "split to a known name": (
        lambda m: m.split({"a": {"b": 4}}),
        "'b' is the name of a new tensor and of an existing one",
    ),
    "follow another shape": (
        lambda m: WeightMapping({}, {"a": (2, 2)}, ()).then(m),
        r"'a' is \(4, 2\) in the later",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_edits_that_do_not_fit_are_refused(name: str) -> None:
    edit, message = REFUSED[name]
    mapping = WeightMapping.same_names({"a": (4, 2), "b": (4, 2)})
    with pytest.raises(MappingError, match=message):
        edit(mapping)


def test_elements_without_or_with_two_sources_are_named() -> None:
    rows = Assignment("a", (range(3), range(2)), "a", (range(3), range(2)), (0, 1))
    shapes = {"a": (4, 2)}
    with pytest.raises(MappingError, match=r"'a' \(4, 2\): \[3:4, 0:2\] does not have a source"):
        WeightMapping(shapes, shapes, (rows,)).check()
    more = Assignment("a", (range(2, 4), range(2)), fill=0.0)
    with pytest.raises(MappingError, match=r"'a' \(4, 2\): \[2:3, 0:2\] has two sources"):
        WeightMapping(shapes, shapes, (rows, more)).check()
    outside = Assignment("a", (range(5), range(2)), fill=0.0)
    with pytest.raises(
        MappingError, match=r"\[0:5, 0:2\] is outside of the tensor's shape \(4, 2\)"
    ):
        WeightMapping(shapes, shapes, (outside,)).check()


def test_a_witness_needs_both_mappings() -> None:
    same = WeightMapping.same_names({"a": (2,)})
    assert same.witness is None
    assert same.rename({"a": "b"}).witness is None, "an edit says what its author believes"
    recorded = same.rename({"a": "b"}).witnessed_by("recorded loader")
    assert recorded.witness == "recorded loader"
    assert same.then(recorded).witness is None
    seen = same.witnessed_by("version 0")
    assert seen.then(recorded).witness == "version 0, then recorded loader"


def test_strided_views_become_regions() -> None:
    target = torch.zeros(6, 4, dtype=torch.long)
    source = numbered({"s": (3, 8)})["s"]
    to = target[1:4, ::2]
    of = source[:, 5:7]
    part = assign_strided(
        "t",
        Strided(target.shape, int(to.storage_offset()), to.shape, to.stride()),
        "s",
        Strided(source.shape, int(of.storage_offset()), of.shape, of.stride()),
    )
    assert str(part) == "'t'[1:4, 0:3:2] = 's'[0:3, 5:7]"
    to.copy_(of)
    rest = WeightMapping({"s": (3, 8)}, {"t": (6, 4)}, (part,))
    after = apply_mapping(rest, {"s": source})["t"]
    assert torch.equal(after.clamp(min=0), target)


def test_views_that_are_not_regions_are_refused() -> None:
    with pytest.raises(MappingError, match="does not walk along one dim"):
        Strided((4, 6), 0, (24,), (1,))
    with pytest.raises(MappingError, match="walk along one"):
        Strided((24,), 0, (4, 6), (6, 1))
    with pytest.raises(MappingError, match="writes an element 3 times"):
        assign_strided("t", Strided((4,), 0, (3,), (0,)), "s", Strided((3,), 0, (3,), (1,)))


def test_texts_that_are_no_mappings_are_refused() -> None:
    text = WeightMapping.same_names({"w": (2,)}).to_json()
    with pytest.raises(MappingError, match="not a mapping: JSONDecodeError"):
        WeightMapping.from_json(text[:-5])
    with pytest.raises(MappingError, match="not a mapping: KeyError: 'sources'"):
        WeightMapping.from_json(text.replace("sources", "origins"))
    with pytest.raises(MappingError, match="version 2 of a mapping"):
        WeightMapping.from_json(text.replace('"version": 1', '"version": 2'))
