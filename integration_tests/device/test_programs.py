"""The main programs on an accelerator: as on one CPU process.

The host does not wait, except where it is listed here.

Covers: {accelerator,topology}.py, {state,draw,fill}.py: what they do on devices that are neither
the CPU nor CUDA.
"""

from __future__ import annotations

import pytest
import torch

from shoal_mesh.collectives.c10d_transport import C10dTransport
from shoal_mesh.errors import RankError
from shoal_mesh.testing import rank_pool

from .every_program import PROGRAMS, RANKS, measures
from .programs import measured
from .simulated import is_registered

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.accelerator.device_count() < RANKS, reason="needs four accelerators: nox -s device"
    ),
]

# "program: part" -> kind -> how often, on the rank that waits most
Waits = dict[str, dict[str, int]]
# What has to be waited for: a value on the host, a size that values decide, or a file.
NEEDED: Waits = {
    "operators that need values: item": {"SYNC": 1},
    "operators that need values: unique": {"SYNC": 1},
    "operators that need values: bincount": {"SYNC": 1},
    "operators that need values: boolean mask": {"SYNC": 1},
    "operators that need values: masked_select": {"SYNC": 1},
    "operators that need values: nonzero": {"SYNC": 1},
    "operators that need values: torch.equal": {"SYNC": 1},
    "operators that need values: histc": {"D2H": 1},  # the bounds are numbers of the call
    "checkpoint: DCP save": {"SYNC": 1},
    "checkpoint: DCP load": {"H2D": 2, "D2H": 2},
    "checkpoint: save": {"SYNC": 1},
    "checkpoint: save in the background": {"SYNC": 1},
    "checkpoint: load": {"H2D": 2, "D2H": 2},
    "experts, own tokens: forward": {"D2H": 1},
    "experts, replicated tokens: forward": {"D2H": 1},
    "fully_shard, offloaded: backward": {"SYNC": 3},
}
# What need not be. Lower a number with what it counts; at zero remove the line.
NOT_YET: Waits = {}
WAITS = ("H2D", "D2H", "SYNC")
MISTAKES = ("RACE", "DROPPED", "P2P")


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_right_and_the_host_does_not_wait(name: str) -> None:
    ranks = measures(name)
    if not is_registered():
        return  # a real device counts nothing
    events = [event for rank in ranks for measure in rank.values() for event in measure.events]
    assert [event for event in events if event.kind in MISTAKES] == []
    waits: Waits = {}
    for part in ranks[0]:
        most = {kind: max(rank[part].count(kind) for rank in ranks) for kind in WAITS}
        waits[f"{name}: {part}"] = {kind: count for kind, count in most.items() if count}
    lines = sorted({event.line for event in events if event.kind in WAITS})
    listed = {
        part: counts
        for part, counts in {**NEEDED, **NOT_YET}.items()
        if part.startswith(f"{name}: ")
    }
    assert {part: counts for part, counts in waits.items() if counts} == listed, (
        f"the host waits at {lines}"
    )


# Bytes: which gradients this rank has travels with those of a unit.
FLAGS = 512


@pytest.mark.skipif(not is_registered(), reason="a real device's allocator rounds: nox -s device")
@pytest.mark.parametrize(
    "name",
    [
        "fully_shard",
        "fully_shard, uneven",
        "hybrid",
        "fully_shard, bfloat16",
        "tensor parallel x fully_shard",
        "replicate",
    ],
)
def test_the_peak_of_a_backward_is_not_above_torchs(name: str) -> None:
    ours, theirs = (measures(name, library)[0]["backward"] for library in ("shoal", "torch"))
    assert ours.peak <= theirs.peak + FLAGS


# A collective of the transport whose wait is left out, and a program that reads what it has not
# written.
LEFT_OUT = {
    "all_gather": "fully_shard",
    "reduce_scatter": "fully_shard",
    "all_reduce_": "tensor parallel",
    "all_to_all_v": "context parallel, ring",
}


@pytest.mark.skipif(not is_registered(), reason="a real device may be fast enough: nox -s device")
@pytest.mark.parametrize("collective", LEFT_OUT)
def test_a_wait_that_is_left_out_is_seen(collective: str) -> None:
    with pytest.raises(RankError, match="Tensor-likes are not close"):
        rank_pool(RANKS).run(_without_waiting, collective, LEFT_OUT[collective])


def _without_waiting(collective: str, name: str) -> None:
    start = getattr(C10dTransport, collective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(C10dTransport, collective, lambda *args: start(*args) and None)
        measured(PROGRAMS[name], "shoal")
