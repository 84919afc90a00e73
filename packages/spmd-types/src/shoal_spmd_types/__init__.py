"""Types for plain SPMD code: every tensor has a type per mesh axis, and a checker follows them.

The types along an axis: R and I are replicated values, whose gradients are partial sums (R) or
replicated too (I). P is a partial sum, S(i) is sharded along dim i, and V differs between ranks.
"""

from pathlib import Path

from shoal_dtensor.errors import SpmdTypeError
from shoal_dtensor.internal import I, P, R, ShardType as Shard, V, spmd
from shoal_mesh.internal import facade

from . import checker, rulecheck, rules, types
from .__about__ import __version__
from ._once import computed_once
from .checker import typecheck
from .collectives import all_gather, all_reduce, all_to_all, redistribute, reduce_scatter, unshard
from .conversions import convert, invariant_to_replicate, reinterpret, shard
from .dtensors import (
    dtensor_placement_to_spmd_type,
    spmd_redistribute,
    spmd_type_to_dtensor_placement,
)
from .emission.emit import EmittedProgram, emit
from .emission.recorder import EmissionError
from .registries import (
    register_autograd_function,
    register_decomposition,
    register_local_autograd_function,
    register_local_backward_hook,
)
from .rules import declare_by_method
from .runtime import (
    Infer,
    assert_local_type,
    assert_local_type_like,
    assert_type,
    assert_type_like,
    get_axis_local_type,
    get_local_type,
    get_partition_spec,
    has_local_type,
    local,
    local_map,
    maybe_get_axis_local_type,
    merge_types,
    mutate_type,
    no_typecheck,
    register_no_typecheck,
    reinterpret_mesh,
    reinterpret_no_grad,
    trace,
)
from .scalar import Scalar
from .state import (
    TYPE_CHECKING,
    current_mesh,
    current_mesh_all_names,
    current_mesh_names,
    is_type_checking,
    set_current_mesh,
)
from .types import (
    DimSharding,
    DTensorPropagationError,
    Invariant,
    LocalSpmdType,
    MeshAxis,
    Partial,
    PartitionSpec,
    PerMeshAxisLocalSpmdType,
    PerMeshAxisSpmdType,
    PerMeshAxisSpmdTypes,
    RedistributeError,
    Replicate,
    S,
    SpmdType,
    TensorSharding,
    Varying,
    normalize_axis,
    normalize_mesh,
    normalize_partition_spec,
    pending,
)

__all__ = [
    "TYPE_CHECKING",
    "DTensorPropagationError",
    "DimSharding",
    "EmissionError",
    "EmittedProgram",
    "I",
    "Infer",
    "Invariant",
    "LocalSpmdType",
    "MeshAxis",
    "P",
    "Partial",
    "PartitionSpec",
    "PerMeshAxisLocalSpmdType",
    "PerMeshAxisSpmdType",
    "PerMeshAxisSpmdTypes",
    "R",
    "RedistributeError",
    "Replicate",
    "S",
    "Scalar",
    "Shard",
    "SpmdType",
    "SpmdTypeError",
    "TensorSharding",
    "V",
    "Varying",
    "__version__",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "assert_local_type",
    "assert_local_type_like",
    "assert_type",
    "assert_type_like",
    "checker",
    "computed_once",
    "convert",
    "current_mesh",
    "current_mesh_all_names",
    "current_mesh_names",
    "dtensor_placement_to_spmd_type",
    "emit",
    "get_axis_local_type",
    "get_local_type",
    "get_partition_spec",
    "has_local_type",
    "invariant_to_replicate",
    "is_type_checking",
    "local",
    "local_map",
    "maybe_get_axis_local_type",
    "merge_types",
    "mutate_type",
    "no_typecheck",
    "normalize_axis",
    "normalize_mesh",
    "normalize_partition_spec",
    "pending",
    "redistribute",
    "reduce_scatter",
    "register_autograd_function",
    "register_decomposition",
    "register_local_autograd_function",
    "register_local_backward_hook",
    "register_no_typecheck",
    "reinterpret",
    "reinterpret_mesh",
    "reinterpret_no_grad",
    "rulecheck",
    "rules",
    "set_current_mesh",
    "shard",
    "spmd_redistribute",
    "spmd_type_to_dtensor_placement",
    "trace",
    "typecheck",
    "types",
    "unshard",
]

spmd.FINDERS.append(declare_by_method)
spmd.hide_frames_of(str(Path(__file__).parent))

__dir__, __getattr__ = facade(
    __name__,
    __all__,
    {
        "set_dist": "collectives use shoal_mesh; pass a process group to choose a backend",
        "traceback_filtering": "an error message begins with the line of the program",
    },
)
