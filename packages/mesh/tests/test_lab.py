"""Covers: lab/: collectives on ranks of a lab against gloo, for both isolations."""

from __future__ import annotations

import datetime as dt
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

import collective_programs as programs
from shoal_mesh.errors import DeadlockError, LockstepError, MeshError, PeerError
from shoal_mesh.lab.isolation.process_link import ProcessLink
from shoal_mesh.testing import RankPool, lab

ISOLATIONS = ("thread", "process")
isolations = pytest.mark.parametrize("isolation", ISOLATIONS)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@cache
def results_of_gloo() -> list[dict[str, list[Any]]]:
    with RankPool(4, backend="gloo") as pool:
        return pool.run(programs.run_all)


@cache
def results_of_lab(isolation: Any) -> list[dict[str, list[Any]]]:
    return lab(4, isolation).run(programs.run_all)


@isolations
@pytest.mark.parametrize("name", [program.__name__ for program in programs.PROGRAMS])
def test_collectives_have_the_values_of_gloo(name: str, isolation: str) -> None:
    expected = [results[name] for results in results_of_gloo()]
    assert [results[name] for results in results_of_lab(isolation)] == expected


def average_and_factor() -> list[list[float]]:
    rank = dist.get_rank()
    mean = torch.tensor([float(rank), 1.0], dtype=torch.bfloat16) * 2.0**126
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    scaled = torch.tensor([float(rank)])
    dist.all_reduce(scaled, torch._C._distributed_c10d._make_nccl_premul_sum(0.5))
    counts = torch.tensor([rank, -7])
    dist.all_reduce(counts, dist.ReduceOp.AVG)
    lists = [torch.tensor([float(rank + i)]) for i in range(dist.get_world_size())]
    part = torch.zeros(1)
    dist.reduce_scatter(part, lists)
    received = [torch.zeros(1) for _ in lists]
    dist.all_to_all(received, lists)
    return [
        (mean / 2.0**126).tolist(),
        scaled.tolist(),
        counts.tolist(),
        part.tolist(),
        torch.cat(received).tolist(),
    ]


@isolations
def test_collectives_that_gloo_does_not_have(isolation: Any) -> None:
    # a sum of four would be above the range of bfloat16
    for rank, (mean, scaled, counts, part, received) in enumerate(
        lab(4, isolation).run(average_and_factor)
    ):
        assert mean == [1.5, 1.0]
        assert scaled == [3.0]
        assert counts == [1, -7]
        assert part == [6.0 + 4 * rank]
        assert received == [float(r + rank) for r in range(4)]


