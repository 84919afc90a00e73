"""A call of a collective: what it takes, and what it returns.

Which communicator is meant, and refusals of what cannot be right, which raise before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from .._torch import ProcessGroup
from ..argument_types import kind_of, require, require_each
from ..errors import CollectiveError, CollectiveTypeError, DimError
from ..events import observed, observers
from ..groups.process_groups import Comm
from ..mesh.device_mesh import DeviceMesh
from ..transport import Pending

Along = Comm | tuple[DeviceMesh, int | str | tuple[int | str, ...]]


def resolve(along: Along) -> Comm:
    """The communicator meant by a Comm or a (mesh, axes) pair; CollectiveTypeError for anything else."""
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


def checked(tensor: Tensor, along: Along, name: str = "tensor") -> Comm:
    """The communicator of a collective of a tensor, which is one that can be sent (`check_operand`)."""
    comm = along if type(along) is Comm else resolve(along)
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.is_sparse:
        check_operand(tensor, name)
    return comm


def checked_each(tensors: Sequence[Tensor], along: Along, taken: str) -> Comm:
    """`checked` of a list of tensors; `taken` says what the call takes."""
    require_each(tensors, Tensor, taken, CollectiveTypeError)
    comm = resolve(along)
    for tensor in tensors:
        checked(tensor, comm)
    return comm


def check_operand(tensor: Tensor, name: str = "tensor") -> None:
    """CollectiveError for what is no dense tensor, and for one that would lose a gradient."""
    require(tensor, Tensor, f"{name} of a collective is a torch.Tensor", CollectiveTypeError)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise CollectiveError(
            "this collective has no gradient, and the tensor requires one: use shoal_mesh.differentiable, "
            "or pass tensor.detach() where no gradient is wanted"
        )
    if tensor.is_sparse or tensor.is_sparse_csr:  # not `layout`, which dynamo refuses to read in a backward
        raise CollectiveError(f"collectives send dense tensors, got layout {tensor.layout}: call to_dense() first")


def normal_dim(tensor: Tensor, dim: int) -> int:
    """A dim counted from the front; DimError if the tensor does not have it."""
    if type(dim) is not int:
        require(dim, int, "a dim of a tensor is an int", CollectiveTypeError)
    ndim = tensor.ndim
    if not -ndim <= dim < ndim:
        raise DimError(
            f"no dim {dim} in a tensor of shape {tuple(tensor.shape)}: "
            + (f"dims are {-ndim} to {ndim - 1}" if ndim else "it has no dims, call view(1) first")
        )
    return dim % ndim


def refuse_uneven(tensor: Tensor, dim: int, comm: Comm) -> NoReturn:
    """CollectiveError: the dim does not divide."""
    raise CollectiveError(
        f"dim {dim} of shape {tuple(tensor.shape)} does not divide into {comm.size} equal blocks along "
        f"{'x'.join(comm.axes)}: use the form with sizes (ending in _v)"
    )


def check_sizes(sizes: Sequence[int], comm: Comm, name: str = "sizes") -> int:
    """The sum of sizes; CollectiveError unless they are one non-negative count per rank."""
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


def are_equal(sizes: Sequence[int]) -> bool:
    """Whether all are one size. Symbols of a compiler are among them, which have no hash."""
    return all(size == sizes[0] for size in sizes)


def check_root(index: int, comm: Comm, name: str) -> None:
    """CollectiveError for what is no index of a rank along the communicator."""
    if type(index) is not int:
        require(index, int, f"{name} is the index of a rank along {'x'.join(comm.axes)}", CollectiveTypeError)
    if not 0 <= index < comm.size:
        raise CollectiveError(
            f"{name} {index} is no rank along {'x'.join(comm.axes)}: indices are 0 to {comm.size - 1}, "
            "counted along the axes (not global ranks)"
        )


def collective(  # noqa: PLR0913  # the fields of an event, and how it runs
    op: str,
    tensor: Tensor,
    comm: Comm,
    start: Callable[[], Pending],
    async_op: bool,
    reduce_op: str = "",
    same: Mapping[str, object] = MappingProxyType({}),
    flow: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor | Pending:
    """What a collective of one tensor returns; observers hear of it as one.

    Args:
        op: name of the functional collective.
        tensor: what this rank puts in; of a communicator of one rank a copy of it is the result.
        comm: the communicator.
        start: starts the collective between several ranks.
        async_op: return a `Pending` at once.
        reduce_op: `sum`, ... or '' for collectives that only move data.
        same: what is equal on all ranks, by name, beside the shape, or with another one if this rank's differs.
        flow: elements for each rank and from each rank, where ranks send different amounts.
    """
    if comm.size == 1:
        own = tensor.clone(memory_format=torch.contiguous_format)
        return Pending(own, None) if async_op else own
    if observers:
        facts = {"shape": tensor.shape, **same} if flow is None else same
        return observed(lambda: start() if async_op else start().wait(), op, comm, (tensor,), reduce_op, facts, flow)
    pending = start()
    return pending if async_op else pending.wait()
