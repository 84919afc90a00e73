"""Environments of the nox sessions: which third-party packages and which layers each of them sees.

torch takes about 25 seconds and a gigabyte per environment, so third-party packages are installed
once, into `.nox/third-party`, which never holds a layer of shoal. The environment of a session adds
that folder to its path and installs only the layer under check and the layers below it, so an
upward import cannot work. `install_declared` links single packages of that folder instead: the
session sees only the dependencies that the layer declares.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import nox
from filelock import FileLock  # comes with nox, by way of virtualenv
from packaging.requirements import Requirement  # comes with nox
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent
# Dependency groups of the root that are installed for every session, unless it names others.
GROUPS = ("runtime", "extras", "models", "test", "types", "lint", "docs", "build", "release")


def find_layers() -> dict[str, tuple[str, ...]]:
    """Return the layers that each package declares as dependencies, bottom to top."""
    declared_layer = re.compile(r'^  "shoal-([a-z-]+) ', re.MULTILINE)
    layers = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        # packages/shoal has no modules: it depends on all layers
        if not (path.parent / "src").is_dir():
            continue
        layers[path.parent.name] = tuple(declared_layer.findall(path.read_text()))
    return layers


LAYERS_BELOW = find_layers()
STACK = tuple(sorted(LAYERS_BELOW, key=lambda package: len(LAYERS_BELOW[package])))


def import_name(package: str) -> str:
    """Return the name by which Python imports a package."""
    return f"shoal_{package.replace('-', '_')}"


def closure(*packages: str) -> list[str]:
    """Return the packages and every layer below them, bottom to top."""
    wanted = set(packages)
    for package in packages:
        wanted.update(LAYERS_BELOW[package])
    return [package for package in STACK if package in wanted]


def group(*names: str, project: Path = ROOT) -> list[str]:
    """Return the requirements of dependency groups of a pyproject.toml."""
    table = nox.project.load_toml(project / "pyproject.toml")
    requirements: set[str] = set()
    for name in names:
        requirements.update(nox.project.dependency_groups(table, name))
    return sorted(requirements)


def declared(*packages: str) -> list[str]:
    """Return the dependencies of some packages, without the layers themselves."""
    found: set[str] = set()
    for package in packages:
        table = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")
        found.update(table["project"]["dependencies"])
    return sorted(text for text in found if not text.startswith("shoal-"))


def site_packages(home: Path) -> Path:
    """Return the site-packages folder of a virtual environment."""
    return next(path for path in home.glob("[Ll]ib/**/site-packages") if path.is_dir())


def own_site_packages(session: nox.Session) -> Path:
    """Return the site-packages folder of a session's environment."""
    return site_packages(Path(session.virtualenv.location))


# --- the folder of third-party packages -----------------------------------------------------------


def third_party(session: nox.Session, *groups: str) -> Path:
    """Return the site-packages folder shared by all sessions, with these dependency groups in it.

    A group is installed when a session first asks for it. The rest of an interrupted installation
    is removed and installed again. Another Python or other constraints make a new folder.
    """
    home = ROOT / ".nox" / "third-party"
    record = home / "installed.json"
    home.parent.mkdir(exist_ok=True)
    # Sessions may run side by side.
    with FileLock(home.with_suffix(".lock")):
        state = _open_third_party(session, home, record)
        for name in groups:
            wanted = group(name)
            if state["groups"].get(name) != wanted:
                session.log(f"installing third-party packages once for all sessions: {name}")
                _remove_half_installed(home)
                pip = home / ("Scripts" if sys.platform == "win32" else "bin") / "pip"
                # The sessions import a quarter of the 14,000 modules, and Python compiles those.
                command = (str(pip), "install", "--no-compile", "-c", "constraints.txt", *wanted)
                session.run(*command, external=True)
                state["groups"][name] = wanted
                record.write_text(json.dumps(state))
    return site_packages(home)


def _open_third_party(session: nox.Session, home: Path, record: Path) -> dict[str, Any]:
    """Return the record of the shared folder; make the folder if it does not fit this Python."""
    constraints = (ROOT / "constraints.txt").read_text()
    digest = hashlib.sha256(f"{sys.version}\n{constraints}".encode()).hexdigest()
    if record.exists():
        state: dict[str, Any] = json.loads(record.read_text())
        if state.get("digest") == digest:
            return state
    session.run(
        sys.executable, "-m", "virtualenv", "--clear", str(home), external=True, silent=True
    )
    state = {"digest": digest, "groups": {}}
    record.write_text(json.dumps(state))
    return state


def _remove_half_installed(home: Path) -> None:
    """Remove the metadata of packages whose installation was interrupted."""
    for information in {path.parent for path in site_packages(home).glob("*.dist-info/METADATA")}:
        # pip writes INSTALLER after the last file of a package.
        if not (information / "INSTALLER").exists():
            shutil.rmtree(information)


