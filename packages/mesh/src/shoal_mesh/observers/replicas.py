"""check_replicas: whether tensors that should be equal on all ranks are."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from ..argument_types import require
from ..collectives.calls import Along, check_operand, resolve
from ..collectives.even import all_gather
from ..errors import CollectiveTypeError, LockstepError
from ..groups.world import bytes_of, device_of


def check_replicas(tensor: Tensor | Mapping[str, Tensor], comm: Along, what: str = "tensor") -> None:
    """Raise LockstepError on all ranks unless the ranks' tensors are equal, bit for bit.

    One all-gather of 8 bytes per tensor and rank; names, shapes and dtypes count too.

    Args:
        tensor: this rank's replica, of any shape and dtype, or several by name: a `state_dict` after a step.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor, or of those that hold them, in the error.

    Raises:
        LockstepError: tensors differ; the error names the first of them and the ranks that differ from most others.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> launch(lambda: check_replicas(torch.ones(3), comm_over((0, 1)), "weight"), 2)
        [None, None]
    """
    comm = resolve(comm)
    require(tensor, Tensor | Mapping, "check_replicas compares a torch.Tensor or a dict of them", CollectiveTypeError)
    require(what, str, "the name of a tensor is a string", CollectiveTypeError)
    named = {what: tensor} if isinstance(tensor, Tensor) else {f"{what}.{n}": t for n, t in tensor.items()}
    for each in named.values():
        require(each, Tensor, "check_replicas compares tensors", CollectiveTypeError)
        check_operand(each.detach())
    digests = [_digest(name, each.detach()) for name, each in named.items()]
    counts = all_gather(torch.tensor([len(digests)], device=device_of(comm.group)), comm).tolist()
    if len(set(counts)) > 1:
        raise LockstepError(f"ranks {list(comm.ranks)} compare {counts} tensors of {what} along {'x'.join(comm.axes)}")
    if not digests:
        return
    rows = all_gather(torch.tensor(digests, device=device_of(comm.group)), comm).view(comm.size, -1).t().tolist()
    for (name, tensor), every in zip(named.items(), rows, strict=True):
        if len(set(every)) > 1:
            usual = Counter(every).most_common(1)[0][0]
            wrong = tuple(rank for rank, row in zip(comm.ranks, every, strict=True) if row != usual)
            raise LockstepError(
                f"replicas of {name} {tuple(tensor.shape)} differ along {'x'.join(comm.axes)}: ranks {list(wrong)} "
                f"have other bits than {[rank for rank in comm.ranks if rank not in wrong]}",
                wrong,
            )


def _digest(name: str, tensor: Tensor) -> int:
    """A number of the name, shape, dtype and bits of a tensor."""
    replica = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    digest = hashlib.blake2b(f"{name}{tuple(replica.shape)}{replica.dtype}".encode(), digest_size=8)
    digest.update(bytes_of(replica))
    return int.from_bytes(digest.digest(), "little", signed=True)
