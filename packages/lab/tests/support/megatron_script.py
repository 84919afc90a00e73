"""A Megatron-style torchrun script: tensor, sequence, vocabulary and data parallelism by hand."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel_state
from megatron_layers import LanguageModel

VOCABULARY = 16
SEQUENCE = 8
ROWS = 4


def reduce_gradients(model: LanguageModel, forgets: str) -> None:
    """Sum the gradients of whole parameters over shards of the sequence.

    Average all over the data ranks.
    """
    for name, parameter in model.named_parameters():
        gradient = gradient_of(parameter)
        is_forgotten = bool(forgets) and forgets in name
        if not hasattr(parameter, "is_sharded") and not is_forgotten:
            dist.all_reduce(gradient, group=parallel_state.tensor_group())
        dist.all_reduce(gradient, group=parallel_state.data_group())
        gradient /= parallel_state.data_size()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, which exists."""
    assert parameter.grad is not None
    return parameter.grad


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale all gradients by the norm of all, in which each replica counts once."""
    parameters = list(parameters)
    square = torch.zeros(())
    for parameter in parameters:
        if hasattr(parameter, "is_sharded") or parallel_state.tensor_rank() == 0:
            square += gradient_of(parameter).square().sum()
    dist.all_reduce(square, group=parallel_state.tensor_group())
    factor = min(1.0, limit / float(square.sqrt()))
    for parameter in parameters:
        gradient_of(parameter).mul_(factor)


def main() -> None:
    """Train for a few steps, and write the losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-layers", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=16)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--forgets", default="", help="parameters whose gradients stay partial")
    parser.add_argument("--output", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(options.tensor_model_parallel_size)
    torch.manual_seed(1234)
    model = LanguageModel(VOCABULARY, options.hidden_size, 4, options.num_layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (SEQUENCE + 1, ROWS), generator=generator)
        mine = tokens.chunk(parallel_state.data_size(), 1)[parallel_state.data_rank()]
        loss = model(mine[:-1], mine[1:]).mean()
        loss.backward()
        reduce_gradients(model, options.forgets)
        clip_gradients(model.parameters(), options.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=parallel_state.data_group())
        losses.append(mean.item() / parallel_state.data_size())
    if options.output and dist.get_rank() == 0:
        with open(options.output, "w") as file:
            file.write(" ".join(map(repr, losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
