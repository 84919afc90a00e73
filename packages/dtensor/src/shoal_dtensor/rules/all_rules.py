"""The standing rules: all family tables, one line each."""

from __future__ import annotations

import torch

from .._torch import OpOverload
from .index.data_dependent import DATA_DEPENDENT
from .index.gather_scatter import GATHER_SCATTER
from .index.indexing import INDEXING
from .language.rule import Rule, Table, merge
from .math.creation import CREATION
from .math.matmul import MATMUL
from .math.ordering import ORDERING
from .math.pointwise import ELEMENT_BY_ELEMENT, POINTWISE
from .math.reduction import REDUCTION
from .nn.attention import ATTENTION
from .nn.convolution import CONVOLUTION
from .nn.loss import LOSS
from .nn.norms import NORMS
from .nn.pooling import POOLING
from .shape.rearrangement import REARRANGEMENT
from .shape.slicing import SLICING
from .shape.views import VIEWS

TABLE: Table = merge(
    attention=ATTENTION,
    convolution=CONVOLUTION,
    creation=CREATION,
    data_dependent=DATA_DEPENDENT,
    gather_scatter=GATHER_SCATTER,
    indexing=INDEXING,
    loss=LOSS,
    matmul=MATMUL,
    norms=NORMS,
    ordering=ORDERING,
    pointwise=POINTWISE,
    pooling=POOLING,
    rearrangement=REARRANGEMENT,
    reduction=REDUCTION,
    slicing=SLICING,
    views=VIEWS,
)


def standing_rule(op: OpOverload) -> Rule | None:
    """The rule of a table; for operators outside of ATen that torch's tag says to be pointwise, the one of such."""
    rule = TABLE.get(op)
    if rule is None and op.namespace != "aten" and torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
        return ELEMENT_BY_ELEMENT
    return rule
