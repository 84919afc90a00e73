"""Sharded tensors on a device mesh: placements, redistribution, sharding rules, random numbers."""

from functools import partial

from shoal_mesh import DeviceMesh, init_device_mesh
from shoal_mesh.internal import facade

from . import errors
from .__about__ import __version__
from ._torch.compiled_gradients import convert_compiled_gradients
from ._torch.exchanges import keep_hooks_in_exchanges
from ._torch.interception import (
    explain_weights_only,
    guard_memory_exports,
    keep_whole,
)
from .api.constructors import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from .api.custom_ops import local_map, register_rule, register_sharding
from .api.debug_mode import DebugMode, ExplicitRedistributionContext
from .api.explain import (
    draw_layout,
    draw_layouts,
    draw_plan,
    draw_sharding,
    explain,
    visualize_sharding,
)
from .api.full_tensor import full_tensor
from .api.random import check_random_state, is_rng_supported_mesh, manual_seed
from .api.state_dicts import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    install_in_torch,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from .before_fork import register_operators
from .dispatch.dispatch import cache_info, clear_cache
from .errors import CommunicationForbiddenError, ShoalTensorError
from .layout.partition_spec import PartitionSpec
from .layout.placements import Partial, Placement, Replicate, Shard, StridedShard
from .layout.spec import Spec
from .layout.tensor_meta import ShardOrderEntry, TensorMeta
from .layout.torch_names import (
    INSTEAD,
    DTensorSpec,
    compute_global_tensor_shape,
    compute_local_shape_and_global_offset,
    compute_local_tensor_info,
)
from .optim.clip_grad import clip_grad_norm_
from .optim.local_step import install_local_step, local_step
from .redistribute.shards_in_flight import coalesce
from .rng.state import get_rng_state, random_mode, set_random_mode, set_rng_state
from .scopes import checked_replicas, communication, implicit_replication, unknown_ops
from .tensor.dtensor import (
    DTensor,
    gradient_of_output,
    safe_globals,
    zeros_of_output,
)
from .tensor.gradients import update_hooks
from .tensor.serialization import install_state_dict_copies_of_dtensors, refuse_memory

_StridedShard = StridedShard  # torch's name

Spec.on_first_use += [
    install_in_torch,
    install_local_step,
    partial(
        convert_compiled_gradients,
        DTensor,
        convert_plain=gradient_of_output,
        make_zeros=zeros_of_output,
    ),
    partial(install_state_dict_copies_of_dtensors, DTensor),
    partial(guard_memory_exports, DTensor, refuse_memory),
    partial(keep_hooks_in_exchanges, DTensor, update_hooks),
    partial(
        explain_weights_only,
        "shoal_",
        "To allow all parts of a DTensor, this line is enough: "
        "torch.serialization.add_safe_globals(shoal_dtensor.safe_globals())",
    ),
    register_operators,
    partial(keep_whole, ["one_hot"]),
]

__all__ = [
    "CommunicationForbiddenError",
    "DTensor",
    "DTensorSpec",
    "DebugMode",
    "DeviceMesh",
    "ExplicitRedistributionContext",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Replicate",
    "Shard",
    "ShardOrderEntry",
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
    "compute_global_tensor_shape",
    "compute_local_shape_and_global_offset",
    "compute_local_tensor_info",
    "distribute_module",
    "distribute_tensor",
    "draw_layout",
    "draw_layouts",
    "draw_plan",
    "draw_sharding",
    "empty",
    "errors",
    "explain",
    "full",
    "full_tensor",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_rng_state",
    "get_state_dict",
    "implicit_replication",
    "init_device_mesh",
    "is_rng_supported_mesh",
    "linspace",
    "local_map",
    "local_step",
    "logspace",
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
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_random_mode",
    "set_rng_state",
    "set_state_dict",
    "unknown_ops",
    "visualize_sharding",
    "zeros",
]

__dir__, __getattr__ = facade(__name__, __all__, INSTEAD)
