"""A training script of accelerate for torchrun: data parallelism, or FSDP2 with `--fsdp`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
)
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Train for two epochs of four optimizer steps, and write the mean loss of each batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch on one rank")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--fsdp", action="store_true")
    options = parser.parse_args()
    plugin = None
    if options.fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
        )
    accelerator = Accelerator(
        cpu=options.cpu,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2,
        # by default the order of rows depends on the number of ranks
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    data = TensorDataset(torch.randn(128, 8, dtype=torch.float64), torch.randint(4, (128,)))
    loader = DataLoader(data, batch_size=options.rows, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for inputs, labels in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    if accelerator.is_main_process:
        options.output.write_text(" ".join(map(repr, losses)))
    accelerator.end_training()


if __name__ == "__main__":
    main()
