"""A plugin of pytest: CPU ranks plan as ranks on accelerators do.

So tests of operators run their other plans.

`python -m pytest -p integration_tests.device.accelerator_costs
packages/dtensor/tests/test_programs.py`
"""

from __future__ import annotations

from typing import Any

from shoal_mesh import topology
from shoal_mesh.testing import RankPool


def use_costs() -> None:
    """From now on links of CPU meshes cost what those between accelerators do, in this process."""
    for links in (topology._LOCAL, topology._REMOTE):
        links["cpu"] = links["accelerator"]


def pytest_configure() -> None:
    use_costs()
    start = RankPool.start

    def start_with_costs(pool: RankPool, timeout: float = 120.0) -> None:
        new = not pool._connections
        start(pool, timeout)
        if new and not pool._once:
            pool.run(use_costs)

    kind: Any = RankPool
    kind.start = start_with_costs
