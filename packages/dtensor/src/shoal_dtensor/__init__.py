"""Sharded tensors on a device mesh: placements, redistribution, sharding rules and random numbers."""

from .__about__ import __version__
from .clip import clip_grad_norm_
from .dispatch import cache_info, clear_cache
from .distribute import distribute_module, distribute_tensor
from .errors import (
    CommunicationForbiddenError,
    InPlaceError,
    MixedTensorError,
    NoRuleError,
    OptimizerError,
    PlacementError,
    RandomStateError,
    RedistributeError,
    ShoalTensorError,
)
from .explain import Explanation, explain
from .factory import empty, full, ones, rand, randint, randn, randperm, zeros
from .local_map import local_map
from .local_step import local_step
from .per_dim import PerDim
from .placements import Partial, Placement, Replicate, Shard, StridedShard
from .policy import checked_replicas, communication, implicit_replication, unknown_ops
from .random import (
    check_random_state,
    get_rng_state,
    is_rng_supported_mesh,
    manual_seed,
    random_mode,
    set_random_mode,
    set_rng_state,
)
from .redistribute import coalesce
from .register import register_rule, register_sharding
from .spec import Spec, TensorMeta, compute_local_shape_and_global_offset
from .tensor import DTensor, deferred_gradients, safe_globals
from .visualize import draw_sharding, visualize_sharding

__all__ = [
    "CommunicationForbiddenError",
    "DTensor",
    "Explanation",
    "InPlaceError",
    "MixedTensorError",
    "NoRuleError",
    "OptimizerError",
    "Partial",
    "PerDim",
    "Placement",
    "PlacementError",
    "RandomStateError",
    "RedistributeError",
    "Replicate",
    "Shard",
    "ShoalTensorError",
    "Spec",
    "StridedShard",
    "TensorMeta",
    "__version__",
    "cache_info",
    "check_random_state",
    "checked_replicas",
    "clear_cache",
    "clip_grad_norm_",
    "coalesce",
    "communication",
    "compute_local_shape_and_global_offset",
    "deferred_gradients",
    "distribute_module",
    "distribute_tensor",
    "draw_sharding",
    "empty",
    "explain",
    "full",
    "get_rng_state",
    "implicit_replication",
    "is_rng_supported_mesh",
    "local_map",
    "local_step",
    "manual_seed",
    "ones",
    "rand",
    "randint",
    "randn",
    "random_mode",
    "randperm",
    "register_rule",
    "register_sharding",
    "safe_globals",
    "set_random_mode",
    "set_rng_state",
    "unknown_ops",
    "visualize_sharding",
    "zeros",
]
