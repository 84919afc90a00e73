"""Puts the `support` of every package on the import path: tests of several packages use what each of them has."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += map(str, sorted(Path(__file__).parents[2].glob("packages/*/tests/support")))
