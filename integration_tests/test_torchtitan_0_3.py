"""torchtitan 0.3, its imports changed to shoal's, trains on meshes like one process on torch.

Covers: shoal_dtensor: migrate.py; shoal_data_parallel: parameters/declared_layouts.py.

`python -m shoal_dtensor.migrate --write` rewrites a copy, and no line is changed by hand. The
environment variable TORCHTITAN_0_3 is the folder that has torchtitan and what it imports:
`pip install --no-deps --target FOLDER torchtitan==0.3.0 spmd_types==0.2.3 torch_checkpointing`.
All runs start from a checkpoint that one process on torch has written, and compute in float64. With
`spmd_types`, the default, modules compute with plain tensors; with the other two backends, with
DTensors. Pipelines need a method of torch 2.14, and so do torch's own runs with `spmd_types`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from integration_tests import titan
from integration_tests.titan import migrated, train
from integration_tests.titan_rank import BATCH, Run
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

FOLDER = os.environ.get("TORCHTITAN_0_3", "")
PROGRAM = "integration_tests.titan_rank_0_3"
BAR = 1e-11
STEPS = 3

# meshes of torchtitan 0.2 whose entries of the configuration have the same names
SHARED = (
    "fsdp4",
    "fsdp2 x tp2",
    "hsdp2x2",
    "ddp4",
    "tp4",
    "hsdp2x2 x tp2",
    "fsdp2 x tp2, accumulated",
    "pp2 x fsdp2",
    "pp2 x fsdp2, interleaved",
)
# torchtitan has context parallelism without flex attention for "partial_dtensor" alone
WITH_CONTEXT = ("cp2", "cp2 x fsdp2", "cp2 x tp2")
MESHES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    **{name: titan.MESHES[name] for name in (*SHARED, *WITH_CONTEXT)},
    "tp4 without sequence parallel": (
        4,
        titan.degrees(tp=4) | {"parallelism.enable_sequence_parallel": False},
    ),
    "fsdp2 x tp2, checkpointed": (
        4,
        titan.degrees(shard=2, tp=2) | {"activation_checkpoint": "full"},
    ),
    "fsdp2 x tp2, selective": (
        4,
        titan.degrees(shard=2, tp=2) | {"activation_checkpoint": "selective"},
    ),
}
WITH_DTENSORS = ("fsdp2 x tp2", "hsdp2x2", "tp4")
CASES = [
    *[("spmd_types", mesh) for mesh in MESHES if mesh not in WITH_CONTEXT],
    *[("full_dtensor", mesh) for mesh in WITH_DTENSORS],
    *[("partial_dtensor", mesh) for mesh in (*WITH_DTENSORS, *WITH_CONTEXT)],
]
has_microbatch_arguments = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not FOLDER, reason="needs torchtitan 0.3: nox -s torchtitan"),
]


@dataclass
class Stacks:
    """Folders of torchtitan on torch and on shoal, and a checkpoint that all runs start from."""

    work: Path
    seed: str
    changed_lines: int

    def run(self, stack: str, ranks: int, config: Mapping[str, Any]) -> list[list[float]]:
        """Return (loss, norm, seconds) of each step."""
        packages = {"torch": [FOLDER], "shoal": [str(self.work / "port"), FOLDER]}[stack]
        out = self.work / f"run{len([*self.work.iterdir()])}"
        out.mkdir()
        run = Run(packages, "llama3", {"n_layers": 4}, dict(config), self.seed, str(out), STEPS)
        return train(run, ranks, out, PROGRAM)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    work = tmp_path_factory.mktemp("titan")
    changed_lines = migrated(Path(FOLDER) / "torchtitan", work / "port", by_hand=())
    seed = Run([FOLDER], "llama3", {"n_layers": 4}, {}, str(work / "seed"), None)
    config = {"checkpoint.create_seed_checkpoint": True, "checkpoint.initial_load_path": None}
    train(replace(seed, config=config), 1, work, PROGRAM)
    return Stacks(work, seed.seed, changed_lines)


@pytest.fixture(scope="module")
def alone(stacks: Stacks) -> list[list[float]]:
    """Losses and norms of one process on torch."""
    return stacks.run("torch", 1, {"training.local_batch_size": BATCH})


def assert_equal(found: list[list[float]], expected: list[list[float]]) -> None:
    for (loss, norm, _), (expected_loss, expected_norm, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=BAR)
        assert norm == pytest.approx(expected_norm, rel=BAR)


@pytest.mark.parametrize(("backend", "mesh"), CASES)
def test_training_is_that_of_one_process(
    backend: str, mesh: str, stacks: Stacks, alone: list[list[float]]
) -> None:
    ranks, config = MESHES[mesh]
    if "pp2" in mesh and not has_microbatch_arguments:
        pytest.skip("torchtitan 0.3 passes microbatches to schedules of torch 2.14")
    found = stacks.run("shoal", ranks, {**config, "parallelism.spmd_backend": backend})
    assert_equal(found, alone)


def test_training_is_that_of_torch_on_the_same_mesh(stacks: Stacks) -> None:
    ranks, config = MESHES["fsdp2 x tp2"]
    config = {**config, "parallelism.spmd_backend": "partial_dtensor"}
    assert_equal(stacks.run("shoal", ranks, config), stacks.run("torch", ranks, config))


def test_the_command_changes_imports_alone(stacks: Stacks) -> None:
    assert 0 < stacks.changed_lines < 200
