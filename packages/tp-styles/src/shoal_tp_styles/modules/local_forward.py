"""Modules whose forward reads parameters or counts of its own, beside children that have styles: attention.

heads: S, parameter: S -> as the forward computes it        no communication
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal_dtensor.errors import LayoutError
from shoal_mesh.internal import dataclass

from ..lowering.boundary import Boundary
from ..lowering.parameters import local_parameters, while_replaced
from ..sharding.module_sharding import OwnOptions


@dataclass(frozen=True, slots=True)
class LocalCounts(OwnOptions):
    """Names of integers that count heads or features which are sharded; a rank's forward reads its part of each."""

    names: tuple[str, ...]


class LocalForward(Boundary):
    """The module's forward, with the local shards of its own parameters, and its counts, in their place."""

    __slots__ = ("counts",)

    def resolve(self) -> None:
        options, ranks = self.sharding.options, self.comm.size
        self.counts: dict[str, int] = {}
        for name in options.names if isinstance(options, LocalCounts) else ():
            count = getattr(self.module, name)
            if count % ranks:
                raise LayoutError(
                    f"{self.sharding.style}: {name} of {type(self.module).__name__} is {count}, which {ranks} ranks do "
                    "not share equally; use fewer ranks, or ColwiseParallel(output_layouts=Replicate()) on the "
                    "projections, whose outputs all ranks then hold"
                )
            self.counts[name] = count // ranks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, local = partial(super().__call__, *args, **kwargs), local_parameters(dict(self.params))
        return while_replaced(forward, (self.params, local), (vars(self.module), self.counts))
