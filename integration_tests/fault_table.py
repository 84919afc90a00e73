"""Errors on all ranks when one rank fails: runs faults on real ranks and writes docs/faults.md.

`python integration_tests/fault_table.py` writes the page; with names of faults it prints their
rows. Rank 1 of three is at fault, or rank 0 where the fault says so; the timeout of the process
group is 4 seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# random operators and optimizers need it: ranks find it imported, so no fault waits for that
import torch._dynamo
import torch.distributed as dist

from shoal_dtensor import DTensor, Replicate, Shard, distribute_tensor, rand
from shoal_mesh import (
    Comm,
    all_gather,
    all_reduce,
    all_to_all_v,
    broadcast,
    check_replicas,
    init_device_mesh,
    lockstep,
    purpose,
    restart_world,
)
from shoal_mesh.errors import RankError
from shoal_mesh.testing import RankPool

PAGE = Path(__file__).parent.parent / "docs" / "faults.md"
TIMEOUT = 4.0
# seconds within which every other rank has raised
LIMIT = 10.0
Fault = Callable[[bool, Comm], object]


def _signal(number: int) -> Fault:
    def fault(alone: bool, comm: Comm) -> object:
        if alone:
            os.kill(os.getpid(), number)
        return all_reduce(torch.ones(8), comm)

    return fault


def _raising(error: BaseException) -> Fault:
    def fault(alone: bool, comm: Comm) -> object:
        if alone:
            raise error
        return all_reduce(torch.ones(8), comm)

    return fault


def _exits(alone: bool, comm: Comm) -> object:
    if alone:
        os._exit(3)
    return all_reduce(torch.ones(8), comm)


def _stays_away(alone: bool, comm: Comm) -> object:
    if alone:
        time.sleep(LIMIT)
    return all_reduce(torch.ones(8), comm)


def _in_redistribute(alone: bool, comm: Comm) -> object:
    x = distribute_tensor(torch.ones(6), init_device_mesh("cpu", (3,)), [Shard(0)])
    if alone:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.redistribute(placements=[Replicate()])


def _in_mesh(alone: bool, comm: Comm) -> object:
    if alone:
        os.kill(os.getpid(), signal.SIGKILL)
    return init_device_mesh("cpu", (3,), mesh_dim_names=("other",))


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Fault:
    return lambda alone, comm: init_device_mesh(
        "cpu", shape if alone else (3,), mesh_dim_names=names if alone else ("dp",)
    )


def _in_restart(alone: bool, comm: Comm) -> object:
    if alone:
        os.kill(os.getpid(), signal.SIGKILL)
    return restart_world()


def _swapped(alone: bool, comm: Comm) -> None:
    first, second = torch.ones(3), torch.zeros(3)
    with lockstep(timeout=TIMEOUT):
        if alone:
            all_reduce(second, comm)
        all_reduce(first, comm)
        all_reduce(second, comm)


def _swapped_in_a_loop(alone: bool, comm: Comm) -> None:
    with lockstep(timeout=TIMEOUT):
        for what in ("second", "first") if alone else ("first", "second"):
            with purpose(what):
                all_reduce(torch.ones(3), comm)


def _other_sharding(alone: bool, comm: Comm) -> None:
    x = DTensor.from_local(torch.ones(3, 3), init_device_mesh("cpu", (3,)), [Shard(int(alone))])
    with lockstep(timeout=TIMEOUT):
        x.redistribute(placements=[Replicate()])


def _leaves_lockstep(alone: bool, comm: Comm) -> object:
    with lockstep(timeout=TIMEOUT):
        return None if alone else all_reduce(torch.ones(3), comm)


def _in_lockstep(fault: Fault) -> Fault:
    def run(alone: bool, comm: Comm) -> object:
        with lockstep(timeout=TIMEOUT):
            return fault(alone, comm)

    return run


def _other_seed(alone: bool, comm: Comm) -> object:
    mesh = init_device_mesh("cpu", (3,))
    rand(6, device_mesh=mesh, placements=[Shard(0)])
    torch.manual_seed(int(alone))
    with lockstep(timeout=TIMEOUT):
        return rand(6, device_mesh=mesh, placements=[Shard(0)])


def _other_parameters(alone: bool, comm: Comm) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model(torch.ones(4)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.2 if alone else 0.1).step()
    check_replicas(model.state_dict(), comm, "the model")


def _large_and_small(alone: bool, comm: Comm) -> object:
    return all_gather(torch.ones(1 << 10 if alone else 1 << 20), comm, async_op=True).wait()


def _expects_more(alone: bool, comm: Comm) -> object:
    all_to_all_v(torch.ones(6), comm, (2, 2, 2), (2, 2, 3) if alone else (2, 2, 2))
    # the others have what they expected, and hear of it here
    return all_reduce(torch.ones(1), comm)


def _other_collective(alone: bool, comm: Comm) -> object:
    return (all_gather if alone else all_reduce)(torch.ones(8), comm)


def _other_dtype(alone: bool, comm: Comm) -> object:
    return all_reduce(torch.ones(8).to(torch.float64 if alone else torch.int32), comm)


def _other_reduction(alone: bool, comm: Comm) -> object:
    return all_reduce(torch.ones(4), comm, "max" if alone else "sum")


def _other_length_above_1_mib(alone: bool, comm: Comm) -> object:
    return all_gather(torch.ones((1 << 20) + 4 * alone), comm, async_op=True).wait()


def _other_length_by_gloo(alone: bool, comm: Comm) -> object:
    return all_reduce(torch.ones(8 + 8 * alone, dtype=torch.int32), comm, "bor")


def _other_shape(alone: bool, comm: Comm) -> object:
    return all_gather(torch.ones(6 if alone else 4), comm)


SHARED: dict[str, Fault] = {
    "is killed (SIGKILL)": _signal(signal.SIGKILL),
    "is stopped (SIGSTOP)": _signal(signal.SIGSTOP),
    "crashes (SIGSEGV)": _signal(signal.SIGSEGV),
    "aborts (SIGABRT)": _signal(signal.SIGABRT),
    "exits": _exits,
    "raises ValueError": _raising(ValueError("wrong data")),
    "is out of memory": _raising(MemoryError("12 GiB")),
    "is interrupted": _raising(KeyboardInterrupt()),
    "stays away": _stays_away,
    "starts another collective": _other_collective,
    "has another dtype": _other_dtype,
    "has another shape": _other_shape,
    "has another reduction": _other_reduction,
    "has another root": lambda alone, comm: broadcast(torch.ones(4), comm, 2 if alone else 0),
    "expects another number of elements": _expects_more,
    "has another length above 1 MiB": _other_length_above_1_mib,
    "has a small message, the others a large one": _large_and_small,
    "has another length in a reduction that gloo does": _other_length_by_gloo,
    "passes another mesh shape": _mesh((3, 1), ("dp", "tp")),
    "passes another axis name": _mesh((3,), ("tp",)),
    "is killed before it makes a mesh": _in_mesh,
    "is killed before a redistribution": _in_redistribute,
    "is killed before restart_world": _in_restart,
    "swaps two equal collectives, in lockstep": _swapped,
    "swaps two equal collectives of one line, in lockstep": _swapped_in_a_loop,
    "has S(1) where the others have S(0), in lockstep": _other_sharding,
    "leaves the lockstep block": _leaves_lockstep,
    "raises in the lockstep block": _in_lockstep(_raising(ValueError("wrong data"))),
    "gathers 6 elements, the others 4, in lockstep": _in_lockstep(_other_shape),
    "has another seed, in lockstep": _other_seed,
    "has other parameters after a step": _other_parameters,
}
GLOO = (
    "is killed (SIGKILL)",
    "is stopped (SIGSTOP)",
    "exits",
    "stays away",
    "starts another collective",
    "has another shape",
    "swaps two equal collectives, in lockstep",
    "leaves the lockstep block",
    "raises in the lockstep block",
    "gathers 6 elements, the others 4, in lockstep",
)
CASES = [("shared memory", name, 1) for name in SHARED] + [("gloo", name, 1) for name in GLOO]
CASES += [(transport, "is killed (SIGKILL)", 0) for transport in ("shared memory", "gloo")]


def _seen(error: BaseException | None) -> dict[str, Any]:
    name = "nothing" if error is None else type(error).__name__
    return {
        "error": name,
        "ranks": list(getattr(error, "ranks", ())),
        "text": "" if error is None else str(error),
    }


def run_fault(transport: str, name: str, culprit: int, folder: str) -> None:
    """On a rank: run a fault, and write down what this rank saw."""
    if transport == "gloo":
        os.environ["SHOAL_SHARED_MEMORY"] = "0"
    restart_world(timeout=TIMEOUT)
    comm, rank = init_device_mesh("cpu", (3,)).comm(0), dist.get_rank()
    seen: dict[str, Any]
    start, seen = time.monotonic(), _seen(None)
    try:
        # a rank that is late may hear of the fault in this one
        all_reduce(torch.ones(1), comm)
        SHARED[name](rank == culprit, comm)
    except BaseException as error:
        seen = _seen(error)
        if rank == culprit:
            raise
    finally:
        seen["seconds"] = time.monotonic() - start
        Path(folder, str(rank)).write_text(json.dumps(seen))
    # the others see the fault, not the end of this rank
    time.sleep(0.5)


def observed(transport: str, name: str, culprit: int) -> dict[int, dict[str, Any]]:
    """What the ranks that are not at fault have written, by rank."""
    with tempfile.TemporaryDirectory() as folder, RankPool(3) as pool:
        with contextlib.suppress(RankError):  # of the rank at fault
            pool.run(run_fault, transport, name, culprit, folder, timeout=LIMIT + 2)
        others = [rank for rank in range(3) if rank != culprit and Path(folder, str(rank)).exists()]
        return {rank: json.loads(Path(folder, str(rank)).read_text()) for rank in others}


def mentions(text: str, rank: int) -> bool:
    """Whether a text names a rank."""
    return f"rank {rank}" in text or f"ranks [{rank}]" in text


def row(transport: str, name: str, culprit: int) -> str:
    """A fault as a row of the table."""
    seen = list(observed(transport, name, culprit).values())
    errors = ", ".join(sorted({str(each["error"]) for each in seen})) or "-"
    seconds = max((float(str(each["seconds"])) for each in seen), default=0.0)
    named = "yes" if seen and all(each["ranks"] == [culprit] for each in seen) else "no"
    if named == "no" and seen and all(mentions(str(each["text"]), culprit) for each in seen):
        named = "in the text"
    text = (
        " ".join(str(seen[0]["text"]).split())[:150].replace("|", "/")
        if seen
        else "the ranks ended"
    )
    seen_by = f"{len(seen)} of 2"
    figures = f"{seen_by} | {errors} | {seconds:.1f} | {named} | {text}"
    return f"| rank {culprit} {name} | {transport} | {figures} |"


COLUMNS = (
    "| fault | transport | ranks that raised | error | after seconds | named "
    "| message of the first rank |"
)
HEAD = f"""# Faults

Errors on the other ranks when one of three ranks fails. The timeout of the process group is
{TIMEOUT:g} seconds. The failed ranks are in `error.ranks`, or in the text of the error. The
transport `gloo` is used between hosts, or with `SHOAL_SHARED_MEMORY=0`. If a message has another
length than expected, gloo aborts the receiving process in one of its threads; the other ranks name
that process, and list the collective that each of them had started. Only `lockstep()` detects the
difference before anything is sent.

This page is generated: `python integration_tests/fault_table.py`.

{COLUMNS}
|---|---|---|---|---|---|---|
"""


def main(names: list[str]) -> None:
    """Write the page, or print the rows of some faults."""
    rows = []
    for case in CASES:
        if not names or case[1] in names:
            rows.append(row(*case))
            print(rows[-1], flush=True)
    if not names:
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
