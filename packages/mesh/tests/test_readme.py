"""Covers: README.md: its blocks run as a script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_blocks_of_the_readme_run_as_a_script(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    script = tmp_path / "readme.py"
    script.write_text(
        "\n".join(blocks) + '\nif __name__ == "__main__":\n    test_sum()\n    print("done")\n'
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "done" in done.stdout
