"""Wrong arguments of every public function: all ranks raise.

Covers: arguments.py, ranks/process_groups.py.
"""

# mypy: disable-error-code="arg-type,list-item,dict-item"
# Wrong types are what is tested.

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal_shard_api as api
from sharding_cases import chunk
from shoal_dtensor import Shard as ShardDim
from shoal_mesh import init_device_mesh
from shoal_mesh.testing import on_ranks
from shoal_shard_api import (
    ShardedOptimizer,
    ShardedTensor,
    ShardingPlan,
    ShardMetadata,
    TensorProperties,
    _shard_tensor,
    shard_module,
    shard_parameter,
)
from shoal_shard_api.checkpoint import load, save
from shoal_shard_api.errors import (
    ArgumentTypeError,
    CheckpointError,
    LocalShardError,
    MissingParameterError,
    ParameterError,
    ProcessGroupError,
    RankMismatchError,
    ShardingSpecError,
    SpecTypeError,
    UnsupportedOpError,
)

FULL = torch.arange(12.0).view(4, 3)
ROWS = chunk(0, (0, 1))
META = ShardMetadata([0], [2], "rank:0/cpu")


def given() -> SimpleNamespace:
    """What the calls are made on, and the classes of torch that have the same names."""
    from torch.distributed._shard.metadata import ShardMetadata as TorchMetadata
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed._shard.sharding_plan.api import ShardingPlan as TorchPlan
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh as torch_mesh
    from torch.distributed.tensor import Shard as TorchShardDim, distribute_tensor

    warnings.simplefilter("ignore")
    metadata = TorchMetadata([0], [2], "rank:0/cpu")
    return SimpleNamespace(
        tensor=_shard_tensor(FULL, ROWS),
        mesh=init_device_mesh("cpu", (2,)),
        torch_spec=ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        torch_metadata=metadata,
        torch_shard=Shard(torch.zeros(2), metadata),
        torch_plan=TorchPlan({}),
        torch_mesh=torch_mesh("cpu", (2,)),
        torch_dtensor=distribute_tensor(FULL, torch_mesh("cpu", (2,)), [TorchShardDim(0)]),
    )


def linear() -> nn.Module:
    return nn.Linear(3, 4)


def optimizer() -> ShardedOptimizer:
    return ShardedOptimizer(dict(linear().named_parameters()), torch.optim.SGD, lr=0.1)


def assign_grad(value: Any) -> None:
    tensor = _shard_tensor(FULL, ROWS).requires_grad_()
    tensor.grad = value


def on_rank(rank: int, there: Any, elsewhere: Any) -> Any:
    return there if dist.get_rank() == rank else elsewhere


def of_a_local_class() -> Any:
    class Local(api.ChunkShardingSpec): ...

    return Local(0, ["rank:0/cpu", "rank:1/cpu"])


def groups() -> Any:
    return optimizer().state_dict()["param_groups"]


from_shards = ShardedTensor._init_from_local_shards_and_global_metadata
BASE = api.ShardedTensorBase._init_from_local_shards_and_global_metadata
# the error -> the name of a call -> the call
Wrong = dict[type[Exception], dict[str, Callable[[Any], Any]]]

