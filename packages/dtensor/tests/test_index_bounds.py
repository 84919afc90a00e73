"""A value out of range raises on every rank that has it, whatever its shard.

Covers: rules/language/local_ops.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from shoal_dtensor.errors import OperatorIndexError
from shoal_dtensor.testing import on_threads, thread_meshes

LOOKUPS: dict[str, Callable[[Any, Any], Any]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1)),
    "take": lambda x, i: x.take(i),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i.unsqueeze(0), x, mode="sum"),
    "nll_loss": lambda x, i: F.nll_loss(x.t(), i),
    "nll_loss, each": lambda x, i: F.nll_loss(x.t(), i, reduction="none"),
}


@pytest.mark.parametrize("sharding", [Shard(0), Shard(0, sizes=(3, 0, 2))], ids=str)
@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_out_of_range_raises_on_every_rank(name: str, sharding: Shard) -> None:
    look_up = LOOKUPS[name]
    x, index = torch.ones(5, 2), torch.tensor([1, 10 if name == "take" else 5])
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds|valid range"):
        look_up(x, index)

    def check(mesh: Any) -> str:
        spread, fixed = (
            distribute_tensor(x, mesh, [sharding]),
            distribute_tensor(index, mesh, [Replicate()]),
        )
        with pytest.raises(IndexError, match="out of bounds for a dim of") as caught:
            look_up(spread, fixed)
        return str(caught.value)

    meshes = thread_meshes((3,))
    messages = on_threads([partial(check, mesh) for mesh in meshes], meshes)
    assert len({*messages}) == 1
    assert f"index {int(index[1])} is out of bounds" in messages[0]


SOURCE = torch.ones(2, 2)
FROM_THE_FRONT: dict[str, Callable[[Any, Any, Any], Any]] = {
    "gather": lambda x, i, s: x.gather(0, i.unsqueeze(1).expand(2, 2)),
    "index_select": lambda x, i, s: x.index_select(0, i),
    "scatter": lambda x, i, s: x.scatter(0, i.unsqueeze(1).expand(2, 2), s),
    "scatter of a number": lambda x, i, s: x.scatter(0, i.unsqueeze(1).expand(2, 2), 2.0),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i.unsqueeze(1).expand(2, 2), s),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i.unsqueeze(1).expand(2, 2), s, "amax"),
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "embedding": lambda x, i, s: F.embedding(i, x),
    "embedding_bag": lambda x, i, s: F.embedding_bag(i.unsqueeze(0), x, mode="sum"),
}
FROM_THE_END: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index": lambda x, i, s: x[i],
    "take_along_dim": lambda x, i, s: x.take_along_dim(i.unsqueeze(1), 0),
    "take": lambda x, i, s: x.take(i),
    "put": lambda x, i, s: x.put(i, s[0]),
    "index_fill": lambda x, i, s: x.index_fill(0, i, 7.0),
    "index_put": lambda x, i, s: x.index_put((i,), s),
}
LAYOUTS = [Shard(0), Shard(0, sizes=(4, 0, 1)), Shard(1), Replicate()]


def _on_three_ranks(look_up: Callable[..., Any], *tensors: Any) -> list[Any]:
    """The results of three ranks, or the errors that they raise.

    `tensors` are pairs of a value and its placement.
    """

    def run(mesh: Any) -> Any:
        spread = [distribute_tensor(value, mesh, [placement]) for value, placement in tensors]
        try:
            return look_up(*spread).full_tensor()
        except (IndexError, RuntimeError) as error:
            # the error of a rank that waits for one which has raised is a RuntimeError too
            return error

    meshes = thread_meshes((3,))
    return on_threads([partial(run, mesh) for mesh in meshes], meshes)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FROM_THE_FRONT)
def test_an_index_that_does_not_count_from_the_end(name: str, layout: Any) -> None:
    # Along a sharded dim -1 was taken for the last element; a rank with an empty shard went on.
    look_up, x, index = FROM_THE_FRONT[name], torch.arange(10.0).view(5, 2), torch.tensor([1, -1])
    with pytest.raises((IndexError, RuntimeError)) as plain:
        look_up(x, index, SOURCE)
    fixed = (index, Replicate()), (SOURCE, Replicate())
    errors = _on_three_ranks(look_up, (x, layout), *fixed)
    builtin = IndexError if isinstance(plain.value, IndexError) else RuntimeError
    assert all(isinstance(error, builtin) for error in errors), errors


def multilabel_margin_loss_of_two(x: Any, i: Any, s: Any) -> Any:
    return F.multilabel_margin_loss(x.t(), i.view(2, 1).expand(2, 5))


SLICED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index": lambda x, i, s: x[i, i - i],
    "scatter_add": FROM_THE_FRONT["scatter_add"],
    "index_add": FROM_THE_FRONT["index_add"],
    "index_put": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "nll_loss": lambda x, i, s: F.nll_loss(x.t(), i),
    "multi_margin_loss": lambda x, i, s: F.multi_margin_loss(x.t(), i),
    "multilabel_margin_loss": multilabel_margin_loss_of_two,
}


@pytest.mark.parametrize("name", SLICED)
def test_an_index_that_is_sliced_like_another_argument(name: str) -> None:
    # The rank with the wrong index raised alone, though all of them have it.
    look_up, x, index = SLICED[name], torch.arange(10.0).view(5, 2), torch.tensor([1, 9])
    by_row = name == "index" or name.endswith("loss")
    other = Shard(1) if by_row else Replicate()
    operands = (x, other), (index, Replicate()), (SOURCE, Shard(0))
    errors = _on_three_ranks(look_up, *operands)
    assert all(isinstance(error, IndexError) for error in errors), errors


def test_a_probability_that_is_sliced_like_the_target() -> None:
    x, target = torch.tensor([0.5, 0.25, 1.5, 0.5]), torch.ones(4)
    with pytest.raises(RuntimeError, match="between 0 and 1"):
        F.binary_cross_entropy(x, target)
    errors = _on_three_ranks(F.binary_cross_entropy, (x, Replicate()), (target, Shard(0)))
    assert all("between 0 and 1" in str(error) for error in errors), errors


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", FROM_THE_END)
def test_an_index_that_counts_from_the_end(name: str, layout: Any) -> None:
    look_up, x, index = FROM_THE_END[name], torch.arange(10.0).view(5, 2), torch.tensor([1, -1])
    fixed = (index, Replicate()), (SOURCE, Replicate())
    for result in _on_three_ranks(look_up, (x, layout), *fixed):
        assert torch.equal(result, look_up(x, index, SOURCE))


@pytest.mark.parametrize("wrong", [5, -1])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_one_hot_of_a_class_that_is_none(wrong: int, placement: Any) -> None:
    # The row of such an index was all zeros.
    index = torch.tensor([1, wrong])
    errors = _on_three_ranks(lambda i: F.one_hot(i, 5), (index, placement))
    raised = ["Class values must be" in str(error) for error in errors]
    assert sum(raised) == (1 if isinstance(placement, Shard) else 3), errors


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_one_hot_of_as_many_classes_as_there_are(placement: Any) -> None:
    index = torch.tensor([1, 0, 4, 2])
    for result in _on_three_ranks(F.one_hot, (index, placement)):
        assert torch.equal(result, F.one_hot(index))
    for error in _on_three_ranks(F.one_hot, (index - 1, placement)):
        assert "Class values must be non-negative" in str(error) or isinstance(placement, Shard)
    (mesh, *_) = thread_meshes((1,))
    sharded = F.one_hot(distribute_tensor(index, mesh, [Shard(0)]))
    assert isinstance(sharded, DTensor) and sharded.placements == (Shard(0),)


def test_a_source_with_fewer_elements_than_the_mask() -> None:
    # It was an IndexError, on ranks that needed the missing elements alone.
    x = torch.ones(5, 2)
    operands = (x, Shard(0)), (x > 0, Replicate()), (torch.ones(3), Replicate())
    for error in _on_three_ranks(torch.masked_scatter, *operands):
        assert type(error).__mro__[1:3] != IndexError.__mro__[:2]
        assert isinstance(error, RuntimeError) and not isinstance(error, OperatorIndexError)


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_negative_deviation(placement: Any) -> None:
    # Numbers were drawn, with the sign turned.
    deviations = torch.tensor([1.0, 1.0, -1.0, 1.0])
    for mean in (0.0, torch.zeros(4)):
        operands = [(deviations, placement)]
        if isinstance(mean, torch.Tensor):
            operands.append((mean, placement))
        errors = _on_three_ranks(
            lambda std, mean=mean, *means: torch.normal(means[0] if means else mean, std), *operands
        )
        assert any(isinstance(error, RuntimeError) for error in errors), errors
