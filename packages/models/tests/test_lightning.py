"""Lightning's ModelParallelStrategy with a parallel model, against one process.

Covers: hf/training.py.

Run by `nox -s hugging_face`, where lightning is installed.
"""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hf_models import build_model, needs_hf, token_batch
from shoal_dtensor import DTensor, clip_grad_norm_, full_tensor, interop
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import parallelize_module

needs_lightning = pytest.mark.skipif(
    find_spec("lightning") is None, reason="lightning: run by nox -s hugging_face"
)
pytestmark = [needs_hf, needs_lightning]


def fit(model: Any, strategy: Any, devices: int, clip: float | None) -> list[float]:
    """Losses of four steps of a Lightning trainer."""
    import lightning

    losses = []

    class Task(lightning.LightningModule):  # type: ignore[misc]  # not installed for mypy
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:
            if strategy != "auto":
                mesh = interop.mesh_from_torch(self.device_mesh["tensor_parallel"])
                parallelize_module(self.model, mesh, dict(model.tp_plan))

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            return loss

        def configure_gradient_clipping(
            self, *_: Any, gradient_clip_val: float | None = None, **__: Any
        ) -> None:
            if gradient_clip_val is not None:
                clip_grad_norm_(self.parameters(), gradient_clip_val)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
        "use_distributed_sampler",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=4,
        gradient_clip_val=clip,
        **dict.fromkeys(off, False),
    )
    rows: Any = token_batch().repeat(2, 1)
    trainer.fit(Task(), torch.utils.data.DataLoader(rows, batch_size=2))
    return losses


@on_ranks(2, timeout=200)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_model_parallel_strategy(clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    plain = build_model().train()
    model = copy.deepcopy(plain)
    # Lightning starts no processes of its own
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    losses = fit(
        model, ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), 2, clip
    )
    expected = fit(plain, "auto", 1, clip)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-10)
    assert len(losses) == 4
    assert any(isinstance(param, DTensor) for param in model.parameters())
    whole = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        value = full_tensor(param)
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-10)
