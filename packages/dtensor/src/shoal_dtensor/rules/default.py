"""The standing rules: all family tables, one line each."""

from __future__ import annotations

from .attention import ATTENTION
from .create import CREATE
from .embedding import EMBEDDING
from .linalg import LINALG
from .loss import LOSS
from .norm import NORM
from .optim import OPTIM
from .pointwise import POINTWISE
from .reduce import REDUCE
from .rule import Table
from .slice import SLICE
from .softmax import SOFTMAX
from .table import merge
from .view import VIEW

__all__ = ["TABLE"]

TABLE: Table = merge(
    attention=ATTENTION,
    create=CREATE,
    embedding=EMBEDDING,
    linalg=LINALG,
    loss=LOSS,
    norm=NORM,
    optim=OPTIM,
    pointwise=POINTWISE,
    reduce=REDUCE,
    slice=SLICE,
    softmax=SOFTMAX,
    view=VIEW,
)
