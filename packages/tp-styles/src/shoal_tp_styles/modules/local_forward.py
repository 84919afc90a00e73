"""Modules whose forward reads parameters of its own, beside children that have styles: attention with sinks.

heads: S, parameter: S -> as the forward computes it        no communication
"""

from __future__ import annotations

from typing import Any

from ..lowering.boundary import Boundary
from ..lowering.parameters import local_parameters

__all__ = ["LocalForward"]


class LocalForward(Boundary):
    """The module's forward, with the local shards of its own parameters in their place."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        table = self.params
        saved = dict(table)
        try:
            table.update(local_parameters(saved))
            return super().__call__(*args, **kwargs)
        finally:
            table.update(saved)
