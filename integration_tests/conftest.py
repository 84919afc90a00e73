"""Facts about the repository that several tests share."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "packages" / "dtensor" / "tests" / "support"))  # random specs, for hunts and sweeps
sys.path.append(str(ROOT / "docs" / "examples"))  # the Llama


@dataclass(frozen=True, slots=True)
class Layer:
    """One package: its folder, its import name, and the import names of the layers below, bottom to top."""

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


LAYERS = (
    Layer("mesh", "shoal_mesh", ()),
    Layer("dtensor", "shoal_dtensor", ("shoal_mesh",)),
    Layer("tp-styles", "shoal_tp_styles", ("shoal_mesh", "shoal_dtensor")),
    Layer("shard-api", "shoal_shard_api", ("shoal_mesh", "shoal_dtensor")),
)


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