def large_tensors() -> list[float]:
    """Send more than travels through a socket, often enough that memory is used again."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    totals = []
    for step in range(6):
        # 0.2 MB, which every rank reduces itself, or 0.4 MB, which one rank reduces for all
        tensor = torch.full((50_000 * (1 + step % 2),), float(rank + step))
        work = dist.all_reduce(tensor, async_op=True)
        other = torch.zeros(size * 3_000)
        dist.all_gather_into_tensor(other, torch.full((3_000,), float(rank)))
        work.wait()
        totals.append(tensor[-1].item() + other.sum().item() / 3_000)
    return totals


@isolations
def test_large_tensors(isolation: Any) -> None:
    expected = [6.0 + 4 * step + 6.0 for step in range(6)]
    assert lab(4, isolation).run(large_tensors) == [expected] * 4


def reductions_for_all() -> list[int]:
    """Count the all-reduces that this rank computes for the others, of 0.2 MB and of 0.4 MB."""
    publish = ProcessLink._publish
    published: list[int] = []

    def counted(link: ProcessLink, number: int, totals: Any) -> None:
        published.append(totals[0].numel())
        publish(link, number, totals)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessLink, "_publish", counted)
        for size in (50_000, 100_000):
            dist.all_reduce(torch.ones(size))
    return published


def test_one_rank_reduces_for_all_only_what_is_large() -> None:
    published = lab(4, "process").run(reductions_for_all)
    assert sorted(published) == [[], [], [], [100_000]]


# --- deadlocks, mismatches and failures -----------------------------------------------------------


def other_collective() -> None:
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2))
    else:
        dist.barrier()


def other_size() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank() % 2))


def other_dtype() -> None:
    dist.all_reduce(torch.ones(2, dtype=[torch.float32, torch.float64][dist.get_rank() % 2]))


def other_op() -> None:
    dist.all_reduce(torch.ones(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][dist.get_rank() % 2])


def other_root() -> None:
    dist.broadcast(torch.ones(2), dist.get_rank() % 2)


def short_block() -> None:
    rank = dist.get_rank()
    rows = [1, 2] if rank else [2, 2]
    dist.all_to_all_single(torch.zeros(sum(rows)), torch.ones(4), rows, [2, 2])


def short_message() -> None:
    if dist.get_rank():
        dist.recv(torch.zeros(3), 0)
    else:
        dist.send(torch.zeros(2), 1)


@isolations
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (other_collective, "ranks differ in the collective"),
        (other_size, "ranks differ in the number of elements"),
        (other_dtype, "ranks differ in the dtype"),
        (other_op, "ranks differ in the reduction"),
        (other_root, "ranks differ in the root"),
        (short_block, "rank 1 expects .*1.* from rank 0, which brings .*2"),
        (short_message, r"rank 1 expects .*\[3\] from rank 0, which sends .*\[2\]"),
    ],
)
def test_mismatched_calls_are_named(isolation: Any, program: Any, message: str) -> None:
    with pytest.raises(LockstepError, match=message) as caught:
        lab(2, isolation).run(program)
    text = str(caught.value)
    assert ("rank 0: " in text and "rank 1: " in text) or "ranks 0, 1: " in text
    assert f"in {program.__name__}" in text, "the line of the program"
    assert not isinstance(caught.value, DeadlockError)


def one_returns() -> None:
    if dist.get_rank() != 2:
        dist.barrier()


def two_groups_crossed() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    rank = dist.get_rank()
    if rank < 2:
        dist.all_reduce(torch.ones(1), group=groups[rank])


def both_send_first() -> None:
    rank = dist.get_rank()
    if rank < 2:
        dist.send(torch.ones(1), 1 - rank)
        dist.recv(torch.ones(1), 1 - rank)


def missing_key() -> None:
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().get("never")
    dist.barrier()


@isolations
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (one_returns, r"rank 2 is awaited and does not come\n.*needs rank 2"),
        (two_groups_crossed, r"rank 0: waits in all_reduce .*needs rank 1"),
        (both_send_first, r"rank 0: waits in send .* to rank 1"),
        (missing_key, r"rank 0: waits for get of '.*never' in a store"),
    ],
)
def test_deadlocks_are_named_at_once(isolation: Any, program: Any, message: str) -> None:
    with pytest.raises(DeadlockError, match=message) as caught:
        lab(3, isolation).run(program)
    assert f"in {program.__name__}" in str(caught.value)


def test_a_rank_that_has_returned_is_at_fault() -> None:
    with pytest.raises(DeadlockError) as caught:
        lab(3, "thread").run(one_returns)
    assert caught.value.ranks == (2,)


def polls_for_ever() -> None:
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while not work.is_completed():
            pass


def test_a_vain_poll_is_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="rank 0: polls all_reduce"):
        lab(2, "thread").run(polls_for_ever)


def wait_with_timeout() -> str:
    store = dist.distributed_c10d._get_default_store()
    try:
        store.wait(["never"], dt.timedelta(seconds=30))
    except dist.DistStoreError as error:
        return str(error)
    return "set"


@isolations
def test_a_wait_with_a_timeout_ends_when_no_rank_can_go_on(isolation: Any) -> None:
    for text in lab(2, isolation).run(wait_with_timeout):
        assert "wait timeout" in text and "never" in text


def one_fails() -> None:
    if dist.get_rank() == 1:
        raise KeyError("of rank 1")
    dist.barrier()


@isolations
def test_the_error_of_one_rank_is_raised(isolation: Any) -> None:
    with pytest.raises(KeyError, match="of rank 1"):
        lab(3, isolation).run(one_fails)


def one_is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(PeerError, match="rank 1 has died") as caught:
        lab(3).run(one_is_killed)
    assert caught.value.ranks == (1,)


# --- orders ---------------------------------------------------------------------------------------


def sources() -> list[int]:
    if dist.get_rank():
        dist.send(torch.ones(1), 0)
        return []
    return [dist.recv(torch.zeros(1)) for _ in range(3)]


@isolations
def test_the_seed_decides_whom_a_receive_from_any_rank_gets(isolation: Any) -> None:
    found = set()
    for seed in range(6):
        first, again = (lab(4, isolation, seed).run(sources)[0] for _ in range(2))
        assert first == again, "the seed alone decides"
        found.add(tuple(first))
    assert len(found) > 1 and all(sorted(order) == [1, 2, 3] for order in found)


@isolations
@pytest.mark.parametrize("order", [(3, 1, 2), (2, 3, 1)])
def test_choices_of_a_run_repeat_it(isolation: Any, order: tuple[int, ...]) -> None:
    for seed in range(40):
        ranks = lab(4, "thread", seed)
        if tuple(ranks.run(sources)[0]) == order:
            break
    repeated = lab(4, isolation, order=ranks.choices)
    assert tuple(repeated.run(sources)[0]) == order
    assert repeated.choices == ranks.choices


def test_an_order_is_legal() -> None:
    with pytest.raises(MeshError, match=r"the order demands rank 2 as choice 2.* ranks \[0, 1\]"):
        lab(3, "thread", order=[2, 2]).run(dist.barrier)


ARRIVED: list[int] = []


def arrive() -> None:
    ARRIVED.append(dist.get_rank())
    dist.barrier()


def test_a_forced_order_runs_ranks_in_that_order() -> None:
    for order in ([2, 0, 1], [1, 2, 0]):
        ARRIVED.clear()
        lab(3, "thread", order=order[:2]).run(arrive)
        assert order == ARRIVED


# --- state of ranks -------------------------------------------------------------------------------


def state_of_rank() -> list[Any]:
    rank = dist.get_rank()
    os.environ["SHOAL_TEST_LAB"] = str(rank)
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    torch.manual_seed(rank)
    random.seed(rank)
    torch.set_default_device("meta" if rank else "cpu")
    dist.barrier()
    torch.set_default_device("cpu")
    drawn = [torch.rand(1).item(), random.random(), torch.empty(1).dtype]
    dist.barrier()
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "SHOAL_TEST_LAB"]
    return [*drawn, *(os.environ[name] for name in names), dist.get_rank()]


@isolations
def test_ranks_have_their_own_state(isolation: Any) -> None:
    before = (torch.get_rng_state(), random.getstate(), torch.get_default_dtype())
    for rank, results in enumerate(lab(3, isolation).run(state_of_rank)):
        generator = torch.Generator().manual_seed(rank)
        dtype = torch.float64 if rank else torch.float32
        assert results[0] == torch.rand(1, generator=generator, dtype=dtype).item()
        assert results[1] == random.Random(rank).random()
        assert results[2:] == [dtype, str(rank), str(rank), "3", str(rank), rank]
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_default_dtype())
    assert "SHOAL_TEST_LAB" not in os.environ


def backend_names() -> list[Any]:
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
    group = dist.new_group([0, 1], backend="nccl")
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    config = dist.get_backend_config(group)
    return [dist.get_backend(), dist.get_backend(group), config, tensor.item()]


@isolations
def test_programs_may_ask_for_any_backend(isolation: Any) -> None:
    results = lab(2, isolation, device="cpu").run(backend_names, world=False)
    config = "cpu:gloo,cuda:nccl"
    assert results == [[config, "nccl", "cuda:nccl", 2.0]] * 2


def split_groups() -> list[Any]:
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    halves = dist.split_group(dist.group.WORLD, [[1, 0], [3, 2]])
    quarters = dist.split_group(halves, [[1]], group_desc="of one rank")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=halves)
    members = [quarters and dist.get_process_group_ranks(quarters), dist.get_backend(halves)]
    with pytest.raises(ValueError, match=r"distinct group ranks below 2, got \[2\]"):
        dist.split_group(halves, [[2]])
    with pytest.raises(ValueError, match="cannot be None or empty"):
        dist.split_group(halves, [])
    return [dist.get_process_group_ranks(halves), total.item(), *members]


@isolations
def test_groups_are_split_without_a_device(isolation: Any) -> None:
    results = lab(4, isolation, device="cpu").run(split_groups, world=False)
    assert results == [
        [[0, 1], 1.0, None, "nccl"],
        [[0, 1], 1.0, [1], "nccl"],
        [[2, 3], 5.0, None, "nccl"],
        [[2, 3], 5.0, [3], "nccl"],
    ]


def rank_in_backward() -> list[int]:
    class Ranks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(gradient)
            return gradient * (dist.get_rank() + 1)

    leaf = torch.ones(1, requires_grad=True)
    Ranks.apply(leaf).sum().backward()  # type: ignore[no-untyped-call]  # of torch
    assert leaf.grad is not None
    return leaf.grad.tolist()


@isolations
def test_a_backward_pass_knows_its_rank(isolation: Any) -> None:
    assert lab(3, isolation).run(rank_in_backward) == [[3.0], [6.0], [9.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "at least one rank, got 0"),
        ({"ranks": 2, "isolation": "none"}, "'process' or 'thread', got 'none'"),
        ({"ranks": 2, "device": "tpu"}, "'cpu' or None, got 'tpu'"),
        ({"ranks": 2, "order": [2]}, r"got \[2\]"),
        ({"ranks": "2"}, "a number of ranks, got str '2'"),
        ({"ranks": 2, "seed": None}, "is an integer, got None"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        lab(**arguments)


def test_threads_share_the_main_module() -> None:
    with pytest.raises(MeshError, match="isolation='process'"):
        lab(2, "thread").run_script("train.py")


def start_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.barrier).result()


def test_a_thread_of_a_program_on_threads_is_not_a_rank() -> None:
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        lab(2, "thread").run(start_thread)


def receive_on_a_thread() -> list[float]:
    """Receive from any rank, and read a store, on a thread beside the main one."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():
        dist.send(torch.full((1,), 2.0), 0)
        store.set("later", "3")
        dist.barrier()
        return []
    tensor = torch.zeros(1)
    with ThreadPoolExecutor(1) as pool:
        source = pool.submit(dist.recv, tensor).result()
        value = pool.submit(store.get, "later").result()
    dist.barrier()
    return [tensor.item(), float(source), float(value)]


def test_threads_of_a_rank_that_is_a_process_take_part() -> None:
    assert lab(2).run(receive_on_a_thread) == [[2.0, 1.0, 3.0], []]
