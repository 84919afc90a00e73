"""Covers: a layer as a copy inside another package, with one import prefix rewritten."""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forked_programs import Program, outputs_of

HOST = "acme._vendor"
SMOKE = {
    "mesh": """
from acme._vendor.shoal_mesh import abstract_mesh
assert abstract_mesh((2, 2), ("data", "tensor"))["tensor"].size() == 2
""",
    "dtensor": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_mesh import init_device_mesh
from acme._vendor.shoal_dtensor import Replicate, Shard, distribute_tensor
import torch
with fake_world(4):
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)], src_data_rank=None)
    assert x.relu().shape == (8, 4)
    assert x.redistribute(placements=[Replicate()]).to_local().shape == (8, 4)
""",
    "tp-styles": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_mesh import init_device_mesh
from acme._vendor.shoal_tp_styles import ColwiseParallel, parallelize_module
import torch
with fake_world(4):
    mesh = init_device_mesh("cpu", (4,))
    layer = parallelize_module(torch.nn.Linear(8, 8), mesh, ColwiseParallel(), src_data_rank=None)
    assert layer(torch.randn(3, 8)).shape == (3, 2)
""",
    "data-parallel": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_mesh import init_device_mesh
from acme._vendor.shoal_data_parallel import fully_shard
import torch
with fake_world(4):
    mesh = init_device_mesh("cpu", (4,))
    layer = fully_shard(torch.nn.Linear(8, 8), mesh)
    assert layer(torch.randn(3, 8)).shape == (3, 8)
""",
    "context-parallel": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_mesh import init_device_mesh
from acme._vendor.shoal_context_parallel import context_parallel
import torch
with fake_world(4):
    x = torch.randn(1, 2, 8, 4)
    with context_parallel(init_device_mesh("cpu", (4,)), buffers=[x], buffer_seq_dims=[2]):
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).shape == (1, 2, 2, 4)
""",
    "lab": """
from acme._vendor.shoal_lab import CertificationReport, certify
import torch
def train(mesh):
    model = torch.nn.Linear(4, 2)
    model(torch.ones(3, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
if __name__ == "__main__":
    assert certify(train, meshes=[{"dp": 2}]).passed
""",
    "models": """
from acme._vendor.shoal_mesh import abstract_mesh
from acme._vendor.shoal_models import auto_plan
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
assert auto_plan(model, abstract_mesh((2,)), torch.randn(4, 8)).proven_for == (2,)
""",
    "transfer": """
from acme._vendor.shoal_transfer import WeightMapping, describe
import torch
manifest = describe(torch.nn.Linear(2, 4))
mapping = WeightMapping.same_names(manifest.shapes).rename({"^": "server."})
assert mapping.targets == {"server.weight": (4, 2), "server.bias": (4,)}
""",
    "same-bits": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_mesh import init_device_mesh
from acme._vendor.shoal_same_bits import invariant_arithmetic
from acme._vendor.shoal_tp_styles import parallelize_module
import torch
with fake_world(1), invariant_arithmetic():
    layer = parallelize_module(torch.nn.Linear(8, 8), init_device_mesh("cpu", (1,)), "colwise")
    assert layer(torch.randn(3, 8)).shape == (3, 8)
""",
    "shard-api": """
from acme._vendor.shoal_mesh.testing import fake_world
from acme._vendor.shoal_shard_api import ChunkShardingSpec
with fake_world(4):
    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{i}/cpu" for i in range(4)])
    assert spec.dim == 0
""",
    "spmd-types": """
from acme._vendor.shoal_mesh import abstract_mesh
from acme._vendor.shoal_spmd_types import P, R, all_reduce, assert_type, get_local_type
from acme._vendor.shoal_spmd_types import set_current_mesh, typecheck
import torch
with set_current_mesh(abstract_mesh((4,), ("tp",))), typecheck():
    x = assert_type(torch.ones(2, device="meta"), {"tp": P})
    assert [*get_local_type(all_reduce(x, "tp", dst=R)).values()] == [R]
