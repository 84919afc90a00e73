"""Puts `support` on the import path: what several test files share, under names that no other package's tests have."""

import sys
from pathlib import Path

# ranks get this path from their parent
sys.path.insert(0, str(Path(__file__).parent / "support"))
