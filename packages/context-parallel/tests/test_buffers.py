"""Covers: buffers.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank
from torch.nn import functional
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from dense_attention import dense_mask, sample
from shoal_context_parallel import (
    Documents,
    LayoutError,
    SequenceLayout,
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from shoal_context_parallel.internal import Method
from shoal_mesh import all_reduce, init_device_mesh
from shoal_mesh.testing import all_ranks, fake_world, on_ranks


@on_ranks(4)
@pytest.mark.parametrize("method", [None, "ring", "ulysses"])
def test_a_program_for_one_device_in_a_block(method: Method | None) -> None:
    for length, ids in ((16, None), (13, None), (13, torch.tensor([0] * 5 + [1] * 8))):
        whole = sample(length, dense_mask(length, True, (None, None), ids))
        q, k, v = (x.clone() for x in whole.tensors)
        positions, seed = torch.arange(length), whole.seed.clone()
        documents = None if ids is None else Documents.from_ids(ids)
        buffers = [q, k, v, positions, seed]
        with context_parallel(
            all_ranks(),
            buffers=buffers,
            buffer_seq_dims=[2, -2, 2, 0, 2],
            method=method,
            documents=documents,
        ) as layout:
            assert layout == SequenceLayout.head_tail(length, 4)
            assert torch.equal(positions, layout.positions(get_rank()))
            leaves = query, key, value = [x.detach().requires_grad_() for x in (q, k, v)]
            out = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            grads = torch.autograd.grad(out, leaves, seed)
            full = context_parallel_unshard(all_ranks(), [out, *grads], [2] * 4)
        for got, expected in zip(full, (whole.out, *whole.grads), strict=True):
            torch.testing.assert_close(got, expected)
        assert torch.equal(q, whole.tensors[0]) and torch.equal(positions, torch.arange(length))


def attention(x: Any, weight: Any) -> Any:
    q, k, v = (x @ weight).unflatten(-1, (3, 4, 4)).transpose(1, 3).unbind(2)
    return (
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    )


def grad_of(loss: Any, weight: Tensor) -> None:
    (weight.grad,) = torch.autograd.grad(loss, [weight])


BACKWARDS: dict[str, Callable[[Any, Tensor], None]] = {
    "backward()": lambda loss, weight: loss.backward(),
    "backward(inputs=)": lambda loss, weight: loss.backward(inputs=[weight]),
    "autograd.backward": lambda loss, weight: torch.autograd.backward([loss]),
    "autograd.grad": grad_of,
}


def again(run: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    return partial(checkpoint, run, use_reentrant=reentrant)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
@on_ranks(4)
def test_what_backward_runs_again_is_attention_of_the_sequence(method: Method, layout: Any) -> None:
    for length, seen in (
        (16, "backward()"),
        (13, "backward()"),
        (2, "backward()"),
        *((13, seen) for seen in BACKWARDS),
    ):
        generator = torch.Generator().manual_seed(length)
        whole, table = (
            torch.randn(*shape, dtype=torch.float64, generator=generator)
            for shape in ((2, length, 16), (16, 48))
        )
        expected = table.clone().requires_grad_()
        (attention(whole, expected) ** 2).sum().backward()
        for reentrant in (False, True)[: 2 if seen in ("backward()", "autograd.backward") else 1]:
            for nested in (False, True):
                run = again(attention, reentrant) if nested else attention
                for inside in (True, False):
                    x, weight = whole.clone(), table.clone().requires_grad_()
                    with context_parallel(
                        all_ranks(), buffers=[x], buffer_seq_dims=[1], method=method, layout=layout
                    ):
                        # a buffer changes back
                        leaf = (x if inside else x.clone()).detach().requires_grad_()
                        out: Any = checkpoint(run, leaf, weight, use_reentrant=reentrant)
                        loss = (out**2).sum()
                        if inside:
                            BACKWARDS[seen](loss, weight)
                    if not inside:
                        BACKWARDS[seen](loss, weight)
                    assert weight.grad is not None
                    torch.testing.assert_close(
                        all_reduce(weight.grad, all_ranks().comm(0)), expected.grad
                    )


def all_saved(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def with_a_lookup(x: Tensor, weight: Tensor) -> Any:
    """Three times attention, by an operator that the check of a block's first attention has too."""
    return attention(x, weight) * torch.ones(3).nonzero().sum()