""",
}
ALONE = """
import sys
strays = sorted(name for name in sys.modules if name.startswith("shoal_"))
print("modules of the original:", strays)
"""


def rewrite(folder: Path, tests: bool = False) -> None:
    """Put the host's prefix before every import of a layer, those of docstring examples too.

    Tests may also say `import shoal_mesh`, with or without `as`, and name modules to replace
    something in them.
    """
    for path in folder.rglob("*.py"):
        text = re.sub(
            r"^(\s*(?:>>> )?)from (shoal_\w+)",
            rf"\1from {HOST}.\2",
            path.read_text(),
            flags=re.MULTILINE,
        )
        if tests:
            text = re.sub(
                r"^(\s*)import (shoal_\w+)$", rf"\1import {HOST}.\2 as \2", text, flags=re.MULTILINE
            )
            text = re.sub(
                r"^(\s*)import (shoal_\w+ as)", rf"\1import {HOST}.\2", text, flags=re.MULTILINE
            )
            text = re.sub(r"((?:setattr|import_module)\(\s*\")(shoal_\w+\.)", rf"\1{HOST}.\2", text)
        path.write_text(text)


@pytest.fixture(scope="module")
def rewritten(layers: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a rewritten copy of every layer, compiled once for all programs."""
    folder: Path = tmp_path_factory.mktemp("rewritten")
    ignored = shutil.ignore_patterns("__pycache__")
    for layer in layers:
        shutil.copytree(layer.source, folder / layer.name, ignore=ignored)
    rewrite(folder)
    assert compileall.compile_dir(folder, quiet=1)
    return folder


def vendor(layer: Any, rewritten: Path, home: Path) -> None:
    """Make a host package in `home` that holds copies of the layer and of those below it."""
    target = home / "acme" / "_vendor"
    target.mkdir(parents=True)
    (home / "acme" / "__init__.py").touch()
    (target / "__init__.py").touch()
    for name in (layer.name, *layer.below):
        shutil.copytree(rewritten / name, target / name)


def run(home: Path, *args: str, timeout: float) -> str:
    """Run Python beside the copies; return what it printed."""
    env = {**os.environ, "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *args]
    done = subprocess.run(
        command, cwd=home, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def printed(
    layers: Any, rewritten: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, str]:
    """What a program that uses a copy of the layer prints, by layer."""
    programs = []
    for layer in layers:
        home = tmp_path_factory.mktemp(layer.folder)
        vendor(layer, rewritten, home)
        source = f"import acme._vendor.{layer.name}\n{SMOKE[layer.folder]}\n{ALONE}"
        programs.append(Program(source, folder=str(home)))
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    return dict(zip(layers, outputs_of(programs, environment=environment), strict=True))


# the first of them waits for the programs of all
@pytest.mark.timeout(900)
def test_a_copy_with_one_prefix_rewritten_works_without_the_original(
    layer: Any, printed: dict[Any, str]
) -> None:
    assert printed[layer].endswith("modules of the original: []\n"), printed[layer]


def test_no_file_names_a_layer_in_any_other_way(layer: Any) -> None:
    for path in layer.files:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not re.match(r"\s*import shoal_", line), f"{path.name}:{number}: {line.strip()}"
            dynamic = re.search(r"(import_module|__import__)\(\s*[\"']shoal_", line)
            assert not dynamic, f"{path.name}:{number}: {line.strip()}"


# These speak of the published package: READMEs, programs rewritten to import it, files that name
# it, an error's module.
OF_COPIES = (
    "not test_readme and not migrate and not earlier_files and not shoal_dtensor.argument_types"
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_suite_of_the_layer_passes_in_the_copy(
    layer: Any, rewritten: Path, root: Path, tmp_path: Path
) -> None:
    vendor(layer, rewritten, tmp_path)
    tests = tmp_path / "tests"
    shutil.copytree(layer.home / "tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    rewrite(tests, tests=True)
    config = (
        "-c",
        str(root / "pyproject.toml"),
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
    )
    run(
        tmp_path,
        "-m",
        "pytest",
        *config,
        "-m",
        "not parity and not slow",
        "-k",
        OF_COPIES,
        str(tests),
        timeout=1700,
    )
