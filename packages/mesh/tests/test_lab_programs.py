"""Covers: lab/isolation/process_ranks.py, lab/isolation/threads.py: programs of torch, unchanged, on ranks of a lab."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal_mesh.testing import lab

SCRIPTS = Path(__file__).parent / "support" / "torch_scripts"
NAMES = ("ddp", "fsdp2_tp", "pipeline")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.platform != "linux", reason="torchrun on this machine"),
]


@cache
def results_of_torchrun(name: str, folder: Path) -> list[Any]:
    """Return the results of a script on four ranks of gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    output = folder / "torchrun"
    subprocess.run([*command, str(SCRIPTS / f"{name}.py"), str(output)], check=True)
    return list(map(float, numbers(output)))


def numbers(output: Path) -> list[float]:
    text = output.read_text().translate(str.maketrans("[],", "   "))
    return [float(word) for word in text.split()]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_scripts_for_torchrun(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = results_of_torchrun(name, tmp_path)
    script = str(SCRIPTS / f"{name}.py")
    for ranks, backend in ((4, "nccl"), (8, "gloo")):
        monkeypatch.setenv("BACKEND", backend)
        output = tmp_path / f"{backend}{ranks}"
        lab(ranks).run_script(script, [str(output)])
        # a pipeline of more stages is another model
        if ranks == 4 or name != "pipeline":
            assert numbers(output) == pytest.approx(expected, rel=1e-12)
        assert len(numbers(output)) == len(expected)


@pytest.mark.parametrize("name", NAMES)
def test_programs_on_threads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specification = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    results = []
    for isolation in ("thread", "process"):
        output = tmp_path / isolation
        monkeypatch.setattr(sys, "argv", [name, str(output)])
        if isolation == "thread":
            lab(4, "thread").run(module.main, world=False)
        else:
            lab(4).run_script(str(SCRIPTS / f"{name}.py"), [str(output)])
        results.append(numbers(output))
    assert results[0] == results[1]
