"""No alarm on correct programs: the random training steps of the hunt, certified.

Covers: shoal_lab on styles, fully_shard, replicate, DTensors, checkpoints and optimizers together.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest
from integration_tests.random_training import compose
from integration_tests.random_training.compose import Program
from integration_tests.random_training.train import Training

from shoal_lab import certify
from shoal_mesh import init_device_mesh

# Programs that torch itself refuses on one device.
VOID = re.compile("use_reentrant=True")
FAST = (0, 3, 7, 12)


def program_of(seed: int) -> Program:
    """Return a program that trains one model.

    A program that resumes loads another model in the middle, on ranks only: on one device it goes
    on with the same one, so its steps are not those of one program.
    """
    return replace(compose(seed), resume=None)


def axes_of(seed: int) -> dict[str, int]:
    """Return the mesh of a program."""
    program = program_of(seed)
    names = ("replica", "data") if program.parallel == "hybrid" else ("data", "tensor")
    return dict(zip(names, program.mesh, strict=True))


def train(mesh: dict[str, int], seed: int) -> None:
    """Run one random training on the ranks of a mesh, or on one device."""
    device_mesh = None
    if prod(mesh.values()) > 1:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    Training(program_of(seed), device_mesh).run()


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in range(200)]
)
def test_a_correct_program_raises_no_alarm(seed: int) -> None:
    try:
        report = certify(train, meshes=[axes_of(seed)], sizes={"seed": seed}, shrink=False)
    except RuntimeError as error:
        if VOID.search(str(error)) is None:
            raise
        return
    assert report.passed, f"{program_of(seed)}\n{report}"
    assert report.results[0].compared > 10
