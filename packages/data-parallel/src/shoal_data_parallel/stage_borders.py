"""DTensors between pipeline stages, as the local tensors that torch's stages send.

The ranks of a stage and of the next one are along the same axes of two meshes. A rank sends its
shard; the rank that receives it makes the same DTensor of it, on its own mesh:

    stage 0, mesh (tensor=2) of ranks 0, 1   DTensor [Shard(1)] -> local -+
                                                                          | torch's send and receive
    stage 1, mesh (tensor=2) of ranks 2, 3   DTensor [Shard(1)] <- local -+

Gradients go back in the same layout, except that each rank gets the whole gradient of partial sums.
The first forward of a stage announces the layouts of its outputs through the store of the process
group.

May import: _torch.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shoal_dtensor import DTensor, Placement, Replicate
from shoal_dtensor.errors import LayoutError
from shoal_dtensor.internal import pytree
from shoal_mesh import DeviceMesh

from ._torch import default_store

GetMesh = Callable[[tuple[str, ...]], DeviceMesh]


@dataclass(frozen=True, slots=True)
class BorderLayout:
    """The layout of one DTensor at a border, without the mesh.

    Each of the two stages has its own mesh.
    """

    axes: tuple[str, ...]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shard_order: Any

    @property
    def of_gradient(self) -> list[Placement]:
        """The placements of gradients; each rank has the whole gradient of partial sums."""
        return [Replicate() if p.is_partial() else p for p in self.placements]


# of a stage's outputs, None for a plain tensor
Layouts = tuple[BorderLayout | None, ...]

# how many pipelines of each process group this rank has prepared
_prepared: Counter[tuple[int, ...]] = Counter()


class StageBorder:
    """The two borders of one stage: hooks around its module's forward.

    Args:
        stage: a stage of `torch.distributed.pipelining`.
        number: the number of the pipeline among the pipelines of its process group, equal on all of
            its ranks.
        get_mesh: given names of axes, returns the mesh of this stage's ranks; by default the mesh
            of a parameter.
    """

    def __init__(self, stage: Any, number: int, get_mesh: GetMesh | None) -> None:
        self._module: nn.Module = stage.submod
        self._get_mesh = get_mesh or self._mesh_of_parameters
        ranks = dist.get_process_group_ranks(stage.group)
        key = f"shoal/pipeline/{'-'.join(map(str, ranks))}/{number}"
        self._own_key = f"{key}/{stage.stage_index}"
        self._key_before = f"{key}/{stage.stage_index - 1}"
        self._announced: Layouts | None = None
        self._received: Layouts | None = None
        if not stage.is_first:
            self._module.register_forward_pre_hook(self._receive, prepend=True)
        if not stage.is_last:
            self._module.register_forward_hook(self._send)

    def _receive(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make DTensors of the local tensors that the previous stage has sent; a hook."""
        if self._received is None:
            self._received = pickle.loads(default_store().get(self._key_before))
        found = list(args)
        for i, layout in enumerate(self._received[: len(args)]):
            if layout is not None and not isinstance(args[i], DTensor):
                found[i] = self._dtensor_of(args[i], layout)
        return tuple(found)

    def _send(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Pass the local tensors on, and announce their layouts; a hook."""
        outputs, structure = pytree.tree_flatten(output)
        layouts = tuple(map(_layout_of, outputs))
        if self._announced is None:
            default_store().set(self._own_key, pickle.dumps(layouts))
            self._announced = layouts
        if layouts != self._announced:
            raise LayoutError(
                f"a pipeline stage returned {layouts}, but {self._announced} before; the next "
                "stage expects the same layout for every microbatch: redistribute the output"
            )
        local = [_local_of(tensor, layout) for tensor, layout in zip(outputs, layouts, strict=True)]
        return pytree.tree_unflatten(local, structure)

    def _dtensor_of(self, local: Tensor, layout: BorderLayout) -> DTensor:
        return DTensor.from_local(
            local,
            self._get_mesh(layout.axes),
            layout.placements,
            shape=layout.shape,
            stride=layout.stride,
            grad_placements=layout.of_gradient,
            shard_order=layout.shard_order,
        )

    def _mesh_of_parameters(self, axes: tuple[str, ...]) -> DeviceMesh:
        for param in self._module.parameters():
            if isinstance(param, DTensor) and {*axes} <= {*param.device_mesh.axis_names}:
                return param.device_mesh[axes]
        raise LayoutError(
            f"a pipeline stage receives a DTensor on the axes {axes}, but no parameter of the "
            "stage is on these axes: pass prepare_pipeline(schedule, get_mesh=lambda axes: "
            "mesh[axes])"
        )


def watch_borders(stages: Sequence[Any], get_mesh: GetMesh | None) -> None:
    """Have DTensors cross the borders of a pipeline's stages on this rank."""
    groups = {tuple(dist.get_process_group_ranks(stage.group)) for stage in stages}
    _prepared.update(groups)
    for stage in stages:
        number = _prepared[tuple(dist.get_process_group_ranks(stage.group))]
        StageBorder(stage, number, get_mesh)


def _layout_of(tensor: Any) -> BorderLayout | None:
    if not isinstance(tensor, DTensor):
        return None
    spec = tensor.spec
    return BorderLayout(
        spec.mesh.axis_names,
        tuple(spec.placements),
        tuple(spec.shape),
        tuple(spec.stride),
        shard_order=spec.shard_order,
    )


def _local_of(tensor: Any, layout: BorderLayout | None) -> Any:
    return tensor if layout is None else tensor.to_local(grad_placements=layout.of_gradient)
