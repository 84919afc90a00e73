"""Covers: effects of importing a layer on a process, and the imports that its files may contain."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forked_programs import Program, outputs_of
from shoal_mesh.watch.recorder import LIBRARIES

# 60 ms where torch itself takes 1.4 s: a share of torch's own import, for machines, and one
# machine's minutes, differ.
IMPORT_BUDGET = 60 / 1400
OPTIONAL = {"matplotlib", "tqdm", "safetensors", "hypothesis", "pytest"}
TORCHS_OWN = (
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._shard",
    "torch.distributed._local_tensor",
    "torch.distributed.init_device_mesh",
)
# names of operators, and functions that torch documents
PUBLIC = ("torch.ops.", "torch._foreach_")

# Runs in a fresh process: the state of everything global that an import could change, before and
# after.
PROBE = """
import gc, json, logging, os, signal, sys, threading, time, warnings
start = time.process_time()
import torch, torch.distributed
torchs = time.process_time() - start
def state():
    return {
        "warning filters": list(map(str, warnings.filters)),
        "environment": dict(os.environ),
        "threads": [t.name for t in threading.enumerate()],
        "signal handlers": [
            str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        ],
        "hooks": [str(sys.excepthook), str(threading.excepthook), str(sys.displayhook)],
        "log handlers": [str(logging.root.handlers), logging.root.level],
        "torch defaults": [
            str(torch.get_default_dtype()), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), str(torch.get_default_device()),
        ],
        "generator": torch.get_rng_state().sum().item(),
        "safe globals": sorted(map(str, torch.serialization.get_safe_globals())),
        "operators": len(torch._C._dispatch_get_all_op_names()),
        "torch attributes": [
            len(vars(m)) for m in (torch.Tensor, torch.nn.Module, torch.distributed)
        ],
    }
modules, before = set(sys.modules), state()
times = []
gc.collect()
# A collection that walks all of torch's objects hits some layer by chance: not that layer's cost.
gc.freeze()
for name in sys.argv[1:]:
    start = time.process_time()
    __import__(name)
    # of this process: the load of the machine is not ours
    times.append(time.process_time() - start)
after = state()
print(json.dumps({
    "added": sorted(set(sys.modules) - modules), "seconds": [torchs, *times],
    "changed": {key: [before[key], after[key]] for key in before if before[key] != after[key]},
}))
"""


# every warning is an error
FLAGS = ("-W", "error")


def environment() -> dict[str, str]:
    unset = ("PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS")
    return {name: value for name, value in os.environ.items() if name not in unset}


def probe(*names: str) -> dict[str, Any]:
    """What `PROBE` finds in a fresh process."""
    done = subprocess.run(
        [sys.executable, *FLAGS, "-c", PROBE, *names],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return findings_in(f"{done.stdout}{done.stderr}{done.returncode or ''}")


def findings_in(printed: str) -> dict[str, Any]:
    """What `PROBE` has printed, and nothing else: a new torch logs a line per deprecated name."""
    assert printed.startswith("{") and printed.index("\n") == len(printed) - 1, printed
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture(scope="module")
def printed(layers: Any) -> dict[str, str]:
    """What each program of this module prints, by a layer's name, a source or a module's name."""
    programs = {layer.name: Program(PROBE, (layer.name,)) for layer in layers}
    programs[FIRST_OPERATORS] = Program(FIRST_OPERATORS)
    imported = ", ".join(layer.name for layer in layers if layer.name not in ON_REQUEST.values())
    for module in ON_REQUEST:
        source = f"import sys, {imported}\nprint({module!r} in sys.modules)"
        programs[module] = Program(source)
    outputs = outputs_of([*programs.values()], *FLAGS, environment=environment())
    return dict(zip(programs, outputs, strict=True))


# the first of them waits for the programs of all
@pytest.mark.timeout(900)
def test_importing_a_layer_prints_nothing_and_changes_nothing_outside_it(
    layer: Any, layers: Any, printed: dict[str, str]
) -> None:
    found = findings_in(printed[layer.name])
    assert found["changed"] == {}
    added = {name.split(".")[0] for name in found["added"]}
    foreign = {other.name for other in layers} - {layer.name, *layer.below}
    assert not added & foreign, f"importing {layer.name} pulled in a layer that is not below it"
    assert not added & OPTIONAL, f"importing {layer.name} pulled in an optional package"
    own = [name for name in found["added"] if name.startswith(TORCHS_OWN)]
    assert not own, f"importing {layer.name} pulled in torch's own implementation"


FIRST_OPERATORS = """
import sys, torch
import torch.nn.functional as F
from shoal_dtensor import DTensor, Replicate, Shard
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
with fake_world(4):
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)])
    w = DTensor.from_local(torch.ones(6, 6), mesh, [Replicate()])
    for run in (
        lambda: x + x, lambda: x @ w, lambda: x.sum(0), lambda: x.view(-1, 2, 3),
        lambda: x.softmax(-1),
    ):
        run()
    F.linear(x, w, w[0])
    F.layer_norm(x, (6,), w[0], w[0])
    w.requires_grad_()
    y, labels = x @ w, DTensor.from_local(torch.ones(4, dtype=torch.long), mesh, [Shard(0)])
    for one in (
        y, y / 2, y * y, y.relu(), F.gelu(y), F.silu(y), y.softmax(-1), F.layer_norm(y, (6,)),
        F.normalize(y),
    ):
        one.sum().backward(retain_graph=True)  # gradients of a sum are expanded tensors
    for loss in (
        y.mean(), F.mse_loss(y, x), F.cross_entropy(y, labels),
        F.binary_cross_entropy_with_logits(y, x),
    ):
        loss.backward(retain_graph=True)
