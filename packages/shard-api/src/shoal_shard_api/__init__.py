"""Tensors sharded by specs: ShardedTensor, sharding specs, plans, Sharders, and an optimizer."""

from shoal_mesh.internal import facade

from . import errors
from .__about__ import __version__
from .errors import NotExpressibleError
from .module.shard_module import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    _collect_local_shard as _collect_local_shard,
    _reshard_output as _reshard_output,
    _shard_tensor as _shard_tensor,
    shard_module,
    shard_parameter,
)
from .module.sharded_optimizer import ShardedOptimizer, named_params_with_sharded_tensor
from .module.state_dict_hooks import pre_load_state_dict_hook, state_dict_hook
from .ops.dispatch import (
    _dispatch_custom_op as _dispatch_custom_op,
    _has_custom_op as _has_custom_op,
    _sharded_op_impl as _sharded_op_impl,
    custom_sharded_op_impl,
    custom_sharding_spec_op,
)
from .ops.lookup import replicated_indices
from .ops.via_dtensor import implicit_reshard
from .ranks.process_groups import (
    _get_current_process_group as _get_current_process_group,
    load_with_process_group,
)
from .spec.metadata import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from .spec.specs import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardingSpec,
    _infer_sharding_spec_from_shards_metadata as _infer_sharding_spec_from_shards_metadata,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
)
from .tensor.create import empty, full, init_from_local_shards, ones, rand, randn, zeros
from .tensor.shard import Shard, narrow_tensor, narrow_tensor_by_index
from .tensor.sharded_tensor import ShardedTensor
from .tensor.sharded_tensor_base import ShardedTensorBase

__all__ = [
    "MEM_FORMAT_ENCODING",
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "NotExpressibleError",
    "PlacementSpec",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "__version__",
    "check_tensor",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "errors",
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
    "replicated_indices",
    "shard_module",
    "shard_parameter",
    "state_dict_hook",
    "validate_non_overlapping_shards_metadata",
    "zeros",
]

__dir__, __getattr__ = facade(__name__, __all__)
