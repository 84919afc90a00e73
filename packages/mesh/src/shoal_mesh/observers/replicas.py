"""Comparisons of tensors of ranks: `check_replicas` for equal bits, `check_distinct` for others."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from ..argument_types import name_ranks, require, suggests_keywords
from ..collectives import calls, even
from ..collectives.calls import Along
from ..errors import CollectiveTypeError, LockstepError
from ..groups.world import bytes_of, device_of
from ..watch.recorder import number_of_text


@suggests_keywords()
def check_replicas(
    tensor: Tensor | Mapping[str, Tensor], comm: Along, what: str = "tensor"
) -> None:
    """Raise LockstepError on all ranks unless the ranks' tensors are equal, bit for bit.

    It takes one all-gather of 8 bytes per tensor and rank. Names, shapes and dtypes are compared
    too.

    Args:
        tensor: this rank's replica, of any shape and dtype, or several by name: a `state_dict`
            after a step.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor, or of the object that holds the tensors, in the error.

    Raises:
        LockstepError: tensors differ; the error names the first of them and the ranks that differ
            from most others.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> launch(lambda: check_replicas(torch.ones(3), comm_over((0, 1)), "weight"), 2)
        [None, None]
    """
    comm = calls.resolve(comm)
    replicas = _named_tensors("check_replicas", tensor, what)
    digests = [_digest(name, replica.detach()) for name, replica in replicas.items()]
    device = device_of(comm.group)
    axes = "x".join(comm.axes)
    counts = even.all_gather(torch.tensor([len(digests)], device=device), comm).tolist()
    if len(set(counts)) > 1:
        raise LockstepError(
            f"ranks {list(comm.ranks)} compare {counts} tensors of {what} along {axes}"
        )
    if not digests:
        return
    gathered = even.all_gather(torch.tensor(digests, device=device), comm)
    # a row for each tensor with the digests of all ranks; 2 ranks, 3 tensors: (6,) -> (3, 2)
    digests_by_tensor = gathered.view(comm.size, -1).t().tolist()
    for (name, replica), digests_of_ranks in zip(replicas.items(), digests_by_tensor, strict=True):
        if len(set(digests_of_ranks)) == 1:
            continue
        ((usual, _),) = Counter(digests_of_ranks).most_common(1)
        by_rank = dict(zip(comm.ranks, digests_of_ranks, strict=True))
        wrong = tuple(rank for rank, digest in by_rank.items() if digest != usual)
        others = [rank for rank in comm.ranks if rank not in wrong]
        raise LockstepError(
            f"replicas of {name} {tuple(replica.shape)} differ along {axes}: ranks {list(wrong)} "
            f"differ from {others}",
            wrong,
        )


@suggests_keywords()
def check_distinct(
    tensor: Tensor | Mapping[str, Tensor], comm: Along, what: str = "tensor"
) -> None:
    """Raise LockstepError on all ranks if the tensors of two ranks are equal, bit for bit.

    Ranks along a data axis read different rows. It takes one all-gather of 8 bytes per rank. Ranks
    with several tensors differ if one of the tensors does, and a rank without elements differs from
    all others.

    Args:
        tensor: this rank's tensor, of any shape and dtype, or several by name: a batch.
        comm: a communicator, or (mesh, axes).
        what: the name of the tensor, or of the object that holds the tensors, in the error.

    Raises:
        LockstepError: tensors are equal; the error names the ranks.
        CollectiveTypeError: an argument of a wrong type.

    Example:
        >>> def example() -> None:
        ...     rank = torch.distributed.get_rank()
        ...     check_distinct(torch.arange(3) + 3 * rank, comm_over((0, 1)), "rows")
        >>> launch(example, 2)
        [None, None]
    """
    comm = calls.resolve(comm)
    tensors = _named_tensors("check_distinct", tensor, what)
    digests: list[object] = [_digest(name, value.detach()) for name, value in tensors.items()]
    if not any(value.numel() for value in tensors.values()):
        digests.append(f"rank {comm.rank} without elements")
    own_number = torch.tensor([number_of_text(str(digests))], device=device_of(comm.group))
    ranks_by_digest = defaultdict(list)
    for rank, digest in zip(comm.ranks, even.all_gather(own_number, comm).tolist(), strict=True):
        ranks_by_digest[digest].append(rank)
    equal = [ranks for ranks in ranks_by_digest.values() if len(ranks) > 1]
    if equal:
        groups = " and on ".join([name_ranks(ranks) for ranks in equal])
        raise LockstepError(
            f"{what} has equal values on {groups} along {'x'.join(comm.axes)}",
            tuple(sorted(itertools.chain.from_iterable(equal))),
        )


def _named_tensors(
    function: str, tensor: Tensor | Mapping[str, Tensor], what: str
) -> dict[str, Tensor]:
    """Return the tensors to compare by name; refuse values of other types."""
    allowed = f"{function} compares a torch.Tensor or a dict of them"
    require(tensor, Tensor | Mapping, allowed, CollectiveTypeError)
    require(what, str, "the name of a tensor is a string", CollectiveTypeError)
    if isinstance(tensor, Tensor):
        named = {what: tensor}
    else:
        named = {f"{what}.{name}": value for name, value in tensor.items()}
    for value in named.values():
        require(value, Tensor, f"{function} compares tensors", CollectiveTypeError)
        calls.check_operand(value.detach())
    return named


def _digest(name: str, tensor: Tensor) -> int:
    """Return a number of the name, shape, dtype and bits of a tensor."""
    replica = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    header = f"{name}{tuple(replica.shape)}{replica.dtype}"
    digest = hashlib.blake2b(header.encode(), digest_size=8)
    digest.update(bytes_of(replica))
    return int.from_bytes(digest.digest(), "little", signed=True)
