"""Checks of the repository: `nox` runs the sessions of CHECKS, two at a time.

`nox --list` lists all sessions.

Each session has an environment with the layer under check, the layers below it, and third-party
packages that are installed once (nox_environments.py). `wheel(<package>)` starts from nothing.
Arguments after `--` go to pytest or the script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  # this line is for the Pythons that are too old
    sys.exit(
        f"shoal needs Python 3.11 or newer; this nox runs on {sys.version.split()[0]}: python3.11 "
        "-m venv .venv"
    )

import nox
from nox.command import CommandFailed
from packaging.utils import canonicalize_name  # comes with nox

# nox loads this file by its path, without its folder on the path of imports.
sys.path.insert(0, str(Path(__file__).parent))
from nox_environments import (
    GROUPS,
    ROOT,
    STACK,
    build,
    closure,
    declared,
    group,
    hide_third_party,
    import_name,
    install,
    install_declared,
    link_declared,
    own_site_packages,
)

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["checks"]

FAST = "not parity and not slow"
# installed without their dependencies
BESIDE_HF = ("accelerate==1.15.0", "peft==0.21.2", "psutil==7.2.2")
RANKS_ENV = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # hundreds of processes import the same files
    "PYTHONDONTWRITEBYTECODE": None,
}
LONG = ("test(dtensor)", "integration", "test(mesh)", "test(tp-styles)", "device")  # begin first
SHORT = {f"{kind}({package})" for kind in ("test", "types") for package in STACK} - {*LONG}
CHECKS = ("lint", *LONG, *sorted(SHORT), "docs", "demo", "packages")
# Importing torch takes two seconds, a fork of a process that has it none.
IMPORT_EACH = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        importlib.import_module(name)
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} cannot be imported by itself")
"""


def pytest(session: nox.Session, *args: str, env: Mapping[str, str | None] = RANKS_ENV) -> None:
    """Run tests; keep the time of each in out/times."""
    times = ROOT / "out" / "times" / f"{session.name}-{Path(args[-1]).name}.xml"
    session.run("python", "-m", "pytest", *args, f"--junitxml={times}", *session.posargs, env=env)


