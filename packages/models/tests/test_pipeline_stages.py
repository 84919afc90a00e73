"""Models whose layers are divided by `pp_size`.

Covers: hf/pipeline_stages.py, stages/stage.py, stages/links.py, stages/messages.py,
stages/absent_modules.py, stages/stage_norms.py, stages/tied_weights.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from configured_models import config
from hf_models import build_model, naming, needs_hf, save_plain, shared_directory, token_batch
from mixtures import EAGER, FAMILIES, mixture
from shoal_dtensor import clip_grad_norm_, full_tensor
from shoal_dtensor.errors import SecondOrderError
from shoal_mesh import CommDebugMode
from shoal_mesh.errors import PeerError, RankError
from shoal_mesh.testing import counts, on_ranks
from shoal_models import hf
from shoal_models.errors import StageError
from shoal_tp_styles import PlanError, UnsupportedModuleError

pytestmark = needs_hf

TWO_STAGES: dict[str, int] = {"pp_size": 2}
QWEN: dict[str, Any] = {"head_dim": 8, "tie_word_embeddings": True}
# by name: the family, changes of its configuration, and the sizes
TWO_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "uneven": ("Llama", {"num_hidden_layers": 3}, {"pp_size": 2}),
    "tied": ("Qwen3", QWEN, {"pp_size": 2}),
    "experts": ("Mixtral", {}, {"pp_size": 2}),
}
FOUR_RANKS: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "four stages": ("Llama", {"num_hidden_layers": 5}, {"pp_size": 4}),
    "four stages, tied": ("Qwen3", {"num_hidden_layers": 4, **QWEN}, {"pp_size": 4}),
    "tp": ("Llama", {"num_hidden_layers": 3}, {"pp_size": 2, "tp_size": 2}),
    "tp, tied": ("Qwen3", QWEN, {"pp_size": 2, "tp_size": 2}),
    "experts": ("Qwen3Moe", {}, {"pp_size": 2, "tp_size": 2, "ep_size": 2}),
}


def single_model(family: str, **changes: Any) -> Any:
    """The model of one process."""
    if family in FAMILIES:
        return mixture(family, **changes)
    return build_model(family, **changes)


def load(home: Path, family: str = "Llama", *, sizes: dict[str, int] = TWO_STAGES) -> Any:
    """The model of this rank's stage."""
    options = EAGER if family in FAMILIES else {}
    return hf.from_pretrained(home, config(**sizes), **options)


def assert_trains_alike(model: Any, single: Any) -> None:
    """Two steps of AdamW, of two microbatches, equal one process on the ranks of all stages."""
    tokens = token_batch(4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (single, model)]
    of_single = dict(single.named_parameters())
    for _ in range(2):
        for rows in tokens.chunk(2):
            expected = single(rows, labels=rows)
            got = model(rows, labels=rows)
            torch.testing.assert_close(got.logits, expected.logits)
            torch.testing.assert_close(got.loss, expected.loss)
            (expected.loss / 2).backward()
            (got.loss / 2).backward()
        for name, param in model.named_parameters():
            gradient = full_tensor(param.grad)
            torch.testing.assert_close(gradient, of_single[name].grad, msg=naming(name))
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.named_parameters():
        value = full_tensor(param).detach()
        torch.testing.assert_close(value, of_single[name].detach(), rtol=0, atol=1e-9)


def assert_saved_alike(model: Any, single: Any, home: Path, **options: Any) -> None:
    """A saved model is loaded by transformers, with the values of one process."""
    tokens = token_batch()
    saved = shared_directory(home) / "saved"
    model.save_pretrained(saved)
    again = type(single).from_pretrained(saved, dtype=torch.float64, **options)
    torch.testing.assert_close(again(tokens).logits, single(tokens).logits)


def check(case: tuple[str, dict[str, Any], dict[str, int]], tmp_path: Path) -> None:
    """Train and save the model of a case."""
    family, changes, sizes = case
    single = single_model(family, **changes)
    home = save_plain(single, tmp_path)
    model = load(home, family, sizes=sizes)
    assert_trains_alike(model, single)
    assert_saved_alike(model, single, tmp_path, **(EAGER if family in FAMILIES else {}))


@pytest.mark.parametrize("name", TWO_RANKS)
@on_ranks(2, timeout=200)
def test_two_stages_train_as_one_process(name: str, tmp_path: Path) -> None:
    check(TWO_RANKS[name], tmp_path)