unasked = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy")
print(*[name for name in sys.modules if name.startswith(unasked)])
"""


def test_first_operators_and_gradients_import_neither_compiler_nor_torchs_dtensor(
    printed: dict[str, str],
) -> None:
    """Python meta kernels import `torch._dynamo`, which takes a second.

    An operator without a rule imports the other module.
    """
    assert printed[FIRST_OPERATORS].split() == []


# Modules that few programs use, each with the layer that is about it.
ON_REQUEST = {"shoal_dtensor.spmd.checker": "shoal_spmd_types", "shoal_mesh.lab": "shoal_lab"}


@pytest.mark.parametrize("module", ON_REQUEST)
def test_other_layers_load_a_module_on_request_only(module: str, printed: dict[str, str]) -> None:
    assert printed[module] == "False\n"


def test_each_layer_imports_within_its_time(layers: Any) -> None:
    names = [layer.name for layer in layers]
    # The first run leaves bytecode beside the sources, as installing a package does.
    runs = [probe(*names)["seconds"] for _ in range(3)]
    # whatever else the machine does adds to a time, so the least of some is the nearest
    while True:
        torchs, *over = [min(times) for times in zip(*runs, strict=True)]
        budget = IMPORT_BUDGET * torchs
        if max(over) <= budget:
            return
        assert len(runs) < 8, (
            f"seconds of torch {torchs}, over it, bottom to top: {over}; allowed {budget}"
        )
        runs.append(probe(*names)["seconds"])


def imports(path: Path) -> Iterator[tuple[ast.stmt, str, int]]:
    """Every import statement in a file, with the absolute module it names and its level of dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module or "", node.level


def imported_at_once(path: Path) -> Iterator[Path]:
    """The modules of the package that importing a module runs, beside the folders that it is in."""
    # inside of functions, or for type checkers only
    waits: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            waits.update(ast.walk(node))
        if not isinstance(node, ast.ImportFrom) or not node.level or node in waits:
            continue
        home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for name in [alias.name for alias in node.names]:
            module = next(
                (
                    home / tail
                    for tail in (f"{name}.py", f"{name}/__init__.py")
                    if (home / tail).is_file()
                ),
                None,
            )
            target = module or next(
                each for each in (home.with_suffix(".py"), home / "__init__.py") if each.is_file()
            )
            if target.name != "__init__.py" or target.parent not in path.parents:
                yield target


def test_no_chain_of_imports_is_longer_than_twelve(layer: Any) -> None:
    @cache
    def chain(path: Path) -> tuple[str, ...]:
        below = max(map(chain, imported_at_once(path)), key=len, default=())
        return (str(path.relative_to(layer.source)), *below)

    # `internal` only passes names on, to packages that a reader comes from.
    longest = max(map(chain, (path for path in layer.files if path.name != "internal.py")), key=len)
    assert len(longest) <= 12, " > ".join(longest)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; empty where it is more than names."""
    if isinstance(node, ast.Attribute):
        return f"{value}.{node.attr}" if (value := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def torch_names(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every name of torch that a module imports or uses, in full."""
    known = {"torch": "torch"}  # what the module's own names stand for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield node, home + alias.name
                if home or alias.asname:
                    known[alias.asname or alias.name] = home + alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            yield node, f"{known.get(first, '')}.{rest}"