SPECS: Wrong = {
    ShardingSpecError: {
        "ChunkShardingSpec: no placements": lambda g: api.ChunkShardingSpec(0, None),
        "ChunkShardingSpec: one string": lambda g: api.ChunkShardingSpec(0, "rank:0/cpu"),
        "ChunkShardingSpec: ranks": lambda g: api.ChunkShardingSpec(0, [0, 1]),
        "ChunkShardingSpec: dim": lambda g: api.ChunkShardingSpec(0.5, ["rank:0/cpu"]),
        "EnumerableShardingSpec: None": lambda g: api.EnumerableShardingSpec(None),
        "EnumerableShardingSpec: ints": lambda g: api.EnumerableShardingSpec([1]),
        "EnumerableShardingSpec: torch's": lambda g: api.EnumerableShardingSpec([g.torch_metadata]),
        "ShardMetadata: None": lambda g: ShardMetadata(None, [1]),
        "ShardMetadata: strings": lambda g: ShardMetadata(["a"], [1]),
        "ShardMetadata: floats": lambda g: ShardMetadata([0], [1.5]),
        "ShardMetadata: placement": lambda g: ShardMetadata([0], [1], 7),
        "DevicePlacementSpec": lambda g: api.DevicePlacementSpec(3),
        "get_split_size: no chunks": lambda g: api.get_split_size(5, 0),
    },
    ArgumentTypeError: {
        "build_metadata: size": lambda g: ROWS.build_metadata(5, TensorProperties()),
        "build_metadata: properties": lambda g: ROWS.build_metadata(torch.Size([4]), None),
        "on_names": lambda g: api.ChunkShardingSpec("r", ["rank:0/cpu"]).on_names(3),
        "check_tensor: shards": lambda g: api.check_tensor([1], (3,)),
        "check_tensor: size": lambda g: api.check_tensor([META], None),
        "validate: None": lambda g: api.validate_non_overlapping_shards_metadata(None),
        "validate: torch's": lambda g: api.validate_non_overlapping_shards_metadata(
            [g.torch_metadata]
        ),
        "infer": lambda g: api._infer_sharding_spec_from_shards_metadata([3]),
        "get_split_size: type": lambda g: api.get_split_size("5", 2),
        "get_chunked_dim_size": lambda g: api.get_chunked_dim_size(5, None, 0),
        "get_chunk_sharding_params": lambda g: api.get_chunk_sharding_params(5, 2, g.torch_spec, 0),
        "custom_sharding_spec_op: a spec": lambda g: api.custom_sharding_spec_op(ROWS, torch.add),
        "custom_sharding_spec_op: no function": lambda g: api.custom_sharding_spec_op(
            type(ROWS), None
        ),
        "custom_sharded_op_impl": lambda g: api.custom_sharded_op_impl(3),
        "create_from_tensor": lambda g: TensorProperties.create_from_tensor(3),
        "spec.shard: no tensor": lambda g: ROWS.shard(None),
        "spec.shard: sharded": lambda g: ROWS.shard(g.tensor),
        "spec.shard: DTensor": lambda g: ROWS.shard(g.tensor.to_dtensor()),
        "spec.shard: type of source": lambda g: ROWS.shard(FULL, "0"),
        "spec.shard: a mesh": lambda g: ROWS.shard(FULL, 0, g.mesh),
    },
    ProcessGroupError: {
        "spec.shard: source": lambda g: ROWS.shard(FULL, 5),
    },
}

