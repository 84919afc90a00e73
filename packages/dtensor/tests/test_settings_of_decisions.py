"""Settings of torch that a decision depends on are compared before it is used again.

No other is read when one is made.

Covers: dispatch/{dispatch,propagate,results,global_call}.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal_dtensor
from operator_calls import Call, Calls, recorded
from settings_and_refusals import default_dtype, deterministic
from shoal_dtensor import DTensor, Replicate, Shard, cache_info, clear_cache
from shoal_dtensor.dispatch.results import Decision, has_fractions
from shoal_dtensor.internal import pytree
from shoal_dtensor.rules import all_rules
from shoal_dtensor.scopes import current
from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.testing import fake_world

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@contextmanager
def transform() -> Iterator[None]:
    """A level of functorch, as inside of `torch.func.grad`."""
    functorch = torch._C._functorch
    functorch._grad_increment_nesting()
    try:
        yield
    finally:
        functorch._grad_decrement_nesting()


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype": lambda: default_dtype(torch.float64),
    "default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "functorch": transform,
}

# --- the default dtype ----------------------------------------------------------------------------

OF_INTEGERS: dict[str, Callable[[Any], Any]] = {
    "times a number": lambda x: x * 2.5,
    "softmax": lambda x: (x * 2.5).softmax(0),
    "divided": lambda x: x / 2,
    "sqrt": lambda x: x.sqrt(),
    "where": lambda x: torch.where(x > 1, 1.5, 2.5),
    "complex": lambda x: x * 1j,
    "list": lambda x: torch._foreach_mul([x, x.double()], 2.5)[0],
    "out": lambda x: torch.sin(x, out=torch.empty_like(x, dtype=torch.get_default_dtype())),
    "of float": lambda x: x.float() * 2.5,
    "sum": lambda x: (x / 4).sum(),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_the_default_dtype_is_the_one_of_the_call(name: str) -> None:
    # once the dtype of the first call was that of all, or an AssertionError "the rule is wrong"
    function = OF_INTEGERS[name]
    plain = torch.arange(6)
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = DTensor.from_local(plain[:3], mesh, [Shard(0)])
        for dtype in (torch.float32, torch.float64, torch.float32, torch.float64):
            with default_dtype(dtype):
                got, expected = function(sharded), function(plain)
                assert got.dtype == got.to_local().dtype == expected.dtype


def test_decisions_that_inputs_decide_about_stay_on_the_fast_path() -> None:
    clear_cache()
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
        _ = x * 2.5, x + x, x > 1, x.sum(), x.long() * 2
        made = [d for op in current().decisions.values() for d in op.decisions.values()]
        assert len(made) > 3 and not any(decision.slow_path for decision in made)
        n = x.long()
        for dtype in (torch.float32, torch.float64):
            with default_dtype(dtype):
                _ = n * 2.5, n * 2.5
    assert cache_info()["aten.mul.Tensor"] == 3  # of float, of integers, and of both


# --- all operators --------------------------------------------------------------------------------


@cache
def calls() -> Calls:
    """A call of each operator with a rule, of integers if it takes them."""
    dtypes = (torch.int64, torch.bool, torch.float64)
    return recorded(all_rules.TABLE, samples=1, per_op=1, dtypes=dtypes)


def decisions_of(call: Call, mesh: DeviceMesh, setting: AbstractContextManager[Any]) -> list[Any]:
    """What is remembered of a call on replicated DTensors, run with a setting in an empty cache."""

    def distributed(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor.detach().clone(), mesh, [Replicate()])

    args, kwargs = pytree.tree_map_only(Tensor, distributed, (call.args, dict(call.kwargs)))
    scope = current()
    scope.decisions.clear()
    # what an operator refuses is compared as what it has not remembered
    with setting, suppress(Exception):
        call.op(*args, **kwargs)
    known = scope.decisions.get(id(call.op))
    return [] if known is None else [facts_of(d) for d in known.decisions.values()]


def facts_of(decision: Decision) -> dict[str, Any]:
    """All of a decision that does not contain functions."""
    moves = {place: plan.dst for place, plan in decision.moves.items()}
    facts = {"kind": decision.result_kind, "outputs": decision.outputs, "moves": moves}
    return facts | {"aliased": decision.aliased, "default dtype": decision.default_dtype}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_what_is_decided_but_the_default_dtype(name: str) -> None:
    differing, unmarked = [], []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for op, (call, *_) in calls().items():
            plain = decisions_of(call, mesh, torch.enable_grad())
            under = decisions_of(call, mesh, SETTINGS[name]())
            marks = [facts["default dtype"] for facts in (*plain, *under)]
            if plain and under and plain != under and (name != "default dtype" or None in marks):
                differing.append(f"{op}: {plain} | {under}")
            of_integers = not any(has_fractions(t.dtype) for t in _tensors_of(call))
            outputs = [spec for facts in plain for spec in facts["outputs"]]
            if of_integers and any(has_fractions(spec.dtype) for spec in outputs) and None in marks:
                unmarked.append(str(op))
    clear_cache()
    assert not differing and not unmarked


def _tensors_of(call: Call) -> list[Tensor]:
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# --- what the source reads ------------------------------------------------------------------------

# Names by which code reads a setting of torch or of the process.
READERS = {
    "get_default_dtype", "get_default_device", "is_autocast_enabled", "get_autocast_dtype",
    "is_grad_enabled", "is_inference_mode_enabled", "are_deterministic_algorithms_enabled",
    "get_deterministic_debug_mode", "environ", "is_deterministic_algorithms_warn_only_enabled",
    "getenv", "get_float32_matmul_precision", "get_num_threads", "backends",
    "is_warn_always_enabled", "_are_functorch_transforms_active", "maybe_current_level",
    "peek_interpreter_stack",
}  # fmt: skip
# Where a decision is made, or what it is made of.
FOLDERS = ("dispatch", "rules", "layout", "redistribute", "_torch")
# (file, name) -> why the cache of decisions need not be keyed by it
ALLOWED = {
    ("dispatch/global_call.py", "get_default_dtype"): "it is an argument of the remembered run",
    ("dispatch/results.py", "get_default_dtype"): "the decision has it, and dispatch compares it",
    ("dispatch/dispatch.py", "get_default_dtype"): "compares it with that of the decision",
    ("dispatch/dispatch.py", "is_grad_enabled"): "read in every call",
    ("dispatch/plain_tensors.py", "is_grad_enabled"): "read in every call",
    ("dispatch/results.py", "is_grad_enabled"): "read in every call",
    ("_torch/tensors.py", "is_grad_enabled"): "read in every call",
    ("_torch/tensors.py", "is_inference_mode_enabled"): "read in every call of a view",
    ("_torch/tensors.py", "_are_functorch_transforms_active"): "read in every call",
}


def test_what_the_source_reads_is_in_the_key_or_read_in_every_call() -> None:
    root = Path(shoal_dtensor.__file__).parent
    found: set[tuple[str, str]] = set()
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(node, "attr", getattr(node, "id", None))
                if isinstance(node, ast.Attribute | ast.Name) and name in READERS:
                    found.add((path.relative_to(root).as_posix(), str(name)))
    assert found == set(ALLOWED)
