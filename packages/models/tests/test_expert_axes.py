"""Experts of a model of transformers over the axes of a DistributedConfig.

Covers: hf/expert_axes.py.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configured_models import assert_trains_alike, config
from hf_models import (
    assert_same_values,
    build_model,
    needs_hf,
    save_plain,
    token_batch,
)
from mixtures import EAGER, FAMILIES, mixture
from shoal_dtensor import DTensor, Shard
from shoal_mesh import CommDebugMode
from shoal_mesh.testing import counts, on_ranks
from shoal_models import hf
from shoal_tp_styles import PlanError

pytestmark = needs_hf

# by name: the sizes, and how many ranks have rows of their own
SIZES: dict[str, tuple[dict[str, Any], int]] = {
    "all ranks": ({"fsdp_size": 4, "ep_size": 4}, 4),
    "two of four": ({"fsdp_size": 4, "ep_size": 2}, 4),
    "replicas": ({"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}, 4),
    "tp": ({"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 2),
    "tp and fsdp": ({"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, 2),
    "tp alone": ({"tp_size": 4, "ep_size": 4}, 1),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(4, timeout=300)
def test_experts_train_as_in_one_process(family: str, kind: str, tmp_path: Path) -> None:
    sizes, parts = SIZES[kind]
    single = mixture(family)
    home = save_plain(single, tmp_path)
    model, loaded = hf.from_pretrained(home, config(**sizes), output_loading_info=True, **EAGER)
    assert_same_values(model, single, atol=0)
    # without its shards alone, a rank would read the experts of all ranks
    whole = sum(param.nbytes for param in single.parameters())
    assert loaded.bytes_read < 0.75 * whole
    assert_trains_alike(
        model,
        single,
        sizes,
        parts,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        home=tmp_path,
        **EAGER,
    )


def placements_of(model: Any) -> Any:
    """The placements of a matrix of experts, by the axes of its mesh."""
    weight = model.model.layers[0].mlp.experts.down_proj
    assert isinstance(weight, DTensor)
    return dict(zip(weight.device_mesh.axis_names, weight.placements, strict=True))


@on_ranks(4, timeout=300)
def test_sizes_and_rules_decide_which_ranks_have_which_experts(tmp_path: Path) -> None:
    single = mixture()
    home = save_plain(single, tmp_path)
    tokens = token_batch()
    expected = single(tokens).logits

    def load(plan: Any = None, **options: Any) -> Any:
        model = hf.from_pretrained(home, config(**options), plan, **EAGER)
        with CommDebugMode() as counted:
            torch.testing.assert_close(model(tokens).logits, expected)
        return model, counts(counted)

    exchanged, exchanges = load(fsdp_size=4, ep_size=4, ep_implementation="all_to_all")
    assert placements_of(exchanged)["ep"] == Shard(0)
    # of two layers
    assert exchanges["all_to_all"] == 4
    model, found = load(fsdp_size=2, tp_size=2, ep_size=4)
    assert placements_of(model).keys() == {"efsdp", "ep", "tp"}
    assert placements_of(model)["tp"].dim == 2
    assert found["all_to_all"] == 4
    model, found = load(fsdp_size=2, tp_size=2, ep_size=2, ep_implementation="all_reduce")
    assert placements_of(model).keys() == {"fsdp", "tp"}
    assert placements_of(model)["tp"] == Shard(0)
    assert "all_to_all" not in found
    # without an ep_size the plan of the model divides hidden features
    assert placements_of(load(fsdp_size=2, tp_size=2)[0])["tp"].dim == 2
    # other rules of the axis "tp", of the configuration or as a plan, leave the experts as they are
    whole_experts = {"model.layers.*.mlp.experts": "replicate"}
    cases: list[dict[str, Any]] = [
        {"tp_plan": {}},
        {"tp_plan": whole_experts},
        {"plan": {}},
        {"plan": whole_experts},
    ]
    for options in cases:
        for ranks in (2, 4):
            model, _ = load(fsdp_size=2, tp_size=2, ep_size=ranks, **options)
            assert placements_of(model)["tp"] == Shard(0) or ranks == 4
            assert ("ep" in placements_of(model)) is (ranks == 4)
    attention = model.model.layers[0].self_attn.q_proj.weight
    assert attention.device_mesh.axis_names == ("fsdp",)
    # rules of the configuration change those of the model
    exchanged_names = ("", ".gate_up_proj", ".down_proj")
    whole = {f"model.layers.*.mlp.experts{name}": "replicate" for name in exchanged_names}
    first = {"model.layers.0.mlp.experts": "ep_dispatch_experts"}
    model, found = load(fsdp_size=4, ep_size=4, ep_plan={**whole, **first})
    assert placements_of(model)["ep"] == Shard(0)
    assert found["all_to_all"] == 2


@on_ranks(2, timeout=300)
def test_experts_that_cannot_be_divided_are_refused(tmp_path: Path) -> None:
    home = save_plain(mixture(), tmp_path / "mixture")
    dense = save_plain(build_model(), tmp_path / "dense")

    def refuse(message: str, path: Path, **options: Any) -> None:
        with pytest.raises(PlanError, match=message):
            hf.from_pretrained(path, config(**options), **EAGER)

    over_data = {"fsdp_size": 2, "ep_size": 2}
    over_tensor = {"tp_size": 2, "ep_size": 2}
    refuse("no rule of the ep_plan names experts of Llama", dense, **over_data)
    names = ("", ".gate_up_proj", ".down_proj")
    whole = {f"model.layers.*.mlp.experts{name}": "replicate" for name in names}
    refuse("no rule of the ep_plan names experts of Mixtral", home, **over_data, ep_plan=whole)
    refuse("of ep_plan name no module", home, **over_data, ep_plan={"experts": "grouped_gemm"})
    for way, sizes, fitting in (
        ("all_reduce", over_data, "all_to_all"),
        ("all_to_all", over_tensor, "all_reduce"),
        ("deepgemm_megamoe", over_tensor, "all_reduce"),
    ):
        message = f"ep_implementation='{way}' with ep_size=2 .*expected 'auto' or '{fitting}'"
        refuse(message, home, **sizes, ep_implementation=way)
    wrong = {"model.layers.*.self_attn": "ep_dispatch_experts"}
    for sizes in (over_data, over_tensor):
        refuse("does not fit .*or leave out ep_size", home, **sizes, ep_plan=wrong)


@pytest.mark.parametrize("sizes", [{"fsdp_size": 4}, {"fsdp_size": 2, "tp_size": 2}])
@on_ranks(4, timeout=200)
def test_ranks_with_prompts_of_different_lengths_generate_together(
    sizes: dict[str, int], tmp_path: Path
) -> None:
    single = mixture()
    sizes = {**sizes, "ep_size": 4}
    model = hf.from_pretrained(save_plain(single, tmp_path), config(**sizes), **EAGER)
    prompt = token_batch()[:1, : 3 + hf.mesh_of(config(**sizes)).get_local_rank("fsdp")]
    how: dict[str, Any] = {"do_sample": False, "max_length": 9}
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    expected = single.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
    assert torch.equal(made, expected)
