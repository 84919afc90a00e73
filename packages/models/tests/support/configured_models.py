"""A DistributedConfig of transformers, and the training of a model that is loaded by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_models import assert_same_values, naming, shared_directory, token_batch
from shoal_dtensor import clip_grad_norm_, full_tensor
from shoal_mesh import all_reduce
from shoal_models import hf

__all__ = ["assert_trains_alike", "config"]


def config(**options: Any) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**options)


def assert_trains_alike(
    model: Any,
    single: Any,
    sizes: Mapping[str, int],
    parts: int,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    home: Path,
    **options: Any,
) -> None:
    """Two steps of a model are those of one process, and a saved model is loaded again.

    Args:
        model: the model that a configuration has loaded.
        single: the model of one process.
        sizes: the sizes of the configuration.
        parts: how many ranks have rows of their own.
        optimizer: makes the optimizer of parameters.
        home: a folder of the test.
        options: arguments for loading the saved model.
    """
    tokens = token_batch(8)
    mesh = hf.mesh_of(config(**sizes))
    part = mesh["dp_replicate", "fsdp"].flatten().get_local_rank()
    rows = tokens.chunk(parts)[part]
    optimizers = [optimizer(trained.parameters()) for trained in (single, model)]
    for _ in range(2):
        expected = single(tokens, labels=tokens)
        got = model(rows, labels=rows)
        torch.testing.assert_close(got.logits, expected.logits.chunk(parts)[part])
        mean = all_reduce(got.loss.detach(), (mesh.flatten(), 0), "avg")
        torch.testing.assert_close(mean, expected.loss.detach())
        expected.loss.backward()
        got.loss.backward()
        gradients = {name: param.grad for name, param in single.named_parameters()}
        for name, param in model.named_parameters():
            torch.testing.assert_close(full_tensor(param.grad), gradients[name], msg=naming(name))
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.5)
        torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.5), norm)
        for one in optimizers:
            one.step()
            one.zero_grad()
    assert_same_values(model, single, atol=1e-9)
    saved = shared_directory(home) / "saved"
    model.save_pretrained(saved)
    again = type(single).from_pretrained(saved, dtype=torch.float64, **options)
    torch.testing.assert_close(again(tokens).logits, single(tokens).logits)
