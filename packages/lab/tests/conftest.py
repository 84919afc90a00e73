"""Import path with `support`, the modules that several test files share.

Their names differ in all packages.
"""

import sys
from pathlib import Path

# ranks of the pool get this path from their parent
sys.path.insert(0, str(Path(__file__).parent / "support"))
