"""Covers: argument_types.py: wrong arguments of public functions are typed errors, before anything changes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal_mesh import init_device_mesh
from shoal_mesh.testing import fake_world
from shoal_tp_styles import (
    ColwiseParallel,
    StyleError,
    StyleTypeError,
    UnmatchedPlanWarning,
    accumulate_in_tree,
    accumulate_stage_in_tree,
    adapter_parameters,
    auto_plan,
    check_arithmetic,
    compare_runs,
    context_parallel,
    context_parallel_unshard,
    format_plan,
    fully_shard,
    input_reshard,
    invariant_arithmetic,
    load_sharded,
    merge_adapters,
    parallelize_module,
    preview,
    propose,
    record_run,
    reduce_after_last_microbatch,
    register_fsdp_forward_method,
    replicate,
    save_sharded,
    set_rotate_method,
    unparallelize_module,
    verify,
)

MODULE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
PLAN = {"0": ColwiseParallel()}
WRONG: Mapping[str, Any] = {
    "None": None,
    "int": 3,
    "float": 1.5,
    "str": "x",
    "list": [1],
    "dict": {"a": 1},
    "tensor": torch.ones(2),
    "class": nn.Linear,
    "style": ColwiseParallel(),
}
CALLS: Mapping[str, Callable[[Any, Any], object]] = {
    "parallelize_module, module": lambda mesh, x: parallelize_module(x, mesh, PLAN),
    "parallelize_module, mesh": lambda mesh, x: parallelize_module(MODULE, x, PLAN),
    "parallelize_module, plan": lambda mesh, x: parallelize_module(MODULE, mesh, {"0": x}),
    "fully_shard, module": lambda mesh, x: fully_shard(x, mesh),
    "fully_shard, mesh": lambda mesh, x: fully_shard(MODULE, x),
    "fully_shard, mp_policy": lambda mesh, x: fully_shard(MODULE, mesh, mp_policy=x),
    "fully_shard, offload_policy": lambda mesh, x: fully_shard(MODULE, mesh, offload_policy=x),
    "replicate, module": lambda mesh, x: replicate(x, mesh),
    "replicate, mesh": lambda mesh, x: replicate(MODULE, x),
    "replicate, bucket_bytes": lambda mesh, x: replicate(MODULE, mesh, bucket_bytes=x),
    "replicate, shard_optimizer": lambda mesh, x: replicate(MODULE, mesh, shard_optimizer=x),
    "unparallelize_module": lambda mesh, x: unparallelize_module(x),
    "verify": lambda mesh, x: verify(x, PLAN, mesh),
    "preview": lambda mesh, x: preview(x, PLAN, mesh),
    "auto_plan": lambda mesh, x: auto_plan(x, mesh),
    "propose": lambda mesh, x: propose(x, 2, 1000),
    "input_reshard": lambda mesh, x: input_reshard(x, mesh, 0),
    "load_sharded": lambda mesh, x: load_sharded(x, {}),
    "save_sharded": lambda mesh, x: save_sharded(x, Path("nowhere")),
    "merge_adapters": lambda mesh, x: merge_adapters(x),
    "adapter_parameters": lambda mesh, x: adapter_parameters(x),
    "accumulate_in_tree, model": lambda mesh, x: accumulate_in_tree(x, [1]),
    "accumulate_in_tree, microbatches": lambda mesh, x: accumulate_in_tree(MODULE, x),
    "accumulate_stage_in_tree": lambda mesh, x: accumulate_stage_in_tree(x, 2),
    "check_arithmetic": lambda mesh, x: check_arithmetic(x),
    "compare_runs": lambda mesh, x: compare_runs(x, x),
    "context_parallel, buffers": lambda mesh, x: entered(context_parallel(mesh, buffers=x, buffer_seq_dims=[0, 0])),
    "context_parallel, dims": lambda mesh, x: entered(
        context_parallel(mesh, buffers=[torch.ones(4)], buffer_seq_dims=x)
    ),
    "context_parallel_unshard": lambda mesh, x: context_parallel_unshard(mesh, x, [0]),
    "format_plan": lambda mesh, x: format_plan(x),
    "invariant_arithmetic": lambda mesh, x: entered(invariant_arithmetic(x)),
    "record_run, model": lambda mesh, x: entered(record_run(x)),
    "record_run, batch": lambda mesh, x: entered(record_run(MODULE, x)),
    "reduce_after_last_microbatch": lambda mesh, x: reduce_after_last_microbatch(x),
    "set_rotate_method": lambda mesh, x: set_rotate_method(x),
    "register_fsdp_forward_method": lambda mesh, x: register_fsdp_forward_method(MODULE, x),
}
ALLOWED = {
    ("fully_shard, mesh", "None"),  # that of all ranks
    ("replicate, bucket_bytes", "int"),
    ("register_fsdp_forward_method", "str"),
    ("record_run, batch", "None"),
    ("format_plan", "dict"),  # of anything: it prints what is there
}


def entered(block: AbstractContextManager[object]) -> None:
    with block:
        pass


@pytest.mark.parametrize("call", CALLS)
def test_wrong_arguments(call: str) -> None:
    before = copy.deepcopy(MODULE.state_dict())
    for name, wrong in WRONG.items():
        if (call, name) in ALLOWED or (call == "parallelize_module, plan" and name in ("style", "str")):
            continue
        with fake_world(2), pytest.raises(StyleError):
            CALLS[call](init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), wrong)
    assert all(torch.equal(value, before[name]) for name, value in MODULE.state_dict().items())
    assert type(MODULE) is nn.Sequential


def test_lists_of_modules_are_looked_into() -> None:
    modules: Any = [nn.Linear(2, 2), 1]
    with pytest.raises(StyleTypeError, match=r"fully_shard: expected module to be an nn\.Module, got int 1"):
        fully_shard(modules)


def test_warnings_name_the_line_of_the_call() -> None:
    with fake_world(2), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize_module(MODULE, init_device_mesh("cpu", (2,)), {"none": ColwiseParallel()})
    assert [(each.category, each.filename) for each in caught] == [(UnmatchedPlanWarning, __file__)]
