"""accelerate and transformers' Trainer with a parallel model, against one process.

Covers: hf/{training,data_rows}.py.
"""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_models import (
    assert_same_values,
    build_model,
    needs_accelerate,
    needs_hf,
    save_plain,
)
from mixtures import EAGER, FAMILIES, mixture
from shoal_dtensor import full_tensor
from shoal_mesh.testing import all_ranks, on_ranks
from shoal_models import hf
from shoal_tp_styles import PlanError, parallelize_module


def models() -> tuple[Any, Any]:
    single = build_model().train()
    module = copy.deepcopy(single)
    return single, parallelize_module(module, all_ranks(), dict(single.tp_plan))


def examples() -> list[dict[str, Any]]:
    tokens = torch.randint(3, 67, (8, 7), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in tokens]


def assert_trained_alike(module: Any, single: Any) -> None:
    assert_same_values(module, single)
    start = dict(build_model().named_parameters())
    assert not any(torch.equal(param, start[name]) for name, param in single.named_parameters())


@needs_hf
@on_ranks(2, timeout=200)
def test_the_signature_is_that_of_the_forward() -> None:
    single, module = models()
    assert inspect.signature(module.forward) == inspect.signature(single.forward)
    assert inspect.signature(module.lm_head.forward) == inspect.signature(single.lm_head.forward)


@needs_hf
@needs_accelerate
@on_ranks(2, timeout=200)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "label_smoothing_factor": 0.1,
            "gradient_checkpointing": True,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=["plain", "smoothing, checkpointing and accumulation"],
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def trained(model: Any) -> float:
        with hf.single_process():
            args = TrainingArguments(
                str(tmp_path),
                max_steps=3,
                per_device_train_batch_size=2,
                learning_rate=1e-2,
                max_grad_norm=0.5,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                optim="adamw_torch_fused",
                **options,
            )
            trainer = Trainer(model, args, train_dataset=examples())
        loss: float = hf.prepare_trainer(trainer).train().training_loss
        return loss

    single, module = models()
    assert trained(module) == pytest.approx(trained(single), rel=1e-12)
    assert_trained_alike(module, single)


@needs_hf
@needs_accelerate
@on_ranks(2, timeout=200)
def test_accelerate() -> None:
    from accelerate import Accelerator

    single, module = models()
    norms = []
    for each in (single, module):
        with hf.single_process():
            accelerator = hf.prepare_accelerator(Accelerator(cpu=True))
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        model, optimizer, loader = accelerator.prepare(
            each,
            optimizer,
            torch.utils.data.DataLoader(examples(), 2),  # type: ignore[arg-type]  # a list
        )
        assert model is each
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms[:4] == pytest.approx(norms[4:], rel=1e-12)
    assert_trained_alike(module, single)


