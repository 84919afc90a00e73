"""A script of transformers' Trainer for torchrun: data parallelism, or FSDP2 with `--fsdp`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

FSDP = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def main() -> None:
    """Train for four steps, and write the losses and the norms of the gradients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch on one rank")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).double()
    tokens = torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(1))
    choices: dict[str, Any] = FSDP if options.fsdp else {}
    arguments = TrainingArguments(
        str(options.output.parent),
        max_steps=4,
        per_device_train_batch_size=options.rows,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        use_cpu=options.cpu,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **choices,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        values = [entry[name] for name in ("loss", "grad_norm") for entry in steps]
        options.output.write_text(" ".join(map(repr, values)))


if __name__ == "__main__":
    main()
