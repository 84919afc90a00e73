"""What collectives are called with: which communicator is meant, and refusals of what cannot be right.

Everything here raises before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from .._torch import ProcessGroup
from ..argument_types import kind_of, require
from ..errors import CollectiveError, CollectiveTypeError, DimError
from ..groups.process_groups import Comm
from ..mesh.device_mesh import DeviceMesh

Along = Comm | tuple[DeviceMesh, int | str | tuple[int | str, ...]]


def resolve(along: Along) -> Comm:
    """The communicator meant by a Comm or a (mesh, axes) pair.

    Raises:
        CollectiveTypeError: it is neither.
    """
    if isinstance(along, Comm):
        return along
    taken = "a collective runs along a Comm or a pair (mesh, axes)"
    require(along, tuple, taken + _hint(along), CollectiveTypeError)
    if len(along) != 2:
        raise CollectiveTypeError(f"{taken}, got a tuple of {len(along)}")
    require(along[0], DeviceMesh, taken, CollectiveTypeError)
    return along[0].comm(along[1])


def _hint(along: object) -> str:
    """What to pass instead of a mesh or a process group alone."""
    if isinstance(along, DeviceMesh):
        return f" (of a mesh alone pass one or several axes too: {', '.join(along.axis_names)})"
    return " (comm_over(ranks) has the group of these ranks)" if isinstance(along, ProcessGroup) else ""


def check_operand(tensor: Tensor, name: str = "tensor") -> None:
    """Refuse what is no tensor, and what would lose a gradient.

    Raises:
        CollectiveTypeError: it is no tensor.
        CollectiveError: it requires grad where gradients are recorded, or is not dense.
    """
    require(tensor, Tensor, f"{name} of a collective is a torch.Tensor", CollectiveTypeError)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(
            "this collective has no gradient, and the tensor requires one: use shoal_mesh.differentiable, "
            "or pass tensor.detach() where no gradient is wanted"
        )
    if tensor.is_sparse or tensor.is_sparse_csr:  # not `layout`, which dynamo refuses to read in a backward
        raise CollectiveError(f"collectives send dense tensors, got layout {tensor.layout}: call to_dense() first")


def normal_dim(tensor: Tensor, dim: int) -> int:
    """A dim counted from the front.

    Raises:
        CollectiveTypeError: it is no integer.
        DimError: the tensor does not have it.
    """
    if type(dim) is not int:
        require(dim, int, "a dim of a tensor is an int", CollectiveTypeError)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise DimError(
            f"no dim {dim} in a tensor of shape {tuple(tensor.shape)}: "
            + (f"dims are {-tensor.ndim} to {tensor.ndim - 1}" if tensor.ndim else "it has no dims, call view(1) first")
        )
    return dim % tensor.ndim


def refuse_uneven(tensor: Tensor, dim: int, comm: Comm) -> NoReturn:
    """CollectiveError: the dim does not divide."""
    raise CollectiveError(
        f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} equal blocks along "
        f"{'x'.join(comm.axes)}: use the form with sizes (ending in _v)"
    )


def check_sizes(sizes: Sequence[int], comm: Comm, name: str = "sizes") -> int:
    """The sum of sizes that are one non-negative count per rank.

    Raises:
        CollectiveTypeError: they are no sequence of integers.
        CollectiveError: there are not as many as ranks, or one is negative.
    """
    taken = "the sizes of blocks are a sequence of int, one per rank"
    try:
        total, fits = sum(sizes), len(sizes) == comm.size
    except (TypeError, RuntimeError):  # RuntimeError: of torch's own mesh, of sparse tensors
        raise CollectiveTypeError(f"{taken}, got {kind_of(sizes)} as {name}") from None
    if type(total) is not int:
        require(total, int | torch.SymInt, taken, CollectiveTypeError)
    if not fits or min(sizes) < 0:
        raise CollectiveError(f"{name} are one non-negative count for each of {comm.size} ranks, got {tuple(sizes)}")
    return total


def check_root(index: int, comm: Comm, name: str) -> None:
    """Refuse what is no index of a rank along the communicator.

    Raises:
        CollectiveTypeError: it is no integer.
        CollectiveError: there is no such rank.
    """
    if type(index) is not int:
        require(index, int, f"{name} is the index of a rank along {'x'.join(comm.axes)}", CollectiveTypeError)
    if not 0 <= index < comm.size:
        raise CollectiveError(
            f"{name} {index} is no rank along {'x'.join(comm.axes)}: indices are 0 to {comm.size - 1}, "
            "counted along the axes (not global ranks)"
        )
