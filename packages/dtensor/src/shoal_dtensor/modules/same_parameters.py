"""Check that all ranks of a mesh have the same parameters, before shards of them are sent.

The ranks compare digests of the names, shapes and dtypes of their parameters. If these differ, the
ranks exchange the descriptions, and raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from shoal_mesh import Comm, DeviceMesh, LockstepError, all_gather
from shoal_mesh.internal import is_traced

_ABSENT = "no parameter"


def check_same_parameters(
    function: str, parameters: Iterable[tuple[str, Tensor]], mesh: DeviceMesh, ranks: str
) -> None:
    """Raise LockstepError unless all ranks of a mesh have the same parameters.

    The error names the first parameter that differs. The check takes one all-gather of 16 bytes: a
    digest of the descriptions and their length, 8 bytes each. If ranks differ, another all-gather
    sends the descriptions. A parameter that is frozen on one rank and trained on another differs
    too. Nothing is checked on one rank, and on a rank outside of the mesh. With a fake backend,
    under a FakeTensorMode or while the call is traced nothing is checked either, because no values
    arrive from other ranks.

    Args:
        function: the name of the function that is called, for the error.
        parameters: the parameters of this rank, with their names.
        mesh: the mesh.
        ranks: the ranks of the mesh in words, for the error.
    """
    if mesh.get_coordinate() is None:
        return
    comm = mesh.comm(tuple(range(mesh.ndim)))
    # `is_traced` is true under a FakeTensorMode too.
    if "fake" in comm.backend or comm.size == 1 or is_traced():
        return
    rows = [_describe(name, parameter) for name, parameter in parameters]
    text = "\n".join(rows).encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    device = mesh.device_type
    # int64 is signed
    digest_as_int64 = int.from_bytes(digest, "little", signed=True)
    # One row (1, 2) from each rank: the all-gather joins them along dim 0 to (ranks, 2).
    fingerprint = torch.tensor([[digest_as_int64, len(text)]], device=device)
    gathered = all_gather(fingerprint, comm).tolist()
    if all(row == gathered[0] for row in gathered):
        return
    lengths = [length for _, length in gathered]
    texts = _gather_texts(text, lengths, comm, device=device)
    difference = _first_difference([text.splitlines() for text in texts], comm)
    raise LockstepError(
        f"{function}: all {ranks} must have the same parameters in the same order, and agree which "
        f"are trained. The first parameter that differs: {difference}"
    )


def _describe(name: str, parameter: Tensor) -> str:
    state = "trained" if parameter.requires_grad else "frozen"
    return f"{name}: {tuple(parameter.shape)} {parameter.dtype}, {state}"


def _gather_texts(text: bytes, lengths: Sequence[int], comm: Comm, *, device: str) -> list[str]:
    """Return the texts of all ranks.

    An all-gather sends rows of one length, so each rank pads its text to the longest text.
    """
    # at least one byte, because `torch.frombuffer` refuses an empty buffer
    longest = max(*lengths, 1)
    padded = bytearray(text.ljust(longest, b" "))
    row = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    rows = all_gather(row.unsqueeze(0), comm).cpu()
    pairs = zip(rows, lengths, strict=True)
    return [bytes(row[:length].tolist()).decode() for row, length in pairs]


def _first_difference(descriptions: Sequence[Sequence[str]], comm: Comm) -> str:
    """Describe the first position at which the parameters of the ranks differ.

    Args:
        descriptions: for each rank of the communicator, the descriptions of its parameters.
        comm: the communicator.
    """
    # one description from each rank, of the parameters at one position
    for one_per_rank in zip_longest(*descriptions, fillvalue=_ABSENT):
        if len({*one_per_rank}) == 1:
            continue
        ranks_with: dict[str, list[int]] = {}
        for rank, description in zip(comm.ranks, one_per_rank, strict=True):
            ranks_with.setdefault(description, []).append(rank)
        return "; ".join(
            f"{description} on ranks {ranks}" for description, ranks in ranks_with.items()
        )
    raise AssertionError("the digests differ")
