"""accelerate's FSDP2 and ParallelismConfig with shoal underneath, against torch's own run.

Covers: hf/accelerate_sharding.py, hf/training.py.

accelerate has FSDP2 on accelerators only. The ranks here are CPU ranks that tell it otherwise: the
type of the distributed state is that of several GPUs, and everything else is as accelerate makes
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hf_models import needs_accelerate
from shoal_data_parallel import FSDPModule
from shoal_dtensor import DTensor
from shoal_mesh.testing import on_ranks
from shoal_models import hf
from shoal_models.hf.accelerate_sharding import torch_names_replaced
from shoal_tp_styles import PlanError

FLAT = {"dp_shard_size": 4}
HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}


@contextmanager
def told_of_gpus() -> Iterator[None]:
    """Let accelerate count the ranks, and take them for ranks with GPUs."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    before = dict(os.environ)
    os.environ.update(told)
    try:
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        # the plugin writes its options to the environment, too
        os.environ.clear()
        os.environ.update(before)


def make_accelerator(sizes: dict[str, int] | None, **options: Any) -> Any:
    from accelerate import (
        Accelerator,
        DataLoaderConfiguration,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
        **options,
    )
    return Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        parallelism_config=None if sizes is None else ParallelismConfig(**sizes),
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )


def parts(accelerator: Any) -> tuple[Any, Any, Any]:
    """Return a prepared model, its optimizer and its loader."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(
        dist.get_rank() if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading else 0
    )
    model = nn.Sequential(nn.Linear(8, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    rows = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    data = TensorDataset(rows, torch.randint(4, (64,), generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(model, optimizer, loader)
    return prepared


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """Train for one epoch; return the mean loss of each batch over all ranks, and norms."""
    found = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                found.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    return found


def run(sizes: dict[str, int] | None, folder: Path, *, with_shoal: bool, **options: Any) -> Any:
    """Train, save, train on; return losses, and the values of the model at the end."""
    with told_of_gpus():
        accelerator = make_accelerator(sizes, **options)
        if with_shoal:
            assert hf.prepare_accelerator(accelerator) is accelerator
        prepared = parts(accelerator)
        assert isinstance(prepared[0], FSDPModule) is with_shoal
        losses = train(accelerator, *prepared)
        accelerator.save_state(str(folder))
        losses += train(accelerator, *prepared)
        state = accelerator.get_state_dict(prepared[0])
    return losses, state


def resume(
    sizes: dict[str, int] | None, folder: Path, *, with_shoal: bool, **options: Any
) -> list[float]:
    """Load a checkpoint into a model that has not trained, and train for an epoch."""
    with told_of_gpus():
        accelerator = make_accelerator(sizes, **options)
        if with_shoal:
            hf.prepare_accelerator(accelerator)
        prepared = parts(accelerator)
        accelerator.load_state(str(folder))
        return train(accelerator, *prepared)


@needs_accelerate
@on_ranks(4, timeout=300)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (FLAT, {}),
        (FLAT, {"state_dict_type": "FULL_STATE_DICT", "reshard_after_forward": False}),
        (HYBRID, {}),
        (None, {"cpu_ram_efficient_loading": True}),
    ],
    ids=["sharded", "sharded, full states", "replicas", "loaded on rank 0"],
)
def test_training_is_that_of_torch(
    sizes: dict[str, int] | None, options: dict[str, Any], tmp_path: Path
) -> None:
    expected, expected_state = run(sizes, tmp_path / "torch", with_shoal=False, **options)
    found, state = run(sizes, tmp_path / "shoal", with_shoal=True, **options)
    assert found == pytest.approx(expected, rel=1e-12)
    assert state.keys() == expected_state.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, expected_state[name])

    # each reads the checkpoint of the other before its first step, and continues like the other
    continued = {
        with_shoal: resume(sizes, tmp_path / other, with_shoal=with_shoal, **options)
        for with_shoal, other in ((True, "torch"), (False, "shoal"))
    }
    assert continued[True] == pytest.approx(continued[False], rel=1e-12)


@needs_accelerate
@pytest.mark.parametrize("on_meta", [False, True])
@on_ranks(4)
def test_mixed_precision_and_offload_policies_are_taken_over(on_meta: bool) -> None:
    options = {"cpu_offload": True, "cpu_ram_efficient_loading": on_meta}
    with told_of_gpus():
        accelerator = make_accelerator(FLAT, mixed_precision_policy="bf16", **options)
        hf.prepare_accelerator(accelerator)
        model, _, _ = parts(accelerator)
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        assert weight.dtype is torch.float64
        assert not weight.is_meta
        assert model(torch.randn(2, 8)).dtype is torch.bfloat16


@needs_accelerate
@on_ranks(4)
def test_accelerators_that_cannot_be_prepared() -> None:
    with told_of_gpus():
        accelerator = make_accelerator({"dp_shard_size": 2, "tp_size": 2})
        with pytest.raises(
            PlanError, match="tp_size=2 of the ParallelismConfig is not a data axis"
        ):
            hf.prepare_accelerator(accelerator)
    with told_of_gpus():
        accelerator = make_accelerator(FLAT)
        parts(accelerator)
        with pytest.raises(PlanError, match="has prepared a model"):
            hf.prepare_accelerator(accelerator)


def test_names_of_torch_are_restored() -> None:
    import torch.distributed.fsdp as fsdp

    before = fsdp.fully_shard
    with pytest.raises(KeyError), torch_names_replaced():
        assert fsdp.fully_shard is not before
        raise KeyError
    assert fsdp.fully_shard is before
