"""How often the host waits for a device: it reads a number of a tensor; on real gloo ranks.

What is counted here on CPU tensors, each read would be a stall on an accelerator.

Covers: shoal_data_parallel/gradients/reduction.py, experts/{expert_forward,token_route}.py,
rules/index/indexing.py, rules/index/data_dependent.py, dispatch/plain_tensors.py,
optim/clip_grad.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from data_parallel_model import (
    batch,
    loss_of,
    mesh_of,
    own,
    same_gradients,
    shard_blocks_and_root,
    two_equal_models,
)
from moe_models import WIDTH, PackedExperts
from shoal_context_parallel import SequenceLayout, context_parallel_unshard
from shoal_data_parallel import fully_shard, replicate
from shoal_dtensor import Placement, Replicate, Shard, clip_grad_norm_, distribute_tensor, local_map
from shoal_mesh import DeviceMesh, init_device_mesh, sums_in_tree
from shoal_mesh.testing import on_ranks
from shoal_tp_styles import ExpertParallel, parallelize_module

READS = (
    "tolist",
    "item",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__getitem__",
)


@contextmanager
def host_reads() -> Iterator[list[str]]:
    """The lines inside the block that read numbers of tensors."""
    found: list[str] = []
    before = {name: getattr(Tensor, name) for name in READS}

    def counted(name: str) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            line = traceback.extract_stack()[-2]
            masks = [each for each in args if isinstance(each, Tensor) and each.dtype == torch.bool]
            if type(self) is Tensor and (name != "__getitem__" or masks):
                found.append(f"{line.filename}:{line.lineno} in {line.name}: {name}")
            return before[name](self, *args, **kwargs)

        return read

    for name in READS:
        setattr(Tensor, name, counted(name))
    try:
        yield found
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)


# Functions that read only where the host computes.
CPU_READERS = ("check_bounds", "_read_from_host_memory")


def stalls(found: list[str]) -> list[str]:
    """The reads that would make an accelerator's host wait."""
    return [line for line in found if not any(reader in line for reader in CPU_READERS)]


# --- steps of data parallelism --------------------------------------------------------------------


def hybrid(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh)
    return fully_shard(model, mesh)


@pytest.mark.parametrize("kind", ["fully_shard", "HSDP", "replicate", "ZeRO-1"])
@on_ranks(4)
def test_no_read_in_a_backward_that_gives_all_gradients(kind: str) -> None:
    mesh = mesh_of(*((2, 2) if kind == "HSDP" else (4, 1)))
    plain, model = two_equal_models()
    if kind == "HSDP":
        hybrid(model, mesh)
    elif kind == "fully_shard":
        shard_blocks_and_root(model, mesh["data"])
    else:
        replicate(model, mesh["data"], shard_optimizer=kind == "ZeRO-1")
    ranks = (
        [t.chunk(4)[torch.distributed.get_rank()] for t in batch(0)]
        if kind == "HSDP"
        else own(mesh, *batch(0))
    )
    for step in range(3):
        loss_of(plain, *batch(0)).backward()
        # gradients of the first are kept, and go with the second's
        model.set_requires_gradient_sync(step != 0)
        loss = loss_of(model, *ranks)
        with host_reads() as found:
            loss.backward()
        assert stalls(found) == []
    same_gradients(plain, model)


class OneOfThreeBranches(nn.Module):
    """Three branches: ranks take one of the first two, and nobody the third."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        out: Tensor = self.branches[branch](x)
        return out


class LayersOfBranches(nn.Module):
    """Layers of branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OneOfThreeBranches() for _ in range(2))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, branch)
        return x


@pytest.mark.parametrize("kind", ["fully_shard", "replicate"])
@on_ranks(4)
def test_one_read_at_the_end_where_a_gradient_is_missing(kind: str) -> None:
    mesh = mesh_of(4, 1)
    plain, model = two_equal_models(LayersOfBranches)
    if kind == "fully_shard":
        for layer in model.layers:
            fully_shard(layer, mesh["data"])
        fully_shard(model, mesh["data"])
    else:
        replicate(model, mesh["data"], bucket_bytes=400)
    rank, x = torch.distributed.get_rank(), torch.ones(1, 6, dtype=torch.float64)
    for each in range(4):
        (plain(x * (each + 1), each % 2).sum() / 4).backward()
    loss = model(x * (rank + 1), rank % 2).sum()
    with host_reads() as found:
        loss.backward()
    assert [line.split()[-1] for line in stalls(found)] == ["tolist"]
    same_gradients(plain, model)


