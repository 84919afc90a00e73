"""The axes that shard the activations of a tree of modules: axes of its batch, and of its styles.

For example, a model with `replicate` on the axis "data", and with Linears that have styles on the
axis "tensor", has the axes "data" and "tensor".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from torch import nn

from shoal_mesh import DeviceMesh

from ..modules.forwards import ModuleForward
from .activation_axes import ActivationAxes

# the attribute with the data axes of a module whose inputs are shards of a batch
_BATCH_AXES = "_shoal_batch_axes"


def set_batch_axes(module: nn.Module, batch_axes: DeviceMesh) -> None:
    """Declare that a module gets shards of a batch along some axes."""
    module.__dict__[_BATCH_AXES] = batch_axes


def find_batch_axes(root: nn.Module) -> DeviceMesh | None:
    """Return the axes over which a module gets shards of a batch.

    They are taken from the first module in its tree that has them.
    """
    for module in root.modules():
        batch_axes: DeviceMesh | None = vars(module).get(_BATCH_AXES)
        if batch_axes is not None:
            return batch_axes
    return None


def find_axes(batch: DeviceMesh | None, forwards: Iterable[ModuleForward]) -> list[DeviceMesh]:
    """Return the axes that shard the activations of a tree, each as a mesh of one axis.

    Args:
        batch: the axes of the batch; None without data parallelism.
        forwards: the forwards of the modules with a style.
    """
    meshes = [] if batch is None else [batch]
    for outer in forwards:
        outermost_first: list[DeviceMesh] = []
        forward: ModuleForward | None = outer
        while forward is not None:
            outermost_first.append(forward.mesh)
            forward = forward.inner
        # Axes are in the order in which the program applied the styles: the innermost first.
        meshes += reversed(outermost_first)
    return [*dict.fromkeys(axis for mesh in meshes for axis in _single_axes(mesh))]


def join_axes(
    axes: Sequence[DeviceMesh], batch: DeviceMesh | None, forwards: Iterable[ModuleForward]
) -> ActivationAxes:
    """Return the axes on which a watch describes layouts.

    Args:
        axes: the axes that shard activations, each as a mesh of one axis.
        batch: the axes of the batch; None without data parallelism.
        forwards: the forwards of the modules with a style.
    """
    independent_axes = [mesh for mesh in axes if not _divides(mesh, batch)]
    joint_mesh = (
        independent_axes[0]
        if len(independent_axes) == 1
        else DeviceMesh.concatenate(independent_axes)
    )
    index = {mesh: position for position, mesh in enumerate(independent_axes)}
    # A style on several axes shards its inputs along the first axis.
    for forward in forwards:
        first = _single_axes(forward.mesh)[0]
        if first in index:
            index.setdefault(forward.mesh, index[first])
    return ActivationAxes(joint_mesh, index)


@lru_cache(maxsize=256)
def _divides(mesh: DeviceMesh, batch: DeviceMesh | None) -> bool:
    """Tell whether an axis is a part of an axis of the batch, such as one that divides experts.

    Rows along it are rows of the batch, whose axes already describe where they are.
    """
    if batch is None or mesh.size() == 1:
        return False
    axes_of_batch = _single_axes(batch)
    if mesh in axes_of_batch:
        return False
    ranks = _ranks_of(mesh)
    return any(ranks <= _ranks_of(axis) for axis in axes_of_batch)


def _ranks_of(mesh: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def _single_axes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return each axis of a mesh as a mesh of its own."""
    return [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.axis_names]