@nox.session(venv_backend="none")
def checks(session: nox.Session) -> None:
    """Run every session of CHECKS, two at a time: ranks leave one of two cores idle half the time.

    The output of a session is shown when the session has ended. A session that fails does not stop
    the others.
    """

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "nox", "-s", name, "--", *session.posargs)
        return subprocess.run(
            command,
            cwd=ROOT,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    failed = []
    with ThreadPoolExecutor(2) as lanes:
        names = {lanes.submit(run, name): name for name in CHECKS}
        try:
            for future in as_completed(names):
                done = future.result()
                sys.stdout.write(done.stdout)
                session.log(f"* {names[future]}: {'failed' if done.returncode else 'success'}")
                failed += [names[future]] if done.returncode else []
        except KeyboardInterrupt:  # the running sessions get it too
            lanes.shutdown(cancel_futures=True)
            raise
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style, words, imports and map of folders, statements; print the density."""
    install(session)
    session.run("python", "-m", "ruff", "format", "--check", ".")
    session.run("python", "-m", "ruff", "check", ".")
    session.run("python", "tools/words.py")
    session.run("python", "tools/contracts.py")
    session.run("python", "tools/where.py", "--check")
    sources = [f"packages/{package}/src" for package in STACK]
    session.run("python", "tools/readable.py", *sources)
    session.run("python", "tools/density.py", *sources)


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def types(session: nox.Session, package: str) -> None:
    """Run mypy strict over one package, with only the layers below installed."""
    install(session, package)
    session.run("python", "-m", "mypy", f"packages/{package}/src", f"packages/{package}/tests")


@nox.session
def public_types(session: nox.Session) -> None:
    """Check that pyright, like an editor, infers the type of every public name of the packages."""
    install(session)
    session.install("basedpyright==1.40.2")  # pyright, with the node that it runs on as a package
    session.install(
        "--no-build-isolation", "--no-deps", *(f"./packages/{package}" for package in STACK)
    )
    for package in STACK:
        name = import_name(package)
        session.run(
            "basedpyright", "--ignoreexternal", "--verifytypes", name, env={"PYTHONPATH": ""}
        )
    session.run(
        "basedpyright",
        "--level",
        "error",
        "integration_tests/typed_uses.py",
        env={"PYTHONPATH": ""},
    )


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def test(session: nox.Session, package: str) -> None:
    """Run the tests of one package, with the layers below and declared dependencies only."""
    install_declared(session, package)
    pytest(session, "-m", FAST, f"packages/{package}/tests")


@nox.session
def integration(session: nox.Session) -> None:
    """Test several layers together.

    It tests isolation, vendoring, snippets of README and documentation, and the example.
    """
    install(session, *STACK)
    # Tests import each other by their folder's name, examples as the scripts that they are.
    bases = "--explicit-package-bases"
    checked = ("integration_tests", "noxfile.py", "nox_environments.py", "benchmarks/_timing.py")
    session.run("python", "-m", "mypy", bases, *checked, env={"MYPYPATH": "examples/llama"})
    for examples in ("examples/llama", "examples"):
        scripts = sorted(map(str, Path(examples).glob("*.py")))
        session.run("python", "-m", "mypy", *scripts)
    pytest(session, "-m", FAST, "integration_tests")


@nox.session
def device(session: nox.Session) -> None:
    """Run main programs and tests for GPUs on a simulated device.

    `-- --table` writes docs/device_stalls.md.
    """
    install(session, *STACK)
    path = os.pathsep.join(map(str, (ROOT, ROOT / "integration_tests" / "device" / "autoload")))
    env = {**RANKS_ENV, "PYTHONPATH": path}
    try:
        session.run("python", "-m", "integration_tests.device.simulated", env=env)
    except CommandFailed:
        session.skip("the extension of the simulated accelerator needs a C++ compiler and ninja")
    if "--table" in session.posargs:
        session.run("python", "-W", "ignore", "-m", "integration_tests.device.stall_table", env=env)
        return
    tests = ("integration_tests/device", "packages/dtensor/tests/test_random_ops.py")
    pytest(session, "-m", "gpu", *tests, env=env)
    planned = (
        f"packages/dtensor/tests/test_{name}.py" for name in ("programs", "reductions_on_ranks")
    )
    # on the CPU, by the plans of accelerators
    costs = ("-p", "integration_tests.device.accelerator_costs")
    pytest(session, *costs, "-m", FAST, *planned, env=env)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation in docs/_build/html, with warnings as errors, and check its pages."""
    install(session, *STACK)
    session.run(
        "python",
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "docs",
        "docs/_build/html",
    )
    session.run("python", "tools/links.py", "docs/_build/html")
    session.run("python", "-W", "ignore", "tools/entries.py", "docs/_build/html")
    session.run("python", "tools/browse.py", "docs/_build/html")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small Llama on a 2x2 mesh of local ranks and on one process, and compare.

    The results are in out/demo.
    """
    install(session, *STACK, groups=("runtime", "build", "demo"))
    session.run("python", "examples/llama/train_llama.py", *session.posargs, env=RANKS_ENV)


@nox.session
def packages(session: nox.Session) -> None:
    """Build all packages, check their metadata, install the wheels and import each.

    Only declared dependencies are installed.
    """
    install(session)
    dist = build(session, *STACK, "shoal")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    hide_third_party(session)
    link_declared(session, declared(*STACK))
    session.install(
        "--no-index", "--no-deps", "--force-reinstall", *map(str, sorted(dist.glob("*.whl")))
    )
    session.run("python", "-m", "pip", "check")
    session.chdir(session.create_tmp())
    names = [import_name(package) for package in STACK]
    session.run("python", "-W", "ignore", "-c", IMPORT_EACH, *names)


@nox.session(reuse_venv=False)
@nox.parametrize("package", STACK, ids=STACK)
def wheel(session: nox.Session, package: str) -> None:
    """Install a wheel and its declared dependencies in an empty environment.

    The tests of its sdist run there.
    """
    session.install("-c", "constraints.txt", "hatchling")
    dist = build(session, *closure(package))
    (sdist,) = dist.glob(f"{import_name(package)}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(dist, filter="data")
    source = dist / sdist.name.removesuffix(".tar.gz")
    wanted = (f"shoal-{package}", *group("test", project=source))
    session.install("-c", "constraints.txt", "--find-links", str(dist), *wanted)
    session.run("python", "-m", "pip", "check")
    session.chdir(source)
    pytest(session, "-m", FAST)


@nox.session
def lock(session: nox.Session) -> None:
    """Resolve all dependency groups and write constraints.txt.

    With `-- --upgrade` all but torch may move.
    """
    target = ROOT / "constraints.txt"
    kept = [line for line in target.read_text().splitlines() if line.startswith(("#", "torch=="))]
    report = Path(session.create_tmp()).resolve() / "report.json"
    wanted = (*group(*GROUPS, "demo"), kept[-1])
    flags = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    if "--upgrade" not in session.posargs:
        flags += ["-c", str(target)]
    session.run("python", "-m", "pip", "install", *flags, *wanted)
    lines = kept[:-1]
    for found in sorted(
        (item["metadata"] for item in json.loads(report.read_text())["install"]),
        key=lambda it: canonicalize_name(it["name"]),
    ):
        # So that pip can install a nox on an older Python, where the noxfile says which one is
        # needed.
        marker = (
            '; python_version >= "3.11"'
            if found.get("requires_python", "").startswith(">=3.11")
            else ""
        )
        lines.append(
            f"{canonicalize_name(found['name'])}=={found['version'].split('+')[0]}{marker}"
        )
    target.write_text("\n".join(lines) + "\n")


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def vendor(session: nox.Session, package: str) -> None:
    """Copy a layer and the layers below into a package, and rewrite one import prefix.

    The layer's tests run there.
    """
    # no layer of shoal is installed: only the vendored copy can be imported
    install(session)
    pytest(
        session, "integration_tests/test_vendored.py", "-k", f"whole_suite and {package}", "-m", ""
    )


@nox.session
def parity(session: nox.Session) -> None:
    """Compare with torch's own classes."""
    install(session, *STACK)
    pytest(session, "-m", "parity")


@nox.session
def slow(session: nox.Session) -> None:
    """Run the tests that take long: full sweeps."""
    install(session, *STACK)
    pytest(session, "-m", "slow and not parity")


@nox.session
def hugging_face(session: nox.Session) -> None:
    """Run the tests with peft, accelerate, Lightning and torchao.

    No other session installs these packages.
    """
    install(session, *STACK)
    session.install(
        "--no-deps",
        *BESIDE_HF,
        "lightning==2.6.6",
        "lightning-utilities",
        "torchmetrics",
        "torchao==0.18.0",
    )
    files = [
        f"packages/models/tests/test_{name}.py"
        for name in (
            "accelerate_sharding",
            "adapters",
            "lightning",
            "methods",
            "quantized",
            "training",
            "trainer_checkpoints",
        )
    ]
    pytest(session, *files, "integration_tests/layers/test_quantized_data_parallel.py")
    pytest(session, "-m", "slow", "integration_tests/test_libraries_in_lab.py")


@nox.session
def torchtitan(session: nox.Session) -> None:
    """Compare trainers of torchtitan 0.2 and 0.3 with one process.

    The trainer of 0.2 also runs unchanged in the lab.
    """
    install(session, *STACK)
    # imported by torchtitan
    session.install("datasets", "tyro", "tensorboard", "einops", "pillow", "tomli")
    # torchtitan imports triton, which torch for the CPU does not install
    session.install("--no-deps", "torchtitan==0.2.2", "torchdata", "triton")
    folder = own_site_packages(session)
    session.run(
        "python", "-m", "integration_tests.titan", str(folder), *session.posargs, env=RANKS_ENV
    )
    pytest(session, "-m", "slow", "integration_tests/test_libraries_in_lab.py")
    # torchtitan 0.3 has another configuration and another trainer, and needs these packages too
    newer = Path(session.create_tmp()).resolve() / "torchtitan_0_3"
    packages = ("torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing")
    session.install("--no-deps", "--target", str(newer), *packages)
    session.env["TORCHTITAN_0_3"] = str(newer)
    pytest(session, "-m", "slow", "integration_tests/test_torchtitan_0_3.py")


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; install nothing.

    torch is the one of the Python that runs nox.
    """
    path = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in STACK)
    tests = ("-m", "gpu", *(f"packages/{package}/tests" for package in STACK))
    session.run(
        sys.executable,
        "-m",
        "pytest",
        *tests,
        *session.posargs,
        env={**RANKS_ENV, "PYTHONPATH": path},
    )


@nox.session
def bench(session: nox.Session) -> None:
    """Run all benchmarks, or the benchmarks named after `--`.

    Reports are written to out/bench, and one table is printed.
    """
    install(session, *STACK)
    session.install("--no-deps", *BESIDE_HF, "torchtitan==0.2.2")  # rivals
    named = [arg for arg in session.posargs if not arg.startswith("-")]
    flags = [arg for arg in session.posargs if arg.startswith("-")]
    every = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    missed = []
    for script in named or every:
        try:
            session.run("python", f"benchmarks/{script}.py", *flags, env=RANKS_ENV)
        except CommandFailed:
            # a script that missed a bar keeps none of the others from running
            missed.append(script)
    session.run("python", "benchmarks/_table.py")
    if missed:
        session.error(f"failed, or missed a bar: {', '.join(missed)}")


@nox.session
@nox.parametrize("package", STACK, ids=STACK)
def coverage(session: nox.Session, package: str) -> None:
    """Measure the line coverage of a package by its own tests, including the ranks of the pool."""
    install(session, package)
    # Ranks are measured by a hook at interpreter start; coverage's own is in the shared folder,
    # where none is run.
    hook = own_site_packages(session) / "zz_coverage.pth"
    hook.write_text("import coverage; coverage.process_startup()\n")
    rc = (
        "--rcfile=coverage.rc",
        f"--data-file={Path(session.create_tmp()).resolve() / 'coverage'}",
    )
    source = f"--source={import_name(package)}"
    tests = ("-m", "pytest", "-m", FAST, f"packages/{package}/tests")
    session.run("python", "-m", "coverage", "run", *rc, source, *tests, env=RANKS_ENV)
    session.run("python", "-m", "coverage", "combine", "-q", *rc)
    session.run("python", "-m", "coverage", "report", *rc)


@nox.session
def op_sweep(session: nox.Session) -> None:
    """Compare every operator of torch's database on 4 ranks with one device.

    The page docs/op_coverage.md is written.
    """
    install(session, *STACK)
    session.run("python", "-m", "integration_tests.op_sweep", *session.posargs, env=RANKS_ENV)


@nox.session
def module_sweep(session: nox.Session) -> None:
    """Compare every module and optimizer of torch's databases on 4 ranks.

    The page docs/module_coverage.md is written.
    """
    install(session, *STACK)
    support = str(ROOT / "packages" / "dtensor" / "tests" / "support")
    session.run(
        "python",
        "-m",
        "integration_tests.module_sweep",
        *session.posargs,
        env={**RANKS_ENV, "PYTHONPATH": support},
    )


@nox.session
def architecture_sweep(session: nox.Session) -> None:
    """Compare architectures of transformers, by their own and by automatic plans.

    The page docs/architectures.md is written.
    """
    install(session, *STACK)
    support = str(ROOT / "packages" / "dtensor" / "tests" / "support")
    args = ("-m", "integration_tests.architecture_sweep", *session.posargs)
    session.run("python", *args, env={**RANKS_ENV, "PYTHONPATH": support})


@nox.session
def hunt(session: nox.Session) -> None:
    """Compare random programs with one device: `nox -s hunt -- random_programs FIRST COUNT`.

    They are programs of operators (`random_programs`), of modules, plans and optimizers
    (`integration_tests.random_modules`), or of data parallelism
    (`integration_tests.random_training`).
    """
    install(session, *STACK)
    support = os.pathsep.join(str(path) for path in ROOT.glob("packages/*/tests/support"))
    session.run("python", "-m", *session.posargs, env={**RANKS_ENV, "PYTHONPATH": support})


@nox.session(reuse_venv=False, python="3.11")
def minimums(session: nox.Session) -> None:
    """Run the fast tests on the oldest supported torch and Python."""
    with_torch(session, "torch==2.11.*")


@nox.session(reuse_venv=False)
def newest(session: nox.Session) -> None:
    """Run the fast tests on the newest torch that the packages allow, without constraints."""
    with_torch(session, *declared("mesh"))


def with_torch(session: nox.Session, torch: str) -> None:
    """Run the fast tests on one version of torch."""
    session.install(torch, "numpy", *group("test", "extras", "models"))
    session.install(*(part for package in STACK for part in ("-e", f"packages/{package}")))
    pytest(session, "-m", FAST)
