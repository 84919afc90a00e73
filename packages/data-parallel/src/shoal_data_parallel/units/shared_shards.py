"""Shared shards: the shards of a parameter that are equal on all replicas.

With `shard_optimizer=True`, a parameter exists on three levels. With 2 replicas and 2 shards, and a
weight of 8 rows:

                     rows of a rank    made by
    leaf             2                 the optimizer's step
    shared shard     4                 a gather over the replicas, in the first forward after a step
    gathered         8                 a gather over the shards, in each forward and backward

The leaf is the parameter that the optimizer gets: the replicas divide each shard among themselves.
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

from ..parameters.sharded_parameters import ShardedParameter, shards_to_send

# A weak reference to the default process group, followed by the version of one leaf.
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

        Leaves of frozen parameters are never written to, so they are sent once. After
        `restart_world` all leaves are sent again, because a collective of the old world may have
        ended on some ranks only.
        """
        world = dist.group.WORLD
        world_version = None if world is None else ref(world)
        versions = [(world_version, *parameter.version()) for parameter in parameters]
        sent = dict(self._versions)
        if self._in_flight is not None:
            sent |= self._in_flight.versions
        stale = [i for i, version in enumerate(versions) if sent.get(i) != version]
        if not stale:
            return
        # Only one update is in flight at a time. The update before ends here, even if it has none
        # of the stale leaves.
        self.finish()
        stale_parameters = [parameters[i] for i in stale]
        moves = [parameter.move_to_replicas() for parameter in stale_parameters]
        with purpose(f"fully_shard gathers {self._name} over replicas"):
            values = redistribute_shards(shards_to_send(stale_parameters), moves)
        shared_layouts = [move.target for move in moves]
        self._in_flight = _Updates(
            values,
            layouts=dict(zip(stale, shared_layouts, strict=True)),
            versions={i: versions[i] for i in stale},
        )

    def finish(self) -> None:
        """Wait for the leaves in flight, and write them to the shared shards."""
        updates = self._in_flight
        self._in_flight = None
        if updates is None:
            return
        # The forward that waits may run in inference_mode. The memory that is made there would be
        # inference tensors, which a later forward with autograd cannot use.
        with torch.inference_mode(False), torch.no_grad():
            # `wait` calls the function when the values have arrived, not before.
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