def run_compiled(x: Tensor, weight: Tensor) -> Any:
    return torch.compile(with_a_lookup, backend="aot_eager")(x, weight)


def run_in_a_checkpoint_that_saves_all(x: Tensor, weight: Tensor) -> Any:
    contexts = partial(create_selective_checkpoint_contexts, all_saved)
    return checkpoint(with_a_lookup, x, weight, use_reentrant=False, context_fn=contexts)


RUNS: dict[str, Callable[..., Any]] = {
    "compiled": run_compiled,
    "selective": run_in_a_checkpoint_that_saves_all,
}


@pytest.mark.parametrize("run", RUNS)
@on_ranks(2)
def test_compiled_and_selectively_saved_attention_in_a_block(run: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole, table = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((2, 8, 16), (16, 48))
    )
    expected, weight = table.clone().requires_grad_(), table.clone().requires_grad_()
    (with_a_lookup(whole, expected) ** 2).sum().backward()
    x = whole.clone()
    with context_parallel(all_ranks(), buffers=[x], buffer_seq_dims=[1]):
        (RUNS[run](x.clone(), weight) ** 2).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(all_reduce(weight.grad, all_ranks().comm(0)), expected.grad)


@on_ranks(2)
def test_unsharding_knows_the_layout_of_the_block() -> None:
    positions, found = torch.arange(8.0), []

    def unsharded(x: Tensor) -> Tensor:
        found.extend(context_parallel_unshard(all_ranks(), [x], [0]))
        return x.square()

    for layout in ("head_tail", "contiguous", SequenceLayout.contiguous(8, 2)):
        known = (
            layout if isinstance(layout, SequenceLayout) else getattr(SequenceLayout, layout)(8, 2)
        )
        for reentrant in (False, True):
            with context_parallel(all_ranks(), layout=layout):
                x = known.shard(positions, 0, get_rank()).requires_grad_()
                out: Any = checkpoint(unsharded, x, use_reentrant=reentrant)
            out.sum().backward()  # and so in what backward runs again
            assert all(torch.equal(whole, positions) for whole in found) and len(found) == 2
            found.clear()


class Labelled(Tensor):
    """A tensor of a class of its own, which sees its backward."""

    calls: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func)
        run: Any = super().__torch_function__
        return run(func, types, args, kwargs)


@on_ranks(2)
def test_a_backward_that_a_class_of_tensors_sees() -> None:
    whole, weight = (
        torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0)),
        torch.ones(16, 48) / 16,
    )
    expected = weight.clone().requires_grad_()
    attention(whole, expected).sum().backward()
    x = whole.clone()
    with context_parallel(all_ranks(), buffers=[x], buffer_seq_dims=[1]):
        weight.requires_grad_()
        out: Any = checkpoint(attention, x.detach().requires_grad_(), weight, use_reentrant=True)
        out.sum().as_subclass(Labelled).backward()
    assert Tensor.backward in Labelled.calls
    assert weight.grad is not None
    torch.testing.assert_close(all_reduce(weight.grad, all_ranks().comm(0)), expected.grad)


def shards_at(rank: int, **options: Any) -> torch.Tensor:
    with fake_world(4, rank=rank) if rank else fake_world(4):
        tokens = torch.arange(10).view(1, 10)
        with context_parallel(
            init_device_mesh("cpu", (4,)), buffers=[tokens], buffer_seq_dims=[1], **options
        ):
            return tokens.clone()


def test_layouts_of_buffers() -> None:
    assert shards_at(0).tolist() == [[0, 8, 9]] or shards_at(0).shape[1] in (2, 3)
    assert shards_at(0, layout="contiguous").tolist() == [[0, 1, 2]]
    assert shards_at(0, layout=SequenceLayout.per_document([5, 5], 4)).shape[1] == len(
        SequenceLayout.per_document([5, 5], 4).positions(0)
    )