TENSORS: Wrong = {
    ArgumentTypeError: {
        "ShardedTensor: no spec": lambda g: ShardedTensor(None, 4),
        "ShardedTensor: torch's spec": lambda g: ShardedTensor(g.torch_spec, 4),
        "ShardedTensor: placements": lambda g: ShardedTensor([ShardDim(0)], 4),
        "zeros: string size": lambda g: api.zeros(ROWS, "4"),
        "zeros: dtype": lambda g: api.zeros(ROWS, 4, dtype="float32"),
        "zeros: group": lambda g: api.zeros(ROWS, 4, process_group="world"),
        "zeros: mesh": lambda g: api.zeros(ROWS, 4, process_group=g.mesh),
        "zeros: torch's mesh": lambda g: api.zeros(ROWS, 4, process_group=g.torch_mesh),
        "zeros: requires_grad": lambda g: api.zeros(ROWS, 4, requires_grad=1),
        "zeros: layout": lambda g: api.zeros(ROWS, 4, layout="strided"),
        "zeros: memory format": lambda g: api.zeros(ROWS, 4, memory_format=3),
        "zeros: pin_memory": lambda g: api.zeros(ROWS, 4, pin_memory="x"),
        "full": lambda g: api.full(ROWS, [4], "x"),
        "init_from_local_shards: None": lambda g: api.init_from_local_shards(None, 4),
        "init_from_local_shards: tensors": lambda g: api.init_from_local_shards(
            [torch.zeros(2)], 4
        ),
        "init_from_local_shards: torch's": lambda g: api.init_from_local_shards([g.torch_shard], 4),
        "init_from_local_shards: size on one rank": lambda g: api.init_from_local_shards(
            [], on_rank(1, "x", 4)
        ),
        "_init_from_local_tensor: list": lambda g: ShardedTensor._init_from_local_tensor(
            [1.0], ROWS, 2
        ),
        "_init_from_local_tensor: torch's spec": lambda g: ShardedTensor._init_from_local_tensor(
            torch.zeros(1), g.torch_spec, 2
        ),
        "from metadata: no shards": lambda g: from_shards(None, g.tensor.metadata()),
        "from metadata: None": lambda g: from_shards([], None),
        "from metadata: torch's spec": lambda g: from_shards(
            g.tensor.local_shards(), g.tensor.metadata(), sharding_spec=g.torch_spec
        ),
        "ShardedTensorBase": lambda g: BASE(None, g.tensor.metadata()),
        "Shard: no tensor": lambda g: api.Shard(None, META),
        "Shard: torch's metadata": lambda g: api.Shard(torch.zeros(2), g.torch_metadata),
        "from_tensor_and_offsets: rank": lambda g: api.Shard.from_tensor_and_offsets(
            torch.zeros(2), [0], "0"
        ),
        "narrow_tensor: metadata": lambda g: api.narrow_tensor(FULL, None),
        "load_with_process_group": lambda g: api.load_with_process_group(g.mesh).__enter__(),
        "gather: dst": lambda g: g.tensor.gather("0"),
        "gather: out is a list": lambda g: g.tensor.gather(0, on_rank(0, [1.0], None)),
        "gather: dtype": lambda g: g.tensor.gather(0, on_rank(0, FULL.clone(), None), dtype="x"),
        "gather: enforce_dtype": lambda g: g.tensor.gather(
            0, on_rank(0, FULL.clone(), None), enforce_dtype="x"
        ),
        "grad: a number": lambda g: assign_grad(3),
        "grad: DTensor": lambda g: assign_grad(g.tensor.to_dtensor()),
        "copy_: DTensor": lambda g: g.tensor.copy_(g.tensor.to_dtensor()),
        "to: group": lambda g: g.tensor.to("cpu", process_group=g.mesh),
        "from_dtensor: plain": lambda g: ShardedTensor.from_dtensor(FULL),
        "from_dtensor: torch's": lambda g: ShardedTensor.from_dtensor(g.torch_dtensor),
        "equal: DTensor": lambda g: torch.equal(g.tensor, g.tensor.to_dtensor()),
        "implicit_reshard": lambda g: api.implicit_reshard("x").__enter__(),
        "replicated_indices": lambda g: api.replicated_indices(3).__enter__(),
    },
    ShardingSpecError: {
        "zeros: negative size": lambda g: api.zeros(ROWS, -4),
        "zeros: sparse": lambda g: api.zeros(ROWS, 4, layout=torch.sparse_coo),
        "from_tensor_and_offsets: offsets": lambda g: api.Shard.from_tensor_and_offsets(
            torch.zeros(2), None, 0
        ),
        "narrow_tensor: beyond": lambda g: api.narrow_tensor_by_index(FULL, [0, 0], [9, 9]),
        "resharded: dim": lambda g: g.tensor.resharded(chunk(5, (0, 1))),
        "resharded: rank": lambda g: g.tensor.resharded(chunk(0, (7,))),
    },
    UnsupportedOpError: {
        "rand: integers": lambda g: api.rand(ROWS, 4, dtype=torch.int64),
    },
    LocalShardError: {
        "gather: no out": lambda g: g.tensor.gather(),
        "gather: out is sharded": lambda g: g.tensor.gather(0, on_rank(0, g.tensor, None)),
        "gather: another size": lambda g: g.tensor.gather(0, on_rank(0, torch.empty(3, 4), None)),
        "gather: on meta": lambda g: g.tensor.gather(0, on_rank(0, FULL.to("meta"), None)),
        "gather: expanded": lambda g: g.tensor.gather(0, on_rank(0, FULL[:1].expand(4, 3), None)),
        "gather: out on all ranks": lambda g: g.tensor.gather(0, FULL.clone()),
        "grad: another size": lambda g: assign_grad(torch.zeros(2)),
        "copy_: another size": lambda g: g.tensor.copy_(torch.zeros(9)),
        "copy_ to a plain tensor": lambda g: torch.zeros(9).copy_(g.tensor),
    },
    ProcessGroupError: {
        "gather: no such dst": lambda g: g.tensor.gather(2),
    },
    RankMismatchError: {
        "gather: dtypes differ": lambda g: g.tensor.gather(
            0, on_rank(0, FULL.clone(), None), dtype=on_rank(0, torch.int32, None)
        ),
    },
    SpecTypeError: {
        "reshard: None": lambda g: g.tensor.reshard(None),
        "resharded: torch's spec": lambda g: g.tensor.resharded(g.torch_spec),
    },
}

