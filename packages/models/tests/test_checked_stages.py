"""The proof that stages compute what the model computes.

Covers: hf/checked_stages.py, stages/model_parts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_models import build_model, needs_hf
from shoal_dtensor.errors import TiedWeightError, UnsupportedModuleError
from shoal_models.hf.checked_stages import check_stages
from shoal_models.hf.small_copy import NoSmallCopy
from shoal_models.stages.absent_modules import AbsentLayer, AbsentModule
from shoal_models.stages.model_parts import ModelParts, check_ties, parts_of, tied_weights
from shoal_tp_styles import PlanError

pytestmark = needs_hf


@pytest.mark.parametrize(
    "family",
    # a list of layers, embeddings with a dropout, windows of attention, states in place of keys
    ["Llama", "GPTNeoX", "Gemma2", "Qwen3Next"],
)
def test_stages_of_families_are_proven(family: str) -> None:
    model = build_model(family, num_hidden_layers=4)
    parts = parts_of(model, 2)
    check_ties(model, parts, 2)
    check_stages(model, 2)


def llama(**methods: Any) -> Any:
    """A Llama of a class with other methods."""
    single = build_model()
    changed: Any = type("Changed", (type(single),), methods)
    return changed._from_config(single.config)


def test_outputs_that_need_modules_of_several_stages_are_refused() -> None:
    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        outputs = super(type(self), self).forward(input_ids=input_ids, **kwargs)
        outputs.logits = outputs.logits + self.model.embed_tokens(input_ids).sum()
        return outputs

    with pytest.raises(PlanError, match="do not compute what the model computes: its logits"):
        check_stages(llama(forward=forward), 2)


def test_gradients_that_stages_lose_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden: Any, **kwargs: Any) -> Any:
        self.send(hidden.detach())
        return hidden

    monkeypatch.setattr("shoal_models.stages.absent_modules.SendingLayer.forward", forward)
    with pytest.raises(PlanError, match=r"the gradient of 'model\.embed_tokens\.weight' differs"):
        check_stages(build_model(), 2)


def test_caches_that_stages_do_not_extend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AbsentLayer, "_extend_cache", lambda *_: None)
    with pytest.raises(PlanError, match="do not compute what the model computes"):
        check_stages(build_model(), 2)


def test_a_model_without_a_small_copy_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_copy(*_: Any, **__: Any) -> NoSmallCopy:
        return NoSmallCopy("it is too strange")

    monkeypatch.setattr("shoal_models.hf.checked_stages.small_copy", no_copy)
    with pytest.warns(UserWarning, match="could not be proven: it is too strange"):
        check_stages(build_model(), 2)


def test_layers_are_divided_as_in_transformers() -> None:
    parts = parts_of(build_model("GPTNeoX", num_hidden_layers=5), 3)
    assert parts == ModelParts(
        before=("gpt_neox.embed_in", "gpt_neox.emb_dropout"),
        layers="gpt_neox.layers",
        after=("gpt_neox.final_layer_norm", "lm_head"),
        count=5,
    )
    assert [*map(len, (parts.layers_of(stage, 3) for stage in range(3)))] == [2, 2, 1]


def test_shared_weights() -> None:
    tied = build_model(num_hidden_layers=4, tie_word_embeddings=True)
    parts = parts_of(tied, 2)
    assert tied_weights(tied, parts) == [tied.lm_head.weight]
    assert tied_weights(build_model(), parts) == []
    check_ties(tied, parts, 2)
    layers = tied.model.layers
    layers[1].mlp = layers[0].mlp
    # on the same stage
    check_ties(tied, parts, 2)
    layers[2].mlp = layers[0].mlp
    with pytest.raises(TiedWeightError, match=r"several stages share 'model\.layers\.0\.mlp"):
        check_ties(tied, parts, 2)


def test_parameters_of_no_part_are_refused() -> None:
    model = build_model()
    model.model.scale = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"the parameters \['model\.scale\.weight'"):
        parts_of(model, 2)
    model.pp_plan = {}
    with pytest.raises(PlanError, match=r"with the pp_plan \[\]"):
        parts_of(model, 2)


def test_a_replaced_module_has_no_values_and_follows_the_dtype_of_the_model() -> None:
    embedding = AbsentModule(nn.Embedding(9, 4), {})
    tokens = torch.ones(2, 3, dtype=torch.long)
    assert [*embedding.parameters()] == []
    assert embedding.double()(tokens).dtype == torch.float64
    assert embedding(tokens).shape == (2, 3, 4)
    hidden = torch.ones(2, 3, 4)
    assert AbsentModule(nn.LayerNorm(4), {})(hidden) is hidden
    assert AbsentLayer(nn.Linear(4, 4), 3)(hidden_states=hidden) is hidden
    assert "Linear of another stage" in repr(AbsentLayer(nn.Linear(4, 4), 3))
    with pytest.raises(UnsupportedModuleError, match="got tuple"):
        AbsentLayer(nn.Linear(4, 4), 3)((hidden,))
