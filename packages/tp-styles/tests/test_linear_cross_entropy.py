"""Covers: losses/linear_cross_entropy.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal_dtensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from shoal_mesh import CommDebugMode, DeviceMesh, init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_tp_styles import LayoutError, Vocab, losses
from tp_checks import ALL_REDUCE

FEATURES = 5


def reference(
    x: Tensor, w: Tensor, b: Tensor | None, target: Tensor, options: dict[str, Any]
) -> Tensor:
    """The loss from the full logits."""
    options = dict(options)
    cap, z_loss = options.pop("logit_cap", None), options.pop("z_loss", 0.0)
    options.pop("block_rows", None)
    z = functional.linear(x, w, b).flatten(0, -2)
    z = z if cap is None else cap * (z / cap).tanh()
    each: Tensor = functional.cross_entropy(
        z, target.flatten(), **{**options, "reduction": "none"}
    ).view(target.shape)
    counted = (target != -100).to(z.dtype)
    if options.get("weight") is not None:
        counted = counted * options["weight"][target.clamp(min=0)]
    each = each + z_loss * z.logsumexp(-1).square().view(target.shape) * counted
    if options.get("reduction") == "none":
        return each
    total: Tensor = each.sum()
    return total if options.get("reduction") == "sum" else total / counted.sum()


def leaf(tensor: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None).requires_grad_()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 0.3},
    "capped": {"logit_cap": 1.5},
    "weighted": {"weight": torch.linspace(0.5, 2, 11, dtype=torch.double)},
    "weighted and smoothed": {
        "weight": torch.linspace(0.5, 2, 11, dtype=torch.double),
        "label_smoothing": 0.2,
    },
    "all": {"logit_cap": 2.0, "z_loss": 0.1, "label_smoothing": 0.1, "block_rows": 3},
    "row by row": {"block_rows": 1},
}


@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(7,), (2, 4), (0,)])
def test_it_is_the_loss_of_the_full_logits(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    if shape == (0,) and options.get("reduction", "mean") == "mean":
        options = {**options, "reduction": "sum"}  # the mean of no rows is not a number
    for plain, biased in ((False, True), (True, False)):
        x = torch.randn(*shape, FEATURES, dtype=torch.double, requires_grad=True)
        w = torch.randn(11, FEATURES, dtype=torch.double, requires_grad=True)
        b = torch.randn(11, dtype=torch.double, requires_grad=True) if biased else None
        target = torch.randint(11, shape)
        if target.numel():
            target.view(-1)[0] = -100
        expected = reference(x, w, b, target, options)
        seed = torch.randn_like(expected)
        expected.backward(seed)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        mesh = all_ranks()
        ours = x.detach().clone().requires_grad_()
        head: Any = leaf(w, mesh, [Shard(0)])  # 3, 3, 3 and 2 of 11 classes
        bias = None if b is None else leaf(b, mesh, [Shard(0)])
        vocab = None
        if plain:
            head, vocab = head.to_local().detach().clone().requires_grad_(), Vocab.even(mesh, 11)
        with CommDebugMode() as mode:
            loss = losses.linear_cross_entropy(
                ours, head, target, linear_bias=bias, vocab=vocab, **options
            )
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 2
        torch.testing.assert_close(loss, expected)
        with CommDebugMode() as mode:
            loss.backward(seed)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert mode.get_comm_counts()[ALL_REDUCE] == mode.get_total_counts() == 1
        torch.testing.assert_close(ours.grad, x.grad)
        assert head.grad is not None and w.grad is not None, "both have gradients"
        whole = head.grad.full_tensor() if isinstance(head.grad, DTensor) else None
        own = distribute_tensor(w.grad, mesh, [Shard(0)], src_data_rank=None).to_local()
        torch.testing.assert_close(
            head.grad if whole is None else whole, own if whole is None else w.grad
        )
        if bias is not None and b is not None:
            grad: Any = bias.grad
            torch.testing.assert_close(grad.full_tensor(), b.grad)


@on_ranks(4)
@pytest.mark.parametrize("classes", [9, 1])
def test_rows_sharded_over_another_axis(classes: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    x = torch.randn(5, 3, FEATURES, dtype=torch.double, requires_grad=True)  # 3 and 2 samples
    w = torch.randn(classes, FEATURES, dtype=torch.double, requires_grad=True)
    target = torch.randint(classes, (5, 3))
    target[0, 0] = -100
    expected = reference(x, w, None, target, {})
    expected.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    layouts: list[list[Placement]] = [
        [Shard(0), Replicate()],
        [Shard(0), Shard(1)],
        [Shard(1), Shard(1)],
        [Shard(0), Shard(2)],
    ]
    # a sequence, or features, sharded over the ranks of the classes are gathered
    for placements in layouts:
        ours, head = leaf(x, mesh, placements), leaf(w, mesh, [Replicate(), Shard(0)])
        loss = losses.linear_cross_entropy(ours, head, target)
        torch.testing.assert_close(loss, expected)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        grads: list[Any] = [ours.grad, head.grad]
        for grad, expected_grad in zip(grads, (x.grad, w.grad), strict=True):
            torch.testing.assert_close(grad.full_tensor(), expected_grad)


@on_ranks(2)
def test_half_precision_and_autocast() -> None:
    mesh = all_ranks()
    x, w = torch.randn(40, 16), torch.randn(50, 16)
    target = torch.randint(50, (40,))
    expected = functional.cross_entropy(functional.linear(x, w), target)
    half = losses.linear_cross_entropy(x.bfloat16(), leaf(w, mesh, [Shard(0)]).bfloat16(), target)
    assert half.dtype is torch.float32
    torch.testing.assert_close(half, expected, rtol=2e-2, atol=2e-2)
    head = leaf(w, mesh, [Shard(0)])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = losses.linear_cross_entropy(x, head, target)
    torch.testing.assert_close(mixed, half)
    mixed.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert head.grad is not None and head.grad.dtype is torch.float32


@on_ranks(2)
def test_padded_classes_enter_no_sum() -> None:
    mesh = all_ranks()
    x, w = torch.randn(4, 3, dtype=torch.double), torch.randn(6, 3, dtype=torch.double)
    target = torch.randint(5, (4,))
    head = leaf(w, mesh, [Shard(0)])
    vocab = Vocab(mesh.comm(0), (3, 3), real=5)
    found = losses.linear_cross_entropy(x, head, target, vocab=vocab)
    torch.testing.assert_close(found, functional.cross_entropy(x @ w[:5].t(), target))


@on_ranks(2)
def test_logits_exist_for_a_block_of_rows_only() -> None:
    mesh = all_ranks()
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(item.numel() for item in tree_leaves(out) if isinstance(item, Tensor))
            return out

    x = torch.randn(64, 4, requires_grad=True)
    head = leaf(torch.randn(100, 4), mesh, [Shard(0)])
    with Sizes():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss = losses.linear_cross_entropy(x, head, torch.randint(100, (64,)), block_rows=8)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    assert max(sizes) == 8 * 50  # of 64 x 50 local logits


@on_ranks(2)
def test_what_does_not_fit_is_refused() -> None:
    mesh = all_ranks()
    x, w, target = torch.randn(4, 3), torch.randn(6, 3), torch.randint(6, (4,))
    head = leaf(w, mesh, [Shard(0)])
    with pytest.raises(LayoutError, match="plain logits need vocab"):
        losses.linear_cross_entropy(x, w, target)
    with pytest.raises(LayoutError, match="exactly one mesh axis"):
        losses.linear_cross_entropy(x, leaf(w, mesh, [Replicate()]), target)
    with pytest.raises(LayoutError, match="class indices"):
        losses.linear_cross_entropy(x, head, torch.rand(4, 6))
    with pytest.raises(LayoutError, match="class indices"):
        losses.linear_cross_entropy(x, head, torch.rand(4))
    assert isinstance(nn.Parameter(head), DTensor)
    for wrong in (6, -1):
        with pytest.raises(IndexError, match=f"target {wrong} is out of bounds: targets must be 0"):
            losses.linear_cross_entropy(
                x, head, target.index_fill(0, target[:1] * 0, wrong), z_loss=0.1
            )
