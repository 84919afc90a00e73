"""Every mechanism that is broken is found, and the operator named.

Covers: invariant/self_check.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal_dtensor.optim import clip_grad
from shoal_mesh import init_device_mesh
from shoal_mesh.collectives import even
from shoal_mesh.testing import fake_world, on_ranks
from shoal_same_bits import VariantArithmeticError, check_arithmetic, invariant_arithmetic
from shoal_same_bits.invariant import blocks, norms_and_embeddings, self_check
from shoal_same_bits.invariant.blocks import Measured
from shoal_tp_styles import ColwiseParallel, parallelize_module


def in_order(count: int, term: Callable[[int], Tensor]) -> Tensor:
    return sum((term(i) for i in range(1, count)), term(0))


def products_in_order(terms: Any, *, fused: bool) -> Tensor:
    return in_order(len(terms), lambda i: in_order(len(terms[i]), lambda j: torch.mm(*terms[i][j])))


def sensitive(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel whose last digits depend on the size of what it is given."""

    @wraps(function)
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        size = next(arg.numel() for arg in args if isinstance(arg, Tensor))
        return function(*args, **kwargs) * (1 + size * 2.0**-20)

    return kernel


def gradient_at_once(blocks: int, grad: Tensor, x: Tensor) -> Tensor:
    return grad.flatten(0, 1).t().mm(x.flatten(0, 1))


def sum_at_once(terms: Tensor) -> Tensor:
    return sum(terms[1:], terms[0])


def bias_at_once(blocks: int, grad: Tensor) -> Tensor:
    return sum_at_once(grad.flatten(0, 1))


SENSITIVE_SPREAD = Measured(sensitive(blocks._SPREAD[0].definition), ())
BROKEN: list[tuple[object, str, object, str]] = [
    (blocks, "tree_of_products", products_in_order, "linear, over its input features"),
    (blocks, "tree_of_products", products_in_order, "gradient of an input of several layers"),
    (blocks, "_SPREAD", (SENSITIVE_SPREAD, blocks._SPREAD[1]), "linear, over samples"),
    (
        blocks,
        "_WEIGHT_GRADIENT",
        (Measured(gradient_at_once, ()),) * 2,
        "gradient of a weight, over samples",
    ),
    (blocks, "_BIAS_GRADIENT", Measured(bias_at_once, ()), "gradient of a bias, over samples"),
    (norms_and_embeddings, "tree_sum", sum_at_once, "gradient of a norm, over tokens"),
    (norms_and_embeddings, "tree_of", in_order, "gradient of an embedding, over samples"),
    (self_check, "tree_sum", sum_at_once, "sum over classes"),
    (clip_grad, "sums_are_in_tree", lambda: False, "clip_grad_norm_"),
    (functional, "silu", sensitive(functional.silu), "silu"),
    (functional, "rms_norm", sensitive(functional.rms_norm), "rms_norm"),
    (
        functional,
        "scaled_dot_product_attention",
        sensitive(functional.scaled_dot_product_attention),
        "over heads",
    ),
]


def test_this_device_is_invariant() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (None, 16):
            with invariant_arithmetic(rows=rows):
                self_check.check_device("cpu", dtype, torch.get_num_threads(), rows)


@pytest.mark.parametrize(("owner", "name", "broken", "operator"), BROKEN)
def test_what_is_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object, operator: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with fake_world(1), pytest.raises(VariantArithmeticError, match=operator):
        check_arithmetic(init_device_mesh("cpu", (1,)))


at_once = sensitive(functional.scaled_dot_product_attention)
CUT: list[tuple[object, str, object, str]] = [
    (blocks, "_parts", blocks._samples, "linear, over chunks"),
    (
        self_check,
        "attention_in_rows",
        lambda rows, *args, **how: at_once(*args, **how),
        "attention, over chunks",
    ),
    (functional, "layer_norm", sensitive(functional.layer_norm), "layer_norm, over chunks"),
]


@pytest.mark.parametrize(("owner", "name", "broken", "operator"), CUT)
def test_what_depends_on_chunks_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, broken: object, operator: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    with (
        fake_world(1),
        invariant_arithmetic(rows=16),
        pytest.raises(VariantArithmeticError, match=operator),
    ):
        check_arithmetic(init_device_mesh("cpu", (1,)))


@on_ranks(4)
def test_collectives_of_another_order_are_named() -> None:
    collectives: Any = even
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    check_arithmetic(mesh, torch.bfloat16)
    before = collectives.in_tree
    collectives.in_tree = lambda tensor, op: False
    try:
        with pytest.raises(VariantArithmeticError, match="all_reduce of 64 elements along 'ranks'"):
            check_arithmetic(init_device_mesh("cpu", (4,), mesh_dim_names=("ranks",)))
    finally:
        collectives.in_tree = before


def test_the_first_module_in_the_mode_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    self_check.check_device.cache_clear()
    monkeypatch.setattr(functional, "gelu", sensitive(functional.gelu))
    with fake_world(2), invariant_arithmetic(), pytest.raises(VariantArithmeticError, match="gelu"):
        parallelize_module(nn.Linear(8, 8), init_device_mesh("cpu", (2,)), ColwiseParallel())
