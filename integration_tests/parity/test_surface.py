"""Uses of torch's DTensor work with shoal's, and docs/dtensor_parity.md has every name."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal_mesh.testing import fake_world

pytestmark = pytest.mark.parity


def square(t: Any) -> Any:
    return (t * t).sum()


def hooked(x: Any, name: str) -> Any:
    seen: list[Any] = []
    leaf = x.requires_grad_()
    getattr(leaf, name)(lambda given: seen.append(given.shape))
    square(leaf).backward()
    assert seen == [leaf.shape] and leaf.grad.placements == leaf.placements
    return leaf.grad


def twice(x: Any) -> Any:
    leaf = x.requires_grad_()
    (first,) = torch.autograd.grad((leaf**3).sum(), leaf, create_graph=True)
    return torch.autograd.grad(square(first), leaf)[0]


def checkpointed(x: Any) -> Any:
    leaf = x.requires_grad_()
    torch.utils.checkpoint.checkpoint(square, leaf, use_reentrant=False).backward()
    return leaf.grad


USES: dict[str, Callable[[Any], Any]] = {
    "vmap": torch.vmap(lambda row: row * 2),
    "vmap over columns": torch.vmap(lambda column: column.sum(), in_dims=1),
    "func.grad": torch.func.grad(square),
    "func.vjp": lambda x: torch.func.vjp(square, x)[1](torch.tensor(1.0)),
    "func.jvp": lambda x: torch.func.jvp(lambda t: t * 2, (x,), (x,)),
    "func.jacrev": torch.func.jacrev(lambda t: t.sum(0)),
    "func.hessian": torch.func.hessian(square),
    "functional_call": lambda x: torch.func.functional_call(torch.nn.ReLU(), {}, (x,)),
    "autograd.grad": lambda x: torch.autograd.grad(square(x.requires_grad_()), x)[0],
    "double backward": twice,
    "register_hook": lambda x: hooked(x, "register_hook"),
    "register_post_accumulate_grad_hook": lambda x: hooked(x, "register_post_accumulate_grad_hook"),
    "checkpoint": checkpointed,
    "to(dtype)": lambda x: x.to(torch.float64),
    "to(device)": lambda x: x.to("meta"),
    "cpu": lambda x: x.cpu(),
    "double": lambda x: x.double(),
    "data": lambda x: x.data,
    "len": len,
    "bool": lambda x: bool(x.sum() > 0),
    "contiguous": lambda x: x.contiguous(),
    "new_zeros": lambda x: x.new_zeros(3),
    "is_pinned": lambda x: x.is_pinned(),
}


def made(mesh_module: str, module: str) -> Any:
    mesh = importlib.import_module(mesh_module).init_device_mesh("cpu", (4,))
    peer = importlib.import_module(module)
    return peer.distribute_tensor(
        torch.linspace(0, 1, 12).view(4, 3), mesh, [peer.Shard(0)], src_data_rank=None
    )


@pytest.mark.parametrize("name", USES)
def test_what_torchs_can_do_ours_can(name: str) -> None:
    with fake_world(4), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = USES[name](made("torch.distributed.device_mesh", "torch.distributed.tensor"))
        except Exception as error:  # whatever torch's own raises
            pytest.skip(f"torch's own cannot: {type(error).__name__}")
        got = USES[name](made("shoal_mesh", "shoal_dtensor"))
    if isinstance(expected, torch.Tensor):
        assert (got.shape, got.dtype, got.device) == (
            expected.shape,
            expected.dtype,
            expected.device,
        )


def test_the_page_speaks_of_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dtensor_parity.md").read_text()
    for module in (
        "torch.distributed.tensor",
        "torch.distributed.tensor.experimental",
        "torch.distributed.tensor.debug",
    ):
        missing = [name for name in importlib.import_module(module).__all__ if name not in page]
        assert not missing, f"{module}: {missing}"
