"""Import path with the `support` folder of every package, for tests that use several packages."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += map(str, sorted(Path(__file__).parents[2].glob("packages/*/tests/support")))
