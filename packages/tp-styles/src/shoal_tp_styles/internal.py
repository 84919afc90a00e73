"""Internal interface: names that the packages above use in addition to the public facade.

These names may change with any release; all packages are released together.

May import: _torch, apply, lowering, modules, plan, sharding, styles.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from ._torch import StorageReference, autocast_dtype
from .apply.apply import BlockRows, apply_sharding, block_rows, make_adjacent, shardings_of
from .lowering.collective_functions import split
from .lowering.lowered import lowered_of, nbytes
from .lowering.parameters import HOW_TO_QUANTIZE
from .lowering.ports import (
    DTensorForward,
    from_local,
    partial_output,
    replicated_input,
    sharded_input,
)
from .lowering.shared_reduction import find_shared_input, keep_shared_input
from .modules.embedding import ColumnEmbedding, OwnRows, RowEmbedding, check_ids
from .modules.own_forward import Params, SequenceDropout, Tokenwise, is_norm
from .modules.sharded_linear import ColumnLinear, RowLinear
from .plan.preview import to_meta
from .plan.progress_bar import progress
from .plan.resolve import (
    AutoPlan,
    Plan,
    apply_plan,
    named_styles,
    resolve,
    sharded_parameters,
)
from .plan.verify import MOST_RANKS, kind_and_first_line, map_tensors, try_plan
from .sharding.module_kinds import class_of, experts_of, kinds_of, out_features
from .sharding.module_sharding import Adapter, StyleOrigin
from .styles.linear import COLWISE
from .styles.lora import initialize_adapter