@pytest.mark.parametrize("name", FOUR_RANKS)
@on_ranks(4, timeout=200)
def test_stages_on_four_ranks_train_as_one_process(name: str, tmp_path: Path) -> None:
    check(FOUR_RANKS[name], tmp_path)


@on_ranks(2, timeout=200)
def test_a_rank_reads_and_holds_its_stage_alone(tmp_path: Path) -> None:
    single = build_model(num_hidden_layers=3)
    home = save_plain(single, tmp_path)
    model, loaded = hf.from_pretrained(home, config(pp_size=2), output_loading_info=True)
    stage = dist.get_rank()
    own = [
        ("model.embed_tokens.", "model.layers.0.", "model.layers.1."),
        ("model.layers.2.", "model.norm.", "lm_head."),
    ][stage]
    expected = {n: p for n, p in single.named_parameters() if n.startswith(own)}
    assert dict(model.named_parameters()).keys() == expected.keys()
    assert loaded.bytes_read == sum(param.nbytes for param in expected.values())
    assert loaded.missing == loaded.unexpected == []


@pytest.mark.parametrize("sizes", [{"pp_size": 4}, {"pp_size": 2, "tp_size": 2}])
@on_ranks(4, timeout=200)
def test_all_ranks_generate_the_tokens_of_one_process(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    single = build_model(num_hidden_layers=4)
    home = save_plain(single, tmp_path)
    model = load(home, sizes=sizes)
    prompt = token_batch()
    padded = prompt.clone()
    padded[0, :3] = 0
    options: list[dict[str, Any]] = [
        {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
        {"input_ids": padded, "attention_mask": (padded != 0).long()},
        {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "num_beams": 3},
        {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": True},
        {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "use_cache": False},
        {
            "input_ids": prompt,
            "attention_mask": torch.ones_like(prompt),
            "cache_implementation": "static",
        },
    ]
    for option in options:
        how = {"do_sample": False, "max_new_tokens": 8, "disable_compile": True, **option}
        torch.manual_seed(3)
        expected = single.generate(**how)
        torch.manual_seed(3)
        assert torch.equal(model.generate(**how), expected), [*option]


@on_ranks(2, timeout=200)
def test_outputs_and_options_of_a_forward(tmp_path: Path) -> None:
    single = build_model(num_hidden_layers=3)
    home = save_plain(single, tmp_path)
    model = load(home)
    tokens = token_batch()
    expected = single(tokens, labels=tokens)
    # a tuple, with the loss first
    loss, logits, *_ = model(tokens, labels=tokens, return_dict=False)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)
    # the last position alone, without gradients
    with torch.no_grad():
        last = model(input_ids=tokens, logits_to_keep=1)
    assert last.loss is None
    assert not last.logits.requires_grad
    torch.testing.assert_close(last.logits, expected.logits[:, -1:])
    # hidden states that the caller has embedded
    embedded = single.model.embed_tokens(tokens).detach()
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, expected.logits)
    # a loss of the caller's, of the logits that all ranks have
    for each in (single, model):
        each(tokens).logits.square().mean().backward()
    assert_same_gradients(model, single)
    for option in ("output_hidden_states", "output_attentions", "output_router_logits"):
        with pytest.raises(UnsupportedModuleError, match=f"{option}=True: each stage"):
            model(tokens, **{option: True})
    with pytest.raises(UnsupportedModuleError, match="call the whole model"):
        model.model(tokens)
    with pytest.raises(UnsupportedModuleError, match="cannot be copied"):
        copy.deepcopy(model)
    with pytest.raises(UnsupportedModuleError, match="on different stages"):
        model.resize_token_embeddings(70)
    with pytest.raises(UnsupportedModuleError, match="sizes its cache"):
        model.init_continuous_batching()
    with pytest.raises(SecondOrderError, match="first order only"):
        model(tokens, labels=tokens).loss.backward(create_graph=True)


def assert_same_gradients(model: Any, single: Any) -> None:
    """Gradients are those of one process; they are deleted."""
    of_single = dict(single.named_parameters())
    for name, param in model.named_parameters():
        expected = of_single[name].grad
        if expected is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(full_tensor(param.grad), expected, msg=naming(name))
    model.zero_grad()
    single.zero_grad()


@on_ranks(2, timeout=200)
def test_backwards_in_any_order_and_with_recomputation(tmp_path: Path) -> None:
    single = build_model(num_hidden_layers=3)
    home = save_plain(single, tmp_path)
    model = load(home)
    rows = token_batch(4).chunk(2)
    for each in (single, model):
        losses = [each(part, labels=part).loss for part in rows]
        sum(losses, torch.zeros(())).backward()
    assert_same_gradients(model, single)
    for each in (single, model):
        first, second = (each(part, labels=part).loss for part in rows)
        first.backward()
        second.backward()
    assert_same_gradients(model, single)
    for each in (single, model):
        each.train()
        each.gradient_checkpointing_enable()
        each(rows[0], labels=rows[0]).loss.backward()
    assert_same_gradients(model, single)


@pytest.mark.parametrize(
    "trained", ["model.layers.2.", "model.layers.0.", "model.embed", "lm_head"]
)
@on_ranks(2, timeout=200)
def test_frozen_parameters_on_either_stage(trained: str, tmp_path: Path) -> None:
    single = build_model(num_hidden_layers=3)
    home = save_plain(single, tmp_path)
    model = load(home)
    tokens = token_batch()
    for each in (single, model):
        for name, param in each.named_parameters():
            param.requires_grad_(name.startswith(trained))
        each(tokens, labels=tokens).loss.backward()
    norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
    assert_same_gradients(model, single)


@on_ranks(2, timeout=200)
def test_messages_of_a_step(tmp_path: Path) -> None:
    home = save_plain(build_model(), tmp_path)
    model = load(home)
    tokens = token_batch()
    with CommDebugMode() as forward:
        loss = model(tokens, labels=tokens).loss
    with CommDebugMode() as backward:
        loss.backward()
    # descriptions and hidden states; a description, the loss and the logits
    assert counts(forward) == {"broadcast": 5}
    assert counts(backward) == {"broadcast": 1}


@on_ranks(4, timeout=200)
def test_an_error_of_one_stage_is_raised_on_all_ranks(tmp_path: Path) -> None:
    home = save_plain(build_model(num_hidden_layers=4), tmp_path)
    model = load(home, sizes={"pp_size": 4})
    tokens = token_batch()
    expected = model(tokens).logits

    def refuse(*_: Any) -> None:
        raise ValueError("no such rows")

    stage = dist.get_rank()
    for failing in range(4):
        layer = model.model.layers[failing]
        handle = layer.register_forward_pre_hook(refuse) if stage == failing else None
        kind = ValueError if stage == failing else StageError
        with pytest.raises(kind, match="no such rows") as caught:
            model(tokens, labels=tokens)
        if handle is None:
            assert isinstance(caught.value, PeerError)
            assert f"stage {failing} (rank {failing})" in str(caught.value)
        else:
            handle.remove()
    torch.testing.assert_close(model(tokens).logits, expected)


@on_ranks(2, timeout=200)
def fail_in_backward(home: Path) -> None:
    """Raise in the backward of the last stage; the first one waits for its gradient."""
    model = load(save_plain(build_model(), home))
    tokens = token_batch()
    loss = model(tokens, labels=tokens).loss

    def refuse(*_: Any) -> None:
        raise ValueError("no such gradient")

    if dist.get_rank() == 1:
        model.lm_head.weight.register_hook(refuse)
    loss.backward()


def test_an_error_in_a_backward_is_raised_on_all_ranks(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="no such gradient") as caught:
        fail_in_backward(tmp_path)
    assert "rank 1 raised ValueError: no such gradient" in caught.value.failures[0]
    assert caught.value.hung == ()


@on_ranks(2, timeout=200)
def test_what_has_no_stages_is_refused_on_all_ranks(tmp_path: Path) -> None:
    home = save_plain(build_model(), tmp_path)
    sizes = config(pp_size=2)
    with pytest.raises(PlanError, match="a causal language model"):
        hf.from_pretrained(home, sizes, model_class=_class("LlamaModel"), strict=False)
    shallow = save_plain(build_model(num_hidden_layers=1), tmp_path / "shallow")
    with pytest.raises(PlanError, match="has 1 layers; pp_size must be at most 1"):
        hf.from_pretrained(shallow, sizes)
    sizes.fsdp_size = 2
    with pytest.raises(PlanError, match="cannot be combined with dp_replicate_size"):
        hf.mesh_of(sizes)


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)
