"""embedding and embedding_bag with each rank's own indices, and with replicated ones.

Covers: ops/lookup.py.
"""

# mypy: allow-untyped-calls
# Torch gives `backward` and some of its functions no types.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from sharding_cases import chunk, enumerable
from shoal_dtensor.errors import OperatorIndexError
from shoal_mesh.testing import observed, on_ranks
from shoal_shard_api import NotExpressibleError, _shard_tensor, replicated_indices, shard_parameter
from shoal_shard_api.errors import ArgumentTypeError, RankMismatchError

TABLE = torch.linspace(-2, 2, 54, dtype=torch.float64).reshape(9, 6)
SPECS = {
    "rows": chunk(0),
    "columns, any order": chunk(1, (2, 0, 3, 1)),
    "uneven rows on some ranks": enumerable(([0, 0], [1, 6], 3), ([1, 0], [8, 6], 1)),
    "grid": enumerable(
        ([0, 0], [3, 4], 1), ([0, 4], [3, 2], 0), ([3, 0], [6, 4], 2), ([3, 4], [6, 2], 3)
    ),
}
# The indices of ranks 0 to 3: other numbers of them, other shapes, none on rank 2.
OWN = [torch.tensor(each) for each in ([[0, 3, 7], [2, 2, 5]], [8], [], [1, 4, 4, 6, 0])]
OWN[2] = OWN[2].long()
BAGS = [torch.tensor(each).view(-1, 2) for each in ([0, 3, 7, 2], [8, 1], [], [1, 4, 4, 6, 0, 0])]
BAGS[2] = BAGS[2].long()
OFFSETS = [torch.tensor(each, dtype=torch.int64) for each in ([0, 2], [0], [], [0, 0, 3])]


def look_up_sparse_bags(rank: int, table: Any) -> Any:
    return F.embedding_bag(BAGS[rank], table, mode="sum", sparse=True)


def look_up_weighted_bags(rank: int, table: Any) -> Any:
    return F.embedding_bag(
        BAGS[rank], table, mode="sum", per_sample_weights=BAGS[rank].double() + 0.5
    )


def look_up_by_offsets(rank: int, table: Any) -> Any:
    return F.embedding_bag(OWN[rank].view(-1), table, OFFSETS[rank], mode="sum")


def look_up_by_a_last_offset(rank: int, table: Any) -> Any:
    return F.embedding_bag(
        OWN[rank].view(-1),
        table,
        torch.cat([OFFSETS[rank], torch.tensor([OWN[rank].numel()])]),
        include_last_offset=True,
    )


LOOKUPS: dict[str, Callable[[int, Any], Any]] = {
    "embedding": lambda rank, table: F.embedding(OWN[rank], table),
    "padding": lambda rank, table: F.embedding(OWN[rank], table, padding_idx=4),
    "by keyword": lambda rank, table: F.embedding(input=OWN[rank], weight=table),
    "sparse": lambda rank, table: F.embedding(OWN[rank], table, sparse=True),
    "bags, sparse": look_up_sparse_bags,
    "bags, mean": lambda rank, table: F.embedding_bag(BAGS[rank], table),
    "bags, sum": lambda rank, table: F.embedding_bag(BAGS[rank], table, mode="sum"),
    "bags, weighted": look_up_weighted_bags,
    "offsets": look_up_by_offsets,
    "last offset": look_up_by_a_last_offset,
}


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_each_rank_gets_the_rows_of_its_own_indices(name: str, spec: str) -> None:
    rank, look_up = dist.get_rank(), LOOKUPS[name]
    table, plain = (
        _shard_tensor(TABLE.clone().requires_grad_(), SPECS[spec]),
        TABLE.clone().requires_grad_(),
    )
    got, every = look_up(rank, table), [look_up(each, plain) for each in range(4)]
    assert type(got) is torch.Tensor
    torch.testing.assert_close(got, every[rank], msg=f"{name}, {spec}")
    loss: Any = got.square().sum() * (rank + 1)  # each rank has a loss of its own
    loss.backward()
    expected: Any = sum((rows.square().sum() * (each + 1)) for each, rows in enumerate(every))
    expected.backward()
    gradient: Any = table.grad
    in_torch: Any = plain.grad
    torch.testing.assert_close(
        gradient.full_tensor(), in_torch.to_dense(), msg=f"gradient of {name}, {spec}"
    )


@on_ranks(4)
def test_gradients_of_own_sample_weights() -> None:
    rank = dist.get_rank()
    mine, plain = ((BAGS[rank].double() + 0.5).requires_grad_() for _ in range(2))
    for weights, table in ((mine, _shard_tensor(TABLE, chunk(0))), (plain, TABLE)):
        rows: Any = F.embedding_bag(BAGS[rank], table, mode="sum", per_sample_weights=weights)
        (rows.square().sum() * (rank + 1)).backward()
    torch.testing.assert_close(mine.grad, plain.grad)