def test_buffers_come_back_also_after_an_error_and_the_same_memory() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        kept, dropped = torch.arange(8), torch.arange(16).view(2, 8)
        address = kept.data_ptr()
        with (
            pytest.raises(ZeroDivisionError),
            context_parallel(
                mesh, buffers=[kept, dropped], buffer_seq_dims=[0, 1], no_restore_buffers={dropped}
            ),
        ):
            assert kept.tolist() == [0, 7]
            raise ZeroDivisionError
        assert kept.tolist() == list(range(8)) and kept.data_ptr() == address
        assert dropped.tolist() == [[0, 7], [8, 15]]


def test_backward_after_the_block_is_an_error() -> None:
    with fake_world(4):
        table, weight = torch.arange(8.0), torch.ones(2, requires_grad=True)
        with context_parallel(init_device_mesh("cpu", (4,)), buffers=[table], buffer_seq_dims=[0]):
            out = (table * weight).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, weight)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,))
        x = torch.arange(8)
        table = torch.zeros(2, 3)
        wrong: dict[str, dict[str, Any]] = {
            "got 0 dims for 1 buffers": {"buffers": [x]},
            "a subset of buffers": {"no_restore_buffers": {x}},
            "do not require gradients": {
                "buffers": [torch.zeros(8, requires_grad=True)],
                "buffer_seq_dims": [0],
            },
            r"is 8 in buffers\[0\] .* and 7 in buffers\[1\]": {
                "buffers": [x, torch.zeros(7)],
                "buffer_seq_dims": [0, 0],
            },
            # one tensor, two of its dims: the error named equal shapes only
            r"is 2 in buffers\[0\] \(dim 0 .* and 3 in buffers\[1\] \(dim 1": {
                "buffers": [table, table],
                "buffer_seq_dims": [0, 1],
            },
            r"has no dim 1; its entry in buffer_seq_dims must be from -1 to 0": {
                "buffers": [x],
                "buffer_seq_dims": [1],
            },
            "a buffer has 0 dims": {
                "buffers": [torch.zeros(())],
                "buffer_seq_dims": [0],
            },
            "must have 9": {
                "buffers": [x],
                "buffer_seq_dims": [0],
                "layout": SequenceLayout.contiguous(9, 4),
            },
            # values of tensors have no place in an error
            r"buffers is a list of Tensor, got list with int 3 at 1": {"buffers": [x, 3]},
            r"got torch.Tensor of shape \(8,\)": {"buffers": x},
            "the method of context": {"buffers": [x], "buffer_seq_dims": [0], "method": "other"},
        }
        for message, options in wrong.items():
            with pytest.raises(LayoutError, match=message), context_parallel(mesh, **options):
                raise AssertionError("the block runs")
            assert x.shape == (8,)
        with pytest.raises(NotImplementedError, match="allgather, alltoall"):
            set_rotate_method("other")


@on_ranks(2)
def test_unsharding_outside_of_a_block() -> None:
    full = torch.arange(14).view(2, 7)
    for layout in (SequenceLayout.head_tail(7, 2), SequenceLayout.contiguous(7, 2)):
        shard = layout.shard(full, 1, get_rank())
        (got,) = context_parallel_unshard(all_ranks(), [shard], [1], layout)
        assert torch.equal(got, full)
    (default,) = context_parallel_unshard(
        all_ranks(), [SequenceLayout.head_tail(7, 2).shard(full, 1, get_rank())], [1]
    )
    assert torch.equal(default, full)
    with pytest.raises(LayoutError, match="the ranks hold"):
        context_parallel_unshard(all_ranks(), [full], [1], SequenceLayout.contiguous(7, 2))
    assert context_parallel_unshard(all_ranks(), [], []) == []
    with pytest.raises(LayoutError, match="one sequence dim for each"):
        context_parallel_unshard(all_ranks(), [full], [])
