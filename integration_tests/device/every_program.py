"""All programs by name, run on a pool of four ranks."""

from __future__ import annotations

from functools import cache

from shoal_mesh.testing import rank_pool

from .layers import LAYERS
from .operators import operators, operators_of_values, random_operators, redistribution
from .programs import Measure, Program, measured
from .training import TRAININGS

RANKS = 4
# What torch has not, or draws by offsets, which the simulated generator has not.
OURS_ALONE = {
    "random operators",
    "linear_cross_entropy",
    *(name for name in LAYERS if "context" in name or "expert" in name),
}
PROGRAMS: dict[str, Program] = {
    "operators": operators,
    "operators that need values": operators_of_values,
    "redistribution": redistribution,
    "random operators": random_operators,
    **TRAININGS,
    **LAYERS,
}


def _on_a_rank(name: str, library: str) -> dict[str, Measure]:
    return measured(PROGRAMS[name], library)


@cache
def measures(name: str, library: str = "shoal") -> list[dict[str, Measure]]:
    """What each rank measured of a program, by part."""
    return rank_pool(RANKS).run(_on_a_rank, name, library)