MODULES: Wrong = {
    ParameterError: {
        "_shard_tensor: None": lambda g: _shard_tensor(None, ROWS),
        "_shard_tensor: None on one rank": lambda g: _shard_tensor(on_rank(1, None, FULL), ROWS),
        "_shard_tensor: DTensor": lambda g: _shard_tensor(g.tensor.to_dtensor(), ROWS),
        "_shard_tensor: torch's DTensor": lambda g: _shard_tensor(g.torch_dtensor, ROWS),
        "_shard_tensor: sparse": lambda g: _shard_tensor(FULL.to_sparse(), ROWS),
        "_shard_tensor: meta": lambda g: _shard_tensor(FULL.to("meta"), ROWS),
        "add_param_group: twice": lambda g: optimizer().add_param_group(
            {"params": {"weight": FULL}}
        ),
    },
    ArgumentTypeError: {
        "shard_parameter: no module": lambda g: shard_parameter(None, "weight", ROWS),
        "shard_parameter: no module on one rank": lambda g: shard_parameter(
            on_rank(0, None, linear()), "weight", ROWS
        ),
        "shard_parameter: name": lambda g: shard_parameter(linear(), 3, ROWS),
        "shard_parameter: spec": lambda g: shard_parameter(linear(), "weight", g.torch_spec),
        "shard_parameter: a spec of a class that has no name": lambda g: shard_parameter(
            linear(), "weight", of_a_local_class()
        ),
        "shard_parameter: source": lambda g: shard_parameter(linear(), "weight", ROWS, None),
        "shard_parameter: bool": lambda g: shard_parameter(linear(), "weight", ROWS, True),
        "shard_parameter: mesh": lambda g: shard_parameter(linear(), "weight", ROWS, 0, g.mesh),
        "shard_module: no module": lambda g: shard_module(None, ShardingPlan({})),
        "shard_module: torch's plan": lambda g: shard_module(linear(), g.torch_plan),
        "shard_module: path": lambda g: shard_module(linear(), ShardingPlan({3: ROWS})),
        "shard_module: no table": lambda g: shard_module(linear(), ShardingPlan(None)),
        "shard_module: outputs": lambda g: shard_module(linear(), ShardingPlan({}, [ROWS])),
        "shard_module: one path": lambda g: shard_module(linear(), ShardingPlan({}, None, "x")),
        "shard_module: torch's spec": lambda g: shard_module(
            linear(), ShardingPlan({"weight": g.torch_spec})
        ),
        "shard_module: source": lambda g: shard_module(linear(), ShardingPlan({}), "0"),
        "_reshard_output": lambda g: api._reshard_output(linear(), None),
        "_collect_local_shard": lambda g: api._collect_local_shard(3),
        "state_dict_hook": lambda g: api.state_dict_hook(None, {}, "", None),
        "named_params": lambda g: list(api.named_params_with_sharded_tensor(None)),
        "ShardedOptimizer: no names": lambda g: ShardedOptimizer(
            list(linear().parameters()), torch.optim.SGD, lr=0.1
        ),
        "ShardedOptimizer: class": lambda g: ShardedOptimizer(
            dict(linear().named_parameters()), "SGD"
        ),
        "ShardedOptimizer: a number": lambda g: ShardedOptimizer({"w": 3}, torch.optim.SGD, lr=0.1),
        "add_param_group: no dict": lambda g: optimizer().add_param_group(3),
        "add_param_group: no params": lambda g: optimizer().add_param_group({}),
        "load_state_dict: None": lambda g: optimizer().load_state_dict(None),
        "load: None on one rank": lambda g: load(on_rank(1, None, {}), "/nowhere"),
        "load: patterns": lambda g: load({}, "/nowhere", allow_shape_mismatch="w"),
        "save: None": lambda g: save(None, "/nowhere"),
        "save: folder": lambda g: save({}, 3),
    },
    MissingParameterError: {
        "shard_parameter: no such name": lambda g: shard_parameter(linear(), "wieght", ROWS),
    },
    ProcessGroupError: {
        "shard_parameter: no such source": lambda g: shard_parameter(linear(), "weight", ROWS, 7),
    },
    CheckpointError: {
        "load_state_dict: empty": lambda g: optimizer().load_state_dict({}),
        "load_state_dict: state": lambda g: optimizer().load_state_dict(
            {"state": {"weight": 3}, "param_groups": groups()}
        ),
        "load_state_dict: torch's": lambda g: optimizer().load_state_dict(
            torch.optim.SGD(linear().parameters(), lr=0.1).state_dict()
        ),
        "load: no checkpoint": lambda g: load({}, "/nowhere"),
    },
}

