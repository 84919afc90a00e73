"""Names of this folder for the packages above, under one name."""

# mypy: implicit-reexport
# ruff: noqa: F401

from .._torch.process_groups import group_name, group_ranks
from .assertions import (
    assert_tensor_type,
    check_source,
    moved_type,
    on_current_mesh,
    translate_type,
    type_on,
)
from .checker import Checker, local, typecheck
from .checker_state import (
    active_checker,
    is_active,
    is_strict,
    is_type_checking,
    leave_unchecked,
    paused,
    tracing,
    varying_axes,
)
from .declared import (
    DECOMPOSITIONS,
    FINDERS,
    LOCAL_FUNCTIONS,
    Declaration,
    declare_local,
    declare_types,
)
from .inference.infer import infer_types
from .inference.messages import hide_frames_of, user_line
from .inference.operand_layouts import spec_of_type
from .inference.operator_call import LocalOperatorCall, Operand, local_meta
from .module_boundaries import BOUNDARY_FINDERS
from .types.axis_types import (
    AnyAxisType,
    AxisType,
    FoldedShard,
    I,
    P,
    Parts,
    R,
    Shard,
    V,
    joined_type,
    local_type,
    pending,
    placement_of,
    type_of_placement,
)
from .types.mesh_axes import (
    MESH,
    AxisLike,
    CurrentMesh,
    MeshAxis,
    axes_of,
    flatten_axes,
    normalize_axis,
    normalize_mesh,
    read_mesh,
    set_current_mesh,
)
from .types.tensor_types import (
    TensorType,
    axes_of_entry,
    is_constant,
    read_type,
    set_type,
    tensors_in,
    type_of,
)
