"""Covers: rules/all_rules.py: every row of every overload, by `testing/validate.py`.

Calls are recorded from torch's operator database, derived from those of other overloads, or listed
here.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from derived_calls import derived, seeded
from operator_calls import Call, Calls, recorded
from shoal_dtensor.internal import pytree
from shoal_dtensor.rules import Table, all_rules
from shoal_dtensor.testing import validate

# What an operator warns of is torch's affair; as an error it would read here as a call that the
# operator refuses.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

aten = torch.ops.aten
FAMILIES: dict[str, Table] = {
    n: t for n, t in vars(all_rules).items() if isinstance(t, dict) and n.isupper() and n != "TABLE"
}
UNDEFINED = ("empty_like", "new_empty", "new_empty_strided")


def real(*shape: int) -> Tensor:
    return (
        torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
        * 0.8
        + 0.1
    )


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


A, B = real(4, 3), real(3, 5)
LISTS = [real(3, 2), real(4, 1)]
STEPS = [torch.tensor(1.0)] * 2
ADAM = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.1,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}
SGD = {
    "weight_decay": 0.1,
    "momentum": 0.9,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
RATE = torch.tensor(0.1)
BAGS = (real(7, 4), numbers(7, 6), torch.tensor([0, 2, 5]))


def _bag_gradient() -> tuple[Tensor, ...]:
    """Gradient, indices, bag of each, size of each bag, and no maxima."""
    bags = torch.tensor([0, 0, 1, 1, 1, 2])
    return real(3, 4), BAGS[1], bags, bags.bincount(), torch.empty(0, dtype=torch.int64)


def _optimizers() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    sgd = SGD | {"is_first_step": False}
    for form in ("", "_"):
        for name in ("_fused_adam", "_fused_adamw"):
            yield f"{name}{form}.default", (LISTS, LISTS, LISTS, LISTS, [], STEPS), ADAM
            yield (
                f"{name}{form}.tensor_lr",
                (LISTS, LISTS, LISTS, LISTS, [], STEPS),
                ADAM | {"lr": RATE},
            )
        yield f"_fused_sgd{form}.default", (LISTS, LISTS, LISTS), sgd
        yield f"_fused_sgd{form}.tensor_lr", (LISTS, LISTS, LISTS), sgd | {"lr": RATE}
        yield f"_fused_adagrad{form}.default", (LISTS, LISTS, LISTS, STEPS), ADAGRAD
        yield (
            f"_fused_adagrad{form}.tensor_lr",
            (LISTS, LISTS, LISTS, STEPS),
            ADAGRAD | {"lr": RATE},
        )
        unscaled = [torch.tensor([1.0, 2.0, float("inf")]), torch.ones(4)]
        yield (
            f"_amp_foreach_non_finite_check_and_unscale{form}.default",
            (unscaled, torch.zeros(1), torch.ones(1)),
            {},
        )


def _resampled() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for n in (1, 2, 3):
        x, size = real(3, 4, *(5,) * n), [7] * n
        yield f"upsample_nearest{n}d.vec", (x, size, None), {}
        yield f"_upsample_nearest_exact{n}d.vec", (x, size, None), {}
        linear = {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}[n]
        yield f"upsample_{linear}.vec", (x, size, False, None), {}
    x = real(3, 4, 5, 5)
    yield "upsample_nearest2d.vec_out", (x, [7, 7], None), {"out": real(3, 4, 7, 7)}
    yield "upsample_bilinear2d.vec_out", (x, [7, 7], False, None), {"out": real(3, 4, 7, 7)}
    yield "upsample_bicubic2d.vec", (x, [7, 7], False, None), {}
    for kind in ("bilinear", "bicubic", "lanczos"):
        yield f"_upsample_{kind}2d_aa.default", (x, [7, 7], False), {}
        yield f"_upsample_{kind}2d_aa.out", (x, [7, 7], False), {"out": real(3, 4, 7, 7)}
        yield f"_upsample_{kind}2d_aa.vec", (x, [7, 7], False, None), {}
    back = (real(3, 4, 7, 7), [7, 7], [3, 4, 5, 5], False)
    for kind in ("bicubic", "lanczos"):
        yield f"_upsample_{kind}2d_aa_backward.default", back, {}
        yield f"_upsample_{kind}2d_aa_backward.grad_input", back, {"grad_input": x}


# Calls that nothing leads to: (overload, arguments, keyword arguments).
LISTED: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    *_optimizers(),
    *_resampled(),
    (
        "_batch_norm_no_update.default",
        (real(4, 3, 5), real(3), real(3), real(3), real(3), 0.1, 1e-5),
        {},
    ),
    ("reflection_pad3d.default", (real(3, 4, 5, 5, 5), [1, 2, 1, 0, 2, 1]), {}),
    ("replication_pad3d.default", (real(3, 4, 5, 5, 5), [1, 2, 1, 0, 2, 1]), {}),
    (
        "reflection_pad3d_backward.default",
        (real(3, 4, 8, 6, 8), real(3, 4, 5, 5, 5), [1, 2, 1, 0, 2, 1]),
        {},
    ),
    (
        "replication_pad3d_backward.default",
        (real(3, 4, 8, 6, 8), real(3, 4, 5, 5, 5), [1, 2, 1, 0, 2, 1]),
        {},
    ),
    ("clip.Tensor", (real(5, 3), real(3) / 2), {}),
    ("clip_.Tensor", (real(5, 3), real(3) / 2), {}),
    ("clip.Tensor_out", (real(5, 3), real(3) / 2), {"out": real(5, 3)}),
    ("_foreach_addcdiv.Tensor", (LISTS, LISTS, LISTS, torch.tensor([2.0, 3.0])), {}),
    ("_foreach_addcdiv_.Tensor", (LISTS, LISTS, LISTS, torch.tensor([2.0, 3.0])), {}),
    ("_foreach_addcmul.Tensor", (LISTS, LISTS, LISTS, torch.tensor([2.0, 3.0])), {}),
    ("_foreach_addcmul_.Tensor", (LISTS, LISTS, LISTS, torch.tensor([2.0, 3.0])), {}),
    ("_embedding_bag_forward_only.default", (*BAGS, False, 0), {}),
    ("_embedding_bag_forward_only.default", (*BAGS, False, 1), {}),
    ("avg_pool1d.default", (real(3, 4, 9), [3], [2], [1]), {}),
    ("adaptive_avg_pool1d.out", (real(3, 4, 9), [3]), {"out": torch.empty(3, 4, 3).double()}),
    ("native_channel_shuffle.default", (real(3, 6, 5), 3), {}),
    ("_unsafe_index.Tensor", (real(5, 4), [None, numbers(4, 3)]), {}),
    ("_index_put_impl_.default", (real(5, 4), [torch.tensor([0, 3, 1])], real(3, 4)), {}),
    ("_unsafe_index_put.default", (real(5, 4), [torch.tensor([0, 3, 0])], real(3, 4), True), {}),
    ("_linalg_eigvals.default", (real(3, 4, 4),), {}),
    ("random.from", (real(5, 3), 2, 9), {}),
    ("random_.from", (real(5, 3), 2, 9), {}),
    ("random.from_out", (real(5, 3), 2, 9), {"out": real(5, 3)}),
    ("unsafe_split_with_sizes.default", (real(5, 6), [1, 5], 1), {}),
]


# --- operators without a kernel for CPU: their rules are held against what they compute -----------


def attention(op: Any) -> Any:
    """What a fused attention operator computes, from plain ones.

    The rest of its results is bookkeeping.
    """
    names, name, returned = (
        [a.name for a in op._schema.arguments],
        op._schema.name,
        len(op._schema.returns),
    )
    bookkeeping = (
        (RATE, RATE) if returned == 4 else (None, None, 5, 6, torch.zeros(2), torch.zeros(()), None)
    )

    def values(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, key, value = (given[n] for n in ("query", "key", "value"))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if given.get("attn_bias") is not None:
            scores = scores + given["attn_bias"]
        if given.get("is_causal"):
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        total = scores.logsumexp(-1)
        return scores.softmax(-1) @ value, total.unsqueeze(-1) if "cudnn" in name else total

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        wanted = ["query", "key", "value", *["attn_bias"] * (returned == 4)]
        if "backward" not in name:
            return *values(given), *bookkeeping
        with torch.enable_grad():
            given |= {n: given[n].detach().clone().requires_grad_() for n in wanted}
            out = values(given)[0]
        return torch.autograd.grad(out, [given[n] for n in wanted], args[0])

    return run


def _attention_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    q, k, v, bias = real(2, 3, 5, 4), real(2, 3, 6, 4), real(2, 3, 6, 4), real(2, 1, 5, 6)
    seeds, total = (RATE, RATE), real(2, 3, 5)
    for causal in (False, True):
        flag = {"is_causal": causal}
        yield "_scaled_dot_product_efficient_attention.default", (q, k, v, bias, True), flag
        yield "_scaled_dot_product_flash_attention.default", (q, k, v), flag
        yield "_scaled_dot_product_flash_attention.quantized", (q, k, v, None, None, None), flag
        yield "_scaled_dot_product_cudnn_attention.default", (q, k, v, None, True), flag
        yield "_scaled_dot_product_fused_attention_overrideable.default", (q, k, v, bias), flag
    mask = [True, True, True, True]
    full = real(2, 3, 5, 6)
    yield (
        "_scaled_dot_product_efficient_attention_backward.default",
        (q, q, k, v, full, q, total, *seeds, 0.0, mask),
        {},
    )
    lengths = (torch.zeros(0), torch.zeros(0), 5, 6)
    yield (
        "_scaled_dot_product_flash_attention_backward.default",
        (q, q, k, v, q, total, *lengths, 0.0, True, *seeds),
        {},
    )
    cudnn = (q, q, k, v, q, total.unsqueeze(-1), *seeds, bias, *lengths, 0.0, False)
    yield "_scaled_dot_product_cudnn_attention_backward.default", cudnn, {}
    other = (q, q, k, v, full, mask, q, total, *lengths, 0.0, False, *seeds)
    yield "_scaled_dot_product_fused_attention_overrideable_backward.default", other, {}


def _converting() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Products whose result has another dtype; 64ths, which partial sums in float32 leave exact."""
    wide = {"out_dtype": torch.float64}
    few = [
        t.mul(64).round().div(64).float()
        for t in (A, B, real(2, 4, 3), real(2, 3, 5), real(4, 5), real(2, 4, 5))
    ]
    calls = {
        "mm": few[:2],
        "bmm": few[2:4],
        "addmm": [few[4], *few[:2]],
        "baddbmm": [few[5], *few[2:4]],
    }
    for name, args in calls.items():
        made = real(2, 4, 5) if "bmm" in name else real(4, 5)
        yield f"{name}.dtype", tuple(args), wide
        yield f"{name}.dtype_out", tuple(args), wide | {"out": made}