BUILTIN = {
    ArgumentTypeError: TypeError,
    CheckpointError: RuntimeError,
    LocalShardError: ValueError,
    MissingParameterError: AttributeError,
    ParameterError: ValueError,
    ProcessGroupError: RuntimeError,
    RankMismatchError: ValueError,
    ShardingSpecError: ValueError,
    SpecTypeError: NotImplementedError,
    UnsupportedOpError: RuntimeError,
}


@on_ranks(2)
@pytest.mark.parametrize("table", ["SPECS", "TENSORS", "MODULES"])
def test_wrong_arguments_raise_typed_errors_on_all_ranks(table: str) -> None:
    g = given()
    tables: dict[str, Wrong] = {"SPECS": SPECS, "TENSORS": TENSORS, "MODULES": MODULES}
    calls = [
        (kind, name, call)
        for kind, of_kind in tables[table].items()
        for name, call in of_kind.items()
    ]
    for kind, name, call in calls:
        with pytest.raises(kind, match=r"\S") as raised:
            call(g)
        assert raised.type is kind, f"{name}: {raised.value!r}"
        assert issubclass(kind, BUILTIN[kind])
        counted: list[Any] = [None, None]
        dist.all_gather_object(counted, name)  # no rank is in another collective
        assert counted == [name, name]


@on_ranks(2)
def test_a_class_of_torch_is_named_with_its_counterpart() -> None:
    g = given()
    with pytest.raises(
        ArgumentTypeError,
        match=r"got torch's own .*\.ChunkShardingSpec: use shoal_shard_api\.ChunkShardingSpec",
    ):
        g.tensor.resharded(g.torch_spec)
    with pytest.raises(ArgumentTypeError, match="DeviceMesh"):
        api.zeros(ROWS, 4, process_group=g.mesh)


def test_old_names_of_errors_give_the_ones_that_replace_them() -> None:
    for name, builtin in (("IndexRangeError", IndexError), ("PlanTypeError", TypeError)):
        with pytest.deprecated_call(match=f"errors.{name} is now"):
            assert issubclass(getattr(api.errors, name), builtin)
