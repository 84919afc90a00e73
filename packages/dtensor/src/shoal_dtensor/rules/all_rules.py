"""The table of all rules, merged from the tables of the families of operators."""

from __future__ import annotations

from .index.data_dependent import DATA_DEPENDENT
from .index.gather_scatter import GATHER_SCATTER
from .index.indexing import INDEXING
from .language.rule import Table, merge
from .math.creation import CREATION
from .math.grouped_matmul import GROUPED_MATMUL
from .math.matmul import MATMUL
from .math.ordering import ORDERING
from .math.pointwise import POINTWISE
from .math.reduction import REDUCTION
from .math.scaled_matmul import SCALED_MATMUL
from .nn.attention import ATTENTION
from .nn.loss import LOSS
from .nn.norms import NORMS
from .nn.windows import WINDOWED
from .shape.rearrangement import REARRANGEMENT
from .shape.slicing import SLICING
from .shape.views import VIEWS

TABLE: Table = merge(
    attention=ATTENTION,
    creation=CREATION,
    data_dependent=DATA_DEPENDENT,
    gather_scatter=GATHER_SCATTER,
    grouped_matmul=GROUPED_MATMUL,
    indexing=INDEXING,
    loss=LOSS,
    matmul=MATMUL,
    norms=NORMS,
    ordering=ORDERING,
    pointwise=POINTWISE,
    rearrangement=REARRANGEMENT,
    reduction=REDUCTION,
    scaled_matmul=SCALED_MATMUL,
    slicing=SLICING,
    views=VIEWS,
    windowed=WINDOWED,
)
