"""Covers: row_attention.py: attention that does not depend on the chunks of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from llama_of_blocks import GATHERED_PLAN, build_llama, needs_transformers
from shoal_context_parallel import UnsupportedAttentionError
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world, on_ranks
from shoal_same_bits import invariant_arithmetic
from shoal_same_bits.row_attention import KEYS, attention_in_rows
from shoal_tp_styles import StyleError, parallelize_module

QUERIES, LENGTH = 2 * KEYS + 7, 2 * KEYS + 9


def drawn(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.double, generator=torch.Generator().manual_seed(sum(shape))
    )


MASK = drawn(3, 1, QUERIES, LENGTH) > -1
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "bool": {"attn_mask": MASK},
    "float": {"attn_mask": drawn(QUERIES, LENGTH)},
    "of heads": {"attn_mask": drawn(3, 4, QUERIES, LENGTH)},
    "of heads, the same for all samples": {"attn_mask": drawn(4, QUERIES, LENGTH)},
    "grouped heads": {"enable_gqa": True, "is_causal": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [16, 200])
def test_values_and_gradients_are_those_of_torch(case: str, rows: int) -> None:
    heads = 2 if case == "grouped heads" else 4
    tensors = [drawn(3, 4, QUERIES, 5), drawn(3, heads, LENGTH, 5), drawn(3, heads, LENGTH, 6)]
    found = []
    attends: list[Callable[..., Tensor]] = [
        F.scaled_dot_product_attention,
        partial(attention_in_rows, rows),
    ]
    for attend in attends:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = attend(*leaves, **CASES[case])
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(found[1], found[0])


def test_tensors_of_three_dims_and_empty_ones() -> None:
    q, k = drawn(3, 5, 4), drawn(3, 7, 4)
    torch.testing.assert_close(
        attention_in_rows(2, q, k, k), F.scaled_dot_product_attention(q, k, k)
    )
    assert attention_in_rows(2, q[:, :0], k, k).shape == (3, 0, 4)
    assert not attention_in_rows(2, q, k, k, torch.zeros(5, 7, dtype=torch.bool)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_neighbours_change_no_bit(dtype: torch.dtype) -> None:
    q, k, v = (drawn(3, 4, LENGTH, 32).to(dtype) for _ in range(3))
    whole, seen = (
        attention_in_rows(16, q, k, v, is_causal=True),
        torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    )
    start = 0
    for size in (1, 40, 1, LENGTH - 42):
        end = start + size
        part = attention_in_rows(
            16, q[1:2, :, start:end], k[1:2, :, :end], v[1:2, :, :end], seen[start:end, :end]
        )
        assert torch.equal(part, whole[1:2, :, start:end])
        start = end


def test_what_has_no_such_form_is_refused() -> None:
    x = torch.ones(1, 2, 3, 4)
    with (
        invariant_arithmetic(rows=4),
        pytest.raises(UnsupportedAttentionError, match=r"dropout_p=0\.5"),
    ):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    with pytest.raises(StyleError, match="at least 1; got 0"), invariant_arithmetic(rows=0):
        pass
    with (
        invariant_arithmetic(rows=4),
        pytest.raises(StyleError, match="inside"),
        invariant_arithmetic(),
    ):
        pass


def prefilled(model: Any, prompts: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Logits of all tokens, of which so many enter at a time."""
    from transformers import DynamicCache

    cache = DynamicCache()
    chunks = torch.split(prompts, [*sizes], 1)
    return torch.cat(
        [model(chunk, past_key_values=cache, use_cache=True).logits for chunk in chunks], 1
    )


@needs_transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(4, timeout=200)
def test_a_prompt_in_chunks_has_the_same_logits_on_any_mesh(dtype: torch.dtype) -> None:
    prompts = torch.randint(3, 64, (2, 70), generator=torch.Generator().manual_seed(1))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("copies", "tensor"))["tensor"]
    found = []
    for mesh in (alone, init_device_mesh("cpu", (4,))):
        with invariant_arithmetic(rows=16), torch.no_grad():
            model = parallelize_module(build_llama(dtype), mesh, GATHERED_PLAN)
            found += [
                prefilled(model, prompts, chunks)
                for chunks in ((70,), (16,) * 4 + (6,), (33, 36, 1))
            ]
            found.append(
                torch.cat(
                    [
                        prefilled(model, prompts[:1], (70,)),
                        prefilled(model, prompts[1:], (61, *(1,) * 9)),
                    ]
                )
            )
    assert all(torch.equal(each, found[0]) for each in found)


@on_ranks(2)
def test_training_with_rows_has_the_ordinary_numbers() -> None:
    found = []
    for rows in (None, 3):
        with invariant_arithmetic(rows=rows):
            torch.manual_seed(0)
            single: Any = torch.nn.Sequential(
                torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8)
            ).double()
            module = parallelize_module(
                single, init_device_mesh("cpu", (2,)), {"0": "colwise", "2": "rowwise"}
            )
            x = drawn(2, 7, 8).requires_grad_()
            out = module(x)
            out.square().sum().backward()
            found.append(
                [out.detach(), x.grad, *(param.grad.to_local() for param in module.parameters())]
            )
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_that_backward_runs_again_is_in_rows_too(reentrant: bool, inside: bool) -> None:
    tensors, found = [drawn(3, 4, QUERIES, 5), drawn(3, 4, LENGTH, 5), drawn(3, 4, LENGTH, 6)], []
    attend: Any = F.scaled_dot_product_attention
    for again in (False, True):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with fake_world(1), invariant_arithmetic(rows=16):
            out: Any = (
                checkpoint(attend, *leaves, use_reentrant=reentrant) if again else attend(*leaves)
            )
            if inside:
                out.square().sum().backward()
        if not inside:
            out.square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *found))


def test_other_functions_pass() -> None:
    with fake_world(1), invariant_arithmetic(rows=2):
        assert torch.equal(F.relu(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
