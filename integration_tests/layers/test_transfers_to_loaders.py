"""Weights from FSDP over tensor and expert parallelism to servers with inference engines' loaders.

Covers: shoal_transfer.learn, with shoal_data_parallel, shoal_tp_styles and shoal_models.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_models import needs_hf
from served_models import Seat, ServedModel
from shoal_data_parallel import fully_shard
from shoal_dtensor import full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_models import load_sharded, save_sharded
from shoal_tp_styles import UnmatchedPlanWarning, parallelize_module
from shoal_transfer import (
    TransferPlan,
    WeightMapping,
    WeightTransfer,
    describe,
    learn_conversion,
    learn_mapping,
    plan_transfer,
)

pytestmark = needs_hf

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    # fewer than the server has ranks
    "num_key_value_heads": 2,
    "head_dim": 4,
    # padded by the server
    "vocab_size": 67,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
# architecture, tied head, experts of the server by number
QUICK = [("llama", True, False), ("gemma", True, False), ("qwen3_moe", False, True)]
OTHERS = [
    ("llama", False, False),
    ("mistral", False, False),
    ("qwen2", True, False),
    ("qwen3", True, False),
    ("qwen3_moe", False, False),
    ("mixtral", False, False),
    ("mixtral", False, True),
]


def build(model_type: str, tied: bool) -> Any:
    """A model with the same weights on every rank, none of them zero."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    # grouped products take no float64
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model


def parallel(single: Any) -> Any:
    """The trainer: tensor parallel and, for its experts, expert parallel; then fully sharded."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = copy.deepcopy(single)
    plan = {**single.tp_plan, **(getattr(single, "ep_plan", None) or {})}
    with warnings.catch_warnings():
        # plans name projections that a configuration may lack
        warnings.simplefilter("ignore", UnmatchedPlanWarning)
        parallelize_module(model, grid["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, grid["data"])
    return fully_shard(model, grid["data"])


def plan_of(trainer: Any, server: ServedModel) -> TransferPlan:
    """The plan by the trainer's conversion to files and the server's own loader."""
    source = describe(trainer)
    to_files = learn_conversion(trainer, source)
    files = {
        name: torch.empty(shape, dtype=torch.float64, device="meta")
        for name, shape in to_files.targets.items()
    }
    learned = learn_mapping(server, server.load_weights, files, compute=server.compute)
    mapping = to_files.then(learned)
    mapping = WeightMapping.from_json(mapping.to_json())
    return plan_transfer(source, describe(server, per_rank=True), mapping)


def files_of(trainer: Any, single: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint that transformers writes of the files of `save_sharded`."""
    from safetensors.torch import load_file

    where = [tempfile.mkdtemp()]
    dist.broadcast_object_list(where)
    home = Path(where[0])
    save_sharded(trainer, home / "sharded")
    if dist.get_rank() == 0:
        plain = copy.deepcopy(single)
        # the files of a tied model have one of the names
        load_sharded(plain, home / "sharded" / "model.safetensors", strict=False)
        plain.save_pretrained(home / "plain")
    dist.barrier()
    return load_file(home / "plain" / "model.safetensors")


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    found: Tensor = full_tensor(logits)
    return found


def assert_served(model_type: str, tied: bool, by_number: bool) -> None:
    """After three syncs with steps between, each rank has the bytes of a direct load of files."""
    single = build(model_type, tied)
    trainer = parallel(single)
    seat = Seat(dist.get_rank(), dist.get_world_size(), by_number)
    server = ServedModel(seat, single.config)
    plan = plan_of(trainer, server)
    assert plan.is_verified
    assert "transformers' conversion, then recorded loader" in plan.explain()
    transfer = WeightTransfer(
        plan, source=trainer, target=server, deltas=True, compute=server.compute
    )
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.01)
    tokens = torch.randint(3, 67, (4, 7), generator=torch.Generator().manual_seed(1))
    for version in (1, 2, 3):
        logits = logits_of(trainer, tokens)
        predicted = logits[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(predicted, tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch gives it no types
        optimizer.step()
        optimizer.zero_grad()
        transfer.run(version)
        with torch.no_grad():
            expected = logits_of(trainer, tokens)
        # norms, routers and positions are in float32
        torch.testing.assert_close(server(tokens), expected, rtol=1e-6, atol=1e-6)
    fresh = ServedModel(seat, single.config)
    fresh.load_weights(iter(files_of(trainer, single).items()))
    for name, value in fresh.named_parameters():
        assert torch.equal(server.get_parameter(name), value), name


@on_ranks(4, timeout=200)
@pytest.mark.parametrize(("model_type", "tied", "by_number"), QUICK)
def test_a_server_with_a_loader_of_its_own(model_type: str, tied: bool, by_number: bool) -> None:
    assert_served(model_type, tied, by_number)


@pytest.mark.slow
@on_ranks(4, timeout=200)
@pytest.mark.parametrize(("model_type", "tied", "by_number"), OTHERS)
def test_a_server_of_other_architectures(model_type: str, tied: bool, by_number: bool) -> None:
    assert_served(model_type, tied, by_number)
