"""The standing rules: all family tables, one line each."""

from __future__ import annotations

import torch

from .._torch import OpOverload
from .index.data_dependent import DATA_DEPENDENT
from .index.gather_scatter import GATHER_SCATTER
from .index.indexing import INDEXING
from .language.rule import Rule, Table
from .language.rule_tables import merge
from .math.argmax import ARGMAX
from .math.creation import CREATION
from .math.cumulative import CUMULATIVE
from .math.linalg import LINALG
from .math.matmul import MATMUL
from .math.pointwise import ELEMENT_BY_ELEMENT, POINTWISE
from .math.random_ops import RANDOM
from .math.reduction import REDUCTION
from .math.searching import SEARCHING
from .math.sorting import SORTING
from .nn.attention import ATTENTION
from .nn.convolution import CONVOLUTION
from .nn.embedding import EMBEDDING
from .nn.loss import LOSS
from .nn.norms import NORMS
from .nn.optimizer import OPTIMIZER
from .nn.planes import PLANES
from .nn.pooling import POOLING
from .nn.resampling import RESAMPLING
from .nn.softmax import SOFTMAX
from .shape.concat_pad import CONCAT_PAD
from .shape.diagonal import DIAGONAL
from .shape.roll_repeat import ROLL_REPEAT
from .shape.slicing import SLICING
from .shape.views import VIEWS

TABLE: Table = merge(
    argmax=ARGMAX,
    attention=ATTENTION,
    concat_pad=CONCAT_PAD,
    convolution=CONVOLUTION,
    creation=CREATION,
    cumulative=CUMULATIVE,
    data_dependent=DATA_DEPENDENT,
    diagonal=DIAGONAL,
    embedding=EMBEDDING,
    gather_scatter=GATHER_SCATTER,
    indexing=INDEXING,
    linalg=LINALG,
    loss=LOSS,
    matmul=MATMUL,
    norms=NORMS,
    optimizer=OPTIMIZER,
    planes=PLANES,
    pointwise=POINTWISE,
    pooling=POOLING,
    random=RANDOM,
    reduction=REDUCTION,
    resampling=RESAMPLING,
    roll_repeat=ROLL_REPEAT,
    searching=SEARCHING,
    slicing=SLICING,
    softmax=SOFTMAX,
    sorting=SORTING,
    views=VIEWS,
)


def standing_rule(op: OpOverload) -> Rule | None:
    """The rule of a table; for operators outside of ATen that torch's tag says to be pointwise, the one of such."""
    rule = TABLE.get(op)
    if rule is None and op.namespace != "aten" and torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
        return ELEMENT_BY_ELEMENT
    return rule
