"""How many source files a reader follows through each of seven calls.

Everything else consists of these calls.

`python -m integration_tests.test_ways` prints them; with `--files` their names too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor, nn

from shoal_data_parallel import fully_shard
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import DeviceMesh, all_reduce, init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import ColwiseParallel, parallelize_module, verify

# Files, and pairs of files of which one calls into the other. The commit that raises one says why.
BOUNDS = {
    "cached operator": (1, 0),
    "operator's first call": (14, 24),
    "redistribution": (18, 19),
    "column linear, forward": (3, 3),
    "column linear, backward": (3, 2),
    "fully_shard unit, forward": (17, 27),
    "fully_shard unit, backward": (22, 35),
    "verify": (25, 44),
    "all-reduce": (8, 8),
}


def files_of(call: Callable[[], object]) -> tuple[list[str], set[tuple[str, str]]]:
    """The shoal files whose functions a call enters in order, and pairs (caller's file, file)."""
    files: dict[str, None] = {}
    pairs = set()

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not is_shoal(frame):
            return
        files[name := short(frame)] = None
        caller = frame.f_back
        while caller is not None and not is_shoal(caller):
            caller = caller.f_back
        if caller is not None and short(caller) != name:
            pairs.add((short(caller), name))

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files), pairs


def is_shoal(frame: FrameType) -> bool:
    """Whether it is a function of a package."""
    return "/src/shoal_" in frame.f_code.co_filename


def short(frame: FrameType) -> str:
    """The file of its function, as `shoal_mesh/events.py`."""
    return frame.f_code.co_filename.partition("/src/")[2]


def ways(mesh: DeviceMesh) -> Iterator[tuple[str, Callable[[], object]]]:
    """The calls, each when what it builds on first use has been built."""
    rows = DTensor.from_local(torch.ones(2, 8), mesh, [Shard(0)])
    for _ in range(2):
        rows + rows
        rows.redistribute(placements=[Replicate()])
    yield "cached operator", lambda: rows + rows
    columns = DTensor.from_local(torch.ones(8, 2), mesh, [Shard(1)])
    rows * rows
    yield "operator's first call", lambda: columns * columns
    yield "redistribution", lambda: rows.redistribute(placements=[Replicate()])

    linear = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    yield from forward_and_backward("column linear", linear)
    yield from forward_and_backward("fully_shard unit", fully_shard(nn.Linear(8, 8), mesh=mesh))
    model = nn.Sequential(nn.Linear(8, 8))
    yield "verify", lambda: verify(model, {"0": ColwiseParallel()}, mesh, torch.ones(2, 8))
    comm = mesh.comm(0)
    all_reduce(torch.ones(2), comm)
    yield "all-reduce", lambda: all_reduce(torch.ones(2), (mesh, 0))


def forward_and_backward(
    name: str, module: nn.Module
) -> Iterator[tuple[str, Callable[[], object]]]:
    """One pass, each half of it alone."""
    entered: list[Tensor] = []
    for _ in range(2):
        torch.autograd.backward(module(torch.ones(2, 8)).sum())
    yield f"{name}, forward", lambda: entered.append(module(torch.ones(2, 8)))
    yield f"{name}, backward", lambda: torch.autograd.backward(entered.pop().sum())


def counted() -> Iterator[tuple[str, list[str], set[tuple[str, str]]]]:
    """The calls, with what `files_of` says of each."""
    with fake_world(4):
        for name, call in ways(init_device_mesh("cpu", (4,))):
            yield name, *files_of(call)


def test_a_call_stays_within_so_many_files() -> None:
    found = {name: (len(files), len(pairs)) for name, files, pairs in counted()}
    assert {
        name: n for name, n in found.items() if n[0] > BOUNDS[name][0] or n[1] > BOUNDS[name][1]
    } == {}


if __name__ == "__main__":
    for name, files, pairs in counted():
        print(f"{name}: {len(files)} files, {len(pairs)} pairs")
        if "--files" in sys.argv:
            print(*(f"    {file}" for file in files), sep="\n")
