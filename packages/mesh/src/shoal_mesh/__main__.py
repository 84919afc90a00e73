"""The command line: `python -m shoal_mesh COMMAND`.

May import: commands.
"""

import sys

from .commands.mesh_commands import main

if __name__ == "__main__":
    sys.exit(main())
