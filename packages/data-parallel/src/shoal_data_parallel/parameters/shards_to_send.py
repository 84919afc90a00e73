"""The tensors that ranks send to gather sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal_dtensor.internal import ShardsInFlight, local_shard, redistribute_shards, upload_packed
from shoal_mesh import purpose

from .layout_move import LayoutMove
from .sharded_parameters import ShardedParameter


def shards_to_send(parameters: Sequence[ShardedParameter]) -> list[Tensor]:
    """Return the shards in the dtypes of the computation and on the device of the mesh.

    Shards on the host are sent to the device all together.
    """
    if not parameters:
        return []
    leaves: list[Any] = [parameter.leaf for parameter in parameters]
    shards: list[Tensor] = [local_shard(leaf).detach() for leaf in leaves]
    device = torch.device(parameters[0].gathered.mesh.device_type)
    dtypes = [p.resting.dtype for p in parameters]
    on_host = [i for i, shard in enumerate(shards) if shard.is_cpu and device.type != "cpu"]
    if on_host:
        sent = upload_packed([shards[i] for i in on_host], device, [dtypes[i] for i in on_host])
        for i, shard in zip(on_host, sent, strict=True):
            shards[i] = shard
    return [shard.to(device, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]


def parts_to_send(parameters: Sequence[ShardedParameter]) -> tuple[list[Tensor], list[LayoutMove]]:
    """Return the tensors that are sent for all parameters, with their moves.

    That is one shard for each parameter, unless its class decides what is gathered.
    """
    # Shards of parameters without an extension are copied to the device all together.
    plain = [i for i, parameter in enumerate(parameters) if parameter.extension is None]
    shards = shards_to_send([parameters[i] for i in plain])
    shard_at = dict(zip(plain, shards, strict=True))
    tensors: list[Tensor] = []
    moves: list[LayoutMove] = []
    for i, parameter in enumerate(parameters):
        if parameter.extension is None:
            tensors.append(shard_at[i])
            moves.append(LayoutMove(parameter.resting, parameter.gathered))
            continue
        shard = parameter.shard_on_device()
        parts, moves_of_parts = parameter.extension.send(shard)
        tensors += parts
        moves += moves_of_parts
    return tensors, moves


def start_to_gather(parameters: Sequence[ShardedParameter], text: str) -> ShardsInFlight:
    """Send the shards of all parameters together."""
    with purpose(text):
        tensors, moves = parts_to_send(parameters)
        return redistribute_shards(tensors, moves)