# --- the environment of a session -----------------------------------------------------------------


def install(session: nox.Session, *packages: str, groups: Iterable[str] = GROUPS) -> None:
    """Give the session the shared third-party packages, and the packages with the layers below."""
    shared = third_party(session, *groups)
    (own_site_packages(session) / "third_party.pth").write_text(f"{shared}\n")
    if packages:
        _install_layers(session, closure(*packages))


def _install_layers(session: nox.Session, layers: Iterable[str]) -> None:
    """Install layers, editable; do nothing if they are installed as their metadata now say."""
    own = own_site_packages(session)
    record = own / "installed_layers.json"
    wanted = {layer: _digest_of_metadata(layer) for layer in layers}
    if record.exists() and json.loads(record.read_text()) == wanted:
        return
    record.unlink(missing_ok=True)
    # pip would keep the old metadata of a layer that still has its version
    present = sorted(path.name.partition("-")[0] for path in own.glob("shoal_*.dist-info"))
    if present:
        session.run("python", "-m", "pip", "uninstall", "--yes", *present)
    wheels = [str(_editable_wheel(session, layer, wanted[layer])) for layer in wanted]
    # a dependency that is missing in the shared folder is an error, not a download
    session.install("--no-index", "-c", "constraints.txt", *wheels)
    record.write_text(json.dumps(wanted))


def _digest_of_metadata(layer: str) -> str:
    """Return a digest of the files that the metadata of a layer come from."""
    home = ROOT / "packages" / layer
    about = home / "src" / import_name(layer) / "__about__.py"
    sources = (home / "pyproject.toml", home / "README.md", about)
    texts = b"\0".join(path.read_bytes() for path in sources)
    return hashlib.sha256(texts).hexdigest()[:16]


def _editable_wheel(session: nox.Session, layer: str, digest: str) -> Path:
    """Return the wheel that puts the sources of a layer on the path of imports.

    It is built once for all sessions: `pip install --editable` builds it again for each of them,
    130 times in all, in a third of a second each.
    """
    folder = ROOT / ".nox" / "editable" / f"{layer}-{digest}"
    # Sessions may run side by side.
    with FileLock(ROOT / ".nox" / "editable.lock"):
        if not list(folder.glob("*.whl")):
            with session.chdir(ROOT / "packages" / layer):
                # hatchling comes from the shared folder
                command = ("python", "-m", "hatchling", "build", "-t", "wheel:editable")
                session.run(*command, "-d", str(folder), silent=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_declared(session: nox.Session, package: str) -> None:
    """Give the session one package, the layers below, and only their declared dependencies."""
    tests = group("test", project=ROOT / "packages" / package)
    install(session, package)
    hide_third_party(session)
    link_declared(session, declared(*closure(package)) + tests)


def hide_third_party(session: nox.Session) -> None:
    """Take the shared third-party packages from the session's path."""
    (own_site_packages(session) / "third_party.pth").unlink()


def link_declared(session: nox.Session, wanted: Iterable[str]) -> None:
    """Link the shared packages that requirements need, and no others, into the environment."""
    shared = third_party(session, *GROUPS)
    own = own_site_packages(session)
    for path in own.iterdir():
        if path.is_symlink():
            path.unlink()

    found = {}
    for distribution in metadata.distributions(path=[str(shared)]):
        found[canonicalize_name(distribution.metadata["Name"])] = distribution
    queue = [Requirement(text) for text in wanted]
    seen = set()
    while queue:
        asked = queue.pop()
        name = canonicalize_name(asked.name)
        if (name, *asked.extras) in seen:
            continue
        seen.add((name, *asked.extras))
        if name not in found:
            session.error(f"{asked} is declared, but no dependency group of the root installs it")
        for folder in _top_folders(found[name]):
            if not (own / folder).exists():
                (own / folder).symlink_to(shared / folder)
        queue += _requirements_of(found[name], extras=asked.extras)


def _top_folders(distribution: metadata.Distribution) -> set[str]:
    """Return the folders and files of site-packages that belong to a distribution."""
    folders = {file.parts[0] for file in distribution.files or ()}
    return folders - {"..", "__pycache__"}


def _requirements_of(
    distribution: metadata.Distribution, extras: Iterable[str]
) -> Iterator[Requirement]:
    """Yield the requirements of a distribution that apply here, with some of its extras."""
    chosen = set(extras) or {""}
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in chosen):
            yield requirement


def build(session: nox.Session, *packages: str) -> Path:
    """Return the folder with fresh sdists and wheels of some packages."""
    folder = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    for package in packages:
        with session.chdir(ROOT / "packages" / package):
            # packages/shoal names layers by their versions then, not by their folders
            env = {"SHOAL_PINS": "1"}
            command = ("python", "-m", "hatchling", "build", "-d", str(folder))
            session.run(*command, silent=True, env=env)
    return folder