# --- operators ------------------------------------------------------------------------------------


def of_operators(mesh: DeviceMesh) -> dict[str, tuple[Callable[[], Any], list[str]]]:
    """What is called twice, and what the host reads in the second call."""
    generator = torch.Generator().manual_seed(0)
    x = distribute_tensor(torch.randn(7, 5, generator=generator), mesh, [Shard(0)])
    at = distribute_tensor(torch.tensor([3, 0, 6]), mesh, [Replicate()])
    rows = distribute_tensor(torch.ones(3, 5), mesh, [Replicate()])
    ids = distribute_tensor(torch.tensor([3, 0, 6, 6, 1, 2]), mesh, [Shard(0)])
    doubled, whole = (
        local_map(lambda local: local * 2, out_placements=[placement])
        for placement in (Shard(0), Replicate())
    )
    layout = SequenceLayout.head_tail(16, 4)
    tokens = layout.shard(torch.arange(16), 0, mesh.get_local_rank())
    return {
        "index by a list": (lambda: x[[3, 0]], []),
        "index_put": (lambda: x.index_put((at,), rows), []),
        "index_put that adds": (lambda: x.index_put((at,), rows, accumulate=True), []),
        # how many there are, here and on other ranks
        "a mask": (lambda: x[x > 0], ["nonzero", "tolist"]),
        "masked_select": (lambda: x.masked_select(x > 0), ["nonzero", "tolist"]),
        "histc": (lambda: x.histc(4), ["tolist"]),
        "equal": (lambda: torch.equal(x, x), ["item"]),
        "allclose": (lambda: torch.allclose(x, x), ["item"]),
        "one_hot": (lambda: functional.one_hot(ids, 7), []),
        "local_map of uneven shards": (lambda: doubled(x), ["tolist"]),
        "local_map of replicas": (lambda: whole(at), ["tolist"]),
        "context_parallel_unshard": (
            lambda: context_parallel_unshard(mesh, [tokens], [0], layout),
            ["tolist"],
        ),
    }


@on_ranks(4)
def test_reads_of_operators() -> None:
    seen, expected = {}, {}
    for name, (call, reads) in of_operators(init_device_mesh("cpu", (4,))).items():
        call()
        with host_reads() as found:
            call()
        seen[name] = [line.split()[-1] for line in stalls(found)]
        expected[name] = reads
    assert seen == expected


@pytest.mark.parametrize("exact", [False, True])
@on_ranks(4)
def test_reads_of_clipping(exact: bool) -> None:
    weight = distribute_tensor(
        torch.ones(7, 5), init_device_mesh("cpu", (4,)), [Shard(0)]
    ).requires_grad_()
    weight.grad = distribute_tensor(torch.ones(7, 5), weight.device_mesh, [Shard(0)])
    with sums_in_tree() if exact else nullcontext():
        for fails, reads in (
            (False, ["tolist"] if exact else []),
            (True, ["tolist", "__bool__"][not exact :]),
        ):
            with host_reads() as found:
                clip_grad_norm_([weight], 1.0, error_if_nonfinite=fails)
            assert [line.split()[-1] for line in found] == reads


# --- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
@pytest.mark.parametrize("capacity", [None, 1.0])
@on_ranks(4)
def test_one_read_of_experts(layout: Placement, capacity: float | None) -> None:
    torch.manual_seed(0)
    experts = PackedExperts(8)
    style = ExpertParallel(input_layouts=layout, capacity_factor=capacity)
    parallelize_module(experts, init_device_mesh("cpu", (4,)), style)
    x = torch.randn(6, WIDTH, requires_grad=True)
    chosen, weights = torch.randint(8, (6, 2)), torch.rand(6, 2)
    with host_reads() as found:
        experts(x, chosen, weights).sum().backward()
    assert [line.split()[-1] for line in found] == ["tolist"]
