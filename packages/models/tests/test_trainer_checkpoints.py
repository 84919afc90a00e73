"""Checkpoints of transformers' Trainer with a parallel model.  Covers: hf/training.py.

Run by `nox -s hugging_face`, where accelerate is installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from hf_models import (
    assert_same_values,
    build_model,
    needs_accelerate,
    needs_hf,
    needs_peft,
    save_plain,
    shared_directory,
)
from shoal_dtensor import DTensor, full_tensor
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import hf
from shoal_tp_styles import parallelize_module, unparallelize_module

pytestmark = [needs_hf, needs_accelerate]


def trainer_of(model: Any, home: Path, mesh: Any = None, rows: int = 2, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    tokens = torch.randint(3, 67, (8, 7), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with hf.single_process():
        args = TrainingArguments(
            str(home),
            max_steps=4,
            per_device_train_batch_size=rows,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch_fused",
            **options,
        )
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data)
    return hf.prepare_trainer(trainer, mesh)


@on_ranks(4, timeout=200)
def test_a_run_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    home, plain = shared_directory(tmp_path), build_model().train()
    plan = dict(plain.tp_plan)
    straight = copy.deepcopy(plain)
    trainer_of(
        parallelize_module(straight, all_ranks(), plan), home / "no", save_strategy="no"
    ).train()
    first = parallelize_module(copy.deepcopy(plain), all_ranks(), plan)
    trainer_of(first, home / "run", save_strategy="steps", save_steps=1, save_total_limit=2).train()
    assert sorted(path.name for path in (home / "run").iterdir()) == [
        "checkpoint-3",
        "checkpoint-4",
    ]
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "tp"))
    resumed = parallelize_module(build_model().train(), grid["tp"], plan)
    trainer = trainer_of(resumed, home / "run", save_strategy="no")
    trainer.train(resume_from_checkpoint=str(home / "run" / "checkpoint-3"))
    assert trainer.state.global_step == 4
    unparallelize_module(straight)
    assert_same_values(first, straight)
    assert_same_values(resumed, straight)


@on_ranks(4, timeout=300)
def test_a_run_over_data_axes_goes_on_over_others(tmp_path: Path) -> None:
    from transformers.distributed import DistributedConfig

    home = shared_directory(tmp_path)
    files = save_plain(build_model(), home)
    straight = build_model().train()
    trainer_of(straight, home / "no", rows=4, save_strategy="no").train()
    first_config = DistributedConfig(fsdp_size=2, tp_size=2)
    other_config = DistributedConfig(dp_replicate_size=2, fsdp_size=2)
    models: list[Any] = []
    for config, rows in ((first_config, 2), (other_config, 1)):
        model = hf.from_pretrained(files, config).train()
        data = hf.mesh_of(config)["dp_replicate", "fsdp"]
        trainer = trainer_of(model, home / "run", data, rows, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=str(home / "run" / "checkpoint-2") if models else None)
        assert trainer.state.global_step == 4
        models.append(model)
    for model in models:
        assert_same_values(model, straight, atol=1e-9)


@on_ranks(4, timeout=300)
def test_a_run_on_stages_goes_on_with_others(tmp_path: Path) -> None:
    from transformers.distributed import DistributedConfig

    home = shared_directory(tmp_path)
    single = build_model("Qwen3", head_dim=8, num_hidden_layers=4, tie_word_embeddings=True)
    files = save_plain(single, home)
    straight = copy.deepcopy(single).train()
    trainer_of(straight, home / "no", save_strategy="no").train()
    whole = dict(straight.named_parameters())
    # on 2 stages of 2 ranks, then on 4 stages, then without stages
    configs = [{"pp_size": 2, "tp_size": 2}, {"pp_size": 4}, {"tp_size": 4}]
    for number, sizes in enumerate(configs):
        model = hf.from_pretrained(files, DistributedConfig(**sizes)).train()
        options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
        trainer = trainer_of(model, home / "run", **options)
        kept = home / "run" / f"checkpoint-{number}"
        trainer.train(resume_from_checkpoint=str(kept) if number else None)
        assert trainer.state.global_step == 4
        for name, param in model.named_parameters():
            value = full_tensor(param).detach()
            torch.testing.assert_close(value, whole[name].detach(), rtol=0, atol=1e-9)


@on_ranks(2, timeout=200)
def test_the_best_model_is_that_of_one_process(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    home = shared_directory(tmp_path)
    model = hf.from_pretrained(save_plain(build_model(), home), all_ranks()).train()
    options: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    trainer = trainer_of(
        model, home / "run", load_best_model_at_end=True, save_total_limit=1, **options
    )
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.exists() and (best / "trainer_state.json").exists()
    assert_same_values(model, AutoModelForCausalLM.from_pretrained(best))
    trainer.save_model(str(home / "final"))
    assert (home / "final" / "training_args.bin").exists()
    assert_same_values(model, AutoModelForCausalLM.from_pretrained(home / "final"))


@needs_peft
@on_ranks(4, timeout=200)
def test_adapters_go_on_from_a_checkpoint_on_other_ranks(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    home = shared_directory(tmp_path)

    def adapted(mesh: Any) -> Any:
        model = parallelize_module(build_model().train(), mesh, dict(build_model().tp_plan))
        torch.manual_seed(3)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"])
        return hf.parallelize_adapters(get_peft_model(model, config))

    straight = adapted(all_ranks())
    trainer_of(straight, home / "run", save_strategy="steps", save_steps=3).train()
    kept = home / "run" / "checkpoint-3"
    assert not list(kept.glob("model*.safetensors"))
    resumed = adapted(init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "tp"))["tp"])
    trainer_of(resumed, home / "run", save_strategy="no").train(resume_from_checkpoint=str(kept))
    expected = {name: each.full_tensor() for name, each in whole_adapters(straight).items()}
    assert expected
    for name, each in whole_adapters(resumed).items():
        torch.testing.assert_close(each.full_tensor(), expected[name], rtol=0, atol=1e-12)
    alone = PeftModel.from_pretrained(build_model(), home / "run" / "checkpoint-4")
    for name, param in alone.named_parameters():
        if name in expected:
            torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-12)


def whole_adapters(model: Any) -> dict[str, Any]:
    """The sharded adapters of a model."""
    return {
        name: each
        for name, each in model.named_parameters()
        if "lora" in name and isinstance(each, DTensor)
    }
