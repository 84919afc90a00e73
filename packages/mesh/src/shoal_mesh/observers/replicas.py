"""check_replicas: whether tensors that should be equal on all ranks are."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor

from ..argument_types import require
from ..collectives.even import all_gather
from ..collectives.operands import Along, check_operand, resolve
from ..errors import CollectiveTypeError, LockstepError
from ..groups.world import bytes_of

__all__ = ["check_replicas"]


def check_replicas(tensor: Tensor, comm: Along, what: str = "tensor") -> None:
    """Raise LockstepError on all ranks unless the ranks' tensors are equal, bit for bit.

    One all-gather of 16 bytes per rank.

    Args:
        tensor: this rank's replica, of any shape and dtype.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor in the error.

    Raises:
        LockstepError: shapes, dtypes or bits differ; the error names the ranks that differ from most others.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> launch(lambda: check_replicas(torch.ones(3), comm_over((0, 1)), "weight"), 2)
        [None, None]
    """
    comm = resolve(comm)
    require(tensor, Tensor, "check_replicas compares a torch.Tensor", CollectiveTypeError)
    require(what, str, "the name of a tensor is a string", CollectiveTypeError)
    check_operand(tensor.detach())
    replica = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    digest = hashlib.blake2b(f"{tuple(replica.shape)}{replica.dtype}".encode(), digest_size=16)
    digest.update(bytes_of(replica))
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8).to(tensor.device)
    every = [bytes(row) for row in all_gather(own, comm).view(comm.size, -1).tolist()]
    counts = Counter(every)
    if len(counts) == 1:
        return
    usual = counts.most_common(1)[0][0]
    wrong = [rank for rank, row in zip(comm.ranks, every, strict=True) if row != usual]
    raise LockstepError(
        f"replicas of {what} {tuple(tensor.shape)} differ along {'x'.join(comm.axes)}: ranks {wrong} have other bits "
        f"than {[rank for rank in comm.ranks if rank not in wrong]}"
    )
