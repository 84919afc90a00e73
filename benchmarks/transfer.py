"""Seconds and peak memory of one transfer of weights.

Its rivals are gather-and-broadcast and a loop over full_tensor.

Run: ``python benchmarks/transfer.py [MEGABYTES]``, 512 by default, on four gloo ranks. Two ranks
train (sharded over rows) and two serve (sharded over columns). With ``--deltas`` it prints the
bytes of ten steps of AdamW at a learning rate of 1e-6 in bfloat16. With ``--overlap [MEGABYTES]``,
128 by default, it prints the seconds of a training step without a transfer, with `run` after it,
and with `start` after it, whose sends go on beside the next forward and backward.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor
from shoal_mesh import DeviceMesh, init_device_mesh, launch
from shoal_transfer import WeightTransfer, describe, plan_transfer

WIDTH = 2048
State = dict[str, torch.Tensor]


def weights(mesh: DeviceMesh, dim: int, megabytes: int, dtype: torch.dtype) -> State:
    """Matrices of the given size together, sharded along a dim."""
    count = max(megabytes * 2**20 // (WIDTH * WIDTH * dtype.itemsize), 1)
    generator = torch.Generator().manual_seed(dim)
    state = {}
    for number in range(count):
        whole = torch.randn(WIDTH, WIDTH, generator=generator).mul_(0.02).to(dtype)
        state[f"layers.{number}.weight"] = distribute_tensor(
            whole, mesh, [Shard(dim)], src_data_rank=None
        )
    return state


def broadcast_whole(source: State | None, target: State | None) -> None:
    """Gather each parameter on rank 0, broadcast it to all, and take the shards from it."""
    names = list(source or target or {})
    dtype = next(iter((source or target or {}).values())).dtype
    for name in names:
        whole = torch.empty(WIDTH, WIDTH, dtype=dtype)
        if source is not None:
            whole = gathered(source[name])
        dist.broadcast(whole, src=0)
        put(target, name, whole)


def full_tensor_loop(source: State | None, target: State | None) -> None:
    """Make each parameter whole on each trainer, and send it whole from one to each server."""
    for name in source or target or {}:
        if source is not None:
            whole = gathered(source[name])
            if dist.get_rank() == 0:
                for server in (2, 3):
                    dist.send(whole, server)
        elif target is not None:
            local = target[name]
            whole = torch.empty(WIDTH, WIDTH, dtype=local.dtype)
            dist.recv(whole, 0)
            put(target, name, whole)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.redistribute(placements=[Replicate()]).to_local().contiguous()


def put(target: State | None, name: str, whole: torch.Tensor) -> None:
    if target is None:
        return
    tensor = target[name]
    assert isinstance(tensor, DTensor)
    columns = WIDTH // 2 * (dist.get_rank() - 2)
    tensor.to_local().copy_(whole[:, columns : columns + WIDTH // 2])


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(run: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - begin


def measure(way: str, megabytes: int) -> tuple[float, float, float]:
    """First and second seconds of a way, and megabytes of memory beyond the weights."""
    trains = dist.get_rank() < 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("side", "rank"))["rank"]
    state = weights(mesh, 0 if trains else 1, megabytes, torch.float32)
    source, target = (state, None) if trains else (None, state)
    before = peak_megabytes()
    if way == "broadcast":
        seconds = [timed(lambda: broadcast_whole(source, target)) for _ in range(2)]
    elif way == "full_tensor":
        seconds = [timed(lambda: full_tensor_loop(source, target)) for _ in range(2)]
    else:
        transfer = transfer_of(source, target, mesh, way)
        versions = iter((1, 2))
        seconds = [timed(lambda: transfer.run(next(versions))) for _ in range(2)]
    return (*seconds, peak_megabytes() - before)  # type: ignore[return-value]  # two seconds


def transfer_of(
    source: State | None, target: State | None, mesh: DeviceMesh, mode: str
) -> WeightTransfer:
    own = describe(source or target or {}, mesh)
    manifests = [None] * 4
    dist.all_gather_object(manifests, own)
    plan = plan_transfer(manifests[0], manifests[2])  # type: ignore[arg-type]  # of all ranks
    deltas = mode == "deltas"
    return WeightTransfer(
        plan,
        source=source,
        target=target,
        mode="staged" if mode == "staged" else "in_place",
        deltas=deltas,
    )


def delta_bytes() -> list[tuple[int, int]]:
    """Bytes sent and bytes of all elements, for ten steps."""
    trains = dist.get_rank() < 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("side", "rank"))["rank"]
    state = weights(mesh, 0 if trains else 1, 64, torch.bfloat16)
    transfer = transfer_of(state if trains else None, None if trains else state, mesh, "deltas")
    transfer.run(0)
    # float32 master weights, as mixed precision has them
    masters = [one.to_local().float() for one in state.values() if isinstance(one, DTensor)]
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    found = []
    for version in range(1, 11):
        if trains:
            for master in masters:
                master.grad = torch.randn_like(master)
            optimizer.step()
            for one, master in zip(state.values(), masters, strict=True):
                assert isinstance(one, DTensor)
                one.to_local().copy_(master)
        sync = transfer.run(version)
        found.append((sync.bytes_sent, sync.bytes_whole))
    return found


STEPS = 4
TOKENS = 256


def seconds_of_steps(way: str, megabytes: int) -> float:
    """Seconds of a step of a chain of layers, of which each rank has all rows of its part."""
    trains = dist.get_rank() < 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("side", "rank"))["rank"]
    state = weights(mesh, 0 if trains else 1, megabytes, torch.float32)
    transfer = transfer_of(state if trains else None, None if trains else state, mesh, "staged")
    locals_ = [one.to_local() for one in state.values() if isinstance(one, DTensor)]
    optimizer = torch.optim.SGD(locals_, lr=1e-6)
    transfer.guard(optimizer)
    # the first transfer allocates
    transfer.run(0)
    begin = time.perf_counter()
    for version in range(1, STEPS + 1):
        if trains:
            for one in locals_:
                one.grad = gradient_of(one)
            optimizer.step()
        if way == "run":
            transfer.run(version)
        elif way == "start":
            transfer.wait()
            transfer.start(version)
    if trains:
        # the forward and backward after the last step, which its transfer is beside
        for one in locals_:
            gradient_of(one)
    transfer.wait()
    return (time.perf_counter() - begin) / STEPS


def gradient_of(local: torch.Tensor) -> torch.Tensor:
    """The gradient of one layer over some tokens."""
    weight = local.detach().requires_grad_()
    inputs = torch.ones(TOKENS, weight.shape[1])
    (gradient,) = torch.autograd.grad((inputs @ weight.t()).sum(), weight)
    return gradient


def print_overlap(megabytes: int) -> None:
    """Print the seconds of a training step without and with transfers."""
    for way in ("none", "run", "start"):
        found = launch(seconds_of_steps, 4, way, megabytes)
        print(
            f"{way}: {max(found[:2]):.2f} s a step on the trainer, {max(found[2:]):.2f} s on the "
            "server"
        )


def main() -> None:
    """Print one line for each way."""
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    if "--overlap" in sys.argv:
        print_overlap(numbers[0] if numbers else 128)
        return
    if "--deltas" in sys.argv:
        for step, (sent, whole) in enumerate(launch(delta_bytes, 4)[0], 1):
            print(f"step {step}: {sent / 2**20:.2f} of {whole / 2**20:.0f} MB, {sent / whole:.1%}")
        return
    megabytes = numbers[0] if numbers else 512
    for way in ("in_place", "staged", "broadcast", "full_tensor"):
        results = launch(measure, 4, way, megabytes)
        first, second, _ = results[0]
        memory = [round(one[2]) for one in results]
        print(f"{way}: first {first:.2f} s, again {second:.2f} s, peak memory beyond {memory} MB")


if __name__ == "__main__":
    main()
