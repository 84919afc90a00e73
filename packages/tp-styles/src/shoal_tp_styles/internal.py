"""For authors of layers: names of this package that the packages above use beside its facade.

They may change with any release; all packages are released together.

May import: _torch, apply, lowering, modules, plan, sharding, styles.
"""

from ._torch import StorageReference as StorageReference, autocast_dtype as autocast_dtype
from .apply.apply import apply_sharding as apply_sharding, shardings_of as shardings_of
from .apply.fused_parameters import block_rows as block_rows, make_adjacent as make_adjacent
from .lowering.collective_functions import find_token as find_token, keep_token as keep_token
from .lowering.lowered import lowered_of as lowered_of, nbytes as nbytes
from .lowering.parameters import HOW_TO_QUANTIZE as HOW_TO_QUANTIZE
from .lowering.ports import (
    Boundary as Boundary,
    from_local as from_local,
    partial_output as partial_output,
    replicated_input as replicated_input,
    sharded_input as sharded_input,
)
from .modules.embedding import (
    ColumnEmbedding as ColumnEmbedding,
    OwnRows as OwnRows,
    RowEmbedding as RowEmbedding,
    check_ids as check_ids,
)
from .modules.own_forward import (
    Params as Params,
    SequenceDropout as SequenceDropout,
    Tokenwise as Tokenwise,
    is_norm as is_norm,
)
from .modules.sharded_linear import ColumnLinear as ColumnLinear, RowLinear as RowLinear
from .plan.preview import to_meta as to_meta
from .plan.resolve import (
    AutoPlan as AutoPlan,
    Plan as Plan,
    apply_plan as apply_plan,
    named_styles as named_styles,
    progress as progress,
    resolve as resolve,
    sharded_parameters as sharded_parameters,
)
from .plan.verify import map_tensors as map_tensors, try_plan as try_plan
from .sharding.module_kinds import (
    class_of as class_of,
    experts_of as experts_of,
    kinds_of as kinds_of,
    out_features as out_features,
)
from .sharding.module_sharding import COMPLETION as COMPLETION, Adapter as Adapter
from .styles.linear import COLWISE as COLWISE
from .styles.lora import initialize_adapter as initialize_adapter
