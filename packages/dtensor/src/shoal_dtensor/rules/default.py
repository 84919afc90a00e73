"""The standing rules: all family tables, one line each."""

from __future__ import annotations

from .attention import ATTENTION
from .batchnorm import BATCHNORM
from .cat import CAT
from .conv import CONV
from .create import CREATE
from .diagonal import DIAGONAL
from .distance import DISTANCE
from .dynamic import DYNAMIC
from .elementwise import ELEMENTWISE
from .embed import EMBED
from .embedding import EMBEDDING
from .extreme import EXTREME
from .fft import FFT
from .gather import GATHER
from .groupnorm import GROUPNORM
from .image import IMAGE
from .index import INDEX
from .linalg import LINALG
from .loss import LOSS
from .mask import MASK
from .matrix import MATRIX
from .norm import NORM
from .optim import OPTIM
from .random import RANDOM
from .reduce import REDUCE
from .rule import Table
from .scan import SCAN
from .scatter import SCATTER
from .search import SEARCH
from .segment import SEGMENT
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
    batchnorm=BATCHNORM,
    cat=CAT,
    conv=CONV,
    create=CREATE,
    diagonal=DIAGONAL,
    distance=DISTANCE,
    dynamic=DYNAMIC,
    elementwise=ELEMENTWISE,
    embed=EMBED,
    embedding=EMBEDDING,
    extreme=EXTREME,
    fft=FFT,
    gather=GATHER,
    groupnorm=GROUPNORM,
    image=IMAGE,
    index=INDEX,
    linalg=LINALG,
    loss=LOSS,
    mask=MASK,
    matrix=MATRIX,
    norm=NORM,
    optim=OPTIM,
    random=RANDOM,
    reduce=REDUCE,
    scan=SCAN,
    scatter=SCATTER,
    search=SEARCH,
    segment=SEGMENT,
    shift=SHIFT,
    slice=SLICE,
    softmax=SOFTMAX,
    sort=SORT,
    triangle=TRIANGLE,
    value=VALUE,
    view=VIEW,
)
