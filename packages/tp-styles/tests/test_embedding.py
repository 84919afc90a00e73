"""Covers: modules/embedding.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_device import as_one_device
from shoal_dtensor import Replicate, Shard, distribute_tensor
from shoal_dtensor.errors import OperatorIndexError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks
from shoal_tp_styles import (
    ColwiseParallel,
    LayoutError,
    RowwiseParallel,
    SequenceParallel,
    UnsupportedModuleError,
    parallelize_module,
)
from small_models import assert_same_parameters


@on_ranks(4)
def test_bilinear_and_embedding_bag() -> None:
    pair = [torch.randn(3, 5, dtype=torch.double), torch.randn(3, 7, dtype=torch.double)]
    as_one_device(
        nn.Bilinear(5, 7, 10).double(),
        ColwiseParallel(output_layouts=Replicate()),
        all_ranks(),
        pair,
    )
    bags = [torch.randint(9, (12,)), torch.tensor([0, 5, 5, 9])]
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(9, 10, mode=mode).double()
        as_one_device(bag, ColwiseParallel(), all_ranks(), bags, leaving=Shard(1))


@on_ranks(4)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_embedding_bag_by_rows(mode: str, padding: int | None, layout: Any) -> None:
    single = nn.EmbeddingBag(9, 5, mode=mode, padding_idx=padding).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    tokens, offsets = torch.randint(9, (12,)), torch.tensor([0, 5, 5, 9])
    weights = torch.rand(12, dtype=torch.double) if mode == "sum" else None
    for inputs in ((tokens, offsets, weights), (tokens.view(4, 3), None, None)):
        as_one_device(single, style, all_ranks(), inputs, leaving=layout)


class OwnForward(nn.EmbeddingBag):
    """Runs on DTensors."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs)


BAG_LENGTHS = {"even": [[2, 3]] * 4, "uneven": [[3], [0, 2, 1], [], [4, 0]]}


def rank_bags(lengths: list[list[int]], last: bool) -> list[Any]:
    """Tokens, offsets and weights of every rank."""
    bags = []
    for held in lengths:
        ends = torch.tensor([0, *held]).cumsum(0)
        count = int(ends[-1])
        offsets = ends if last else ends[:-1]
        bags.append((torch.randint(9, (count,)), offsets, torch.rand(count, dtype=torch.double)))
    return bags


@on_ranks(4)
@pytest.mark.parametrize("style", [ColwiseParallel, RowwiseParallel])
@pytest.mark.parametrize("lengths", [*BAG_LENGTHS])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_each_ranks_own_bags(style: Any, lengths: str, last: bool, mode: str, layout: Any) -> None:
    axis, held = all_ranks(), BAG_LENGTHS[lengths]
    how: Any = {
        "mode": mode.replace("weighted", "sum"),
        "include_last_offset": last,
        "padding_idx": 4,
    }
    single: Any = nn.EmbeddingBag(9, 6, **how).double()
    module: Any = parallelize_module(
        copy.deepcopy(single), axis, style(input_layouts=Shard(0), output_layouts=layout)
    )
    bags, rank = rank_bags(held, last), axis.get_local_rank()
    theirs = [each[2].clone().requires_grad_() for each in bags]
    mine = bags[rank][2].clone().requires_grad_()
    expected = [
        single(*each[:2], w if mode == "weighted" else None)
        for each, w in zip(bags, theirs, strict=True)
    ]
    got = module(*bags[rank][:2], mine if mode == "weighted" else None)
    seeds, joined = [torch.randn_like(each) for each in expected], torch.cat(expected)
    torch.testing.assert_close(got, joined if layout == Replicate() else expected[rank])
    torch.autograd.backward(joined, torch.cat(seeds))
    got.backward(torch.cat(seeds) if layout == Replicate() else seeds[rank])
    torch.testing.assert_close(mine.grad, theirs[rank].grad)
    assert_same_parameters(module, single)


@on_ranks(4)
@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())])
def test_weights_of_replicated_bags_have_gradients(style: Any) -> None:
    ((tokens, offsets, weights),) = rank_bags([[2, 3]], last=False)
    weights[1] = 0  # what weighs nothing has a gradient too
    leaving = Shard(1) if isinstance(style, ColwiseParallel) else Replicate()
    single = nn.EmbeddingBag(9, 6, mode="sum").double()
    as_one_device(single, style, all_ranks(), (tokens, offsets, weights), leaving=leaving)


