"""Facts about the repository that several tests share."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# random specs, for hunts and sweeps; small models; programs in forks
for package in ("dtensor", "tp-styles", "mesh"):
    sys.path.insert(0, str(ROOT / "packages" / package / "tests" / "support"))
sys.path.append(str(ROOT / "examples" / "llama"))  # the Llama


@dataclass(frozen=True, slots=True)
class Layer:
    """One package: its folder, its import name, and those of the layers below, bottom to top."""

    folder: str
    name: str
    below: tuple[str, ...]

    @property
    def home(self) -> Path:
        return ROOT / "packages" / self.folder

    @property
    def source(self) -> Path:
        return self.home / "src" / self.name

    @property
    def files(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))


def found_layers() -> tuple[Layer, ...]:
    """The packages, bottom to top, with the layers below as each declares them."""
    layers = []
    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        # packages/shoal does not have modules: it depends on all layers
        if not (path.parent / "src").is_dir():
            continue
        needed = (
            text.split()[0] for text in tomllib.loads(path.read_text())["project"]["dependencies"]
        )
        below = tuple(name.replace("-", "_") for name in needed if name.startswith("shoal-"))
        layers.append(Layer(path.parent.name, f"shoal_{path.parent.name.replace('-', '_')}", below))
    return tuple(sorted(layers, key=lambda layer: len(layer.below)))


LAYERS = found_layers()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `layer` runs once per layer."""
    if "layer" in metafunc.fixturenames:
        metafunc.parametrize("layer", LAYERS, ids=[layer.folder for layer in LAYERS])


@pytest.fixture(scope="session")
def layers() -> tuple[Layer, ...]:
    return LAYERS


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT
