"""Covers: positions/."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sequence_programs import BATCH, LENGTH, MIXING, RIGHT, WIDTH, Inputs, Program
from shoal_context_parallel import (
    SequenceLayout,
    StyleError,
    UnsupportedAttentionError,
    context_parallel,
)
from shoal_context_parallel.positions.followed_positions import (
    FollowedPositions,
    followed_positions,
)
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks

# layouts of equal and of different shards, with contiguous and with scattered positions
LAYOUTS: dict[str, tuple[int, int, Any]] = {
    "2 ranks": (2, 16, "head_tail"),
    "4 ranks": (4, 16, "head_tail"),
    "contiguous": (4, 16, "contiguous"),
    "different sizes": (4, 13, "head_tail"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", MIXING)
def test_mixed_positions_are_refused_on_all_ranks(case: str, layout: str) -> None:
    ranks, length, name = LAYOUTS[layout]
    if case == "counted positions from 0" and name == "contiguous":
        return  # test_positions_from_zero_that_are_right_on_rank_0_alone
    for rank in range(ranks):
        with fake_world(ranks, rank=rank):
            given = Inputs.sample(length)
            with (
                context_parallel(
                    init_device_mesh("cpu", (ranks,)),
                    buffers=given.buffers,
                    buffer_seq_dims=given.dims,
                    layout=name,
                ),
                pytest.raises(UnsupportedAttentionError, match=r"sequence_programs\.py:\d+: "),
            ):
                MIXING[case](given)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", RIGHT)
@on_ranks(4)
def test_positions_alone_are_computed_as_on_one_device(case: str, layout: str) -> None:
    ranks, length, name = LAYOUTS[layout]
    if "pairs" in case and length % 2:
        length += 3  # pairs, all of them on one rank
    whole = Inputs.sample(length)
    expected = RIGHT[case](whole)
    expected_grads = torch.autograd.grad(expected, whole.weights, allow_unused=True)
    given = Inputs.sample(length)
    mesh = all_ranks() if ranks == 4 else init_device_mesh("cpu", (2, 2))[1]
    with context_parallel(mesh, buffers=given.buffers, buffer_seq_dims=given.dims, layout=name):
        loss = RIGHT[case](given)
        grads = torch.autograd.grad(loss, given.weights, allow_unused=True)
        torch.testing.assert_close(all_reduce(loss.detach(), (mesh, 0)), expected.detach())
        for got, wanted in zip(grads, expected_grads, strict=True):
            if wanted is not None:
                torch.testing.assert_close(all_reduce(got, (mesh, 0)), wanted)


def run_in_blocks(*programs: Program, length: int = LENGTH) -> list[Tensor]:
    """Run programs, each in a block of its own, on one of two ranks; return their results."""
    results = []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for program in programs:
            given = Inputs.sample(length)
            with context_parallel(mesh, buffers=given.buffers, buffer_seq_dims=given.dims):
                results.append(program(given))
    return results


def test_equal_functions_of_different_dims_are_told_apart() -> None:
    # All of them are calls from the forwards of the same classes of torch.
    def run(*modules: nn.Module) -> Program:
        return lambda given: nn.Sequential(*modules)(given.x.float())

    right = run(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Flatten(0, 1))
    wider = run(nn.Linear(WIDTH, 2 * WIDTH), nn.Softmax(-1), nn.Flatten(0, 1))
    mixing = run(nn.Linear(WIDTH, WIDTH), nn.Softmax(1), nn.Flatten(0, 1))
    run_in_blocks(right, wider, right)
    with pytest.raises(UnsupportedAttentionError, match="softmax inside of context"):
        run_in_blocks(mixing)


def test_functions_are_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    decide = FollowedPositions._decide

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[1])
        return decide(*args, **options)

    followed_positions.cache_clear()
    monkeypatch.setattr(FollowedPositions, "_decide", counted)
    program = RIGHT["norm of features"]
    run_in_blocks(program)
    first = len(calls)
    assert first, "the first block decides"
    run_in_blocks(program, program)
    assert len(calls) == first


@on_ranks(4)
def test_positions_from_zero_that_are_right_on_rank_0_alone() -> None:
    # `arange(0, n)` may be the `arange(start, stop)` of rank 0, so the ranks agree at the
    # attention.
    for is_counted in (True, False):
        given = Inputs.sample()
        rank = all_ranks().get_local_rank()
        with context_parallel(
            all_ranks(), buffers=given.buffers, buffer_seq_dims=given.dims, layout="contiguous"
        ):
            count = given.x.shape[1]
            start = 0 if is_counted else rank * count
            x = given.x + functional.embedding(torch.arange(start, start + count), given.table)
            heads = x.view(BATCH, count, 2, -1).transpose(1, 2)
            raised: Any = nullcontext()
            if is_counted:
                raised = pytest.raises(StyleError, match=r"counts from 0|errors that those ranks")
            with raised:
                functional.scaled_dot_product_attention(heads, heads, heads)


def test_one_row_on_a_rank_does_not_show_its_dim() -> None:
    given = Inputs.sample(4)
    with (
        fake_world(2),
        context_parallel(
            init_device_mesh("cpu", (2,)),
            buffers=given.buffers,
            buffer_seq_dims=given.dims,
            layout="contiguous",
        ),
    ):
        # Two positions on each rank -> each second one is one position, (BATCH, 1, WIDTH).
        row = given.x[:, ::2]
        # After the reshape dim 1 holds features, so softmax does not mix positions.
        softmax = row.reshape(BATCH, WIDTH).softmax(-1)
        sums = row.sum(-1).reshape(-1)
        assert softmax.shape == (BATCH, WIDTH)
        assert sums.shape == (BATCH,)


def test_blocks_of_positions_that_ranks_do_not_hold_whole() -> None:
    def rows_of_four(given: Inputs) -> Tensor:
        return given.x.reshape(BATCH, -1, 4 * WIDTH).softmax(-1)

    # a rank has the positions 0 to 3 and 12 to 15
    run_in_blocks(rows_of_four)
    # 0 to 5 and 18 to 23
    with pytest.raises(UnsupportedAttentionError, match="positions of several ranges"):
        run_in_blocks(rows_of_four, length=24)


def test_ranks_with_one_position_are_not_followed() -> None:
    layout = SequenceLayout.contiguous(4, 4)
    assert followed_positions((0, 1, 2, 3), 0, layout) is None
    assert followed_positions((0, 1, 2, 3), 0, SequenceLayout.contiguous(8, 4)) is not None


class FeedForwardThatMayMix(nn.Module):
    """A block of a transformer, which may look at the positions before."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(self.norm(x)))
        if self.mixes:
            hidden = hidden.cumsum(1)
        return x + functional.dropout(self.down(hidden), 0.1)


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x, use_reentrant=False)
    return out


