"""`LayoutMove`: the layouts of one tensor before and after a redistribution."""

from __future__ import annotations

from typing import NamedTuple

from shoal_dtensor import Spec


class LayoutMove(NamedTuple):
    """The layouts of one tensor before and after a redistribution.

    Example: a gather of a weight of 8 rows over 2 ranks, from shards of 4 rows.

    Attributes:
        source: the layout of the local tensor that is sent.
        target: the layout of the local tensor that arrives.
    """

    source: Spec
    target: Spec
