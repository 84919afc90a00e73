"""Import path with the `support` folder of every package, for tests that use several packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_mesh.testing import rank_pool

sys.path += map(str, sorted(Path(__file__).parents[2].glob("packages/*/tests/support")))


@pytest.fixture(scope="module", autouse=True)
def eight_ranks_end_with_their_file() -> Iterator[None]:
    """Few files need eight ranks.

    Each of their groups has a thread of gloo that wakes 100 times a second.
    """
    yield
    rank_pool(8).close()
