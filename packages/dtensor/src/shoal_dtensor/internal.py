"""Names of this package for the packages above, not part of its public interface.

They may change with any release; all packages are released together.

May import: _torch, api, argument_types, crossings, dispatch, host_memory, layout, modules,
optim, random_layouts, redistribute, scopes, spmd, tensor.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from typing import TYPE_CHECKING, Any

from ._torch.compiling import eager_only, is_compiling, is_tracing, whole_when_compiled
from ._torch.interception import (
    FunctionMode,
    ReplacedAttention,
    TorchDispatchMode,
    guard_memory_exports,
)
from ._torch.operators import (
    DataDependentError,
    assert_on_device,
    overload_name,
    signature_of,
)
from ._torch.tensors import (
    FakeTensor,
    FakeTensorMode,
    TensorNote,
    accumulation_hooks,
    apply,
    backward_number,
    disabled_torch_function,
    dispatch_modes,
    gradient_hooks,
    in_backward,
    in_transform,
    is_zero_without_memory,
    local_of,
    make_wrapper,
    memory_of,
    pytree,
    saving_state,
    selectively_checkpointed,
    shares_memory,
    types_are_checked,
    unwatched,
    unwatched_by_subclasses,
    unwatched_functions,
)
from .api.constructors import distribute_with
from .argument_types import check_device_mesh, check_types, submodule_of
from .crossings import Crossings, install_crossings, nodes_below
from .dispatch.observed_calls import CallObserver, dispatch_observed
from .host_memory import device_of_numbers, download, upload, upload_packed
from .layout.boxes import (
    Box,
    box_at,
    edges,
    format_box,
    gap,
    grid,
    intersect,
    overlap,
    shape_of,
    slices_of,
    spans,
    volume,
    whole_box,
)
from .layout.dim_sharding import shard_sizes
from .modules.forwards import (
    DataDtypes,
    ModuleForward,
    arithmetic,
    complete_forwards,
    current_arithmetic,
    forward_of,
    set_forward,
)
from .modules.materialized import check_initialized, check_materialized, has_no_values
from .modules.owners import (
    Owner,
    batched_by_owner,
    carry_gradient,
    check_plain_tensors,
    has_hooks,
    holds_tensors,
    live_owners,
    move_attachments,
    note_replaced,
    owners_of,
    refuse_save_pretrained,
    register_owner,
    releasable_owners,
    save_whole_tensors,
    whole_parameters,
    with_methods,
)
from .modules.same_parameters import check_same_parameters
from .optim.norm_scope import register_norm_scope
from .random_layouts.asserted_layouts import assert_layout
from .random_layouts.drawing_calls import draws_numbers
from .random_layouts.drawing_modules import draws_now, find_drawing_modules
from .random_layouts.layouts import (
    UNSEEN,
    global_stride,
    known_layout,
    note_layout,
    with_memory_order_of,
)
from .random_layouts.region import current_watch, unwatch_draws, watch_draws
from .random_layouts.shadow_calls import run_without_memory
from .redistribute.blocks import (
    BlockMove,
    Blocks,
    Shards,
    exchange_blocks,
    move_blocks,
    move_blocks_compared,
)
from .redistribute.plan import plan as plan_between
from .redistribute.scatter import Scatter, scattering
from .redistribute.shards_in_flight import ShardsInFlight, drained, redistribute_shards
from .redistribute.steps import Plan, Step, format_bytes
from .scopes import context_scope, open_blocks, replicas_are_compared
from .spmd.first_check import on_first_check, types_unchecked
from .tensor.autograd import FromLocal
from .tensor.dtensor import local_shard
from .tensor.function_routes import replace_function, restore_function, run_function
from .tensor.gradients import (
    GradRoute,
    first_order_only,
    grad_hooked,
    grad_route,
    in_groups,
    leaf_route,
    running_notes,
    running_pass,
)
from .tensor.serialization import ShardedKind, chunks_of, install_state_dict_copies, write_items

if TYPE_CHECKING:
    from .spmd import interface as spmd
    from .spmd.types.axis_types import I, P, R, Shard as ShardType, V

_AXIS_TYPES = {"I": "I", "P": "P", "R": "R", "ShardType": "Shard", "V": "V"}


def __getattr__(name: str) -> Any:
    """Load the type checker at its first use, because few programs use it."""
    if name == "spmd":
        from .spmd import interface

        return interface
    if name in _AXIS_TYPES:
        from .spmd.types import axis_types

        return getattr(axis_types, _AXIS_TYPES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