@on_ranks(4)
def test_a_module_looks_up_its_own_indices() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    module, plain = torch.nn.Embedding(9, 6), torch.nn.Embedding(9, 6)
    plain.load_state_dict(module.state_dict())
    shard_parameter(module, "weight", chunk(0))
    torch.testing.assert_close(module(OWN[rank]), plain(OWN[rank]))


@on_ranks(4)
@pytest.mark.parametrize("spec", SPECS)
def test_replicated_indices_are_not_gathered(spec: str) -> None:
    table = _shard_tensor(TABLE, SPECS[spec])
    with observed() as gathering:
        F.embedding(OWN[0], table)
    with replicated_indices(), observed() as events:
        got = F.embedding(OWN[0], table)
        bags = F.embedding_bag(BAGS[0], table)
        with replicated_indices(False):
            own = F.embedding(OWN[dist.get_rank()], table)
    assert torch.equal(got, F.embedding(OWN[0], TABLE))
    assert torch.equal(own, F.embedding(OWN[dist.get_rank()], TABLE))
    torch.testing.assert_close(bags, F.embedding_bag(BAGS[0], TABLE))
    assert "all_gather_into_tensor" in [event.op for event in gathering]
    if spec == "rows":
        assert [event.op for event in events][:2] == ["all_reduce", "all_reduce"]


def _wrong(rank: int, there: Any, elsewhere: Any) -> Any:
    return there if dist.get_rank() == rank else elsewhere


INDEX = torch.tensor([0, 1])


def look_up_bags_of_other_widths(t: Any) -> Any:
    return F.embedding_bag(torch.zeros(2, 2 + dist.get_rank(), dtype=torch.int64), t)


def look_up_with_too_few_weights(t: Any) -> Any:
    return F.embedding_bag(INDEX[None], t, mode="sum", per_sample_weights=torch.zeros(2))


def look_up_with_weights_on_one_rank(t: Any) -> Any:
    return F.embedding_bag(
        INDEX[None], t, mode="sum", per_sample_weights=_wrong(0, torch.ones(1, 2), None)
    )


WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a list": (
        lambda t: F.embedding([0, 1], t),  # type: ignore[arg-type]  # the mistake under test
        ArgumentTypeError,
        "plain tensor of int32 or int64",
    ),
    "floats on one rank": (
        lambda t: F.embedding(_wrong(2, INDEX.float(), INDEX), t),
        ArgumentTypeError,
        r"^rank 2: embedding: ",
    ),
    "an index beyond the table": (
        lambda t: F.embedding(_wrong(1, torch.tensor([9]), INDEX), t),
        OperatorIndexError,
        "^rank 1: .*out of range",
    ),
    "a negative index": (
        lambda t: F.embedding(torch.tensor([-1]), t),
        OperatorIndexError,
        "out of range",
    ),
    "dtypes that differ": (
        lambda t: F.embedding(_wrong(3, INDEX.int(), INDEX), t),
        RankMismatchError,
        r"dtype must be equal on all ranks: torch.int64 on rank 0, torch.int32 on rank 3",
    ),
    "bags of other widths": (
        look_up_bags_of_other_widths,
        RankMismatchError,
        r"shape of a bag must be equal on all ranks: \(2,\) on rank 0, \(3,\) on rank 1",
    ),
    "no offsets": (
        lambda t: F.embedding_bag(INDEX, t),
        ArgumentTypeError,
        "1-D indices need offsets",
    ),
    "three dims": (
        lambda t: F.embedding_bag(INDEX.view(2, 1, 1), t),
        ArgumentTypeError,
        "1 or 2 dims",
    ),
    "weights of another shape": (
        look_up_with_too_few_weights,
        ArgumentTypeError,
        "per_sample_weights",
    ),
    "weights on one rank": (look_up_with_weights_on_one_rank, RankMismatchError, "weighted"),
}
BUILTIN: dict[type[Exception], type[Exception]] = {
    ArgumentTypeError: TypeError,
    OperatorIndexError: IndexError,
    RankMismatchError: ValueError,
}


@on_ranks(4)
@pytest.mark.parametrize("case", WRONG)
def test_wrong_indices_are_raised_on_all_ranks(case: str) -> None:
    call, kind, text = WRONG[case]
    table = _shard_tensor(TABLE, chunk(0))
    with pytest.raises(kind, match=text) as raised:
        call(table)
    assert isinstance(raised.value, BUILTIN[kind])
    # no rank is left in a collective
    assert torch.equal(F.embedding(INDEX, table), F.embedding(INDEX, TABLE))


@on_ranks(4)
def test_a_table_without_placements_is_refused_before_anything_is_gathered() -> None:
    table = _shard_tensor(
        TABLE, enumerable(([0, 0], [2, 6], 3), ([2, 0], [3, 6], 1), ([5, 0], [4, 6], 3))
    )
    with observed() as events, pytest.raises(NotExpressibleError, match="embedding"):
        F.embedding(INDEX, table)
    assert [event.op for event in events] == []