def recomputed_by_reentry(module: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = checkpoint(module, x.clone().requires_grad_(), use_reentrant=True)
    return out


def without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(x)
    return out


def in_bfloat16(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = module(x)
    return out


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "checkpointed": checkpointed,
    "reentrant": recomputed_by_reentry,
    "without gradients": without_gradients,
    "autocast": in_bfloat16,
}


@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_modules_are_followed_in_scopes_of_torch(run: str, mixes: bool) -> None:
    with fake_world(2):
        x = torch.randn(BATCH, LENGTH, WIDTH)
        module = nn.Sequential(FeedForwardThatMayMix(False), FeedForwardThatMayMix(mixes))
        refused = pytest.raises(UnsupportedAttentionError, match="cumsum inside of context")
        with (
            context_parallel(init_device_mesh("cpu", (2,)), buffers=[x], buffer_seq_dims=[1]),
            refused if mixes else nullcontext(),
        ):
            out = RUNS[run](module, x)
            if out.requires_grad:
                torch.autograd.backward(out.square().sum())


def test_collectives_of_the_program_end_what_is_followed() -> None:
    def reduced_statistics(given: Inputs) -> Tensor:
        mean = given.x.mean(1, keepdim=True)
        torch.distributed.all_reduce(mean)
        whole = all_reduce(given.x.sum(1, keepdim=True), (init_device_mesh("cpu", (2,)), 0))
        return given.x - mean / 2 + whole

    # also where the functions are those of an earlier block
    first, second = run_in_blocks(reduced_statistics, reduced_statistics)
    assert first.shape == second.shape == (BATCH, LENGTH // 2, WIDTH)


def test_buffers_are_not_followed_after_their_block() -> None:
    with fake_world(2):
        given = Inputs.sample()
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, buffers=given.buffers, buffer_seq_dims=given.dims):
            pass
        with context_parallel(mesh, buffers=given.buffers[:1], buffer_seq_dims=[1]):
            sums = given.positions.cumsum(0)
    assert sums.tolist() == torch.arange(LENGTH).cumsum(0).tolist()


def test_copies_and_files_of_followed_tensors() -> None:
    def copied(given: Inputs) -> Tensor:
        file = BytesIO()
        torch.save(given.x, file)
        file.seek(0)
        loaded: Tensor = torch.load(file)
        return copy.deepcopy(given.x).cumsum(1) + loaded.cumsum(1)

    (result,) = run_in_blocks(copied)
    assert result.shape == (BATCH, LENGTH // 2, WIDTH)
