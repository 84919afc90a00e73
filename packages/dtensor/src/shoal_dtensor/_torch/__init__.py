"""The seam to torch: every private or unstable torch name that this package uses, by theme.

May import: nothing.
"""

from .compiling import (
    eager_only as eager_only,
    is_compiling as is_compiling,
    is_tracing as is_tracing,
    is_unrecorded as is_unrecorded,
    never_compiled as never_compiled,
    not_cached as not_cached,
    raised_as_it_is as raised_as_it_is,
    recorded as recorded,
    recorder as recorder,
    recorder_of_sizes as recorder_of_sizes,
    whole_when_compiled as whole_when_compiled,
)
from .engine import (
    adjusted_rate as adjusted_rate,
    apply as apply,
    at_end_of_backward as at_end_of_backward,
    backward_number as backward_number,
    current_node as current_node,
    function_of as function_of,
    in_backward as in_backward,
    is_transformed as is_transformed,
    make_state as make_state,
    orthogonalized as orthogonalized,
    saving_state as saving_state,
    set_thread_object as set_thread_object,
    steps_as as steps_as,
    thread_object as thread_object,
    unwatched_by_subclasses as unwatched_by_subclasses,
    unwatched_functions as unwatched_functions,
    will_run as will_run,
)
from .interception import around_state_dicts as around_state_dicts, register_dispatch as register_dispatch
from .operator_modes import (
    FunctionMode as FunctionMode,
    ReplacedAttention as ReplacedAttention,
    TorchDispatchMode as TorchDispatchMode,
    checkpoints as checkpoints,
    dispatch_modes as dispatch_modes,
    recomputed_in as recomputed_in,
    selectively_checkpointed as selectively_checkpointed,
    unwatched as unwatched,
)
from .operators import (
    Build as Build,
    DataDependentError as DataDependentError,
    OpOverload as OpOverload,
    change_shape as change_shape,
    decomposition_of as decomposition_of,
    direct as direct,
    group_ranks as group_ranks,
    has_views as has_views,
    is_collective as is_collective,
    out_of_sight as out_of_sight,
    reduction_name as reduction_name,
    results_of as results_of,
    shapes_of as shapes_of,
    unmarked_writes as unmarked_writes,
    view_of as view_of,
)
from .tensors import (
    BASE as BASE,
    TRACED as TRACED,
    FakeTensor as FakeTensor,
    TensorNote as TensorNote,
    around as around,
    count_write as count_write,
    disabled_torch_function as disabled_torch_function,
    make_wrapper as make_wrapper,
    memory_of as memory_of,
    pytree as pytree,
    shares_memory as shares_memory,
    split as split,
    with_conjugates as with_conjugates,
)
