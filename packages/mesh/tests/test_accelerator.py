"""Covers: accelerator.py: on machines with accelerators as torch describes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal_mesh.accelerator import (
    accelerator,
    default_backend,
    device_count,
    module_of,
    own_device,
    set_own_device,
)


def pretend(patch: pytest.MonkeyPatch, kind: str | None, count: int = 4) -> None:
    there = None if kind is None else torch.device(kind)
    patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
    patch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("mps", "gloo"), (None, "gloo")],
)
def test_ranks_get_the_backend_of_their_accelerator(
    kind: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, kind)
    assert default_backend(4) == backend
    assert default_backend(5) == "gloo", "fewer devices than ranks"
    own = backend != "gloo"
    assert accelerator() == (kind if own else None) and device_count() == (4 if own else 0)


def test_a_rank_gets_a_device_where_its_group_has_the_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    module: Any = torch.xpu
    monkeypatch.setattr(module, "set_device", chosen.append)
    pretend(monkeypatch, "xpu", 2)
    for backend in ("xccl", "cpu:gloo,xpu:xccl", "gloo", "fake"):
        set_own_device(3, backend)
    assert chosen == [1, 1]
    monkeypatch.setattr(module, "current_device", lambda: 1)
    assert own_device("xpu") == torch.device("xpu", 1)


def test_devices_without_a_module_have_none() -> None:
    assert module_of("meta") is None
    assert own_device("meta") == torch.device("cpu")
