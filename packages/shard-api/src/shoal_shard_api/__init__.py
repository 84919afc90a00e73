"""Sharded tensors described by specs: ShardedTensor, sharding plans and sharders."""

from .__about__ import __version__
from .base import ShardedTensorBase
from .chunk_spec import ChunkShardingSpec, get_chunk_sharding_params, get_chunked_dim_size, get_split_size
from .create import empty, full, init_from_local_shards, ones, rand, randn, zeros
from .enumerable_spec import EnumerableShardingSpec, _infer_sharding_spec_from_shards_metadata
from .errors import (
    CheckpointError,
    LocalShardError,
    MissingParameterError,
    NotExpressibleError,
    ParameterError,
    PlanConflictError,
    PlanTypeError,
    ProcessGroupError,
    RankMismatchError,
    SharderPathError,
    ShardingSpecError,
    UnsupportedOpError,
)
from .groups import _get_current_process_group, load_with_process_group
from .metadata import MEM_FORMAT_ENCODING, ShardedTensorMetadata, ShardMetadata, TensorProperties
from .module import _collect_local_shard, _reshard_output, _shard_tensor, shard_module, shard_parameter
from .ops import _sharded_op_impl, custom_sharded_op_impl, implicit_reshard
from .optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from .plan import Sharder, ShardingPlan, ShardingPlanner
from .shard import Shard, narrow_tensor, narrow_tensor_by_index
from .sharded_tensor import ShardedTensor
from .spec import (
    DevicePlacementSpec,
    PlacementSpec,
    ShardingSpec,
    _dispatch_custom_op,
    _has_custom_op,
    check_tensor,
    custom_sharding_spec_op,
    validate_non_overlapping_shards_metadata,
)
from .state_dict import pre_load_state_dict_hook, state_dict_hook

__all__ = [
    "MEM_FORMAT_ENCODING",
    "CheckpointError",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "LocalShardError",
    "MissingParameterError",
    "NotExpressibleError",
    "ParameterError",
    "PlacementSpec",
    "PlanConflictError",
    "PlanTypeError",
    "ProcessGroupError",
    "RankMismatchError",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "SharderPathError",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardingSpecError",
    "TensorProperties",
    "UnsupportedOpError",
    "__version__",
    "_collect_local_shard",
    "_dispatch_custom_op",
    "_get_current_process_group",
    "_has_custom_op",
    "_infer_sharding_spec_from_shards_metadata",
    "_reshard_output",
    "_shard_tensor",
    "_sharded_op_impl",
    "check_tensor",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "full",
    "get_chunk_sharding_params",
    "get_chunked_dim_size",
    "get_split_size",
    "implicit_reshard",
    "init_from_local_shards",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "narrow_tensor",
    "narrow_tensor_by_index",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "validate_non_overlapping_shards_metadata",
    "zeros",
]