# by name: the family, the sizes, and how many ranks have rows of their own
DATA_AXES: dict[str, tuple[str, dict[str, int], int]] = {
    "fsdp and tp": ("Llama", {"fsdp_size": 2, "tp_size": 2}, 2),
    "hsdp": ("Llama", {"dp_replicate_size": 2, "fsdp_size": 2}, 4),
    "experts": ("Mixtral", {"fsdp_size": 4, "ep_size": 2}, 4),
    "experts on all ranks": ("Qwen3Moe", {"fsdp_size": 4, "ep_size": 4}, 4),
    "experts over tp": ("Mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 2),
    "experts over fsdp and tp": ("Mixtral", {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}, 2),
    "replicas of experts": ("Mixtral", {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2}, 4),
    "stages": ("Llama", {"pp_size": 2, "tp_size": 2}, 1),
    "stages of experts": ("Mixtral", {"pp_size": 2, "tp_size": 2, "ep_size": 2}, 1),
}
ON_TWO_RANKS: dict[str, tuple[str, dict[str, int], int]] = {
    "experts": ("Mixtral", {"fsdp_size": 2, "ep_size": 2}, 2),
    "experts over tp": ("Mixtral", {"tp_size": 2, "ep_size": 2}, 1),
    "stages": ("Llama", {"pp_size": 2}, 1),
}


def uneven_examples() -> list[dict[str, Any]]:
    """Return 24 rows, of which each has one more label that counts than the one before."""
    tokens = torch.randint(3, 67, (24, 28), generator=torch.Generator().manual_seed(2))
    labels = torch.where(torch.arange(28) < 3 + torch.arange(24)[:, None], tokens, -100)
    return [{"input_ids": row, "labels": own} for row, own in zip(tokens, labels, strict=True)]


@needs_hf
@needs_accelerate
@on_ranks(4, timeout=300)
@pytest.mark.parametrize("kind", DATA_AXES)
def test_a_trainer_on_four_ranks(kind: str, tmp_path: Path) -> None:
    assert_trainers_agree(DATA_AXES[kind], tmp_path)


@needs_hf
@needs_accelerate
@on_ranks(2, timeout=300)
@pytest.mark.parametrize("kind", ON_TWO_RANKS)
def test_a_trainer_on_two_ranks(kind: str, tmp_path: Path) -> None:
    assert_trainers_agree(ON_TWO_RANKS[kind], tmp_path)


def loss_in_float64(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    **_: Any,
) -> torch.Tensor:
    """Return the loss of causal language models, which transformers computes in float32."""
    predicted = logits[:, :-1].flatten(0, 1)
    wanted = labels[:, 1:].flatten()
    if num_items_in_batch is None:
        return torch.nn.functional.cross_entropy(predicted, wanted)
    total = torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum")
    mean: torch.Tensor = total / num_items_in_batch
    return mean


def train_and_record(trainer: Any) -> list[float]:
    """Train; return the losses of the microbatches."""
    losses: list[float] = []
    step = trainer.training_step

    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        loss = step(*args, **kwargs)
        losses.append(loss.item())
        return loss

    trainer.training_step = recorded_step
    trainer.train()
    return losses


def assert_trainers_agree(case: tuple[str, dict[str, int], int], tmp_path: Path) -> None:
    """Two microbatches a step, whose rows have different numbers of labels."""
    from transformers import Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    family, sizes, parts = case
    config = DistributedConfig(**sizes)
    has_experts = family in FAMILIES
    single = (mixture if has_experts else build_model)(family).train()
    options = EAGER if has_experts else {}
    module = hf.from_pretrained(save_plain(single, tmp_path), config, **options).train()
    for model in (single, module):
        model.loss_function = loss_in_float64
    # Routers compute in float32, and Adam divides by gradients that are its rounding errors alone.
    optimizer = "sgd" if has_experts else "adamw_torch"

    def trainer_of(model: Any, rows: int, evaluated: int) -> Any:
        with hf.single_process():
            args = TrainingArguments(
                str(tmp_path),
                max_steps=3,
                per_device_train_batch_size=rows,
                per_device_eval_batch_size=evaluated,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                max_grad_norm=0.5,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                prediction_loss_only=False,
                optim=optimizer,
            )
            return Trainer(
                model, args, train_dataset=uneven_examples(), eval_dataset=uneven_examples()[:11]
            )

    data = hf.mesh_of(config)["dp_replicate", "fsdp"] if parts > 1 else None
    trainers = [
        hf.prepare_trainer(trainer_of(single, 4, 1)),
        hf.prepare_trainer(trainer_of(module, 4 // parts, 1), data),
    ]
    losses = [train_and_record(trainer) for trainer in trainers]
    # three steps of two microbatches
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    of_single = dict(single.named_parameters())
    for name, param in module.named_parameters():
        value = full_tensor(param).detach()
        torch.testing.assert_close(value, of_single[name].detach(), rtol=0, atol=1e-9)
    # 11 rows, on 4 or 2 ranks
    predictions = [trainer.predict(uneven_examples()[:11]) for trainer in trainers]
    assert predictions[1].predictions.shape == predictions[0].predictions.shape
    torch.testing.assert_close(*(torch.from_numpy(each.predictions) for each in predictions))


@needs_hf
@needs_accelerate
@on_ranks(2, timeout=200)
def test_accelerate_over_data_axes() -> None:
    from accelerate import Accelerator

    mesh = all_ranks()
    with hf.single_process():
        accelerator = hf.prepare_accelerator(Accelerator(cpu=True), mesh)
    numbers = torch.arange(5.0)
    loader = accelerator.prepare(torch.utils.data.DataLoader(numbers, 2))  # type: ignore[arg-type]
    own = [batch.tolist() for batch in loader]
    # the last batch is filled with the first rows
    rank = torch.distributed.get_rank()
    assert own == [[[0.0, 1.0], [4.0, 0.0]], [[2.0, 3.0], [1.0, 2.0]]][rank]
    gathered = [row for batch in loader for row in accelerator.gather_for_metrics(batch).tolist()]
    assert gathered == numbers.tolist()


def test_refusals_name_the_way_out() -> None:
    with pytest.raises(PlanError, match=r"has 2 processes .* inside `with hf.single_process"):
        hf.prepare_accelerator(SimpleNamespace(num_processes=2, is_fsdp2=False))


def test_the_world_is_hidden_inside_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with hf.single_process():
        assert "WORLD_SIZE" not in os.environ
    assert os.environ["WORLD_SIZE"] == "2"
