"""For authors of layers: names of this package that the packages above use beside its facade.

They may change with any release; all packages are released together.

May import: _torch, api, argument_types, host_memory, layout, modules, random_layouts, redistribute, scopes, tensor.
"""

from ._torch.compiling import (
    eager_only as eager_only,
    is_compiling as is_compiling,
    is_tracing as is_tracing,
    whole_when_compiled as whole_when_compiled,
)
from ._torch.interception import (
    FunctionMode as FunctionMode,
    ReplacedAttention as ReplacedAttention,
    TorchDispatchMode as TorchDispatchMode,
)
from ._torch.tensors import (
    FakeTensor as FakeTensor,
    TensorNote as TensorNote,
    apply as apply,
    backward_number as backward_number,
    dispatch_modes as dispatch_modes,
    in_backward as in_backward,
    local_of as local_of,
    make_wrapper as make_wrapper,
    memory_of as memory_of,
    pytree as pytree,
    saving_state as saving_state,
    selectively_checkpointed as selectively_checkpointed,
    unwatched as unwatched,
    unwatched_functions as unwatched_functions,
)
from .api.constructors import distributed_by as distributed_by
from .argument_types import (
    check_device_mesh as check_device_mesh,
    submodule_of as submodule_of,
    takes as takes,
)
from .host_memory import (
    device_of_numbers as device_of_numbers,
    download as download,
    upload as upload,
    upload_packed as upload_packed,
)
from .layout.boxes import (
    Box as Box,
    box_at as box_at,
    format_box as format_box,
    gap as gap,
    grid as grid,
    overlap as overlap,
    shape_of as shape_of,
    slices_of as slices_of,
    spans as spans,
    volume as volume,
    whole_box as whole_box,
)
from .layout.dim_sharding import shard_sizes as shard_sizes
from .modules.forwards import (
    ModuleForward as ModuleForward,
    arithmetic as arithmetic,
    complete_forms as complete_forms,
    current_arithmetic as current_arithmetic,
    forward_of as forward_of,
    set_forward as set_forward,
)
from .modules.owners import (
    carry_gradient as carry_gradient,
    carry_over as carry_over,
    check_plain_tensors as check_plain_tensors,
    check_styled as check_styled,
    extended as extended,
    given_back as given_back,
    has_hooks as has_hooks,
    holds_tensors as holds_tensors,
    in_turns as in_turns,
    note_replaced as note_replaced,
    owners_of as owners_of,
    refuse_save_pretrained as refuse_save_pretrained,
    register_owner as register_owner,
)
from .random_layouts.functions import active as active, drawers_of as drawers_of
from .random_layouts.layouts import (
    UNSEEN as UNSEEN,
    global_stride as global_stride,
    in_memory_as as in_memory_as,
    layout_of as layout_of,
    note_layout as note_layout,
)
from .random_layouts.region import (
    current_watch as current_watch,
    unwatch_draws as unwatch_draws,
    watch_draws as watch_draws,
)
from .redistribute.blocks import (
    Blocks as Blocks,
    Shards as Shards,
    exchange_blocks as exchange_blocks,
    move_blocks as move_blocks,
)
from .redistribute.scatter import Scatter as Scatter, scattering as scattering
from .redistribute.shards_in_flight import (
    ShardsInFlight as ShardsInFlight,
    given_away as given_away,
    redistribute_shards as redistribute_shards,
)
from .redistribute.steps import format_bytes as format_bytes
from .scopes import ScopedValue as ScopedValue
from .tensor.dtensor import local_shard as local_shard
from .tensor.gradients import (
    GradRoute as GradRoute,
    first_order_only as first_order_only,
    grad_hooked as grad_hooked,
    grad_route as grad_route,
    in_groups as in_groups,
    leaf_route as leaf_route,
    running_pass as running_pass,
)
from .tensor.serialization import chunks_of as chunks_of, write_items as write_items
