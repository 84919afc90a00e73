"""Models of Hugging Face with random weights, parallel by their own `tp_plan`s.

Covers: planning/auto.py.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hf_models import SIZES, naming, tensor_axis
from shoal_dtensor import DTensor, full_tensor
from shoal_mesh import abstract_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import auto_plan
from shoal_tp_styles import SequenceParallel, parallelize_module, verify
from shoal_tp_styles.plan.style_names import REFUSED, STYLE_NAMES, WITH_CONTEXT

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)

# Family -> what its configuration needs beyond the sizes; the norms of Qwen3's heads, Phi-3's fused
# and gathered projections and OLMo 2's gathered ones each take other names of the plans.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 4},
    "Phi3": {},
    "Olmo2": {},
}


def build(family: str, **changes: Any) -> Any:
    """A causal language model of a family, in float64."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **changes})
    return getattr(transformers, f"{family}ForCausalLM")(config).double().eval()


def assert_same(module: Any, single: Any) -> None:
    """Logits, tokens written one after the other, loss and gradients are those of one process."""
    tokens = torch.randint(3, 67, (2, 7))
    torch.testing.assert_close(module(tokens).logits, single(tokens).logits)
    for cache in (True, False):
        how = {"max_new_tokens": 8, "do_sample": False, "use_cache": cache}
        written = [
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
            for model in (module, single)
        ]
        assert torch.equal(*written)
    for model in (module, single):
        model(tokens, labels=tokens).loss.backward()
    expected = dict(single.named_parameters())
    for name, param in module.named_parameters():
        grad = full_tensor(param.grad)
        torch.testing.assert_close(grad, expected[name].grad, msg=naming(name))


@on_ranks(4, timeout=200)
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_by_its_own_plan(family: str, ways: int) -> None:
    single = build(family)
    module = copy.deepcopy(single)
    parallelize_module(module, tensor_axis(ways), dict(single.tp_plan), on_unmatched="error")
    assert isinstance(module.lm_head.weight, DTensor)
    assert_same(module, single)


@on_ranks(4, timeout=200)
def test_tied_embeddings_stay_tied() -> None:
    single = build("Llama", tie_word_embeddings=True)
    # the library itself adds an entry for the embedding
    plan = dict(single.tp_plan)
    without = {key: name for key, name in plan.items() if "embed" not in key}
    for given in (plan, without):
        single.zero_grad()
        module = copy.deepcopy(single)
        parallelize_module(module, tensor_axis(4), given)
        assert module.lm_head.weight is module.model.embed_tokens.weight
        assert_same(module, single)


def test_a_plan_is_verified_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build("Llama")
    found = verify(model, dict(model.tp_plan), abstract_mesh((4,), ("tp",)))
    assert found.ok and not found.empty
    assert any(
        line.startswith("lm_head.weight: dim 0 of 67 in shards of [17, 17, 17, 16]")
        for line in found.uneven
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_models_own_plan_is_proven_without_ranks(family: str) -> None:
    model, tokens = build(family), torch.randint(3, 67, (2, 5))
    verdict = verify(model, dict(model.tp_plan), abstract_mesh((4,)), input_ids=tokens)
    assert verdict.proven, verdict


def test_an_automatic_plan_starts_from_the_models_own() -> None:
    plan = auto_plan(build("Qwen3"), abstract_mesh((4,)), input_ids=torch.randint(3, 67, (2, 5)))
    assert plan["model.layers.*.self_attn.q_norm"] == SequenceParallel(use_local_output=True)
    assert not plan.dropped and not plan.whole


def test_every_name_of_the_library_is_known_or_refused_with_a_reason() -> None:
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    assert set(ALL_PARALLEL_STYLES) <= STYLE_NAMES.keys() | REFUSED.keys() | WITH_CONTEXT