def test_only_seams_use_private_names_of_torch_and_only_interop_its_own_implementation(
    root: Path,
) -> None:
    for path in (
        *root.glob("packages/*/src/**/*.py"),
        *root.glob("docs/**/*.py"),
        *root.glob("tools/*.py"),
    ):
        tree = ast.parse(path.read_text())
        for node, name in torch_names(tree):
            where = f"{path.relative_to(root)}:{node.lineno}: {name}"
            if name.startswith(TORCHS_OWN):
                assert path.name == "interop.py", (
                    f"{where}: shoal does not use torch's own implementation (ADR 12)"
                )
                assert node not in tree.body and node.col_offset > 0, f"{where}: at import time"
            elif name.startswith("torch.") and not name.startswith(PUBLIC):
                private = [
                    part
                    for part in name.split(".")
                    if part.startswith("_") and not part.endswith("__")
                ]
                assert not private or "_torch" in (path.stem, path.parent.name), (
                    f"{where}: belongs in _torch.py"
                )


# The modules of a package from which other packages import, beside the package itself.
ROOMS = ("", "errors", "internal", "lab", "testing")


def test_imports_are_relative_inside_and_of_public_names_across(layer: Any, layers: Any) -> None:
    public = {other.name: public_names(other.source / "__init__.py") for other in layers}
    for path in layer.files:
        for node, module, level in imports(path):
            where = f"{path.relative_to(layer.home)}:{node.lineno}"
            top, _, rest = module.partition(".")
            if level or top not in public:
                continue
            assert top != layer.name, f"{where}: imports inside a package are relative"
            assert isinstance(node, ast.ImportFrom), (
                f"{where}: only `from {top} import Name` survives vendoring"
            )
            assert rest in ROOMS, f"{where}: reaches into {module}"
            if not rest:
                names = {alias.name for alias in node.names}
                assert names <= public[top], (
                    f"{where}: not public in {top}: {sorted(names - public[top])}"
                )


def public_names(init: Path) -> set[str]:
    for node in ast.parse(init.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return set(ast.literal_eval(node.value))  # type: ignore[attr-defined]  # narrowed above
    raise AssertionError(f"{init} has no literal __all__")


def test_public_names_exist_and_are_listed_once(layer: Any) -> None:
    module = __import__(layer.name)
    names = module.__all__
    assert len(names) == len(set(names))
    assert [name for name in names if not hasattr(module, name)] == []


def test_no_two_files_of_a_layer_have_one_name(layer: Any) -> None:
    names = sorted(path.name for path in layer.files if path.name != "__init__.py")
    assert [one for one, other in pairwise(names) if one == other] == []


# a cached call, and one protocol: each is read as a whole
LONG_FUNCTIONS = {"dispatch", "_all_reduce"}


def test_files_and_functions_stay_readable(layer: Any, root: Path) -> None:
    statements_in: Any = runpy.run_path(str(root / "tools" / "density.py"))["statements_in"]
    for path in layer.files:
        module = ast.parse(path.read_text())
        assert statements_in(module) <= 300, f"{path.name} has {statements_in(module)} statements"
        for node in ast.walk(module):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name not in LONG_FUNCTIONS
            ):
                size = statements_in(node) - 1
                assert size <= 40, f"{path.name}:{node.lineno} {node.name} has {size} statements"


def test_frames_of_no_layer_are_lines_of_the_program(layers: Any) -> None:
    assert [layer.name for layer in layers if re.fullmatch(LIBRARIES, layer.name) is None] == []


# torch's name in two of its modules, and errors that users catch by the name that their layer
# documents.
SHARED_NAMES = {"Shard", "ArgumentTypeError", "CheckpointError"}
# names of the public package spmd_types, which shoal-spmd-types takes the place of
SHARED_NAMES |= {"PartitionSpec", "RedistributeError"}


def test_no_class_name_is_defined_twice(layers: Any) -> None:
    homes: dict[str, list[str]] = {}
    for path in (path for layer in layers for path in layer.files):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name not in SHARED_NAMES:
                homes.setdefault(node.name, []).append(str(path))
    assert not {name: paths for name, paths in homes.items() if len(paths) > 1}


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"])
def test_a_package_is_complete(layer: Any, name: str) -> None:
    assert (layer.home / name).is_file()
    assert (layer.source / "py.typed").is_file()