@on_ranks(2)
def test_offsets_that_are_no_bags_of_the_rank_are_refused() -> None:
    axis, style = all_ranks(), RowwiseParallel(input_layouts=Shard(0))
    tokens, offsets = torch.arange(4), torch.tensor([0, 2])
    module: Any = parallelize_module(nn.EmbeddingBag(9, 6), axis, style)
    with pytest.raises(
        LayoutError, match=r"begin with 0 .* got .*\[\(4, 2, 1, 2\)\] on ranks \[1\]"
    ):
        module(tokens, torch.tensor([axis.get_local_rank(), 2]))
    with pytest.raises(LayoutError, match=r"end inside .* on ranks \[0, 1\]"):
        module(tokens, torch.tensor([0, 5]))
    with pytest.raises(LayoutError, match="got a DTensor of tokens and a Tensor of offsets"):
        module(distribute_tensor(tokens, axis, [Shard(0)]), offsets)
    on_dtensors: Any = parallelize_module(OwnForward(9, 6), axis, style)
    not_lowered: Any = parallelize_module(nn.EmbeddingBag(9, 6), axis, style, lower=False)
    for each in (on_dtensors, not_lowered):
        with pytest.raises(
            LayoutError, match=r"offsets of all ranks' tokens, got a plain Tensor .* Pass DTensors"
        ):
            each(tokens, offsets=offsets)


@fake_world(2)
def test_unsupported_bags_and_recurrent_modules_are_refused() -> None:
    axis = init_device_mesh("cpu", (2,))
    replicated = RowwiseParallel(input_layouts=Replicate())
    with pytest.raises(UnsupportedModuleError, match="mode='max'"):
        parallelize_module(nn.EmbeddingBag(4, 4, mode="max"), axis, replicated)
    with pytest.raises(
        UnsupportedModuleError, match=r"shard its batch: SequenceParallel\(sequence_dim=0\)"
    ):
        parallelize_module(nn.LSTM(4, 4, batch_first=True), axis, SequenceParallel())
    dropping: Any = parallelize_module(
        nn.GRU(4, 4, num_layers=2, dropout=0.5), axis, SequenceParallel()
    )
    with pytest.raises(UnsupportedModuleError, match="between its layers"):
        dropping(torch.randn(3, 2, 4))


@on_ranks(4)
def test_colwise_embedding() -> None:
    single, tokens = nn.Embedding(8, 16, padding_idx=3).double(), torch.randint(8, (4, 2))
    run = as_one_device(single, ColwiseParallel(), all_ranks(), [tokens], leaving=Shard(-1))
    assert run.forward == run.backward == {}


@on_ranks(4)
@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [(Replicate(), {"all_reduce": 1}, {}), (Shard(1), {"reduce_scatter": 1}, {"all_gather": 1})],
)
@pytest.mark.parametrize("vocab", [8, 10, 3])
@pytest.mark.parametrize("scale", [True, False])
def test_rowwise_embedding(
    layout: Any, forward: dict[str, int], backward: dict[str, int], vocab: int, scale: bool
) -> None:
    single = nn.Embedding(vocab, 12, padding_idx=2, scale_grad_by_freq=scale).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    run = as_one_device(single, style, all_ranks(), [torch.randint(vocab, (3, 8))], leaving=layout)
    assert (run.forward, run.backward) == (forward, backward)


@on_ranks(4)
@pytest.mark.parametrize("features", [8, 6, 2])
@pytest.mark.parametrize("kind", ["embedding", "bag", "conv"])
def test_rows_reduce_scatter_along_their_features(features: int, kind: str) -> None:
    x, layout = torch.randint(10, (3, 5)), Shard(-1)
    # with a bias, which is added to each rank's own channels
    if kind == "conv":
        single: nn.Module = nn.Conv1d(8, features, 3).double()
        x, layout = torch.randn(2, 8, 6, dtype=torch.double), Shard(-2)
    else:
        single = (nn.Embedding if kind == "embedding" else nn.EmbeddingBag)(10, features).double()
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    assert as_one_device(single, style, all_ranks(), [x], leaving=layout).forward == {
        "reduce_scatter": 1
    }


@on_ranks(2)
def test_ids_out_of_range_are_refused_on_all_ranks() -> None:
    style = RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))
    for table in (nn.Embedding(9, 2), nn.EmbeddingBag(9, 2, mode="sum")):
        module = parallelize_module(table, all_ranks(), style)
        for wrong in (9, -1):  # of the last rank alone
            ids = torch.tensor([[3, wrong if dist.get_rank() else 8]])
            with pytest.raises(
                OperatorIndexError, match=f"id {wrong} is out of bounds for a table of 9 rows"
            ):
                module(ids)