def converting(op: Any) -> Any:
    plain = getattr(aten, op.__name__.split(".")[0])

    def run(*args: Any, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        made: Tensor = plain(*(t.to(out_dtype) for t in args))
        return made if out is None else out.copy_(made)

    return run


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor, mask: Any
) -> Any:
    normal, scaled = x * rstd, grad * weight
    return (scaled - normal * (scaled * normal).mean(-1, keepdim=True)) * rstd, (grad * normal).sum(
        0
    )


def masked_scale(x: Tensor, mask: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    made = x * mask * scale
    return made if out is None else out.copy_(made)


STAND_IN: dict[str, Callable[[Any], Any]] = {
    "_scaled_dot_product_efficient": attention,
    "_scaled_dot_product_flash_attention.": attention,
    "_scaled_dot_product_flash_attention_backward": attention,
    "_scaled_dot_product_cudnn": attention,
    "_scaled_dot_product_fused": attention,
    "mm.dtype": converting,
    "_masked_scale": lambda op: masked_scale,
    "_fused_rms_norm_backward": lambda op: rms_norm_backward,
}
LISTED += [
    *_attention_calls(),
    *_converting(),
    ("one_hot.default", (numbers(5, 6, 4), 5), {}),
    ("_masked_scale.default", (real(5, 3), real(5, 3), 2.0), {}),
    ("_masked_scale.out", (real(5, 3), real(5, 3), 2.0), {"out": real(5, 3)}),
    (
        "_fused_rms_norm_backward.default",
        (real(4, 5), real(4, 5), [5], real(4, 1), real(5), [True, True]),
        {},
    ),
    ("_euclidean_dist.default", (real(4, 3), real(5, 3)), {}),
    ("slice_scatter.default", (real(4, 6), real(4, 2), 1, 1, 5, 2), {}),
    ("ger.default", (real(4), real(5)), {}),
    ("outer.default", (real(4), real(5)), {}),
    ("kron.default", (A, B), {}),
    ("kron.default", (real(4), B), {}),
    ("matmul.default", (real(2, 4, 3), B), {}),
    ("matmul.default", (A, real(3)), {}),
    ("linear.default", (real(2, 4, 3), real(5, 3), real(5)), {}),
    ("linear.default", (real(2, 4, 3), real(5, 3)), {}),
    ("_fused_rms_norm.default", (real(4, 5), [5], real(5), 1e-5), {}),
    ("_foreach_norm.Scalar", (LISTS, 2.0), {}),
    ("_foreach_norm.Scalar", (LISTS, float("inf")), {}),
    ("all.dims", (real(5, 4) > 0.2, [0]), {}),
    ("count_nonzero.dim_IntList", (numbers(2, 5, 4), [0]), {}),
    ("special_logsumexp.default", (real(4, 5), [1]), {}),
    ("_unique.default", (numbers(5, 9), True, False), {}),
    ("_unique2.default", (numbers(5, 9), True, False, True), {}),
    (
        "linalg_ldl_solve.default",
        (real(3, 4, 4), torch.arange(1, 5).int().expand(3, 4), real(3, 4, 2)),
        {},
    ),
    (
        "linalg_lu_solve.default",
        (real(3, 4, 4), torch.arange(1, 5).int().expand(3, 4), real(3, 4, 2)),
        {},
    ),
    ("_embedding_bag_dense_backward.default", (*_bag_gradient(), 7, False, 1, None), {}),
    ("_native_batch_norm_legit.no_stats", (real(4, 3, 5), real(3), real(3), True, 0.1, 1e-5), {}),
    (
        "_native_batch_norm_legit.no_stats_out",
        (real(4, 3, 5), real(3), real(3), True, 0.1, 1e-5),
        {"out": real(4, 3, 5), "save_mean": real(3), "save_invstd": real(3)},
    ),
    ("_reshape_alias.default", (real(4, 6, 5), [24, 5], [5, 1]), {}),
    ("bernoulli.Tensor", (real(5, 3), real(5, 3)), {}),
    ("bernoulli_.Tensor", (real(5, 3), real(5, 3)), {}),
    ("bernoulli.Tensor_out", (real(5, 3), real(5, 3)), {"out": real(5, 3)}),
    ("normal.float_Tensor", (1.0, real(5, 3)), {}),
    ("normal.Tensor_float_out", (real(5, 3), 1.0), {"out": real(5, 3)}),
    ("normal.float_Tensor_out", (1.0, real(5, 3)), {"out": real(5, 3)}),
    ("normal.Tensor_Tensor_out", (real(5, 3), real(5, 3)), {"out": real(5, 3)}),
    ("binary_cross_entropy.out", (real(5, 3), real(5, 3), None, 0), {"out": real(5, 3)}),
    ("equal.default", (real(5, 3), real(5, 3)), {}),
    ("all.default", (real(5, 3) > 0.2,), {}),
    ("pow.Scalar_out", (2.0, real(5, 3)), {"out": real(5, 3)}),
    ("copy_.Tensor", (numbers(9, 5, 3), real(5, 3) * 9), {}),
    ("copy_.Tensor", (real(5, 3), numbers(9, 5, 3)), {}),
    ("fill.Tensor", (numbers(9, 5, 3), torch.tensor(7.5)), {}),
    ("fill_.Tensor", (real(5, 3), torch.tensor(7)), {}),
    ("where.self", (real(5, 3) > 0.5, real(5, 3), numbers(9, 5, 3)), {}),
    ("masked_fill.Tensor", (real(5, 3), real(5, 3) > 0.5, torch.tensor(7)), {}),
    ("where.self", (real(5, 3) > 0.5, real(5, 3), real(5, 3).float()), {}),
]
SIXTEENTHS = [numbers(17, *shape).sub(8).div(16) for shape in ((6, 32), (16, 32), (16,))]
FLOAT8 = [SIXTEENTHS[0].to(torch.float8_e4m3fn), SIXTEENTHS[1].to(torch.float8_e4m3fn).t()]
SCALES = (torch.tensor(2.0), torch.tensor(0.5))
SCALES_OF_ROWS = (2.0 ** numbers(3, 6, 1), 2.0 ** numbers(3, 1, 16))
WIDE = {"out_dtype": torch.float32}
ENDS = torch.tensor([4, 4, 8], dtype=torch.int32)
GROUPS = [
    numbers(17, *shape).sub(8).div(16) for shape in ((8, 12), (3, 12, 4), (12, 8), (3, 4, 12))
]
LISTED += [
    ("_scaled_mm.default", (*FLOAT8, *SCALES), WIDE),
    ("_scaled_mm.default", (*FLOAT8, *SCALES_OF_ROWS), WIDE),
    ("_scaled_mm.default", (*FLOAT8, *SCALES, SIXTEENTHS[2]), WIDE),
    ("_scaled_mm.default", (*FLOAT8, *SCALES), {}),
    ("_scaled_mm.out", (*FLOAT8, *SCALES), WIDE | {"out": torch.empty(6, 16)}),
    (
        "_scaled_mm_v2.default",
        (
            *FLOAT8,
            *([SCALES_OF_ROWS[0]], [1], [0]),
            *([SCALES_OF_ROWS[1]], [1], [0]),
            *(None, torch.float32),
        ),
        {},
    ),
    ("_grouped_mm.default", (GROUPS[0], GROUPS[1], ENDS), {}),
    ("_grouped_mm.default", (GROUPS[2], GROUPS[0], ENDS), {}),
    ("_grouped_mm.default", (GROUPS[3], GROUPS[2], ENDS), {}),
    ("_grouped_mm.default", (GROUPS[3], GROUPS[1]), {}),
    ("_foreach_mm.default", ([real(4, 3), real(5, 2)], [real(3, 6), real(2, 7)]), {}),
    ("_foreach_max.default", (LISTS,), {}),
    ("_foreach_powsum.Scalar", (LISTS, 3), {}),
    ("linalg__powsum.default", (real(4, 5), 3, [1]), {}),
    ("linalg__powsum.default", (real(4, 5), 2), {}),
    ("index_reduce.default", (real(5, 4), 0, torch.tensor([0, 3, 0]), real(3, 4), "prod"), {}),
    ("index_reduce_.default", (real(5, 4), 1, torch.tensor([0, 3, 0]), real(5, 3), "amax"), {}),
    ("index.Tensor_out", (real(5, 4), [None, numbers(4, 3)]), {"out": real(5, 3)}),
    (
        "_index_put_impl.out",
        (real(5, 4), [torch.tensor([0, 3, 1])], real(3, 4)),
        {"out": real(5, 4)},
    ),
    ("rrelu_with_noise.out", (real(5, 4), real(5, 4)), {"out": real(5, 4)}),
    ("rrelu_with_noise_functional.default", (real(5, 4), real(5, 4)), {}),
    (
        "_native_batch_norm_legit_no_training.out",
        (real(4, 3, 5), real(3), real(3), real(3), real(3), 0.1, 1e-5),
        {"out0": real(4, 3, 5), "out1": real(0), "out2": real(0)},
    ),
]
# torch's own kernels: one is wrong where it reduces into a result of no dims, one ends the process
# when not training.
ONLY_LISTED = (
    "binary_cross_entropy.out",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit.no_stats_out",
)
# Overloads whose rules have no row, with the reason.
WHOLE = {
    "neighbours or whole slices are compared; the result's length depends on data": (
        "unique_dim.default unique_consecutive.default repeat_interleave.Tensor "
        "nonzero_static.default"
    ),
    "every element's place in the result depends on those before it": (
        "masked_scatter_backward.default"
    ),
    "how much of the generator is used up depends on the values drawn": (
        "poisson.default poisson.out binomial.default binomial.out _standard_gamma.default "
        "_standard_gamma.out _sample_dirichlet.default _sample_dirichlet.out "
        "rrelu_with_noise.default"
    ),
    "the bound is a tensor, and the law of the draw needs its value": (
        "randint_like.Tensor randint_like.Tensor_generator randint_like.Tensor_out "
        "randint_like.Tensor_generator_out"
    ),
    "one element of the whole sorted tensor": (
        "median.default median.out nanmedian.default nanmedian.out"
    ),
    "results that the driver leaves out have no batch": "linalg_lstsq.default linalg_lstsq.out",
    "no DTensor has a sparse layout": (
        "_to_sparse.sparse_dim _to_sparse.default _to_sparse.sparse_dim_out _to_sparse.out "
        "_to_sparse_csr.default _to_sparse_csr.out _to_sparse_csc.default _to_sparse_csc.out "
        "_to_sparse_bsr.default _to_sparse_bsr.out _to_sparse_bsc.default _to_sparse_bsc.out "
        "_sparse_coo_tensor_with_dims_and_tensors.default "
        "_sparse_coo_tensor_with_dims_and_tensors.out"
    ),
    "its tensor has one element": "_local_scalar_dense.default",
    "it reads the results of all matrices, so that all ranks raise alike": (
        "_linalg_check_errors.default"
    ),
}


@cache
def known() -> Calls:
    """Calls of every overload for which some are listed here or recorded.

    Listed ones come first, then large ones.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = recorded(all_rules.TABLE, samples=3, per_op=6)
    for calls in found.values():
        calls.sort(key=lambda call: -sum(n > 1 for t in tensors_of(call) for n in t.shape))
    for name, args, kwargs in reversed(LISTED):
        packet, overload = name.split(".")
        if not hasattr(aten, packet):  # torch 2.11 has no lanczos
            continue
        op = getattr(getattr(aten, packet), overload)
        found[op] = [Call(op, args, kwargs), *([] if name in ONLY_LISTED else found.get(op, []))]
    return found


def tensors_of(call: Call) -> list[Tensor]:
    return [t for t in pytree.tree_leaves((call.args, dict(call.kwargs))) if isinstance(t, Tensor)]


def calls_of(op: Any, count: int) -> list[Call]:
    """Up to `count` calls of an overload."""
    if op in known():
        return [call for call in known()[op][:count] if not call.resizes()]  # which DTensors refuse
    elementwise = not all_rules.TABLE[op].by_value or torch.Tag.nondeterministic_seeded in op.tags
    return derived(op, known(), count, made_up=elementwise)


def name_of(op: Any) -> str:
    return str(op).removeprefix("aten.")


def check(op: Any, count: int, enough: int, **options: Any) -> tuple[int, list[str]]:
    """How many cases of up to `enough` calls with rows ran, and what was wrong.

    A call that declares traffic for nothing is wrong too.
    """
    checked, wrong, name = 0, [], name_of(op)
    kernel = next((make(op) for part, make in STAND_IN.items() if part in name), None)
    for call in calls_of(op, count):
        call = seeded(call)
        exact = name.split(".")[0] not in UNDEFINED
        report = validate(op, *call.args, exact=exact, kernel=kernel, **options, **call.kwargs)
        checked += report.checked
        wrong += report.wrong + report.idle
        enough -= bool(report.checked)
        if not enough:
            break
    return checked, wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_every_overload_is_right_on_three_ranks(family: str) -> None:
    unchecked, wrong = [], []
    for op in FAMILIES[family]:
        checked, found = check(op, count=6, enough=1, ways=(3,), pairs=False)
        wrong += found[:1]
        if not checked:
            unchecked.append(name_of(op))
    assert not wrong, "\n".join(wrong)
    whole = " ".join(WHOLE.values()).split()
    assert unchecked == [name_of(op) for op in FAMILIES[family] if name_of(op) in whole]


SAMPLE = random.Random(13).sample(sorted(all_rules.TABLE, key=str), 48)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_overloads_is_right_on_two_axes(part: int) -> None:
    """Pairs of rows on 2 x 2 ranks; all overloads are tried in the slow session."""
    wrong = [
        line
        for op in SAMPLE[part::4]
        for line in check(op, count=2, enough=1, ways=(), pairs=True)[1][:1]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_overload_is_right_for_more_calls_ranks_and_axes(family: str) -> None:
    wrong = [line for op in FAMILIES[family] for line in check(op, count=6, enough=6)[1][:2]]
    assert not wrong, "\n".join(wrong)
