"""The simulated accelerator itself: each kind of event in its record is observed once.

Covers: nothing of the packages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shoal_mesh.testing import on_ranks

from .simulated import Event, is_registered, watched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not is_registered(), reason="needs the simulated accelerator: nox -s device"
    ),
]


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_memory_that_nobody_has_written_is_not_a_number() -> None:
    x = torch.empty(3, device="sim")
    assert type(x) is Tensor and x.cpu().isnan().all()
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="uses freed memory"):
        x.add_(1)
    x.untyped_storage().resize_(12)
    assert x.cpu().isnan().all()


def test_memory_is_counted() -> None:
    before = torch.sim.memory_allocated()  # type: ignore[attr-defined]  # added to torch
    torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]  # as above
    x = torch.zeros(100, device="sim")
    del x
    assert torch.sim.memory_allocated() == before  # type: ignore[attr-defined]  # as above
    peak = torch.sim.max_memory_allocated()  # type: ignore[attr-defined]  # as above
    assert peak == before + 400


def test_there_are_several_devices() -> None:
    assert torch.accelerator.device_count() == 4
    with torch.device("sim:2"):
        there = torch.ones(2)
    assert there.device == torch.device("sim", 2) and (there + 1).device == there.device
    for other in (torch.ones(2, device="sim:1"), torch.ones(2)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            there + other
    with watched() as events:
        assert there.to("sim:1").sum().item() == 2
    assert kinds(events) == ["P2P", "SYNC"]


def test_backward_runs_on_a_thread_of_the_device() -> None:
    x, threads = torch.ones(3, device="sim", requires_grad=True), set()
    y: Any = x * 2
    y.register_hook(lambda grad: threads.add(threading.get_ident()))
    y.sum().backward()
    assert threads and threading.get_ident() not in threads


STALLS: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "item": ("SYNC", lambda x: x.sum().item()),
    "truth": ("SYNC", lambda x: bool(x.sum() > 0)),
    "nonzero": ("SYNC", lambda x: x.nonzero()),
    "mask": ("SYNC", lambda x: x[x > 0]),
    "index_put by a mask": ("SYNC", lambda x: x.index_put_((x > 0,), x.new_ones(()))),
    "equal": ("SYNC", lambda x: torch.equal(x, x)),
    "unique": ("SYNC", lambda x: torch.unique(x)),
    "repeat_interleave": (
        "SYNC",
        lambda x: x.repeat_interleave(torch.ones(3, dtype=torch.int64, device="sim").clone()),
    ),
    "synchronize": ("SYNC", lambda x: torch.accelerator.synchronize()),
    "event": ("SYNC", lambda x: torch.accelerator.current_stream().record_event().synchronize()),
    "from a list": ("H2D", lambda x: torch.tensor([1.0, 2.0], device="sim")),
    "to the device": ("H2D", lambda x: torch.ones(3).to("sim")),
    "by an index of the CPU": ("H2D", lambda x: x[torch.tensor([0, 1])]),
    "to the host": ("D2H", lambda x: x.cpu()),
    "tolist": ("D2H", lambda x: x.tolist()),
    "not blocking, to memory that is not pinned": (
        "D2H",
        lambda x: torch.empty(3).copy_(x, non_blocking=True),
    ),
}
NO_STALLS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0),
    "a scalar of the CPU": lambda x: x * torch.tensor(2.0),
    "index": lambda x: x[torch.zeros(2, dtype=torch.int64, device="sim")],
    "repeat_interleave": lambda x: x.repeat_interleave(2),
    "zeros": lambda x: torch.zeros(3, device="sim"),
    "AdamW": lambda x: torch.optim.AdamW([_with_gradient(x)], foreach=True).step(),
}


def _with_gradient(x: Tensor) -> Tensor:
    param = x.clone().requires_grad_()
    param.grad = torch.ones_like(x)
    return param


@pytest.mark.parametrize("name", STALLS)
def test_a_wait_of_the_host_is_counted_with_its_line(name: str) -> None:
    kind, stall = STALLS[name]
    x = torch.ones(3, device="sim")
    with watched() as events:
        stall(x)
    assert set(kinds(events)) - {"H2D"} == {kind} - {"H2D"} and kind in kinds(events)
    assert all(
        event.line.startswith(("integration_tests/device/test_simulation.py:", "torch/"))
        for event in events
    )


@pytest.mark.parametrize("name", NO_STALLS)
def test_what_needs_no_wait_is_not_counted(name: str) -> None:
    x = torch.ones(3, device="sim")
    with watched() as events:
        NO_STALLS[name](x)
    assert events == []


def test_copies_to_pinned_memory_arrive_when_the_host_has_waited() -> None:
    x, host = torch.ones(3, device="sim"), torch.empty(3).pin_memory()
    assert host.is_pinned() and not torch.empty(3).is_pinned()
    with watched() as events:
        host.copy_(x, non_blocking=True)
        x.zero_()
        assert host.isnan().all()
        torch.accelerator.synchronize()
    assert host.eq(1).all() and kinds(events) == ["D2H later", "SYNC"]


@pytest.mark.parametrize("early", [True, False])
def test_pinned_memory_is_not_written_before_it_has_been_copied(early: bool) -> None:
    host = torch.ones(3).pin_memory()
    with watched() as events:
        x = host.to("sim", non_blocking=True)
        if not early:
            torch.accelerator.synchronize()
        host.zero_()
        torch.accelerator.synchronize()
    assert x.cpu().eq(1).all()
    assert kinds(events) == (
        ["H2D later", "SYNC", "RACE"] if early else ["H2D later", "SYNC", "SYNC"]
    )


def test_random_numbers_are_of_the_device() -> None:
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(torch.randn(4, device="sim").cpu())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ones = torch.ones(50, device="sim")
    dropped = F.dropout(ones, 0.5).cpu()
    assert torch.equal(torch.get_rng_state(), before), "the CPU's stream is another"
    torch.manual_seed(1)
    assert not torch.equal(dropped, 2 * torch.empty_like(ones).bernoulli_(0.5).cpu()), (
        "dropout has a law of its own"
    )


def test_a_module_computes_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3), torch.nn.GELU(), torch.nn.LayerNorm(6))
    x = torch.randn(3, 2, 8)
    expected = model(x)
    expected.sum().backward()
    gradients = [param.grad for param in model.parameters()]
    model.zero_grad()
    got = model.to("sim")(x.to("sim"))
    got.sum().backward()
    torch.testing.assert_close(got.cpu(), expected)
    for param, wanted in zip(model.parameters(), gradients, strict=True):
        assert param.grad is not None and wanted is not None, "all take part"
        torch.testing.assert_close(param.grad.cpu(), wanted)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert (got @ got.transpose(1, 2)).dtype == torch.bfloat16


# --- collectives ----------------------------------------------------------------------------------


def own(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of this rank, on its device."""
    values = torch.arange(torch.Size(shape).numel()).view(shape) + 10 * dist.get_rank()
    return values.to(torch.accelerator.current_accelerator()).to(dtype)


