"""Import path with `support`, the modules that several test files share.

Their names differ in all packages.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_dtensor import clear_cache
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world

# ranks of the pool get this path from their parent
sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks that exchange nothing, and no decision that an earlier test has made."""
    clear_cache()
    with fake_world(2):
        yield init_device_mesh("cpu", (2,))
    clear_cache()
