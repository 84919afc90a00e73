"""No alarm on correct programs: the random modules, plans and optimizers of the hunt, certified.

Covers: shoal_lab on DTensors, styles, hooks, checkpoints and optimizers together.
"""

from __future__ import annotations

from math import prod

import pytest
from integration_tests.random_modules.compose import compose
from integration_tests.random_modules.train import run

from shoal_lab import certify
from shoal_mesh import init_device_mesh

AXES = {1: ("tp",), 2: ("dp", "tp")}
# Programs that compute nothing: torch refuses them on one device (a reentrant checkpoint with
# inputs, a hook that gets None, an optimizer without parameters), or an error of shoal on
# all ranks.
REFUSED_ON_ONE_DEVICE = {3, 28, 39, 71, 103}
REFUSED_ON_RANKS = {
    *(16, 23, 53, 66, 69, 70, 75, 78, 84, 86, 87, 90, 91, 95, 97),
    *(102, 106, 108, 113, 114, 116, 120, 125, 129),
}
FAST = (0, 7, 12)


def axes_of(seed: int) -> dict[str, int]:
    """Return the mesh of a program."""
    mesh = compose(seed).mesh
    return dict(zip(AXES[len(mesh)], mesh, strict=True))


def train(mesh: dict[str, int], seed: int) -> None:
    """Run one random program on the ranks of a mesh, or on one device."""
    device_mesh = None
    if prod(mesh.values()) > 1:
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    _, failed = run(compose(seed), device_mesh)
    if failed is not None:
        raise failed


SEEDS = sorted(set(range(131)) - REFUSED_ON_ONE_DEVICE - REFUSED_ON_RANKS)


def test_a_hundred_programs_are_certified() -> None:
    assert len(SEEDS) >= 100


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SEEDS]
)
def test_a_correct_program_raises_no_alarm(seed: int) -> None:
    report = certify(train, meshes=[axes_of(seed)], sizes={"seed": seed}, shrink=False)
    assert report.passed, f"{compose(seed)}\n{report}"
    assert report.results[0].compared >= 4
