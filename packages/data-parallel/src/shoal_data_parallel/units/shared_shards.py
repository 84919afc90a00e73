"""The shards that all replicas share, of parameters whose leaves are divided among the replicas.

With 2 replicas and 2 shards, and a weight of 8 rows:

                     rows of a rank    made by
    leaf             2                 the optimizer's step
    shared shard     4                 a gather over the replicas, in the first forward after a step
    gathered         8                 a gather over the shards, in each forward and backward

A rank keeps the shared shards from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_dtensor import Spec
from shoal_dtensor.internal import ShardsInFlight, redistribute_shards
from shoal_mesh import purpose

from ..parameters.sharded_parameters import ShardedParameter
from ..parameters.shards_to_send import shards_to_send

# The process groups of a world, and the version of one leaf.
_Version = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Updates:
    """Leaves in flight to the other replicas."""

    values: ShardsInFlight
    # the layouts and the versions of the shared shards that arrive, by the parameter's index
    layouts: dict[int, Spec]
    versions: dict[int, _Version]


class SharedShards:
    """The shards of one unit that all replicas have.

    Args:
        name: the unit's name, for the purpose of collectives.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # by the parameter's index
        self._tensors: dict[int, Tensor] = {}
        self._versions: dict[int, _Version] = {}
        self._in_flight: _Updates | None = None

    def start_to_update(self, parameters: Sequence[ShardedParameter]) -> None:
        """Send the leaves that were written to since they were sent last.

        Leaves of frozen parameters are sent once. A new world gets all leaves, because a collective
        of the old world may have ended on some ranks only.
        """
        world = dist.group.WORLD
        versions = [(world and ref(world), *p.version()) for p in parameters]
        sent = dict(self._versions)
        if self._in_flight is not None:
            sent |= self._in_flight.versions
        stale = [i for i, version in enumerate(versions) if sent.get(i) != version]
        if not stale:
            return
        self.finish()
        moves = [parameters[i].move_to_replicas() for i in stale]
        with purpose(f"fully_shard gathers {self._name} over replicas"):
            values = redistribute_shards(shards_to_send([parameters[i] for i in stale]), moves)
        layouts = [layout for _, layout in moves]
        self._in_flight = _Updates(
            values, dict(zip(stale, layouts, strict=True)), {i: versions[i] for i in stale}
        )

    def finish(self) -> None:
        """Wait for the leaves in flight, and write them to the shared shards."""
        updates = self._in_flight
        self._in_flight = None
        if updates is None:
            return
        # later forwards, too, use shards that were gathered under inference_mode
        with torch.inference_mode(False), torch.no_grad():
            updates.values.wait(lambda: self._memory(updates.layouts))
        self._versions |= updates.versions

    def current(self, parameters: Sequence[ShardedParameter]) -> list[Tensor]:
        """Return the shared shards of all parameters, with the values of the leaves."""
        self.start_to_update(parameters)
        self.finish()
        return [self._tensors[i] for i in range(len(parameters))]

    def _memory(self, layouts: dict[int, Spec]) -> list[Tensor]:
        """Return the tensors that updates are written to; make those that do not exist."""
        for i, layout in layouts.items():
            held = self._tensors.get(i)
            is_usable = held is not None and (held.shape, held.dtype) == (
                layout.local_shape,
                layout.dtype,
            )
            if not is_usable:
                self._tensors[i] = torch.empty(
                    layout.local_shape, dtype=layout.dtype, device=layout.mesh.device_type
                )
        return [self._tensors[i] for i in layouts]
