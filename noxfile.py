"""Every check of the repository: `nox` runs the default ones, `nox --list` shows all.

Isolation without waste: torch takes about 25 seconds and a gigabyte per environment, so all third-party packages are
installed once, into `.nox/third-party`, which never holds a layer of shoal. Each session's environment adds that
folder to its path and installs only the layer under check and the layers below it, so an upward import cannot work.
`wheel(<package>)` proves the declared dependencies from nothing. Arguments after `--` go to pytest or the script.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import nox
from filelock import FileLock  # comes with nox, by way of virtualenv

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
STACK = ("mesh", "dtensor", "tp-styles", "shard-api")  # bottom to top; the last two are siblings
BELOW = {"mesh": (), "dtensor": ("mesh",), "tp-styles": ("mesh", "dtensor"), "shard-api": ("mesh", "dtensor")}
FAST = "not parity and not slow"
RANKS_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def third_party(session: nox.Session) -> Path:
    """The site-packages folder shared by all sessions; installed again when what it should hold changes."""
    project = nox.project.load_toml(ROOT / "pyproject.toml")
    groups = ("runtime", "extras", "models", "test", "types", "lint", "docs", "build")
    wanted = sorted({name for group in groups for name in nox.project.dependency_groups(project, group)})
    stamp_text = "\n".join([sys.version, *wanted, (ROOT / "constraints.txt").read_text()])
    home = ROOT / ".nox" / "third-party"
    stamp = home / "installed.sha256"
    digest = hashlib.sha256(stamp_text.encode()).hexdigest()
    home.parent.mkdir(exist_ok=True)
    with FileLock(home.with_suffix(".lock")):  # sessions may run side by side
        if not stamp.exists() or stamp.read_text() != digest:
            session.log("installing third-party packages once for all sessions (torch is large: about a minute)")
            session.run(sys.executable, "-m", "virtualenv", "--clear", str(home), external=True, silent=True)
            pip = home / ("Scripts" if sys.platform == "win32" else "bin") / "pip"
            session.run(str(pip), "install", "-c", "constraints.txt", *wanted, external=True)
            stamp.write_text(digest)
    return site_packages(home)


def site_packages(home: Path) -> Path:
    return next(path for path in home.glob("[Ll]ib/**/site-packages") if path.is_dir())


def closure(*packages: str) -> list[str]:
    """The packages and every layer below them, bottom to top."""
    wanted = {*packages, *(below for package in packages for below in BELOW[package])}
    return [package for package in STACK if package in wanted]


def install(session: nox.Session, *packages: str) -> None:
    """Give the session the shared third-party packages and, editable, the layers named and those below."""
    shared = third_party(session)
    own = site_packages(Path(session.virtualenv.location))
    (own / "third_party.pth").write_text(f"{shared}\n")
    if packages:
        editable = [part for package in closure(*packages) for part in ("-e", f"packages/{package}")]
        # hatchling comes from the shared folder; a dependency that is missing there is an error, not a download.
        session.install("--no-build-isolation", "--no-index", "-c", "constraints.txt", *editable)


def pytest(session: nox.Session, *args: str) -> None:
    session.run("python", "-m", "pytest", *args, *session.posargs, env=RANKS_ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Format, style, banned names and words, the map of folders."""
    install(session)
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "docs/words.py")
    session.run("python", "docs/where.py", "--check")


