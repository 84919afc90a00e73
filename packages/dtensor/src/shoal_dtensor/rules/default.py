"""The standing rules: all family tables, one line each."""

from __future__ import annotations

from .attention import ATTENTION
from .cat import CAT
from .create import CREATE
from .dynamic import DYNAMIC
from .elementwise import ELEMENTWISE
from .embed import EMBED
from .embedding import EMBEDDING
from .extreme import EXTREME
from .gather import GATHER
from .index import INDEX
from .linalg import LINALG
from .loss import LOSS
from .mask import MASK
from .norm import NORM
from .optim import OPTIM
from .reduce import REDUCE
from .rule import Table
from .scan import SCAN
from .scatter import SCATTER
from .search import SEARCH
from .shift import SHIFT
from .slice import SLICE
from .softmax import SOFTMAX
from .sort import SORT
from .table import merge
from .triangle import TRIANGLE
from .value import VALUE
from .view import VIEW

__all__ = ["TABLE"]

TABLE: Table = merge(
    attention=ATTENTION,
    cat=CAT,
    create=CREATE,
    dynamic=DYNAMIC,
    embed=EMBED,
    embedding=EMBEDDING,
    extreme=EXTREME,
    gather=GATHER,
    index=INDEX,
    linalg=LINALG,
    loss=LOSS,
    mask=MASK,
    norm=NORM,
    optim=OPTIM,
    elementwise=ELEMENTWISE,
    reduce=REDUCE,
    scan=SCAN,
    scatter=SCATTER,
    search=SEARCH,
    shift=SHIFT,
    slice=SLICE,
    softmax=SOFTMAX,
    sort=SORT,
    triangle=TRIANGLE,
    value=VALUE,
    view=VIEW,
)
