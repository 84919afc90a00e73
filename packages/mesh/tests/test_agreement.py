"""Covers: world.py, `agree`: the values of all ranks, and one error on all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shoal_mesh.groups.world import agree, all_gather_objects, require_world
from shoal_mesh.testing import on_ranks


def test_one_process_without_a_group() -> None:
    assert agree(lambda: "value") == ["value"]
    with pytest.raises(ZeroDivisionError, match=r"^division by zero$"):
        agree(lambda: 1 / 0)


@on_ranks(3)
def test_every_rank_gets_what_all_return() -> None:
    assert agree(lambda: {"rank": dist.get_rank()}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def raise_on(errors: dict[int, Exception]) -> None:
    if dist.get_rank() in errors:
        raise errors[dist.get_rank()]


FAILURES: dict[str, tuple[dict[int, Exception], type[Exception], str]] = {
    "one": ({1: OSError("disk full")}, OSError, "rank 1: disk full"),
    "two classes": (
        {1: OSError("full"), 2: KeyError("name")},
        OSError,
        "rank 1: full; rank 2: KeyError: 'name'",
    ),
    "all alike": ({0: OSError("full"), 1: OSError("full"), 2: OSError("full")}, OSError, "full"),
    "no pickle": ({2: TwoArguments("a", "b")}, RuntimeError, "rank 2: TwoArguments: a b"),
}


@on_ranks(3)
@pytest.mark.parametrize("case", FAILURES)
def test_an_error_of_some_ranks_is_raised_on_all(case: str) -> None:
    errors, kind, text = FAILURES[case]
    with pytest.raises(kind, match=f"^{text}$") as raised:
        agree(lambda: raise_on(errors))
    assert type(raised.value) is kind
    assert all_gather_objects(require_world(), str(raised.value)) == [text] * 3
    assert agree(lambda: None) == [None] * 3  # no rank is left in a collective


@on_ranks(3)
def test_an_error_of_another_class_becomes_the_one_that_is_asked_for() -> None:
    with pytest.raises(LookupError, match=r"^rank 1: OSError: full; rank 2: KeyError: 'name'$"):
        agree(lambda: raise_on({1: OSError("full"), 2: KeyError("name")}), error_type=LookupError)
    with pytest.raises(LookupError, match=r"^nothing is saved: OSError: full$"):
        agree(
            lambda: raise_on(dict.fromkeys(range(3), OSError("full"))),
            None,
            LookupError,
            "nothing is saved",
        )


@on_ranks(3)
def test_a_value_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(Exception, match=r"rank 1: .*pickle"):
        agree(lambda: (lambda: 0) if dist.get_rank() == 1 else None)


@on_ranks(3)
def test_ranks_of_a_sub_group_have_their_global_numbers() -> None:
    groups = [dist.new_group([0]), dist.new_group([2, 1])]
    group = groups[min(dist.get_rank(), 1)]
    assert agree(dist.get_rank, group) == ([0] if dist.get_rank() == 0 else [1, 2])
    if dist.get_rank() > 0:
        with pytest.raises(OSError, match=r"^rank 2: full$"):
            agree(lambda: raise_on({2: OSError("full")}), group)