@nox.session
def layers(session: nox.Session) -> None:
    """Imports go downward, between and inside the packages."""
    install(session, *STACK)
    session.run("python", "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def types(session: nox.Session, package: str) -> None:
    """Mypy strict over one package, with only the layers below installed."""
    install(session, package)
    session.run("python", "-m", "mypy", f"packages/{package}/src", f"packages/{package}/tests")


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def test(session: nox.Session, package: str) -> None:
    """Tests of one package, with only the layers below installed."""
    install(session, package)
    pytest(session, "-m", FAST, f"packages/{package}/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """What concerns several layers: isolation, vendoring, README and documentation snippets, the example."""
    install(session, *STACK)
    # Tests import each other by their folder's name, examples as the scripts that they are.
    bases = "--explicit-package-bases"
    checked = ("integration_tests", "noxfile.py", "benchmarks/_timing.py")
    session.run("python", "-m", "mypy", bases, *checked, env={"MYPYPATH": "docs/examples"})
    session.run("python", "-m", "mypy", "docs/examples")
    pytest(session, "-m", FAST, "integration_tests")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation, warnings as errors; result in docs/_build/html."""
    install(session, *STACK)
    session.run("python", "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small Llama on a 2x2 mesh of local ranks and on one process, and compare; results in out/demo."""
    install(session, *STACK)
    session.run("python", "docs/examples/train_llama.py", *session.posargs, env=RANKS_ENV)


@nox.session(default=False, reuse_venv=False)
@nox.parametrize("package", STACK, ids=STACK)
def wheel(session: nox.Session, package: str) -> None:
    """Build the wheels, install them in an empty environment with what they declare, run the tests from elsewhere."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    for layer in closure(package):
        session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(dist), str(ROOT / "packages" / layer))
    name = {"mesh": "shoal-mesh", "dtensor": "shoal-dtensor", "tp-styles": "shoal-tp-styles"}
    test_group = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "test")
    requirement = name.get(package, "shoal-shard-api")
    session.install("-c", "constraints.txt", "--find-links", str(dist), requirement, "numpy", *test_group)
    session.chdir(session.create_tmp())
    tests = str(ROOT / "packages" / package / "tests")
    pytest(session, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-m", FAST, tests)


@nox.session(default=False)
@nox.parametrize("package", STACK, ids=STACK)
def vendor(session: nox.Session, package: str) -> None:
    """Copy a layer and those below into a host package, rewrite one import prefix, run the layer's tests there."""
    install(session)  # no layer of shoal is installed: only the vendored copy can be imported
    pytest(session, "integration_tests/test_vendored.py", "-k", f"whole_suite and {package}", "-m", "")


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """Compare with torch's own classes."""
    install(session, *STACK)
    pytest(session, "-m", "parity")


@nox.session(default=False)
def slow(session: nox.Session) -> None:
    """The tests that take long: full sweeps."""
    install(session, *STACK)
    pytest(session, "-m", "slow and not parity")


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """The tests that need a CUDA device, with the torch of the Python that runs nox; nothing is installed."""
    path = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in STACK)
    tests = ("-m", "gpu", *(f"packages/{package}/tests" for package in STACK))
    session.run(sys.executable, "-m", "pytest", *tests, *session.posargs, env={**RANKS_ENV, "PYTHONPATH": path})


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """All benchmarks, or those named after `--`; reports in out/bench."""
    install(session, *STACK)
    named = [arg for arg in session.posargs if not arg.startswith("-")]
    flags = [arg for arg in session.posargs if arg.startswith("-")]
    every = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    for script in named or every:
        session.run("python", f"benchmarks/{script}.py", *flags, env=RANKS_ENV)


@nox.session(default=False)
@nox.parametrize("package", STACK, ids=STACK)
def coverage(session: nox.Session, package: str) -> None:
    """Line coverage of one package by its own tests, on the ranks of the pool too."""
    install(session, package)
    # Ranks are measured by a hook at interpreter start; coverage's own is in the shared folder, where none is run.
    hook = site_packages(Path(session.virtualenv.location)) / "zz_coverage.pth"
    hook.write_text("import coverage; coverage.process_startup()\n")
    rc = ("--rcfile=coverage.rc", f"--data-file={Path(session.create_tmp()).resolve() / 'coverage'}")
    source = f"--source=shoal_{package.replace('-', '_')}"
    tests = ("-m", "pytest", "-m", FAST, f"packages/{package}/tests")
    session.run("python", "-m", "coverage", "run", *rc, source, *tests, env=RANKS_ENV)
    session.run("python", "-m", "coverage", "combine", "-q", *rc)
    session.run("python", "-m", "coverage", "report", *rc)


@nox.session(default=False)
def op_sweep(session: nox.Session) -> None:
    """Every operator of torch's database on 4 ranks against one device; writes docs/op_coverage.md."""
    install(session, *STACK)
    session.run("python", "-m", "integration_tests.op_sweep", *session.posargs, env=RANKS_ENV)


@nox.session(default=False)
def module_sweep(session: nox.Session) -> None:
    """Every module and optimizer of torch's databases on 4 ranks; writes docs/module_coverage.md."""
    install(session, *STACK)
    support = str(ROOT / "packages" / "dtensor" / "tests" / "support")
    session.run(
        "python", "-m", "integration_tests.module_sweep", *session.posargs, env={**RANKS_ENV, "PYTHONPATH": support}
    )


@nox.session(default=False)
def verify_sweep(session: nox.Session) -> None:
    """What `verify` says of plans of transformers against what happens on ranks; writes docs/verify_coverage.md."""
    install(session, *STACK)
    support = str(ROOT / "packages" / "dtensor" / "tests" / "support")
    args = ("-m", "integration_tests.verify_sweep", *session.posargs)
    session.run("python", *args, env={**RANKS_ENV, "PYTHONPATH": support})


@nox.session(default=False)
def hunt(session: nox.Session) -> None:
    """Random programs against one device: `nox -s hunt -- random_programs FIRST COUNT`.

    Of operators (`random_programs`), or of modules, plans and optimizers (`integration_tests.random_modules`).
    """
    install(session, *STACK)
    support = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/tests/support"))
    session.run("python", "-m", *session.posargs, env={**RANKS_ENV, "PYTHONPATH": support})


@nox.session(default=False, reuse_venv=False, python="3.11")
def minimums(session: nox.Session) -> None:
    """The oldest supported torch and Python."""
    test_group = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "test")
    session.install("torch==2.11.*", "numpy", *test_group)
    editable = [part for package in STACK for part in ("-e", f"packages/{package}")]
    session.install(*editable)
    pytest(session, "-m", FAST)