def started(tensor: Tensor, *, async_op: bool = True) -> Any:
    return dist.all_reduce(tensor, async_op=async_op)


@on_ranks(4)
def test_ranks_have_a_device_and_its_backend_each() -> None:
    assert torch.accelerator.current_device_index() == dist.get_rank()
    assert dist.get_backend_config() == "cpu:gloo,sim:simccl"


@on_ranks(4)
def test_what_a_collective_writes_is_not_there_before_it_is_waited_for() -> None:
    x = own(3)
    work = started(x)
    assert x.cpu().isnan().all()
    work.wait()
    assert x.cpu().tolist() == [60, 64, 68]


@on_ranks(4)
@pytest.mark.parametrize(
    "mistake",
    ["input written", "input freed", "output written", "output freed", "never waited for"],
)
def test_mistakes_around_a_collective_are_seen(mistake: str) -> None:
    x, out = own(3), own(12)
    with watched() as events:
        work: Any = dist.all_gather_into_tensor(out, x, async_op=True)
        if mistake.endswith("written"):
            (x if mistake.startswith("input") else out).fill_(0)
        if mistake.endswith("freed"):
            (x if mistake.startswith("input") else out).untyped_storage().resize_(0)
        if mistake == "never waited for":
            del work
        else:
            work.wait()
    assert kinds(events)[:2] == [
        "COLLECTIVE",
        "DROPPED" if mistake == "never waited for" else "RACE",
    ]
    dist.barrier()


@on_ranks(4)
def test_collectives_give_what_they_give_on_the_cpu() -> None:
    rank = dist.get_rank()
    for op in ("SUM", "AVG", "PRODUCT", "MAX", "MIN"):
        x = own(2, 3)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        rows = torch.stack([torch.arange(6.0).view(2, 3) + 10 * other for other in range(4)])
        expected = {"SUM": rows.sum(0), "AVG": rows.mean(0), "PRODUCT": rows.prod(0)}.get(op)
        wanted = (rows.amax(0) if op == "MAX" else rows.amin(0)) if expected is None else expected
        torch.testing.assert_close(x.cpu(), wanted)
    gathered = torch.empty(8, device="sim", dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, own(2, dtype=torch.bfloat16))
    assert gathered.tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
    scattered = torch.empty(1, device="sim")
    dist.reduce_scatter_tensor(scattered, own(4))
    assert scattered.item() == 60 + 4 * rank
    received, sizes = torch.empty(10, device="sim"), [1, 2, 3, 4]
    dist.all_to_all_single(received, own(4 * (rank + 1)), sizes, [rank + 1] * 4)
    assert received.tolist() == [
        10 * other + (other + 1) * rank + i for other in range(4) for i in range(other + 1)
    ]
    x = own(3)
    dist.broadcast(x, 2)
    assert x.tolist() == [20, 21, 22]
    parts = [torch.empty(2, device="sim") for _ in range(4)]
    dist.all_gather(parts, own(2))
    assert parts[3].tolist() == [30, 31]
    if rank < 2:
        x = own(2)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        assert x.tolist() == [0, 1]


@on_ranks(4)
def test_what_nccl_refuses_is_refused() -> None:
    with pytest.raises(TypeError, match="not supported for NCCL"):
        dist.all_reduce(own(2, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="contiguous"):
        dist.all_reduce(own(2, 3).t())
    with pytest.raises(ValueError, match="bitwise"):
        dist.all_reduce(own(2, dtype=torch.int32), dist.ReduceOp.BOR)
