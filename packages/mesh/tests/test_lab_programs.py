"""Programs of torch, unchanged, on ranks of a lab.

Covers: lab/isolation/process_ranks.py, lab/isolation/threads.py, lab/programs.py.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shoal_mesh.lab.programs import imports_of
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


def write_package(folder: Path) -> None:
    """Write a package whose main module imports slow modules through its other modules."""
    sources = {
        "__init__": "",
        "main": (
            "import sys, torch\nfrom . import first\nprint(first, file=open(sys.argv[1], 'a'))\n"
        ),
        "first": "import beside.second as second\nimport not_installed.module as m\n",
        "second": "from .deep.third import name\nfrom torch import fft\n",
        "deep/third": "from ..fourth import name\nimport torch.distributed.checkpoint\n",
        "fourth": "def name():\n    import torch.testing\nthis is no source\n",
        "unused": "import torch.onnx\n",
    }
    (folder / "beside" / "deep").mkdir(parents=True)
    for name, source in sources.items():
        (folder / "beside" / f"{name}.py").write_text(source)


def test_slow_imports_are_found_in_the_own_modules_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("import beside.main\n")
    for found in (imports_of("script.py"), imports_of("beside.main", is_module=True)):
        # `fourth` cannot be read, and nothing imports `unused`
        wanted = {"torch", "torch.fft", "torch.distributed.checkpoint"}
        assert wanted <= set(found) and "torch.onnx" not in found
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    # only a script has the modules beside it
    assert imports_of("beside.main", is_module=True) == []


def test_a_module_runs_as_the_main_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = "import sys\nfrom . import other\nopen(sys.argv[1], 'a').write(__name__ + other.NAME)"
    (package / "main.py").write_text(source)
    (package / "other.py").write_text("NAME = __name__")
    monkeypatch.chdir(tmp_path)
    lab(1).run_script("package_of_test.main", [str(tmp_path / "output")], is_module=True)
    assert (tmp_path / "output").read_text() == "__main__package_of_test.other"
